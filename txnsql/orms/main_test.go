package orms

import (
	"context"
	"database/sql"
	"errors"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"github.com/pgonce/pgonce/idempotency"
	"github.com/pgonce/pgonce/internal/pgtest"
	"github.com/pgonce/pgonce/txn"
	"github.com/pgonce/pgonce/txnsql"
)

// GORM's cache of prepared statements has a goroutine that never ends.
func TestMain(m *testing.M) {
	pgtest.Main(m, goleak.IgnoreAnyFunction("gorm.io/gorm/internal/lru.NewLRU[...].func1"))
}

var create = idempotency.Operation{Name: "order.create"}

var errBoom = errors.New("boom")

// shop is a service on database/sql.
type shop struct {
	db     *sql.DB
	runner *txnsql.Runner
}

func newShop(t *testing.T, change ...func(*pgx.ConnConfig)) *shop {
	t.Helper()
	config, err := pgx.ParseConfig(pgtest.URL(t))
	require.NoError(t, err)
	for _, f := range change {
		f(config)
	}
	s := &shop{db: txnsql.OpenDB(config)}
	t.Cleanup(func() {
		require.Eventually(t, func() bool { return s.db.Stats().InUse == 0 }, 30*time.Second, time.Millisecond)
		require.NoError(t, s.db.Close())
	})
	_, err = s.db.ExecContext(t.Context(), `
		CREATE TABLE orders (id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, key text NOT NULL, sku text NOT NULL CHECK (sku <> ''));
		CREATE TABLE audits (id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, order_id bigint NOT NULL, note text NOT NULL)`)
	require.NoError(t, err)
	s.runner, err = txnsql.New(s.db, &txn.Config{Operations: []idempotency.Operation{create}})
	require.NoError(t, err)
	t.Cleanup(s.runner.Close)
	return s
}

func request(t testing.TB, key string) idempotency.Request {
	t.Helper()
	k, err := create.Key(idempotency.SingleTenant, key)
	require.NoError(t, err)
	return idempotency.Request{Key: k, Fingerprint: idempotency.FingerprintBytes([]byte("body"))}
}

// counts are the rows of a key and of all audits, and how many records say SUCCESS.
func (s *shop) counts(t testing.TB, key string) (orders, audits, records int) {
	t.Helper()
	require.NoError(t, s.db.QueryRowContext(t.Context(), `SELECT (SELECT count(*) FROM orders WHERE key = $1), (SELECT count(*) FROM audits),
		(SELECT count(*) FROM idempotency.records WHERE key = $1 AND state = 'SUCCESS')`, key).Scan(&orders, &audits, &records))
	return orders, audits, records
}

// write is an order and its audit, written by an ORM; then comes what the test wants to happen.
type write func(ctx context.Context, tx *sql.Tx, key string, then error) (int64, error)

// examine shows of an ORM what it must keep: the order and the record are one commit, an error leaves neither, a retry is a
// replay.
func examine(t *testing.T, s *shop, w write) {
	t.Helper()
	req := request(t, "examined")
	place := func(then error) (txn.Result[int64], error) {
		return txnsql.WithIdempotency(t.Context(), s.runner, req, func(ctx context.Context, tx *sql.Tx) (int64, error) {
			id, err := w(ctx, tx, "examined", then)
			if err == nil {
				orders, _, records := s.counts(t, "examined") //nolint:contextcheck // the test's own look
				require.Zero(t, orders+records, "nobody else sees it yet")
			}
			return id, err
		})
	}
	requireCounts := func(n int) {
		orders, audits, records := s.counts(t, "examined")
		require.Equal(t, []int{n, n, n}, []int{orders, audits, records})
	}
	_, err := place(errBoom)
	require.ErrorIs(t, err, errBoom)
	requireCounts(0)
	first, err := place(nil)
	require.NoError(t, err)
	require.False(t, first.Replayed)
	requireCounts(1)
	again, err := place(nil)
	require.NoError(t, err)
	require.True(t, again.Replayed)
	require.Equal(t, first.Value, again.Value)
	requireCounts(1)
}
