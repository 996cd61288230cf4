package db_test

import (
	"encoding/json"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgonce/pgonce/internal/pgtest"
)

// databaseNow is PostgreSQL's time: the views go by no other.
func databaseNow(t *testing.T, pool *pgxpool.Pool) time.Time {
	t.Helper()
	return column[time.Time](t, pool, `SELECT statement_timestamp()`)[0]
}

func insertRecords(t *testing.T, pool *pgxpool.Pool, rows map[string]row) {
	t.Helper()
	for key, r := range rows {
		require.NoError(t, insert(t, pool, "idempotency.records", r.with(row{"key": key})))
	}
}

func TestAudit_DerivesTimeoutAndExpired(t *testing.T) {
	t.Parallel()
	pool := pgtest.Pool(t)
	now := databaseNow(t, pool)
	past, future := now.Add(-time.Second), now.Add(time.Hour)
	insertRecords(t, pool, map[string]row{
		"init":               initRow.with(row{"expires_at": future}),
		"init expired":       initRow.with(row{"expires_at": past}),
		"processing":         processingRow.with(row{"lease_expires_at": future}),
		"processing expired": processingRow.with(row{"lease_expires_at": future, "expires_at": past}),
		"timeout":            processingRow.with(row{"lease_expires_at": past}),
		"timeout expired":    processingRow.with(row{"lease_expires_at": past, "expires_at": past}),
		"success":            successRow.with(row{"expires_at": future}),
		"success for ever":   successRow,
		"success expired":    successRow.with(row{"expires_at": past}),
		"failed":             failedRow.with(row{"expires_at": future}),
		"failed expired":     failedRow.with(row{"expires_at": past}),
	})

	require.Equal(t, []string{
		"failed: FAILED",
		"failed expired: EXPIRED (FAILED)",
		"init: INIT",
		"init expired: EXPIRED (INIT)",
		"processing: PROCESSING",
		"processing expired: PROCESSING", // it never expires
		"success: SUCCESS",
		"success expired: EXPIRED (SUCCESS)",
		"success for ever: SUCCESS",
		"timeout: TIMEOUT (PROCESSING)",
		"timeout expired: TIMEOUT (PROCESSING)",
	}, column[string](t, pool, `
		SELECT key || ': ' || state || CASE WHEN state <> stored_state THEN ' (' || stored_state || ')' ELSE '' END
		FROM idempotency.audit ORDER BY key`))
	require.Equal(t, []string{"timeout", "timeout expired"},
		column[string](t, pool, `SELECT key FROM idempotency.stale ORDER BY key`))
	require.Equal(t, []string{"processing", "processing expired", "success for ever", "timeout", "timeout expired"},
		column[string](t, pool, `SELECT key FROM idempotency.audit WHERE retention_left IS NULL ORDER BY key`))
}

func TestAudit_ShowsAgeDurationAndResult(t *testing.T) {
	t.Parallel()
	pool := pgtest.Pool(t)
	now := databaseNow(t, pool)
	began := row{"created_at": now.Add(-time.Hour), "acquired_at": now.Add(-time.Hour)}
	done := row{"completed_at": now.Add(-time.Hour + 1500*time.Microsecond)}
	insertRecords(t, pool, map[string]row{
		"done":       successRow.with(began).with(done).with(row{"expires_at": now.Add(-time.Second)}),
		"running":    processingRow.with(began),
		"text":       successRow.with(row{"result_type": "text/1"}),
		"broken":     successRow.with(row{"result": []byte("{\xff")}),
		"empty":      successRow.with(row{"result": []byte{}}),
		"deep":       successRow.with(row{"result": []byte(strings.Repeat("[", 1_000_000))}),
		"zero":       successRow.with(row{"result": []byte(`{"b":"\u0000","a":1.00,"a":12345678901234567890}`)}),
		"tombstone":  successRow.with(row{"result": nil}),
		"past":       successRow.with(row{"result_expires_at": now.Add(-time.Second)}),
		"still kept": successRow.with(row{"result_expires_at": now.Add(time.Hour)}),
		"failed":     failedRow,
	})

	require.Equal(t, []string{"00:00:00.0015 0"}, column[string](t, pool, `
		SELECT duration || ' ' || extract(epoch FROM retention_left)::integer FROM idempotency.audit WHERE key = 'done'`))
	require.Equal(t, []bool{true}, column[bool](t, pool, `
		SELECT age BETWEEN interval '1 hour' AND interval '1 hour 1 minute'
		   AND duration BETWEEN interval '1 hour' AND interval '1 hour 1 minute'
		   AND extract(microseconds FROM age)::integer % 1000000 = 0
		FROM idempotency.audit WHERE key = 'running'`))
	require.Equal(t, []string{
		"broken - 2 false",
		"deep - 1000000 false",
		"done {} 2 false",
		"empty - 0 false",
		"failed - - false",
		"past - 2 true",
		"running - - false",
		"still kept {} 2 false",
		"text - 2 false",
		"tombstone - - true",
		`zero {"b":"\u0000","a":1.00,"a":12345678901234567890} 48 false`,
	}, column[string](t, pool, `
		SELECT concat_ws(' ', key, COALESCE(result::text, '-'), COALESCE(result_bytes::text, '-'), result_dropped::text)
		FROM idempotency.audit ORDER BY key`))
	require.Equal(t, []string{"NO_STOCK: sold out"},
		column[string](t, pool, `SELECT error FROM idempotency.audit WHERE error IS NOT NULL`))
}

func TestDaily_CountsEveryRecordOnce(t *testing.T) {
	t.Parallel()
	pool := pgtest.Pool(t)
	rows := map[string]row{
		"init": initRow, "processing": processingRow, "failed": failedRow,
		"next day": successRow.with(row{"created_at": someTime.Add(24 * time.Hour)}),
	}
	for i := range 100 {
		rows[fmt.Sprintf("success %d", i)] = successRow.with(row{"completed_at": someTime.Add(time.Duration(i+1) * time.Millisecond)})
	}
	insertRecords(t, pool, rows)

	require.Equal(t, []string{
		"2026-03-08 acme order.create 103 100 1 1 1 00:00:00.05 00:00:00.095",
		"2026-03-09 acme order.create 1 1 0 0 0 00:00:00 00:00:00",
	}, column[string](t, pool, `
		SELECT concat_ws(' ', day, tenant, operation, records, success, failed, processing, issued, p50_duration, p95_duration)
		FROM idempotency.daily ORDER BY day`))
}

func TestCase_P17_TheViewsDecideEquallyInEveryTimeZone(t *testing.T) {
	t.Parallel()
	url := pgtest.URL(t)
	pool := newPool(t, url)
	now := databaseNow(t, pool)
	rows := map[string]row{
		// 02:45 UTC is another day in St. John's, where clocks also change in this night; 23:45 is another in Kolkata.
		"early": successRow.with(row{"created_at": time.Date(2026, time.March, 8, 2, 45, 0, 0, time.UTC)}),
		"late":  successRow.with(row{"created_at": time.Date(2026, time.March, 8, 23, 45, 0, 0, time.UTC)}),
	}
	// A wrong zone would be off by at least an hour.
	for name, offset := range map[string]time.Duration{"past": -time.Minute, "future": 10 * time.Minute} {
		rows["success "+name] = successRow.with(row{"expires_at": now.Add(offset)})
		rows["lease "+name] = processingRow.with(row{"lease_expires_at": now.Add(offset)})
		rows["result "+name] = successRow.with(row{"result_expires_at": now.Add(offset)})
	}
	insertRecords(t, pool, rows)

	const look = `
		SELECT jsonb_build_object(
			'audit', (SELECT jsonb_object_agg(key, state || ' ' || result_dropped) FROM idempotency.audit),
			'stale', (SELECT jsonb_agg(key) FROM idempotency.stale),
			'daily', (SELECT jsonb_object_agg(day, records) FROM idempotency.daily))`
	var want any
	require.NoError(t, json.Unmarshal([]byte(`{
		"audit": {
			"early": "SUCCESS false", "late": "SUCCESS false",
			"success past": "EXPIRED false", "success future": "SUCCESS false",
			"lease past": "TIMEOUT false", "lease future": "PROCESSING false",
			"result past": "SUCCESS true", "result future": "SUCCESS false"
		},
		"stale": ["lease past"],
		"daily": {"2026-03-08": 8}
	}`), &want))
	for _, zone := range []string{"UTC", "Asia/Kolkata", "America/St_Johns"} {
		zoned := newPool(t, url, func(cfg *pgxpool.Config) { cfg.ConnConfig.RuntimeParams["timezone"] = zone })
		require.Equal(t, []string{zone}, column[string](t, zoned, `SHOW timezone`))
		require.Equal(t, []any{want}, column[any](t, zoned, look), zone)
	}
}

func TestStale_IsServedByItsIndex(t *testing.T) {
	t.Parallel()
	pool := pgtest.Pool(t)
	_, err := pool.Exec(t.Context(), `
		INSERT INTO idempotency.records (tenant, operation, key, state, fence, generation, attempt, created_at, acquired_at,
			completed_at, executor, fingerprint, attempt_token, result_type)
		SELECT 'acme', 'order.create', 'k-' || i, 'SUCCESS', i, i, 1, now(), now(), now(), 'h',
			decode(repeat('01', 33), 'hex'), decode(repeat('02', 16), 'hex'), 'json/1'
		FROM generate_series(1, 20000) AS i`)
	require.NoError(t, err)
	insertRecords(t, pool, map[string]row{"stale": processingRow})
	_, err = pool.Exec(t.Context(), `ANALYZE idempotency.records`)
	require.NoError(t, err)

	plan := strings.Join(column[string](t, pool, `EXPLAIN SELECT * FROM idempotency.stale`), "\n")
	require.Contains(t, plan, "using records_stale_idx")
	require.Contains(t, plan, "Index Cond: (lease_expires_at <= statement_timestamp())")
}
