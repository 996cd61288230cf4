package redisfront

import (
	"context"
	"errors"
	"sync"
	"sync/atomic"
	"time"

	"github.com/pgonce/pgonce/idempotency"
)

// What is queued behind the callers' backs at most. More is dropped: the entry is found missing by its next reader, and a
// mark ends by itself.
const (
	maxQueued      = 8192
	maxQueuedBytes = 32 << 20
	maxBatch       = 128
	drainTimeout   = 5 * time.Second
	// batchPause is the least time from one batch to the next, unless it is full: a script in company is much cheaper for
	// both sides than one alone.
	batchPause = 4 * time.Millisecond
)

var (
	errQueueFull = errors.New("too much is waiting to be sent to Redis")
	errClosed    = errors.New("the front is closed")
)

// job is a script that nobody waits for, or only Evict does; without a script it is only waited for.
type job struct {
	command
	names names
	size  int64
	done  chan<- error          // nil: nobody waits
	then  func(context.Context) // nil: nothing. Called when the script has run, or never will
}

// publisher sends jobs in the order in which they came, many in one round trip.
type publisher struct {
	front *Front
	bytes atomic.Int64
	hurry chan struct{} // somebody waits
	ended chan struct{}

	mu     sync.Mutex // guards closed, and sends on queue against its close
	closed bool
	queue  chan job
}

func newPublisher(f *Front) *publisher {
	p := &publisher{front: f, queue: make(chan job, maxQueued), hurry: make(chan struct{}, 1), ended: make(chan struct{})}
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
		if j.done != nil {
			p.urge()
		}
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
		p.urge()
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

func (p *publisher) urge() {
	select {
	case p.hurry <- struct{}{}:
	default:
	}
}

// await waits until a batch may be sent.
func (p *publisher) await(pause time.Duration) {
	if pause <= 0 || len(p.queue) >= maxBatch-1 {
		return
	}
	timer := time.NewTimer(pause)
	defer timer.Stop()
	select {
	case <-timer.C:
	case <-p.hurry:
	}
}

func (p *publisher) run() {
	defer close(p.ended)
	batch := make([]job, 0, maxBatch)
	var sent time.Time
	for first := range p.queue {
		batch = append(batch[:0], first)
		p.await(batchPause - time.Since(sent))
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
		sent = time.Now()
		clear(batch) // the bytes may go
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
		done(p.exchange(ctx, batch, results))
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
	commands := make([]command, len(batch))
	for i, j := range batch {
		commands[i] = j.command
	}
	var about names
	var failure error
	for i, a := range p.front.exchangeAll(ctx, commands) {
		if results[i] = a.err; a.err != nil && (failure == nil || !concernsOneKey(a.err)) {
			about, failure = batch[i].names, a.err
		}
	}
	return about, failure
}
