package orms

import (
	"context"
	"database/sql"
	"testing"

	_ "github.com/lib/pq" // the driver "postgres"
	"github.com/stretchr/testify/require"

	"github.com/pgonce/pgonce/idempotency"
	"github.com/pgonce/pgonce/internal/pgtest"
	"github.com/pgonce/pgonce/txn"
	"github.com/pgonce/pgonce/txnsql"
)

// What another driver has opened is refused with words that help, and nothing of it is spoilt.
func TestDriver_LibPQIsRefused(t *testing.T) {
	t.Parallel()
	db, err := sql.Open("postgres", pgtest.URL(t))
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, db.Close()) })
	_, err = txnsql.New(db, &txn.Config{Operations: []idempotency.Operation{create}})
	require.ErrorIs(t, err, idempotency.ErrConfig)
	require.ErrorContains(t, err, "*pq.Driver; open it by txnsql.OpenDB")

	s := newShop(t)
	tx, err := db.BeginTx(t.Context(), nil)
	require.NoError(t, err)
	_, err = txnsql.WithIdempotencyTx(t.Context(), s.runner, tx, request(t, "k"), func(context.Context, *sql.Tx) (int, error) { return 0, nil })
	require.ErrorIs(t, err, idempotency.ErrConfig)
	require.ErrorContains(t, err, "txnsql.OpenDB")
	_, err = tx.ExecContext(t.Context(), `SELECT 1`)
	require.NoError(t, err)
	require.NoError(t, tx.Commit())
}
