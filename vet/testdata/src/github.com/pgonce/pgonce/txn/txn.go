// Package txn is what the tests need of it.
package txn

import (
	"context"

	"github.com/jackc/pgx/v5"
	"github.com/pgonce/pgonce/idempotency"
)

type (
	Runner        struct{}
	Result[T any] struct{ Value T }
	Joined[T any] struct{ Result[T] }
	Lease         struct{}
)

func WithIdempotency[T any](ctx context.Context, r *Runner, req idempotency.Request, fn func(context.Context, pgx.Tx) (T, error)) (Result[T], error) {
	return Result[T]{}, nil
}

func WithIdempotencyTx[T any](ctx context.Context, r *Runner, tx pgx.Tx, req idempotency.Request, fn func(context.Context, pgx.Tx) (T, error)) (*Joined[T], error) {
	return nil, nil
}

func WithIdempotencyMany[T any](ctx context.Context, r *Runner, reqs []idempotency.Request, fn func(context.Context, pgx.Tx, int) (T, error)) ([]Result[T], error) {
	return nil, nil
}

func WithLease[C, T any](ctx context.Context, r *Runner, req idempotency.Request, foreign func(context.Context, *Lease) (C, error), commit func(context.Context, pgx.Tx, C) (T, error)) (Result[T], error) {
	return Result[T]{}, nil
}

func FromContext(ctx context.Context) (pgx.Tx, bool) { return nil, false }
