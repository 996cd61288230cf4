package txn

import (
	"context"
	"errors"
	"fmt"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/pgonce/pgonce/idempotency"
	"github.com/pgonce/pgonce/internal/failpoint"
)

// codeError is recorded with a retryable failure: the error was not a Final.
const codeError = "pgonce.error"

// leaseTries asks for the key until the call is settled.
func (c *call) leaseTries(ctx context.Context) step {
	defer c.leaveWait()
	c.asked = true
	wait := pauses{next: 2 * time.Millisecond, last: 50 * time.Millisecond}
	// One for the whole call: when the answer to the first question is lost, the second one finds that the key is ours.
	token := idempotency.NewAttemptToken()
	for looks := 0; ; {
		a, asked, err := c.acquireLease(ctx, token)
		switch {
		case errors.Is(err, idempotency.ErrRecordExists) && looks < maxLooks:
			looks++ // of somebody who does not know the lock
			continue
		case err != nil:
			return failed(err)
		}
		switch a.Verdict {
		case idempotency.VerdictRun, idempotency.VerdictResolve:
			c.leaveWait()
			return c.runLeased(ctx, a, asked)
		case idempotency.VerdictInProgress:
			if !c.enterWait() || c.waitOver() {
				return step{kind: kindBusy, err: c.inProgress()}
			}
			if cause := wait.sleep(ctx); cause != nil {
				return step{kind: kindBusy, err: errors.Join(c.inProgress(), cause)}
			}
		default:
			return c.settle(a.Verdict, a.Record)
		}
	}
}

// acquireLease asks once, and again after a lost answer. asked is when: the lease runs from then at the earliest.
func (c *call) acquireLease(ctx context.Context, token idempotency.AttemptToken) (a idempotency.LeaseAcquisition, asked stopwatch, err error) {
	if ctx.Err() != nil {
		return a, asked, context.Cause(ctx)
	}
	failpoint.Hit(failpoint.AcquireBefore)
	err = c.runner.impatiently(ctx, func(bounded context.Context, conn *pgx.Conn) (err error) {
		if err := c.learnEpoch(bounded, conn); err != nil {
			return err
		}
		asked = startStopwatch()
		a, err = c.store.AcquireLease(bounded, conn, &idempotency.LeaseRequest{
			Request: c.req, AttemptToken: token, Lease: c.op.Lease, Takeover: c.op.Takeover, CanResolve: c.op.Resolver != nil, TraceID: c.traceID,
			RequireIssued: c.op.RequireIssued,
		})
		return err
	})
	return a, asked, err
}

// runLeased goes on as the owner of the key.
func (c *call) runLeased(ctx context.Context, a idempotency.LeaseAcquisition, asked stopwatch) step {
	failpoint.Hit(failpoint.AcquireAfter)
	c.lease = &Lease{record: a.Record, runner: c.runner, steps: map[string]idempotency.Step{}}
	c.tokens = append(c.tokens, a.Record.AttemptToken)
	defer c.lease.end()
	owned, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	var lost atomic.Bool // not asked of the cause: ctx may itself be of a function that has lost another key
	stop := c.keepLease(owned, asked, func(err error) {
		lost.Store(true)
		cancel(err)
	})
	// Also after a panic: what this attempt has begun is for the next one to find, and that should not wait for the lease.
	returned := false
	defer func() {
		stop()
		if !returned && !c.unknown.running() { // else a COMMIT of this attempt may have got through
			_ = c.failLease(ctx, &failure{code: codeError, message: "the function panicked"}, true)
		}
	}()
	steps, err := c.stepsBefore(owned)
	var found idempotency.Resolution
	switch {
	case err != nil:
	case a.Verdict == idempotency.VerdictResolve:
		found, err = c.op.Resolver.Ask(owned, a.Record.Clone(), steps)
	default:
		c.runs++
		c.entered = startStopwatch()
		failpoint.Hit(failpoint.FunctionBefore)
		err = c.foreign(owned, c.lease)
		failpoint.Hit(failpoint.FunctionAfter)
	}
	stop()
	c.lease.end()
	var s step
	switch {
	case lost.Load():
		s = c.leaseLost(ctx, err)
	case a.Verdict == idempotency.VerdictResolve:
		s = c.recordResolution(ctx, found, err)
	case err != nil:
		s = c.foreignFailed(ctx, err)
	default:
		s = c.commitLease(ctx, nil)
	}
	returned = true // commit may panic too
	return s
}

// stepsBefore are those of earlier attempts.
func (c *call) stepsBefore(ctx context.Context) (steps []idempotency.Step, err error) {
	if c.lease.record.Attempt == 1 {
		return nil, nil
	}
	err = c.runner.durably(ctx, func(ctx context.Context, conn *pgx.Conn) (err error) {
		steps, err = c.store.Steps(ctx, conn, &c.lease.record)
		return err
	})
	for _, one := range steps {
		c.lease.steps[one.Name] = one
	}
	return steps, err
}

// leaseLost is the end of an attempt whose key somebody else may own. What that one records is the key's outcome.
func (c *call) leaseLost(ctx context.Context, err error) step {
	if c.unknown.running() { // a COMMIT of this attempt may have got through before
		if r, found := c.ownRecord(ctx); found {
			return step{out: outcome{record: r, own: true}}
		}
	}
	if errors.Is(err, idempotency.ErrLeaseLost) {
		return step{kind: kindAnswered, err: err}
	}
	return step{kind: kindAnswered, err: errors.Join(idempotency.ErrLeaseLost, err)}
}

// ownRecord looks for an outcome that this attempt has recorded.
func (c *call) ownRecord(ctx context.Context) (r idempotency.Record, found bool) {
	_ = c.runner.durably(ctx, func(ctx context.Context, conn *pgx.Conn) (err error) {
		r, found, err = c.store.LookupAttempt(ctx, conn, c.req.Key, c.tokens)
		return err
	})
	return r, found && (r.State == idempotency.StateSuccess || !r.Retryable)
}

// foreignFailed records that the foreign function failed: for good if it says so.
func (c *call) foreignFailed(ctx context.Context, err error) step {
	if wrong := checkFinal(err); wrong != nil {
		err = errors.Join(wrong, plain(err))
	}
	if final := finalFailure(err, payload{}); final != nil {
		return c.failLease(ctx, final, false)
	}
	return c.failLease(ctx, &failure{code: codeError, message: err.Error(), cause: err}, true)
}

// failLease records a failure and is the call's end.
func (c *call) failLease(ctx context.Context, f *failure, retryable bool) step {
	done := c.completion(f.result)
	done.State, done.ErrorCode, done.ErrorMessage = idempotency.StateFailed, f.code, f.message
	failpoint.Hit(failpoint.FinalComplete)
	var record idempotency.Record
	err := c.runner.durably(ctx, func(ctx context.Context, conn *pgx.Conn) (err error) {
		record, err = c.store.FailLease(ctx, conn, &c.lease.record, done, retryable)
		return err
	})
	switch {
	case errors.Is(err, idempotency.ErrLeaseLost):
		return c.leaseLost(ctx, errors.Join(err, f.cause))
	case err != nil && retryable:
		return failed(errors.Join(f.cause, err)) // its lease ends by itself
	case err != nil:
		return step{kind: kindUnknown, err: fmt.Errorf("%w: %w", idempotency.ErrOutcomeUnknown, err)}
	case retryable:
		return failed(f.cause)
	}
	c.final, c.inHand = f, record.AttemptToken
	return step{out: outcome{record: record, own: true, fresh: true}}
}

// recordResolution records what the Resolver has found out about an attempt that died.
func (c *call) recordResolution(ctx context.Context, found idempotency.Resolution, err error) step {
	switch {
	case err != nil:
		// The key stays ours until the lease ends: nobody asks again before.
		return step{kind: kindBusy, err: errors.Join(c.inProgress(), fmt.Errorf("txn: resolver: %w", err))}
	case found.Outcome == idempotency.OutcomeUnknown:
		return step{kind: kindBusy, err: errors.Join(c.inProgress(), idempotency.ErrManual)}
	}
	result := payload{data: found.Result, resultType: found.ResultType}
	var end *failure
	if found.Outcome == idempotency.OutcomeFailed {
		end = &failure{code: found.Code, message: found.Message, result: result}
	} else if result.resultType == "" {
		return failed(&idempotency.ConfigError{Field: "Resolution.ResultType", Rule: "must name the result's form where the outcome is a success"})
	}
	record := c.lease.record.Clone()
	c.body = func(ctx context.Context, tx pgx.Tx) (payload, error) {
		return result, c.op.Resolver.Commit(ctx, tx, record, found)
	}
	s := c.commitLease(ctx, end)
	c.inHand = idempotency.AttemptToken{} // the value is in the record alone
	return s
}

// commitLease writes business rows and outcome: success, or end. What was called cannot be taken back, so the caller's
// context does not stop it.
func (c *call) commitLease(ctx context.Context, end *failure) step {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), max(c.runner.config.CommitTimeout, c.op.Lease))
	defer cancel()
	backoff := pauses{next: restartPause, last: restartPauseMax}
	for {
		s := c.commitAttempt(ctx, end)
		switch s.kind {
		case kindDone:
			c.resolved(ctx, s.out.own && !s.out.fresh)
			return s
		case kindAnswered: // the lease is lost, or it was this very attempt that has recorded
			s = c.leaseLost(ctx, s.err)
			c.resolved(ctx, s.kind == kindDone)
			return s
		case kindAgain: // a Final of commit, or a transaction that it has ended itself
			if c.unknown.running() {
				return c.unresolved(failed(s.err))
			}
			return c.failLease(ctx, c.final, false)
		case kindUnknown:
			found, err := c.resolve(ctx, s.err)
			if found.kind == kindDone && err == nil {
				return found
			}
			if err != nil {
				return c.unresolved(failed(err))
			}
		case kindBusy, kindRestart:
		default:
			if c.unknown.running() {
				return c.unresolved(s)
			}
			return c.failLease(ctx, &failure{code: codeError, message: s.err.Error(), cause: s.err}, true)
		}
		if c.restarts++; c.restarts > c.runner.config.MaxRetries && s.kind != kindBusy || backoff.sleep(ctx) != nil {
			if c.unknown.running() {
				return c.unresolved(failed(s.err))
			}
			return c.failLease(ctx, &failure{code: codeError, message: s.err.Error(), cause: s.err}, true)
		}
		c.emit(ctx, idempotency.Restarted{Key: c.req.Key, Runs: c.runs, Err: s.err})
	}
}

// commitAttempt is one transaction: lock the record, run commit, complete.
func (c *call) commitAttempt(ctx context.Context, end *failure) step {
	pooled, err := c.runner.pool.Acquire(ctx)
	if err != nil {
		return restart(fmt.Errorf("txn: connect: %w", err))
	}
	a := &attempt{call: c, pooled: pooled}
	defer a.release(ctx)
	conn := pooled.Conn()
	if a.guard, err = guardOf(conn); err != nil {
		return failed(err)
	}
	a.guard.LastError.Store(nil)
	a.guard.MayHaveCommitted.Store(false)
	if err := c.learnEpoch(ctx, conn); err != nil {
		return restart(err)
	}
	started, err := c.lockLease(ctx, a)
	switch {
	case errors.Is(err, idempotency.ErrLeaseLost):
		return step{kind: kindAnswered, err: err}
	case errors.Is(err, idempotency.ErrRowLocked):
		return step{kind: kindBusy, err: err}
	case err != nil:
		return a.acquireFailed(ctx, err)
	}
	a.acquired = idempotency.Acquisition{Locked: true, Fence: c.lease.record.Fence, Found: true, Record: c.lease.record, Started: started}
	done, s := a.runFunction(ctx)
	if done == nil {
		return s
	}
	if end != nil {
		done = a.failure(end)
		c.final = end
	}
	return a.commit(ctx, done)
}

func (c *call) lockLease(ctx context.Context, a *attempt) (started time.Time, err error) {
	conn := a.pooled.Conn()
	if _, err := conn.Exec(ctx, "BEGIN ISOLATION LEVEL "+string(c.runner.config.Isolation)+" READ WRITE"); err != nil {
		return started, err
	}
	a.open = true
	a.guard.MayHaveCommitted.Store(false) // our own BEGIN
	return c.store.LockLease(ctx, conn, c.lease.record.Owner())
}
