package frontsuite

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"sync/atomic"
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
	var entered atomic.Int64
	for i := range 20 {
		req := request(t, idempotencytest.Orders, fmt.Sprint("k", i))
		var group sync.WaitGroup
		for j := range 12 {
			group.Go(func() {
				_, err := shops[j%len(shops)].call(t.Context(), req, func(ctx context.Context, tx pgx.Tx) ([]byte, error) {
					entered.Add(1)
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
	require.Equal(t, int64(20), entered.Load(), "nobody ran in vain either")
}

// The mark goes in the same step in which the answer comes: there is no gap for a duplicate to slip through.
func TestCase_R04_NoGapBetweenMarkAndAnswer(t *testing.T) {
	t.Parallel()
	b := newBench(t)
	owner, rival := b.shop(t, fronts{redis: true}), b.shop(t, fronts{redis: true})
	entered := make([]counter, 100)
	for i := range entered {
		req := request(t, idempotencytest.Impatient, fmt.Sprint("k", i))
		done := make(chan struct{})
		place := func(s *shop) error { // both may be told to come back, by the other one
			_, err := s.call(t.Context(), req, func(ctx context.Context, tx pgx.Tx) ([]byte, error) {
				entered[i].add()
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
		require.Equal(t, 1, entered[i].Load())
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

// What Redis evicts, marks too, costs time and nothing else; a Redis that refuses writes fails no committed request.
func TestCase_L12_EvictedMarksAndAFullRedis(t *testing.T) {
	t.Parallel()
	node, password := ownRedis(t, "maxmemory 2mb", "maxmemory-policy allkeys-lru")
	client := admin(t, node, password)
	owner := newShop(t, fronts{redis: true, patient: true}, node.Address(), password, nil)
	rival := newShop(t, fronts{redis: true, patient: true}, node.Address(), password, owner.pool)
	req := request(t, idempotencytest.Impatient, "k")
	entered, leave, done := make(chan struct{}), make(chan struct{}), make(chan error, 1)
	go func() {
		_, err := owner.call(t.Context(), req, func(ctx context.Context, tx pgx.Tx) ([]byte, error) {
			close(entered)
			<-leave
			_, err := tx.Exec(ctx, `INSERT INTO suite_orders (key) VALUES ('k')`)
			return []byte("owner"), err
		})
		done <- err
	}()
	<-entered
	filler := strings.Repeat("x", 64<<10)
	for n := 0; ; n++ {
		require.NoError(t, client.Set(t.Context(), fmt.Sprint("filler", n), filler, time.Hour).Err())
		if marks, err := client.Keys(t.Context(), "*:mark").Result(); err == nil && len(marks) == 0 {
			break
		}
		require.Less(t, n, 10_000)
	}
	for range 5 {
		_, err := rival.call(t.Context(), req, func(context.Context, pgx.Tx) ([]byte, error) { return []byte("rival"), nil })
		require.ErrorIs(t, err, idempotency.ErrInProgress)
	}
	close(leave)
	require.NoError(t, <-done)
	require.Equal(t, "owner", string(rival.place(t, req, "rival").Result))
	require.Equal(t, 1, orders(t, owner.pool, "k"))

	require.NoError(t, client.ConfigSet(t.Context(), "maxmemory-policy", "noeviction").Err())
	require.NoError(t, client.ConfigSet(t.Context(), "maxmemory", "1").Err())
	failed := owner.events.failed.Load()
	for i := 0; i < 20 || owner.events.failed.Load() == failed; i++ { // it is told
		owner.place(t, request(t, idempotencytest.Orders, fmt.Sprint("full", i)), "done")
		require.Less(t, i, 2000)
	}
	require.Equal(t, "owner", string(rival.place(t, req, "rival").Result))
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
	require.NoError(t, pgtest.Leaked(ignored, goleak.IgnoreTopFunction("github.com/jackc/pgx/v5/pgxpool.(*Pool).backgroundHealthCheck")))
}

// counter counts in several goroutines.
type counter struct{ n atomic.Int64 }

func (c *counter) add()      { c.n.Add(1) }
func (c *counter) Load() int { return int(c.n.Load()) }

// A call with another payload that asks first proves nothing: whoever has the record is right, in one process and in two.
func TestFronts_ARivalThatAsksFirstDoesNotMakeTheRightfulRetryAMismatch(t *testing.T) {
	t.Parallel()
	b := newBench(t)
	s, other := b.shop(t, fronts{redis: true}), b.shop(t, fronts{redis: true})
	req := request(t, idempotencytest.Orders, "k")
	s.place(t, req, "done")
	require.NoError(t, s.redis.Flush(t.Context()))
	require.NoError(t, b.admin.FlushAll(t.Context()).Err())
	wrong := idempotency.Ask{Key: req.Key, Fingerprint: idempotency.FingerprintBytes([]byte("other")), Epoch: s.epoch(t)}
	_, _, err := other.redis.Begin(t.Context(), wrong, idempotency.NewAttemptToken(), time.Minute)
	require.NoError(t, err)
	require.Equal(t, "done", string(s.place(t, req, "again").Result))

	// And where the one that asked has died, the key is free.
	fresh := request(t, idempotencytest.Orders, "fresh")
	wrong.Key = fresh.Key
	_, _, err = other.redis.Begin(t.Context(), wrong, idempotency.NewAttemptToken(), time.Minute)
	require.NoError(t, err)
	require.False(t, s.place(t, fresh, "").Replayed)

	// While it really runs, it is a mismatch at once.
	running := request(t, idempotencytest.Orders, "running")
	entered, leave, done := make(chan struct{}), make(chan struct{}), make(chan error, 1)
	go func() {
		_, err := other.call(t.Context(), running, func(context.Context, pgx.Tx) ([]byte, error) {
			close(entered)
			<-leave
			return nil, nil
		})
		done <- err
	}()
	<-entered
	running.Fingerprint = wrong.Fingerprint
	for _, one := range []*shop{s, other} {
		began := time.Now()
		_, err = one.call(t.Context(), running, func(context.Context, pgx.Tx) ([]byte, error) { return nil, nil })
		require.ErrorIs(t, err, idempotency.ErrMismatch)
		require.Less(t, time.Since(began), 5*time.Second, "Wait is 20 s")
	}
	close(leave)
	require.NoError(t, <-done)
}

// Where every caller is more impatient than the timeout of a Redis that hangs, the front is given up all the same.
func TestFronts_ImpatientCallersAndAHangingRedis(t *testing.T) {
	t.Parallel()
	node, password := ownRedis(t)
	s := newShop(t, fronts{redis: true}, node.Address(), password, nil)
	require.NoError(t, node.Pause())
	t.Cleanup(func() { _ = node.Resume() })
	deadline := time.Now().Add(20 * time.Second)
	for i := 0; ; i++ {
		require.Less(t, time.Now(), deadline)
		ctx, cancel := context.WithTimeout(t.Context(), 300*time.Millisecond)
		_, err := s.call(ctx, request(t, idempotencytest.Orders, fmt.Sprint("k", i)), func(context.Context, pgx.Tx) ([]byte, error) { return nil, nil })
		cancel()
		if s.redis.Degraded() && err == nil {
			break
		}
	}
	require.NoError(t, node.Resume())
	require.Eventually(t, func() bool { return !s.redis.Degraded() }, 10*time.Second, 10*time.Millisecond)
}
