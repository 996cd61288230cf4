// Command demo is an order service that takes every order once, and a storm of bad clients that tries to make it fail.
//
// It needs nothing but PostgreSQL's programs, or root on Debian to install them: it brings its own PostgreSQL. See -help.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"log/slog"
	"os"
	"os/signal"
	"syscall"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgonce/pgonce/db"
	"github.com/pgonce/pgonce/internal/devstack"
)

// The exit statuses.
const (
	exitOK          = 0
	exitFailed      = 1
	exitUsage       = 2
	exitInterrupted = 130
)

func main() {
	// Never given back: a second Ctrl-C must not break the clearing up, all of which has its deadlines.
	ctx, _ := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM, syscall.SIGHUP)
	os.Exit(run(ctx, os.Args[1:], os.Stdout, os.Stderr))
}

func run(ctx context.Context, args []string, stdout, stderr io.Writer) int {
	o, err := parseOptions(args, stderr)
	switch {
	case errors.Is(err, flag.ErrHelp):
		return exitOK
	case err != nil:
		return exitUsage
	}
	d := &demo{options: o, stdout: stdout, out: stdout, log: slog.New(slog.NewTextHandler(stderr, nil))}
	if o.json {
		d.out = stderr
	}
	good, err := d.run(ctx)
	switch {
	case err != nil && ctx.Err() != nil:
		_, _ = fmt.Fprintln(stderr, "demo: interrupted")
		return exitInterrupted
	case err != nil:
		_, _ = fmt.Fprintln(stderr, "demo:", err)
		return exitFailed
	case !good:
		return exitFailed
	}
	return exitOK
}

// demo is one run of this program.
type demo struct {
	options
	stdout io.Writer
	out    io.Writer // for people: standard error, if standard output is for the JSON object
	log    *slog.Logger
}

// run brings everything up, plays the storm and takes everything down again. good tells what the storm came to.
func (d *demo) run(ctx context.Context) (good bool, err error) {
	listener, err := listen(ctx, d.addr)
	if err != nil {
		return false, err
	}
	defer func() { _ = listener.Close() }() // closed already, if it was ever served
	base, err := baseURL(listener)
	if err != nil {
		return false, err
	}

	_, _ = fmt.Fprintln(d.out, "Finding or starting a PostgreSQL ...")
	stack, err := devstack.Start(ctx, &devstack.Config{Out: d.out})
	if err != nil {
		return false, err
	}
	defer func() { err = errors.Join(err, stack.Stop()) }()
	database, err := stack.CreateDatabase(ctx)
	if err != nil {
		return false, err
	}
	pool, err := newPool(ctx, database.URL)
	if err != nil {
		return false, err
	}
	defer closePool(pool)
	if err := db.Migrate(ctx, pool); err != nil {
		return false, err
	}
	if err := createSchema(ctx, pool); err != nil {
		return false, err
	}
	shop, err := newService(pool, d.unsafe, stormThink, d.log)
	if err != nil {
		return false, err
	}
	defer serve(ctx, listener, shop.handler(), d.log)()

	printGuide(d.out, base, psqlArgument(database, stack.Provider()), d.unsafe)
	r, err := d.play(ctx, newStorm(pool, base, d.storm))
	if err != nil {
		return false, err
	}
	if !d.once {
		_, _ = fmt.Fprintf(d.out, "The service stays up on %s\nCtrl-C stops it and its PostgreSQL.\n", base)
		<-ctx.Done()
		_, _ = fmt.Fprintln(d.out, "Stopping.")
		return true, nil
	}
	return r.good(), nil
}

// play plays the storm and prints what came of it.
func (d *demo) play(ctx context.Context, s *storm) (*report, error) {
	started := time.Now()
	stop := showProgress(ctx, d.out, s)
	r, err := s.run(ctx)
	stop(err == nil)
	if err != nil {
		return nil, err
	}
	_, _ = fmt.Fprintln(d.out)
	r.print(d.out, time.Since(started))
	if d.unsafe {
		r.explainUnsafe(d.out)
	}
	_, _ = fmt.Fprintln(d.out)
	if d.json {
		err = r.printJSON(d.stdout)
	}
	return r, err
}

// closePool closes the pool, but does not wait for ever: a COMMIT may wait for its answer much longer than we.
func closePool(pool *pgxpool.Pool) {
	closed := make(chan struct{})
	go func() {
		pool.Close()
		close(closed)
	}()
	select {
	case <-closed:
	case <-time.After(shutdownGrace):
	}
}
