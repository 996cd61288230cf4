package db_test

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"os/exec"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgonce/pgonce/db"
	"github.com/pgonce/pgonce/internal/pgtest"
)

// migrateURL tells a copy of the test program to be nothing but a program that calls Migrate.
const migrateURL = "PGONCE_TEST_MIGRATE_URL"

func TestMain(m *testing.M) {
	if url := os.Getenv(migrateURL); url != "" {
		if err := migrate(url); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		os.Exit(0)
	}
	pgtest.Main(m)
}

func migrate(url string) error {
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	pool, err := pgxpool.New(ctx, url)
	if err != nil {
		return err
	}
	defer pool.Close()
	return db.Migrate(ctx, pool)
}

// process is a running copy of the test program that calls Migrate.
type process struct {
	cmd    *exec.Cmd
	output bytes.Buffer
}

func startMigrate(t *testing.T, url string) *process {
	t.Helper()
	p := &process{cmd: exec.CommandContext(t.Context(), os.Args[0])}
	p.cmd.Env = append(os.Environ(), migrateURL+"="+url)
	p.cmd.Stdout, p.cmd.Stderr = &p.output, &p.output
	require.NoError(t, p.cmd.Start())
	return p
}

func newPool(t *testing.T, url string, change ...func(*pgxpool.Config)) *pgxpool.Pool {
	t.Helper()
	cfg, err := pgxpool.ParseConfig(url)
	require.NoError(t, err)
	for _, f := range change {
		f(cfg)
	}
	pool, err := pgxpool.NewWithConfig(t.Context(), cfg)
	require.NoError(t, err)
	t.Cleanup(pool.Close)
	return pool
}

func connect(t *testing.T, url string) *pgx.Conn {
	t.Helper()
	conn, err := pgx.Connect(t.Context(), url)
	require.NoError(t, err)
	t.Cleanup(func() { _ = conn.Close(context.Background()) })
	return conn
}

// querier is a connection, a pool or a transaction.
type querier interface {
	Query(ctx context.Context, sql string, args ...any) (pgx.Rows, error)
}

// column returns the single column of a query.
func column[T any](t *testing.T, q querier, sql string, args ...any) []T {
	t.Helper()
	rows, err := q.Query(t.Context(), sql, args...)
	require.NoError(t, err)
	values, err := pgx.CollectRows(rows, pgx.RowTo[T])
	require.NoError(t, err)
	return values
}

// eventually polls a query for true.
func eventually(t *testing.T, q querier, sql string, args ...any) {
	t.Helper()
	require.Eventually(t, func() bool { return column[bool](t, q, sql, args...)[0] }, 30*time.Second, 20*time.Millisecond, sql)
}
