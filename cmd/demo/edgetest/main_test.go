package edgetest

import (
	"bufio"
	"context"
	"fmt"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/pgonce/pgonce/internal/pgtest"
)

const root = "../../.."

// binary is the demo's program, built once.
var binary string

func TestMain(m *testing.M) { os.Exit(run(m)) }

func run(m *testing.M) int {
	dir, err := os.MkdirTemp("", "edgetest")
	if err != nil {
		_, _ = fmt.Fprintln(os.Stderr, err)
		return 1
	}
	defer func() { _ = os.RemoveAll(dir) }() // the system's folder for what is temporary
	binary = filepath.Join(dir, "demo")
	build := exec.CommandContext(context.Background(), "go", "build", "-o", binary, "./cmd/demo")
	build.Dir = root
	if said, err := build.CombinedOutput(); err != nil {
		_, _ = fmt.Fprintf(os.Stderr, "%v: %s", err, said)
		return 1
	}
	code := m.Run()
	if code == 0 {
		if err := pgtest.Leaked(); err != nil {
			_, _ = fmt.Fprintln(os.Stderr, err)
			code = 1
		}
	}
	return code
}

// demo is a running one.
type demo struct {
	base     *url.URL
	database string
}

// startDemo starts the demo's program, without its storm, and stops it with the test.
func startDemo(t *testing.T, args ...string) *demo {
	t.Helper()
	cmd := exec.Command(binary, append([]string{"-serve", "-addr", "127.0.0.1:0"}, args...)...) //nolint:noctx // it is stopped below
	var stderr strings.Builder
	cmd.Stderr = &stderr
	out, err := cmd.StdoutPipe()
	require.NoError(t, err)
	require.NoError(t, cmd.Start())
	d := &demo{}
	lines := bufio.NewScanner(out)
	said := ""
	var drained sync.WaitGroup
	t.Cleanup(func() {
		_ = cmd.Process.Signal(syscall.SIGINT) // an error: it has gone, and Wait says why
		drained.Wait()
		if err := cmd.Wait(); err != nil || t.Failed() {
			t.Log(err, stderr.String())
		}
	})
	for d.base == nil && lines.Scan() {
		said += lines.Text() + "\n"
		if address, up := strings.CutPrefix(lines.Text(), "The service stays up on "); up {
			d.base, err = url.Parse(address)
			require.NoError(t, err)
		}
	}
	require.NotNil(t, d.base, "%s%s", said, stderr.String())
	drained.Go(func() {
		for lines.Scan() { // else it could not write any more
		}
	})
	database := regexp.MustCompile(`psql '([^']+)'`).FindStringSubmatch(said)
	require.NotNil(t, database, said)
	d.database = withPassword(t, database[1])
	return d
}

// withPassword: the demo shows none of a server that somebody else has given it.
func withPassword(t *testing.T, shown string) string {
	t.Helper()
	u, err := url.Parse(shown)
	require.NoError(t, err)
	given, err := url.Parse(os.Getenv("PGONCE_DATABASE_URL"))
	if _, has := u.User.Password(); !has && err == nil && given.Host == u.Host {
		u.User = given.User
	}
	return u.String()
}

// await returns when a query counts n in the demo's database.
func (d *demo) await(ctx context.Context, n int, sql string) error {
	ctx, cancel := context.WithTimeout(ctx, time.Minute)
	defer cancel()
	conn, err := pgx.Connect(ctx, d.database)
	if err != nil {
		return err
	}
	defer func() { _ = conn.Close(context.WithoutCancel(ctx)) }()
	for {
		var found int
		if err := conn.QueryRow(ctx, sql).Scan(&found); err != nil || found == n {
			return err
		}
		select {
		case <-time.After(5 * time.Millisecond):
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// thinking counts the orders that the demo is in the middle of, those that are held too.
const thinking = `SELECT count(*) FROM pg_stat_activity
	WHERE datname = current_database() AND state = 'active' AND (query LIKE 'SELECT pg\_sleep%' OR query LIKE 'UPDATE demo.stock%')`

// hold lets no order of what is handmade end before release: the 5 s that one takes are soon over on a busy machine.
func (d *demo) hold(t *testing.T) (release func()) {
	t.Helper()
	conn, err := pgx.Connect(t.Context(), d.database)
	require.NoError(t, err)
	_, err = conn.Exec(t.Context(), `BEGIN; SELECT FROM demo.stock WHERE sku = 'handmade' FOR NO KEY UPDATE`)
	require.NoError(t, err)
	release = sync.OnceFunc(func() { _ = conn.Close(context.WithoutCancel(t.Context())) })
	t.Cleanup(release)
	return release
}

// orders counts those of a key.
func (d *demo) orders(t *testing.T, key string) (n int) {
	t.Helper()
	conn, err := pgx.Connect(t.Context(), d.database)
	require.NoError(t, err)
	defer func() { require.NoError(t, conn.Close(t.Context())) }()
	require.NoError(t, conn.QueryRow(t.Context(), `SELECT count(*) FROM demo.orders WHERE idempotency_key = $1`, key).Scan(&n))
	return n
}
