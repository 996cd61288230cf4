//go:build pooler

package txn_test

import (
	"context"
	"encoding/json"
	"fmt"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgonce/pgonce/idempotency"
	"github.com/pgonce/pgonce/internal/pgtest"
	"github.com/pgonce/pgonce/txn"
)

// behindPooler is a shop behind PgBouncer in transaction mode, whatever the environment of this run.
func behindPooler(t *testing.T, mode pgx.QueryExecMode) *shop {
	t.Helper()
	direct := pgtest.Pool(t)
	_, err := direct.Exec(t.Context(), `CREATE TABLE orders (id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, key text NOT NULL, note jsonb)`)
	require.NoError(t, err)
	config, err := pgxpool.ParseConfig(pgtest.ThroughPooler(t, direct.Config().ConnString()))
	require.NoError(t, err)
	config.ConnConfig.DefaultQueryExecMode, config.MaxConns = mode, 8
	txn.ConfigurePool(config)
	pool, err := pgxpool.NewWithConfig(t.Context(), config)
	require.NoError(t, err)
	t.Cleanup(pool.Close)
	return &shop{pool: pool, runner: newRunner(t, pool), direct: direct}
}

// crowd places orders, each of them twice, from so many goroutines that they share the pooler's sessions.
func (s *shop) crowd(t *testing.T) (succeeded int64, failures []error) {
	t.Helper()
	const callers, each = 8, 50
	var mu sync.Mutex
	var ok atomic.Int64
	var group sync.WaitGroup
	for c := range callers {
		group.Go(func() {
			for i := range each {
				req := request(t, fmt.Sprintf("k%d", (c/2)*each+i), "body")
				_, err := s.place(t.Context(), req)
				if err == nil {
					ok.Add(1)
					continue
				}
				mu.Lock()
				failures = append(failures, err)
				mu.Unlock()
			}
		})
	}
	group.Wait()
	return ok.Load(), failures
}

func (s *shop) requireOneOrderPerKey(t *testing.T) (keys int) {
	t.Helper()
	var orders, records int
	require.NoError(t, s.direct.QueryRow(t.Context(), `SELECT (SELECT count(DISTINCT key) FROM orders), (SELECT count(*) FROM orders),
		(SELECT count(*) FROM idempotency.records r JOIN orders USING (key) WHERE r.state = 'SUCCESS')`).Scan(&keys, &orders, &records))
	require.Equal(t, keys, orders)
	require.Equal(t, keys, records)
	return keys
}

func TestCase_P11_DocumentedModesWorkThroughATransactionPooler(t *testing.T) {
	t.Parallel()
	for _, mode := range []pgx.QueryExecMode{pgx.QueryExecModeExec, pgx.QueryExecModeCacheDescribe} {
		t.Run(mode.String(), func(t *testing.T) {
			t.Parallel()
			s := behindPooler(t, mode)
			succeeded, failures := s.crowd(t)
			require.Empty(t, failures)
			require.EqualValues(t, 400, succeeded)
			require.Equal(t, 200, s.requireOneOrderPerKey(t))
			// No state of a session is needed, and none is left in the pooler's.
			for range 50 {
				var statements, locks int
				var durable string
				require.NoError(t, s.pool.QueryRow(t.Context(), `SELECT (SELECT count(*) FROM pg_prepared_statements WHERE name <> ''),
					(SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND pid = pg_backend_pid()),
					current_setting('synchronous_commit')`).Scan(&statements, &locks, &durable))
				require.Zero(t, statements)
				require.Zero(t, locks)
				require.Equal(t, "on", durable)
			}
		})
	}
}

// The mode that needs prepared statements by name cannot work there. It must fail by an error, and never twice or half.
func TestCase_P11_NamedStatementsFailCleanlyThroughATransactionPooler(t *testing.T) {
	t.Parallel()
	s := behindPooler(t, pgx.QueryExecModeCacheStatement)
	succeeded, failures := s.crowd(t)
	require.NotEmpty(t, failures, "PgBouncer has learned to keep prepared statements: docs/environments.md can say so")
	var server *pgconn.PgError
	require.ErrorAs(t, failures[0], &server)
	require.Contains(t, []string{"26000", "42P05", "08P01"}, server.Code)
	t.Logf("%d calls succeeded, %d failed, the first: %v", succeeded, len(failures), failures[0])
	s.requireOneOrderPerKey(t)
	// The same keys in a mode that works: what failed left nothing, what succeeded is replayed.
	fine := behindPooler(t, pgx.QueryExecModeExec)
	config := s.pool.Config()
	config.ConnConfig.DefaultQueryExecMode = pgx.QueryExecModeExec
	pool, err := pgxpool.NewWithConfig(t.Context(), config)
	require.NoError(t, err)
	t.Cleanup(pool.Close)
	fine.pool, fine.runner, fine.direct = pool, newRunner(t, pool), s.direct
	_, failures = fine.crowd(t)
	require.Empty(t, failures)
	require.Equal(t, 200, fine.requireOneOrderPerKey(t))
}

// Under exec pgx goes by the Go type of a parameter: []byte is bytea. Results of ours are bytea anyway; the function's own
// JSON columns need a string or json.RawMessage.
func TestCase_P11_JSONAsBytes(t *testing.T) {
	t.Parallel()
	s := behindPooler(t, pgx.QueryExecModeExec)
	const doc = `{"b":1, "a":1.0,"a":2}`
	insert := func(key string, note any) (txn.Result[[]byte], error) {
		return txn.WithIdempotency(t.Context(), s.runner, request(t, key, "body"), func(ctx context.Context, tx pgx.Tx) ([]byte, error) {
			_, err := tx.Exec(ctx, `INSERT INTO orders (key, note) VALUES ($1, $2)`, key, note)
			return []byte(doc), err
		})
	}
	for key, note := range map[string]any{"string": doc, "raw": json.RawMessage(doc)} {
		first, err := insert(key, note)
		require.NoError(t, err, key)
		again, err := insert(key, note)
		require.NoError(t, err, key)
		require.True(t, again.Replayed)
		require.Equal(t, doc, string(again.Value), "byte for byte")
		require.Equal(t, first.Record, again.Record)
	}
	_, err := insert("bytes", []byte(doc))
	var server *pgconn.PgError
	require.ErrorAs(t, err, &server, "pgx, not us: see docs/environments.md")
	require.Equal(t, "22P02", server.Code)
	s.requireNoRecord(t, request(t, "bytes", "body"))

	raw := func() (txn.Result[json.RawMessage], error) {
		return txn.WithIdempotency(t.Context(), s.runner, request(t, "raw result", "body"), func(context.Context, pgx.Tx) (json.RawMessage, error) {
			return json.RawMessage(doc), nil
		})
	}
	_, err = raw()
	require.NoError(t, err)
	again, err := raw()
	require.NoError(t, err)
	require.True(t, again.Replayed)
	require.Equal(t, doc, string(again.Value))
	var shown string
	require.NoError(t, s.direct.QueryRow(t.Context(), `SELECT result::text FROM idempotency.audit WHERE key = 'raw result'`).Scan(&shown))
	require.JSONEq(t, `{"a": 2, "b": 1}`, shown)
	require.Equal(t, idempotency.StateSuccess, again.Record.State)
}
