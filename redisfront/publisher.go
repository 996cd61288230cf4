package redisfront

import (
	"context"
	"errors"
	"sync"
	"sync/atomic"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/pgonce/pgonce/idempotency"
)

// What is queued behind the callers' backs at most. More is dropped: the entry is found missing by its next reader, and a
// mark ends by itself.
const (
	maxQueued      = 8192
	maxQueuedBytes = 32 << 20
	maxBatch       = 128
	drainTimeout   = 5 * time.Second
)

var (
	errQueueFull = errors.New("too much is waiting to be sent to Redis")
	errClosed    = errors.New("the front is closed")
)

// job is a script that nobody waits for, or only Evict does; without a script it is only waited for.
type job struct {
	script script
	names  names
	keys   []string
	args   []any
	size   int64
	done   chan<- error          // nil: nobody waits
	then   func(context.Context) // nil: nothing. Called when the script has run, or never will
}

// publisher sends jobs in the order in which they came, many in one round trip.
type publisher struct {
	front *Front
	bytes atomic.Int64
	ended chan struct{}

	mu     sync.Mutex // guards closed, and sends on queue against its close
	closed bool
	queue  chan job
}

func newPublisher(f *Front) *publisher {
	p := &publisher{front: f, queue: make(chan job, maxQueued), ended: make(chan struct{})}
	go p.run()
	return p
}

// add queues a job without waiting.
func (p *publisher) add(j job) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.closed {
		return errClosed
	}
	if p.bytes.Add(j.size) > maxQueuedBytes {
		p.bytes.Add(-j.size)
		return errQueueFull
	}
	select {
	case p.queue <- j:
		return nil
	default:
		p.bytes.Add(-j.size)
		return errQueueFull
	}
}

// close sends what is queued, for a bounded time.
func (p *publisher) close() error {
	p.mu.Lock()
	if !p.closed {
		p.closed = true
		close(p.queue)
	}
	p.mu.Unlock()
	timer := time.NewTimer(drainTimeout)
	defer timer.Stop()
	select {
	case <-p.ended:
		return nil
	case <-timer.C:
		return errors.New("redisfront: closed before everything was sent to Redis: what is missing is found by its next reader")
	}
}

func (p *publisher) run() {
	defer close(p.ended)
	batch := make([]job, 0, maxBatch)
	for first := range p.queue {
		batch = append(batch[:0], first)
	fill:
		for len(batch) < maxBatch {
			select {
			case next, open := <-p.queue:
				if !open {
					break fill
				}
				batch = append(batch, next)
			default:
				break fill
			}
		}
		p.send(context.Background(), batch) // no caller waits
		clear(batch)                        // the bytes may go
	}
}

// send sends a batch, and tells the breaker and whoever waits.
func (p *publisher) send(ctx context.Context, batch []job) {
	results := make([]error, len(batch))
	if done, err := p.front.breaker.pass(); err != nil {
		for i := range results {
			results[i] = err
		}
	} else {
		bounded, cancel := context.WithTimeout(ctx, p.front.config.Timeout)
		n, err := p.exchange(bounded, batch, results)
		cancel()
		done(n, err)
	}
	for i, j := range batch {
		p.bytes.Add(-j.size)
		if results[i] != nil && !errors.Is(results[i], errDegraded) {
			p.front.emit(ctx, idempotency.FrontFailed{Front: Name, Op: j.script.name, Err: results[i]})
		}
		if j.then != nil {
			j.then(ctx)
		}
		if j.done != nil {
			j.done <- results[i]
		}
	}
}

// exchange runs the batch's scripts and returns one of its failures, with what that was about.
func (p *publisher) exchange(ctx context.Context, batch []job, results []error) (names, error) {
	replies := make([]*redis.Cmd, len(batch))
	pipe := p.front.client.Pipeline()
	for i, j := range batch {
		if j.script.Script != nil {
			replies[i] = j.script.EvalSha(ctx, pipe, j.keys, j.args...)
		}
	}
	_, _ = pipe.Exec(ctx) // every reply has its own error
	// A server that has lost its scripts gets their text. All from the first one on, or their order would change: what ran
	// a first time runs a second time to the same end.
	again := p.front.client.Pipeline()
	for i, j := range batch {
		if replies[i] != nil && (again.Len() > 0 || redis.HasErrorPrefix(replies[i].Err(), "NOSCRIPT")) {
			replies[i] = j.script.Eval(ctx, again, j.keys, j.args...)
		}
	}
	if again.Len() > 0 {
		_, _ = again.Exec(ctx)
	}
	var about names
	var failure error
	for i, j := range batch {
		if replies[i] == nil {
			continue
		}
		values, err := replies[i].Slice()
		if err == nil {
			_, err = read(j.script, values)
		} else {
			err = failed(j.script.name, err)
		}
		if results[i] = err; err != nil && (failure == nil || !concernsOneKey(err)) {
			about, failure = j.names, err
		}
	}
	return about, failure
}
