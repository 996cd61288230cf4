package db_test

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgonce/pgonce/internal/pgtest"
)

// A program in another language issues tokens and uses them with nothing but these functions.
func TestTokens_TheWholeLifeInSQL(t *testing.T) {
	t.Parallel()
	conn := connect(t, pgtest.URL(t))
	one := func(sql string, args ...any) string {
		t.Helper()
		return column[string](t, conn, sql, args...)[0]
	}
	exec := func(sql string, args ...any) error {
		_, err := conn.Exec(t.Context(), sql, args...)
		return err
	}
	const ask = `SELECT a.verdict || COALESCE(' ' || a.state || ' ' || a.attempt, '') FROM idempotency.acquire_issued('acme', 'payment.capture', $3,
		idempotency.fingerprint_of($1), attempt_token => $2, takeover => 'RERUN') AS a`
	token, other := make([]byte, 16), append(make([]byte, 15), 1)
	require.Equal(t, "NOT_ISSUED", one(ask, []byte("10 EUR"), token, "t1"))
	require.Zero(t, column[int](t, conn, `SELECT count(*)::int FROM idempotency.records`)[0])

	until := column[time.Time](t, conn, `SELECT idempotency.issue('acme', 'payment.capture', 't1')`)[0]
	require.WithinDuration(t, column[time.Time](t, conn, `SELECT now()`)[0].Add(24*time.Hour), until, time.Minute)
	requireSQLState(t, "23505", exec(`SELECT idempotency.issue('acme', 'payment.capture', 't1')`))
	requireSQLState(t, "22023", exec(`SELECT idempotency.issue('acme', 'payment.capture', 't2', interval '0')`))
	requireSQLState(t, "22023", exec(`SELECT idempotency.issue('acme', 'payment.capture', 't2', NULL)`))
	requireSQLState(t, "22023", exec(`SELECT idempotency.acquire_issued('acme', 'payment.capture', 't1', NULL)`))
	require.Equal(t, "INIT 0", one(`SELECT state || ' ' || fence FROM idempotency.records`))

	require.Equal(t, "RUN PROCESSING 1", one(ask, []byte("10 EUR"), token, "t1"))
	require.Equal(t, "RUN PROCESSING 1", one(ask, []byte("10 EUR"), token, "t1"), "the same attempt asks again")
	require.Equal(t, "IN_PROGRESS PROCESSING 1", one(ask, []byte("10 EUR"), other, "t1"))
	require.Equal(t, "MISMATCH PROCESSING 1", one(ask, []byte("99 EUR"), other, "t1"))
	require.NoError(t, exec(`SELECT idempotency.fail('acme', 'payment.capture', 't1', fence, $1, 'BUSY', 'later', retryable => true) FROM idempotency.records`, token))
	require.Equal(t, "RUN PROCESSING 2", one(ask, []byte("10 EUR"), other, "t1"), "the same use goes on")
	require.NoError(t, exec(`SELECT idempotency.complete('acme', 'payment.capture', 't1', fence, $1, '{}') FROM idempotency.records`, other))
	require.Equal(t, "REPLAY SUCCESS 2", one(ask, []byte("10 EUR"), token, "t1"))

	// What was done with it is forgotten, and the token with it.
	require.NoError(t, exec(`UPDATE idempotency.records SET expires_at = statement_timestamp()`))
	require.Equal(t, "NOT_ISSUED", one(ask, []byte("10 EUR"), token, "t1"))
	require.Equal(t, []string{"SUCCESS"}, column[string](t, conn, `SELECT state FROM idempotency.records`))

	// A leased record never expires, whatever its age.
	require.NoError(t, exec(`SELECT idempotency.issue('acme', 'payment.capture', 't2', interval '1 h')`))
	require.Equal(t, "RUN PROCESSING 1", one(ask, []byte("10 EUR"), token, "t2"))
	require.NoError(t, exec(`UPDATE idempotency.records SET expires_at = 'epoch', lease_expires_at = 'epoch' WHERE key = 't2'`))
	require.Equal(t, "RUN PROCESSING 2", one(ask, []byte("10 EUR"), other, "t2"))
}

// Somebody runs a token whose time is over meanwhile: a duplicate is told to wait, not to get another token.
func TestTokens_RunningIsSaidBeforeNotIssued(t *testing.T) {
	t.Parallel()
	url := pgtest.URL(t)
	conn, runs := connect(t, url), connect(t, url)
	const ask = `SELECT a.verdict FROM idempotency.acquire_issued('acme', 'payment.capture', 't', idempotency.fingerprint_of('x')) AS a`
	_, err := runs.Exec(t.Context(), `BEGIN; SELECT pg_advisory_xact_lock(idempotency.lock_id('acme', 'payment.capture', 't'))`)
	require.NoError(t, err)
	require.Equal(t, []string{"IN_PROGRESS"}, column[string](t, conn, ask))
	_, err = runs.Exec(t.Context(), `COMMIT`)
	require.NoError(t, err)
	require.Equal(t, []string{"NOT_ISSUED"}, column[string](t, conn, ask))
}
