package txn_test

import (
	"context"
	"fmt"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgonce/pgonce/idempotency"
	"github.com/pgonce/pgonce/localfront"
	"github.com/pgonce/pgonce/txn"
)

// Callers that give up are most frequent when every connection of the pool is in use, which is when fronts are needed most.
func TestFronts_ACallerThatGaveUpDoesNotTurnThemOff(t *testing.T) {
	t.Parallel()
	front, err := localfront.New(nil)
	require.NoError(t, err)
	from := make(chan string, 1)
	s := newShopWith(t, func(c *pgxpool.Config) { c.MaxConns = 1 }, func(c *txn.Config) {
		c.Fronts = []idempotency.Front{front}
		c.OnEvent = func(_ context.Context, e idempotency.Event) {
			if replayed, is := e.(idempotency.Replayed); is {
				from <- replayed.From
			}
		}
	})
	t.Cleanup(func() { require.NoError(t, front.Close()) })
	t.Cleanup(s.runner.Close)
	var known idempotency.Request
	tries := 0
	learn := func() bool { // until the epoch is known; behind a pooler only what this runner commits is kept
		tries++
		known = request(t, fmt.Sprint("known", tries), "body")
		_, err := s.place(t.Context(), known)
		require.NoError(t, err)
		res, err := s.place(t.Context(), known)
		return err == nil && res.Replayed && <-from == localfront.Name
	}
	for try := 1; ; try++ {
		require.Eventually(t, learn, patience, 5*time.Millisecond)
		res, err := afterAnImpatientCaller(t, s, known)
		if err != nil && try < 3 { // the epoch is known for a second, and a busy machine may not have read it anew
			continue
		}
		require.NoError(t, err, "the local front has it, without a connection")
		require.True(t, res.Replayed)
		require.Equal(t, localfront.Name, <-from)
		return
	}
}

// afterAnImpatientCaller asks for what is known when somebody has just given up, and every connection of the pool is in use.
func afterAnImpatientCaller(t *testing.T, s *shop, known idempotency.Request) (txn.Result[order], error) {
	t.Helper()
	held, err := s.pool.Acquire(t.Context())
	require.NoError(t, err)
	defer held.Release()
	impatient, cancel := context.WithTimeout(t.Context(), 30*time.Millisecond)
	defer cancel()
	_, err = s.place(impatient, request(t, "impatient", "body"))
	require.ErrorIs(t, err, context.DeadlineExceeded)

	bounded, cancel := context.WithTimeout(t.Context(), 5*time.Second)
	defer cancel()
	return s.place(bounded, known)
}

// A program that may not read the epoch works, without fronts; also one that loses the right while it runs.
func TestFronts_WithoutAnEpochCallsGoOn(t *testing.T) {
	t.Parallel()
	for _, mode := range []pgx.QueryExecMode{pgx.QueryExecModeCacheStatement, pgx.QueryExecModeExec} {
		t.Run(mode.String(), func(t *testing.T) {
			t.Parallel()
			front, err := localfront.New(nil)
			require.NoError(t, err)
			s := newShopWith(t, func(c *pgxpool.Config) { c.ConnConfig.DefaultQueryExecMode = mode }, func(c *txn.Config) {
				c.Fronts = []idempotency.Front{front}
			})
			t.Cleanup(func() { require.NoError(t, front.Close()) })
			t.Cleanup(s.runner.Close)
			tries := 0
			require.Eventually(t, func() bool { // until the epoch is known
				tries++
				_, err := s.place(t.Context(), request(t, fmt.Sprint("before", tries), "body"))
				require.NoError(t, err)
				return front.Stats().Records > 0
			}, patience, 5*time.Millisecond)
			s.exec(t, `ALTER FUNCTION idempotency.current_epoch() RENAME TO gone`)
			s.pool.Reset()
			for i := range 20 {
				key := fmt.Sprint("after", i)
				res, err := s.place(t.Context(), request(t, key, "body"))
				require.NoError(t, err)
				require.False(t, res.Replayed)
				require.Equal(t, 1, s.orders(t, key))
			}
		})
	}
}
