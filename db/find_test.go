package db_test

import (
	"fmt"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/pgonce/pgonce/internal/pgtest"
)

func TestFind_GivesTheLinesOfTheViewForOneKey(t *testing.T) {
	t.Parallel()
	pool := pgtest.Pool(t)
	require.Empty(t, column[string](t, pool, `SELECT key FROM idempotency.find('k')`), "of an empty table")

	past := databaseNow(t, pool).Add(-1)
	for _, r := range []row{
		successRow.with(row{"key": "k"}),
		failedRow.with(row{"key": "k", "operation": "order.cancel"}),
		successRow.with(row{"key": "k", "tenant": "globex", "expires_at": past}),
		processingRow.with(row{"key": "k", "tenant": "zeta"}),
		// And nothing that only looks like the key.
		successRow.with(row{"key": "k", "tenant": "A", "operation": "a"}),
		successRow.with(row{"key": "k", "tenant": "é", "operation": "ÿ"}),
		successRow.with(row{"key": "K"}),
		successRow.with(row{"key": "k ", "tenant": "globex"}),
		successRow.with(row{"key": "kk", "tenant": "without"}),
		successRow.with(row{"key": "j", "tenant": "without"}),
	} {
		require.NoError(t, insert(t, pool, "idempotency.records", r))
	}
	require.Equal(t, []string{
		"A a SUCCESS", "acme order.cancel FAILED", "acme order.create SUCCESS", "globex order.create EXPIRED",
		"zeta order.create TIMEOUT", "é ÿ SUCCESS",
	}, column[string](t, pool, `SELECT tenant || ' ' || operation || ' ' || state FROM idempotency.find('k')`))

	// In one statement: the lines contain ages.
	for name, argument := range map[string]string{
		"a text": `'k'`, "a text with a collation": `'k' COLLATE "POSIX"`, "an expression": `lower('K')`,
	} {
		require.Equal(t, []bool{true}, column[bool](t, pool, `
			SELECT ARRAY(SELECT f::text FROM idempotency.find(`+argument+`) AS f)
			     = ARRAY(SELECT a::text FROM idempotency.audit AS a WHERE a.key = 'k' ORDER BY a.tenant, a.operation)`), name)
	}
	require.Equal(t, []int64{6}, column[int64](t, pool, `SELECT count(*) FROM idempotency.find($1)`, "k"))
	require.Equal(t, []int64{7}, column[int64](t, pool, `
		SELECT count(*) FROM (VALUES ('k'), ('j'), ('none'), (NULL)) AS v(key) CROSS JOIN LATERAL idempotency.find(v.key)`))
}

// A table that was never analyzed must not be read as a whole either.
func TestFind_ByThePrimaryKeyWithoutStatisticsToo(t *testing.T) {
	t.Parallel()
	conn := connect(t, pgtest.URL(t))
	_, err := conn.Exec(t.Context(), `
		INSERT INTO idempotency.records (tenant, operation, key, state, fence, generation, attempt, created_at, acquired_at,
			completed_at, executor, fingerprint, attempt_token, result_type)
		SELECT 'tenant-' || i % 10, 'operation-' || i / 10 % 5, 'k-' || i, 'SUCCESS', i, i, 1, now(), now(), now(), 'h',
			decode(repeat('01', 33), 'hex'), decode(repeat('02', 16), 'hex'), 'json/1'
		FROM generate_series(1, 20000) AS i`)
	require.NoError(t, err)
	_, err = conn.Exec(t.Context(), `PREPARE generic(text) AS SELECT * FROM idempotency.find($1)`)
	require.NoError(t, err)
	_, err = conn.Exec(t.Context(), `SET plan_cache_mode = force_generic_plan`)
	require.NoError(t, err)
	for _, statistics := range []string{`SELECT 1`, `ANALYZE idempotency.records`} { // before and after the first
		_, err = conn.Exec(t.Context(), statistics)
		require.NoError(t, err)
		for _, sql := range []string{`SELECT * FROM idempotency.find('k-7')`, `EXECUTE generic('k-7')`} {
			plan := strings.Join(column[string](t, conn, fmt.Sprintf("EXPLAIN %s", sql)), "\n")
			require.NotContains(t, plan, "Seq Scan", plan)
			require.Contains(t, plan, "records_pkey", plan)
			require.Contains(t, plan, "Index Cond: ((key)::text = ", plan)
		}
	}
}
