package main

import (
	"context"
	"fmt"
	"strings"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/spf13/cobra"

	"github.com/pgonce/pgonce/idempotency"
	"github.com/pgonce/pgonce/redisfront"
)

// redisFlags name the Redis of the fronts.
type redisFlags struct {
	url     string
	prefix  string
	cluster bool
}

const redisVariable = "PGONCE_REDIS_URL"

func (a *app) addRedis(cmd *cobra.Command) {
	flags := cmd.Flags()
	flags.StringVar(&a.redis.url, "redis", "", "Redis of the fronts, as redis://... or, with ?master_name=, its sentinels (default $"+redisVariable+")")
	flags.StringVar(&a.redis.prefix, "redis-prefix", redisfront.DefaultPrefix, "what the fronts' names begin with, redisfront.Config.Prefix")
	flags.BoolVar(&a.redis.cluster, "redis-cluster", false, "--redis is a node of a cluster")
}

func (a *app) redisURL() string {
	if a.redis.url != "" {
		return a.redis.url
	}
	return a.getenv(redisVariable)
}

func (a *app) redisGiven() bool { return a.redisURL() != "" }

// dialTimeout and readTimeout are those of a person who waits, not of a request.
const (
	dialTimeout = 2 * time.Second
	readTimeout = 3 * time.Second
)

// checkRedis finds a wrong command line before anything is changed.
func (a *app) checkRedis() error {
	if !a.redisGiven() {
		return nil
	}
	client, err := a.redisClient()
	if err != nil {
		return err
	}
	defer func() { _ = client.Close() }()
	front, err := redisfront.New(client, &redisfront.Config{Prefix: a.redis.prefix, Timeout: readTimeout})
	if err != nil {
		return &usageError{err}
	}
	return front.Close()
}

func (a *app) redisClient() (redis.UniversalClient, error) {
	url := a.redisURL()
	fail := func(err error) (redis.UniversalClient, error) {
		return nil, &usageError{fmt.Errorf("--redis: %s", redacted(err, url))}
	}
	switch {
	case a.redis.cluster:
		o, err := redis.ParseClusterURL(url)
		if err != nil {
			return fail(err)
		}
		o.ContextTimeoutEnabled, o.DialTimeout, o.ReadTimeout, o.DialerRetries = true, dialTimeout, readTimeout, 1
		return redis.NewClusterClient(o), nil
	case strings.Contains(url, "master_name="):
		o, err := redis.ParseFailoverURL(url)
		if err != nil {
			return fail(err)
		}
		o.ContextTimeoutEnabled, o.DialTimeout, o.ReadTimeout, o.DialerRetries = true, dialTimeout, readTimeout, 1
		return redis.NewFailoverClient(o), nil
	}
	o, err := redis.ParseURL(url)
	if err != nil {
		return fail(err)
	}
	o.ContextTimeoutEnabled, o.DialTimeout, o.ReadTimeout, o.DialerRetries = true, dialTimeout, readTimeout, 1
	return redis.NewClient(o), nil
}

// redacted keeps the URL, which holds a password, out of what is printed.
func redacted(err error, url string) string { return strings.ReplaceAll(err.Error(), url, "(the URL)") }

// evictTries and evictPause bound how long Redis is asked for.
const (
	evictTries = 4
	evictPause = 500 * time.Millisecond
)

// evict makes Redis forget the key, twice: a reader who had the record before the change may publish it after the first time.
func (a *app) evict(ctx context.Context, key idempotency.Key) error {
	client, err := a.redisClient()
	if err != nil {
		return err
	}
	defer func() { _ = client.Close() }()
	for range 2 {
		if err := a.evictOnce(ctx, client, key); err != nil {
			return err
		}
		if err := pause(ctx, evictPause); err != nil {
			return nil // it has been evicted; the second time is for the rare case
		}
	}
	return nil
}

// evictOnce tries with a front of its own each time: a front whose breaker is open does not ask.
func (a *app) evictOnce(ctx context.Context, client redis.UniversalClient, key idempotency.Key) (err error) {
	for try := range evictTries {
		if try > 0 && pause(ctx, evictPause<<(try-1)) != nil {
			return err
		}
		var front *redisfront.Front
		front, err = redisfront.New(client, &redisfront.Config{Prefix: a.redis.prefix, Timeout: readTimeout}) //nolint:contextcheck // it does not connect
		if err != nil {
			return &usageError{err}
		}
		err = front.Evict(ctx, key)
		if closeErr := front.Close(); err == nil {
			err = closeErr
		}
		if err == nil {
			return nil
		}
	}
	return fmt.Errorf("asked %d times: %w", evictTries, err)
}

func pause(ctx context.Context, d time.Duration) error {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
		return nil
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

func (a *app) newEvict() *cobra.Command {
	var k keyFlags
	cmd := &cobra.Command{
		Use:   "evict KEY --tenant T --operation O --redis URL",
		Short: "Make Redis forget a key; PostgreSQL is not asked and not changed",
		Long: "Make Redis forget a key, for example after a fail or an expire whose eviction did not get through. It does no harm at any\n" +
			"time: PostgreSQL answers the next duplicate, and Redis learns the answer again.",
		Args: cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			if !a.redisGiven() {
				return usagef("which Redis? give --redis, or set %s", redisVariable)
			}
			key, full, err := k.full(args[0])
			if err != nil {
				return err
			}
			if !full {
				return usagef("--tenant and --operation are needed: the names in Redis are made of them")
			}
			if err := a.checkRedis(); err != nil {
				return err
			}
			ctx, cancel := a.bounded(cmd.Context())
			defer cancel()
			if err := a.evict(ctx, key); err != nil {
				return fmt.Errorf("evict from Redis: %w", err)
			}
			if a.json {
				return a.printJSON(map[string]string{"tenant": key.Tenant(), "operation": key.Operation(), "key": key.Value(), "redis": "evicted"})
			}
			a.printf("%s: evicted from Redis\n", printable(key.String()))
			return nil
		},
	}
	k.add(cmd)
	a.addRedis(cmd)
	return cmd
}
