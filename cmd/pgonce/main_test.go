package main

import (
	"bytes"
	"context"
	"encoding/json"
	"io"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"github.com/pgonce/pgonce/idempotency"
	"github.com/pgonce/pgonce/internal/devstack"
	"github.com/pgonce/pgonce/internal/pgtest"
	"github.com/pgonce/pgonce/redisfront"
	"github.com/pgonce/pgonce/txn"
)

func TestMain(m *testing.M) { pgtest.Main(m) }

// answer is what one run of the command came to.
type answer struct {
	code     int
	out, err string
}

// pgonce runs the command on a database, as a person who answers with in.
func pgonce(t *testing.T, database, in string, args ...string) answer {
	t.Helper()
	var out, err bytes.Buffer
	w := &world{in: strings.NewReader(in), out: &out, err: &err, getenv: func(name string) string {
		return map[string]string{databaseVariable: database}[name]
	}}
	code := run(t.Context(), args, w)
	return answer{code, out.String(), err.String()}
}

// pgonceUntil is pgonce until ctx ends.
func pgonceUntil(ctx context.Context, database string, args ...string) int {
	return run(ctx, args, &world{in: strings.NewReader(""), out: io.Discard, err: io.Discard, getenv: func(name string) string {
		return map[string]string{databaseVariable: database}[name]
	}})
}

// object runs the command with --json and reads what it printed.
func object(t *testing.T, database string, code int, args ...string) map[string]any {
	t.Helper()
	a := pgonce(t, database, "", append(args, "--json")...)
	require.Equal(t, code, a.code, "%s%s", a.out, a.err)
	var v map[string]any
	require.NoError(t, json.Unmarshal([]byte(a.out), &v), a.out)
	return v
}

// audited is a database with the records that docs/audit.md asks about.
func audited(t *testing.T) *pgxpool.Pool {
	t.Helper()
	pool := pgtest.Pool(t, txn.ConfigurePool)
	fixture, err := os.ReadFile("../../db/testdata/audit.sql")
	require.NoError(t, err)
	_, err = pool.Exec(t.Context(), string(fixture), pgx.QueryExecModeSimpleProtocol)
	require.NoError(t, err)
	return pool
}

func urlOf(pool *pgxpool.Pool) string { return pool.Config().ConnString() }

func column[T any](t *testing.T, pool *pgxpool.Pool, sql string, args ...any) []T {
	t.Helper()
	rows, err := pool.Query(t.Context(), sql, args...)
	require.NoError(t, err)
	values, err := pgx.CollectRows(rows, pgx.RowTo[T])
	require.NoError(t, err)
	return values
}

// everything is all that is stored: what nothing may have changed.
func everything(t *testing.T, pool *pgxpool.Pool) []string {
	t.Helper()
	return column[string](t, pool, `SELECT r::text FROM idempotency.records AS r UNION ALL SELECT a::text FROM idempotency.attempts AS a ORDER BY 1`)
}

func newRedis(t *testing.T, lines ...string) *devstack.RedisNode {
	t.Helper()
	nodes, err := devstack.StartRedisNodes(t.Context(), &devstack.Config{Out: os.Stderr})
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, nodes.Stop()) })
	node, err := nodes.Add(t.Context(), lines...)
	require.NoError(t, err)
	return node
}

// newFront is a service's Redis front.
func newFront(t *testing.T, node *devstack.RedisNode, prefix string) *redisfront.Front {
	t.Helper()
	options, err := redis.ParseURL(node.URL())
	require.NoError(t, err)
	options.ContextTimeoutEnabled = true
	client := redis.NewClient(options)
	front, err := redisfront.New(client, &redisfront.Config{Prefix: prefix})
	require.NoError(t, err)
	t.Cleanup(func() {
		require.NoError(t, front.Close())
		require.NoError(t, client.Close())
	})
	return front
}

var (
	store   = idempotency.NewStore(pgx.QueryExecModeExec)
	payload = idempotency.FingerprintBytes([]byte("payload"))
)

// lease is an attempt of a key in the leased mode.
func lease(t *testing.T, pool *pgxpool.Pool, value string, rule idempotency.Takeover) idempotency.LeaseAcquisition {
	t.Helper()
	key, err := idempotency.NewKey("acme", "payment.capture", value)
	require.NoError(t, err)
	a, err := store.AcquireLease(t.Context(), pool, &idempotency.LeaseRequest{
		Request: idempotency.Request{Key: key, Fingerprint: payload}, AttemptToken: idempotency.NewAttemptToken(),
		Lease: time.Minute, Takeover: rule,
	})
	require.NoError(t, err)
	return a
}

// leased acquires a key that is free.
func leased(t *testing.T, pool *pgxpool.Pool, value string, rule idempotency.Takeover) idempotency.Record {
	t.Helper()
	a := lease(t, pool, value, rule)
	require.Equal(t, idempotency.VerdictRun, a.Verdict)
	return a.Record
}

// makeStale moves the lease's end into the past.
func makeStale(t *testing.T, pool *pgxpool.Pool, value string) {
	t.Helper()
	tag, err := pool.Exec(t.Context(), `UPDATE idempotency.records SET lease_expires_at = statement_timestamp() - interval '1 s'
		WHERE key = $1 AND state = 'PROCESSING'`, value)
	require.NoError(t, err)
	require.EqualValues(t, 1, tag.RowsAffected())
}
