package frontsuite

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgonce/pgonce/idempotency"
	"github.com/pgonce/pgonce/idempotency/idempotencytest"
	"github.com/pgonce/pgonce/txn"
)

// obey gives a shop a runner that obeys policies, and a function that changes them.
func (s *shop) obey(t *testing.T) (policy func(set string)) {
	t.Helper()
	policies, err := idempotency.NewPolicies(s.pool, nil)
	require.NoError(t, err)
	s.runner, err = txn.New(s.pool, &txn.Config{
		Operations: idempotencytest.Operations(), OnEvent: s.events.add, Policies: policies, Fronts: []idempotency.Front{s.local, s.redis},
	})
	require.NoError(t, err)
	t.Cleanup(s.runner.Close)
	s.awaitEpoch(t)
	_, err = s.pool.Exec(t.Context(), `INSERT INTO idempotency.policies (scope, actor, reason) VALUES ('all', 'ada', 'x')`)
	require.NoError(t, err)
	return func(set string) {
		_, err := s.pool.Exec(t.Context(), `UPDATE idempotency.policies SET actor = 'ada', reason = 'x', `+set)
		require.NoError(t, err)
		_, err = policies.RunOnce(t.Context())
		require.NoError(t, err)
	}
}

// Fronts replay nothing while duplicates are to be executed, and what they have is used afterwards.
func TestPolicy_FrontsAreNotAskedInShadowNorWhileOff(t *testing.T) {
	t.Parallel()
	b := newBench(t)
	s := b.shop(t, fronts{local: true, redis: true})
	policy := s.obey(t)
	recorded := request(t, idempotencytest.Orders, "recorded")
	policy(`enforcement = 'enforce'`)
	s.place(t, recorded, "first")
	require.Eventually(t, func() bool { // the epoch may be unknown for a moment
		before := s.events.local.Load()
		return s.place(t, recorded, "again").Replayed && s.events.local.Load() > before
	}, 30*time.Second, 10*time.Millisecond)

	policy(`enforcement = 'shadow'`)
	marks := func() int {
		require.NoError(t, s.redis.Flush(t.Context()))
		names, err := b.admin.Keys(t.Context(), "*").Result()
		require.NoError(t, err)
		return len(names)
	}
	entries, local, far := marks(), s.events.local.Load(), s.events.redis.Load()
	for range 3 {
		a := s.place(t, recorded, "executed")
		require.False(t, a.Replayed)
		require.Equal(t, "executed", string(a.Result))
		s.place(t, request(t, idempotencytest.Orders, "shadow"), "first of shadow")
	}
	require.Equal(t, 4, orders(t, b.pool, "recorded"))
	policy(`enforcement = 'off'`)
	require.True(t, s.place(t, recorded, "again").Replayed)
	for range 2 {
		require.False(t, s.place(t, request(t, idempotencytest.Orders, "off"), "executed").Replayed)
	}
	require.Equal(t, local, s.events.local.Load())
	require.Equal(t, far, s.events.redis.Load())
	require.Equal(t, entries, marks(), "nor told")

	policy(`enforcement = 'enforce'`)
	require.Equal(t, "first", string(s.place(t, recorded, "again").Result))
	require.Equal(t, local+1, s.events.local.Load(), "what they had is used again")
	for range 2 {
		require.Equal(t, "first of shadow", string(s.place(t, request(t, idempotencytest.Orders, "shadow"), "again").Result))
	}
	require.Equal(t, local+2, s.events.local.Load(), "found in PostgreSQL, and kept")
}

// A policy says which tiers answer, and for how long a duplicate waits, while the program runs.
func TestPolicy_StrategyLocalFrontAndWait(t *testing.T) {
	t.Parallel()
	b := newBench(t)
	s := b.shop(t, fronts{local: true, redis: true})
	policy := s.obey(t)
	req := request(t, idempotencytest.Orders, "k")
	s.place(t, req, "first")
	require.NoError(t, s.redis.Flush(t.Context()))
	answers := func(want string) {
		t.Helper()
		require.Eventually(t, func() bool {
			local, far, postgres := s.events.local.Load(), s.events.redis.Load(), s.events.postgres.Load()
			a := s.place(t, req, "again")
			if !a.Replayed {
				return false
			}
			got := map[bool]string{true: "local"}[s.events.local.Load() > local] + map[bool]string{true: "redis"}[s.events.redis.Load() > far] +
				map[bool]string{true: "postgres"}[s.events.postgres.Load() > postgres]
			return got == want
		}, 30*time.Second, 10*time.Millisecond, want)
	}
	answers("local")
	policy(`strategy = 'STRICT'`)
	answers("postgres")
	policy(`strategy = 'HYBRID', local_front = false`)
	answers("redis")
	policy(`strategy = NULL, local_front = NULL`)
	answers("local")

	// HYBRID asks for fronts, and a runner without any has none.
	alone := b.shop(t, fronts{})
	policies, err := idempotency.NewPolicies(b.pool, nil)
	require.NoError(t, err)
	alone.runner, err = txn.New(b.pool, &txn.Config{Operations: idempotencytest.Operations(), OnEvent: alone.events.add, Policies: policies})
	require.NoError(t, err)
	policy(`strategy = 'HYBRID', wait = '0'`)
	_, err = policies.RunOnce(t.Context())
	require.NoError(t, err)
	require.True(t, alone.place(t, req, "again").Replayed)
	require.EqualValues(t, 1, alone.events.postgres.Load())
}
