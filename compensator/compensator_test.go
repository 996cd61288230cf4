package compensator_test

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgonce/pgonce/compensator"
	"github.com/pgonce/pgonce/idempotency"
	"github.com/pgonce/pgonce/internal/pgtest"
	"github.com/pgonce/pgonce/txn"
)

func TestMain(m *testing.M) { pgtest.Main(m) }

// shop is a database with records in it, and a gateway that knows what became of payments.
type shop struct {
	pool    *pgxpool.Pool
	store   *idempotency.Store
	gateway *gateway
	ops     []idempotency.Operation
}

// gateway says what it is told to say, by key.
type gateway struct {
	mu       sync.Mutex
	says     map[string]idempotency.Resolution
	err      error
	slow     time.Duration
	hangs    int64  // after so many answers; 0: never
	inCommit func() // if not nil
	asked    atomic.Int64
}

func (g *gateway) Ask(ctx context.Context, r idempotency.Record, _ []idempotency.Step) (idempotency.Resolution, error) {
	slow := g.slow
	if n := g.asked.Add(1); g.hangs > 0 && n > g.hangs {
		slow = time.Hour
	}
	select {
	case <-time.After(slow):
	case <-ctx.Done():
		return idempotency.Resolution{}, ctx.Err()
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.says[r.Key.Value()], g.err
}

func (g *gateway) Commit(ctx context.Context, tx pgx.Tx, r idempotency.Record, _ idempotency.Resolution) error {
	if g.inCommit != nil {
		g.inCommit()
	}
	_, err := tx.Exec(ctx, `INSERT INTO paid (key) VALUES ($1)`, r.Key.Value())
	return err
}

func newShop(t *testing.T) *shop {
	t.Helper()
	s := &shop{
		pool: pgtest.Pool(t, txn.ConfigurePool), store: idempotency.NewStore(pgx.QueryExecModeCacheStatement),
		gateway: &gateway{says: map[string]idempotency.Resolution{}},
	}
	s.ops = []idempotency.Operation{
		{Name: "rerun", Takeover: idempotency.TakeoverRerun},
		{Name: "manual", Takeover: idempotency.TakeoverManual},
		{Name: "resolve", Resolver: s.gateway},
	}
	s.exec(t, `CREATE TABLE paid (key text NOT NULL)`)
	return s
}

func (s *shop) exec(t *testing.T, sql string, args ...any) {
	t.Helper()
	_, err := s.pool.Exec(t.Context(), sql, args...)
	require.NoError(t, err)
}

func (s *shop) open(t *testing.T, change ...func(*compensator.Config)) *compensator.Compensator {
	t.Helper()
	cfg := &compensator.Config{Operations: s.ops}
	for _, f := range change {
		f(cfg)
	}
	c, err := compensator.New(s.pool, cfg)
	require.NoError(t, err)
	return c
}

// abandon leaves what an owner leaves that was killed.
func (s *shop) abandon(t *testing.T, operation, value string, rule idempotency.Takeover) idempotency.Record {
	t.Helper()
	key, err := idempotency.NewKey("acme", operation, value)
	require.NoError(t, err)
	a, err := s.store.AcquireLease(t.Context(), s.pool, &idempotency.LeaseRequest{
		Request:      idempotency.Request{Key: key, Fingerprint: idempotency.FingerprintBytes([]byte(value))},
		AttemptToken: idempotency.NewAttemptToken(), Lease: 30 * time.Second, Takeover: rule,
	})
	require.NoError(t, err)
	s.exec(t, `UPDATE idempotency.records SET lease_expires_at = statement_timestamp() - interval '1 s' WHERE key = $1`, value)
	return a.Record
}

func (s *shop) count(t *testing.T, sql string, args ...any) (n int) {
	t.Helper()
	require.NoError(t, s.pool.QueryRow(t.Context(), sql, args...).Scan(&n))
	return n
}

func (s *shop) state(t *testing.T, value string) (state string) {
	t.Helper()
	require.NoError(t, s.pool.QueryRow(t.Context(), `SELECT stored_state || CASE WHEN retryable THEN ' retryable' ELSE '' END FROM idempotency.audit WHERE key = $1`, value).Scan(&state))
	return state
}

// A pass finishes every dead record as its own rule says, and leaves live ones alone.
func TestRunOnce_FinishesWhatIsStale(t *testing.T) {
	t.Parallel()
	s := newShop(t)
	s.abandon(t, "rerun", "again", idempotency.TakeoverRerun)
	s.abandon(t, "manual", "person", idempotency.TakeoverManual)
	for _, value := range []string{"done", "refused", "nobody knows"} {
		s.abandon(t, "resolve", value, idempotency.TakeoverResolve)
	}
	s.abandon(t, "of another service", "foreign", idempotency.TakeoverRerun)
	live := s.abandon(t, "rerun", "live", idempotency.TakeoverRerun)
	_, err := s.store.Renew(t.Context(), s.pool, live.Owner(), time.Hour)
	require.NoError(t, err)
	s.gateway.says["done"] = idempotency.Resolution{Outcome: idempotency.OutcomeSucceeded, ResultType: "json/1", Result: []byte(`"ch_1"`)}
	s.gateway.says["refused"] = idempotency.Resolution{Outcome: idempotency.OutcomeFailed, Code: "refused", Message: "no money"}

	dry, err := s.open(t, func(c *compensator.Config) { c.DryRun = true }).RunOnce(t.Context())
	require.NoError(t, err)
	require.Equal(t, 6, dry.Stale)
	require.Equal(t, 7, s.count(t, `SELECT count(*) FROM idempotency.records WHERE state = 'PROCESSING'`), "a dry run changes nothing")
	require.Zero(t, s.gateway.asked.Load())

	c := s.open(t)
	report, err := c.RunOnce(t.Context())
	require.NoError(t, err)
	report.Duration, report.Epoch = 0, ""
	require.Equal(t, compensator.Report{Stale: 6, Rescued: 1, Resolved: 2, Unresolved: 1, Manual: 1, Undeclared: 1}, report)
	for value, state := range map[string]string{
		"again": "FAILED retryable", "person": "PROCESSING", "done": "SUCCESS", "refused": "FAILED", "nobody knows": "PROCESSING",
		"foreign": "PROCESSING", "live": "PROCESSING",
	} {
		require.Equal(t, state, s.state(t, value), value)
	}
	require.Equal(t, 2, s.count(t, `SELECT count(*) FROM paid`))
	require.Equal(t, 3, s.count(t, `SELECT count(*) FROM idempotency.attempts WHERE event = 'RESCUED' AND actor = 'compensator' AND reason IS NOT NULL`))

	again, err := c.RunOnce(t.Context())
	require.NoError(t, err)
	require.Equal(t, 2, again.Stale, "only what nobody may touch; a key that was asked about rests for its lease")
	require.EqualValues(t, 3, s.gateway.asked.Load())
}

// S09, W01: what a rescuer has listed may have completed, or been acquired anew, before it writes.
func TestCase_W01_WhatChangedMeanwhileIsLeftAlone(t *testing.T) {
	t.Parallel()
	s := newShop(t)
	r := s.abandon(t, "rerun", "k", idempotency.TakeoverRerun)
	page, err := s.store.ListStale(t.Context(), s.pool, time.Now().Add(time.Hour), nil, 10)
	require.NoError(t, err)
	require.Len(t, page, 1)
	_, err = s.store.Renew(t.Context(), s.pool, r.Owner(), time.Hour) // its owner was only slow
	require.NoError(t, err)
	done, err := s.store.Rescue(t.Context(), s.pool, page[0], "test", "test", time.Hour)
	require.NoError(t, err)
	require.False(t, done)

	s.exec(t, `SELECT idempotency.complete(tenant, operation, key, fence, attempt_token, '1') FROM idempotency.records`)
	done, err = s.store.Rescue(t.Context(), s.pool, page[0], "test", "test", time.Hour)
	require.NoError(t, err)
	require.False(t, done)
	require.Equal(t, "SUCCESS", s.state(t, "k"))
}

// Many unfit rows stand before the others, and hold up nothing.
func TestRunOnce_NeverStarves(t *testing.T) {
	t.Parallel()
	s := newShop(t)
	s.exec(t, `SELECT idempotency.acquire('acme', 'manual', 'm-' || i, idempotency.fingerprint_of('x'), takeover => 'MANUAL') FROM generate_series(1, 1200) AS i`)
	s.exec(t, `SELECT idempotency.acquire('acme', 'rerun', 'r-' || i, idempotency.fingerprint_of('x'), takeover => 'RERUN') FROM generate_series(1, 300) AS i`)
	s.exec(t, `UPDATE idempotency.records SET lease_expires_at = statement_timestamp() - CASE operation WHEN 'manual' THEN interval '1 h' ELSE interval '1 min' END`)
	report, err := s.open(t).RunOnce(t.Context())
	require.NoError(t, err)
	require.Equal(t, 1200, report.Manual)
	require.Equal(t, 300, report.Rescued)
}

func TestRunOnce_ReplicasHandleEachRecordOnce(t *testing.T) {
	t.Parallel()
	s := newShop(t)
	const records = 60
	for i := range records {
		value := fmt.Sprint("k", i)
		s.abandon(t, "resolve", value, idempotency.TakeoverResolve)
		s.gateway.says[value] = idempotency.Resolution{Outcome: idempotency.OutcomeSucceeded, ResultType: "json/1", Result: []byte(`1`)}
	}
	s.gateway.slow = 5 * time.Millisecond
	var group sync.WaitGroup
	var resolved atomic.Int64
	for range 3 {
		c := s.open(t)
		group.Go(func() {
			report, err := c.RunOnce(t.Context())
			if err != nil {
				t.Error(err)
			}
			resolved.Add(int64(report.Resolved))
		})
	}
	group.Wait()
	require.EqualValues(t, records, resolved.Load())
	require.EqualValues(t, records, s.gateway.asked.Load())
	require.Equal(t, records, s.count(t, `SELECT count(*) FROM paid`))
}

// W03: a statement that hangs is given up, with smaller batches behind it, and nothing stays "running" after it.
func TestCase_W03_AHangingStatementIsGivenUp(t *testing.T) {
	t.Parallel()
	s := newShop(t)
	s.abandon(t, "rerun", "k", idempotency.TakeoverRerun)
	s.exec(t, `INSERT INTO idempotency.records (tenant, operation, key, state, fence, generation, attempt, created_at, acquired_at, completed_at,
			expires_at, executor, fingerprint, attempt_token, result_type)
		VALUES ('acme', 'order.create', 'old', 'SUCCESS', 1, 1, 1, now(), now(), now(), now() - interval '1 s', 'h', idempotency.fingerprint_of('x'),
			decode(repeat('02', 16), 'hex'), 'json/1')`)
	blocker, err := s.pool.Begin(t.Context())
	require.NoError(t, err)
	_, err = blocker.Exec(t.Context(), `LOCK TABLE idempotency.steps IN ACCESS EXCLUSIVE MODE`) // only the purge asks for it
	require.NoError(t, err)
	c := s.open(t, func(c *compensator.Config) { c.Timeout, c.Batch = time.Second, 4 })
	report, err := c.RunOnce(t.Context())
	require.ErrorIs(t, err, context.DeadlineExceeded)
	require.Equal(t, 1, report.Rescued, "one part's trouble is not the others'")
	require.NoError(t, blocker.Rollback(t.Context()))
	_, err = c.RunOnce(t.Context())
	require.NoError(t, err)
	// By this pass, or still by the statement that was given up: its server process may get the row before it hears of that.
	require.Zero(t, s.count(t, `SELECT count(*) FROM idempotency.records WHERE key = 'old'`))
}

func TestRunOnce_ResolverFails(t *testing.T) {
	t.Parallel()
	s := newShop(t)
	s.gateway.err = errors.New("the gateway is away")
	s.abandon(t, "resolve", "k", idempotency.TakeoverResolve)
	s.abandon(t, "rerun", "other", idempotency.TakeoverRerun)
	report, err := s.open(t).RunOnce(t.Context())
	require.ErrorContains(t, err, "the gateway is away")
	require.Equal(t, 1, report.Unresolved)
	require.Equal(t, 1, report.Rescued)
	require.Equal(t, "PROCESSING", s.state(t, "k"))
}

func TestRunOnce_ResolverPanics(t *testing.T) {
	t.Parallel()
	s := newShop(t)
	s.ops[2].Resolver = panicking{}
	s.abandon(t, "resolve", "k", idempotency.TakeoverResolve)
	s.abandon(t, "rerun", "other", idempotency.TakeoverRerun)
	report, err := s.open(t).RunOnce(t.Context())
	require.ErrorContains(t, err, "oh no")
	require.Equal(t, 1, report.Unresolved)
	require.Equal(t, 1, report.Rescued)
}

type panicking struct{ idempotency.Resolver }

func (panicking) Ask(context.Context, idempotency.Record, []idempotency.Step) (idempotency.Resolution, error) {
	panic("oh no")
}

// What is on its way is finished, the rest is left for the next pass, and there is one error and not one for each record.
func TestRunOnce_Cancelled(t *testing.T) {
	t.Parallel()
	s := newShop(t)
	for i := range 40 {
		s.abandon(t, "resolve", fmt.Sprint("k", i), idempotency.TakeoverResolve)
	}
	s.gateway.slow = time.Minute
	ctx, cancel := context.WithCancel(t.Context())
	c := s.open(t, func(c *compensator.Config) { c.Workers = 1 })
	go func() {
		for s.gateway.asked.Load() == 0 {
			time.Sleep(time.Millisecond)
		}
		cancel()
	}()
	report, err := c.RunOnce(ctx)
	require.ErrorIs(t, err, context.Canceled)
	require.Equal(t, 1, report.Stale)
	require.Less(t, len(err.Error()), 500)
}

func TestRun_EndsWithItsContext(t *testing.T) {
	t.Parallel()
	s := newShop(t)
	s.abandon(t, "rerun", "k", idempotency.TakeoverRerun)
	ctx, cancel := context.WithCancel(t.Context())
	passes := make(chan compensator.Report, 10)
	c := s.open(t, func(c *compensator.Config) {
		c.Interval = time.Second
		c.OnReport = func(ctx context.Context, r compensator.Report, err error) {
			if err != nil && (ctx.Err() == nil || !errors.Is(err, context.Canceled)) {
				t.Error(err)
			}
			passes <- r
		}
	})
	ended := make(chan struct{})
	go func() {
		c.Run(ctx)
		close(ended)
	}()
	require.Equal(t, 1, (<-passes).Rescued)
	s.exec(t, `SELECT idempotency.begin_epoch('restored')`)
	require.Eventually(t, func() bool { return (<-passes).EpochChanged }, 30*time.Second, time.Millisecond, "by a pass that began behind it")
	cancel()
	<-ended
}

func TestNew_RefusesAWrongConfig(t *testing.T) {
	t.Parallel()
	s := newShop(t)
	for field, change := range map[string]func(*compensator.Config){
		"Operations": func(c *compensator.Config) { c.Operations = nil },
		"twice":      func(c *compensator.Config) { c.Operations = append(c.Operations, c.Operations[0]) },
		"Lease":      func(c *compensator.Config) { c.Operations = []idempotency.Operation{{Name: "o", Lease: 1}} },
		"Interval":   func(c *compensator.Config) { c.Interval = 1 },
		"Batch":      func(c *compensator.Config) { c.Batch = -1 },
		"Timeout":    func(c *compensator.Config) { c.Timeout = 1 },
		"Workers":    func(c *compensator.Config) { c.Workers = -1 },
	} {
		cfg := &compensator.Config{Operations: s.ops}
		change(cfg)
		_, err := compensator.New(s.pool, cfg)
		require.ErrorIs(t, err, idempotency.ErrConfig)
		require.ErrorContains(t, err, field)
	}
	_, err := compensator.New(nil, &compensator.Config{Operations: s.ops})
	require.ErrorIs(t, err, idempotency.ErrConfig)
	_, err = compensator.New(pgtest.Pool(t), &compensator.Config{Operations: s.ops})
	require.ErrorIs(t, err, idempotency.ErrConfig)
	require.ErrorContains(t, err, "txn.ConfigurePool")
}
