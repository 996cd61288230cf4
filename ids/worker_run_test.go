package ids_test

import (
	"context"
	"errors"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgonce/pgonce/ids"
	"github.com/pgonce/pgonce/internal/pgtest"
)

func TestWorker_RunKeepsTheNumberAndGivesItBack(t *testing.T) {
	t.Parallel()
	pool := pgtest.Pool(t)
	for lease := 3 * time.Second; ; lease *= 3 {
		var late atomic.Bool // the machine, or PostgreSQL, stood still for the time of a renewal
		w := leased(t, pool, &ids.WorkerConfig{Lease: lease, OnError: func(_ context.Context, err error) {
			late.Store(late.Load() || errors.Is(err, context.DeadlineExceeded))
		}})
		n := number(t, w)
		ctx, cancel := context.WithCancel(t.Context())
		var run sync.WaitGroup
		run.Go(func() { w.Run(ctx) })
		var last ids.ID
		var err error
		for began, before := time.Now(), time.Now(); err == nil && time.Since(began) < lease*4/3; time.Sleep(time.Millisecond) {
			late.Store(late.Load() || time.Since(before) > lease/3)
			before = time.Now()
			var id ids.ID
			if id, err = w.Next(); err == nil {
				require.Greater(t, id, last)
				last = id
			}
		}
		cancel()
		run.Wait()
		if errors.Is(err, ids.ErrNoWorker) && late.Load() && lease < time.Minute {
			continue // rightly: then with a longer one
		}
		require.NoError(t, err, "longer than one lease")
		_, err = w.Next()
		require.ErrorIs(t, err, ids.ErrNoWorker)
		var held bool
		var until time.Time
		require.NoError(t, pool.QueryRow(t.Context(), `SELECT lease_token IS NOT NULL, issued_until FROM idempotency.workers WHERE worker = $1`, n).Scan(&held, &until))
		require.False(t, held)
		require.Equal(t, last.Time(), until.UTC(), "the mark is what was made")
		return
	}
}

// Run goes on after passes that fail, and says so.
func TestWorker_RunAfterALostLease(t *testing.T) {
	t.Parallel()
	pool := pgtest.Pool(t)
	onlyOneFree(t, pool)
	failed := make(chan error, 100)
	w := leased(t, pool, &ids.WorkerConfig{Lease: 3 * time.Second, Margin: -1, OnError: func(_ context.Context, err error) {
		select {
		case failed <- err:
		default:
		}
	}})
	exec(t, pool, `UPDATE idempotency.workers SET lease_token = decode(md5('thief'), 'hex'), lease_expires_at = now() + interval '1 h' WHERE worker = 7`)
	ctx, cancel := context.WithCancel(t.Context())
	var run sync.WaitGroup
	run.Go(func() { w.Run(ctx) })
	defer run.Wait()
	defer cancel()
	err := <-failed
	for errors.Is(err, context.DeadlineExceeded) { // a slow machine
		err = <-failed
	}
	require.ErrorIs(t, err, ids.ErrNoWorker)
	_, err = w.Next()
	require.ErrorIs(t, err, ids.ErrNoWorker)
	exec(t, pool, `UPDATE idempotency.workers SET lease_token = NULL, executor = NULL, leased_at = NULL, lease_expires_at = NULL WHERE worker = 9`)
	require.Eventually(t, func() bool { n, ok := w.Number(); return ok && n == 9 }, 30*time.Second, 10*time.Millisecond)
	_, err = w.Next()
	require.NoError(t, err)
}
