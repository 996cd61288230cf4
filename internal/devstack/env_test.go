package devstack

import (
	"bytes"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"
)

// named is a machine whose PGONCE_DATABASE_URL names a server.
func named(url string) machine {
	m := bare()
	m.getenv = func(name string) string { return map[string]string{envDatabase: url}[name] }
	return m
}

func TestEnv_UsesTheServerAndDropsOnlyItsOwn(t *testing.T) {
	t.Parallel()
	server := shared(t)
	var told bytes.Buffer
	s, err := start(t.Context(), &Config{Out: &told}, named(server.adminURL))
	require.NoError(t, err)
	require.Equal(t, "env", s.Provider())
	require.Contains(t, told.String(), "the server of PGONCE_DATABASE_URL")
	require.NotContains(t, told.String(), server.adminURL, "the password is nobody's business")

	db, err := s.CreateDatabase(t.Context())
	require.NoError(t, err)
	copied, err := s.CreateFromTemplate(t.Context(), db.Name)
	require.NoError(t, err)
	foreign, err := server.CreateDatabase(t.Context())
	require.NoError(t, err)
	require.ErrorIs(t, (&Database{Name: foreign.Name, stack: s}).Drop(t.Context()), ErrForeignDatabase)

	require.NoError(t, s.Stop())
	require.ElementsMatch(t, []string{foreign.Name}, existing(t, db.Name, copied.Name, foreign.Name))
	require.NoError(t, foreign.Drop(t.Context()))
}

func TestEnv_SweepsOnlyWhatIsOursAndDead(t *testing.T) {
	t.Parallel()
	me, err := thisOwner()
	require.NoError(t, err)
	dead, elsewhere := me, me
	dead.Start = "1" // a former process with our number
	elsewhere.Start, elsewhere.Host = "1", "other-host"

	comments := map[string]string{
		"dead":      commentPrefix + dead.String(),
		"alive":     commentPrefix + me.String(),
		"elsewhere": commentPrefix + elsewhere.String(),
		"garbled":   commentPrefix + "{",
		"theirs":    "mine, do not touch",
		"silent":    "",
		"connected": commentPrefix + dead.String(),
	}
	names := map[string]string{}
	for what, comment := range comments {
		db, err := shared(t).CreateDatabase(t.Context())
		require.NoError(t, err)
		query(t, db.URL, "COMMENT ON DATABASE "+db.Name+" IS '"+strings.ReplaceAll(comment, "'", "''")+"'")
		names[what] = db.Name
		t.Cleanup(func() { _ = db.Drop(t.Context()) })
		if what == "connected" {
			conn, err := pgx.Connect(t.Context(), db.URL)
			require.NoError(t, err)
			t.Cleanup(func() { _ = conn.Close(t.Context()) })
		}
	}
	// A name not of our form is left alone whatever its comment says.
	odd := "pgonce_production"
	query(t, shared(t).adminURL, "CREATE DATABASE "+odd)
	query(t, shared(t).adminURL, "COMMENT ON DATABASE "+odd+" IS '"+commentPrefix+dead.String()+"'")

	s, err := start(t.Context(), nil, named(shared(t).adminURL))
	require.NoError(t, err)
	require.NoError(t, s.Stop())
	require.ElementsMatch(t, []string{
		names["alive"], names["elsewhere"], names["garbled"], names["theirs"], names["silent"], names["connected"], odd,
	}, existing(t, names["dead"], names["alive"], names["elsewhere"], names["garbled"], names["theirs"],
		names["silent"], names["connected"], odd))
	query(t, shared(t).adminURL, "DROP DATABASE "+odd)
}

func TestEnv_AnUnreachableServerIsAnError(t *testing.T) {
	t.Parallel()
	_, err := start(t.Context(), nil, named("postgres://u:secret@127.0.0.1:1/x"))
	require.ErrorContains(t, err, "use PGONCE_DATABASE_URL")
	require.NotContains(t, err.Error(), "secret")
}

// existing returns those of the names that are databases of the shared server.
func existing(t *testing.T, names ...string) []string {
	t.Helper()
	var found []string
	for _, row := range query(t, shared(t).adminURL,
		"SELECT datname FROM pg_database WHERE datname IN ('"+strings.Join(names, "','")+"')") {
		found = append(found, row[0])
	}
	return found
}
