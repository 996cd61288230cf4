package db_test

import (
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgonce/pgonce/db"
	"github.com/pgonce/pgonce/internal/dbgen/pgdump"
	"github.com/pgonce/pgonce/internal/pgtest"
)

// schema is the text that schema.sql has below its header.
func schema(t *testing.T, url string) string {
	t.Helper()
	dump, err := pgdump.Schema(t.Context(), url, "--schema=idempotency")
	require.NoError(t, err)
	return dump
}

func repositorySchema(t *testing.T) string {
	t.Helper()
	text, err := os.ReadFile("schema.sql")
	require.NoError(t, err)
	_, dump, found := strings.Cut(string(text), "\n\n")
	require.True(t, found)
	return dump
}

// gooseProgram is the goose command that make built, or else one built here.
func gooseProgram(t *testing.T) string {
	t.Helper()
	built, err := filepath.Abs("../bin/goose")
	require.NoError(t, err)
	if _, err := os.Stat(built); err == nil {
		return built
	}
	program := filepath.Join(t.TempDir(), "goose")
	const tags = "no_mysql no_sqlite3 no_clickhouse no_mssql no_vertica no_ydb no_libsql no_turso no_starrocks no_spanner no_duckdb"
	cmd := exec.CommandContext(t.Context(), "go", "build", "-modfile=tools/goose.mod", "-tags", tags, "-o", program,
		"github.com/pressly/goose/v3/cmd/goose")
	cmd.Dir = ".."
	cmd.Env = append(os.Environ(), "GOWORK=off", "GOFLAGS=")
	out, err := cmd.CombinedOutput()
	require.NoError(t, err, string(out))
	return program
}

func runGoose(t *testing.T, program, url string) string {
	t.Helper()
	out, err := exec.CommandContext(t.Context(), program,
		"-dir", "migrations", "-table", db.VersionTable, "postgres", url, "up").CombinedOutput()
	require.NoError(t, err, string(out))
	return string(out)
}

func runPsql(t *testing.T, url string) {
	t.Helper()
	out, err := exec.CommandContext(t.Context(), "psql", url, "-v", "ON_ERROR_STOP=1", "-f", "install.sql").CombinedOutput()
	require.NoError(t, err, string(out))
}

func runMigrate(t *testing.T, url string) {
	t.Helper()
	require.NoError(t, db.Migrate(t.Context(), newPool(t, url)))
}

// everything is all that a way of migrating leaves behind: the whole schema and goose's list.
func everything(t *testing.T, url string) string {
	t.Helper()
	dump, err := pgdump.Schema(t.Context(), url)
	require.NoError(t, err)
	conn := connect(t, url)
	return dump + strings.Join(column[string](t, conn, versionRows), "\n") + "\n" +
		strings.Join(column[string](t, conn, `SELECT 'version ' || idempotency.schema_version()`), "\n")
}

func TestInstall_AllWaysLeaveTheSameDatabase(t *testing.T) {
	t.Parallel()
	program := gooseProgram(t)
	ways := map[string]func(*testing.T, string){
		"Migrate":     runMigrate,
		"goose":       func(t *testing.T, url string) { t.Helper(); runGoose(t, program, url) },
		"install.sql": runPsql,
	}
	reference := pgtest.EmptyURL(t)
	runMigrate(t, reference)
	want := everything(t, reference)
	require.Contains(t, want, "CREATE TABLE idempotency.records")
	require.Contains(t, want, "CREATE TABLE public.pgonce_goose_version")

	for first, migrate := range ways {
		t.Run(first, func(t *testing.T) {
			t.Parallel()
			url := pgtest.EmptyURL(t)
			migrate(t, url)
			require.Equal(t, want, everything(t, url))
			// Whoever changes to another way finds nothing to do.
			require.Contains(t, runGoose(t, program, url), "no migrations to run")
			runPsql(t, url)
			runMigrate(t, url)
			require.Equal(t, want, everything(t, url))
		})
	}
}

func TestInstall_IsSafeConcurrentlyAndAgainInEveryIsolation(t *testing.T) {
	t.Parallel()
	for _, isolation := range []pgx.TxIsoLevel{pgx.ReadCommitted, pgx.RepeatableRead, pgx.Serializable} {
		t.Run(string(isolation), func(t *testing.T) {
			t.Parallel()
			url := pgtest.EmptyURL(t)
			pool := newPool(t, url, func(cfg *pgxpool.Config) {
				cfg.MaxConns = 6
				cfg.ConnConfig.RuntimeParams["default_transaction_isolation"] = string(isolation)
			})
			var group sync.WaitGroup
			errs := make([]error, 12)
			for i := range errs {
				group.Go(func() { _, errs[i] = pool.Exec(t.Context(), db.InstallSQL()) })
			}
			group.Wait()
			for _, err := range errs {
				require.NoError(t, err)
			}
			requireMigratedOnce(t, connect(t, url))
		})
	}
}

func TestInstall_AndMigrateWaitForEachOther(t *testing.T) {
	t.Parallel()
	url := pgtest.EmptyURL(t)
	pool := newPool(t, url)
	var group sync.WaitGroup
	errs := make([]error, 8)
	for i := range errs {
		group.Go(func() {
			if i%2 == 0 {
				errs[i] = db.Migrate(t.Context(), pool)
				return
			}
			_, errs[i] = pool.Exec(t.Context(), db.InstallSQL())
		})
	}
	group.Wait()
	require.Equal(t, -1, slices.IndexFunc(errs, func(err error) bool { return err != nil }), "%v", errs)
	requireMigratedOnce(t, connect(t, url))
}

func TestInstall_RepairsALostVersionTable(t *testing.T) {
	t.Parallel()
	url := pgtest.URL(t)
	conn := connect(t, url)
	_, err := conn.Exec(t.Context(), `DROP TABLE public.pgonce_goose_version`)
	require.NoError(t, err)
	_, err = conn.Exec(t.Context(), db.InstallSQL())
	require.NoError(t, err)
	requireMigratedOnce(t, conn)
}
