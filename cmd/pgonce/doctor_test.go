package main

import (
	"fmt"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgonce/pgonce/db"
	"github.com/pgonce/pgonce/idempotency"
	"github.com/pgonce/pgonce/internal/devstack"
	"github.com/pgonce/pgonce/internal/pgtest"
	"github.com/pgonce/pgonce/txn"
)

// examine runs doctor and returns the severities by check; what is wrong must come with a fix.
func examine(t *testing.T, database string, code int, args ...string) (severities, found map[string]string) {
	t.Helper()
	v := object(t, database, code, append([]string{"doctor"}, args...)...)
	severities, found = map[string]string{}, map[string]string{}
	for _, f := range v["findings"].([]any) {
		m := f.(map[string]any)
		check, severity := m["check"].(string), m["severity"].(string)
		if severity == "warning" || severity == "error" {
			require.NotEmpty(t, m["fix"], check)
		}
		severities[check], found[check] = severity, m["found"].(string)
	}
	return severities, found
}

// newServer is a migrated server of the test's own.
func newServer(t *testing.T, settings map[string]string) *devstack.Node {
	t.Helper()
	cluster, err := devstack.StartCluster(t.Context(), &devstack.Config{Settings: settings, Out: os.Stderr})
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, cluster.Stop()) })
	pool, err := pgxpool.New(t.Context(), cluster.Primary().URL())
	require.NoError(t, err)
	defer pool.Close()
	require.NoError(t, db.Migrate(t.Context(), pool))
	return cluster.Primary()
}

func TestDoctor_FindsNothingWhereAllIsWell(t *testing.T) {
	t.Parallel()
	primary := newServer(t, map[string]string{
		"fsync": "on", "statement_timeout": "30s", "idle_in_transaction_session_timeout": "60s", "lock_timeout": "10s",
		"tcp_keepalives_idle": "60", "tcp_user_timeout": "30s",
	})
	redis := newRedis(t, "maxmemory 100mb", "maxmemory-policy noeviction", "appendonly yes")
	severities, found := examine(t, primary.URL(), exitOK, "--redis", redis.URL(), "--redis-cache")
	for check, severity := range severities {
		require.NotContains(t, []string{"warning", "error"}, severity, "%s: %s", check, found[check])
	}
	for _, check := range []string{
		"server version", "recovery", "clock", "pooler", "isolation", "statement_timeout", "idle_in_transaction_session_timeout",
		"lock_timeout", "fsync", "synchronous_commit", "schema", "epoch", "stale records", "redis", "redis access", "redis version",
		"redis role", "redis eviction", "redis memory", "redis persistence",
	} {
		require.Equal(t, "ok", severities[check], check)
	}
	a := pgonce(t, primary.URL(), "", "doctor")
	require.Zero(t, a.code)
	require.Regexp(t, `(?m)^OK +schema +version \d+$`, a.out)
	require.Contains(t, a.out, "0 errors, 0 warnings")
}

func TestDoctor_FindsEveryFaultOfABadSetUp(t *testing.T) {
	t.Parallel()
	pool := pgtest.Pool(t, txn.ConfigurePool) // its server has fsync=off, and default keepalives
	leased(t, pool, "stale", idempotency.TakeoverManual)
	makeStale(t, pool, "stale")
	role := fmt.Sprintf("limited_%d", time.Now().UnixNano())
	name := pool.Config().ConnConfig.Database
	_, err := pool.Exec(t.Context(), fmt.Sprintf(`
		CREATE ROLE %[1]s LOGIN PASSWORD 'x';
		GRANT USAGE ON SCHEMA idempotency TO %[1]s;
		GRANT SELECT ON ALL TABLES IN SCHEMA idempotency TO %[1]s;
		REVOKE EXECUTE ON FUNCTION pg_control_system() FROM PUBLIC;
		ALTER TABLE idempotency.records DISABLE TRIGGER records_check;
		ALTER DATABASE %[2]s SET default_transaction_isolation = 'repeatable read';
		ALTER DATABASE %[2]s SET statement_timeout = '900ms';
		ALTER DATABASE %[2]s SET idle_in_transaction_session_timeout = '500ms';
		ALTER DATABASE %[2]s SET lock_timeout = '20ms';
		ALTER DATABASE %[2]s SET synchronous_commit = 'off'`, role, name), pgx.QueryExecModeSimpleProtocol)
	require.NoError(t, err)
	t.Cleanup(func() {
		_, err := pool.Exec(t.Context(), fmt.Sprintf(`DROP OWNED BY %[1]s; DROP ROLE %[1]s`, role), pgx.QueryExecModeSimpleProtocol)
		_ = err // the server ends with the tests
	})
	cfg := pool.Config().ConnConfig
	limited := fmt.Sprintf("postgres://%s:x@%s:%d/%s", role, cfg.Host, cfg.Port, name)

	node := newRedis(t, "maxmemory 300kb", "maxmemory-policy noeviction", "user limited on >pw ~pgonce:* &pgonce:* -@all +ping +hello +info +get +evalsha +auth")
	args := []string{"--redis", "redis://limited:pw@" + node.Address()}
	severities, found := examine(t, limited, exitRefused, args...)
	for check, severity := range map[string]string{
		"fsync": "error", "schema": "error", "redis access": "error",
		"isolation": "warning", "statement_timeout": "warning", "idle_in_transaction_session_timeout": "warning",
		"lock_timeout": "warning", "tcp_keepalives_idle": "warning", "tcp_user_timeout": "warning",
		"synchronous_commit": "warning", "epoch": "warning", "stale records": "warning", "redis eviction": "warning",
	} {
		require.Equal(t, severity, severities[check], "%s: %s", check, found[check])
	}
	require.Contains(t, found["schema"], "trigger records_check is \"on records, DISABLED\"")
	require.Contains(t, found["epoch"], "the row alone")
	require.Contains(t, found["stale records"], "1, 1 of them wait for a person")
	require.Equal(t, "not allowed, or not on these names: eval, set, exists, pexpire, pttl, del, hset, hmget, publish, subscribe",
		strings.ReplaceAll(found["redis access"], ", del, publish", ", publish"))

	a := pgonce(t, limited, "", append([]string{"doctor"}, args...)...)
	require.Equal(t, exitRefused, a.code)
	require.Contains(t, a.out, "ALTER ROLE <service> SET statement_timeout = '30s'")
	require.Contains(t, a.out, "+eval +evalsha")
	require.NotContains(t, a.out+a.err, "pw@")
}

func TestDoctor_EvictionAndRoleOfRedis(t *testing.T) {
	t.Parallel()
	url := pgtest.URL(t)
	master := newRedis(t, "maxmemory-policy allkeys-lru")
	severities, found := examine(t, url, exitRefused, "--redis", master.URL())
	require.Equal(t, "note", severities["redis eviction"], "fronts may be evicted")
	require.Equal(t, "warning", severities["redis memory"], found["redis memory"])
	severities, _ = examine(t, url, exitRefused, "--redis", master.URL(), "--redis-cache")
	require.Equal(t, "error", severities["redis eviction"], "outcomes of Do may not")
	require.Equal(t, "warning", severities["redis persistence"])

	// A replica: whatever its master is, nothing can be written.
	replica := newRedis(t, "replicaof 127.0.0.1 1")
	severities, _ = examine(t, url, exitRefused, "--redis", replica.URL())
	require.Equal(t, "error", severities["redis role"])
	require.NoError(t, replica.Kill())
	severities, found = examine(t, url, exitRefused, "--redis", replica.URL())
	require.Equal(t, "error", severities["redis"])
	require.NotContains(t, found["redis"], replica.URL())
}

func TestDoctor_NamesPgBouncerInTransactionMode(t *testing.T) {
	t.Parallel()
	direct := pgtest.URL(t)
	severities, _ := examine(t, direct, exitRefused)
	require.Equal(t, "ok", severities["pooler"])
	pooled := pgtest.ThroughPooler(t, direct)
	severities, found := examine(t, pooled, exitRefused)
	require.Equal(t, "warning", severities["pooler"])
	require.Contains(t, found["pooler"], "transaction mode")
	// Everything else works through it too.
	require.Equal(t, exitRefused, pgonce(t, pooled, "", "get", "k").code)
	require.Zero(t, pgonce(t, pooled, "", "list").code)
}

func TestDoctor_StandbyAndMissingStandby(t *testing.T) {
	t.Parallel()
	primary := newServer(t, nil)
	standby, err := primary.Standby(t.Context())
	require.NoError(t, err)
	require.NoError(t, standby.Await(t.Context(), `SELECT pg_is_in_recovery()`))
	severities, found := examine(t, standby.URL(), exitRefused)
	require.Equal(t, "error", severities["recovery"], found["recovery"])
	require.NotContains(t, found, "policies", "a standby's say nothing")

	require.NoError(t, primary.Await(t.Context(), `SELECT EXISTS (SELECT FROM pg_stat_replication WHERE state = 'streaming')`))
	severities, found = examine(t, primary.URL(), exitRefused)
	require.Equal(t, "warning", severities["replication"], found["replication"])
	require.NoError(t, primary.Set(t.Context(), "synchronous_standby_names", "nobody"))
	require.NoError(t, primary.Await(t.Context(), `SELECT current_setting('synchronous_standby_names') = 'nobody'`))
	severities, found = examine(t, primary.URL(), exitRefused)
	require.Equal(t, "error", severities["replication"], found["replication"])
}

func TestDoctor_ClockAndNothingAtAll(t *testing.T) {
	t.Parallel()
	stack, err := devstack.Start(t.Context(), &devstack.Config{ClockOffset: time.Hour, Out: os.Stderr})
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, stack.Stop()) })
	database, err := stack.CreateDatabase(t.Context())
	require.NoError(t, err)
	severities, found := examine(t, database.URL, exitRefused)
	require.Equal(t, "warning", severities["clock"])
	require.Contains(t, found["clock"], "1h0m")
	require.Equal(t, "error", severities["schema"])
	require.Contains(t, found["schema"], "there is no schema idempotency")

	severities, _ = examine(t, "postgres://127.0.0.1:1/x?connect_timeout=1", exitRefused)
	require.Equal(t, map[string]string{"connection": "error"}, severities)
}
