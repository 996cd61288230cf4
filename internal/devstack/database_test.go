package devstack

import (
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"
)

func TestCreateFromTemplate_CopiesInAMoment(t *testing.T) {
	t.Parallel()
	s := shared(t)
	template, err := s.CreateDatabase(t.Context())
	require.NoError(t, err)
	query(t, template.URL, "CREATE TABLE orders AS SELECT 42 AS id")

	began := time.Now()
	db, err := s.CreateFromTemplate(t.Context(), template.Name)
	require.NoError(t, err)
	t.Logf("copied in %v", time.Since(began))
	require.NotEqual(t, template.Name, db.Name)
	require.Equal(t, [][]string{{"42"}}, query(t, db.URL, "SELECT id FROM orders"))
	require.Equal(t, [][]string{{db.Name}}, query(t, db.URL, "SELECT current_database()"))

	require.NoError(t, db.Drop(t.Context()))
	require.NoError(t, template.Drop(t.Context()))
}

func TestDatabase_DropThrowsOutWhoIsConnected(t *testing.T) {
	t.Parallel()
	s := shared(t)
	db, err := s.CreateDatabase(t.Context())
	require.NoError(t, err)
	conn, err := pgx.Connect(t.Context(), db.URL)
	require.NoError(t, err)
	require.NoError(t, db.Drop(t.Context()))
	require.Error(t, conn.Ping(t.Context()))
	require.ErrorIs(t, db.Drop(t.Context()), ErrForeignDatabase, "once dropped it is no longer ours")
}

func TestGuard_RefusesForeignDatabases(t *testing.T) {
	t.Parallel()
	s := shared(t)
	precious := "pgonce_" + strings.Repeat("a", 26) // our form, but not made by this stack
	query(t, s.adminURL, "CREATE DATABASE "+precious)

	for _, name := range []string{"postgres", "template1", precious, "", "pgonce_x", `pgonce_"; DROP DATABASE x; --`} {
		require.ErrorIs(t, (&Database{Name: name, stack: s}).Drop(t.Context()), ErrForeignDatabase, name)
		require.ErrorIs(t, (&Database{Name: name}).Drop(t.Context()), ErrForeignDatabase, name)
		_, err := s.CreateFromTemplate(t.Context(), name)
		require.ErrorIs(t, err, ErrForeignDatabase, name)
	}
	require.Len(t, query(t, s.adminURL, "SELECT 1 FROM pg_database WHERE datname = '"+precious+"'"), 1)
	query(t, s.adminURL, "DROP DATABASE "+precious)
}

func TestWithDatabase_LeadsNowhereElse(t *testing.T) {
	t.Parallel()
	const name = "pgonce_mine"
	for given, want := range map[string]string{
		"postgres://u:p@h:1/prod?sslmode=disable": "postgres://u:p@h:1/pgonce_mine?sslmode=disable",
		"postgresql://h/prod?dbname=x&database=y": "postgresql://h/pgonce_mine",
		"postgres://h": "postgres://h/pgonce_mine",
		"host=h user=u dbname=prod password='a b'":    "host=h user=u dbname=prod password='a b' dbname=pgonce_mine",
		"postgres:///prod?host=/var/run/postgresql":   "postgres:///pgonce_mine?host=%2Fvar%2Frun%2Fpostgresql",
		"postgres://u:p%40%2F@h/a%2Fb?sslmode=prefer": "postgres://u:p%40%2F@h/pgonce_mine?sslmode=prefer",
	} {
		got, err := withDatabase(given, name)
		require.NoError(t, err, given)
		require.Equal(t, want, got)
	}
	_, err := withDatabase("postgres://u:secret@h:x y/", name)
	require.Error(t, err)
	require.NotContains(t, err.Error(), "secret")
}
