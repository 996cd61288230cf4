package txn

import (
	"context"
	"errors"
	"fmt"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgonce/pgonce/idempotency"
)

// attempt is one transaction: acquire, run, complete, commit.
type attempt struct {
	call     *call
	pooled   *pgxpool.Conn
	guard    *guard
	acquired idempotency.Acquisition
	open     bool // a transaction may be open
}

// attempt returns an outcome; or errBusy, errAgain, ErrRestart, ErrOutcomeUnknown for the loop in tries; or the error
// that ends the call.
func (c *call) attempt(ctx context.Context) (outcome, error) {
	pooled, err := c.runner.pool.Acquire(ctx)
	if err != nil {
		if ctx.Err() != nil {
			return outcome{}, fmt.Errorf("txn: connect: %w", err)
		}
		return outcome{}, fmt.Errorf("%w: connect: %w", idempotency.ErrRestart, err)
	}
	a := &attempt{call: c, pooled: pooled}
	// Deferred: a panic or Goexit of the function rolls back on its way.
	defer a.release(ctx)
	return a.run(ctx)
}

func (a *attempt) run(ctx context.Context) (outcome, error) {
	c := a.call
	var err error
	a.guard, a.acquired, err = c.runner.acquire(ctx, a.pooled.Conn(), c.req.Key)
	if err != nil {
		return outcome{}, a.acquireFailed(ctx, err)
	}
	a.open = true
	switch v := a.acquired.Verdict(c.req.Fingerprint, c.tokens...); v {
	case idempotency.VerdictRun:
	case idempotency.VerdictInProgress:
		return outcome{}, errBusy
	default:
		return c.settle(v, a.acquired.Record)
	}
	if c.final != nil {
		return a.commit(ctx, a.failure(c.final))
	}
	done, err := a.runFunction(ctx)
	if err != nil {
		return outcome{}, err
	}
	return a.commit(ctx, done)
}

func (a *attempt) acquireFailed(ctx context.Context, err error) error {
	switch {
	case ctx.Err() != nil:
		return errors.Join(err, context.Cause(ctx))
	case idempotency.Restartable(err):
		// Also a prepared statement that the session has lost: the next attempt must not meet this session again.
		_ = a.pooled.Conn().Close(ctx)
		return fmt.Errorf("%w: %w", idempotency.ErrRestart, err)
	case a.pooled.Conn().IsClosed():
		return fmt.Errorf("%w: %w", idempotency.ErrRestart, err)
	}
	return err
}

// runFunction runs the function and judges by the connection's state, and not only by what it returned, whether its
// transaction can be completed.
func (a *attempt) runFunction(ctx context.Context) (*idempotency.Completion, error) {
	c, conn := a.call, a.pooled.Conn()
	c.runs++
	tx := newHandedTx(conn)
	defer tx.end()
	result, err := c.body(withRunning(ctx, c.runner, tx), tx)
	tx.end()

	if tx.committed.Load() {
		return nil, c.transactionEnded(err)
	}
	if conn.IsClosed() {
		return nil, a.connectionLost(ctx, err)
	}
	if conn.PgConn().IsBusy() {
		return nil, errors.Join(errors.New("txn: the function returned while its rows or batch results were open: close them"), err)
	}
	switch conn.PgConn().TxStatus() {
	case 'I':
		return nil, c.transactionEnded(err)
	case 'E':
		return nil, a.aborted(err, result)
	}
	if err == nil {
		return a.success(result), nil
	}
	same, rollbackErr := c.runner.store.RollbackOf(ctx, conn, a.acquired)
	if rollbackErr == nil && !same {
		return nil, c.transactionEnded(err)
	}
	if idempotency.Restartable(err) {
		return nil, fmt.Errorf("%w: %w", idempotency.ErrRestart, err)
	}
	if c.final = finalFailure(err, result); c.final != nil {
		return nil, errAgain
	}
	return nil, err
}

// transactionEnded: part of what the function did may be committed. It is recorded as failed, so that nothing runs twice.
func (c *call) transactionEnded(err error) error {
	c.final = &failure{code: CodeTransactionEnded, message: idempotency.ErrTransactionEnded.Error(), cause: err}
	return errAgain
}

// connectionLost: nothing was committed, and another run may succeed. Not so where the server ended the session because
// the function took too long.
func (a *attempt) connectionLost(ctx context.Context, err error) error {
	if err == nil {
		err = errors.New("txn: connection lost while the function ran")
	}
	if ctx.Err() != nil {
		return errors.Join(err, context.Cause(ctx))
	}
	if last := a.guard.lastError.Load(); last != nil {
		err = errors.Join(err, last)
		switch last.Code {
		case "25P03", "25P04", "57014": // idle_in_transaction_session_timeout, transaction_timeout, query_canceled
			return err
		}
	}
	a.call.ghost = true
	return fmt.Errorf("%w: %w", idempotency.ErrRestart, err)
}

// aborted: an SQL error has ended the transaction, whatever the function made of it.
func (a *attempt) aborted(err error, result payload) error {
	last := a.guard.lastError.Load()
	switch {
	case last != nil && idempotency.Restartable(last):
		return fmt.Errorf("%w: %w", idempotency.ErrRestart, errors.Join(err, last))
	case err == nil && last != nil:
		return fmt.Errorf("%w: %w", idempotency.ErrAborted, last)
	case err == nil:
		return idempotency.ErrAborted
	}
	if a.call.final = finalFailure(err, result); a.call.final != nil {
		return errAgain
	}
	return err
}

// commit records the outcome and commits, on a context that the request cannot cancel.
func (a *attempt) commit(ctx context.Context, done *idempotency.Completion) (outcome, error) {
	c, conn := a.call, a.pooled.Conn()
	// From here on the record may exist: whoever resolves an unknown outcome looks for this token too.
	c.tokens = append(c.tokens, done.AttemptToken)
	detached, cancel := context.WithTimeout(context.WithoutCancel(ctx), c.runner.config.CommitTimeout)
	defer cancel()
	a.guard.commitSent.Store(true)
	record, err := c.runner.store.Complete(detached, conn, done)
	if !conn.IsClosed() {
		a.guard.commitSent.Store(false)
	}
	switch {
	case err == nil:
		a.open = false
		return outcome{record: record, own: true, fresh: true}, nil
	case errors.Is(err, idempotency.ErrOutcomeUnknown):
		// The connection must not be used again: COMMIT's answer may still come.
		a.open = false
		_ = conn.Close(canceled) //nolint:contextcheck // ended on purpose, see there
		return outcome{}, err
	case errors.Is(err, idempotency.ErrRecordExists):
		return outcome{}, fmt.Errorf("%w: %w", errAgain, err)
	case errors.Is(err, idempotency.ErrTransactionEnded):
		return outcome{}, c.transactionEnded(nil)
	case idempotency.Restartable(err):
		return outcome{}, fmt.Errorf("%w: %w", idempotency.ErrRestart, err)
	}
	return outcome{}, err
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
	c := a.call
	return &idempotency.Completion{
		Request: c.req, Acquired: a.acquired, AttemptToken: idempotency.NewAttemptToken(), TraceID: c.traceID,
		ResultType: result.resultType, Result: result.data,
		Retention: c.op.Retention, ResultRetention: c.op.ResultRetention,
	}
}

// release rolls back what is open and gives the connection back; the pool drops it if it is closed or busy.
func (a *attempt) release(ctx context.Context) {
	if a.open && !a.pooled.Conn().PgConn().IsBusy() {
		_ = a.call.runner.store.Rollback(ctx, a.pooled.Conn()) // closed if it failed, which rolls back too
	}
	a.pooled.Release()
}
