package main

import (
	"context"
	"fmt"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"github.com/pgonce/pgonce/idempotency"
	"github.com/pgonce/pgonce/internal/pgtest"
	"github.com/pgonce/pgonce/txn"
)

// served is a service's database and Redis after ten orders, and the operation.
func served(t *testing.T, pool *pgxpool.Pool, url string) *redis.Client {
	t.Helper()
	options, err := redis.ParseURL(url)
	require.NoError(t, err)
	client := redis.NewClient(options)
	t.Cleanup(func() { _ = client.Close() })
	operation := idempotency.Operation{Name: "order.create", Retention: time.Hour}
	for i := range 10 {
		key, err := operation.Key("acme", fmt.Sprint("k", i))
		require.NoError(t, err)
		runner, err := txn.New(pool, &txn.Config{Operations: []idempotency.Operation{operation}})
		require.NoError(t, err)
		_, err = txn.WithIdempotency(t.Context(), runner, idempotency.Request{Key: key, Fingerprint: payload},
			func(context.Context, pgx.Tx) (string, error) { return "done", nil })
		require.NoError(t, err)
	}
	_, err = pool.Exec(t.Context(), `UPDATE idempotency.records SET created_at = created_at - interval '1 minute',
		acquired_at = acquired_at - interval '1 minute', completed_at = completed_at - interval '1 minute', expires_at = expires_at - interval '1 minute'`)
	require.NoError(t, err)
	return client
}

func TestDrift_TellsAndCompensateHeals(t *testing.T) {
	t.Parallel()
	pool := pgtest.Pool(t, txn.ConfigurePool)
	node := newRedis(t)
	database, url := urlOf(pool), node.URL()
	client := served(t, pool, url)
	before := everything(t, pool)

	told := object(t, database, exitRefused, "drift", "--redis", url)
	require.EqualValues(t, 10, told["drift"].(map[string]any)["missing"])
	require.Len(t, told["found"], 10)
	a := pgonce(t, database, "", "drift", "--redis", url, "--limit", "3")
	require.Equal(t, exitRefused, a.code)
	require.Contains(t, a.out, "MISSING")
	require.Contains(t, a.err, "10 differences, 3 shown")
	require.Zero(t, client.DBSize(t.Context()).Val(), "it only tells")

	would := object(t, database, exitOK, "compensate", "--once", "--dry-run", "--redis", url)
	require.EqualValues(t, 10, would["drift"].(map[string]any)["missing"])
	require.Zero(t, client.DBSize(t.Context()).Val())
	did := object(t, database, exitOK, "compensate", "--once", "--redis", url)
	require.EqualValues(t, 10, did["drift"].(map[string]any)["published"])
	require.Equal(t, []any{"order.create"}, did["operations"])
	require.EqualValues(t, 10, client.DBSize(t.Context()).Val())
	require.Equal(t, before, everything(t, pool))

	a = pgonce(t, database, "", "drift", "--redis", url)
	require.Equal(t, exitOK, a.code, "%s%s", a.out, a.err)
	require.Contains(t, a.err, "agrees")
	// Of an operation that nobody asks about nothing is said.
	require.NoError(t, client.FlushAll(t.Context()).Err())
	require.Equal(t, exitOK, pgonce(t, database, "", "drift", "--redis", url, "--operation", "another").code)
	require.Equal(t, exitRefused, pgonce(t, database, "", "drift", "--redis", url, "--operation", "order.create=1h").code)
}

func TestCompensate_RescuesAndPurges(t *testing.T) {
	t.Parallel()
	pool := pgtest.Pool(t, txn.ConfigurePool)
	database := urlOf(pool)
	leased(t, pool, "again", idempotency.TakeoverRerun)
	leased(t, pool, "person", idempotency.TakeoverManual)
	leased(t, pool, "asks", idempotency.TakeoverResolve)
	leased(t, pool, "lives", idempotency.TakeoverRerun)
	for _, value := range []string{"again", "person", "asks"} {
		makeStale(t, pool, value)
	}
	before := everything(t, pool)
	would := object(t, database, exitOK, "compensate", "--once", "--dry-run")
	require.EqualValues(t, 3, would["stale"])
	require.EqualValues(t, 1, would["rescued"])
	require.EqualValues(t, 2, would["wait_for_resolver_or_person"])
	require.Equal(t, before, everything(t, pool))

	a := pgonce(t, database, "", "compensate", "--once")
	require.Equal(t, exitOK, a.code, a.err)
	require.Regexp(t, `made a retryable failure +1`, a.out)
	require.Equal(t, []string{"again"}, column[string](t, pool, `SELECT key FROM idempotency.records WHERE state = 'FAILED' AND retryable`))
	require.Equal(t, []string{"pgonce compensate"}, column[string](t, pool, `SELECT actor FROM idempotency.attempts WHERE event = 'RESCUED'`))
	_, err := pool.Exec(t.Context(), `UPDATE idempotency.records SET expires_at = statement_timestamp() - interval '1 s' WHERE key = 'again'`)
	require.NoError(t, err)
	require.EqualValues(t, 1, object(t, database, exitOK, "compensate", "--once")["purged"])
}

func TestCompensate_RunsUntilItIsEnded(t *testing.T) {
	t.Parallel()
	pool := pgtest.Pool(t, txn.ConfigurePool)
	leased(t, pool, "k", idempotency.TakeoverRerun)
	makeStale(t, pool, "k")
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan int, 1)
	go func() { done <- pgonceUntil(ctx, urlOf(pool), "compensate", "--interval", "1s") }()
	require.Eventually(t, func() bool {
		return len(column[string](t, pool, `SELECT key FROM idempotency.records WHERE state = 'FAILED'`)) == 1
	}, 20*time.Second, 20*time.Millisecond)
	cancel()
	require.Equal(t, exitOK, <-done)
}

func TestCompensate_WrongCommandLines(t *testing.T) {
	t.Parallel()
	pool := pgtest.Pool(t, txn.ConfigurePool)
	for _, args := range [][]string{
		{"drift"},
		{"compensate", "--dry-run"},
		{"compensate", "--once", "--operation", "x=1m"},
		{"compensate", "--once", "--operation", "x=soon"},
		{"compensate", "--once", "--operation", ""},
		{"compensate", "--once", "--redis", "http://x"},
		{"compensate", "--once", "--operation", "x", "--lookback", "1ms"},
	} {
		a := pgonce(t, urlOf(pool), "", args...)
		require.Equal(t, exitUsage, a.code, "%v: %s", args, a.err)
	}
	require.Equal(t, exitOK, pgonce(t, urlOf(pool), "", "compensate", "--once").code, "an empty database is no error")
}
