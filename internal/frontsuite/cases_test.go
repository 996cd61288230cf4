package frontsuite

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"github.com/pgonce/pgonce/idempotency"
	"github.com/pgonce/pgonce/idempotency/idempotencytest"
	"github.com/pgonce/pgonce/internal/pgtest"
	"github.com/pgonce/pgonce/localfront"
	"github.com/pgonce/pgonce/txn"
)

// Who waited for a mark to go reads the answer before it does anything else.
func TestCase_R03_WhoWaitedReadsTheAnswer(t *testing.T) {
	t.Parallel()
	b := newBench(t)
	shops := []*shop{b.shop(t, fronts{redis: true}), b.shop(t, fronts{redis: true}), b.shop(t, fronts{redis: true})}
	for i := range 20 {
		req := request(t, idempotencytest.Orders, fmt.Sprint("k", i))
		var group sync.WaitGroup
		for j := range 12 {
			group.Go(func() {
				_, err := shops[j%len(shops)].call(t.Context(), req, func(ctx context.Context, tx pgx.Tx) ([]byte, error) {
					time.Sleep(30 * time.Millisecond)
					_, err := tx.Exec(ctx, `INSERT INTO suite_orders (key) VALUES ($1)`, req.Key.Value())
					return nil, err
				})
				if err != nil {
					t.Error(err)
				}
			})
		}
		group.Wait()
		require.Equal(t, 1, orders(t, b.pool, req.Key.Value()))
	}
	executed := int64(0)
	for _, s := range shops {
		executed += s.events.executed.Load()
	}
	require.Equal(t, int64(20+1), executed, "nobody ran in vain either; one is awaitEpoch's")
}

// The mark goes in the same step in which the answer comes: there is no gap for a duplicate to slip through.
func TestCase_R04_NoGapBetweenMarkAndAnswer(t *testing.T) {
	t.Parallel()
	b := newBench(t)
	owner, rival := b.shop(t, fronts{redis: true}), b.shop(t, fronts{redis: true})
	for i := range 100 {
		req := request(t, idempotencytest.Impatient, fmt.Sprint("k", i))
		done := make(chan struct{})
		place := func(s *shop) error { // both may be told to come back, by the other one
			_, err := s.call(t.Context(), req, func(ctx context.Context, tx pgx.Tx) ([]byte, error) {
				_, err := tx.Exec(ctx, `INSERT INTO suite_orders (key) VALUES ($1)`, req.Key.Value())
				return nil, err
			})
			if errors.Is(err, idempotency.ErrInProgress) {
				return nil
			}
			return err
		}
		var failed error
		go func() {
			defer close(done)
			failed = place(owner)
		}()
		for over := false; !over; {
			select {
			case <-done:
				over = true
			default:
			}
			require.NoError(t, place(rival))
		}
		require.NoError(t, failed)
		require.Equal(t, 1, orders(t, b.pool, req.Key.Value()))
	}
}

// An owner that has lost its mark is still the owner: PostgreSQL knows.
func TestCase_L09_AnOwnerWithoutItsMarkIsStillTheOnlyOne(t *testing.T) {
	t.Parallel()
	b := newBench(t)
	owner, rival := b.shop(t, fronts{redis: true}), b.shop(t, fronts{redis: true})
	req := request(t, idempotencytest.Impatient, "k")
	entered, leave := make(chan struct{}), make(chan struct{})
	done := make(chan error, 1)
	go func() {
		_, err := owner.call(t.Context(), req, func(ctx context.Context, tx pgx.Tx) ([]byte, error) {
			close(entered)
			<-leave
			_, err := tx.Exec(ctx, `INSERT INTO suite_orders (key) VALUES ($1)`, "k")
			return []byte("owner"), err
		})
		done <- err
	}()
	<-entered
	require.NoError(t, b.admin.FlushAll(t.Context()).Err())
	for range 5 {
		_, err := rival.call(t.Context(), req, func(context.Context, pgx.Tx) ([]byte, error) { return []byte("rival"), nil })
		require.ErrorIs(t, err, idempotency.ErrInProgress)
	}
	close(leave)
	require.NoError(t, <-done)
	require.Equal(t, "owner", string(rival.place(t, req, "rival").Result))
	require.Equal(t, 1, orders(t, b.pool, "k"))
}

// A caller that goes away while Redis is slow is answered at once, and what it leaves harms nobody.
func TestCase_L19_CallersThatGoAwayHarmNobody(t *testing.T) {
	t.Parallel()
	b := newBench(t)
	p := newProxy(t, b.address)
	s := newShop(t, fronts{local: true, redis: true}, p.address(), b.password, b.pool)
	p.delay.Store(int64(50 * time.Millisecond))
	gone := 0
	for i := range 30 {
		req := request(t, idempotencytest.Orders, fmt.Sprint("k", i))
		fn := func(ctx context.Context, tx pgx.Tx) ([]byte, error) {
			_, err := tx.Exec(ctx, `INSERT INTO suite_orders (key) VALUES ($1)`, req.Key.Value())
			return nil, err
		}
		ctx, cancel := context.WithTimeout(t.Context(), 20*time.Millisecond)
		var group sync.WaitGroup
		var err, other error
		group.Go(func() { _, err = s.call(ctx, req, fn) })
		group.Go(func() { _, other = s.call(t.Context(), req, fn) }) // merged with it, or it with this one
		group.Wait()
		cancel()
		if err != nil {
			require.ErrorIs(t, err, context.DeadlineExceeded)
			gone++
		}
		require.NoError(t, other)
		require.Equal(t, 1, orders(t, b.pool, req.Key.Value()))
	}
	require.Positive(t, gone)
}

// A closed runner leaves nothing running, whatever its fronts did.
func TestCase_L22_NothingRunsOnAfterClose(t *testing.T) { //nolint:paralleltest // looks at all goroutines
	b := newBench(t)
	pool := pgtest.Pool(t, txn.ConfigurePool)
	ignored := goleak.IgnoreCurrent()
	local, err := localfront.New(nil)
	require.NoError(t, err)
	runner, err := txn.New(pool, &txn.Config{Operations: idempotencytest.Operations(), Fronts: []idempotency.Front{local}})
	require.NoError(t, err)
	for i := range 20 {
		req := request(t, idempotencytest.Orders, fmt.Sprint(b.address, i))
		_, err := txn.WithIdempotency(t.Context(), runner, req, func(context.Context, pgx.Tx) (string, error) { return "", nil })
		require.NoError(t, err)
	}
	runner.Close()
	runner.Close()
	require.NoError(t, local.Close())
	pool.Reset()
	require.NoError(t, goleak.Find(ignored, goleak.IgnoreTopFunction("github.com/jackc/pgx/v5/pgxpool.(*Pool).backgroundHealthCheck")))
}
