package ids_test

import (
	"context"
	"errors"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgonce/pgonce/idempotency"
	"github.com/pgonce/pgonce/ids"
	"github.com/pgonce/pgonce/internal/pgtest"
)

func newWorker(t testing.TB, db idempotency.DB, cfg *ids.WorkerConfig) *ids.Worker {
	t.Helper()
	w, err := ids.NewWorker(db, cfg)
	require.NoError(t, err)
	return w
}

// leased is a worker that has a number.
func leased(t testing.TB, db idempotency.DB, cfg *ids.WorkerConfig) *ids.Worker {
	t.Helper()
	w := newWorker(t, db, cfg)
	require.NoError(t, runOnce(t, w))
	return w
}

// runOnce tries again where a slow machine does not answer in the worker's time.
func runOnce(t testing.TB, w *ids.Worker) error {
	t.Helper()
	err := w.RunOnce(t.Context())
	for errors.Is(err, context.DeadlineExceeded) && t.Context().Err() == nil {
		err = w.RunOnce(t.Context())
	}
	return err
}

func number(t testing.TB, w *ids.Worker) int {
	t.Helper()
	n, ok := w.Number()
	require.True(t, ok)
	return n
}

func exec(t testing.TB, pool *pgxpool.Pool, sql string, args ...any) {
	t.Helper()
	_, err := pool.Exec(t.Context(), sql, args...)
	require.NoError(t, err)
}

// onlyOneFree leaves one number: who leases gets that.
func onlyOneFree(t testing.TB, pool *pgxpool.Pool) {
	t.Helper()
	exec(t, pool, `UPDATE idempotency.workers SET lease_token = decode(md5(worker::text), 'hex'), executor = 'somebody', leased_at = now(),
		lease_expires_at = now() + interval '1 year' WHERE worker <> 7`)
}

func TestWorker_MakesIDsWithALeasedNumber(t *testing.T) {
	t.Parallel()
	pool := pgtest.Pool(t)
	w := newWorker(t, pool, nil)
	_, err := w.Next()
	require.ErrorIs(t, err, ids.ErrNoWorker, "before the first pass")
	_, ok := w.Number()
	require.False(t, ok)
	require.NoError(t, w.RunOnce(t.Context()))
	all := take(t, w, 10_000)
	requireGrowing(t, all)
	n := number(t, w)
	for _, id := range all {
		require.Equal(t, n, id.Worker())
	}
	// As they are stored.
	exec(t, pool, `CREATE TABLE orders (id bigint PRIMARY KEY)`)
	exec(t, pool, `INSERT INTO orders VALUES ($1)`, all[0])
	var back ids.ID
	require.NoError(t, pool.QueryRow(t.Context(), `SELECT id FROM orders`).Scan(&back))
	require.Equal(t, all[0], back)

	var holder string
	var until time.Time
	require.NoError(t, pool.QueryRow(t.Context(), `SELECT executor, issued_until FROM idempotency.workers WHERE worker = $1 AND lease_expires_at > now()`, n).Scan(&holder, &until))
	require.Regexp(t, `:\d+:`, holder)
	require.True(t, until.After(all[len(all)-1].Time()), "reserved before it was used")
}

// Eight processes that begin at once, and ten million ids.
func TestWorker_TenMillionWithoutACollision(t *testing.T) {
	const workers, each = 8, 1_250_000
	pool := pgtest.Pool(t)
	made := make([][]ids.ID, workers)
	var group sync.WaitGroup
	for i := range workers {
		w := newWorker(t, pool, &ids.WorkerConfig{Lease: 10 * time.Minute}) // also on a slow machine
		group.Go(func() {
			if err := runOnce(t, w); err != nil {
				t.Error(err)
				return
			}
			made[i] = take(t, w, each)
		})
	}
	group.Wait()
	require.False(t, t.Failed())
	numbers := map[int]bool{}
	for _, one := range made {
		requireGrowing(t, one)
		numbers[one[0].Worker()] = true
	}
	require.Len(t, numbers, workers)
	all := slices.Concat(made...)
	require.Len(t, all, 10_000_000)
	requireUnique(t, all)
}

func TestWorker_AllNumbersAreLeasedOnce(t *testing.T) {
	t.Parallel()
	pool := pgtest.Pool(t)
	var mu sync.Mutex
	seen := map[int]bool{}
	var group sync.WaitGroup
	for range 4 {
		group.Go(func() {
			for range 256 {
				w, err := ids.NewWorker(pool, nil)
				if err == nil {
					err = w.RunOnce(t.Context())
				}
				if err != nil {
					t.Error(err)
					return
				}
				n, _ := w.Number()
				mu.Lock()
				seen[n] = true
				mu.Unlock()
			}
		})
	}
	group.Wait()
	require.Len(t, seen, 1024)
	require.ErrorIs(t, newWorker(t, pool, nil).RunOnce(t.Context()), ids.ErrNoWorker)
}

// A number is given to somebody else a margin behind the end of its lease, and not before.
func TestWorker_MarginBeforeANumberIsUsedAgain(t *testing.T) {
	t.Parallel()
	pool := pgtest.Pool(t)
	onlyOneFree(t, pool)
	first := leased(t, pool, nil)
	ended := func(ago string) {
		t.Helper()
		exec(t, pool, `UPDATE idempotency.workers SET lease_expires_at = statement_timestamp() - $1::interval, issued_until = statement_timestamp() - $1::interval WHERE worker = 7`, ago)
	}
	second := newWorker(t, pool, &ids.WorkerConfig{Margin: time.Minute})
	for _, ago := range []string{"-1 s", "0 s", "55 s"} {
		ended(ago)
		require.ErrorIs(t, second.RunOnce(t.Context()), ids.ErrNoWorker, ago)
	}
	require.NoError(t, first.RunOnce(t.Context()), "its owner renews it also behind its end")
	ended("61 s")
	require.NoError(t, second.RunOnce(t.Context()))
	require.Equal(t, 7, number(t, second))
	// The first one finds out that it has lost it.
	require.ErrorIs(t, first.RunOnce(t.Context()), ids.ErrNoWorker)
	_, err := first.Next()
	require.ErrorIs(t, err, ids.ErrNoWorker)
	ended("0 s")
	require.ErrorIs(t, newWorker(t, pool, nil).RunOnce(t.Context()), ids.ErrNoWorker)
	require.NoError(t, newWorker(t, pool, &ids.WorkerConfig{Margin: -1}).RunOnce(t.Context()))
}

// A process is stopped for longer than lease and margin, and goes on without noticing while another one has its number.
func TestWorker_StoppedOwnerNeverRepeatsItsSuccessor(t *testing.T) {
	t.Parallel()
	pool := pgtest.Pool(t)
	onlyOneFree(t, pool)
	w := &wall{}
	stopped := leased(t, pool, &ids.WorkerConfig{Lease: 3 * time.Second, Clock: w.now})
	all := take(t, stopped, 100)
	stoppedAt := time.Now()
	// Until here. Now its time stands still while PostgreSQL's goes on: as far as lease and margin, at once.
	exec(t, pool, `UPDATE idempotency.workers SET lease_expires_at = lease_expires_at - interval '1 h' WHERE worker = 7`)
	next := leased(t, pool, &ids.WorkerConfig{Lease: 10 * time.Second, MaxBack: 5 * time.Second})
	require.Equal(t, 7, number(t, next))
	var both sync.WaitGroup
	var late, after []ids.ID
	w.set(-time.Since(stoppedAt)) // however long that took: it has all of its window yet
	both.Go(func() {              // until its window ends
		for began := time.Now(); time.Since(began) < time.Minute; time.Sleep(50 * time.Microsecond) {
			id, err := stopped.Next()
			if err != nil {
				if !errors.Is(err, ids.ErrNoWorker) {
					t.Error(err)
				}
				return
			}
			late = append(late, id)
		}
		t.Error("its window does not end")
	})
	both.Go(func() { after = take(t, next, 50_000) })
	both.Wait()
	require.Greater(t, len(late), 100, "it has gone on")
	requireUnique(t, slices.Concat(all, late, after))
	require.ErrorIs(t, stopped.RunOnce(t.Context()), ids.ErrNoWorker)
}

// Whoever is next begins behind what the one before may have made, also where its clock has not got there.
func TestWorker_SuccessorWithASlowerClock(t *testing.T) {
	t.Parallel()
	pool := pgtest.Pool(t)
	onlyOneFree(t, pool)
	mark := func(ahead string) (until time.Time) {
		t.Helper()
		require.NoError(t, pool.QueryRow(t.Context(), `UPDATE idempotency.workers SET lease_token = NULL, executor = NULL, leased_at = NULL, lease_expires_at = NULL,
			issued_until = statement_timestamp() + $1::interval WHERE worker = 7 RETURNING issued_until`, ahead).Scan(&until))
		return until
	}
	until := mark("500 ms")
	w := leased(t, pool, &ids.WorkerConfig{MaxBack: time.Second})
	id, err := w.Next()
	require.NoError(t, err)
	require.True(t, id.Time().After(until.Truncate(time.Millisecond)), "it has waited")

	until = mark("1 h")
	w = leased(t, pool, nil)
	_, err = w.Next()
	var clock *ids.ClockError
	require.ErrorAs(t, err, &clock)
	require.InDelta(t, time.Hour, clock.Behind, float64(time.Minute))
	require.NoError(t, w.RunOnce(t.Context()))
	var stored time.Time
	require.NoError(t, pool.QueryRow(t.Context(), `SELECT issued_until FROM idempotency.workers WHERE worker = 7`).Scan(&stored))
	require.False(t, stored.Before(until), "the mark never goes back")
}

func TestWorker_PrefersANumberThatNeedNotWait(t *testing.T) {
	t.Parallel()
	pool := pgtest.Pool(t)
	exec(t, pool, `UPDATE idempotency.workers SET issued_until = now() + interval '1 h' WHERE worker <> 1000`)
	require.Equal(t, 1000, number(t, leased(t, pool, nil)))
}

// The ids have PostgreSQL's time, whatever the process's clock says, and however it is set.
func TestWorker_ProcessClock(t *testing.T) {
	t.Parallel()
	pool := pgtest.Pool(t)
	for name, off := range map[string]time.Duration{"Behind": -2 * time.Hour, "Ahead": 3 * time.Hour} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			clock := &wall{offset: off}
			w := leased(t, pool, &ids.WorkerConfig{Clock: clock.now})
			require.InDelta(t, -off, w.Skew(), float64(time.Minute))
			all := take(t, w, 10)
			require.WithinDuration(t, time.Now(), all[9].Time(), time.Minute)

			clock.set(-time.Hour) // without a monotonic reading, as here, the set clock is seen
			_, err := w.Next()
			require.ErrorIs(t, err, ids.ErrClock)
			require.NoError(t, w.RunOnce(t.Context()))
			requireGrowing(t, append(all, take(t, w, 10)...))

			clock.set(time.Hour)
			_, err = w.Next()
			require.ErrorIs(t, err, ids.ErrNoWorker, "nothing beyond what is reserved")
			require.NoError(t, w.RunOnce(t.Context()))
			all = append(all, take(t, w, 10)...)
			require.WithinDuration(t, time.Now(), all[len(all)-1].Time(), time.Minute)
		})
	}
}

// PostgreSQL is away: the ids end with what is reserved, and go on with the next pass that gets through.
func TestWorker_EndsWithItsLease(t *testing.T) {
	t.Parallel()
	pool := pgtest.Pool(t)
	clock := &wall{}
	w := leased(t, pool, &ids.WorkerConfig{Lease: 10 * time.Minute, Clock: clock.now})
	before := take(t, w, 10)
	clock.set(9 * time.Minute)
	before = append(before, take(t, w, 10)...)
	clock.set(2 * time.Minute)
	_, err := w.Next()
	require.ErrorIs(t, err, ids.ErrNoWorker)
	ended, cancel := context.WithCancel(t.Context())
	cancel()
	require.Error(t, w.RunOnce(ended))
	_, err = w.Next()
	require.ErrorIs(t, err, ids.ErrNoWorker)
	n := number(t, w)
	require.NoError(t, w.RunOnce(t.Context()))
	require.Equal(t, n, number(t, w), "nobody else has got it")
	// Its clock was made to run ahead of PostgreSQL's: renewed, it is set right, which is more than a little.
	_, err = w.Next()
	require.ErrorIs(t, err, ids.ErrClock)
	clock.set(9*time.Minute + 30*time.Second)
	requireGrowing(t, append(before, take(t, w, 10)...))
}

// slowDB answers late, and does something just before.
type slowDB struct {
	*pgxpool.Pool
	delay  time.Duration
	before func()
}

func (s *slowDB) QueryRow(ctx context.Context, sql string, args ...any) pgx.Row {
	row := s.Pool.QueryRow(ctx, sql, args...)
	time.Sleep(s.delay)
	if s.before != nil {
		s.before()
	}
	return row
}

// A renewal whose answer is slow does not set the ids' clock back.
func TestWorker_SlowAnswers(t *testing.T) {
	t.Parallel()
	db := &slowDB{Pool: pgtest.Pool(t)}
	w := leased(t, db, nil)
	all := take(t, w, 10)
	db.delay = 500 * time.Millisecond
	db.before = func() { all = append(all, take(t, w, 10)...) }
	for range 2 {
		require.NoError(t, w.RunOnce(t.Context()))
		all = append(all, take(t, w, 10)...)
	}
	requireGrowing(t, all)
}

// What a process relies on must be on disk.
func TestWorker_LeasesWaitForTheDisk(t *testing.T) {
	t.Parallel()
	pool := pgtest.Pool(t)
	for _, again := range []bool{false, true} {
		require.NoError(t, pgx.BeginFunc(t.Context(), pool, func(tx pgx.Tx) error {
			w := newWorker(t, tx, nil)
			if again {
				require.NoError(t, w.RunOnce(t.Context()))
			}
			_, err := tx.Exec(t.Context(), `SET LOCAL synchronous_commit = off`)
			require.NoError(t, err)
			require.NoError(t, w.RunOnce(t.Context()))
			var setting string
			require.NoError(t, tx.QueryRow(t.Context(), `SHOW synchronous_commit`).Scan(&setting))
			require.Equal(t, "on", setting)
			return nil
		}))
	}
}

func TestNewWorker_WrongConfigurationNamesFieldAndRule(t *testing.T) {
	t.Parallel()
	for field, cfg := range map[string]*ids.WorkerConfig{
		"WorkerConfig.Lease":  {Lease: time.Millisecond},
		"WorkerConfig.Margin": {Margin: -2},
		"Config.MaxBack":      {MaxBack: time.Hour},
		"pool":                nil,
	} {
		_, err := ids.NewWorker(nil, cfg)
		var wrong *idempotency.ConfigError
		require.ErrorAs(t, err, &wrong)
		require.Equal(t, field, wrong.Field)
	}
}

func BenchmarkWorker(b *testing.B) {
	w := leased(b, pgtest.Pool(b), nil)
	for b.Loop() {
		if _, err := w.Next(); err != nil {
			b.Fatal(err)
		}
	}
}

func BenchmarkWorker_Lease(b *testing.B) {
	pool := pgtest.Pool(b)
	w := leased(b, pool, nil)
	for b.Loop() {
		if err := w.RunOnce(b.Context()); err != nil {
			b.Fatal(err)
		}
	}
}
