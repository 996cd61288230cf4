package txnsql

import (
	"context"
	"database/sql"
	"errors"

	"github.com/jackc/pgx/v5"

	"github.com/pgonce/pgonce/idempotency"
	"github.com/pgonce/pgonce/txn"
)

// WithIdempotency runs fn at most once for req.Key: its writes through the *sql.Tx it is given and the record of the outcome
// are one commit. A duplicate gets the first outcome back, Replayed. All else is txn.WithIdempotency's, errors too, and txn.Final
// marks a failure that is to be replayed.
//
// Commit and Rollback of the *sql.Tx return txn.ErrRunnerOwnsTransaction, and it is over then: fn returns nil or an error. After a
// Rollback nothing is committed, whatever fn returns. Rows that fn leaves open are closed; if they were scanned into sql.RawBytes
// that cannot be, and the call fails.
func WithIdempotency[T any](ctx context.Context, r *Runner, req idempotency.Request, fn func(context.Context, *sql.Tx) (T, error)) (txn.Result[T], error) {
	return txn.WithIdempotency(ctx, r.Runner, req, inSQL(fn))
}

// WithIdempotencyMany is WithIdempotency for up to txn.MaxMany requests in one transaction, as txn.WithIdempotencyMany: fn runs
// for each in a savepoint, with its index, and each has an outcome of its own.
func WithIdempotencyMany[T any](ctx context.Context, r *Runner, reqs []idempotency.Request, fn func(context.Context, *sql.Tx, int) (T, error)) ([]txn.Outcome[T], error) {
	return txn.WithIdempotencyMany(ctx, r.Runner, reqs, func(ctx context.Context, tx pgx.Tx, i int) (T, error) {
		return inSQL(func(ctx context.Context, tx *sql.Tx) (T, error) { return fn(ctx, tx, i) })(ctx, tx)
	})
}

// WithLease is txn.WithLease, for calls to somebody else: foreign runs in no transaction, commit in the one that completes the
// record.
func WithLease[C, T any](ctx context.Context, r *Runner, req idempotency.Request, foreign func(context.Context, *txn.Lease) (C, error),
	commit func(context.Context, *sql.Tx, C) (T, error),
) (txn.Result[T], error) {
	return txn.WithLease(ctx, r.Runner, req, foreign, func(ctx context.Context, tx pgx.Tx, called C) (T, error) {
		return inSQL(func(ctx context.Context, tx *sql.Tx) (T, error) { return commit(ctx, tx, called) })(ctx, tx)
	})
}

var errNoTx = errors.New("txnsql: no sql.Tx could be made on the runner's connection")

// inSQL is a function of ours as one of txn's.
func inSQL[T any](fn func(context.Context, *sql.Tx) (T, error)) func(context.Context, pgx.Tx) (T, error) {
	return func(ctx context.Context, _ pgx.Tx) (T, error) {
		h := handedIn(ctx)
		if h == nil {
			var none T
			return none, errNoTx
		}
		value, err := fn(ctx, h.tx)
		if err == nil && h.rolledBack.Load() {
			err = errRolledBack
		}
		return value, err
	}
}
