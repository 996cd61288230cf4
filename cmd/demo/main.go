// Command demo is an order service that takes every order once, and a storm of bad clients that tries to make it fail.
//
// It needs nothing but the programs of PostgreSQL and Redis, or root on Debian to install them: it brings servers of its own.
// See -help.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/url"
	"os"
	"os/signal"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/redis/go-redis/v9"

	"github.com/pgonce/pgonce/db"
	"github.com/pgonce/pgonce/idempotency"
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
	// What go-redis warns of is a Redis that has gone, again and again. The front says so once, see redisNotices.
	redis.SetLogger(silent{})
	if order := os.Getenv(envPayer); order != "" {
		if err := payAndDie(ctx, order); err != nil {
			_, _ = fmt.Fprintln(os.Stderr, "demo:", err)
			os.Exit(exitFailed)
		}
		return
	}
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
	d := &demo{options: o, stdout: stdout, out: newScreen(stdout), log: slog.New(slog.NewTextHandler(stderr, nil))}
	if o.json {
		d.out = newScreen(stderr)
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
	out    *screen // for people: standard error, if standard output is for the JSON object
	log    *slog.Logger
}

// run brings everything up, plays the storm and takes everything down again. good tells what the storm came to.
func (d *demo) run(ctx context.Context) (good bool, err error) {
	listeners, err := listenAll(ctx, d.addr, d.instances)
	if err != nil {
		return false, err
	}
	defer closeListeners(listeners)
	t, err := d.startServers(ctx)
	defer func() { err = errors.Join(err, t.stop(ctx)) }()
	if err != nil {
		return false, err
	}
	pool, err := newPool(ctx, t.database.URL, 4, new(atomic.Int64))
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
	paying, closeGateway, err := openGateway(ctx, d.log)
	if err != nil {
		return false, err
	}
	defer closeGateway()
	instances, err := d.open(ctx, t, paying.base, listeners)
	defer func() { closeAll(instances) }()
	if err != nil {
		return false, err
	}

	d.printGuide(instances, t)
	good = true
	if !d.serve {
		if good, err = d.show(ctx, pool, t, instances, paying); err != nil {
			return false, err
		}
	}
	if d.once {
		return good, nil
	}
	_, _ = fmt.Fprintf(d.out, "The service stays up on %s\nCtrl-C stops it and what was started for it.\n", addresses(instances))
	c, err := newCompensator(pool, paying, instances[0].redis)
	if err != nil {
		return false, err
	}
	c.Run(ctx)
	_, _ = fmt.Fprintln(d.out, "Stopping.")
	return true, nil
}

// show plays the storm, and breaks what it is asked to break. good tells what all that came to.
func (d *demo) show(ctx context.Context, pool *pgxpool.Pool, t *servers, instances []*instance, paying *servedGateway) (good bool, err error) {
	r, err := d.play(ctx, newStorm(pool, instances, d.storm), t.node)
	if err != nil {
		return false, err
	}
	good = r.good()
	if !d.unsafe {
		paid, err := d.showCrash(ctx, pool, t.database.URL, paying)
		if err != nil {
			return false, err
		}
		good = good && paid
	}
	if d.chaos {
		repaired, err := d.showChaos(ctx, pool, t.redis, instances[0].redis, paying)
		if err != nil {
			return false, err
		}
		good = good && repaired
	}
	return good, nil
}

// open opens and serves an instance on each listener. It returns those it has opened also with an error.
func (d *demo) open(ctx context.Context, t *servers, gateway *url.URL, listeners []net.Listener) (instances []*instance, err error) {
	cfg := instanceConfig{
		database: t.database.URL, conns: connsOf(len(listeners)), redis: t.redis, gateway: gateway, origin: d.origin, unsafe: d.unsafe, think: stormThink, log: d.log,
	}
	for n, listener := range listeners {
		i, err := openInstance(ctx, cfg, d.redisNotices(who(n+1, len(listeners))))
		if err != nil {
			return instances, err
		}
		instances = append(instances, i)
		if err := i.serve(ctx, listener); err != nil {
			return instances, err
		}
	}
	return instances, nil
}

// redisNotices says so when Redis goes for an instance and when it is back.
func (d *demo) redisNotices(who string) idempotency.OnEvent {
	return func(_ context.Context, e idempotency.Event) {
		degraded, is := e.(idempotency.FrontDegraded)
		switch {
		case !is:
		case degraded.Degraded:
			_, _ = fmt.Fprintf(d.out, "%s goes on without Redis: %v\n", who, degraded.Err)
		default:
			_, _ = fmt.Fprintf(d.out, "%s has Redis again.\n", who)
		}
	}
}

// play plays the storm, with an outage of node if that is asked for, and prints what came of it.
func (d *demo) play(ctx context.Context, s *storm, node *devstack.RedisNode) (*report, error) {
	over, outageEnds := make(chan struct{}), make(chan error, 1)
	if node != nil {
		o := &outage{node: node, out: d.out}
		go func() { outageEnds <- o.strike(ctx, s, over) }()
	} else {
		outageEnds <- nil
	}
	started := time.Now()
	stop := showProgress(ctx, d.out, s)
	r, err := s.run(ctx)
	took := time.Since(started)
	stop(err == nil)
	close(over)
	if outage := <-outageEnds; err == nil {
		err = outage
	}
	if err != nil {
		return nil, err
	}
	_, _ = fmt.Fprintln(d.out)
	r.print(d.out, took)
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
