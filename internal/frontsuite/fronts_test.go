package frontsuite

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"github.com/pgonce/pgonce/idempotency"
	"github.com/pgonce/pgonce/idempotency/idempotencytest"
	"github.com/pgonce/pgonce/internal/pgtest"
	"github.com/pgonce/pgonce/txn"
)

// bench is what most tests here stand on: a Redis of their own and services on one database.
type bench struct {
	address, password string
	admin             *redis.Client
	pool              *pgxpool.Pool
}

func newBench(t *testing.T) *bench {
	t.Helper()
	node, password := ownRedis(t)
	pool := pgtest.Pool(t, txn.ConfigurePool)
	_, err := pool.Exec(t.Context(), idempotencytest.Table)
	require.NoError(t, err)
	return &bench{address: node.Address(), password: password, admin: admin(t, node, password), pool: pool}
}

func (b *bench) shop(t *testing.T, with fronts) *shop {
	t.Helper()
	with.patient = true
	return newShop(t, with, b.address, b.password, b.pool)
}

func request(t *testing.T, op idempotency.Operation, value string) idempotency.Request {
	t.Helper()
	key, err := op.Key(idempotency.SingleTenant, value)
	require.NoError(t, err)
	return idempotency.Request{Key: key, Fingerprint: idempotency.FingerprintBytes([]byte("payload"))}
}

// place places an order and returns the answer.
func (s *shop) place(t *testing.T, req idempotency.Request, result string) idempotencytest.Answer {
	t.Helper()
	a, err := s.call(t.Context(), req, func(ctx context.Context, tx pgx.Tx) ([]byte, error) {
		_, err := tx.Exec(ctx, `INSERT INTO suite_orders (key) VALUES ($1)`, req.Key.Value())
		return []byte(result), err
	})
	require.NoError(t, err)
	return a
}

func orders(t *testing.T, pool *pgxpool.Pool, value string) (n int) {
	t.Helper()
	require.NoError(t, pool.QueryRow(t.Context(), `SELECT count(*) FROM suite_orders WHERE key = $1`, value).Scan(&n))
	return n
}

// forget takes an order and its record out of the database, as a restore does that lost them.
func forget(t *testing.T, pool *pgxpool.Pool, value string) {
	t.Helper()
	_, err := pool.Exec(t.Context(), `DELETE FROM idempotency.records WHERE key = $1`, value)
	require.NoError(t, err)
	_, err = pool.Exec(t.Context(), `DELETE FROM suite_orders WHERE key = $1`, value)
	require.NoError(t, err)
}

func TestFronts_AnswerWithoutPostgreSQL(t *testing.T) {
	t.Parallel()
	b := newBench(t)
	first, second := b.shop(t, fronts{local: true, redis: true}), b.shop(t, fronts{local: true, redis: true})
	req := request(t, idempotencytest.Orders, "k")
	first.place(t, req, "done")
	require.NoError(t, first.redis.Flush(t.Context()))
	local, far := first.events.local.Load(), second.events.redis.Load()
	require.True(t, first.place(t, req, "again").Replayed)
	require.Equal(t, local+1, first.events.local.Load(), "the process that ran it has it")
	require.True(t, second.place(t, req, "again").Replayed)
	require.Equal(t, far+1, second.events.redis.Load(), "another one finds it in Redis")
	local = second.events.local.Load()
	require.True(t, second.place(t, req, "again").Replayed)
	require.Equal(t, local+1, second.events.local.Load(), "and has it from then on")
	require.Equal(t, 1, orders(t, b.pool, "k"))
}

// What Redis lacks is found in PostgreSQL, and put back with what is left of its life.
func TestCase_L13_WhatRedisLostIsPutBack(t *testing.T) {
	t.Parallel()
	b := newBench(t)
	s := b.shop(t, fronts{redis: true})
	const keys = 100
	reqs := make([]idempotency.Request, keys)
	for i := range reqs {
		reqs[i] = request(t, idempotencytest.Orders, fmt.Sprint("k", i))
		s.place(t, reqs[i], "done")
	}
	require.NoError(t, s.redis.Flush(t.Context()))
	_, err := b.pool.Exec(t.Context(), `UPDATE idempotency.records SET expires_at = statement_timestamp() + interval '1 hour',
		result_expires_at = statement_timestamp() + interval '1 hour'`)
	require.NoError(t, err)
	require.NoError(t, b.admin.FlushAll(t.Context()).Err())
	postgres := s.events.postgres.Load()
	for _, req := range reqs {
		require.True(t, s.place(t, req, "again").Replayed)
	}
	require.Equal(t, postgres+keys, s.events.postgres.Load())
	require.NoError(t, s.redis.Flush(t.Context()))
	names, err := b.admin.Keys(t.Context(), "*:entry").Result()
	require.NoError(t, err)
	// On a busy machine the epoch may be unknown for a moment: those are put back by their next reader.
	require.Greater(t, len(names), keys/2)
	for _, name := range names {
		left, err := b.admin.PTTL(t.Context(), name).Result()
		require.NoError(t, err)
		require.LessOrEqual(t, left, time.Hour)
		require.Greater(t, left, 50*time.Minute)
	}
}

// After a restore that lost commits, nothing that fronts keep of before is believed.
func TestEpoch_NothingOfBeforeARestoreIsBelieved(t *testing.T) {
	t.Parallel()
	b := newBench(t)
	s := b.shop(t, fronts{local: true, redis: true})
	req := request(t, idempotencytest.Orders, "k")
	s.place(t, req, "before")
	require.NoError(t, s.redis.Flush(t.Context()))
	forget(t, b.pool, "k")
	require.True(t, s.place(t, req, "again").Replayed, "the fronts do not know better")
	var fence, after int64
	require.NoError(t, b.pool.QueryRow(t.Context(), `SELECT last_value FROM idempotency.fence`).Scan(&fence))
	var epoch string
	require.NoError(t, b.pool.QueryRow(t.Context(), `SELECT idempotency.begin_epoch('restored from a backup')`).Scan(&epoch))
	require.NoError(t, b.pool.QueryRow(t.Context(), `SELECT last_value FROM idempotency.fence`).Scan(&after))
	require.Greater(t, after, fence+1_000_000, "fences that were handed out and lost do not come again")
	require.Regexp(t, `^\d+-[0-9A-F]{8}-\d+-\d+$`, epoch)

	var a idempotencytest.Answer
	require.Eventually(t, func() bool { // an epoch is believed for a second
		a = s.place(t, req, "after")
		return !a.Replayed
	}, 20*time.Second, 10*time.Millisecond)
	require.Equal(t, "after", string(a.Result))
	require.Equal(t, "after", string(s.place(t, req, "again").Result))
	require.Equal(t, 1, orders(t, b.pool, "k"))
	require.NoError(t, s.redis.Flush(t.Context()))
	far := b.shop(t, fronts{redis: true})
	before := far.events.redis.Load()
	require.Equal(t, "after", string(far.place(t, req, "again").Result), "the new entry has replaced the old one")
	require.Equal(t, before+1, far.events.redis.Load())
}

// Redis says that somebody runs a key, and nobody does: that only delays.
func TestCase_S05_AMarkWithoutAnOwnerOnlyDelays(t *testing.T) {
	t.Parallel()
	b := newBench(t)
	s := b.shop(t, fronts{redis: true})
	for i, op := range []idempotency.Operation{idempotencytest.Orders, idempotencytest.Impatient} {
		req := request(t, op, fmt.Sprint("k", i))
		ask := idempotency.Ask{Key: req.Key, Fingerprint: req.Fingerprint, Epoch: "any"}
		_, _, err := s.redis.Begin(t.Context(), ask, idempotency.NewAttemptToken(), 500*time.Millisecond)
		require.NoError(t, err)
		began := time.Now()
		require.False(t, s.place(t, req, "done").Replayed)
		require.Less(t, time.Since(began), 5*time.Second)
	}
}

// A call that fails leaves no mark behind: the next one does not wait for it.
func TestFronts_AFailedCallEndsItsMark(t *testing.T) {
	t.Parallel()
	b := newBench(t)
	s, broken := b.shop(t, fronts{redis: true}), errors.New("broken")
	req := request(t, idempotencytest.Orders, "k")
	for _, fn := range []idempotencytest.Function{
		func(context.Context, pgx.Tx) ([]byte, error) { return nil, broken },
		func(context.Context, pgx.Tx) ([]byte, error) { panic(broken) },
	} {
		func() {
			defer func() { _ = recover() }()
			_, err := s.call(t.Context(), req, fn)
			require.ErrorIs(t, err, broken)
		}()
		require.NoError(t, s.redis.Flush(t.Context()))
		names, err := b.admin.Keys(t.Context(), "*:mark").Result()
		require.NoError(t, err)
		require.Empty(t, names)
	}
	require.False(t, s.place(t, req, "done").Replayed)
}

// While a call runs, its mark lives, however long that takes and however busy the process is; and who waits elsewhere is woken.
func TestCase_L10_MarkIsRenewedAndWaitersAreWoken(t *testing.T) {
	t.Parallel()
	b := newBench(t)
	owner, other := b.shop(t, fronts{redis: true}), b.shop(t, fronts{redis: true})
	req := request(t, idempotencytest.Orders, "k")
	// The operation is known to take a second: then a mark lives for 2 s.
	_, err := owner.call(t.Context(), request(t, idempotencytest.Orders, "usual"), func(context.Context, pgx.Tx) ([]byte, error) {
		time.Sleep(time.Second)
		return nil, nil
	})
	require.NoError(t, err)
	entered, leave := make(chan struct{}), make(chan struct{})
	var group sync.WaitGroup
	group.Go(func() {
		_, err := owner.call(t.Context(), req, func(context.Context, pgx.Tx) ([]byte, error) {
			close(entered)
			<-leave
			return []byte("done"), nil
		})
		require.NoError(t, err)
	})
	<-entered
	busy, idle := context.WithCancel(t.Context())
	for range 4 {
		go func() {
			for busy.Err() == nil {
			}
		}()
	}
	defer idle()
	life := time.Second // at least
	for began := time.Now(); time.Since(began) <= 3*life; {
		names, err := b.admin.Keys(t.Context(), "*:mark").Result()
		require.NoError(t, err)
		require.Len(t, names, 1)
		left, err := b.admin.PTTL(t.Context(), names[0]).Result()
		require.NoError(t, err)
		life = max(life, left)
		time.Sleep(100 * time.Millisecond)
	}
	idle()
	var answered time.Time
	postgres := other.events.postgres.Load()
	group.Go(func() {
		require.True(t, other.place(t, req, "again").Replayed)
		answered = time.Now()
	})
	time.Sleep(300 * time.Millisecond)
	left := time.Now()
	close(leave)
	group.Wait()
	require.Less(t, answered.Sub(left), time.Second, "not after the mark's life")
	require.Equal(t, postgres, other.events.postgres.Load(), "Redis had the answer")
}

// While Redis is away, what the local front answers is compared with PostgreSQL behind the caller's back.
func TestFronts_LocalAnswersAreCheckedWhileRedisIsAway(t *testing.T) {
	t.Parallel()
	b := newBench(t)
	s := b.shop(t, fronts{local: true, redis: true})
	same := request(t, idempotencytest.Orders, "same")
	s.place(t, same, "done")
	// A busy machine may read the epoch too late, and the order is then found gone in the foreground: so more than one.
	changed := make([]idempotency.Request, 10)
	for i := range changed {
		changed[i] = request(t, idempotencytest.Orders, fmt.Sprint("changed", i))
		s.place(t, changed[i], "before")
		forget(t, b.pool, changed[i].Key.Value())
		s.place(t, changed[i], "after")
	}
	require.Zero(t, s.events.mismatch.Load(), "Redis is there, nothing is checked")
	require.NoError(t, b.admin.ReplicaOf(t.Context(), "127.0.0.1", "1").Err())
	for i := 0; !s.redis.Degraded(); i++ { // at once, unless the epoch is unknown for a moment: then Redis is not asked
		s.place(t, request(t, idempotencytest.Orders, fmt.Sprint("notices it", i)), "")
		require.Less(t, i, 1000)
	}
	for _, req := range changed {
		require.Eventually(t, func() bool {
			s.place(t, same, "again")
			return string(s.place(t, req, "after").Result) == "after"
		}, 5*time.Second, 10*time.Millisecond)
		require.Equal(t, 1, orders(t, b.pool, req.Key.Value()))
	}
	require.Positive(t, s.events.mismatch.Load())
	require.LessOrEqual(t, s.events.mismatch.Load(), int64(len(changed)), "what is the same is left alone")
	require.Equal(t, 1, orders(t, b.pool, "same"))
	require.NoError(t, b.admin.ReplicaOf(t.Context(), "NO", "ONE").Err())
	require.Eventually(t, func() bool { return !s.redis.Degraded() }, 5*time.Second, 10*time.Millisecond)
}

// A transaction of the caller is published once it is read back, and not at all if it was rolled back.
func TestFronts_JoinedIsPublishedAfterItsCommit(t *testing.T) {
	t.Parallel()
	b := newBench(t)
	s := b.shop(t, fronts{local: true, redis: true})
	for _, commit := range []bool{true, false} {
		req := request(t, idempotencytest.Orders, fmt.Sprint("joined ", commit))
		tx, err := b.pool.Begin(t.Context())
		require.NoError(t, err)
		joined, err := txn.WithIdempotencyTx(t.Context(), s.runner, tx, req, func(context.Context, pgx.Tx) ([]byte, error) {
			return []byte("joined"), nil
		})
		require.NoError(t, err)
		epoch := s.epoch(t)
		_, found, err := s.local.Lookup(t.Context(), idempotency.Ask{Key: req.Key, Fingerprint: req.Fingerprint, Epoch: epoch})
		require.NoError(t, err)
		require.False(t, found, "before the commit nothing is a fact")
		if !commit {
			require.NoError(t, tx.Rollback(t.Context()))
			require.ErrorIs(t, joined.AfterCommit(t.Context()), idempotency.ErrNotRecorded)
		} else {
			require.NoError(t, tx.Commit(t.Context()))
			require.NoError(t, joined.AfterCommit(t.Context()))
		}
		_, found, err = s.local.Lookup(t.Context(), idempotency.Ask{Key: req.Key, Fingerprint: req.Fingerprint, Epoch: epoch})
		require.NoError(t, err)
		require.Equal(t, commit, found)
	}
}

func (s *shop) epoch(t *testing.T) (epoch string) {
	t.Helper()
	require.NoError(t, s.pool.QueryRow(t.Context(), `SELECT idempotency.current_epoch()`).Scan(&epoch))
	return epoch
}

// An operation may keep its outcomes out of the process's memory.
func TestFronts_NoLocal(t *testing.T) {
	t.Parallel()
	b := newBench(t)
	s := b.shop(t, fronts{local: true, redis: true})
	op := idempotency.Operation{Name: "suite.nolocal", NoLocal: true}
	runner, err := txn.New(b.pool, &txn.Config{
		Operations: []idempotency.Operation{op, idempotencytest.Orders}, OnEvent: s.events.add,
		Fronts: []idempotency.Front{s.local, s.redis},
	})
	require.NoError(t, err)
	t.Cleanup(runner.Close)
	s.runner = runner
	s.awaitEpochAgain(t)
	req := request(t, op, "k")
	s.place(t, req, "done")
	require.NoError(t, s.redis.Flush(t.Context()))
	far := s.events.redis.Load()
	for range 3 {
		require.True(t, s.place(t, req, "again").Replayed)
	}
	require.Equal(t, far+3, s.events.redis.Load())
}

func (s *shop) awaitEpochAgain(t *testing.T) {
	t.Helper()
	s.events.local.Store(0)
	s.awaitEpoch(t)
}

func TestNew_RefusesWrongFronts(t *testing.T) {
	t.Parallel()
	b := newBench(t)
	s := b.shop(t, fronts{local: true, redis: true})
	for name, config := range map[string]*txn.Config{
		"must not hold nil": {Operations: idempotencytest.Operations(), Fronts: []idempotency.Front{nil}},
		"nearest first":     {Operations: idempotencytest.Operations(), Fronts: []idempotency.Front{s.redis, s.local}},
		"one front outside": {Operations: idempotencytest.Operations(), Fronts: []idempotency.Front{s.redis, s.redis}},
		"without fronts":    {Operations: []idempotency.Operation{{Name: "o", Strategy: idempotency.StrategyHybrid}}},
		"redisfront.Do":     {Operations: []idempotency.Operation{{Name: "o", Strategy: idempotency.StrategyCache}}},
	} {
		_, err := txn.New(b.pool, config)
		require.ErrorIs(t, err, idempotency.ErrConfig, name)
		require.ErrorContains(t, err, name)
	}
}
