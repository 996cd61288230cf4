package redisfront

import (
	"context"
	"errors"
	"sync"
	"time"

	"github.com/sony/gobreaker/v2"

	"github.com/pgonce/pgonce/idempotency"
)

// probeInterval is how often a Redis that failed is tried again. No caller is: it would wait for the timeout.
const probeInterval = 250 * time.Millisecond

var errDegraded = errors.New("not asked: it failed a moment ago")

// breaker keeps callers away from something that failed once, until a probe of its own succeeds.
type breaker struct {
	name  string // in events
	emit  func(context.Context, idempotency.Event)
	try   func(context.Context, names) error
	state *gobreaker.TwoStepCircuitBreaker[any]
	// Both are for the one goroutine that probes and tells: nobody else calls emit, which is the program's own code and may
	// ask the front something.
	opened   chan struct{}
	suspects chan names

	mu     sync.Mutex
	cause  error  // of the last failure
	failed names  // what the last failure was about: in a cluster the probe goes to the same node
	stop   func() // ends the goroutine
	group  sync.WaitGroup
}

func newBreaker(name string, first names, emit func(context.Context, idempotency.Event), try func(context.Context, names) error) *breaker {
	ctx, cancel := context.WithCancel(context.Background())
	b := &breaker{
		name: name, emit: emit, try: try, stop: cancel, failed: first, opened: make(chan struct{}, 1), suspects: make(chan names, 1),
	}
	b.state = gobreaker.NewTwoStepCircuitBreaker[any](gobreaker.Settings{
		Timeout:     probeInterval,
		ReadyToTrip: func(gobreaker.Counts) bool { return true },
		OnStateChange: func(_ string, from, _ gobreaker.State) { // called with gobreaker's lock
			if from == gobreaker.StateClosed {
				select {
				case b.opened <- struct{}{}:
				default: // the goroutine is about to see it
				}
			}
		},
		IsExcluded: func(err error) bool { return errors.Is(err, errCallerGone) },
	})
	b.group.Go(func() { b.run(ctx) })
	return b
}

// errCallerGone marks a call that ended with its caller's context. Was it Redis that took too long? A probe finds out: where
// every caller is more impatient than the timeout, nobody else would.
var errCallerGone = errors.New("the caller is gone")

// pass lets a call through and is told how it ended, or says that Redis is not asked now.
func (b *breaker) pass() (done func(names, error), err error) {
	if b.degraded() {
		return nil, errDegraded
	}
	allowed, err := b.state.Allow()
	if err != nil {
		return nil, errDegraded
	}
	return func(n names, err error) { b.ended(n, err, allowed) }, nil
}

func (b *breaker) ended(n names, err error, allowed func(error)) {
	switch {
	case err == nil || concernsOneKey(err):
		allowed(nil)
		return
	case errors.Is(err, errCallerGone):
		select {
		case b.suspects <- n:
		default:
		}
	default:
		b.mu.Lock()
		b.cause, b.failed = err, n
		b.mu.Unlock()
	}
	allowed(err)
}

// concernsOneKey: Redis answered, and other keys may be well.
func concernsOneKey(err error) bool {
	var e *Error
	return errors.As(err, &e) && e.Code == CodeInvalid
}

func (b *breaker) degraded() bool { return b.state.State() != gobreaker.StateClosed }

func (b *breaker) run(ctx context.Context) {
	for {
		select {
		case <-ctx.Done():
			return
		case n := <-b.suspects:
			b.suspect(ctx, n)
		case <-b.opened:
			b.mu.Lock()
			cause := b.cause
			b.mu.Unlock()
			b.emit(ctx, idempotency.FrontDegraded{Front: b.name, Degraded: true, Err: cause})
			if b.probe(ctx) {
				b.emit(ctx, idempotency.FrontDegraded{Front: b.name})
			}
		}
	}
}

// suspect tries once what a caller had no time for.
func (b *breaker) suspect(ctx context.Context, n names) {
	if done, err := b.pass(); err == nil {
		err = b.try(ctx, n)
		if ctx.Err() != nil {
			err = nil // the front is closed
		}
		done(n, err)
	}
}

// probe tries until it works, or the front is closed.
func (b *breaker) probe(ctx context.Context) bool {
	ticker := time.NewTicker(probeInterval)
	defer ticker.Stop()
	for {
		select {
		case <-ctx.Done():
			return false
		case <-ticker.C:
		}
		done, err := b.state.Allow()
		if err != nil {
			continue // not yet
		}
		b.mu.Lock()
		n := b.failed
		b.mu.Unlock()
		err = b.try(ctx, n)
		done(err)
		if err == nil {
			return true
		}
	}
}

func (b *breaker) close() {
	b.stop()
	b.group.Wait()
}
