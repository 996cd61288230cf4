package redisfront_test

import (
	"context"
	"fmt"
	"io"
	"net"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"github.com/pgonce/pgonce/idempotency"
	"github.com/pgonce/pgonce/internal/devstack"
	"github.com/pgonce/pgonce/redisfront"
)

// Case L06 and L17: whatever is written has a time to live, and no life is written that is none.
func TestCase_L06_L17_NothingWithoutATimeToLive(t *testing.T) {
	t.Parallel()
	ctx, m, client := t.Context(), orderMachine(t), newClient(t)
	prefix := fmt.Sprintf("l06-%d:", keys.Add(1))
	f := newFront(t, func(c *redisfront.Config) { c.Prefix = prefix })
	for _, life := range []time.Duration{-1, -time.Second, 1, 400 * time.Microsecond, 999 * time.Millisecond} {
		_, err := f.CacheStates(m, life)
		require.ErrorIs(t, err, idempotency.ErrConfig)
		_, err = f.Mirror(m, life)
		require.ErrorIs(t, err, idempotency.ErrConfig)
	}
	_, err := f.CacheStates(nil, 0)
	require.ErrorIs(t, err, idempotency.ErrConfig)
	row := newRow(t, m)
	for _, test := range []struct{ given, states, mirror time.Duration }{
		{0, redisfront.DefaultCacheLife, redisfront.DefaultMirrorLife},
		{1500 * time.Millisecond, 1500 * time.Millisecond, 1500 * time.Millisecond},
	} {
		s, err := f.CacheStates(m, test.given)
		require.NoError(t, err)
		mirror, err := f.Mirror(m, test.given)
		require.NoError(t, err)
		for id, to := range map[string]string{"a": "created", "b": "delivered", "c": "created"} {
			_, _ = s.Move(ctx, row, id, to)
		}
		require.NoError(t, mirror.Set(ctx, row, "created", "one"))
		require.NoError(t, f.Flush(ctx))
		require.NoError(t, mirror.Refuses(ctx, row, "paid", "one"))
		names, err := client.Keys(ctx, prefix+"*").Result()
		require.NoError(t, err)
		require.NotEmpty(t, names)
		for _, name := range names {
			left, err := client.PTTL(ctx, name).Result()
			require.NoError(t, err)
			want := test.states
			if strings.HasSuffix(name, ":mirror") {
				want = test.mirror
			}
			require.Greater(t, left, want-time.Second, name)
			require.LessOrEqual(t, left, want, name)
		}
		require.NoError(t, client.Del(ctx, names...).Err())
	}
}

// Case L01: the script has run, its reply is lost, and go-redis sends it again by itself.
func TestCase_L01_TransitionWhoseReplyIsLost(t *testing.T) {
	t.Parallel()
	ctx, m := t.Context(), orderMachine(t)
	options, err := redis.ParseURL(redisURL)
	require.NoError(t, err)
	proxy := newCuttingProxy(t, options.Addr)
	options.Addr, options.ContextTimeoutEnabled, options.MaxRetries = proxy.address, true, 3
	client := redis.NewClient(options)
	t.Cleanup(func() { require.NoError(t, client.Close()) })
	f, err := redisfront.New(client, &redisfront.Config{Prefix: fmt.Sprintf("l01-%d:", keys.Add(1)), Timeout: 10 * time.Second})
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, f.Close()) })
	s, row := newStates(t, f, m), newRow(t, m)
	for i, step := range []struct{ to, want string }{
		{"created", "moved from "},
		{"paid", "moved from created"},
		{"delivered", "refused from paid, allowed shipped refunded"},
		{"paid", "already"},
		{"shipped", "moved from paid"},
	} {
		proxy.cut.Store(true)
		require.Equal(t, step.want, answer(s.Move(ctx, row, fmt.Sprint("id", i), step.to)))
		require.False(t, proxy.cut.Load(), "a reply was lost")
	}
}

// cuttingProxy stands before a Redis. While cut is set, it swallows the next reply to a script, and ends the connection.
type cuttingProxy struct {
	address string
	cut     atomic.Bool
}

func newCuttingProxy(t *testing.T, server string) *cuttingProxy {
	t.Helper()
	listener, err := (&net.ListenConfig{}).Listen(t.Context(), "tcp", "127.0.0.1:0")
	require.NoError(t, err)
	p := &cuttingProxy{address: listener.Addr().String()}
	var group sync.WaitGroup
	t.Cleanup(func() {
		require.NoError(t, listener.Close())
		group.Wait()
	})
	group.Go(func() {
		for {
			client, err := listener.Accept()
			if err != nil {
				return
			}
			group.Go(func() { p.serve(client, server) })
		}
	})
	return p
}

func (p *cuttingProxy) serve(client net.Conn, address string) {
	defer func() { _ = client.Close() }()
	server, err := (&net.Dialer{}).DialContext(context.Background(), "tcp", address)
	if err != nil {
		return
	}
	defer func() { _ = server.Close() }()
	var script atomic.Bool
	go func() {
		_, _ = io.Copy(writer(func(b []byte) (int, error) {
			if strings.Contains(strings.ToLower(string(b)), "eval") {
				script.Store(true)
			}
			return server.Write(b)
		}), client)
		_ = server.Close()
	}()
	_, _ = io.Copy(writer(func(b []byte) (int, error) {
		if !strings.HasPrefix(string(b), "-NOSCRIPT") && script.Swap(false) && p.cut.CompareAndSwap(true, false) {
			return 0, io.ErrClosedPipe
		}
		return client.Write(b)
	}), server)
}

type writer func(b []byte) (int, error)

func (w writer) Write(b []byte) (int, error) { return w(b) }

// Case L03: a server that has lost the scripts gets them again, also from the publisher.
func TestCase_L03_TransitionsAreLoadedAgain(t *testing.T) {
	ctx, m, f, client := t.Context(), orderMachine(t), newFront(t), newClient(t)
	s, mirror := newStates(t, f, m), newMirror(t, f, m)
	row := newRow(t, m)
	for i, to := range []string{"created", "paid", "shipped"} {
		require.NoError(t, client.ScriptFlush(ctx).Err())
		_, err := s.Move(ctx, row, fmt.Sprint(i), to)
		require.NoError(t, err)
		require.NoError(t, client.ScriptFlush(ctx).Err())
		require.NoError(t, mirror.Set(ctx, row, to, "one"))
		require.NoError(t, f.Flush(ctx))
	}
	require.NoError(t, client.ScriptFlush(ctx).Err())
	require.ErrorIs(t, mirror.Refuses(ctx, row, "refunded", "one"), idempotency.ErrTransition)
	require.False(t, f.Degraded())
}

// Case L04, L05 and L18: in a cluster, with hostile names, and with states whose bytes must come back as they are.
func TestCase_L04_L05_L18_ClusterAndHostileNames(t *testing.T) {
	t.Parallel()
	ctx := t.Context()
	nodes, err := devstack.StartRedisNodes(ctx, &devstack.Config{Out: t.Output()})
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, nodes.Stop()) })
	node, err := nodes.Add(ctx, "cluster-enabled yes")
	require.NoError(t, err)
	client := redis.NewClusterClient(&redis.ClusterOptions{
		Addrs: []string{node.Address()}, Password: nodes.Password(), ContextTimeoutEnabled: true,
	})
	t.Cleanup(func() { require.NoError(t, client.Close()) })
	single := redis.NewClient(&redis.Options{Addr: node.Address(), Password: nodes.Password()})
	t.Cleanup(func() { require.NoError(t, single.Close()) })
	require.NoError(t, single.ClusterAddSlotsRange(ctx, 0, 16383).Err())
	require.Eventually(t, func() bool {
		info, err := single.ClusterInfo(ctx).Result()
		return err == nil && strings.Contains(info, "cluster_state:ok")
	}, 10*time.Second, 10*time.Millisecond)
	f, err := redisfront.New(client, &redisfront.Config{Timeout: 10 * time.Second})
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, f.Close()) })

	hostile := []string{"a}b{c", "{}", "{x}{y}", "{", "}", "p{q{r}s}", "'; return 1 --", "9007199254740993", "1.10", "[]", "%s", "ü💶", "-1"}
	m, err := idempotency.NewMachine("m{}", hostile[:1], hostile)
	require.NoError(t, err)
	s, mirror := newStates(t, f, m), newMirror(t, f, m)
	for _, id := range hostile {
		row, err := m.Key("{tenant}", id)
		require.NoError(t, err)
		from := ""
		for _, to := range hostile {
			for range 2 {
				moved, err := s.Move(ctx, row, to, to)
				require.NoError(t, err)
				require.Equal(t, idempotency.Moved{From: from, To: to}, moved)
			}
			from = to
			require.NoError(t, mirror.Set(ctx, row, to, "one"))
		}
		require.NoError(t, f.Flush(ctx))
		var refused *idempotency.TransitionError
		require.ErrorAs(t, mirror.Refuses(ctx, row, hostile[0], "one"), &refused)
		require.Equal(t, from, refused.From)
		require.NoError(t, mirror.Forget(ctx, row))
	}
}
