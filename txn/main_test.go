package txn_test

import (
	"context"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgonce/pgonce/idempotency"
	"github.com/pgonce/pgonce/internal/pgtest"
	"github.com/pgonce/pgonce/txn"
)

func TestMain(m *testing.M) { pgtest.Main(m) }

var create = idempotency.Operation{Name: "order.create"}

// shop is a database with an orders table and a runner on it.
type shop struct {
	pool   *pgxpool.Pool // the service's, as the environment of this run has it (pgtest.Env)
	runner *txn.Runner
	direct *pgxpool.Pool // the test's own look at the database, past any pooler
}

// newShop makes one; config may change the runner's configuration.
func newShop(t testing.TB, config ...func(*txn.Config)) *shop {
	t.Helper()
	return newShopWith(t, func(*pgxpool.Config) {}, config...)
}

func newShopWith(t testing.TB, configurePool func(*pgxpool.Config), config ...func(*txn.Config)) *shop {
	t.Helper()
	direct := pgtest.Pool(t)
	pool := pgtest.Service(t, direct, func(c *pgxpool.Config) {
		configurePool(c)
		txn.ConfigurePool(c)
	})
	// No unique key but its own: only the library stands between a duplicate and a second row.
	_, err := direct.Exec(t.Context(), `CREATE TABLE orders (id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, key text NOT NULL, note text)`)
	require.NoError(t, err)
	return &shop{pool: pool, runner: newRunner(t, pool, config...), direct: direct}
}

// atLeastConns is the choice of a test that itself holds so many connections of the pool at once.
func atLeastConns(n int32) func(*pgxpool.Config) {
	return func(c *pgxpool.Config) { c.MaxConns = max(c.MaxConns, n) }
}

// named reports whether our statements are prepared by name.
func (s *shop) named() bool {
	return s.pool.Config().ConnConfig.DefaultQueryExecMode == pgx.QueryExecModeCacheStatement
}

// request is a request of key whose payload is body.
func request(t testing.TB, key, body string) idempotency.Request {
	t.Helper()
	k, err := create.Key(idempotency.SingleTenant, key)
	require.NoError(t, err)
	return idempotency.Request{Key: k, Fingerprint: idempotency.FingerprintBytes([]byte(body))}
}

type order struct {
	ID  int64  `json:"id"`
	Key string `json:"key"`
}

func insertOrder(ctx context.Context, tx pgx.Tx, key string) (o order, err error) {
	o.Key = key
	err = tx.QueryRow(ctx, `INSERT INTO orders (key) VALUES ($1) RETURNING id`, key).Scan(&o.ID)
	return o, err
}

// place places an order by key.
func (s *shop) place(ctx context.Context, req idempotency.Request) (txn.Result[order], error) {
	return txn.WithIdempotency(ctx, s.runner, req, func(ctx context.Context, tx pgx.Tx) (order, error) {
		return insertOrder(ctx, tx, req.Key.Value())
	})
}

func (s *shop) orders(t testing.TB, key string) (n int) {
	t.Helper()
	require.NoError(t, s.direct.QueryRow(context.WithoutCancel(t.Context()), `SELECT count(*) FROM orders WHERE key = $1`, key).Scan(&n))
	return n
}

// record reads the record as it is stored.
func (s *shop) record(t testing.TB, req idempotency.Request) (idempotency.Record, bool) {
	t.Helper()
	conn, err := s.direct.Acquire(t.Context())
	require.NoError(t, err)
	defer conn.Release()
	r, found, err := idempotency.NewStore(pgx.QueryExecModeCacheStatement).Lookup(t.Context(), conn.Conn(), req.Key)
	require.NoError(t, err)
	return r, found
}
