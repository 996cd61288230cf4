package txn

import (
	"context"
	"sync"

	"github.com/jackc/pgx/v5"

	"github.com/pgonce/pgonce/idempotency"
)

// within is a transaction that all calls of a runner are part of.
type within struct {
	tx pgx.Tx
	mu sync.Mutex // a transaction does one thing at a time
}

// Within returns a runner whose calls of WithIdempotency all run inside tx, one after the other, each in a savepoint as with
// WithIdempotencyTx. It is for tests: tx is rolled back in the end, and nothing of them stays. Nothing is published to
// fronts. idempotencytest.RolledBack makes both.
func (r *Runner) Within(tx pgx.Tx) *Runner {
	inner := &Runner{
		pool: r.pool, store: r.store, config: r.config, operations: r.operations, flights: flights{running: map[idempotency.Key]*flight{}},
		within: &within{tx: tx},
	}
	inner.fronts.epochs = newEpochWatch(inner.store, r.pool.Config(), r.config.OnEvent)
	inner.fronts.doubles = newDoubleCheck(inner)
	inner.keeper = &keeper{watch: inner.fronts.epochs, store: inner.store} // never used, but closed
	return inner
}

// callWithin is WithIdempotency of such a runner.
func callWithin[T any](ctx context.Context, r *Runner, req idempotency.Request, fn func(context.Context, pgx.Tx) (T, error)) (Result[T], error) {
	if err := nested(ctx, r, r.within.tx, req.Key); err != nil { // before the lock, which it would wait for for ever
		return Result[T]{}, err
	}
	r.within.mu.Lock()
	defer r.within.mu.Unlock()
	joined, err := WithIdempotencyTx(ctx, r, r.within.tx, req, fn)
	if joined == nil {
		return Result[T]{}, err
	}
	return joined.Result, err
}
