package ids_test

import (
	"context"
	"errors"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgonce/pgonce/ids"
	"github.com/pgonce/pgonce/internal/pgtest"
)

func TestWorker_RunKeepsTheNumberAndGivesItBack(t *testing.T) {
	t.Parallel()
	pool := pgtest.Pool(t)
	w := leased(t, pool, &ids.WorkerConfig{Lease: 3 * time.Second})
	n := number(t, w)
	ctx, cancel := context.WithCancel(t.Context())
	var run sync.WaitGroup
	run.Go(func() { w.Run(ctx) })
	var last ids.ID
	for began := time.Now(); time.Since(began) < 4*time.Second; time.Sleep(time.Millisecond) {
		id, err := w.Next()
		require.NoError(t, err, "longer than one lease")
		require.Greater(t, id, last)
		last = id
	}
	cancel()
	run.Wait()
	_, err := w.Next()
	require.ErrorIs(t, err, ids.ErrNoWorker)
	var held bool
	var until time.Time
	require.NoError(t, pool.QueryRow(t.Context(), `SELECT lease_token IS NOT NULL, issued_until FROM idempotency.workers WHERE worker = $1`, n).Scan(&held, &until))
	require.False(t, held)
	require.Equal(t, last.Time(), until.UTC(), "the mark is what was made")
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
	require.Eventually(t, func() bool { n, ok := w.Number(); return ok && n == 9 }, 10*time.Second, 10*time.Millisecond)
	_, err = w.Next()
	require.NoError(t, err)
}
