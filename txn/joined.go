package txn

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/pgonce/pgonce/idempotency"
	"github.com/pgonce/pgonce/internal/failpoint"
)

// Joined is the outcome of an operation inside a transaction of the caller. It counts only once that has committed:
// AfterCommit tells.
type Joined[T any] struct {
	Result[T]
	call *call
}

// WithIdempotencyTx is WithIdempotency in a transaction that the caller has begun and will commit: use it where the key's
// operation is one part of a larger transaction. fn runs in a savepoint, so that its error leaves nothing and the caller
// may go on.
//
// The transaction is the caller's, with its isolation level and durability: nothing of it is changed, and its retries are
// the caller's too. It never waits: a key that somebody holds is idempotency.ErrInProgress at once. ErrRestartOuter says
// that the whole transaction must be rolled back and begun again: under REPEATABLE READ and SERIALIZABLE a record may be
// younger than the caller's snapshot, and a serialization failure or deadlock of fn is the whole transaction's.
//
// A Final comes back as an error with a Joined beside it: commit to keep it, roll back to forget it. Any other error has
// no Joined. Call AfterCommit after the commit. tx must be of the runner's database.
//
// A fn that ends the caller's transaction by SQL of its own gets ErrTransactionEnded: that is recorded at once, and the
// caller's connection is closed.
func WithIdempotencyTx[T any](ctx context.Context, r *Runner, tx pgx.Tx, req idempotency.Request, fn func(context.Context, pgx.Tx) (T, error)) (*Joined[T], error) {
	ctx = ownWork(ctx)
	op, err := r.check(ctx, tx, req)
	if err != nil {
		return nil, err
	}
	var value T
	c := newCall(ctx, r, op, req, &value, fn)
	out, err := c.end(c.join(ctx, tx))
	if err != nil || !out.own {
		c.report(ctx, out, err)
	}
	if err != nil {
		return nil, err
	}
	res, err := resultOf(c, out, value)
	return &Joined[T]{Result: res, call: c}, err
}

// join is the one attempt of a call in the caller's transaction.
func (c *call) join(ctx context.Context, tx pgx.Tx) step {
	acquired, err := c.runner.store.AcquireTx(ctx, tx, c.req.Key)
	if err != nil {
		return failed(err)
	}
	acquired.RequireIssued = c.op.RequireIssued
	a := &attempt{call: c, acquired: acquired}
	v, err := a.byPolicy(ctx, tx, acquired.Verdict(c.req.Fingerprint))
	if err != nil {
		return failed(err)
	}
	switch v {
	case idempotency.VerdictRun:
	case idempotency.VerdictInProgress:
		return step{kind: kindBusy, err: c.inProgress()}
	case idempotency.VerdictReplay:
		// It may be this very transaction's, and go with it: AfterCommit looks for it too.
		c.tokens = append(c.tokens, acquired.Record.AttemptToken)
		return c.settle(v, acquired.Record)
	default:
		return c.settle(v, a.acquired.Record)
	}
	done, s := a.runJoined(ctx, tx)
	if done == nil {
		return s
	}
	record, err := c.runner.store.CompleteTx(ctx, tx, done)
	switch {
	case errors.Is(err, idempotency.ErrTransactionEnded):
		return a.recordEnded(ctx, tx.Conn(), nil)
	case errors.Is(err, idempotency.ErrRecordExists), idempotency.Restartable(err):
		// We hold the lock and saw no record: it was committed after the caller's snapshot.
		return restartOuter(err)
	case err != nil:
		return failed(err)
	}
	failpoint.Hit(failpoint.JoinedComplete)
	c.tokens, c.inHand = append(c.tokens, done.AttemptToken), done.AttemptToken
	c.noteBypass(a)
	return step{out: outcome{record: record, own: true, fresh: true}}
}

func restartOuter(err error) step {
	return step{kind: kindAnswered, err: fmt.Errorf("%w: %w", idempotency.ErrRestartOuter, err)}
}

// savepoint is ours by SQL, not pgx's: pgx gives up its own when a release fails, and the caller's transaction would stay
// aborted. The name may be taken: the innermost counts.
const savepoint = "pgonce"

// runJoined runs the function in a savepoint.
func (a *attempt) runJoined(ctx context.Context, tx pgx.Tx) (*idempotency.Completion, step) {
	c := a.call
	if _, err := tx.Exec(ctx, "SAVEPOINT "+savepoint); err != nil {
		return nil, failed(fmt.Errorf("txn: begin savepoint: %w", err))
	}
	conn := tx.Conn()
	a.forgetErrors(conn)
	inner := newHandedTx(conn)
	released := false
	// Also for a panic or Goexit: the caller may recover and go on with its transaction.
	defer func() {
		inner.end()
		switch {
		case released:
		case a.outerEnded(conn):
			_ = a.recordEnded(ctx, conn, nil)
		case a.savepointGone(undo(ctx, tx)):
			_ = a.recordEnded(ctx, conn, nil)
		}
	}()
	c.runs++
	result, err := c.body(withRunning(ctx, c, inner), inner)
	inner.end()
	if a.outerEnded(conn) {
		released = true
		return nil, a.recordEnded(ctx, conn, err)
	}
	if err == nil {
		if _, err = tx.Exec(ctx, "RELEASE SAVEPOINT "+savepoint); err == nil {
			released = true
			return a.success(result), step{}
		}
		err = fmt.Errorf("%w: %w", idempotency.ErrAborted, err)
	}
	last := a.lastError(tx)
	released = true
	undoErr := undo(ctx, tx)
	if a.savepointGone(undoErr) {
		return nil, a.recordEnded(ctx, conn, err)
	}
	if undoErr != nil {
		return nil, failed(errors.Join(err, undoErr))
	}
	if idempotency.Restartable(err) || last != nil && idempotency.Restartable(last) {
		return nil, restartOuter(err)
	}
	if c.final = finalFailure(err, result); c.final != nil {
		return a.failure(c.final), step{}
	}
	return nil, failed(err)
}

// undo leaves nothing of the function in the caller's transaction. If even that fails (rows left open, for example), the
// connection is closed, since a commit would keep the function's writes without a record.
func undo(ctx context.Context, tx pgx.Tx) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), 5*time.Second)
	defer cancel()
	if _, err := tx.Exec(ctx, "ROLLBACK TO SAVEPOINT "+savepoint+"; RELEASE SAVEPOINT "+savepoint); err != nil {
		return errors.Join(fmt.Errorf("txn: roll back to savepoint: %w", err), tx.Conn().Close(ctx))
	}
	return nil
}

// savepointGone: a COMMIT and BEGIN that went past pgx, so that the guard has not seen them. It matters where the transaction
// is ours; one of the caller's is lost with its connection, and a record would say that it had ended.
func (a *attempt) savepointGone(err error) bool {
	var server *pgconn.PgError
	return a.call.batched && errors.As(err, &server) && server.Code == "3B001" // invalid_savepoint_specification
}

// forgetErrors, lastError and outerEnded use the guard where the caller's transaction is of a configured pool.
func (a *attempt) forgetErrors(conn *pgx.Conn) {
	if a.guard, _ = guardOf(conn); a.guard != nil {
		a.guard.LastError.Store(nil)
		a.guard.MayHaveCommitted.Store(false) // the caller's own BEGIN
	}
}

// outerEnded reports whether the function has ended the caller's transaction by SQL of its own. On another pool, and
// past pgx, a COMMIT and BEGIN is only seen as a savepoint that is gone.
func (a *attempt) outerEnded(conn *pgx.Conn) bool {
	return a.guard != nil && a.guard.MayHaveCommitted.Load() || !conn.IsClosed() && conn.PgConn().TxStatus() == 'I'
}

// endedTimeout is short: the caller's connection may be the pool's only one.
const endedTimeout = 5 * time.Second

// recordEnded records in a transaction of its own that the function has ended the caller's. The caller's connection is
// closed: what it sends next, believing itself in a transaction, would commit at once.
func (a *attempt) recordEnded(ctx context.Context, conn *pgx.Conn, cause error) step {
	_ = conn.Close(canceled) //nolint:contextcheck // ended on purpose, see there
	ended := a.transactionEnded(cause)
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), endedTimeout)
	defer cancel()
	switch s := a.call.tries(ctx); {
	case s.err != nil:
		return step{kind: s.kind, err: fmt.Errorf("%w, and that could not be recorded: %w", ended.err, s.err)}
	case !s.out.own: // somebody else's outcome got there first: no comfort to whoever lost its transaction
		return failed(ended.err)
	default:
		return s
	}
}

func (a *attempt) lastError(tx pgx.Tx) error {
	if a.guard == nil || tx.Conn().IsClosed() || tx.Conn().PgConn().TxStatus() != 'E' {
		return nil // what the function handled in a savepoint of its own does not count
	}
	if last := a.guard.LastError.Load(); last != nil {
		return last
	}
	return nil
}

// AfterCommit reads the outcome back, outside the transaction and by its attempt token. idempotency.ErrNotRecorded: it is
// not there and cannot come any more, the caller's transaction was rolled back. ErrOutcomeUnknown: it is not there, and
// some transaction still holds the key, maybe the caller's own COMMIT on its way. Call it after the commit.
func (j *Joined[T]) AfterCommit(ctx context.Context) error {
	ctx = ownWork(ctx)
	c := j.call
	record, err := c.afterCommit(ctx)
	if err != nil {
		return err
	}
	if !j.Replayed {
		c.report(ctx, outcome{record: record, own: true}, nil)
	}
	c.publish(ctx, &outcome{record: record})
	j.Record = record
	return nil
}

func (c *call) afterCommit(ctx context.Context) (idempotency.Record, error) {
	failpoint.Hit(failpoint.JoinedPublish)
	record, found, err := c.lookForAttempts(ctx)
	if err != nil || found {
		return record, err
	}
	acquired, err := c.lookAtLock(ctx)
	switch {
	case err != nil:
		return idempotency.Record{}, err
	case acquired.Verdict(c.req.Fingerprint, c.tokens...) == idempotency.VerdictOwn:
		return acquired.Record, nil
	case !acquired.Locked || c.unlocked:
		return idempotency.Record{}, fmt.Errorf("%w: the key is held by a transaction that has not ended", idempotency.ErrOutcomeUnknown)
	}
	if c.without {
		// The COMMIT may have arrived behind the first look, and what was acquired tells of records only.
		if record, found, err = c.lookForAttempts(ctx); err != nil || found {
			return record, err
		}
	}
	return idempotency.Record{}, idempotency.ErrNotRecorded
}

// lookAtLock asks for the key and gives it back. Whoever gets its lock and still sees no record knows that the transaction
// which held it is over.
func (c *call) lookAtLock(ctx context.Context) (idempotency.Acquisition, error) {
	conn, err := c.runner.pool.Acquire(ctx)
	if err != nil {
		return idempotency.Acquisition{}, err
	}
	defer conn.Release()
	_, acquired, err := c.acquire(ctx, conn.Conn())
	if err != nil {
		return idempotency.Acquisition{}, err
	}
	return acquired, c.runner.store.Rollback(ctx, conn.Conn())
}
