package txn

import (
	"context"
	"math/rand/v2"
	"time"
)

// stopwatch measures how long this process has waited. It never decides ownership or expiry: those are PostgreSQL's.
type stopwatch struct{ since time.Time }

func startStopwatch() stopwatch {
	return stopwatch{since: time.Now()} //nolint:forbidigo // a duration of this process, not a point in time
}

func (s stopwatch) running() bool { return !s.since.IsZero() }

func (s stopwatch) elapsed() time.Duration {
	if !s.running() {
		return 0
	}
	return time.Since(s.since) //nolint:forbidigo // the same
}

// timeLeft is what a caller's deadline leaves.
func timeLeft(ctx context.Context) (left time.Duration, limited bool) {
	deadline, limited := ctx.Deadline()
	if limited {
		left = time.Until(deadline) //nolint:forbidigo // a duration of this process
	}
	return left, limited
}

// pauses double from the first to the last, with jitter, so that callers which were stopped together do not
// come back together.
type pauses struct{ next, last time.Duration }

// sleep pauses, or returns the cause of ctx's end.
func (p *pauses) sleep(ctx context.Context) error {
	d := p.next/2 + rand.N(p.next)
	p.next = min(p.next*2, p.last)
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
		return nil
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}
