// Package txnsql is what the tests need of it.
package txnsql

import (
	"context"
	"database/sql"

	"github.com/pgonce/pgonce/idempotency"
	"github.com/pgonce/pgonce/txn"
)

type Runner struct{ *txn.Runner }

func WithIdempotency[T any](ctx context.Context, r *Runner, req idempotency.Request, fn func(context.Context, *sql.Tx) (T, error)) (txn.Result[T], error) {
	return txn.Result[T]{}, nil
}

func WithIdempotencyTx[T any](ctx context.Context, r *Runner, tx *sql.Tx, req idempotency.Request, fn func(context.Context, *sql.Tx) (T, error)) (*txn.Joined[T], error) {
	return nil, nil
}

func WithIdempotencyMany[T any](ctx context.Context, r *Runner, reqs []idempotency.Request, fn func(context.Context, *sql.Tx, int) (T, error)) ([]txn.Result[T], error) {
	return nil, nil
}

func WithLease[C, T any](ctx context.Context, r *Runner, req idempotency.Request, foreign func(context.Context, *txn.Lease) (C, error), commit func(context.Context, *sql.Tx, C) (T, error)) (txn.Result[T], error) {
	return txn.Result[T]{}, nil
}

func FromContext(ctx context.Context) (*sql.Tx, bool) { return nil, false }
