package idempotency_test

import (
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/pgonce/pgonce/idempotency"
	"github.com/pgonce/pgonce/internal/dbsqlc"
	"github.com/pgonce/pgonce/internal/pgtest"
)

// What every process asks every few seconds, and what a call asks, must not cost what shadow has logged.
func TestBypasses_ManyRowsCostNothing(t *testing.T) {
	t.Parallel()
	pool := pgtest.Pool(t)
	exec(t, pool, `INSERT INTO idempotency.bypasses (tenant, operation, key, attempt_token, fingerprint, enforcement, would_be, outcome, executor, began_at, bypassed_at)
		SELECT 'acme', 'order.' || i % 7, md5(i::text), decode(lpad(to_hex(i), 32, '0'), 'hex'), idempotency.fingerprint_of('x'),
			CASE WHEN i % 1000 = 0 THEN 'off' ELSE 'shadow' END, CASE WHEN i % 1000 = 0 THEN 'RUN' ELSE 'REPLAY' END, 'SUCCESS', 'h', at, at
		FROM generate_series(1, 100000) AS i, LATERAL (SELECT statement_timestamp() - interval '40 days' + i * interval '34 s') AS t(at)`)
	exec(t, pool, `ANALYZE idempotency.bypasses`)
	plan := func(sql string, args ...any) string {
		rows, err := pool.Query(t.Context(), "EXPLAIN "+sql, append([]any{pgx.QueryExecModeExec}, args...)...)
		require.NoError(t, err)
		lines, err := pgx.CollectRows(rows, pgx.RowTo[string])
		require.NoError(t, err)
		return strings.Join(lines, "\n")
	}
	for name, asked := range map[string]string{
		"policies":  plan(dbsqlc.PolicyList, int64(900e6)),
		"a call":    plan(dbsqlc.BypassOpen, "acme", "order.1", "k"),
		"a commit":  plan(dbsqlc.BypassGetAttempt, "acme", "order.1", "k", [][]byte{make([]byte, 16)}),
		"the list":  plan(dbsqlc.BypassedList, false, "", "", "", "", false, 50),
		"the count": plan(dbsqlc.BypassCount, 1000),
		"a day":     plan(dbsqlc.ShadowReport, int64(24*time.Hour/time.Microsecond), ""),
	} {
		require.NotContains(t, asked, "Seq Scan on bypasses", "%s:\n%s", name, asked)
	}
	s := idempotency.NewStore(pgx.QueryExecModeExec)
	page, more, err := s.Bypassed(t.Context(), pool, &idempotency.BypassFilter{}, 60)
	require.NoError(t, err)
	require.Len(t, page, 60)
	require.True(t, more)
	rest, more, err := s.Bypassed(t.Context(), pool, &idempotency.BypassFilter{After: page[59].Key}, 60)
	require.NoError(t, err)
	require.Len(t, rest, 40)
	require.False(t, more)
	p := newPolicies(t, pool)
	_, err = p.RunOnce(t.Context())
	require.NoError(t, err)
	require.True(t, inForce(t, p, "order.3").Guarded)
	require.False(t, inForce(t, p, "order.7").Guarded)
}
