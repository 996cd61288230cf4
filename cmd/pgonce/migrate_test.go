package main

import (
	"fmt"
	"os/exec"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgonce/pgonce/db"
	"github.com/pgonce/pgonce/internal/pgtest"
)

func TestMigrate_UpStatusValidateDown(t *testing.T) {
	t.Parallel()
	url := pgtest.EmptyURL(t)
	a := pgonce(t, url, "", "migrate", "status")
	require.Zero(t, a.code, a.err)
	require.Regexp(t, `(?m)^1 +00001_records +pending$`, a.out)
	a = pgonce(t, url, "", "migrate", "validate")
	require.Equal(t, exitRefused, a.code)
	require.Contains(t, a.out, "there is no schema idempotency: run pgonce migrate up")

	v := object(t, url, exitOK, "migrate", "up")
	require.EqualValues(t, 0, v["before"])
	require.EqualValues(t, db.SchemaVersion, v["after"])
	require.Equal(t, fmt.Sprintf("nothing to do: the schema has version %d\n", db.SchemaVersion), pgonce(t, url, "", "migrate", "up").out)
	v = object(t, url, exitOK, "migrate", "status")
	require.Equal(t, true, v["list_agrees"])
	require.Len(t, v["migrations"], db.SchemaVersion)
	require.Equal(t, true, object(t, url, exitOK, "migrate", "validate")["valid"])

	to := fmt.Sprint(db.SchemaVersion - 1)
	a = pgonce(t, url, "no\n", "migrate", "down", "--to", to)
	require.Equal(t, exitRefused, a.code)
	require.Contains(t, a.err, fmt.Sprintf("undo %05d_", db.SchemaVersion))
	require.EqualValues(t, db.SchemaVersion, object(t, url, exitOK, "migrate", "status")["version"], "not confirmed")
	a = pgonce(t, url, "yes\n", "migrate", "down", "--to", to)
	require.Zero(t, a.code, a.err)
	require.Contains(t, a.out, "and has version "+to)
	a = pgonce(t, url, "", "get", "k")
	require.Equal(t, exitRefused, a.code)
	require.Contains(t, a.err, "needs version")
	require.Contains(t, pgonce(t, url, "", "migrate", "validate").out, "run pgonce migrate up")
	require.Zero(t, pgonce(t, url, "", "migrate", "up").code)
	require.Zero(t, pgonce(t, url, "", "migrate", "validate").code)
}

func TestMigrate_RecordsAreNotDroppedByAccident(t *testing.T) {
	t.Parallel()
	pool := audited(t)
	before := everything(t, pool)
	a := pgonce(t, urlOf(pool), "", "migrate", "down", "--to", "0", "--yes")
	require.Equal(t, exitRefused, a.code)
	require.Contains(t, a.err, "--lose-records")
	require.Equal(t, before, everything(t, pool))
	a = pgonce(t, urlOf(pool), "", "migrate", "down", "--to", "0", "--lose-records")
	require.Equal(t, exitRefused, a.code, "nobody has said yes")
	require.Equal(t, before, everything(t, pool))
	require.Zero(t, pgonce(t, urlOf(pool), "", "migrate", "down", "--to", "0", "--lose-records", "--yes").code)
	require.Equal(t, []bool{true}, column[bool](t, pool, `SELECT to_regnamespace('idempotency') IS NULL`))
}

// The list is mended as the command says, and a schema that somebody has changed is told.
func TestMigrate_SQLMendsTheList(t *testing.T) {
	t.Parallel()
	url := pgtest.URL(t)
	pool, err := pgxpool.New(t.Context(), url)
	require.NoError(t, err)
	defer pool.Close()
	_, err = pool.Exec(t.Context(), `DELETE FROM `+db.VersionTable+`; DROP INDEX idempotency.records_stale_idx`, pgx.QueryExecModeSimpleProtocol)
	require.NoError(t, err)
	a := pgonce(t, url, "", "migrate", "validate")
	require.Equal(t, exitRefused, a.code)
	require.Contains(t, a.out, "pgonce migrate sql | psql")
	require.Contains(t, a.out, "problem: index records_stale_idx is missing")
	require.Contains(t, pgonce(t, url, "", "migrate", "status").out, "pgonce migrate sql | psql")

	psql := exec.CommandContext(t.Context(), "psql", url, "-v", "ON_ERROR_STOP=1")
	psql.Stdin = strings.NewReader(`DROP TABLE ` + db.VersionTable + `;` + pgonce(t, "", "", "migrate", "sql").out)
	out, err := psql.CombinedOutput()
	require.NoError(t, err, string(out))
	v := object(t, url, exitRefused, "migrate", "validate")
	require.Equal(t, []any{"index records_stale_idx is missing"}, v["problems"])
}
