package txnsql_test

import (
	"context"
	"database/sql"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgonce/pgonce/idempotency"
	"github.com/pgonce/pgonce/internal/pgtest"
	"github.com/pgonce/pgonce/txn"
	"github.com/pgonce/pgonce/txnsql"
)

func TestMain(m *testing.M) { pgtest.Main(m) }

var (
	create  = idempotency.Operation{Name: "order.create", Wait: 20 * time.Second}
	invoice = idempotency.Operation{Name: "invoice.create"}
	pay     = idempotency.Operation{Name: "order.pay", Takeover: idempotency.TakeoverRerun}
)

// shop is a service on database/sql.
type shop struct {
	db     *sql.DB
	runner *txnsql.Runner
	direct *pgxpool.Pool // the test's own look at the database
}

func newShop(t testing.TB, config ...func(*txn.Config)) *shop {
	t.Helper()
	return newShopAt(t, func(url string) string { return url }, config...)
}

// newShopAt lets the service connect to another address, and configure its runner.
func newShopAt(t testing.TB, address func(url string) string, config ...func(*txn.Config)) *shop {
	t.Helper()
	direct := pgtest.Pool(t)
	_, err := direct.Exec(t.Context(), `CREATE TABLE orders (id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, key text NOT NULL)`)
	require.NoError(t, err)
	parsed, err := pgx.ParseConfig(address(direct.Config().ConnString()))
	require.NoError(t, err)
	s := &shop{db: txnsql.OpenDB(parsed), direct: direct}
	s.db.SetMaxOpenConns(8)
	t.Cleanup(func() {
		// Every test ends with all connections given back. Not at once: InUse counts one that is still being opened, in the
		// background, for a call that has got another meanwhile.
		require.Eventually(t, func() bool { return s.db.Stats().InUse == 0 }, 30*time.Second, time.Millisecond)
		require.NoError(t, s.db.Close())
	})
	s.runner = newRunner(t, s.db, config...)
	return s
}

func newRunner(t testing.TB, db *sql.DB, config ...func(*txn.Config)) *txnsql.Runner {
	t.Helper()
	c := &txn.Config{Operations: []idempotency.Operation{create, invoice, pay}}
	for _, change := range config {
		change(c)
	}
	runner, err := txnsql.New(db, c)
	require.NoError(t, err)
	t.Cleanup(runner.Close)
	return runner
}

func request(t testing.TB, op idempotency.Operation, key, body string) idempotency.Request {
	t.Helper()
	k, err := op.Key(idempotency.SingleTenant, key)
	require.NoError(t, err)
	return idempotency.Request{Key: k, Fingerprint: idempotency.FingerprintBytes([]byte(body))}
}

func insertOrder(ctx context.Context, tx *sql.Tx, key string) (id int64, err error) {
	err = tx.QueryRowContext(ctx, `INSERT INTO orders (key) VALUES ($1) RETURNING id`, key).Scan(&id)
	return id, err
}

// place places an order by key.
func (s *shop) place(ctx context.Context, req idempotency.Request) (txn.Result[int64], error) {
	return txnsql.WithIdempotency(ctx, s.runner, req, func(ctx context.Context, tx *sql.Tx) (int64, error) {
		return insertOrder(ctx, tx, req.Key.Value())
	})
}

func (s *shop) orders(t testing.TB, key string) (n int) {
	t.Helper()
	require.NoError(t, s.direct.QueryRow(context.WithoutCancel(t.Context()), `SELECT count(*) FROM orders WHERE key = $1`, key).Scan(&n))
	return n
}

// state is the record's, empty where there is none.
func (s *shop) state(t testing.TB, req idempotency.Request) string {
	t.Helper()
	var state []string
	rows, err := s.direct.Query(context.WithoutCancel(t.Context()), `SELECT state FROM idempotency.records WHERE operation = $1 AND key = $2`,
		req.Key.Operation(), req.Key.Value())
	require.NoError(t, err)
	state, err = pgx.CollectRows(rows, pgx.RowTo[string])
	require.NoError(t, err)
	if len(state) == 0 {
		return ""
	}
	return state[0]
}

// requireOnce checks that the key has one order and its record, and that a retry is a replay of it.
func (s *shop) requireOnce(t testing.TB, req idempotency.Request, id int64) {
	t.Helper()
	require.Equal(t, 1, s.orders(t, req.Key.Value()))
	require.Equal(t, "SUCCESS", s.state(t, req))
	again, err := s.place(context.WithoutCancel(t.Context()), req)
	require.NoError(t, err)
	require.True(t, again.Replayed)
	require.Equal(t, id, again.Value)
}

// requireNothing checks that the key has neither order nor record, and that a retry runs.
func (s *shop) requireNothing(t testing.TB, req idempotency.Request) {
	t.Helper()
	require.Zero(t, s.orders(t, req.Key.Value()))
	require.Empty(t, s.state(t, req))
	res, err := s.place(context.WithoutCancel(t.Context()), req)
	require.NoError(t, err)
	require.False(t, res.Replayed)
	s.requireOnce(t, req, res.Value)
}
