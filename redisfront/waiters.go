package redisfront

import (
	"context"
	"sync"

	"github.com/redis/go-redis/v9"
)

// waiters wakes those who wait for a mark to go. All of them share one subscription, and so one connection.
type waiters struct {
	client redis.UniversalClient

	mu      sync.Mutex
	pubsub  *redis.PubSub
	waiting map[string]map[chan struct{}]bool // by channel of Redis
	closed  bool
	missed  bool // some that changed are not in changed

	// changed names channels that have got their first waiter, or lost their last one. They are subscribed to by a goroutine
	// of its own: that may dial, and nobody shall wait for it.
	changed chan string
	stop    context.CancelFunc
	group   sync.WaitGroup
}

// maxChanges are more channels than change in the time of a round trip. Where they are more, waiters look by themselves.
const maxChanges = 1024

func newWaiters(client redis.UniversalClient) *waiters {
	return &waiters{
		client: client, waiting: map[string]map[chan struct{}]bool{}, changed: make(chan string, maxChanges),
		stop: func() {},
	}
}

// join returns a channel that is closed at the next message of the Redis channel, and a function to leave.
func (w *waiters) join(channel string) (gone <-chan struct{}, leave func()) {
	own := make(chan struct{})
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.closed {
		return own, func() {} // its caller looks at the mark itself
	}
	if w.pubsub == nil {
		w.start()
	}
	all := w.waiting[channel]
	if all == nil {
		all = map[chan struct{}]bool{}
		w.waiting[channel] = all
		w.change(channel)
	}
	all[own] = true
	return own, func() { w.leave(channel, own) }
}

func (w *waiters) leave(channel string, own chan struct{}) {
	w.mu.Lock()
	defer w.mu.Unlock()
	all := w.waiting[channel]
	delete(all, own)
	if all != nil && len(all) == 0 {
		delete(w.waiting, channel)
		w.change(channel)
	}
}

func (w *waiters) change(channel string) {
	select {
	case w.changed <- channel:
	default:
		w.missed = true
	}
}

func (w *waiters) start() {
	ctx, cancel := context.WithCancel(context.Background())
	w.stop = cancel
	w.pubsub = w.client.Subscribe(ctx)
	w.group.Go(func() { w.receive(w.pubsub.Channel()) })
	w.group.Go(func() { w.subscribe(ctx) })
}

// subscribe makes the subscription what the waiters need. Errors are no matter: go-redis repeats it on its next connection,
// and waiters look by themselves.
func (w *waiters) subscribe(ctx context.Context) {
	subscribed := map[string]bool{}
	for {
		select {
		case <-ctx.Done():
			return
		case channel := <-w.changed:
			for one, wanted := range w.changes(channel, subscribed) {
				if wanted {
					subscribed[one] = true
					_ = w.pubsub.Subscribe(ctx, one)
				} else {
					delete(subscribed, one)
					_ = w.pubsub.Unsubscribe(ctx, one)
				}
			}
		}
	}
}

// changes says which channels are wanted and which are not any more: this one, and where some were missed all others.
func (w *waiters) changes(channel string, subscribed map[string]bool) map[string]bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	changes := map[string]bool{channel: w.waiting[channel] != nil}
	if w.missed {
		w.missed = false
		for one := range subscribed {
			if w.waiting[one] == nil {
				changes[one] = false
			}
		}
		for one := range w.waiting {
			if !subscribed[one] {
				changes[one] = true
			}
		}
	}
	return changes
}

func (w *waiters) receive(messages <-chan *redis.Message) {
	for m := range messages {
		w.mu.Lock()
		all := w.waiting[m.Channel]
		for own := range all {
			close(own)
			delete(all, own)
		}
		w.mu.Unlock()
	}
}

func (w *waiters) close() error {
	w.mu.Lock()
	w.closed = true
	pubsub := w.pubsub
	w.stop()
	w.mu.Unlock()
	if pubsub == nil {
		return nil
	}
	err := pubsub.Close()
	w.group.Wait()
	return err
}
