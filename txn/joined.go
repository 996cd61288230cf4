package txn

import (
	"context"
	"errors"
	"fmt"

	"github.com/jackc/pgx/v5"

	"github.com/pgonce/pgonce/idempotency"
)

// Joined is the outcome of an operation inside a transaction of the caller. It counts only once that has committed:
// AfterCommit tells.
type Joined[T any] struct {
	Result[T]
	call *call
	done bool // recorded before this transaction: nothing depends on its commit
}

// WithIdempotencyTx is WithIdempotency in a transaction that the caller has begun and will commit: use it where the key's
// operation is one part of a larger transaction. fn runs in a savepoint, so that its error leaves nothing and the caller
// may go on.
//
// The transaction is the caller's, with its isolation level and durability: nothing of it is changed, and its retries are
// the caller's too. It never waits: a key that somebody holds is idempotency.ErrInProgress at once. Under REPEATABLE READ
// and SERIALIZABLE a record younger than the caller's snapshot is idempotency.ErrRestartOuter.
//
// A Final comes back as an error with a Joined beside it: commit to keep it, roll back to forget it. Any other error has
// no Joined. Call AfterCommit after the commit. tx must be of the runner's database.
func WithIdempotencyTx[T any](ctx context.Context, r *Runner, tx pgx.Tx, req idempotency.Request, fn func(context.Context, pgx.Tx) (T, error)) (*Joined[T], error) {
	op, err := r.check(ctx, tx, req)
	if err != nil {
		return nil, err
	}
	var value T
	c := &call{runner: r, op: op, req: req, started: startStopwatch(), traceID: r.config.TraceID(ctx)}
	c.body = func(ctx context.Context, tx pgx.Tx) (result payload, err error) {
		value, err = fn(ctx, tx)
		return encodeOutcome(r.config.Codec, &op.Operation, value, err)
	}
	out, err := c.join(ctx, tx)
	if err != nil || !out.fresh {
		c.report(ctx, out, err)
	}
	if err != nil {
		return nil, err
	}
	res, err := resultOf(c, out, value)
	return &Joined[T]{Result: res, call: c, done: !out.own}, err
}

// join is the one attempt of a call in the caller's transaction.
func (c *call) join(ctx context.Context, tx pgx.Tx) (outcome, error) {
	acquired, err := c.runner.store.AcquireTx(ctx, tx, c.req.Key)
	if err != nil {
		return outcome{}, err
	}
	switch v := acquired.Verdict(c.req.Fingerprint); v {
	case idempotency.VerdictRun:
	case idempotency.VerdictInProgress:
		return outcome{}, c.inProgress()
	default:
		return c.settle(v, acquired.Record)
	}
	a := &attempt{call: c, acquired: acquired}
	done, err := a.runJoined(ctx, tx)
	if err != nil {
		return outcome{}, err
	}
	record, err := c.runner.store.CompleteTx(ctx, tx, done)
	if errors.Is(err, idempotency.ErrRecordExists) || idempotency.Restartable(err) {
		// We hold the lock and saw no record: it was committed after the caller's snapshot.
		return outcome{}, fmt.Errorf("%w: %w", idempotency.ErrRestartOuter, err)
	}
	if err != nil {
		return outcome{}, err
	}
	c.tokens = append(c.tokens, done.AttemptToken)
	return outcome{record: record, own: true, fresh: true}, nil
}

// runJoined runs the function in a savepoint.
func (a *attempt) runJoined(ctx context.Context, tx pgx.Tx) (*idempotency.Completion, error) {
	c := a.call
	savepoint, err := tx.Begin(ctx)
	if err != nil {
		return nil, fmt.Errorf("txn: begin savepoint: %w", err)
	}
	finished := false
	// Also for a panic or Goexit: the caller may recover and go on with its transaction.
	defer func() {
		if !finished {
			_ = savepoint.Rollback(context.WithoutCancel(ctx))
		}
	}()
	c.runs++
	inner := joinedTx{savepoint}
	result, err := c.body(withRunning(ctx, c.runner, inner), inner)
	if err == nil {
		finished = true
		if err := savepoint.Commit(ctx); err != nil {
			return nil, fmt.Errorf("txn: release savepoint: %w", err)
		}
		return a.success(result), nil
	}
	finished = true
	if rollbackErr := savepoint.Rollback(context.WithoutCancel(ctx)); rollbackErr != nil {
		return nil, errors.Join(err, fmt.Errorf("txn: roll back to savepoint: %w", rollbackErr))
	}
	if c.final = finalFailure(err, result); c.final != nil {
		return a.failure(c.final), nil
	}
	return nil, err
}

// AfterCommit reads the outcome back, outside the transaction and by its attempt token, and returns
// idempotency.ErrNotRecorded if it is not there: the caller's transaction was rolled back. Call it after the commit.
func (j *Joined[T]) AfterCommit(ctx context.Context) error {
	if j.done {
		return nil
	}
	c := j.call
	record, found, err := c.lookForAttempts(ctx)
	if err != nil {
		return err
	}
	if !found {
		return idempotency.ErrNotRecorded
	}
	j.Record, j.done = record, true
	c.report(ctx, outcome{record: record, own: true}, nil)
	return nil
}

// joinedTx is the savepoint handed to a joined function: it may not end it. pgx refuses everything once it is over.
type joinedTx struct{ pgx.Tx }

// Commit refuses.
func (joinedTx) Commit(context.Context) error { return ErrRunnerOwnsTransaction }

// Rollback refuses.
func (joinedTx) Rollback(context.Context) error { return ErrRunnerOwnsTransaction }
