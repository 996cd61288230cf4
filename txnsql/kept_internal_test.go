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

// A statement of the runner's own gives its connection back, however it ends.
func TestSource_GivesConnectionsBack(t *testing.T) {
	t.Parallel()
	config, err := pgx.ParseConfig(pgtest.Pool(t).Config().ConnString())
	require.NoError(t, err)
	db := OpenDB(config)
	t.Cleanup(func() { require.NoError(t, db.Close()) })
	s := &source{db: db}
	const some = `SELECT generate_series(1, 3)`
	for name, use := range map[string]func() error{
		"rows to their end": func() error {
			rows, err := s.Query(t.Context(), some)
			if err != nil {
				return err
			}
			for rows.Next() {
			}
			return rows.Err()
		},
		"rows closed early, and again": func() error {
			rows, err := s.Query(t.Context(), some)
			if err == nil {
				rows.Close()
				rows.Close()
				err = rows.Err()
			}
			return err
		},
		"a row": func() error {
			var n int
			return s.QueryRow(t.Context(), `SELECT 1`).Scan(&n)
		},
		"no rows":     func() error { _, err := s.Exec(t.Context(), `SELECT 1`); return err },
		"query fails": func() error { _, err := s.Query(t.Context(), `SELECT nothing`); return must(err) }, //nolint:sqlclosecheck,gocritic // there are none
		"row fails":   func() error { return must(s.QueryRow(t.Context(), `SELECT nothing`).Scan()) },
		"exec fails":  func() error { _, err := s.Exec(t.Context(), `SELECT nothing`); return must(err) },
	} {
		require.NoError(t, use(), name)
		require.Zero(t, db.Stats().InUse, name)
	}
}

// must is an error where there should be one.
func must(err error) error {
	if err == nil {
		return errors.New("no error")
	}
	return nil
}
