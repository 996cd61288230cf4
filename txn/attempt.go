package txn

import (
	"context"
	"errors"
	"fmt"
	"strings"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/pgonce/pgonce/idempotency"
	"github.com/pgonce/pgonce/internal/failpoint"
	"github.com/pgonce/pgonce/internal/pgguard"
	"github.com/pgonce/pgonce/internal/pgsource"
)

// attempt is one transaction: acquire, run, complete, commit.
type attempt struct {
	call     *call
	pooled   pgsource.Lent
	guard    *pgguard.Guard
	acquired idempotency.Acquisition
	bypass   *idempotency.Bypass // nil: the outcome is recorded
	open     bool                // a transaction may be open
	running  bool                // the function was entered and has not returned
}

func (c *call) attempt(ctx context.Context) step {
	a, s := c.connect(ctx)
	if a == nil {
		return s
	}
	// Deferred: a panic or Goexit of the function rolls back on its way.
	defer a.release(ctx)
	return a.run(ctx)
}

// connect takes a connection for an attempt, or says why there is none.
func (c *call) connect(ctx context.Context) (*attempt, step) {
	failpoint.Hit(failpoint.AcquireBefore)
	pooled, err := c.runner.pool.Acquire(ctx)
	if c.away = err != nil; c.away {
		err = fmt.Errorf("txn: connect: %w", err)
		if ctx.Err() != nil { // a caller that gave up says nothing about the server
			return nil, failed(err)
		}
		c.doubtEpoch()
		if refusedForGood(err) {
			return nil, failed(err)
		}
		return nil, restart(err)
	}
	return &attempt{call: c, pooled: pooled}, step{}
}

// refusedForGood: the server answers, and will answer the same the next time: wrong password or database, no permission.
func refusedForGood(err error) bool {
	var server *pgconn.PgError
	return errors.As(err, &server) && (strings.HasPrefix(server.Code, "28") || strings.HasPrefix(server.Code, "3D") ||
		strings.HasPrefix(server.Code, "42"))
}

func (a *attempt) run(ctx context.Context) step {
	c := a.call
	var err error
	a.guard, a.acquired, err = c.acquire(ctx, a.pooled.Conn())
	if err != nil {
		return a.acquireFailed(ctx, err)
	}
	a.open = true
	v, err := a.byPolicy(ctx, a.pooled.Conn(), a.acquired.Verdict(c.req.Fingerprint, c.tokens...))
	if err != nil {
		return a.acquireFailed(ctx, err)
	}
	switch v {
	case idempotency.VerdictRun:
	case idempotency.VerdictInProgress:
		if c.endedFence == 0 {
			return step{kind: kindBusy}
		}
		// What this call has committed by itself is recorded without the lock: whoever has it must not commit a second time,
		// and PREPARE TRANSACTION keeps it. The unique key decides.
		a.acquired.Fence = c.endedFence
	case idempotency.VerdictOwn:
		// Read again by resolve, which also proves that it is replicated.
		return step{kind: kindUnknown, err: idempotency.ErrOutcomeUnknown}
	default:
		return c.settle(v, a.acquired.Record)
	}
	if err := c.learnEpochInside(ctx, a.pooled.Conn()); err != nil {
		c.fronted = false // no call fails for the fronts' sake: once more, without them
		return restart(err)
	}
	failpoint.Hit(failpoint.AcquireAfter)
	c.leaveWait()
	if c.final != nil {
		failpoint.Hit(failpoint.FinalComplete)
		return a.commit(ctx, a.failure(c.final))
	}
	done, s := a.runFunction(ctx)
	if done == nil {
		return s
	}
	return a.commit(ctx, done)
}

// acquire makes the connection's guard ready and starts the transaction that asks for the key.
func (c *call) acquire(ctx context.Context, conn *pgx.Conn) (*pgguard.Guard, idempotency.Acquisition, error) {
	g, err := c.makeReady(ctx, conn)
	if err != nil {
		return g, idempotency.Acquisition{}, err
	}
	a, err := c.store.Acquire(ctx, conn, c.req.Key, c.runner.config.Isolation)
	// A token that was good when the function began stays good for this call, however late it ends.
	a.RequireIssued = c.op.RequireIssued && c.runs == 0
	return g, a, err
}

func (c *call) makeReady(ctx context.Context, conn *pgx.Conn) (*pgguard.Guard, error) {
	g, err := guardOf(conn)
	if err != nil {
		return nil, err
	}
	g.LastError.Store(nil)
	g.MayHaveCommitted.Store(false)
	return g, c.learnEpoch(ctx, conn)
}

func (a *attempt) acquireFailed(ctx context.Context, err error) step {
	closed := a.pooled.Conn().IsClosed()
	switch {
	case ctx.Err() != nil:
		return failed(errors.Join(err, context.Cause(ctx)))
	case idempotency.Restartable(err):
		a.forgetStatements(ctx, err)
		return restart(err)
	case closed:
		a.call.ghost = true // the session may live on for a moment, and hold the lock
		a.call.doubtEpoch()
		return restart(err)
	}
	return failed(err)
}

// runFunction runs the function and judges by the connection's state, and not only by what it returned, whether its
// transaction can be completed.
func (a *attempt) runFunction(ctx context.Context) (*idempotency.Completion, step) {
	c, conn := a.call, a.pooled.Conn()
	if c.lease == nil {
		c.runs++
		c.entered = startStopwatch()
	}
	c.inHand = idempotency.AttemptToken{} // the run overwrites it
	tx := newHandedTx(conn)
	defer tx.end()
	a.running = true
	failpoint.Hit(failpoint.FunctionBefore)
	result, err := c.body(withRunning(ctx, c, tx), tx)
	failpoint.Hit(failpoint.FunctionAfter)
	a.running = false
	tx.end()

	if conn.IsClosed() {
		if a.guard.MayHaveCommitted.Load() {
			return nil, a.transactionEnded(err)
		}
		return nil, a.connectionLost(ctx, err)
	}
	if conn.PgConn().IsBusy() {
		return nil, failed(errors.Join(errors.New("txn: the function returned while its rows or batch results were open: close them"), err))
	}
	switch conn.PgConn().TxStatus() {
	case 'I':
		return nil, a.transactionEnded(err)
	case 'E':
		return nil, a.aborted(err, result)
	}
	if err == nil {
		return a.success(result), step{}
	}
	same, rollbackErr := c.runner.store.RollbackOf(ctx, conn, a.acquired)
	if rollbackErr == nil && !same || rollbackErr != nil && a.guard.MayHaveCommitted.Load() {
		return nil, a.transactionEnded(err)
	}
	c.ghost = c.ghost || rollbackErr != nil // the closed session may hold the lock for a moment
	if idempotency.Restartable(err) {
		return nil, restart(err)
	}
	if c.final = finalFailure(err, result); c.final != nil {
		failpoint.Hit(failpoint.FinalBefore)
		return nil, step{kind: kindAgain, err: err}
	}
	return nil, failed(err)
}

// transactionEnded: part of what the function did may be committed. It is recorded as failed, so that a retry does not
// run it again.
func (a *attempt) transactionEnded(err error) step {
	c := a.call
	c.endedFence = max(a.acquired.Fence, 1) // without the lock there is none
	c.final = &failure{code: CodeTransactionEnded, message: idempotency.ErrTransactionEnded.Error(), cause: err}
	return step{kind: kindAgain, err: idempotency.ErrTransactionEnded}
}

// connectionLost: nothing was committed, and another run may succeed. Not so where the server ended the session because
// the function took too long.
func (a *attempt) connectionLost(ctx context.Context, err error) step {
	if err == nil {
		err = errors.New("txn: connection lost while the function ran")
	}
	if ctx.Err() != nil {
		return failed(errors.Join(err, context.Cause(ctx)))
	}
	if last := a.guard.LastError.Load(); last != nil {
		err = errors.Join(err, last)
		if last.Code == "25P03" || last.Code == "25P04" { // idle_in_transaction_session_timeout, transaction_timeout
			return failed(err)
		}
	}
	a.call.ghost = true
	a.call.doubtEpoch()
	return restart(err)
}

// aborted: an SQL error has ended the transaction, whatever the function made of it.
func (a *attempt) aborted(err error, result payload) step {
	last := a.guard.LastError.Load()
	switch {
	case a.guard.MayHaveCommitted.Load():
		return a.transactionEnded(err) // an aborted transaction cannot be asked whether it is still ours
	case last != nil && idempotency.Restartable(last):
		return restart(errors.Join(err, last))
	case err == nil && last != nil:
		return failed(fmt.Errorf("%w: %w", idempotency.ErrAborted, last))
	case err == nil:
		return failed(idempotency.ErrAborted)
	}
	if a.call.final = finalFailure(err, result); a.call.final != nil {
		failpoint.Hit(failpoint.FinalBefore)
		return step{kind: kindAgain, err: err}
	}
	return failed(err)
}

// commit records the outcome and commits, on a context that the request cannot cancel.
func (a *attempt) commit(ctx context.Context, done *idempotency.Completion) step {
	c, conn := a.call, a.pooled.Conn()
	// From here on the record may exist: whoever resolves an unknown outcome looks for this token too.
	c.tokens, c.inHand = append(c.tokens, done.AttemptToken), done.AttemptToken
	c.noteBypass(a)
	var record idempotency.Record
	err := a.sendCommit(ctx, func(ctx context.Context) (err error) {
		record, err = a.complete(ctx, conn, done)
		return err
	})
	switch {
	case err == nil:
		return step{out: outcome{record: record, own: true, fresh: true}}
	case errors.Is(err, idempotency.ErrOutcomeUnknown):
		return step{kind: kindUnknown, err: err}
	case errors.Is(err, idempotency.ErrRecordExists):
		return step{kind: kindAgain, err: err}
	case errors.Is(err, idempotency.ErrTransactionEnded):
		return a.transactionEnded(nil)
	case errors.Is(err, idempotency.ErrLeaseLost):
		return step{kind: kindAnswered, err: err}
	case idempotency.Restartable(err):
		a.forgetStatements(ctx, err)
		return restart(err)
	}
	return failed(err)
}

// sendCommit has send complete and commit, on a context that the request cannot cancel.
func (a *attempt) sendCommit(ctx context.Context, send func(context.Context) error) error {
	conn := a.pooled.Conn()
	detached, cancel := context.WithTimeout(context.WithoutCancel(ctx), a.call.runner.config.CommitTimeout)
	defer cancel()
	failpoint.Hit(failpoint.CompleteBefore)
	err := a.guard.Commit(conn, func() error { return send(detached) })
	switch {
	case err == nil:
		failpoint.Hit(failpoint.CommitAfter)
		a.open = false
	case errors.Is(err, idempotency.ErrOutcomeUnknown):
		// The connection must not be used again: COMMIT's answer may still come.
		a.open = false
		_ = conn.Close(canceled) //nolint:contextcheck // ended on purpose, see there
		a.call.doubtEpoch()
	}
	return err
}

func (a *attempt) complete(ctx context.Context, conn *pgx.Conn, done *idempotency.Completion) (idempotency.Record, error) {
	if l := a.call.lease; l != nil {
		return a.call.store.CompleteLease(ctx, conn, &l.record, done)
	}
	return a.call.store.Complete(ctx, conn, done)
}

// forgetStatements: if the session has lost our statements, the next attempt must neither meet this session again nor
// rely on another, where the function would throw them away again.
func (a *attempt) forgetStatements(ctx context.Context, err error) {
	if idempotency.StatementLost(err) {
		a.call.store = a.call.store.Unnamed()
		a.open = false
		_ = a.pooled.Conn().Close(ctx)
	}
}

// canceled makes Close skip the polite goodbye, which a stalled connection would not answer.
var canceled = func() context.Context {
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	return ctx
}()

func (a *attempt) success(result payload) *idempotency.Completion {
	done := a.completion(result)
	done.State = idempotency.StateSuccess
	return done
}

func (a *attempt) failure(f *failure) *idempotency.Completion {
	done := a.completion(f.result)
	done.State, done.ErrorCode, done.ErrorMessage = idempotency.StateFailed, f.code, f.message
	return done
}

func (a *attempt) completion(result payload) *idempotency.Completion {
	done := a.call.completion(result)
	done.Acquired, done.Bypass = a.acquired, a.bypass
	return done
}

func (c *call) completion(result payload) *idempotency.Completion {
	done := &idempotency.Completion{
		Request: c.req, TraceID: c.traceID, ResultType: result.resultType, Result: result.data,
		Retention: c.op.Retention, ResultRetention: c.op.ResultRetention,
	}
	if c.lease != nil {
		done.AttemptToken = c.lease.record.AttemptToken
	} else {
		done.AttemptToken = idempotency.NewAttemptToken()
	}
	return done
}

// release rolls back what is open and gives the connection back; the pool drops it if it is closed or busy.
func (a *attempt) release(ctx context.Context) {
	if a.open && !a.pooled.Conn().PgConn().IsBusy() {
		failpoint.Hit(failpoint.RollbackBefore)
		_ = a.call.runner.store.Rollback(ctx, a.pooled.Conn()) // closed if it failed, which rolls back too
	}
	// Asked before the connection goes back: whoever gets it next forgets it.
	ended := a.running && a.guard.MayHaveCommitted.Load()
	a.pooled.Release()
	if ended {
		// A panic or Goexit behind the function's own COMMIT: recorded before it goes on, so that a retry does not run again.
		a.transactionEnded(nil)
		if a.call.lease != nil {
			_ = a.call.failLease(ctx, a.call.final, false)
			return
		}
		_ = a.call.tries(context.WithoutCancel(ctx))
	}
}
