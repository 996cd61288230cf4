package db_test

import (
	"sync"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/pgonce/pgonce/db"
	"github.com/pgonce/pgonce/internal/pgtest"
)

// CREATE INDEX CONCURRENTLY waits for the snapshots of others. Who waits inside pg_advisory_lock has one: that is the
// deadlock of the field, and the control of this test. Migrate's waiters have none.
func TestCase_D02_ConcurrentIndexIsNotHeldUpByWaitingMigrators(t *testing.T) {
	t.Parallel()
	url := pgtest.EmptyURL(t)
	observer, holder, builder := connect(t, url), connect(t, url), connect(t, url)
	_, err := builder.Exec(t.Context(), `CREATE TABLE things (n int)`)
	require.NoError(t, err)
	_, err = holder.Exec(t.Context(), `SELECT pg_advisory_lock($1)`, int64(db.MigrationLockID))
	require.NoError(t, err)

	var migrators sync.WaitGroup
	errs := make(chan error, 3)
	for range cap(errs) {
		migrators.Go(func() { errs <- migrate(url) })
	}
	eventually(t, observer, `SELECT count(*) = 3 FROM pg_stat_activity
		WHERE datname = current_database() AND query LIKE 'SELECT pg_try_advisory_lock%' AND state = 'idle'`)
	// The very connection that holds the lock builds, as a migrator with a concurrent index would.
	_, err = holder.Exec(t.Context(), `CREATE INDEX CONCURRENTLY ON things (n)`)
	require.NoError(t, err)

	// The control: one blocked waiter, and the build waits for it.
	blocked := connect(t, url)
	waiting := make(chan error, 1)
	go func() {
		_, err := blocked.Exec(t.Context(), `SELECT pg_advisory_lock($1)`, int64(db.MigrationLockID))
		waiting <- err
	}()
	eventually(t, observer, `SELECT EXISTS (SELECT FROM pg_stat_activity
		WHERE datname = current_database() AND wait_event = 'advisory')`)
	built := make(chan error, 1)
	go func() {
		_, err := builder.Exec(t.Context(), `CREATE INDEX CONCURRENTLY ON things (n)`)
		built <- err
	}()
	eventually(t, observer, `SELECT EXISTS (SELECT FROM pg_stat_activity
		WHERE datname = current_database() AND wait_event = 'virtualxid' AND query LIKE 'CREATE INDEX%')`)

	_, err = holder.Exec(t.Context(), `SELECT pg_advisory_unlock_all()`)
	require.NoError(t, err)
	require.NoError(t, <-waiting)
	require.NoError(t, blocked.Close(t.Context()))
	require.NoError(t, <-built)
	migrators.Wait()
	for range cap(errs) {
		require.NoError(t, <-errs)
	}
	requireMigratedOnce(t, observer)
}
