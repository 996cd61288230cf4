package txn

import (
	"context"
	"sync"
	"time"

	"github.com/pgonce/pgonce/idempotency"
)

// flights merges the concurrent calls of one key in this process: one of them, the leader, talks to PostgreSQL, the
// others wait for it without a connection. A leader that ends without an outcome (error, panic, cancellation) harms
// nobody: its followers try for themselves.
type flights struct {
	mu      sync.Mutex
	running map[idempotency.Key]*flight
}

type flight struct {
	fingerprint idempotency.Fingerprint // the leader's

	landed chan struct{} // guarded by flights.mu until the flight has landed; nil while nobody follows
	// Written before landed is closed.
	record *idempotency.Record // nil: no outcome to share
}

// join returns the key's flight, and whether the caller leads it.
func (f *flights) join(key idempotency.Key, fp idempotency.Fingerprint) (*flight, bool) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if running := f.running[key]; running != nil {
		if running.landed == nil {
			running.landed = make(chan struct{})
		}
		return running, false
	}
	own := &flight{fingerprint: fp}
	f.running[key] = own
	return own, true
}

// land ends the leader's flight. share says that record is committed and may be given to the followers.
func (f *flights) land(key idempotency.Key, own *flight, record idempotency.Record, share bool) {
	f.mu.Lock()
	delete(f.running, key)
	f.mu.Unlock()
	if own.landed == nil {
		return
	}
	if share {
		// A copy, made before the leader's caller gets the original and may write into it.
		shared := record.Clone()
		own.record = &shared
	}
	close(own.landed)
}

// wait returns when the flight has landed (true), or false when the time is over, or ctx's error.
func (f *flight) wait(ctx context.Context, limit time.Duration) (bool, error) {
	select {
	case <-f.landed:
		return true, nil
	default:
	}
	timer := time.NewTimer(max(limit, 0))
	defer timer.Stop()
	select {
	case <-f.landed:
		return true, nil
	case <-timer.C:
		return false, nil
	case <-ctx.Done():
		return false, context.Cause(ctx)
	}
}
