package db_test

import (
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/stretchr/testify/require"

	"github.com/pgonce/pgonce/internal/pgtest"
)

// shipments are a table of a service, written by attempts outside the transaction that completes.
func shipments(t *testing.T, argument string) (first, second *pgx.Conn) {
	t.Helper()
	url := pgtest.URL(t)
	first, second = connect(t, url), connect(t, url)
	_, err := first.Exec(t.Context(), `
		CREATE TABLE shipments (id text PRIMARY KEY, status text NOT NULL, fence bigint, "Other fence" bigint);
		CREATE TRIGGER shipments_fence BEFORE UPDATE ON shipments FOR EACH ROW EXECUTE FUNCTION idempotency.fence_guard(`+argument+`)`)
	require.NoError(t, err)
	return first, second
}

func TestFenceGuard_AnOldFenceNeverOverwritesANewerOne(t *testing.T) {
	t.Parallel()
	for argument, column := range map[string]string{``: `fence`, `'fence'`: `fence`, `'Other fence'`: `"Other fence"`} {
		conn, _ := shipments(t, argument)
		put := func(fence any, status string) error {
			_, err := conn.Exec(t.Context(), `INSERT INTO shipments (id, status, `+column+`) VALUES ('s', $1, $2)
				ON CONFLICT (id) DO UPDATE SET status = EXCLUDED.status, `+column+` = EXCLUDED.`+column, status, fence)
			return err
		}
		require.NoError(t, put(nil, "before there was a fence"))
		require.NoError(t, put(5, "first"))
		require.NoError(t, put(5, "first again"))
		require.NoError(t, put(7, "second"))
		for _, old := range []any{5, 6, nil} {
			err := put(old, "too late")
			requireSQLState(t, "ZP004", err)
			var server *pgconn.PgError
			require.ErrorAs(t, err, &server)
			require.Equal(t, []string{"public", "shipments", "shipments_fence"}, []string{server.SchemaName, server.TableName, server.ConstraintName})
			require.Regexp(t, `^the row was written with fence 7 and is not overwritten with fence (5|6|NULL)$`, server.Message)
		}
		require.NoError(t, put(7, "third"))
		// What does not name the fence is not about it.
		_, err := conn.Exec(t.Context(), `UPDATE shipments SET status = status || '!'`)
		require.NoError(t, err)
		require.Equal(t, []string{"third!"}, columnOf(t, conn))
	}
}

func columnOf(t *testing.T, conn *pgx.Conn) []string {
	t.Helper()
	return column[string](t, conn, `SELECT status FROM shipments`)
}

// The old attempt's statement waits for the row, and then meets what has been committed meanwhile.
func TestFenceGuard_LooksAtTheRowThatItWaitedFor(t *testing.T) {
	t.Parallel()
	first, second := shipments(t, ``)
	_, err := first.Exec(t.Context(), `INSERT INTO shipments (id, status, fence) VALUES ('s', 'first', 5)`)
	require.NoError(t, err)
	tx, err := second.Begin(t.Context())
	require.NoError(t, err)
	_, err = tx.Exec(t.Context(), `UPDATE shipments SET status = 'second', fence = 7`)
	require.NoError(t, err)
	late := make(chan error, 1)
	go func() {
		_, err := first.Exec(t.Context(), `UPDATE shipments SET status = 'too late', fence = 5`)
		late <- err
	}()
	eventually(t, second, `SELECT EXISTS (SELECT FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock')`)
	require.NoError(t, tx.Commit(t.Context()))
	requireSQLState(t, "ZP004", <-late)
	require.Equal(t, []string{"second"}, columnOf(t, second))
}
