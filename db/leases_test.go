package db_test

import (
	"encoding/hex"
	"math"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5/pgconn"
	"github.com/stretchr/testify/require"

	"github.com/pgonce/pgonce/idempotency"
	"github.com/pgonce/pgonce/internal/pgtest"
)

// A program in another language needs nothing but these functions.
func TestLeases_TheWholeLifeInSQL(t *testing.T) {
	t.Parallel()
	conn := connect(t, pgtest.URL(t))
	one := func(sql string, args ...any) string {
		t.Helper()
		return column[string](t, conn, sql, args...)[0]
	}
	const ask = `SELECT a.verdict || ' ' || a.state || ' ' || a.attempt FROM idempotency.acquire('acme', 'payment.capture', 'k',
		idempotency.fingerprint_of($1), attempt_token => $2, takeover => $3) AS a`
	token, other := make([]byte, 16), append(make([]byte, 15), 1)
	require.Equal(t, "RUN PROCESSING 1", one(ask, []byte("10 EUR"), token, "RERUN"))
	require.Equal(t, "RUN PROCESSING 1", one(ask, []byte("10 EUR"), token, "RERUN"), "the same attempt asks again")
	require.Equal(t, "IN_PROGRESS PROCESSING 1", one(ask, []byte("10 EUR"), other, "RERUN"))
	require.Equal(t, "MISMATCH PROCESSING 1", one(ask, []byte("99 EUR"), other, "RERUN"))

	exec := func(sql string, args ...any) error {
		_, err := conn.Exec(t.Context(), sql, args...)
		return err
	}
	const fence = `(SELECT fence FROM idempotency.records WHERE key = 'k')`
	require.NoError(t, exec(`SELECT idempotency.renew('acme', 'payment.capture', 'k', `+fence+`, $1)`, token))
	require.NoError(t, exec(`SELECT idempotency.record_step('acme', 'payment.capture', 'k', `+fence+`, $1, 'charge', '"ch_1"')`, token))
	require.NoError(t, exec(`SELECT idempotency.fail('acme', 'payment.capture', 'k', `+fence+`, $1, 'BUSY', 'try later', retryable => true)`, token))
	require.Equal(t, "RUN PROCESSING 2", one(ask, []byte("10 EUR"), other, "RERUN"))
	requireSQLState(t, "ZP003", exec(`SELECT idempotency.renew('acme', 'payment.capture', 'k', `+fence+`, $1)`, token))
	requireSQLState(t, "ZP003", exec(`SELECT idempotency.complete('acme', 'payment.capture', 'k', `+fence+` - 1, $1, '{}')`, other))

	// Its owner dies.
	require.NoError(t, exec(`UPDATE idempotency.records SET lease_expires_at = statement_timestamp() - interval '1 s'`))
	require.Equal(t, "RUN PROCESSING 3", one(ask, []byte("10 EUR"), token, "MANUAL"), "as the record's own rule says")
	requireSQLState(t, "ZP003", exec(`SELECT idempotency.complete('acme', 'payment.capture', 'k', `+fence+`, $1, '{}')`, other))
	const complete = `SELECT idempotency.complete('acme', 'payment.capture', 'k', ` + fence + `, $1, '{"charge":"ch_1"}')`
	require.NoError(t, exec(complete, token))
	requireSQLState(t, "ZP002", exec(complete, token)) // with its business rows it would commit them twice
	requireSQLState(t, "22023", exec(`SELECT idempotency.acquire('acme', 'payment.capture', 'k', NULL)`))
	requireSQLState(t, "22023", exec(`SELECT idempotency.acquire('acme', 'payment.capture', NULL, idempotency.fingerprint_of($1))`, token))
	require.Equal(t, "REPLAY SUCCESS 3", one(ask, []byte("10 EUR"), other, "RERUN"))
	require.Equal(t, []string{"ACQUIRED", "FAILED", "ACQUIRED", "LEASE_LOST", "TAKEOVER"},
		column[string](t, conn, `SELECT event FROM idempotency.attempts ORDER BY id`))
	require.Equal(t, []string{"charge"}, column[string](t, conn, `SELECT name FROM idempotency.steps`))
}

// A program calls somebody because the commit was acknowledged.
func TestLeases_CommitsWaitForTheDisk(t *testing.T) {
	t.Parallel()
	conn := connect(t, pgtest.URL(t))
	_, err := conn.Exec(t.Context(), `SET synchronous_commit = off; BEGIN`)
	require.NoError(t, err)
	_, err = conn.Exec(t.Context(), `SELECT idempotency.acquire('acme', 'payment.capture', 'k', idempotency.fingerprint_of('x'))`)
	require.NoError(t, err)
	require.Equal(t, []string{"on"}, column[string](t, conn, `SHOW synchronous_commit`))
	_, err = conn.Exec(t.Context(), `COMMIT; SET synchronous_commit = remote_apply; BEGIN`)
	require.NoError(t, err)
	_, err = conn.Exec(t.Context(), `SELECT idempotency.complete('acme', 'payment.capture', 'k', fence, attempt_token, '1') FROM idempotency.records`)
	require.NoError(t, err)
	require.Equal(t, []string{"remote_apply"}, column[string](t, conn, `SHOW synchronous_commit`))
}

// Who is told "no" learns nothing that lets him write, or that is another caller's.
func TestLeases_ADuplicateLearnsNoToken(t *testing.T) {
	t.Parallel()
	conn := connect(t, pgtest.URL(t))
	const ask = `SELECT a.verdict || ' ' || COALESCE(encode(a.attempt_token, 'hex'), 'no token') || ' ' || COALESCE(convert_from(a.result, 'UTF8'), 'no result')
		FROM idempotency.acquire('acme', 'payment.capture', 'k', idempotency.fingerprint_of($1), attempt_token => $2) AS a`
	token, other := make([]byte, 16), append(make([]byte, 15), 1)
	owners := hex.EncodeToString(token)
	require.Equal(t, []string{"RUN " + owners + " no result"}, column[string](t, conn, ask, []byte("a"), token))
	require.Equal(t, []string{"IN_PROGRESS no token no result"}, column[string](t, conn, ask, []byte("a"), other))
	const complete = `SELECT idempotency.complete(tenant, operation, key, fence, attempt_token, 'answer', 'bytes/1', retention => $1::interval) FROM idempotency.records`
	_, err := conn.Exec(t.Context(), complete, "0 s")
	requireSQLState(t, "22023", err)
	_, err = conn.Exec(t.Context(), complete, "1 h")
	require.NoError(t, err)
	require.Equal(t, []string{"MISMATCH no token no result"}, column[string](t, conn, ask, []byte("b"), other))
	require.Equal(t, []string{"REPLAY " + owners + " answer"}, column[string](t, conn, ask, []byte("a"), other))
}

func requireSQLState(t *testing.T, code string, err error) {
	t.Helper()
	var server *pgconn.PgError
	require.ErrorAs(t, err, &server)
	require.Equal(t, code, server.Code, server.Message)
}

// Who asks again after a lost answer is told again to find out first.
func TestLeases_ResolveIsSaidTwice(t *testing.T) {
	t.Parallel()
	conn := connect(t, pgtest.URL(t))
	const ask = `SELECT a.verdict FROM idempotency.acquire('acme', 'payment.capture', 'k', idempotency.fingerprint_of('x'),
		attempt_token => $1, takeover => 'RESOLVE', resolver => true) AS a`
	first, second := make([]byte, 16), append(make([]byte, 15), 1)
	require.Equal(t, []string{"RUN"}, column[string](t, conn, ask, first))
	_, err := conn.Exec(t.Context(), `UPDATE idempotency.records SET lease_expires_at = statement_timestamp() - interval '1 s'`)
	require.NoError(t, err)
	for range 2 {
		require.Equal(t, []string{"RESOLVE"}, column[string](t, conn, ask, second))
	}
}

// A call that an attempt of a Go program has begun may be repeated by one of another language, and must be the same call.
func TestLeases_DownstreamKeysOfGoAndSQLAgree(t *testing.T) {
	t.Parallel()
	conn := connect(t, pgtest.URL(t))
	for _, g := range goldenLockIDs {
		for _, generation := range []int64{1, 255, 256, math.MaxInt64} {
			for _, name := range []string{"", "charge", "item-1", "schritt-ü-漢字-🙂", strings.Repeat("n", 255)} {
				key, err := idempotency.NewKey(g.tenant, g.operation, g.key)
				require.NoError(t, err)
				record := idempotency.Record{Key: key, Generation: generation}
				require.Equal(t, []string{record.DownstreamKey(name)}, column[string](t, conn,
					`SELECT idempotency.downstream_key($1, $2, $3, $4, $5)`, g.tenant, g.operation, g.key, generation, name))
			}
		}
	}
	// Computed by hand (Python's hashlib): neither side may ever change, not even both at once.
	require.Equal(t, []string{"CIvB7fraSGizAqbYSJVE_6Vo32hBJZ7i"},
		column[string](t, conn, `SELECT idempotency.downstream_key('acme', 'payment.capture', 'k-1', 42, 'charge')`))
}

// Whoever loses a key is named in the audit, with the attempt he was.
func TestLeases_WhoLostTheKeyIsRecorded(t *testing.T) {
	t.Parallel()
	conn := connect(t, pgtest.URL(t))
	exec := func(sql string, args ...any) {
		t.Helper()
		_, err := conn.Exec(t.Context(), sql, args...)
		require.NoError(t, err)
	}
	ask := func(executor string) {
		t.Helper()
		exec(`SELECT idempotency.acquire('acme', 'payment.capture', 'k', idempotency.fingerprint_of('x'), takeover => 'RERUN',
			executor => $1, trace_id => 'trace of ' || $1)`, executor)
	}
	die := func() {
		t.Helper()
		exec(`UPDATE idempotency.records SET lease_expires_at = statement_timestamp() - interval '1 s'`)
	}
	ask("web-1")
	ask("web-2") // in progress: nobody has lost anything
	die()
	ask("web-2")
	die()
	exec(`SELECT idempotency.rescue(tenant, operation, key, fence, 'compensator', 'stale') FROM idempotency.records`)
	require.Equal(t, []string{
		"ACQUIRED 1 web-1", "LEASE_LOST 1 web-1 by web-2", "TAKEOVER 2 web-2", "LEASE_LOST 2 web-2 by compensator",
		"RESCUED 2 web-2 by compensator",
	}, column[string](t, conn, `SELECT event || ' ' || attempt || ' ' || executor || COALESCE(' by ' || actor, '') FROM idempotency.attempts ORDER BY id`))
	require.Equal(t, []bool{true, true}, column[bool](t, conn, `
		SELECT l.attempt_token = b.attempt_token AND l.started_at = b.started_at AND l.trace_id = b.trace_id AND l.ended_at >= l.started_at
		    AND l.reason IS NOT NULL AND l.outcome IS NULL
		FROM idempotency.attempts AS l JOIN idempotency.attempts AS b ON b.fence = l.fence AND b.event IN ('ACQUIRED', 'TAKEOVER')
		WHERE l.event = 'LEASE_LOST'`))
}

// That an owner has lost its key does not say what it has done: by the rule RESOLVE that is still to be found out.
func TestLeases_ALostLeaseIsNotAnEnd(t *testing.T) {
	t.Parallel()
	conn := connect(t, pgtest.URL(t))
	ask := func(token byte) []string {
		t.Helper()
		return column[string](t, conn, `SELECT a.verdict FROM idempotency.acquire('acme', 'payment.capture', 'k', idempotency.fingerprint_of('x'),
			attempt_token => $1, takeover => 'RESOLVE', resolver => true) AS a`, append(make([]byte, 15), token))
	}
	require.Equal(t, []string{"RUN"}, ask(1))
	_, err := conn.Exec(t.Context(), `UPDATE idempotency.records SET lease_expires_at = statement_timestamp() - interval '1 s'`)
	require.NoError(t, err)
	require.Equal(t, []string{"RESOLVE"}, ask(2))
	_, err = conn.Exec(t.Context(), `SELECT idempotency.fail(tenant, operation, key, fence, attempt_token, 'BUSY', 'the gateway is away',
		retryable => true) FROM idempotency.records`)
	require.NoError(t, err)
	require.Equal(t, []string{"RESOLVE"}, ask(3), "nobody has found out about the first attempt yet")
}
