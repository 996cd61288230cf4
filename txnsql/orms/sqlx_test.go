package orms

import (
	"context"
	"database/sql"
	"testing"

	"github.com/jmoiron/sqlx"
	"github.com/stretchr/testify/require"

	"github.com/pgonce/pgonce/txn"
	"github.com/pgonce/pgonce/txnsql"
)

// A sqlx.Tx that is put around a *sql.Tx does not know its driver's name, by which sqlx finds the form of bind variables.
func init() { sqlx.BindDriver("", sqlx.DOLLAR) }

// row is an order.
type row struct {
	ID  int64  `db:"id"`
	Key string `db:"key"`
	SKU string `db:"sku"`
}

func TestSQLX_OrderAndRecordAreOneCommit(t *testing.T) {
	t.Parallel()
	s := newShop(t)
	xdb := sqlx.NewDb(s.db, "pgx")
	examine(t, s, func(ctx context.Context, tx *sql.Tx, key string, then error) (int64, error) {
		x := &sqlx.Tx{Tx: tx, Mapper: xdb.Mapper}
		if _, err := x.NamedExecContext(ctx, `INSERT INTO orders (key, sku) VALUES (:key, :sku)`, row{Key: key, SKU: "tea"}); err != nil {
			return 0, err
		}
		var o row
		if err := x.GetContext(ctx, &o, `SELECT * FROM orders WHERE key = $1`, key); err != nil {
			return 0, err
		}
		if _, err := x.ExecContext(ctx, `INSERT INTO audits (order_id, note) VALUES ($1, 'created')`, o.ID); err != nil {
			return 0, err
		}
		var all []row
		if err := x.SelectContext(ctx, &all, x.Rebind(`SELECT * FROM orders WHERE key = ?`), key); err != nil {
			return 0, err
		}
		require.Equal(t, []row{{o.ID, key, "tea"}}, all)
		return o.ID, then
	})
}

// sqlx has no nested transactions: a savepoint is SQL. Commit and Rollback are refused.
func TestSQLX_SavepointsAndEnds(t *testing.T) {
	t.Parallel()
	s := newShop(t)
	_, err := txnsql.WithIdempotency(t.Context(), s.runner, request(t, "k"), func(ctx context.Context, tx *sql.Tx) (int, error) {
		x := &sqlx.Tx{Tx: tx}
		x.MustExecContext(ctx, `SAVEPOINT try`)
		_, err := x.ExecContext(ctx, `INSERT INTO orders (key, sku) VALUES ('k', '')`) // the CHECK
		require.Error(t, err)
		x.MustExecContext(ctx, `ROLLBACK TO SAVEPOINT try`)
		x.MustExecContext(ctx, `INSERT INTO orders (key, sku) VALUES ('k', 'tea')`)
		return 0, nil
	})
	require.NoError(t, err)
	orders, _, records := s.counts(t, "k")
	require.Equal(t, []int{1, 1}, []int{orders, records})

	for _, end := range []func(*sqlx.Tx) error{func(x *sqlx.Tx) error { return x.Commit() }, func(x *sqlx.Tx) error { return x.Rollback() }} {
		_, err = txnsql.WithIdempotency(t.Context(), s.runner, request(t, "ended"), func(ctx context.Context, tx *sql.Tx) (int, error) {
			x := &sqlx.Tx{Tx: tx}
			x.MustExecContext(ctx, `INSERT INTO orders (key, sku) VALUES ('ended', 'tea')`)
			return 0, end(x)
		})
		require.ErrorIs(t, err, txn.ErrRunnerOwnsTransaction)
		orders, _, records = s.counts(t, "ended")
		require.Zero(t, orders+records)
	}
}
