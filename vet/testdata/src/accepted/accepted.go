// Package accepted has findings that somebody wants.
package accepted

import (
	"context"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/pgonce/pgonce/idempotency"
	"github.com/pgonce/pgonce/txn"
)

func audit(ctx context.Context, pool *pgxpool.Pool) {
	//pgonce:allow pool: the audit must stay
	_, _ = pool.Exec(ctx, `SELECT 1`)
}

func place(ctx context.Context, r *txn.Runner, pool *pgxpool.Pool, req idempotency.Request) {
	_, _ = txn.WithIdempotency(ctx, r, req, func(ctx context.Context, tx pgx.Tx) (int, error) {
		audit(ctx, pool)
		_, _ = pool.Exec(ctx, `SELECT 1`) //pgonce:allow pool: read only, and the pool is large
		//pgonce:allow pool // want `accepted with its kind and a reason`
		_, _ = pool.Exec(ctx, `SELECT 1`) // want `calls \(\*pgxpool.Pool\).Exec`
		//pgonce:allow pool: // want `accepted with its kind and a reason`
		_, _ = pool.Exec(ctx, `SELECT 1`) // want `calls \(\*pgxpool.Pool\).Exec`
		//pgonce:allow everything: please // want `accepted with its kind and a reason`
		_, _ = pool.Exec(ctx, `SELECT 1`) // want `calls \(\*pgxpool.Pool\).Exec`
		//pgonce:allow http: the wrong kind // want `there is nothing to accept here`
		_, _ = pool.Exec(ctx, `SELECT 1`) // want `calls \(\*pgxpool.Pool\).Exec`
		//pgonce:allow tx: nothing is here // want `there is nothing to accept here`
		_, err := tx.Exec(ctx, `SELECT 1`)
		return 0, err
	})
}
