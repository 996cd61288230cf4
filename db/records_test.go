package db_test

import (
	"bytes"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgonce/pgonce/internal/pgtest"
)

// row is a row to insert: column name and value.
type row map[string]any

// with returns a copy with some columns changed.
func (r row) with(changes row) row {
	changed := maps.Clone(r)
	maps.Copy(changed, changes)
	return changed
}

func insert(t *testing.T, pool *pgxpool.Pool, table string, r row) error {
	t.Helper()
	columns := slices.Sorted(maps.Keys(r))
	marks, values := make([]string, len(columns)), make([]any, len(columns))
	for i, name := range columns {
		marks[i], values[i] = fmt.Sprintf("$%d", i+1), r[name]
	}
	_, err := pool.Exec(t.Context(), fmt.Sprintf("INSERT INTO %s (%s) VALUES (%s)",
		pgx.Identifier(strings.Split(table, ".")).Sanitize(), strings.Join(columns, ", "), strings.Join(marks, ", ")), values...)
	return err
}

// The shapes of the four states, all optional columns left out.
var (
	someTime = time.Date(2026, time.March, 8, 2, 45, 0, 0, time.UTC)
	anyRow   = row{
		"tenant": "acme", "operation": "order.create", "fence": 7, "generation": 7, "created_at": someTime,
	}
	initRow     = anyRow.with(row{"state": "INIT", "attempt": 0, "expires_at": someTime})
	acquiredRow = anyRow.with(row{
		"attempt": 1, "acquired_at": someTime, "executor": "host:1:ab",
		"fingerprint": bytes.Repeat([]byte{1}, 33), "attempt_token": bytes.Repeat([]byte{2}, 16),
	})
	processingRow = acquiredRow.with(row{"state": "PROCESSING", "lease_expires_at": someTime, "takeover": "RERUN"})
	successRow    = acquiredRow.with(row{
		"state": "SUCCESS", "completed_at": someTime, "result_type": "json/1", "result": []byte("{}"),
	})
	failedRow = acquiredRow.with(row{
		"state": "FAILED", "completed_at": someTime, "error_code": "NO_STOCK", "error_message": "sold out",
	})
)

func TestRecords_EveryRightShapeIsAccepted(t *testing.T) {
	t.Parallel()
	pool := pgtest.Pool(t)
	for i, r := range []row{
		initRow,
		processingRow,
		processingRow.with(row{"takeover": "RESUME"}),
		processingRow.with(row{"takeover": "RESOLVE"}),
		processingRow.with(row{"takeover": "MANUAL", "attempt": 3, "fence": 9, "expires_at": someTime}),
		successRow,
		successRow.with(row{"result": nil}), // a tombstone
		successRow.with(row{"expires_at": someTime, "result_expires_at": someTime, "client": "web", "trace_id": "t"}),
		successRow.with(row{"takeover": "RERUN"}), // leased, then done
		failedRow,
		failedRow.with(row{"error_message": ""}),
		failedRow.with(row{"result_type": "json/1", "result": []byte("{}")}),
		failedRow.with(row{"retryable": true, "takeover": "RERUN"}),
		successRow.with(row{
			"tenant": strings.Repeat("t", 128), "operation": strings.Repeat("o", 128), "key": strings.Repeat("k", 255),
		}),
	} {
		if r["key"] == nil {
			r = r.with(row{"key": fmt.Sprintf("k-%d", i)})
		}
		require.NoError(t, insert(t, pool, "idempotency.records", r), "%v", r)
	}
}

func TestRecords_EveryWrongShapeIsRefusedByName(t *testing.T) {
	t.Parallel()
	pool := pgtest.Pool(t)
	for _, c := range []struct {
		constraint string
		row        row
	}{
		{"records_tenant_check", successRow.with(row{"tenant": ""})},
		{"records_tenant_check", successRow.with(row{"tenant": strings.Repeat("é", 65)})},
		{"records_operation_check", successRow.with(row{"operation": ""})},
		{"records_operation_check", successRow.with(row{"operation": strings.Repeat("o", 129)})},
		{"records_key_check", successRow.with(row{"key": ""})},
		{"records_key_check", successRow.with(row{"key": strings.Repeat("k", 256)})},
		{"records_client_check", successRow.with(row{"client": ""})},
		{"records_client_check", successRow.with(row{"client": strings.Repeat("c", 256)})},
		{"records_state_check", acquiredRow.with(row{"state": "success"})},
		{"records_state_check", acquiredRow.with(row{"state": "EXPIRED"})},
		{"records_takeover_check", processingRow.with(row{"takeover": "rerun"})},
		{"records_fence_check", successRow.with(row{"generation": 8})},
		{"records_fingerprint_check", successRow.with(row{"fingerprint": bytes.Repeat([]byte{1}, 32)})},
		{"records_fingerprint_check", successRow.with(row{"fingerprint": bytes.Repeat([]byte("a"), 66)})},
		{"records_attempt_token_check", successRow.with(row{"attempt_token": bytes.Repeat([]byte("a"), 32)})},

		{"records_init_check", initRow.with(row{"attempt": 1})},
		{"records_init_check", initRow.with(row{"fingerprint": bytes.Repeat([]byte{1}, 33)})},
		{"records_init_check", initRow.with(row{"attempt_token": bytes.Repeat([]byte{1}, 16)})},
		{"records_init_check", initRow.with(row{"acquired_at": someTime})},
		{"records_init_check", initRow.with(row{"expires_at": nil})},

		{"records_acquired_check", successRow.with(row{"attempt": 0})},
		{"records_acquired_check", successRow.with(row{"fence": 0, "generation": 0})},
		{"records_acquired_check", successRow.with(row{"fingerprint": nil})},
		{"records_acquired_check", failedRow.with(row{"attempt_token": nil})},
		{"records_acquired_check", processingRow.with(row{"acquired_at": nil})},
		{"records_acquired_check", processingRow.with(row{"executor": nil})},

		{"records_processing_check", processingRow.with(row{"lease_expires_at": nil})},
		{"records_processing_check", processingRow.with(row{"takeover": nil})},
		{"records_open_check", processingRow.with(row{"completed_at": someTime})},
		{"records_open_check", processingRow.with(row{"result_type": "json/1"})},
		{"records_open_check", processingRow.with(row{"result_type": "json/1", "result": []byte("{}")})},
		{"records_open_check", initRow.with(row{"result_expires_at": someTime})},
		{"records_final_check", successRow.with(row{"completed_at": nil})},
		{"records_final_check", failedRow.with(row{"lease_expires_at": someTime})},
		{"records_success_check", successRow.with(row{"result_type": nil, "result": nil})},
		{"records_result_check", failedRow.with(row{"result": []byte("{}")})},
		{"records_error_check", failedRow.with(row{"error_code": nil})},
		{"records_error_check", failedRow.with(row{"error_message": nil})},
		{"records_error_check", successRow.with(row{"error_code": "X", "error_message": "x"})},
		{"records_error_check", successRow.with(row{"error_message": "x"})},
		{"records_error_check", initRow.with(row{"error_code": "X", "error_message": "x"})},
		{"records_retryable_check", failedRow.with(row{"retryable": true})},
		{"records_retryable_check", successRow.with(row{"retryable": true, "takeover": "RERUN"})},
		{"records_retryable_check", processingRow.with(row{"retryable": true})},
	} {
		if c.row["key"] == nil {
			c.row = c.row.with(row{"key": "k"})
		}
		requireRefused(t, insert(t, pool, "idempotency.records", c.row), c.constraint, c.row)
	}
	require.Equal(t, []int64{0}, column[int64](t, pool, `SELECT count(*) FROM idempotency.records`))
}

func TestRecords_OneRowPerKey(t *testing.T) {
	t.Parallel()
	pool := pgtest.Pool(t)
	r := successRow.with(row{"key": "k"})
	require.NoError(t, insert(t, pool, "idempotency.records", r))
	requireRefused(t, insert(t, pool, "idempotency.records", r), "records_pkey", r)
	// Another time makes no difference (a table partitioned by time would accept it).
	later := r.with(row{"created_at": someTime.Add(72 * time.Hour)})
	requireRefused(t, insert(t, pool, "idempotency.records", later), "records_pkey", later)
	for _, other := range []row{{"tenant": "other"}, {"operation": "other"}, {"key": "K"}, {"key": "k "}} {
		require.NoError(t, insert(t, pool, "idempotency.records", r.with(other)))
	}
}

func TestAttempts_EventAndOutcomeAreKnownWords(t *testing.T) {
	t.Parallel()
	pool := pgtest.Pool(t)
	r := row{
		"tenant": "acme", "operation": "order.create", "key": "k", "event": "ACQUIRED", "outcome": "PROCESSING",
		"generation": 1, "fence": 1, "attempt": 1,
	}
	for _, event := range []string{"ACQUIRED", "TAKEOVER", "FAILED", "RESCUED", "LEASE_LOST", "OPERATOR"} {
		require.NoError(t, insert(t, pool, "idempotency.attempts", r.with(row{"event": event})))
	}
	for _, outcome := range []any{"SUCCESS", "FAILED", nil} {
		require.NoError(t, insert(t, pool, "idempotency.attempts", r.with(row{"outcome": outcome})))
	}
	requireRefused(t, insert(t, pool, "idempotency.attempts", r.with(row{"event": "acquired"})), "attempts_event_check", r)
	requireRefused(t, insert(t, pool, "idempotency.attempts", r.with(row{"outcome": "INIT"})), "attempts_outcome_check", r)
}

func TestRefuse_RaisesTheCodeItIsGiven(t *testing.T) {
	t.Parallel()
	pool := pgtest.Pool(t)
	_, err := pool.Exec(t.Context(), `SELECT idempotency.refuse('ZP002', 'no')`)
	var pgErr *pgconn.PgError
	require.ErrorAs(t, err, &pgErr)
	require.Equal(t, "ZP002", pgErr.Code)
	require.Equal(t, "no", pgErr.Message)
	// Not while planning: the branch is not taken.
	_, err = pool.Exec(t.Context(), `SELECT CASE WHEN now() IS NOT NULL THEN 'fine' ELSE idempotency.refuse('ZP002', 'no') END`)
	require.NoError(t, err)
}

func requireRefused(t *testing.T, err error, constraint string, r row) {
	t.Helper()
	var pgErr *pgconn.PgError
	require.Truef(t, errors.As(err, &pgErr), "%s accepted %v (%v)", constraint, r, err)
	require.Equalf(t, constraint, pgErr.ConstraintName, "%v: %v", r, err)
}
