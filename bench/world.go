package main

import (
	"context"
	_ "embed"
	"errors"
	"fmt"
	"io"
	"os"
	"runtime"
	"slices"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgonce/pgonce/db"
	"github.com/pgonce/pgonce/internal/devstack"
	"github.com/pgonce/pgonce/txn"
)

//go:embed schema.sql
var schemaSQL string

// machine is what the numbers depend on.
type machine struct {
	CPUs     int     `json:"cpus"`
	Platform string  `json:"platform"`
	Go       string  `json:"go"`
	Postgres string  `json:"postgres"`
	SyncUS   float64 `json:"fsync_us"` // median time to force 8 KiB to the disk of the temporary folder
}

// world is the server and the database everything runs on.
type world struct {
	stack   *devstack.Stack
	url     string
	control *pgxpool.Pool // for what is not measured
	machine machine
}

func newWorld(ctx context.Context, buffers string, withRedis bool, out io.Writer) (_ *world, err error) {
	stack, err := devstack.Start(ctx, &devstack.Config{
		// A checkpoint in the middle of somebody's slice would be charged to that variant.
		Settings: map[string]string{
			"max_wal_size": "8GB", "checkpoint_timeout": "30min", "shared_buffers": buffers, "max_connections": "400",
		},
		Redis: withRedis,
		Out:   out,
	})
	if err != nil {
		return nil, err
	}
	w := &world{stack: stack}
	defer func() {
		if err != nil {
			err = errors.Join(err, w.close())
		}
	}()
	database, err := stack.CreateDatabase(ctx)
	if err != nil {
		return nil, err
	}
	w.url = database.URL
	if w.control, err = w.pool(ctx, 1); err != nil {
		return nil, err
	}
	for _, sql := range []string{db.InstallSQL(), schemaSQL, "VACUUM ANALYZE stock"} {
		if err := w.script(ctx, sql); err != nil {
			return nil, fmt.Errorf("make tables: %w", err)
		}
	}
	if w.machine, err = w.inspect(ctx); err != nil {
		return nil, err
	}
	return w, nil
}

// script runs a file of statements as one.
func (w *world) script(ctx context.Context, sql string) error {
	return w.control.AcquireFunc(ctx, func(conn *pgxpool.Conn) error {
		_, err := conn.Conn().PgConn().Exec(ctx, sql).ReadAll()
		return err
	})
}

// pool makes a pool of n connections, all of them open from the start.
func (w *world) pool(ctx context.Context, n int, configure ...func(*pgxpool.Config)) (*pgxpool.Pool, error) {
	return openPool(ctx, w.url, n, configure...)
}

func openPool(ctx context.Context, url string, n int, configure ...func(*pgxpool.Config)) (*pgxpool.Pool, error) {
	cfg, err := pgxpool.ParseConfig(url)
	if err != nil {
		return nil, err
	}
	cfg.MaxConns = int32(n) //nolint:gosec // at most 64
	for _, change := range configure {
		change(cfg)
	}
	pool, err := pgxpool.NewWithConfig(ctx, cfg)
	if err != nil {
		return nil, err
	}
	conns := make([]*pgxpool.Conn, n)
	for i := range conns {
		if conns[i], err = pool.Acquire(ctx); err != nil {
			break
		}
	}
	for _, conn := range conns {
		if conn != nil {
			conn.Release()
		}
	}
	if err != nil {
		pool.Close()
		return nil, err
	}
	return pool, nil
}

// pools makes the pools of a group's variants. Each variant has its own: connections that two of them shared would be
// warmer than the others.
type pools struct {
	world     *world
	size      int
	configure []func(*pgxpool.Config)
	made      []*pgxpool.Pool
	closers   []func() error // of what stands on them, closed in the reverse order
}

func (p *pools) plain(ctx context.Context) (*pgxpool.Pool, error) { return p.make(ctx, p.world.url) }

func (p *pools) ours(ctx context.Context) (*pgxpool.Pool, error) {
	return p.oursAt(ctx, p.world.url)
}

// oursAt is ours in another database.
func (p *pools) oursAt(ctx context.Context, url string) (*pgxpool.Pool, error) {
	return p.make(ctx, url, txn.ConfigurePool)
}

func (p *pools) make(ctx context.Context, url string, configure ...func(*pgxpool.Config)) (*pgxpool.Pool, error) {
	pool, err := openPool(ctx, url, p.size, append(slices.Clone(p.configure), configure...)...)
	if err == nil {
		p.made = append(p.made, pool)
	}
	return pool, err
}

func (p *pools) close() {
	for _, end := range slices.Backward(p.closers) {
		_ = end() // nothing of it is measured
	}
	for _, pool := range p.made {
		pool.Close()
	}
}

// inspect describes the machine, and refuses a server that does not write commits to its disk.
func (w *world) inspect(ctx context.Context) (m machine, err error) {
	m = machine{CPUs: runtime.GOMAXPROCS(0), Platform: runtime.GOOS + "/" + runtime.GOARCH, Go: runtime.Version()}
	var fsync, commit string
	err = w.control.QueryRow(ctx, `SELECT current_setting('server_version'), current_setting('fsync'), current_setting('synchronous_commit')`).
		Scan(&m.Postgres, &fsync, &commit)
	if err != nil {
		return m, err
	}
	if fsync != "on" || commit != "on" {
		return m, fmt.Errorf("fsync and synchronous_commit must be on, they are %s and %s", fsync, commit)
	}
	m.SyncUS, err = syncTime()
	return m, err
}

// syncTime is how long this machine takes to make 8 KiB durable: the floor of every commit.
func syncTime() (us float64, err error) {
	file, err := os.CreateTemp("", "pgonce-bench-")
	if err != nil {
		return 0, err
	}
	defer func() { err = errors.Join(err, file.Close(), os.Remove(file.Name())) }()
	block := make([]byte, 8192)
	var times []float64
	for range 200 {
		begin := time.Now()
		if _, err := file.WriteAt(block, 0); err != nil {
			return 0, err
		}
		if err := file.Sync(); err != nil {
			return 0, err
		}
		times = append(times, float64(time.Since(begin).Nanoseconds())/1e3)
	}
	return median(times), nil
}

// wal is how many bytes of WAL the server has written so far.
func (w *world) wal(ctx context.Context) (bytes int64, err error) {
	err = w.control.QueryRow(ctx, `SELECT (pg_current_wal_insert_lsn() - '0/0')::bigint`).Scan(&bytes)
	return bytes, err
}

func (w *world) close() error {
	if w.control != nil {
		w.control.Close()
	}
	return w.stack.Stop()
}
