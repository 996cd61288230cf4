package frontsuite

import (
	"context"
	"fmt"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/pgonce/pgonce/idempotency/idempotencytest"
)

// Where no duplicates come, Redis is not asked before PostgreSQL. It is again after the first duplicate, and by those who wait.
func TestFronts_AQuietOperationPassesRedisOver(t *testing.T) {
	t.Parallel()
	b := newBench(t)
	// marked reports whether a fresh order has a mark while it runs.
	marked := func(s *shop, value string, retry bool) bool {
		req, there := request(t, idempotencytest.Orders, value), false
		req.Retry = retry
		_, err := s.call(t.Context(), req, func(ctx context.Context, _ pgx.Tx) ([]byte, error) {
			marks, err := b.admin.Keys(ctx, "*:mark").Result()
			there = len(marks) > 0
			return nil, err
		})
		require.NoError(t, err)
		require.NoError(t, s.redis.Flush(t.Context()))
		return there
	}
	quieten := func(s *shop, name string) {
		for i := range 70 {
			s.place(t, request(t, idempotencytest.Orders, fmt.Sprint(name, "-", i)), "done")
		}
		require.NoError(t, s.redis.Flush(t.Context()))
		require.Eventually(t, func() bool { return !marked(s, fmt.Sprint(name, "-", time.Now().UnixNano()), false) }, 10*time.Second, time.Millisecond)
	}
	first := b.shop(t, fronts{redis: true})
	require.True(t, marked(first, "cold", false))
	quieten(first, "first")
	require.True(t, marked(first, "retry", true), "who says that it is a retry is asking")

	first.place(t, request(t, idempotencytest.Orders, "first-1"), "again")
	require.True(t, marked(first, "after a duplicate", false))

	// Three processes, none of which has asked Redis: of those two that wait for the key one is answered by Redis.
	quieten(first, "first-again")
	waiters := [2]*shop{b.shop(t, fronts{redis: true}), b.shop(t, fronts{redis: true})}
	for i, s := range waiters {
		quieten(s, fmt.Sprint("waiter-", i))
	}
	far := waiters[0].events.redis.Load() + waiters[1].events.redis.Load()
	req := request(t, idempotencytest.Orders, "slow")
	running, waiting := make(chan struct{}), make(chan struct{})
	var all sync.WaitGroup
	all.Go(func() {
		_, err := first.call(t.Context(), req, func(context.Context, pgx.Tx) ([]byte, error) {
			close(running)
			<-waiting
			return []byte("done"), nil
		})
		if err != nil {
			t.Error(err)
		}
	})
	<-running
	for _, s := range waiters {
		all.Go(func() {
			a, err := s.call(t.Context(), req, func(context.Context, pgx.Tx) ([]byte, error) { return []byte("twice"), nil })
			if err != nil || !a.Replayed {
				t.Error(a, err)
			}
		})
	}
	require.Eventually(t, func() bool { // the one for the other's mark, which waits for the key
		channels, err := b.admin.PubSubChannels(t.Context(), "*").Result()
		return err == nil && len(channels) == 1
	}, 10*time.Second, time.Millisecond)
	close(waiting)
	all.Wait()
	require.Equal(t, far+1, waiters[0].events.redis.Load()+waiters[1].events.redis.Load())
}
