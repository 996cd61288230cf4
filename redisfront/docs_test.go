package redisfront_test

import (
	"os"
	"strings"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"github.com/pgonce/pgonce/idempotency"
	"github.com/pgonce/pgonce/redisfront"
)

func TestDocs_CodesAreTheTable(t *testing.T) {
	t.Parallel()
	text, err := os.ReadFile("../docs/redis.md")
	require.NoError(t, err)
	require.Contains(t, string(text), "| code | name | meaning |\n|---|---|---|\n"+strings.Join(redisfront.CodeRows(), "\n")+"\n\n")
}

// The user of the guide may do what front, Do and quorum do, and nothing else.
func TestDocs_ACLIsEnough(t *testing.T) {
	t.Parallel()
	ctx, e, events := t.Context(), startEnsemble(t, 3), newEvents()
	for i, node := range e.nodes {
		setUser(t, e.clients[i].(*redis.Client))
		client := redis.NewClient(&redis.Options{Addr: node.Address(), Username: "pgonce", Password: "secret", ContextTimeoutEnabled: true})
		t.Cleanup(func() { _ = client.Close() })
		e.clients[i] = client
	}
	client := e.clients[0].(*redis.Client)
	told := func(c *redisfront.Config) { c.OnEvent = events.add }
	for name, f := range map[string]*redisfront.Front{
		"one Redis": frontOn(t, client, told, declares(), patient), "a quorum": e.front(t, client, told),
	} {
		key := newKey(t)
		own := success(key, 1, "x")
		require.NoError(t, begin(t, f, about(key), own.Mark), name)
		require.NoError(t, f.Renew(ctx, key, own.Mark, time.Minute), name)
		woken := make(chan error)
		go func() { woken <- f.Wait(ctx, key) }()
		time.Sleep(50 * time.Millisecond) // it subscribes
		publish(t, f, own)
		require.NoError(t, <-woken, name)
		_, found := lookup(t, f, about(key))
		require.True(t, found, name)
		require.NoError(t, f.Evict(ctx, key), name)
		other := idempotency.NewAttemptToken()
		require.Eventually(t, func() bool { return begin(t, f, about(key), other) == nil }, 5*time.Second, 5*time.Millisecond, name)
		f.End(ctx, key, other)
		require.NoError(t, f.Wait(ctx, key), name)
		if name == "one Redis" {
			s, req := sends{}, mailRequest(t)
			for range 2 {
				_, err := redisfront.Do(ctx, f, req, s.send)
				require.NoError(t, err)
			}
			require.EqualValues(t, 1, s.n.Load())
		}
	}
	require.Zero(t, count[idempotency.FrontFailed](events))
	for _, err := range []error{
		client.Keys(ctx, "*").Err(), client.FlushAll(ctx).Err(), client.Set(ctx, "other", 1, time.Minute).Err(),
		client.ConfigGet(ctx, "*").Err(),
	} {
		require.ErrorContains(t, err, "NOPERM")
	}
}
