package main

import (
	"fmt"
	"sync"
	"testing"
	"testing/fstest"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgonce/pgonce/db"
	"github.com/pgonce/pgonce/internal/pgtest"
)

func TestMain(m *testing.M) { pgtest.Main(m) }

func TestInstall_IsFresh(t *testing.T) {
	t.Parallel()
	migrations, err := readMigrations(db.Migrations())
	require.NoError(t, err)
	want, err := buildInstall(migrations)
	require.NoError(t, err)
	require.Equal(t, string(want), db.InstallSQL(), "db/install.sql is stale, run make generate")
}

// The next migration, as it might be.
const next = `-- +goose Up
ALTER TABLE idempotency.records ADD COLUMN note text;
-- +goose StatementBegin
CREATE OR REPLACE FUNCTION idempotency.schema_version() RETURNS integer
    LANGUAGE sql IMMUTABLE PARALLEL SAFE
    AS $$ SELECT %d $$;
-- +goose StatementEnd
-- +goose Down
ALTER TABLE idempotency.records DROP COLUMN note;
`

func TestInstall_UpgradesFromEveryVersion(t *testing.T) {
	t.Parallel()
	migrations, err := readMigrations(db.Migrations())
	require.NoError(t, err)
	newest := len(migrations) + 1
	upgrade, err := readMigrations(fstest.MapFS{"00001_next.sql": {Data: fmt.Appendf(nil, next, newest)}})
	require.NoError(t, err)
	upgrade[0].Version = newest
	install, err := buildInstall(append(migrations, upgrade...))
	require.NoError(t, err)

	for name, url := range map[string]string{"Empty": pgtest.EmptyURL(t), "Previous": pgtest.URL(t)} {
		pool, err := pgxpool.New(t.Context(), url)
		require.NoError(t, err)
		t.Cleanup(pool.Close)

		var group sync.WaitGroup
		errs := make([]error, 6)
		for i := range errs {
			group.Go(func() { _, errs[i] = pool.Exec(t.Context(), string(install)) })
		}
		group.Wait()
		for _, err := range errs {
			require.NoError(t, err, name)
		}
		// An older program's file changes nothing.
		_, err = pool.Exec(t.Context(), db.InstallSQL())
		require.NoError(t, err, name)

		var version int
		var versions []int64
		require.NoError(t, pool.QueryRow(t.Context(), `SELECT idempotency.schema_version(),
			(SELECT array_agg(version_id ORDER BY id) FROM public.pgonce_goose_version WHERE is_applied)`).Scan(&version, &versions), name)
		require.Equal(t, newest, version, name)
		require.Len(t, versions, newest+1, name)
		for i, one := range versions {
			require.EqualValues(t, i, one, name)
		}
		require.NoError(t, db.Migrate(t.Context(), pool), name)
	}
}

func TestReadMigrations_RefusesWhatTheThreeWaysWouldDoDifferently(t *testing.T) {
	t.Parallel()
	const fine = "-- +goose Up\nSELECT 1;\n"
	for message, files := range map[string]map[string]string{
		"NO TRANSACTION":            {"00001_a.sql": "-- +goose NO TRANSACTION\n-- +goose Up\nCREATE INDEX CONCURRENTLY i ON t (a);\n"},
		"ENVSUB ON":                 {"00001_a.sql": "-- +goose Up\n-- +goose ENVSUB ON\nSELECT '${HOME}';\n"},
		"annotation not understood": {"00001_a.sql": "-- +goose Up\n --+goose StatementBegin\nSELECT 1;\n"},
		"no '-- +goose Up' section": {"00001_a.sql": "SELECT 1;\n"},
		"expected number 2":         {"00001_a.sql": fine, "00003_b.sql": fine},
		"five digits":               {"1_a.sql": fine},
	} {
		fsys := fstest.MapFS{}
		for name, text := range files {
			fsys[name] = &fstest.MapFile{Data: []byte(text)}
		}
		_, err := readMigrations(fsys)
		require.ErrorContains(t, err, message)
	}
}

func TestBuildInstall_RefusesAMigrationThatEndsItsQuote(t *testing.T) {
	t.Parallel()
	_, err := buildInstall([]migration{{Version: 1, File: "00001_a.sql", Up: "DO $migration$ BEGIN END $migration$;\n"}})
	require.ErrorContains(t, err, "00001_a.sql contains a quote")
}

func TestCompare_NamesTheFileAndTheCommand(t *testing.T) {
	t.Parallel()
	file := t.TempDir() + "/schema.sql"
	require.NoError(t, write(file, []byte("a\nb\nc\n")))
	require.NoError(t, compare(file, []byte("a\nb\nc\n")))
	require.EqualError(t, compare(file, []byte("a\nB\nc\n")), file+" is stale, run make generate:\n@@ line 2 @@\n  a\n- b\n+ B\n")
	require.ErrorContains(t, compare(file+".missing", []byte("a\n")), "is stale, run make generate")
}
