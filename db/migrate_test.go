package db_test

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/jackc/pgx/v5/stdlib"
	"github.com/pressly/goose/v3"
	"github.com/stretchr/testify/require"

	"github.com/pgonce/pgonce/db"
	"github.com/pgonce/pgonce/internal/pgtest"
)

const (
	versionRows = `SELECT version_id || ' ' || is_applied FROM public.pgonce_goose_version ORDER BY id`
	// Of this database only: other tests use the same lock elsewhere.
	advisoryLocks = `SELECT count(*) FROM pg_locks
		WHERE locktype = 'advisory' AND database = (SELECT oid FROM pg_database WHERE datname = current_database())`
)

// newGoose is goose as a user would run it from a program of his own.
func newGoose(t *testing.T, url string) *goose.Provider {
	t.Helper()
	sqlDB, err := sql.Open("pgx", url)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, sqlDB.Close()) })
	provider, err := goose.NewProvider(goose.DialectPostgres, sqlDB, db.Migrations(),
		goose.WithTableName(db.VersionTable), goose.WithLogger(goose.NopLogger()))
	require.NoError(t, err)
	return provider
}

func requireMigratedOnce(t *testing.T, conn *pgx.Conn) {
	t.Helper()
	require.Equal(t, []int32{db.SchemaVersion}, column[int32](t, conn, `SELECT idempotency.schema_version()`))
	want := make([]string, db.SchemaVersion+1)
	for i := range want {
		want[i] = fmt.Sprintf("%d true", i)
	}
	require.Equal(t, want, column[string](t, conn, versionRows))
	require.Equal(t, []int64{0}, column[int64](t, conn, advisoryLocks))
}

func TestSchemaVersion_IsTheNewestMigration(t *testing.T) {
	t.Parallel()
	sources := newGoose(t, pgtest.EmptyURL(t)).ListSources()
	require.EqualValues(t, db.SchemaVersion, sources[len(sources)-1].Version)
}

func TestCase_D01_TenProcessesMigrateAtOnce(t *testing.T) {
	t.Parallel()
	for name, prepare := range map[string]func(*testing.T, string){
		"EmptyDatabase": func(*testing.T, string) {},
		"PreviousVersion": func(t *testing.T, url string) {
			t.Helper()
			_, err := newGoose(t, url).Up(t.Context())
			require.NoError(t, err)
			_, err = newGoose(t, url).DownTo(t.Context(), db.SchemaVersion-1)
			require.NoError(t, err)
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			url := pgtest.EmptyURL(t)
			prepare(t, url)

			var processes []*process
			for range 10 {
				processes = append(processes, startMigrate(t, url))
			}
			for _, p := range processes {
				require.NoError(t, p.cmd.Wait(), p.output.String())
			}
			requireMigratedOnce(t, connect(t, url))
		})
	}
}

func TestCase_D01_AKilledMigratorLeavesNoLock(t *testing.T) {
	t.Parallel()
	url := pgtest.EmptyURL(t)
	observer := connect(t, url)

	// The migrator stands still in the middle of its work: another transaction is creating the schema.
	blocker := connect(t, url)
	tx, err := blocker.Begin(t.Context())
	require.NoError(t, err)
	_, err = tx.Exec(t.Context(), `CREATE SCHEMA idempotency`)
	require.NoError(t, err)
	killed := startMigrate(t, url)
	eventually(t, observer, `SELECT EXISTS (SELECT FROM pg_stat_activity
		WHERE datname = current_database() AND wait_event_type = 'Lock' AND query LIKE 'CREATE SCHEMA%')`)
	require.Equal(t, []int64{1}, column[int64](t, observer, advisoryLocks))

	var others []*process
	for range 3 {
		others = append(others, startMigrate(t, url))
	}
	require.NoError(t, killed.cmd.Process.Kill())
	require.Error(t, killed.cmd.Wait())
	require.NoError(t, tx.Rollback(t.Context()))

	for _, p := range others {
		require.NoError(t, p.cmd.Wait(), p.output.String())
	}
	requireMigratedOnce(t, observer)
}

func TestCase_D02_WaitersPollAndAnIdleTransactionDoesNotBlock(t *testing.T) {
	t.Parallel()
	url := pgtest.EmptyURL(t)
	observer := connect(t, url)

	// The program's own transaction is open, with a snapshot, all the time.
	app := connect(t, url)
	appTx, err := app.BeginTx(t.Context(), pgx.TxOptions{IsoLevel: pgx.RepeatableRead})
	require.NoError(t, err)
	column[int32](t, appTx, `SELECT 1`)

	blocker := connect(t, url)
	tx, err := blocker.Begin(t.Context())
	require.NoError(t, err)
	_, err = tx.Exec(t.Context(), `CREATE SCHEMA idempotency`)
	require.NoError(t, err)

	var group sync.WaitGroup
	errs := make([]error, 3)
	for i := range errs {
		group.Go(func() { errs[i] = migrate(url) })
	}
	// One works. The others have asked and hold neither a lock nor a snapshot while they wait.
	eventually(t, observer, `SELECT count(*) = 1 FROM pg_stat_activity
		WHERE datname = current_database() AND wait_event_type = 'Lock' AND query LIKE 'CREATE SCHEMA%'`)
	eventually(t, observer, `SELECT count(*) = 2 FROM pg_stat_activity
		WHERE datname = current_database() AND query LIKE 'SELECT pg_try_advisory_lock%'
		  AND state = 'idle' AND backend_xmin IS NULL`)
	require.Equal(t, []int64{0}, column[int64](t, observer, `SELECT count(*) FROM pg_locks
		WHERE locktype = 'advisory' AND NOT granted
		  AND database = (SELECT oid FROM pg_database WHERE datname = current_database())`))

	require.NoError(t, tx.Rollback(t.Context()))
	group.Wait()
	require.NoError(t, errors.Join(errs...))
	requireMigratedOnce(t, observer)
	require.NoError(t, appTx.Commit(t.Context()))
}

func TestCase_D03_APoolOfOneMigrates(t *testing.T) {
	t.Parallel()
	ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
	defer cancel()
	url := pgtest.EmptyURL(t)
	pool := newPool(t, url, func(cfg *pgxpool.Config) { cfg.MaxConns = 1 })

	var group sync.WaitGroup
	errs := make([]error, 3)
	for i := range errs {
		group.Go(func() { errs[i] = db.Migrate(ctx, pool) })
	}
	group.Wait()

	require.NoError(t, errors.Join(errs...))
	require.NoError(t, pool.Ping(ctx), "the pool is the caller's and stays open")
	requireMigratedOnce(t, connect(t, url))
}

func TestMigrate_WorksInEveryQueryMode(t *testing.T) {
	t.Parallel()
	for _, mode := range []pgx.QueryExecMode{
		pgx.QueryExecModeCacheStatement, pgx.QueryExecModeCacheDescribe, pgx.QueryExecModeDescribeExec,
		pgx.QueryExecModeExec, pgx.QueryExecModeSimpleProtocol,
	} {
		t.Run(mode.String(), func(t *testing.T) {
			t.Parallel()
			url := pgtest.EmptyURL(t)
			pool := newPool(t, url, func(cfg *pgxpool.Config) { cfg.ConnConfig.DefaultQueryExecMode = mode })
			require.NoError(t, db.Migrate(t.Context(), pool))
			require.NoError(t, db.Migrate(t.Context(), pool))
			requireMigratedOnce(t, connect(t, url))
		})
	}
}

func TestMigrate_StopsWaitingWhenItsContextEnds(t *testing.T) {
	t.Parallel()
	url := pgtest.EmptyURL(t)
	pool := newPool(t, url)
	holder := connect(t, url)
	_, err := holder.Exec(t.Context(), `SELECT pg_advisory_lock($1)`, int64(db.MigrationLockID))
	require.NoError(t, err)

	ctx, cancel := context.WithTimeout(t.Context(), 200*time.Millisecond)
	defer cancel()
	err = db.Migrate(ctx, pool)
	require.ErrorIs(t, err, context.DeadlineExceeded)
	require.Equal(t, []bool{true}, column[bool](t, holder, `SELECT to_regnamespace('idempotency') IS NULL`))

	require.NoError(t, holder.Close(t.Context()))
	require.NoError(t, db.Migrate(t.Context(), pool))
}

func TestMigrate_CurrentOrNewerSchemaIsOnlyRead(t *testing.T) {
	t.Parallel()
	for name, change := range map[string]string{
		"Current": `SELECT 1`,
		"Newer":   `CREATE OR REPLACE FUNCTION idempotency.schema_version() RETURNS integer LANGUAGE sql AS 'SELECT 99'`,
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			pool := pgtest.Pool(t)
			_, err := pool.Exec(t.Context(), change)
			require.NoError(t, err)
			// Somebody holds the lock, and nothing may be written.
			_, err = connect(t, pool.Config().ConnString()).Exec(t.Context(), `SELECT pg_advisory_lock($1)`, int64(db.MigrationLockID))
			require.NoError(t, err)
			reader := newPool(t, pool.Config().ConnString(), func(cfg *pgxpool.Config) {
				cfg.ConnConfig.RuntimeParams["default_transaction_read_only"] = "on"
			})
			require.NoError(t, db.Migrate(t.Context(), reader))
		})
	}
}

func TestMigrate_SchemaDroppedByHandIsAnErrorThatSaysWhatToDo(t *testing.T) {
	t.Parallel()
	pool := pgtest.Pool(t)
	_, err := pool.Exec(t.Context(), `DROP SCHEMA idempotency CASCADE`)
	require.NoError(t, err)

	err = db.Migrate(t.Context(), pool)
	require.ErrorContains(t, err, "run db/install.sql")

	_, err = pool.Exec(t.Context(), db.InstallSQL())
	require.NoError(t, err)
	require.NoError(t, db.Migrate(t.Context(), pool))
	requireMigratedOnce(t, connect(t, pool.Config().ConnString()))
}

func TestMigrate_AnotherEncodingIsRefused(t *testing.T) {
	t.Parallel()
	admin := connect(t, pgtest.EmptyURL(t))
	name := admin.Config().Database + "_ascii"
	_, err := admin.Exec(t.Context(), `CREATE DATABASE `+name+` ENCODING 'SQL_ASCII' LC_COLLATE 'C' LC_CTYPE 'C' TEMPLATE template0`)
	require.NoError(t, err)
	t.Cleanup(func() {
		_, err := admin.Exec(context.Background(), `DROP DATABASE `+name+` WITH (FORCE)`)
		require.NoError(t, err)
	})
	pool := newPool(t, admin.Config().ConnString(), func(cfg *pgxpool.Config) { cfg.ConnConfig.Database = name })

	require.ErrorContains(t, db.Migrate(t.Context(), pool), "encoding is SQL_ASCII, pgonce needs UTF8")
	_, err = pool.Exec(t.Context(), db.InstallSQL())
	require.ErrorContains(t, err, "encoding UTF8")
}

func TestMigrate_UpDownUpIsTheSchemaOfTheRepository(t *testing.T) {
	t.Parallel()
	url := pgtest.EmptyURL(t)
	conn := connect(t, url)
	provider := newGoose(t, url)

	_, err := provider.Up(t.Context())
	require.NoError(t, err)
	require.Equal(t, repositorySchema(t), schema(t, url))
	_, err = provider.DownTo(t.Context(), 0)
	require.NoError(t, err)
	require.Equal(t, []bool{true}, column[bool](t, conn, `SELECT to_regnamespace('idempotency') IS NULL`))
	_, err = provider.Up(t.Context())
	require.NoError(t, err)
	require.Equal(t, repositorySchema(t), schema(t, url))
}

// A program may hold goose's own lock, and have Go migrations of its own registered, while it calls Migrate.
func TestMigrate_IsIndependentOfTheProgramsOwnGoose(t *testing.T) {
	t.Parallel()
	pool := newPool(t, pgtest.EmptyURL(t))
	sqlDB := stdlib.OpenDBFromPool(pool)
	t.Cleanup(func() { require.NoError(t, sqlDB.Close()) })
	const gooseDefaultLock = 4097083626
	conn, err := sqlDB.Conn(t.Context())
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, conn.Close()) })
	_, err = conn.ExecContext(t.Context(), `SELECT pg_advisory_lock($1)`, gooseDefaultLock)
	require.NoError(t, err)

	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	defer cancel()
	require.NoError(t, db.Migrate(ctx, pool))
}
