package txn_test

import (
	"context"
	"errors"
	"math/rand/v2"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgonce/pgonce/idempotency"
	"github.com/pgonce/pgonce/internal/pgtest"
	"github.com/pgonce/pgonce/txn"
)

// replica is another process of the same shop: a pool and a runner of its own on the same database.
func (s *shop) replica(t testing.TB, config ...func(*txn.Config)) *shop {
	t.Helper()
	pool, err := pgxpool.NewWithConfig(t.Context(), s.pool.Config())
	require.NoError(t, err)
	t.Cleanup(pool.Close)
	return &shop{pool: pool, runner: newRunner(t, pool, config...), direct: s.direct}
}

// patience is how long a test waits for what must come, and the Wait of one that chooses none: no machine is so busy. It is
// shorter than the 60 s after which the server itself ends a session that was left in a transaction, which must be seen.
const patience = 30 * time.Second

func newRunner(t testing.TB, pool *pgxpool.Pool, config ...func(*txn.Config)) *txn.Runner {
	t.Helper()
	cfg := &txn.Config{Operations: []idempotency.Operation{create}, Isolation: pgtest.Env().Isolation}
	if cfg.Isolation == pgx.Serializable {
		cfg.MaxRetries = 100 // as Config.Isolation advises
	}
	for _, f := range config {
		f(cfg)
	}
	cfg.Operations = slices.Clone(cfg.Operations) // they may be other tests' too
	for i := range cfg.Operations {
		if cfg.Operations[i].Wait == 0 {
			cfg.Operations[i].Wait = patience
		}
	}
	runner, err := txn.New(pool, cfg)
	require.NoError(t, err)
	return runner
}

// waiting sets how long duplicates wait.
func waiting(wait time.Duration) func(*txn.Config) {
	return func(c *txn.Config) {
		for i := range c.Operations {
			c.Operations[i].Wait = wait
		}
	}
}

var impatient = waiting(idempotency.NoWait)

// isolated sets the isolation level.
func isolated(level pgx.TxIsoLevel) func(*txn.Config) {
	return func(c *txn.Config) { c.Isolation = level }
}

// answer is what a call returned.
type answer struct {
	txn.Result[order]
	err error
}

// held is a call that stays inside its function, its order placed, until it is let go.
type held struct {
	release func()
	done    chan answer
}

// hold starts one and returns when its function has been entered.
func (s *shop) hold(t testing.TB, req idempotency.Request) *held {
	t.Helper()
	entered, leave := make(chan struct{}, 100), make(chan struct{})
	h := &held{release: sync.OnceFunc(func() { close(leave) }), done: make(chan answer, 1)}
	t.Cleanup(h.release) // also when the test fails before
	go func() {
		res, err := txn.WithIdempotency(t.Context(), s.runner, req, func(ctx context.Context, tx pgx.Tx) (order, error) {
			o, err := insertOrder(ctx, tx, req.Key.Value())
			entered <- struct{}{}
			<-leave
			return o, err
		})
		h.done <- answer{res, err}
	}()
	select {
	case <-entered:
	case a := <-h.done:
		require.FailNow(t, "the held call ended before its function was entered", "%v", a.err)
	}
	return h
}

// letGo lets the function return and gives the call's answer.
func (h *held) letGo() answer {
	h.release()
	return <-h.done
}

// holdLock takes the key's advisory lock in a session of its own, as another key with the same lock id would.
func (s *shop) holdLock(t testing.TB, key idempotency.Key) (release func()) {
	t.Helper()
	conn, err := pgx.ConnectConfig(t.Context(), s.direct.Config().ConnConfig)
	require.NoError(t, err)
	hangUp := sync.OnceFunc(func() { _ = conn.Close(context.WithoutCancel(t.Context())) })
	t.Cleanup(hangUp)
	tx, err := conn.Begin(t.Context())
	require.NoError(t, err)
	var locked bool
	require.NoError(t, tx.QueryRow(t.Context(), `SELECT pg_try_advisory_xact_lock($1)`, key.LockID()).Scan(&locked))
	require.True(t, locked)
	return func() {
		require.NoError(t, tx.Rollback(context.WithoutCancel(t.Context())))
		hangUp()
	}
}

// requireIdle requires that no connection is out and that no session is left in a transaction.
func (s *shop) requireIdle(t testing.TB) {
	t.Helper()
	// Polled: pgxpool destroys a broken connection in a goroutine of its own.
	require.Eventually(t, func() bool { return s.pool.Stat().AcquiredConns() == 0 }, patience, time.Millisecond, "leaked connections")
	ctx := context.WithoutCancel(t.Context()) // also called from a Cleanup
	require.Eventually(t, func() bool {
		var n int
		err := s.direct.QueryRow(ctx, `SELECT count(*) FROM pg_stat_activity
			WHERE datname = current_database() AND pid <> pg_backend_pid() AND state LIKE 'idle in transaction%'`).Scan(&n)
		return err == nil && n == 0
	}, patience, 5*time.Millisecond, "sessions left in a transaction")
}

func TestCase_R01_SecondNodeDoesNotRunWhileTheFirstDoes(t *testing.T) {
	t.Parallel()
	one := newShop(t)
	two, impatientTwo := one.replica(t), one.replica(t, impatient)
	req := request(t, "k1", "body")
	first := one.hold(t, req)

	_, err := impatientTwo.place(t.Context(), req)
	var busy *idempotency.InProgressError
	require.ErrorAs(t, err, &busy)
	require.GreaterOrEqual(t, busy.RetryAfter, time.Second)

	second := make(chan answer, 1)
	go func() {
		res, err := two.place(t.Context(), req)
		second <- answer{res, err}
	}()
	a := first.letGo()
	require.NoError(t, a.err)
	require.False(t, a.Replayed)
	b := <-second
	require.NoError(t, b.err)
	require.True(t, b.Replayed)
	require.Equal(t, a.Value, b.Value)
	require.Equal(t, a.Record, b.Record)
	require.Equal(t, 1, one.orders(t, "k1"))
}

func TestCase_R02_FiftyParallelCallsRunOnce(t *testing.T) {
	t.Parallel()
	const replicas, callers = 5, 10
	for name, wait := range map[string]time.Duration{"Waiting": patience, "NoWait": idempotency.NoWait} {
		for _, iso := range []pgx.TxIsoLevel{pgx.ReadCommitted, pgx.RepeatableRead, pgx.Serializable} {
			t.Run(name+"/"+string(iso), func(t *testing.T) {
				t.Parallel()
				s := newShop(t)
				req := request(t, "k1", "body")
				gate := make(chan struct{})
				answers := make(chan answer, replicas*callers)
				for range replicas {
					r := s.replica(t, waiting(wait), isolated(iso))
					for range callers {
						go func() {
							<-gate
							res, err := txn.WithIdempotency(t.Context(), r.runner, req, func(ctx context.Context, tx pgx.Tx) (order, error) {
								o, err := insertOrder(ctx, tx, "k1")
								if err != nil {
									return o, err
								}
								_, err = tx.Exec(ctx, `SELECT pg_sleep(0.05)`)
								return o, err
							})
							answers <- answer{res, err}
						}()
					}
				}
				close(gate)
				fresh, busy := 0, 0
				var value order
				for range replicas * callers {
					a := <-answers
					if wait == idempotency.NoWait && errors.Is(a.err, idempotency.ErrInProgress) {
						busy++
						continue
					}
					require.NoError(t, a.err)
					if !a.Replayed {
						fresh++
					}
					if value == (order{}) {
						value = a.Value
					}
					require.Equal(t, value, a.Value)
				}
				require.Equal(t, 1, fresh, "%d were told in progress", busy)
				require.Equal(t, 1, s.orders(t, "k1"))
			})
		}
	}
}

func TestCase_R05_SlowFunctionMakesDuplicatesWaitThenReplay(t *testing.T) {
	t.Parallel()
	s := newShop(t)
	const wait = 50 * time.Millisecond
	short, patient := s.replica(t, waiting(wait)), s.replica(t)
	req := request(t, "k1", "body")
	first := s.hold(t, req)

	began := time.Now()
	_, err := short.place(t.Context(), req)
	require.ErrorIs(t, err, idempotency.ErrInProgress)
	require.GreaterOrEqual(t, time.Since(began), wait, "it waits as long as the operation says")

	late := make(chan answer, 1)
	go func() {
		res, err := patient.place(t.Context(), req)
		late <- answer{res, err}
	}()
	a := first.letGo()
	require.NoError(t, a.err)
	for _, again := range []func() answer{
		func() answer { return <-late },
		func() answer { res, err := short.place(t.Context(), req); return answer{res, err} },
	} {
		b := again()
		require.NoError(t, b.err)
		require.True(t, b.Replayed)
		require.Equal(t, a.Value, b.Value)
	}
	require.Equal(t, 1, s.orders(t, "k1"))
}

func TestCase_R08_CallsDuringTheRunAreToldInProgressThenReplay(t *testing.T) {
	t.Parallel()
	s := newShop(t)
	req := request(t, "k1", "body")
	others := []*shop{s.replica(t, impatient), s.replica(t, impatient), s.replica(t, impatient)}
	first := s.hold(t, req)
	for _, retry := range []bool{false, true} {
		req.Retry = retry
		for _, other := range others {
			_, err := other.place(t.Context(), req)
			require.ErrorIs(t, err, idempotency.ErrInProgress)
			require.Zero(t, other.pool.Stat().AcquiredConns(), "waiting and refusing hold no connection")
		}
	}
	a := first.letGo()
	require.NoError(t, a.err)
	for _, other := range others {
		b, err := other.place(t.Context(), req)
		require.NoError(t, err)
		require.True(t, b.Replayed)
		require.Equal(t, a.Value, b.Value)
	}
	require.Equal(t, 1, s.orders(t, "k1"))
}

func TestCase_R11_RollbackLeavesNothingBehind(t *testing.T) {
	t.Parallel()
	s := newShop(t)
	other := s.replica(t, impatient)
	req := request(t, "k1", "body")
	boom := errors.New("boom")
	_, err := txn.WithIdempotency(t.Context(), s.runner, req, func(ctx context.Context, tx pgx.Tx) (order, error) {
		o, err := insertOrder(ctx, tx, "k1")
		return o, errors.Join(err, boom)
	})
	require.ErrorIs(t, err, boom)
	var records, attempts, locks int
	require.NoError(t, s.direct.QueryRow(t.Context(), `SELECT
		(SELECT count(*) FROM idempotency.records), (SELECT count(*) FROM idempotency.attempts),
		(SELECT count(*) FROM pg_locks WHERE locktype = 'advisory'
			AND database = (SELECT oid FROM pg_database WHERE datname = current_database()))`).Scan(&records, &attempts, &locks))
	require.Zero(t, records)
	require.Zero(t, attempts)
	require.Zero(t, locks)
	require.Zero(t, s.orders(t, "k1"))

	res, err := other.place(t.Context(), req)
	require.NoError(t, err)
	require.False(t, res.Replayed)
	require.Equal(t, 1, s.orders(t, "k1"))
}

func TestCase_R12_LockLivesInTheTransactionThatWritesTheRecord(t *testing.T) {
	t.Parallel()
	s := newShop(t)
	other := s.replica(t, impatient)
	req := request(t, "k1", "body")
	const holders = `SELECT coalesce(array_agg(pid), '{}') FROM pg_locks
		WHERE locktype = 'advisory' AND granted AND objsubid = 1 AND (classid::bigint << 32) | objid::bigint = $1
		AND database = (SELECT oid FROM pg_database WHERE datname = current_database())`
	res, err := txn.WithIdempotency(t.Context(), s.runner, req, func(ctx context.Context, tx pgx.Tx) (order, error) {
		var pids []uint32
		require.NoError(t, other.direct.QueryRow(ctx, holders, req.Key.LockID()).Scan(&pids))
		require.Equal(t, []uint32{backend(ctx, t, tx)}, pids)
		// Acquired, nothing written yet: the very moment when a check in a transaction of its own would let both go.
		_, err := other.place(ctx, req)
		require.ErrorIs(t, err, idempotency.ErrInProgress)
		return insertOrder(ctx, tx, "k1")
	})
	require.NoError(t, err)
	var pids []uint32
	require.NoError(t, s.direct.QueryRow(t.Context(), holders, req.Key.LockID()).Scan(&pids))
	require.Empty(t, pids, "it ends with the transaction")
	again, err := other.place(t.Context(), req)
	require.NoError(t, err)
	require.True(t, again.Replayed)
	require.Equal(t, res.Value, again.Value)
	require.Equal(t, 1, s.orders(t, "k1"))
}

func TestCase_P22_AnotherKeyWithTheSameLockOnlyDelays(t *testing.T) {
	t.Parallel()
	s := newShop(t)
	short, patient := s.replica(t, waiting(30*time.Millisecond)), s.replica(t)
	req, other := request(t, "k1", "body"), request(t, "k1", "other body")

	release := s.holdLock(t, req.Key)
	for _, r := range []idempotency.Request{req, other} {
		_, err := short.place(t.Context(), r)
		require.ErrorIs(t, err, idempotency.ErrInProgress, "never a mismatch: nothing is known of the key")
	}
	require.Zero(t, s.orders(t, "k1"))
	waiter := make(chan answer, 1)
	go func() {
		res, err := patient.place(t.Context(), req)
		waiter <- answer{res, err}
	}()
	release()
	a := <-waiter
	require.NoError(t, a.err)
	require.False(t, a.Replayed)

	// What is final answers at once, whoever has the lock.
	defer s.holdLock(t, req.Key)()
	for _, retry := range []bool{false, true} {
		req.Retry, other.Retry = retry, retry
		b, err := short.place(t.Context(), req)
		require.NoError(t, err)
		require.True(t, b.Replayed)
		require.Equal(t, a.Value, b.Value)
		_, err = short.place(t.Context(), other)
		require.ErrorIs(t, err, idempotency.ErrMismatch)
	}
	require.Equal(t, 1, s.orders(t, "k1"))
}

// jitter is a random pause of the work itself; nothing is waited for.
func jitter(limit time.Duration) { time.Sleep(rand.N(limit)) }
