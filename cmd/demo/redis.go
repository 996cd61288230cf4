package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/pgonce/pgonce/internal/devstack"
)

// envRedis names somebody else's Redis, see package devstack.
const envRedis = "PGONCE_REDIS_URL"

// redisServer is the Redis of a run.
type redisServer struct {
	url    string
	prefix string // of all names of this run
	// foreign: it was here before us, and stays.
	foreign bool
}

func newRedisServer(url, database string) (*redisServer, error) {
	// A name of its own for each run: what another run left behind is about another database.
	s := &redisServer{url: url, prefix: "pgonce-demo:" + database + ":", foreign: os.Getenv(envRedis) != ""}
	if _, err := redis.ParseURL(url); err != nil {
		// Not the error itself: it would print the password.
		return nil, errors.New(envRedis + " must be a URL of the form redis://user:password@host:port/number")
	}
	return s, nil
}

// clientOptions are a client's. redisfront's timeout is kept only with ContextTimeoutEnabled.
func (s *redisServer) clientOptions() *redis.Options {
	options, err := redis.ParseURL(s.url)
	if err != nil {
		panic(err) // newRedisServer has parsed it
	}
	options.ContextTimeoutEnabled = true
	options.DialerRetries = 1 // refused is refused: the front itself tries again, and nobody waits for it
	return options
}

// forget removes what the run kept in somebody else's Redis.
func (s *redisServer) forget(ctx context.Context) (err error) {
	if !s.foreign {
		return nil
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), 5*time.Second)
	defer cancel()
	client := redis.NewClient(s.clientOptions())
	defer func() {
		if err = errors.Join(err, client.Close()); err != nil {
			err = fmt.Errorf("remove %s* from Redis (it ends by itself): %w", s.prefix, err)
		}
	}()
	for cursor := uint64(0); ; {
		var names []string
		if names, cursor, err = client.Scan(ctx, cursor, s.prefix+"*", 1000).Result(); err != nil {
			return err
		}
		if len(names) > 0 {
			if err := client.Unlink(ctx, names...).Err(); err != nil {
				return err
			}
		}
		if cursor == 0 {
			return nil
		}
	}
}

// silent is a logger for go-redis, whose warnings are about a Redis that has gone: the front says so, once.
type silent struct{}

func (silent) Printf(context.Context, string, ...any) {}

// startRedisNode starts a Redis that may be killed.
func startRedisNode(ctx context.Context, cfg *devstack.Config) (node *devstack.RedisNode, stop func() error, err error) {
	nodes, err := devstack.StartRedisNodes(ctx, cfg)
	if err != nil {
		return nil, nil, err
	}
	if node, err = nodes.Add(ctx); err != nil {
		return nil, nil, errors.Join(err, nodes.Stop())
	}
	return node, nodes.Stop, nil
}
