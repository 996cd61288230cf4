package main

import (
	"context"
	"fmt"
	"log/slog"
	"net"
	"net/url"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/redis/go-redis/v9"

	"github.com/pgonce/pgonce/idempotency"
	"github.com/pgonce/pgonce/localfront"
	"github.com/pgonce/pgonce/redisfront"
)

// instance is one instance of the service. Others share its database and its Redis, and nothing of this process: they might
// be on other machines.
type instance struct {
	base       *url.URL // where it is served
	pool       *pgxpool.Pool
	statements atomic.Int64      // sent to PostgreSQL so far
	redis      *redisfront.Front // nil: PostgreSQL alone
	service    *service
	origin     string
	closers    []func() // in the order of their opening
}

// instanceConfig is what instances have in common.
type instanceConfig struct {
	database string // its URL
	conns    int32  // of the pool
	redis    *redisServer
	gateway  *url.URL
	origin   string // of pages that may use the service too; empty: none but its own
	unsafe   bool
	think    func(key string) time.Duration
	log      *slog.Logger
}

// openInstance opens one, which nobody can reach before it is served. onRedis is told of the events of its Redis.
func openInstance(ctx context.Context, cfg instanceConfig, onRedis idempotency.OnEvent) (_ *instance, err error) {
	i := &instance{origin: cfg.origin}
	defer func() {
		if err != nil {
			i.close()
		}
	}()
	if i.pool, err = newPool(ctx, cfg.database, cfg.conns, &i.statements); err != nil {
		return nil, err
	}
	i.closers = append(i.closers, func() { closePool(i.pool) })
	var fronts []idempotency.Front
	if cfg.redis != nil {
		if fronts, err = i.openFronts(cfg.redis, onRedis, cfg.log); err != nil { //nolint:contextcheck // what they do beside calls outlives their start
			return nil, err
		}
	}
	if i.service, err = newService(i.pool, fronts, cfg.gateway, cfg.unsafe, cfg.think, cfg.log); err != nil {
		return nil, err
	}
	i.closers = append(i.closers, i.service.runner.Close)
	return i, nil
}

// openFronts returns the fronts, the nearest first. All the library needs for HYBRID is here.
func (i *instance) openFronts(server *redisServer, onRedis idempotency.OnEvent, log *slog.Logger) (_ []idempotency.Front, err error) {
	closer := func(what string, end func() error) {
		i.closers = append(i.closers, func() {
			if err := end(); err != nil {
				log.Warn("closing "+what, slog.Any("error", err))
			}
		})
	}
	client := redis.NewClient(server.clientOptions())
	closer("the client of Redis", client.Close)
	if i.redis, err = redisfront.New(client, &redisfront.Config{Prefix: server.prefix, OnEvent: onRedis}); err != nil {
		return nil, err
	}
	closer("the front in Redis", i.redis.Close)
	local, err := localfront.New(nil)
	if err != nil {
		return nil, err
	}
	closer("the local front", local.Close)
	return []idempotency.Front{local, i.redis}, nil
}

// serve makes the instance reachable.
func (i *instance) serve(ctx context.Context, listener net.Listener) (err error) {
	if i.base, err = baseURL(listener); err != nil {
		return err
	}
	i.closers = append(i.closers, serve(ctx, listener, crossOrigin(i.origin, i.service.handler()), i.service.log))
	return nil
}

// close ends the instance: first what others reach it by, then the runner, its fronts, their client, and the pool.
func (i *instance) close() {
	for _, end := range slices.Backward(i.closers) {
		end()
	}
	i.closers = nil
}

// closeAll closes instances at the same time: each may wait for requests that still run.
func closeAll(instances []*instance) {
	var group sync.WaitGroup
	for _, i := range instances {
		group.Go(i.close)
	}
	group.Wait()
}

// connsOf is how many connections the pool of one of n instances has: not more together than PostgreSQL allows by default.
func connsOf(n int) int32 { return int32(min(16, 60/n)) } //nolint:gosec // at most 16

// who names an instance in a line for people.
func who(number, n int) string {
	if n == 1 {
		return "The service"
	}
	return fmt.Sprintf("Instance %d", number)
}
