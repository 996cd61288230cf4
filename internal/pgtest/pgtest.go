// Package pgtest gives each test a PostgreSQL database of its own, migrated and empty.
//
// One throw-away server serves a test binary; it starts with the first test that asks. A test's database is a copy of
// a template made once, which takes 20 to 40 ms, so tests run in parallel without seeing each other.
package pgtest

import (
	"context"
	"fmt"
	"os"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"
	"go.uber.org/goleak"

	"github.com/pgonce/pgonce/db"
	"github.com/pgonce/pgonce/internal/devstack"
)

const (
	// cleanupGrace bounds dropping a test's database.
	cleanupGrace = 30 * time.Second
	// closeGrace is how long a test's pool waits for connections the test did not give back. A broken one has 15 s of pgx to end.
	closeGrace = 30 * time.Second
	// leakGrace is how long a test binary waits for goroutines to end.
	leakGrace = 5 * time.Second
)

// Main is the body of a TestMain: it runs the tests, stops the server and fails if goroutines are left over, but for those that
// ignore names. It does not return.
func Main(m *testing.M, ignore ...goleak.Option) {
	code := m.Run()
	for _, check := range []func() error{stopServer, func() error { return Leaked(ignore...) }} {
		if err := check(); err != nil {
			_, _ = fmt.Fprintln(os.Stderr, "pgtest:", err)
			code = max(code, 1)
		}
	}
	os.Exit(code)
}

// Leaked is goleak.Find, which gives goroutines half a second to end: on a busy machine that may be too little.
func Leaked(ignore ...goleak.Option) (err error) {
	for until := time.Now().Add(leakGrace); ; {
		if err = goleak.Find(ignore...); err == nil || time.Now().After(until) {
			return err
		}
	}
}

var (
	mu      sync.Mutex
	running *devstack.Stack // what Main has to stop

	server = sync.OnceValues(func() (*devstack.Stack, error) {
		stack, err := devstack.Start(context.Background(), &devstack.Config{
			Settings:    Env().settings(),
			ClockOffset: Env().ClockOffset,
			Out:         os.Stderr,
		})
		if err != nil {
			return nil, err
		}
		mu.Lock()
		running = stack
		mu.Unlock()
		return stack, nil
	})

	// template is the migrated database all others are copies of.
	template = sync.OnceValues(func() (*devstack.Database, error) {
		stack, err := server()
		if err != nil {
			return nil, err
		}
		ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
		defer cancel()
		database, err := stack.CreateDatabase(ctx)
		if err != nil {
			return nil, err
		}
		conn, err := pgconn.Connect(ctx, database.URL)
		if err != nil {
			return nil, fmt.Errorf("pgtest: connect to template: %w", err)
		}
		_, err = conn.Exec(ctx, db.InstallSQL()).ReadAll()
		// A database somebody is connected to cannot be copied.
		if closeErr := conn.Close(ctx); err == nil {
			err = closeErr
		}
		if err != nil {
			return nil, fmt.Errorf("pgtest: migrate template: %w", err)
		}
		return database, nil
	})
)

func stopServer() error {
	mu.Lock()
	defer mu.Unlock()
	if running == nil {
		return nil
	}
	return running.Stop()
}

// Server returns the test binary's server, for tests that need more than a database of it.
func Server(t testing.TB) *devstack.Stack {
	t.Helper()
	stack, err := server()
	if err != nil {
		t.Fatal(err)
	}
	return stack
}

// URL returns the connection string of a fresh migrated database, which is dropped when the test ends.
func URL(t testing.TB) string {
	t.Helper()
	original, err := template()
	if err != nil {
		t.Fatal(err)
	}
	return fresh(t, func(ctx context.Context, stack *devstack.Stack) (*devstack.Database, error) {
		return stack.CreateFromTemplate(ctx, original.Name)
	})
}

// EmptyURL returns the connection string of a fresh database without our schema, dropped when the test ends.
func EmptyURL(t testing.TB) string {
	t.Helper()
	return fresh(t, func(ctx context.Context, stack *devstack.Stack) (*devstack.Database, error) {
		return stack.CreateDatabase(ctx)
	})
}

func fresh(
	t testing.TB, create func(context.Context, *devstack.Stack) (*devstack.Database, error),
) string {
	t.Helper()
	database, err := create(t.Context(), Server(t))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		// Not the test's context, which has ended by now.
		ctx, cancel := context.WithTimeout(context.Background(), cleanupGrace)
		defer cancel()
		if err := database.Drop(ctx); err != nil {
			t.Error(err)
		}
	})
	return database.URL
}

// Pool returns a pool on a fresh migrated database. When the test ends the pool is closed, then the database dropped;
// a connection the test did not give back fails it.
func Pool(t testing.TB, configure ...func(*pgxpool.Config)) *pgxpool.Pool {
	t.Helper()
	cfg, err := pgxpool.ParseConfig(URL(t))
	if err != nil {
		t.Fatal(err)
	}
	for _, change := range configure {
		change(cfg)
	}
	pool, err := pgxpool.NewWithConfig(t.Context(), cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { closePool(t, pool, closeGrace) })
	return pool
}

// closePool closes the pool, but does not wait for ever for what a test leaked, as Close would.
func closePool(t testing.TB, pool *pgxpool.Pool, grace time.Duration) {
	t.Helper()
	closed := make(chan struct{})
	go func() {
		pool.Close()
		close(closed)
	}()
	select {
	case <-closed:
	case <-time.After(grace):
		t.Errorf("pgtest: %d connections were not given back to the pool %v after the test: "+
			"a Release, Rollback or rows.Close is missing", pool.Stat().AcquiredConns(), grace)
	}
}
