package frontsuite

import (
	"context"
	"encoding/json"
	"errors"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"github.com/pgonce/pgonce/compensator"
	"github.com/pgonce/pgonce/idempotency"
	"github.com/pgonce/pgonce/idempotency/idempotencytest"
	"github.com/pgonce/pgonce/localfront"
	"github.com/pgonce/pgonce/redisfront"
	"github.com/pgonce/pgonce/txn"
)

var capture = idempotency.Operation{Name: "payment.capture", Takeover: idempotency.TakeoverRerun, Wait: idempotency.NoWait}

// till is a service that pays in the leased mode, before PostgreSQL a local front and Redis.
type till struct {
	*shop
	charges int // of the function that runs
}

func newTill(t *testing.T, b *bench, op idempotency.Operation) *till {
	t.Helper()
	s := &shop{pool: b.pool}
	client := redis.NewClient(&redis.Options{Addr: b.address, Password: b.password, ContextTimeoutEnabled: true})
	t.Cleanup(func() { require.NoError(t, client.Close()) })
	var err error
	s.redis, err = redisfront.New(client, &redisfront.Config{OnEvent: s.events.add, Timeout: patience})
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, s.redis.Close()) })
	s.local, err = localfront.New(nil)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, s.local.Close()) })
	s.runner, err = txn.New(b.pool, &txn.Config{
		Operations: append(idempotencytest.Operations(), op), Fronts: []idempotency.Front{s.local, s.redis}, OnEvent: s.events.add,
	})
	require.NoError(t, err)
	t.Cleanup(s.runner.Close)
	s.awaitEpoch(t)
	return &till{shop: s}
}

func (l *till) pay(ctx context.Context, req idempotency.Request, fail error) (txn.Result[int], error) {
	return txn.WithLease(ctx, l.runner, req, func(context.Context, *txn.Lease) (int, error) {
		l.charges++
		return l.charges, fail
	}, func(ctx context.Context, tx pgx.Tx, n int) (int, error) {
		_, err := tx.Exec(ctx, `INSERT INTO suite_orders (key) VALUES ($1)`, req.Key.Value())
		return n, err
	})
}

// A payment whose owner died, and of which there is no business row: it is made a retryable failure, the next caller runs it,
// and no front keeps anybody from it or gives an older answer.
func TestCase_S08_ARescuedKeyRunsAgain(t *testing.T) {
	t.Parallel()
	b := newBench(t)
	s, ctx := newTill(t, b, capture), t.Context()
	req := request(t, capture, "k")
	store := idempotency.NewStore(pgx.QueryExecModeCacheStatement)
	a, err := store.AcquireLease(ctx, b.pool, &idempotency.LeaseRequest{
		Request: req, AttemptToken: idempotency.NewAttemptToken(), Lease: time.Second, Takeover: capture.Takeover,
	})
	require.NoError(t, err)
	require.Equal(t, idempotency.VerdictRun, a.Verdict)
	_, _, err = s.redis.Begin(ctx, idempotency.Ask{Key: req.Key, Fingerprint: req.Fingerprint}, idempotency.NewAttemptToken(), time.Hour) // its mark
	require.NoError(t, err)
	_, err = s.pay(ctx, req, nil)
	require.ErrorIs(t, err, idempotency.ErrInProgress)
	_, err = b.pool.Exec(ctx, `UPDATE idempotency.records SET lease_expires_at = statement_timestamp() - interval '1 s' WHERE key = 'k'`)
	require.NoError(t, err)

	c, err := compensator.New(b.pool, &compensator.Config{Operations: []idempotency.Operation{capture}, Fronts: []idempotency.Auditable{s.redis}})
	require.NoError(t, err)
	report, err := c.RunOnce(ctx)
	require.NoError(t, err)
	require.Equal(t, 1, report.Rescued)
	require.Equal(t, 1, report.NoOwner, "the dead owner's mark")
	paid, err := s.pay(ctx, req, nil)
	require.NoError(t, err)
	require.False(t, paid.Replayed)
	require.Equal(t, 1, s.charges)
	again, err := s.pay(ctx, req, nil)
	require.NoError(t, err)
	require.True(t, again.Replayed)
	require.Equal(t, paid.Value, again.Value)
	require.Equal(t, 1, s.charges)
	require.Equal(t, 1, orders(t, b.pool, "k"))
	require.NoError(t, s.redis.Flush(ctx))
	report, err = c.HealOnce(ctx)
	require.NoError(t, err)
	require.Zero(t, report.Drifted())
}

// resolving finds out what a dead owner did.
type resolving struct{ found idempotency.Resolution }

func (r *resolving) Ask(context.Context, idempotency.Record, []idempotency.Step) (idempotency.Resolution, error) {
	return r.found, nil
}

func (*resolving) Commit(ctx context.Context, tx pgx.Tx, r idempotency.Record, _ idempotency.Resolution) error {
	_, err := tx.Exec(ctx, `INSERT INTO suite_orders (key) VALUES ($1)`, r.Key.Value())
	return err
}

// Whatever is repaired, an answer that a client has is never replaced by another one, and none is made up.
func TestCase_W08_ARepairInventsNoAnswer(t *testing.T) {
	t.Parallel()
	b := newBench(t)
	ctx := t.Context()
	resolver := &resolving{found: idempotency.Resolution{Outcome: idempotency.OutcomeSucceeded, ResultType: "json/1", Result: []byte(`42`)}}
	op := capture
	op.Takeover, op.Resolver = "", resolver
	s := newTill(t, b, op)
	c, err := compensator.New(b.pool, &compensator.Config{
		Operations: append(idempotencytest.Operations(), op), Fronts: []idempotency.Auditable{s.redis},
	})
	require.NoError(t, err)

	req := request(t, idempotencytest.Orders, "told")
	told := s.place(t, req, "the very bytes \x00\xff")
	require.NoError(t, s.redis.Flush(ctx))
	require.NoError(t, b.admin.FlushAll(ctx).Err())
	_, err = b.pool.Exec(ctx, `UPDATE idempotency.records SET created_at = created_at - interval '1 minute', acquired_at = acquired_at - interval '1 minute',
		completed_at = completed_at - interval '1 minute', expires_at = expires_at - interval '1 minute' WHERE key = 'told'`)
	require.NoError(t, err)
	report, err := c.RunOnce(ctx)
	require.NoError(t, err)
	require.Equal(t, 1, report.Published)
	other := newShop(t, fronts{redis: true}, b.address, b.password, b.pool) // with nothing in its memory
	from := other.events.redis.Load()
	req.Retry = true
	again := other.place(t, req, "something else")
	require.Equal(t, from+1, other.events.redis.Load())
	require.True(t, again.Replayed)
	require.Equal(t, told.Result, again.Result)
	require.Equal(t, told.Record.AttemptToken, again.Record.AttemptToken)
	require.Equal(t, told.Record.Fence, again.Record.Fence)

	// What a Resolver found is recorded as it is, and then it is the answer for everybody.
	dead := request(t, op, "dead")
	_, err = idempotency.NewStore(pgx.QueryExecModeCacheStatement).AcquireLease(ctx, b.pool, &idempotency.LeaseRequest{
		Request: dead, AttemptToken: idempotency.NewAttemptToken(), Lease: time.Second, Takeover: idempotency.TakeoverResolve, CanResolve: true,
	})
	require.NoError(t, err)
	_, err = b.pool.Exec(ctx, `UPDATE idempotency.records SET lease_expires_at = statement_timestamp() - interval '1 s' WHERE key = 'dead'`)
	require.NoError(t, err)
	report, err = c.RunOnce(ctx)
	require.NoError(t, err)
	require.Equal(t, 1, report.Resolved)
	resolver.found.Result = []byte(`43`)
	for range 2 {
		paid, err := s.pay(ctx, dead, nil)
		require.NoError(t, err)
		require.True(t, paid.Replayed)
		require.Equal(t, 42, paid.Value)
	}
	var stored json.RawMessage
	require.NoError(t, b.pool.QueryRow(ctx, `SELECT result FROM idempotency.audit WHERE key = 'dead'`).Scan(&stored))
	require.JSONEq(t, `42`, string(stored))
	require.Zero(t, s.charges)
}

// An error behind the mark takes it away, in the leased mode too: the next caller runs at once.
func TestCase_L21_AFailedLeaseLeavesNoMark(t *testing.T) {
	t.Parallel()
	b := newBench(t)
	s := newTill(t, b, capture)
	req := request(t, capture, "k")
	broken := errors.New("broken")
	_, err := s.pay(t.Context(), req, broken)
	require.ErrorIs(t, err, broken)
	require.NoError(t, s.redis.Flush(t.Context()))
	marks, err := b.admin.Keys(t.Context(), "*:mark").Result()
	require.NoError(t, err)
	require.Empty(t, marks)
	paid, err := s.pay(t.Context(), req, nil)
	require.NoError(t, err)
	require.False(t, paid.Replayed)
	require.Equal(t, 2, s.charges)
}

// panicking is a Resolver with a fault.
type panicking struct{ resolving }

func (*panicking) Ask(context.Context, idempotency.Record, []idempotency.Step) (idempotency.Resolution, error) {
	panic("fault")
}

// Whatever becomes of a pass, the next one runs and does all of its parts that can be done.
func TestCase_W07_TheNextPassAlwaysRuns(t *testing.T) {
	t.Parallel()
	node, password := ownRedis(t)
	b := newBench(t)
	b.address, b.password = node.Address(), password
	ctx, op := t.Context(), idempotency.Operation{Name: "payment.odd", Resolver: &panicking{}}
	s := newTill(t, b, capture)
	store := idempotency.NewStore(pgx.QueryExecModeCacheStatement)
	// dead leaves what owners leave that died; all of them in one commit, so that one pass finds them.
	dead := func(records ...idempotency.Request) {
		t.Helper()
		require.NoError(t, pgx.BeginFunc(ctx, b.pool, func(tx pgx.Tx) error {
			for _, req := range records {
				rule := idempotency.TakeoverRerun
				if req.Key.Operation() == op.Name {
					rule = idempotency.TakeoverResolve
				}
				_, err := store.AcquireLease(ctx, tx, &idempotency.LeaseRequest{
					Request: req, AttemptToken: idempotency.NewAttemptToken(), Lease: time.Second, Takeover: rule,
				})
				require.NoError(t, err)
				_, err = tx.Exec(ctx, `UPDATE idempotency.records SET lease_expires_at = statement_timestamp() - interval '1 s' WHERE key = $1`, req.Key.Value())
				require.NoError(t, err)
			}
			return nil
		}))
	}
	type pass struct {
		report compensator.Report
		err    error
	}
	passes := make(chan pass, 100)
	c, err := compensator.New(b.pool, &compensator.Config{
		Operations: []idempotency.Operation{capture, op}, Fronts: []idempotency.Auditable{s.redis}, Interval: time.Second,
		OnReport: func(_ context.Context, r compensator.Report, err error) { passes <- pass{r, err} },
	})
	require.NoError(t, err)
	running, stop := context.WithCancel(ctx)
	ended := make(chan struct{})
	go func() {
		c.Run(running)
		close(ended)
	}()
	until := func(what string, good func(pass) bool) {
		t.Helper()
		timeout := time.After(30 * time.Second)
		for {
			select {
			case p := <-passes:
				if good(p) {
					return
				}
			case <-timeout:
				t.Fatal("no pass that " + what)
			}
		}
	}
	until("is well", func(p pass) bool { return p.err == nil })
	require.NoError(t, node.Kill())
	dead(request(t, capture, "while Redis is away"))
	until("rescues without Redis", func(p pass) bool { return p.err != nil && p.report.Rescued == 1 })
	dead(request(t, op, "whose Resolver panics"), request(t, capture, "beside it"))
	until("rescues beside a panic", func(p pass) bool { return p.err != nil && p.report.Rescued == 1 && p.report.Unresolved == 1 })
	require.NoError(t, node.Start(ctx))
	_, err = b.pool.Exec(ctx, `DELETE FROM idempotency.records WHERE operation = $1`, op.Name)
	require.NoError(t, err)
	until("is well again", func(p pass) bool { return p.err == nil })
	stop()
	<-ended
}

// A live owner is never taken for dead because its deadline is missing or does not read: a lease without an end cannot be
// stored, and a mark in Redis is none without somebody who holds the key in PostgreSQL.
func TestCase_S02_AMissingDeadlineIsNoDeath(t *testing.T) {
	t.Parallel()
	b := newBench(t)
	s, ctx := newTill(t, b, capture), t.Context()
	req := request(t, capture, "k")
	a, err := idempotency.NewStore(pgx.QueryExecModeCacheStatement).AcquireLease(ctx, b.pool, &idempotency.LeaseRequest{
		Request: req, AttemptToken: idempotency.NewAttemptToken(), Lease: time.Minute, Takeover: capture.Takeover,
	})
	require.NoError(t, err)
	_, err = b.pool.Exec(ctx, `UPDATE idempotency.records SET lease_expires_at = NULL WHERE key = 'k'`)
	var refused *pgconn.PgError
	require.ErrorAs(t, err, &refused)
	require.Equal(t, "23514", refused.Code)

	mark := a.Record.AttemptToken
	_, _, err = s.redis.Begin(ctx, idempotency.Ask{Key: req.Key, Fingerprint: req.Fingerprint}, mark, time.Minute)
	require.NoError(t, err)
	marks, err := b.admin.Keys(ctx, "*:mark").Result()
	require.NoError(t, err)
	require.Len(t, marks, 1)
	c, err := compensator.New(b.pool, &compensator.Config{Operations: []idempotency.Operation{capture}, Fronts: []idempotency.Auditable{s.redis}})
	require.NoError(t, err)
	for _, spoil := range []func() error{
		func() error { return b.admin.Persist(ctx, marks[0]).Err() },
		func() error { return b.admin.Set(ctx, marks[0], "", 0).Err() },
		func() error { return b.admin.Set(ctx, marks[0], "unparsable", time.Hour).Err() },
	} {
		require.NoError(t, spoil())
		report, err := c.RunOnce(ctx)
		require.NoError(t, err)
		require.Zero(t, report.Stale+report.Rescued+report.Drifted())
		_, err = s.pay(ctx, req, nil)
		require.ErrorIs(t, err, idempotency.ErrInProgress)
		require.Zero(t, s.charges)
	}
}
