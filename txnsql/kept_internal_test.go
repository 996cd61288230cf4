package txnsql

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/pgonce/pgonce/idempotency"
	"github.com/pgonce/pgonce/internal/pgtest"
	"github.com/pgonce/pgonce/txn"
)

// A connection that lives for long remembers none of the calls that it was lent to, however they ended.
func TestConn_RemembersNoCall(t *testing.T) {
	t.Parallel()
	config, err := pgx.ParseConfig(pgtest.Pool(t).Config().ConnString())
	require.NoError(t, err)
	db := OpenDB(config)
	t.Cleanup(func() { require.NoError(t, db.Close()) })
	db.SetMaxOpenConns(1)
	op := idempotency.Operation{Name: "order.create"}
	runner, err := New(db, &txn.Config{Operations: []idempotency.Operation{op}})
	require.NoError(t, err)
	t.Cleanup(runner.Close)
	request := func(value string) idempotency.Request {
		key, err := op.Key(idempotency.SingleTenant, value)
		require.NoError(t, err)
		return idempotency.Request{Key: key, Fingerprint: idempotency.NoFingerprint}
	}
	boom := errors.New("boom")
	for i, fails := range []error{nil, boom} {
		fn := func(context.Context, *sql.Tx) (int, error) { return 0, fails }
		_, err = WithIdempotency(t.Context(), runner, request(fmt.Sprint("own ", i)), fn)
		require.ErrorIs(t, err, fails)
		_, err = WithIdempotencyMany(t.Context(), runner, []idempotency.Request{request(fmt.Sprint("a ", i)), request(fmt.Sprint("b ", i))},
			func(ctx context.Context, tx *sql.Tx, _ int) (int, error) { return fn(ctx, tx) })
		require.NoError(t, err)
		tx, err := db.BeginTx(t.Context(), nil)
		require.NoError(t, err)
		_, err = WithIdempotencyTx(t.Context(), runner, tx, request(fmt.Sprint("joined ", i)), fn)
		require.ErrorIs(t, err, fails)
		require.NoError(t, tx.Commit())
	}
	on, err := db.Conn(t.Context())
	require.NoError(t, err)
	require.NoError(t, on.Raw(func(shown any) error {
		c, ours := shown.(*conn)
		require.True(t, ours)
		require.Nil(t, c.last)
		require.Nil(t, c.on)
		require.Zero(t, c.joined)
		require.Empty(t, c.stuck)
		return nil
	}))
	require.NoError(t, on.Close())
}
