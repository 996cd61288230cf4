package main

import (
	"fmt"
	"net/http"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgonce/pgonce/idempotency"
	"github.com/pgonce/pgonce/internal/devstack"
)

// warmUp returns when every instance knows the epoch, before which it asks no front.
func (s *shop) warmUp(t *testing.T) {
	t.Helper()
	for n := range s.instances {
		key := fmt.Sprint("warm-", n)
		require.Eventually(t, func() bool {
			a, err := s.tryAt(t.Context(), n, http.MethodPost, "/orders", keyHeader(key), strings.NewReader(coffee))
			return err == nil && a.by() == byLocal
		}, 20*time.Second, 5*time.Millisecond)
	}
}

func TestPostOrder_SaysWhoGaveTheReplay(t *testing.T) {
	t.Parallel()
	server, node := startRedis(t)
	s := openShop(t, shopOptions{instances: 3, redis: server, think: noThinking})
	s.warmUp(t)
	var key string
	var first answer
	// A slow machine may miss the fronts' deadlines: then with another key.
	require.Eventually(t, func() bool {
		key += "k"
		first = s.postAt(t, 0, key, coffee)
		require.Empty(t, first.by(), "it is no replay")
		require.NoError(t, s.instances[0].redis.Flush(t.Context()))
		return s.postAt(t, 0, key, coffee).by() == byLocal && s.postAt(t, 1, key, coffee).by() == byRedis &&
			s.postAt(t, 1, key, coffee).by() == byLocal
	}, 20*time.Second, time.Millisecond)
	require.NoError(t, node.Kill())
	again := s.postAt(t, 2, key, coffee)
	require.Equal(t, byPostgreSQL, again.by())
	require.Equal(t, first.body, again.body)
	require.Equal(t, 1, s.orders(t, key))
}

func TestNoteAnswered_WhoeverItWas(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct {
		event idempotency.Event
		by    string
	}{
		{idempotency.Replayed{}, byPostgreSQL},
		{idempotency.Replayed{Shared: true}, byMerged},
		{idempotency.Replayed{From: byRedis}, byRedis},
		{idempotency.Executed{}, ""},
	} {
		ctx, by := withAnswered(t.Context())
		noteAnswered(ctx, tt.event)
		require.Equal(t, tt.by, *by)
	}
	noteAnswered(t.Context(), idempotency.Replayed{}) // nobody wants to know
}

// A client that has its 201 and asks again is never told "in progress": neither by another instance, nor by a mark that is
// still in Redis, nor while Redis dies.
func TestPostOrder_ARetryRightAfterA201IsAlwaysAReplay(t *testing.T) {
	t.Parallel()
	const keys, clients, instances = 300, 6, 3
	retry := func(t *testing.T, redis *redisServer, half func()) {
		t.Helper()
		s := openShop(t, shopOptions{instances: instances, redis: redis, think: noThinking})
		if redis != nil {
			s.warmUp(t)
		}
		wrong := make(chan string, clients)
		var group sync.WaitGroup
		for c := range clients {
			group.Go(func() {
				for n := c; n < keys; n += clients {
					if n == keys/2 {
						half()
					}
					if what := s.orderAndRetry(t, n); what != "" {
						wrong <- what
						return
					}
				}
			})
		}
		group.Wait()
		close(wrong)
		for what := range wrong {
			t.Error(what)
		}
		require.Equal(t, keys, s.number(t, `SELECT count(*) FROM demo.orders WHERE idempotency_key LIKE 'k-%'`))
	}
	t.Run("STRICT", func(t *testing.T) {
		t.Parallel()
		retry(t, nil, func() {})
	})
	t.Run("HYBRID", func(t *testing.T) {
		t.Parallel()
		server, _ := startRedis(t)
		retry(t, server, func() {})
	})
	t.Run("HYBRIDAndRedisDies", func(t *testing.T) {
		t.Parallel()
		server, node := startRedis(t)
		retry(t, server, func() { dieAndComeBack(t, node) })
	})
}

func dieAndComeBack(t *testing.T, node *devstack.RedisNode) {
	t.Helper()
	if err := node.Kill(); err != nil {
		t.Error(err)
	}
	if err := node.Start(t.Context()); err != nil {
		t.Error(err)
	}
}

// orderAndRetry orders at one instance and asks again at once, at each of them. It returns what was wrong.
func (s *shop) orderAndRetry(t *testing.T, n int) string {
	t.Helper()
	key := keyHeader(fmt.Sprint("k-", n))
	post := func(instance int) (answer, error) {
		return s.tryAt(t.Context(), instance%len(s.instances), http.MethodPost, "/orders", key, strings.NewReader(coffee))
	}
	first, err := post(n)
	if err != nil || first.status != http.StatusCreated || first.replayed() {
		return fmt.Sprintf("order %d: %v %+v", n, err, first)
	}
	for i := range s.instances {
		again, err := post(n + 1 + i)
		if err != nil || again.status != http.StatusCreated || !again.replayed() || again.body != first.body {
			return fmt.Sprintf("retry %d of order %d: %v %+v", i+1, n, err, again)
		}
	}
	return ""
}
