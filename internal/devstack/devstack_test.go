package devstack

import (
	"bytes"
	"context"
	"io"
	"net"
	"os"
	"path/filepath"
	"strconv"
	"syscall"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"
)

func TestStart_ServesAndLeavesNothingBehind(t *testing.T) {
	t.Parallel()
	var told bytes.Buffer
	s, err := start(t.Context(), &Config{Settings: fast, Out: &told}, local())
	require.NoError(t, err)
	require.Contains(t, []string{ProviderLocal, ProviderApt}, s.Provider())
	require.Contains(t, told.String(), "devstack: PostgreSQL: ")
	require.Empty(t, s.RedisURL())

	db, err := s.CreateDatabase(t.Context())
	require.NoError(t, err)
	require.Equal(t, [][]string{{"off", "UTC", "200", "UTF8"}}, query(t, db.URL,
		`SELECT current_setting('fsync'), current_setting('timezone'), current_setting('max_connections'),
			current_setting('server_encoding')`))

	require.NoError(t, s.Stop())
	require.NoError(t, s.Stop(), "a second Stop does nothing")
	require.NoDirExists(t, s.scratch)
	_, err = pgx.Connect(t.Context(), db.URL)
	require.Error(t, err)
}

func TestStart_FsyncIsOnUnlessAsked(t *testing.T) {
	t.Parallel()
	s, err := start(t.Context(), nil, local())
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, s.Stop()) })
	db, err := s.CreateDatabase(t.Context())
	require.NoError(t, err)
	require.Equal(t, [][]string{{"on"}}, query(t, db.URL, "SHOW fsync"))
}

func TestStart_OthersCannotLogIn(t *testing.T) {
	t.Parallel()
	db, err := shared(t).CreateDatabase(t.Context())
	require.NoError(t, err)
	cfg, err := pgx.ParseConfig(db.URL)
	require.NoError(t, err)
	cfg.Password = "guessed"
	_, err = pgx.ConnectConfig(t.Context(), cfg)
	require.ErrorContains(t, err, "28P01")
	info, err := os.Stat(filepath.Join(shared(t).scratch, "pg"))
	require.NoError(t, err)
	require.Equal(t, os.FileMode(0o700), info.Mode().Perm())
}

func TestStart_TheSocketServesToo(t *testing.T) {
	t.Parallel()
	cfg, err := pgx.ParseConfig(shared(t).adminURL)
	require.NoError(t, err)
	cfg.Host = filepath.Join(shared(t).scratch, "pg")
	conn, err := pgx.ConnectConfig(t.Context(), cfg)
	require.NoError(t, err)
	require.NoError(t, conn.Close(t.Context()))
}

func TestStart_FailureShowsTheServersLog(t *testing.T) {
	t.Parallel()
	_, err := start(t.Context(), &Config{Settings: map[string]string{"shared_buffers": "much"}}, local())
	require.ErrorContains(t, err, `invalid value for parameter "shared_buffers": "much"`)
}

func TestStart_RefusesSettingsItNeedsItself(t *testing.T) {
	t.Parallel()
	for _, name := range []string{"port", "listen_addresses", "data_directory", "a b", ""} {
		_, err := start(t.Context(), &Config{Settings: map[string]string{name: "x"}}, local())
		require.ErrorContains(t, err, "Config.Settings", name)
	}
}

func TestStart_CancelledContextLeavesNothingBehind(t *testing.T) {
	t.Parallel()
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	m := local()
	m.install = func(context.Context, io.Writer, wanted) error { panic("nobody waits for an installation") }
	_, err := start(ctx, nil, m)
	require.ErrorIs(t, err, context.Canceled)
}

func TestStart_WithoutServerSaysWhatToType(t *testing.T) {
	t.Parallel()
	for _, tc := range []struct {
		manager string
		root    bool
		want    string
	}{
		{"apt-get", true, `type "apt-get install -y --no-install-recommends postgresql"`},
		{"apt-get", false, `type "sudo apt-get install -y --no-install-recommends postgresql"`},
		{"dnf", false, `type "sudo dnf install -y postgresql-server"`},
		{"apk", true, `type "apk add postgresql"`},
		{"brew", false, `type "brew install postgresql@17"`},
		{"", false, "install it so that postgres is on the PATH"},
	} {
		m := bare()
		m.root = tc.root
		m.lookPath = func(name string) (string, error) {
			if name == tc.manager {
				return "/usr/bin/" + name, nil
			}
			return "", os.ErrNotExist
		}
		_, err := start(t.Context(), nil, m)
		require.ErrorIs(t, err, ErrNoServer)
		require.ErrorContains(t, err, "no PostgreSQL 15 or newer found")
		require.ErrorContains(t, err, tc.want)
		require.ErrorContains(t, err, "PGONCE_DATABASE_URL")
	}
}

func TestStart_SaysWhyAProgramIsUnfit(t *testing.T) {
	t.Parallel()
	old := filepath.Join(t.TempDir(), "postgres")
	writeProgram(t, old, "#!/bin/sh\necho 'postgres (PostgreSQL) 13.4'\n")
	m := bare()
	m.root = false
	m.glob = func(string) ([]string, error) { return []string{old}, nil }
	_, err := start(t.Context(), nil, m)
	require.ErrorContains(t, err, old+" is version 13")

	m.root = true
	require.NoError(t, os.Chmod(filepath.Dir(old), 0o700))
	_, err = start(t.Context(), nil, m)
	require.ErrorContains(t, err, "cannot be read by the user the server runs as")
}

func TestStart_InstallsOnlyWhenAllowed(t *testing.T) {
	t.Parallel()
	asked := 0
	m := bare()
	m.install = func(context.Context, io.Writer, wanted) error { asked++; return nil }

	_, err := start(t.Context(), &Config{NoInstall: true}, m)
	require.ErrorIs(t, err, ErrNoServer)
	require.Zero(t, asked)

	m.getenv = func(name string) string { return map[string]string{"PGONCE_NO_INSTALL": "1"}[name] }
	_, err = start(t.Context(), nil, m)
	require.ErrorIs(t, err, ErrNoServer)
	require.Zero(t, asked)

	m.getenv = func(string) string { return "" }
	_, err = start(t.Context(), nil, m)
	require.ErrorIs(t, err, ErrNoServer, "an installation that brought nothing is an error, not a loop")
	require.Equal(t, 1, asked)
}

func TestOnFreePort_TriesAgainWhenThePortWasTaken(t *testing.T) {
	t.Parallel()
	taken, err := net.ListenTCP("tcp4", &net.TCPAddr{IP: net.IPv4(127, 0, 0, 1)})
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, taken.Close()) })

	m := local()
	program, found, _ := m.find(t.Context(), wantPostgres)
	require.True(t, found)
	as, err := m.serverUser("postgres", "nobody")
	require.NoError(t, err)
	folder, err := newFolder(m)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, os.RemoveAll(folder)) })
	dir, err := serverFolder(folder, "pg", as)
	require.NoError(t, err)
	require.NoError(t, initCluster(t.Context(), program, dir, "secret", as))

	var ports []int
	p, err := onFreePort(func(port int) (*process, error) {
		if len(ports) == 0 {
			port = taken.Addr().(*net.TCPAddr).Port
		}
		ports = append(ports, port)
		cmd := postgresCommand(t.Context(), program, dir, port, fast)
		cmd.SysProcAttr = attributes(as, syscall.SIGINT)
		p, err := startProcess(cmd, filepath.Join(dir, "log"), syscall.SIGINT)
		if err != nil {
			return nil, err
		}
		err = p.awaitReady(t.Context(), func(ctx context.Context) error {
			conn, err := pgx.Connect(ctx, "postgres://postgres:secret@127.0.0.1:"+strconv.Itoa(port)+"/postgres")
			if err != nil {
				return err
			}
			return conn.Close(ctx)
		})
		return p, err
	})
	require.NoError(t, err)
	require.Len(t, ports, 2)
	require.NoError(t, p.stop())
}

// bare is a machine without any program.
func bare() machine {
	m := local()
	m.lookPath = func(string) (string, error) { return "", os.ErrNotExist }
	m.glob = func(string) ([]string, error) { return nil, nil }
	m.install = nil
	m.platform = "none"
	m.engine = func(context.Context) error { return absent("no engine here") }
	return m
}

// query returns a query's rows as text.
func query(t *testing.T, url, sql string) [][]string {
	t.Helper()
	s := &Stack{adminURL: url}
	rows, err := s.admin(t.Context(), sql)
	require.NoError(t, err)
	return rows
}
