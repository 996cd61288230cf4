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

// breaker keeps callers away from a Redis that failed once, until a probe of its own succeeds.
type breaker struct {
	name  string // in events
	emit  func(context.Context, idempotency.Event)
	try   func(context.Context, names) error // what every call needs
	state *gobreaker.TwoStepCircuitBreaker[any]

	mu     sync.Mutex
	cause  error  // of the last failure
	failed names  // what the last failure was about: in a cluster the probe goes to the same node
	closed bool   // the front is
	stop   func() // ends the probes
	group  sync.WaitGroup
}

func newBreaker(name string, first names, emit func(context.Context, idempotency.Event), try func(context.Context, names) error) *breaker {
	ctx, cancel := context.WithCancel(context.Background())
	b := &breaker{name: name, emit: emit, try: try, stop: cancel, failed: first}
	b.state = gobreaker.NewTwoStepCircuitBreaker[any](gobreaker.Settings{
		Timeout:     probeInterval,
		ReadyToTrip: func(gobreaker.Counts) bool { return true },
		OnStateChange: func(_ string, from, to gobreaker.State) {
			if from == gobreaker.StateClosed {
				b.opened(ctx)
			}
			if to == gobreaker.StateClosed {
				emit(ctx, idempotency.FrontDegraded{Front: name})
			}
		},
		// A caller that went away says nothing about Redis.
		IsExcluded: func(err error) bool { return errors.Is(err, errCallerGone) },
	})
	return b
}

// errCallerGone marks a call that ended with its caller's context.
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
	return func(n names, err error) {
		if err != nil && !errors.Is(err, errCallerGone) {
			b.mu.Lock()
			b.cause, b.failed = err, n
			b.mu.Unlock()
		}
		allowed(err)
	}, nil
}

func (b *breaker) degraded() bool { return b.state.State() != gobreaker.StateClosed }

// opened begins to probe.
func (b *breaker) opened(ctx context.Context) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.emit(ctx, idempotency.FrontDegraded{Front: b.name, Degraded: true, Err: b.cause})
	if !b.closed {
		b.group.Go(func() { b.probe(ctx) })
	}
}

// probe tries until it works.
func (b *breaker) probe(ctx context.Context) {
	ticker := time.NewTicker(probeInterval)
	defer ticker.Stop()
	for {
		select {
		case <-ctx.Done():
			return
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
			return
		}
	}
}

func (b *breaker) close() {
	b.mu.Lock()
	b.closed = true
	b.mu.Unlock()
	b.stop()
	b.group.Wait()
}
