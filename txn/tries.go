package txn

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/pgonce/pgonce/idempotency"
	"github.com/pgonce/pgonce/internal/failpoint"
)

// ghostWait is how long a call waits for a key that its own lost connection may still hold, whatever its Wait says.
const ghostWait = 5 * time.Second

// The pauses between restarts.
const (
	restartPause    = 10 * time.Millisecond
	restartPauseMax = 500 * time.Millisecond
)

// maxLooks bounds how often one call looks at a key again because somebody else recorded an outcome first. Every look
// sees that outcome, so more than one means that records vanish as fast as they come.
const maxLooks = 10

// tries makes attempts until one of them settles the call.
func (c *call) tries(ctx context.Context) step {
	defer c.leaveWait()
	c.asked = true
	if (c.req.Retry || c.op.duplicates.high()) && c.policy.Enforcement != idempotency.EnforcementShadow {
		// An error here is no reason to give up: the attempt meets it again, and can try again.
		if s, done, err := c.lookup(ctx); err == nil && done {
			return s
		}
	}
	return c.goOn(ctx, c.attempt(ctx))
}

// goOn makes attempts until one of them settles the call. s is what the last one has come to.
func (c *call) goOn(ctx context.Context, s step) step {
	defer c.leaveWait()
	wait := pauses{next: 2 * time.Millisecond, last: 50 * time.Millisecond}
	backoff := pauses{next: restartPause, last: restartPauseMax}
	for looks := 0; ; s = c.attempt(ctx) {
		if s.kind != kindBusy {
			c.busy = stopwatch{}
		}
		switch s.kind {
		case kindDone:
			c.resolved(ctx, s.out.own && !s.out.fresh) // fresh: a later run committed, not the lost one
			return s
		case kindAnswered:
			// Somebody else's record: no COMMIT of this call can succeed any more.
			c.resolved(ctx, false)
			return s
		case kindBusy:
			if c.passed && !c.ghost {
				// Of many processes that wait for the key one asks PostgreSQL again and again, and the others the front.
				c.passed = false
				if s, done := c.askFar(ctx); done {
					return s
				}
			}
			if c.rival && !c.ghost {
				return c.unresolved(c.rivalled(s))
			}
			if !c.ghost && !c.enterWait() || c.waitOver() { // a ghost's key is our own: no waiter for somebody else
				return c.unresolved(step{kind: kindBusy, err: c.inProgress()})
			}
			if cause := wait.sleep(ctx); cause != nil {
				return c.unresolved(step{kind: kindBusy, err: errors.Join(c.inProgress(), cause)})
			}
		case kindAgain:
			if looks++; looks > maxLooks {
				return c.unresolved(failed(s.err))
			}
		case kindUnknown:
			found, err := c.resolve(ctx, s.err)
			if found.kind == kindDone && err == nil {
				return found
			}
			if err != nil {
				return c.unresolved(failed(err))
			}
			if end, over := c.again(ctx, &backoff, s.err); over {
				return end
			}
		case kindRestart:
			if end, over := c.again(ctx, &backoff, s.err); over {
				return end
			}
		default:
			return c.unresolved(s)
		}
	}
}

// again counts a restart and pauses. over: that was the last one.
func (c *call) again(ctx context.Context, backoff *pauses, err error) (end step, over bool) {
	if c.restarts++; c.restarts > c.runner.config.MaxRetries {
		return c.unresolved(failed(fmt.Errorf("txn: gave up after %d runs: %w", c.runs, err))), true
	}
	c.emit(ctx, idempotency.Restarted{Key: c.req.Key, Runs: c.runs, Err: err})
	if cause := backoff.sleep(ctx); cause != nil {
		return c.unresolved(failed(errors.Join(err, cause))), true
	}
	return step{}, false
}

// waitOver reports whether the caller has waited long enough for whoever holds the key.
func (c *call) waitOver() bool {
	if c.batched && !c.ghost && !c.unknown.running() {
		return true // the keys behind it would wait too
	}
	if !c.busy.running() {
		c.busy = startStopwatch()
	}
	if c.unknown.running() {
		// The holder is most likely our own COMMIT on its way: its answer is worth waiting for.
		return c.unknown.elapsed() >= c.runner.config.CommitTimeout
	}
	if c.ghost {
		return c.busy.elapsed() >= max(c.wait, ghostWait)
	}
	waited := c.started
	if c.runs > 0 {
		waited = c.busy // the time the function took was no waiting
	}
	return waited.elapsed() >= c.wait
}

// unresolved is the end of a call without a record. If a COMMIT of it is unresolved, only a record could prove that it
// will never commit, so its outcome is unknown, whatever else went wrong.
func (c *call) unresolved(s step) step {
	if !c.unknown.running() {
		return s
	}
	if s.kind == kindBusy {
		// Not wrapped: "in progress" would be a weaker answer than the one that counts.
		return step{kind: kindUnknown, err: fmt.Errorf("%w: %v", idempotency.ErrOutcomeUnknown, s.err)} //nolint:errorlint // hidden on purpose
	}
	return step{kind: kindUnknown, err: fmt.Errorf("%w: %w", idempotency.ErrOutcomeUnknown, s.err)}
}

// commitLost notes that a COMMIT of this call was sent and its answer never came. From then on its time runs.
func (c *call) commitLost(ctx context.Context, cause error) {
	if !c.unknown.running() {
		c.unknown = startStopwatch()
		c.emit(ctx, idempotency.CommitUnknown{Key: c.req.Key, Err: cause})
	}
	c.ghost = true
}

// resolve finds out what a lost COMMIT did. Without an outcome and an error, no attempt of this call has committed so
// far; the next attempt then waits for the old backend, if it is still there, by asking for the key again.
func (c *call) resolve(ctx context.Context, cause error) (step, error) {
	none := step{kind: kindAgain}
	c.commitLost(ctx, cause)
	budget := c.runner.config.CommitTimeout - c.unknown.elapsed()
	// Not the request's context: a client that hung up has no bearing on what was committed.
	detached, cancel := context.WithTimeout(context.WithoutCancel(ctx), budget)
	defer cancel()
	pause := pauses{next: 10 * time.Millisecond, last: 250 * time.Millisecond}
	failpoint.Hit(failpoint.ResolveBefore)
	for {
		record, found, err := c.lookForAttempts(detached)
		if err == nil && found {
			failpoint.Hit(failpoint.ResolveAfter)
			c.resolved(ctx, true)
			return step{out: outcome{record: record, own: true}}, nil
		}
		if err == nil && c.unlocked {
			return none, cause // its session may still be on its way to commit, and holds nothing that would tell
		}
		if err == nil {
			return none, nil
		}
		if pause.sleep(detached) != nil {
			return none, errors.Join(cause, err)
		}
	}
}

func (c *call) lookForAttempts(ctx context.Context) (idempotency.Record, bool, error) {
	conn, err := c.runner.pool.Acquire(ctx)
	if err != nil {
		return idempotency.Record{}, false, err
	}
	defer conn.Release()
	if err := c.learnEpoch(ctx, conn.Conn()); err != nil {
		return idempotency.Record{}, false, err
	}
	record, found, err := c.runner.store.LookupAttempt(ctx, conn.Conn(), c.req.Key, c.tokens)
	if err == nil && !found && c.without {
		record, found, err = c.runner.store.LookupBypass(ctx, conn.Conn(), c.req.Key, c.tokens)
	}
	return record, found, err
}

// resolved tells that a lost COMMIT is accounted for, if there was one.
func (c *call) resolved(ctx context.Context, committed bool) {
	if c.unknown.running() {
		c.emit(ctx, idempotency.CommitResolved{Key: c.req.Key, Committed: committed, Duration: c.unknown.elapsed()})
		c.unknown = stopwatch{}
	}
}
