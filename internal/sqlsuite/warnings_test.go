package sqlsuite

import (
	"context"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/stretchr/testify/require"

	"github.com/pgonce/pgonce/internal/pgtest"
)

// What docs/sql_api.md warns of is so.

func connect(t *testing.T, url string) *pgx.Conn {
	t.Helper()
	conn, err := pgx.Connect(t.Context(), url)
	require.NoError(t, err)
	t.Cleanup(func() { _ = conn.Close(context.Background()) })
	return conn
}

func run(t *testing.T, conn *pgx.Conn, sql string, args ...any) {
	t.Helper()
	_, err := conn.Exec(t.Context(), sql, args...)
	require.NoError(t, err)
}

func verdict(t *testing.T, conn *pgx.Conn) (verdict string) {
	t.Helper()
	require.NoError(t, conn.QueryRow(t.Context(),
		`SELECT a.verdict FROM idempotency.acquire('acme', 'order.create', 'k', idempotency.fingerprint_of('x')) AS a`).Scan(&verdict))
	return verdict
}

const complete = `SELECT idempotency.complete(tenant, operation, key, fence, attempt_token, '1') FROM idempotency.records`

func requireSQLState(t *testing.T, code string, err error) {
	t.Helper()
	var server *pgconn.PgError
	require.ErrorAs(t, err, &server)
	require.Equal(t, code, server.Code, server.Message)
}

// At the higher levels a transaction cannot see what was committed since its snapshot: it gets an error, not the key.
func TestWarning_HigherLevelsGetErrors(t *testing.T) {
	t.Parallel()
	for level, states := range map[string][]string{"REPEATABLE READ": {"23505"}, "SERIALIZABLE": {"23505", "40001"}} {
		t.Run(level, func(t *testing.T) {
			t.Parallel()
			url := pgtest.URL(t)
			one, other := connect(t, url), connect(t, url)
			run(t, one, `BEGIN ISOLATION LEVEL `+level)
			run(t, one, `SELECT count(*) FROM pg_class`) // its snapshot
			require.Equal(t, "RUN", verdict(t, other))
			run(t, other, complete)
			_, err := one.Exec(t.Context(), `SELECT idempotency.acquire('acme', 'order.create', 'k', idempotency.fingerprint_of('x'))`)
			var server *pgconn.PgError
			require.ErrorAs(t, err, &server)
			require.Contains(t, states, server.Code)
			if server.Code == "23505" {
				require.Equal(t, "records_pkey", server.ConstraintName)
			}
			run(t, one, `ROLLBACK`)
			require.Equal(t, "REPLAY", verdict(t, one))

			// A record that was there, and is another one's meanwhile.
			run(t, one, `UPDATE idempotency.records SET expires_at = statement_timestamp()`)
			run(t, one, `BEGIN ISOLATION LEVEL `+level)
			run(t, one, `SELECT count(*) FROM pg_class`)
			require.Equal(t, "RUN", verdict(t, other))
			_, err = one.Exec(t.Context(), `SELECT idempotency.acquire('acme', 'order.create', 'k', idempotency.fingerprint_of('x'))`)
			requireSQLState(t, "40001", err)
		})
	}
}

func TestWarning_ADuplicateThatStaysKeepsTheOwnerFromCompleting(t *testing.T) {
	t.Parallel()
	url := pgtest.URL(t)
	owner, duplicate := connect(t, url), connect(t, url)
	require.Equal(t, "RUN", verdict(t, owner))
	run(t, duplicate, `BEGIN`)
	require.Equal(t, "IN_PROGRESS", verdict(t, duplicate))
	run(t, owner, `SET lock_timeout = '50 ms'`)
	_, err := owner.Exec(t.Context(), complete)
	requireSQLState(t, "55P03", err)
	run(t, duplicate, `ROLLBACK`)
	run(t, owner, complete)
}

func TestWarning_TimeStandsStillInsideOneStatement(t *testing.T) {
	t.Parallel()
	conn := connect(t, pgtest.URL(t))
	run(t, conn, `DO $$
		DECLARE
			a idempotency.acquisition;
			until timestamptz;
		BEGIN
			a := idempotency.acquire('acme', 'order.create', 'k', idempotency.fingerprint_of('x'), lease => '1 second');
			PERFORM pg_sleep(0.1);
			until := idempotency.renew('acme', 'order.create', 'k', a.fence, a.attempt_token, '1 second');
			ASSERT until = a.lease_expires_at, 'renew has moved the end';
			ASSERT idempotency.complete('acme', 'order.create', 'k', a.fence, a.attempt_token, '1') = a.acquired_at, 'it took time';
		END $$`)
}

func TestWarning_ErrorsAreAsTheTableSays(t *testing.T) {
	t.Parallel()
	conn := connect(t, pgtest.URL(t))
	for name, one := range map[string]struct{ sql, code string }{
		"rule":        {`SELECT idempotency.acquire('a', 'o', 'k', idempotency.fingerprint_of('x'), takeover => 'MAYBE')`, "23514"},
		"token":       {`SELECT idempotency.acquire('a', 'o', 'k', idempotency.fingerprint_of('x'), attempt_token => '12345')`, "23514"},
		"key":         {`SELECT idempotency.acquire('a', 'o', '` + strings.Repeat("k", 256) + `', idempotency.fingerprint_of('x'))`, "23514"},
		"fingerprint": {`SELECT idempotency.acquire('a', 'o', 'k', sha256('x'))`, "22023"},
		"lease":       {`SELECT idempotency.acquire('a', 'o', 'k', idempotency.fingerprint_of('x'), lease => '1 ms')`, "22023"},
		"retention":   {`SELECT idempotency.complete('a', 'o', 'k', 1, '1234567890123456', '1', retention => '1 minute')`, "22023"},
		"lost":        {`SELECT idempotency.renew('a', 'o', 'k', 1, '1234567890123456')`, "ZP003"},
	} {
		_, err := conn.Exec(t.Context(), one.sql)
		requireSQLState(t, one.code, err)
		require.NoError(t, conn.Ping(t.Context()), name)
	}
	run(t, conn, `BEGIN READ ONLY`) // as a standby is
	_, err := conn.Exec(t.Context(), `SELECT idempotency.acquire('a', 'o', 'k', idempotency.fingerprint_of('x'))`)
	requireSQLState(t, "25006", err)
}
