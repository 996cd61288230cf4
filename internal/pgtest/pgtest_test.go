package pgtest

import (
	"fmt"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"
)

func TestMain(m *testing.M) { Main(m) }

func TestPool_IsMigratedAndTheTestsOwn(t *testing.T) {
	t.Parallel()
	for _, name := range []string{"one", "two", "three"} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			pool := Pool(t, func(cfg *pgxpool.Config) { cfg.MaxConns = 1 })
			require.EqualValues(t, 1, pool.Config().MaxConns)
			var version int
			require.NoError(t, pool.QueryRow(t.Context(), "SELECT idempotency.schema_version()").Scan(&version))
			require.Positive(t, version)
			_, err := pool.Exec(t.Context(), "CREATE TABLE only_here ()") // fails if two tests share a database
			require.NoError(t, err)
		})
	}
}

func TestEmptyURL_HasNoSchemaOfOurs(t *testing.T) {
	t.Parallel()
	conn, err := pgx.Connect(t.Context(), EmptyURL(t))
	require.NoError(t, err)
	var there bool
	require.NoError(t, conn.QueryRow(t.Context(), "SELECT to_regnamespace('idempotency') IS NOT NULL").Scan(&there))
	require.False(t, there)
	require.NoError(t, conn.Close(t.Context()))
}

func TestURL_DatabaseIsDroppedAfterTheTest(t *testing.T) { //nolint:tparallel // the inner test has to end first
	t.Parallel()
	var name string
	t.Run("inner", func(t *testing.T) {
		conn, err := pgx.Connect(t.Context(), URL(t)) // still connected when the database is dropped
		require.NoError(t, err)
		name = conn.Config().Database
	})
	var count int
	require.NoError(t, Pool(t).QueryRow(t.Context(),
		"SELECT count(*) FROM pg_database WHERE datname = $1", name).Scan(&count))
	require.Zero(t, count)
}

func TestLeaked_WaitsForWhatEndsAndNotForEver(t *testing.T) { //nolint:paralleltest // looks at all goroutines
	ignored := goleak.IgnoreCurrent()
	stop := make(chan struct{})
	go func() { <-stop }()
	require.ErrorContains(t, Leaked(ignored), "TestLeaked_")
	time.AfterFunc(time.Second, func() { close(stop) })
	require.NoError(t, Leaked(ignored))
}

// failures is a testing.TB that keeps what Errorf is told.
type failures struct {
	testing.TB
	texts []string
}

func (f *failures) Errorf(format string, args ...any) {
	f.texts = append(f.texts, fmt.Sprintf(format, args...))
}

func TestClosePool_ALeakedConnectionFailsTheTestInsteadOfHanging(t *testing.T) {
	t.Parallel()
	pool, err := pgxpool.New(t.Context(), URL(t))
	require.NoError(t, err)
	leaked, err := pool.Acquire(t.Context())
	require.NoError(t, err)

	told := &failures{TB: t}
	closePool(told, pool, 50*time.Millisecond)
	require.Len(t, told.texts, 1)
	require.Contains(t, told.texts[0], "1 connections were not given back")
	leaked.Release()
}
