package main

import (
	"context"
	"errors"
	"fmt"

	"github.com/pgonce/pgonce/internal/devstack"
)

// servers are what a run works on.
type servers struct {
	stack    *devstack.Stack
	database *devstack.Database
	redis    *redisServer        // nil: there is none
	node     *devstack.RedisNode // the same, where it is to be killed
	stopNode func() error
}

// startServers finds or starts them. Stop what it returns also where it fails.
func (d *demo) startServers(ctx context.Context) (t *servers, err error) {
	t = &servers{}
	cfg := &devstack.Config{Out: d.out, Redis: d.hybrid() && !d.killRedis}
	what := "a PostgreSQL"
	if d.hybrid() {
		what += " and a Redis"
	}
	_, _ = fmt.Fprintf(d.out, "Finding or starting %s ...\n", what)
	if t.stack, err = devstack.Start(ctx, cfg); err == nil && d.killRedis {
		if t.node, t.stopNode, err = startRedisNode(ctx, cfg); err == nil {
			_, _ = fmt.Fprintf(d.out, "Redis: on %s, to be killed in the middle of the storm\n", t.node.Address())
		}
	}
	if errors.Is(err, devstack.ErrNoRedis) {
		err = fmt.Errorf("%w\nWithout a Redis: demo -strict", err)
	}
	if err != nil {
		return t, err
	}
	if t.database, err = t.stack.CreateDatabase(ctx); err != nil || !d.hybrid() {
		return t, err
	}
	url := t.stack.RedisURL()
	if t.node != nil {
		url = t.node.URL()
	}
	t.redis, err = newRedisServer(url, t.database.Name)
	return t, err
}

// stop stops what was started, and leaves somebody else's servers as they were.
func (t *servers) stop(ctx context.Context) error {
	var errs []error
	if t.redis != nil {
		errs = append(errs, t.redis.forget(ctx))
	}
	if t.stopNode != nil {
		errs = append(errs, t.stopNode())
	}
	if t.stack != nil {
		errs = append(errs, t.stack.Stop())
	}
	return errors.Join(errs...)
}
