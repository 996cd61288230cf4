package redisfront_test

import (
	"context"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"github.com/pgonce/pgonce/idempotency"
	"github.com/pgonce/pgonce/internal/devstack"
	"github.com/pgonce/pgonce/redisfront"
)

// ownRedis starts a server for one test, which may spoil it, and a front on it.
func ownRedis(t *testing.T, events *events, timeout time.Duration) (*redisfront.Front, *redis.Client) {
	t.Helper()
	nodes, err := devstack.StartRedisNodes(t.Context(), &devstack.Config{Out: t.Output()})
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, nodes.Stop()) })
	node, err := nodes.Add(t.Context())
	require.NoError(t, err)
	options, err := redis.ParseURL(node.URL())
	require.NoError(t, err)
	options.ContextTimeoutEnabled = true
	client := redis.NewClient(options)
	t.Cleanup(func() { _ = client.Close() })
	f, err := redisfront.New(client, &redisfront.Config{Timeout: timeout, OnEvent: events.add})
	require.NoError(t, err)
	t.Cleanup(func() { _ = f.Close() })
	return f, client
}

// Every way in which Redis fails opens the breaker, costs its callers one timeout at most, and is over by itself.
func TestFront_DegradedAndBack(t *testing.T) {
	t.Parallel()
	for name, test := range map[string]struct {
		timeout     time.Duration
		spoil, mend func(ctx context.Context, c *redis.Client) error
		code        redisfront.Code
	}{
		"slow": {
			timeout: 400 * time.Millisecond,
			spoil: func(ctx context.Context, c *redis.Client) error {
				return c.Do(ctx, "CLIENT", "PAUSE", "2500", "ALL").Err()
			},
			code: redisfront.CodeTimeout,
		},
		"out of memory": {
			timeout: patience,
			spoil:   func(ctx context.Context, c *redis.Client) error { return c.ConfigSet(ctx, "maxmemory", "1").Err() },
			mend:    func(ctx context.Context, c *redis.Client) error { return c.ConfigSet(ctx, "maxmemory", "0").Err() },
			code:    redisfront.CodeOutOfMemory,
		},
		"a replica": {
			timeout: patience,
			spoil:   func(ctx context.Context, c *redis.Client) error { return c.ReplicaOf(ctx, "127.0.0.1", "1").Err() },
			mend:    func(ctx context.Context, c *redis.Client) error { return c.ReplicaOf(ctx, "NO", "ONE").Err() },
			code:    redisfront.CodeReadOnly,
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			events := newEvents()
			f, client := ownRedis(t, events, test.timeout)
			ctx, key := t.Context(), newKey(t)
			begins := func() bool { return begin(t, f, about(newKey(t)), idempotency.NewAttemptToken()) == nil }
			require.Eventually(t, begins, 10*time.Second, 10*time.Millisecond)
			require.NoError(t, test.spoil(ctx, client))

			began := time.Now()
			err := begin(t, f, about(newKey(t)), idempotency.NewAttemptToken())
			var e *redisfront.Error
			require.ErrorAs(t, err, &e)
			require.Equal(t, test.code, e.Code, err)
			require.True(t, f.Degraded())
			for range 1000 {
				require.Error(t, begin(t, f, about(key), idempotency.NewAttemptToken()))
			}
			require.Less(t, time.Since(began), 2*time.Second, "one timeout, and 1,000 calls that were not made")
			f.Publish(ctx, success(key, 1, "dropped"))
			require.Error(t, f.Flush(ctx), "dropped, and it says so")

			if test.mend != nil {
				require.NoError(t, test.mend(ctx, client))
			}
			require.Eventually(t, func() bool { return !f.Degraded() && begins() }, 10*time.Second, 10*time.Millisecond)
			require.GreaterOrEqual(t, count[idempotency.FrontDegraded](events), 2)
		})
	}
}

func TestFront_ACallerThatGoesAwayIsNoFailure(t *testing.T) {
	t.Parallel()
	f := newFront(t)
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	_, _, err := f.Lookup(ctx, about(newKey(t)))
	require.Error(t, err)
	require.False(t, f.Degraded())
}

func TestFront_CloseSendsWhatIsQueued(t *testing.T) {
	t.Parallel()
	client := newClient(t)
	cfg := &redisfront.Config{Prefix: newPrefix()}
	f, err := redisfront.New(client, cfg)
	require.NoError(t, err)
	all := make([]idempotency.Key, 2000)
	for i := range all {
		all[i] = newKey(t)
		f.Publish(t.Context(), success(all[i], 1, "x"))
	}
	require.NoError(t, f.Close())
	require.NoError(t, f.Close(), "twice")
	events := newEvents()
	again, err := redisfront.New(client, &redisfront.Config{Prefix: cfg.Prefix, OnEvent: events.add})
	require.NoError(t, err)
	for _, key := range all {
		_, found := lookup(t, again, about(key))
		require.True(t, found)
	}
	require.NoError(t, again.Close())
	again.Publish(t.Context(), success(all[0], 2, "too late"))
	require.Equal(t, 1, count[idempotency.FrontFailed](events))
}

func TestFront_SealedEntriesHoldNothingPlain(t *testing.T) {
	t.Parallel()
	ctx, client, key := t.Context(), newClient(t), newKey(t)
	old, err := redisfront.NewAESGCM(1, map[byte][]byte{1: make([]byte, 32)})
	require.NoError(t, err)
	changed, err := redisfront.NewAESGCM(2, map[byte][]byte{1: make([]byte, 32), 2: []byte("0123456789abcdef")})
	require.NoError(t, err)
	foreign, err := redisfront.NewAESGCM(2, map[byte][]byte{2: []byte("fedcba9876543210")})
	require.NoError(t, err)
	prefix := newPrefix()
	with := func(s redisfront.Sealer) *redisfront.Front {
		return newFront(t, func(c *redisfront.Config) { c.Prefix, c.Sealer = prefix, s })
	}
	e := success(key, 1, "a secret answer")
	publish(t, with(old), e)
	names, err := client.Keys(ctx, prefix+"*:entry").Result()
	require.NoError(t, err)
	require.Len(t, names, 1)
	dump, err := client.Dump(ctx, names[0]).Result()
	require.NoError(t, err)
	for _, plain := range []string{"secret", key.Value(), "someone", "order.create"} {
		require.NotContains(t, dump, plain)
	}
	result, found := lookup(t, with(changed), about(key))
	require.True(t, found, "the old key is still there")
	require.Equal(t, "a secret answer", result)
	for name, s := range map[string]redisfront.Sealer{"another key": foreign, "none": nil} {
		_, found = lookup(t, with(s), about(key))
		require.False(t, found, name)
	}
	publish(t, with(nil), success(key, 2, "forged"))
	_, found = lookup(t, with(changed), about(key))
	require.False(t, found, "not sealed")

	_, err = redisfront.NewAESGCM(1, map[byte][]byte{1: []byte("short")})
	require.ErrorIs(t, err, idempotency.ErrConfig)
	_, err = redisfront.NewAESGCM(2, map[byte][]byte{1: make([]byte, 32)})
	require.ErrorIs(t, err, idempotency.ErrConfig)
}

// The program's own code is called without any lock: it may ask the front something.
func TestFront_EventsMayAskTheFront(t *testing.T) {
	t.Parallel()
	away := redis.NewClient(&redis.Options{Addr: "127.0.0.1:1", ContextTimeoutEnabled: true, MaxRetries: -1, DialerRetries: 1})
	t.Cleanup(func() { require.NoError(t, away.Close()) })
	var f *redisfront.Front
	told := make(chan bool, 10)
	f, err := redisfront.New(away, &redisfront.Config{OnEvent: func(ctx context.Context, e idempotency.Event) {
		if _, is := e.(idempotency.FrontDegraded); is {
			_ = f.Evict(ctx, newKey(t))
			told <- f.Degraded()
		}
	}})
	require.NoError(t, err)
	_, _, err = f.Lookup(t.Context(), about(newKey(t)))
	require.Error(t, err)
	require.True(t, <-told)
	require.NoError(t, f.Close())
}
