// Package odd is written as few people write.
package odd

import (
	"context"
	"store"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/pgonce/pgonce/idempotency"
	"github.com/pgonce/pgonce/txn"
)

var req idempotency.Request

type pools struct {
	*pgxpool.Pool
	runner *txn.Runner
}

type deeper struct{ pools }

func (d deeper) once(ctx context.Context, fn func(context.Context, pgx.Tx) (int, error)) { // want once:"0 effects"
	store.Once(ctx, d.runner, fn)
}

func two[A, B any](ctx context.Context, tx pgx.Tx) (zero A, err error) { // want two:"1 effects"
	return zero, store.Notify() // want `calls Notify`
}

type repo[T any] struct{ pool *pgxpool.Pool }

func (r *repo[T]) save(ctx context.Context, v T) error { // want save:"1 effects"
	_, err := r.pool.Exec(ctx, `SELECT 1`)
	return err
}

func saveOn[D store.DBTX](ctx context.Context, db D) error { // want saveOn:"1 effects"
	_, err := db.Exec(ctx, `SELECT 1`)
	return err
}

func odd(ctx context.Context, d deeper, pool *pgxpool.Pool, r *repo[int], q *store.Queries) { // want odd:"1 effects"
	_, _ = txn.WithIdempotency(ctx, d.runner, req, two[int, string])
	_, _ = txn.WithIdempotency[int](ctx, d.runner, req, two[int, string])
	before := func(ctx context.Context) error {
		_, err := pool.Exec(ctx, `SELECT 1`)
		return err
	}
	onPool := func(ctx context.Context, db store.DBTX) error { return store.Save(ctx, db) }
	around := func() error { return before(ctx) }
	_, _ = txn.WithIdempotency(ctx, d.runner, req, func(ctx context.Context, tx pgx.Tx) (int, error) {
		_ = around()          // want `calls around, which calls \(\*pgxpool.Pool\).Exec \(odd.go:\d+\)`
		_ = onPool(ctx, pool) // want `calls onPool, which calls its Exec`
		_ = onPool(ctx, tx)
		_, _ = (*pgxpool.Pool).Exec(pool, ctx, `SELECT 1`) // want `calls \(\*pgxpool.Pool\).Exec`
		exec := pool.Exec
		_, _ = exec(ctx, `SELECT 1`) // want `calls \(\*pgxpool.Pool\).Exec`
		_ = r.save(ctx, 1)           // want `calls save, which calls \(\*pgxpool.Pool\).Exec`
		_ = saveOn(ctx, pool)        // want `gives a pool or a connection to odd.saveOn` `calls saveOn, which calls its Exec`
		_ = saveOn(ctx, tx)
		_, _ = d.Exec(ctx, `SELECT 1`)               // want `calls \(\*pgxpool.Pool\).Exec`
		_ = pgx.BeginFunc(ctx, d, nil)               // want `gives a pool or a connection to pgx.BeginFunc`
		defer pool.Exec(ctx, `SELECT 1`)             // want `calls \(\*pgxpool.Pool\).Exec`
		go func() { _, _ = pool.Exec(ctx, `now`) }() // want `calls \(\*pgxpool.Pool\).Exec`
		{
			pool := tx // shadows
			_, _ = pool.Exec(ctx, `SELECT 1`)
			_ = store.Save(ctx, pool)
		}
		tx, err := tx.Begin(ctx)
		if err != nil {
			return 0, err
		}
		_ = tx.Rollback(ctx)
		return 0, nil
	})
	_, _ = txn.WithIdempotency(ctx, d.runner, req, func(ctx context.Context, tx pgx.Tx) (_ int, err error) {
		if tx, err = tx.Begin(ctx); err != nil { // the same name is a savepoint from here on
			return 0, err
		}
		defer tx.Rollback(ctx)
		return 0, tx.Commit(ctx)
	})
	_, _ = txn.WithIdempotency(ctx, d.runner, req, func(ctx context.Context, _ pgx.Tx) (int, error) {
		var loop func() error
		loop = func() error { return loop() }
		self := pool
		self = self
		_, _ = self.Exec(ctx, `SELECT 1`) // want `calls \(\*pgxpool.Pool\).Exec`
		switch db := any(pool).(type) {
		case store.DBTX:
			_, _ = db.Exec(ctx, `SELECT 1`)
		}
		return 0, loop()
	})
	store.Once(ctx, d.runner, two[int, string])
	store.OnceSimply(ctx, d.runner, func(ctx context.Context) error {
		return store.Save(ctx, pool) // before
	}, func(ctx context.Context) error {
		return store.Save(ctx, pool) // want `gives a pool` `calls Save, which calls its Exec`
	})
	d.once(ctx, func(ctx context.Context, tx pgx.Tx) (int, error) {
		_, err := pool.Exec(ctx, `SELECT 1`) // want `calls \(\*pgxpool.Pool\).Exec`
		return 0, err
	})
	for _, f := range []func(context.Context, pgx.Tx) (int, error){two[int, int], nil} {
		_, _ = txn.WithIdempotency(ctx, d.runner, req, f)
	}
}
