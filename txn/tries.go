package txn

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/pgonce/pgonce/idempotency"
)

// ghostWait is how long a call waits for a key that its own lost connection may still hold, whatever its Wait says.
const ghostWait = 5 * time.Second

// maxLooks bounds how often one call looks at a key again because somebody else recorded an outcome first. Every look
// sees that outcome, so more than one means that records vanish as fast as they come.
const maxLooks = 10

// tries makes attempts until one of them settles the call.
func (c *call) tries(ctx context.Context) (outcome, error) {
	if c.req.Retry || c.op.duplicates.high() {
		if out, done, err := c.lookup(ctx); done {
			return out, err
		}
	}
	wait := pauses{next: 2 * time.Millisecond, last: 50 * time.Millisecond}
	backoff := pauses{next: 10 * time.Millisecond, last: 500 * time.Millisecond}
	waiting, looks := false, 0
	defer func() {
		if waiting {
			c.runner.waiters.Add(-1)
		}
	}()
	for {
		out, err := c.attempt(ctx)
		if !errors.Is(err, errBusy) {
			c.busy = stopwatch{}
		}
		switch {
		case err == nil:
			c.resolved(ctx, out.own && !out.fresh) // fresh: a later run committed, not the lost one
			return out, nil
		case errors.Is(err, errBusy):
			if !waiting && !c.ghost && !c.enterWait() { // a ghost's key is our own: no waiter for somebody else
				return outcome{}, c.ended(c.inProgress())
			}
			waiting = waiting || !c.ghost
			if c.waitOver() {
				return outcome{}, c.ended(c.inProgress())
			}
			if cause := wait.sleep(ctx); cause != nil {
				return outcome{}, c.ended(errors.Join(c.inProgress(), cause))
			}
		case errors.Is(err, idempotency.ErrOutcomeUnknown):
			out, found, resolveErr := c.resolve(ctx, err)
			if found || resolveErr != nil {
				return out, resolveErr
			}
		case errors.Is(err, errAgain):
			if looks++; looks > maxLooks {
				return outcome{}, c.ended(err)
			}
		case errors.Is(err, idempotency.ErrRestart):
			if c.restarts++; c.restarts > c.runner.config.MaxRetries {
				return outcome{}, c.ended(fmt.Errorf("txn: gave up after %d runs: %w", c.runs, err))
			}
			c.emit(ctx, idempotency.Restarted{Key: c.req.Key, Run: c.runs, Err: err})
			if cause := backoff.sleep(ctx); cause != nil {
				return outcome{}, c.ended(errors.Join(err, cause))
			}
		default:
			return outcome{}, c.ended(err)
		}
	}
}

// waitOver reports whether the caller has waited long enough for whoever holds the key.
func (c *call) waitOver() bool {
	if !c.busy.running() {
		c.busy = startStopwatch()
	}
	if c.unknown.running() {
		// The holder is most likely our own COMMIT on its way: its answer is worth waiting for.
		return c.unknown.elapsed() >= c.runner.config.CommitTimeout
	}
	if c.ghost {
		return c.busy.elapsed() >= max(c.op.Wait, ghostWait)
	}
	waited := c.started
	if c.runs > 0 {
		waited = c.busy // the time the function took was no waiting
	}
	return waited.elapsed() >= c.op.Wait
}

// ended is the error of a call that ends without a record. If a COMMIT of it is unresolved, only a record could prove
// that it will never commit, so its outcome is unknown, whatever else went wrong.
func (c *call) ended(err error) error {
	if c.unknown.running() && !errors.Is(err, idempotency.ErrOutcomeUnknown) && !errors.Is(err, idempotency.ErrMismatch) &&
		!errors.Is(err, idempotency.ErrResultExpired) {
		return fmt.Errorf("%w: %w", idempotency.ErrOutcomeUnknown, err)
	}
	return err
}

// resolve finds out what a lost COMMIT did. found is false if no attempt of this call has committed so far; the next
// attempt then waits for the old backend, if it is still there, by asking for the key again.
func (c *call) resolve(ctx context.Context, cause error) (out outcome, found bool, err error) {
	if !c.unknown.running() {
		c.unknown = startStopwatch()
	}
	c.ghost = true
	c.emit(ctx, idempotency.CommitUnknown{Key: c.req.Key, Err: cause})
	budget := c.runner.config.CommitTimeout - c.unknown.elapsed()
	// Not the request's context: a client that hung up has no bearing on what was committed.
	detached, cancel := context.WithTimeout(context.WithoutCancel(ctx), budget)
	defer cancel()
	pause := pauses{next: 10 * time.Millisecond, last: 250 * time.Millisecond}
	for {
		record, found, err := c.lookForAttempts(detached)
		if err == nil && found {
			c.resolved(ctx, true)
			return outcome{record: record, own: true}, true, nil
		}
		if err == nil {
			return outcome{}, false, nil
		}
		if pause.sleep(detached) != nil {
			return outcome{}, false, errors.Join(cause, err)
		}
	}
}

func (c *call) lookForAttempts(ctx context.Context) (idempotency.Record, bool, error) {
	conn, err := c.runner.pool.Acquire(ctx)
	if err != nil {
		return idempotency.Record{}, false, err
	}
	defer conn.Release()
	return c.runner.store.LookupAttempt(ctx, conn.Conn(), c.req.Key, c.tokens)
}

// resolved tells that a lost COMMIT is accounted for, if there was one.
func (c *call) resolved(ctx context.Context, committed bool) {
	if c.unknown.running() {
		c.emit(ctx, idempotency.CommitResolved{Key: c.req.Key, Committed: committed, Duration: c.unknown.elapsed()})
		c.unknown = stopwatch{}
	}
}
