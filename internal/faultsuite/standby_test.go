package faultsuite

import (
	"context"
	"fmt"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/pgonce/pgonce/compensator"
	"github.com/pgonce/pgonce/idempotency"
	"github.com/pgonce/pgonce/internal/devstack"
	"github.com/pgonce/pgonce/txn"
)

// waiting counts the shop's COMMITs that wait for a standby.
const waiting = `SELECT count(*) FROM pg_stat_activity WHERE wait_event = 'SyncRep' AND application_name = 'shop'`

func (b *branch) count(t *testing.T, sql string, args ...any) (n int) {
	t.Helper()
	require.NoError(t, b.direct.QueryRow(t.Context(), sql, args...).Scan(&n))
	return n
}

func (b *branch) records(t *testing.T, key string) int {
	t.Helper()
	return b.count(t, "SELECT count(*) FROM idempotency.records WHERE key = $1", key)
}

// newWaitingBranch is a branch whose commits wait for a standby that is away, and all its runners.
func newWaitingBranch(t *testing.T) (b *branch, other *txn.Runner, standby *devstack.Node) {
	t.Helper()
	b = newBranch(t, options{config: shortCommitTimeout, wait: 300 * time.Millisecond})
	other = b.another(t)
	standby = b.standby(t)
	require.NoError(t, standby.Kill())
	b.synchronous(t, standby)
	return b, other, standby
}

// A COMMIT whose standby is missing is on the primary's disk and may not be told of: nobody sees it, nobody cuts its wait
// short, and it is done when the standby comes back.
func TestFault_CommitWaitsForMissingStandby(t *testing.T) {
	t.Parallel()
	b, other, standby := newWaitingBranch(t)
	total := &tally{}
	n := scaled(1, 5)
	for round := range n {
		// Each leaves two sessions that wait, and pgx frees their places in the pool of eight only 15 s later.
		keys := names(fmt.Sprintf("r%d-", round), 3)
		calls := make(chan error, len(keys))
		ctx := t.Context()
		began := time.Now()
		for _, key := range keys {
			go func() {
				_, err := b.place(ctx, b.runner, key)
				calls <- err
			}()
		}
		for range keys {
			require.ErrorIs(t, <-calls, idempotency.ErrOutcomeUnknown)
		}
		require.Less(t, time.Since(began), 5*time.Second, "CommitTimeout bounds the wait, and then the search")
		require.Eventually(t, func() bool { return b.count(t, waiting) >= len(keys) }, 10*time.Second, time.Millisecond)
		for _, key := range keys {
			require.Zero(t, b.records(t, key))
			_, err := b.place(ctx, b.runner, key)
			require.ErrorIs(t, err, idempotency.ErrInProgress, "the COMMIT that waits holds its key")
		}
		require.Zero(t, b.proxy.Stats().Cancels, "PostgreSQL answers a cancel request by committing without the standby")

		require.NoError(t, standby.Start(ctx))
		back := time.Now()
		for _, key := range keys {
			for _, r := range []*txn.Runner{b.runner, other} {
				require.True(t, b.placeUntilFree(t, r, key).Replayed)
			}
		}
		total.slowest = max(total.slowest, time.Since(back))
		total.resolved += len(keys)
		// A session that waits no more says so when it gets to run.
		require.Eventually(t, func() bool { return b.count(t, waiting) == 0 }, 10*time.Second, time.Millisecond)
		require.NoError(t, standby.Kill())
	}
	require.Zero(t, b.proxy.Stats().Cancels)
	b.check(t, total, 3*n, nil)
	t.Logf("faults: missing standby: %v", total)
}

// Whoever ends a session that waits for its standby makes its COMMIT visible before it is replicated. The call that lost
// it so finds its record and does not tell of it before the record is replicated.
func TestFault_BrokenWaitForStandbyIsNoSuccess(t *testing.T) {
	t.Parallel()
	b, patient, standby := newWaitingBranch(t)
	total := &tally{}
	n := scaled(1, 5)
	ctx := t.Context()
	for round := range n {
		for _, comesBack := range []bool{false, true} {
			key := fmt.Sprintf("r%d, %v", round, comesBack)
			runner := b.runner
			if comesBack {
				runner = patient
			}
			call := make(chan answer, 1)
			go func() {
				res, err := b.place(ctx, runner, key)
				call <- answer{res, err}
			}()
			b.breakWait(t)
			require.Eventually(t, func() bool { return b.records(t, key) == 1 }, 10*time.Second, time.Millisecond)
			if comesBack {
				require.NoError(t, standby.Start(ctx))
			}
			a := <-call
			if comesBack {
				require.NoError(t, a.err)
				require.False(t, a.res.Replayed)
				require.NoError(t, standby.Kill())
			} else {
				require.ErrorIs(t, a.err, idempotency.ErrOutcomeUnknown)
			}
			total.kills, total.resolved = total.kills+1, total.resolved+1
		}
	}
	require.Zero(t, b.proxy.Stats().Cancels)
	require.NoError(t, standby.Start(ctx))
	for round := range n {
		require.True(t, b.placeUntilFree(t, b.runner, fmt.Sprintf("r%d, false", round)).Replayed)
	}
	b.check(t, total, 2*n, nil)
	t.Logf("faults: broken waits: %v", total)
}

// breakWait terminates the session that waits for the standby.
func (b *branch) breakWait(t *testing.T) {
	t.Helper()
	require.Eventually(t, func() bool {
		var ended bool
		err := b.direct.QueryRow(t.Context(), `SELECT COALESCE(bool_or(pg_terminate_backend(pid)), false) FROM pg_stat_activity
			WHERE wait_event = 'SyncRep' AND application_name = 'shop' AND query = 'COMMIT'`).Scan(&ended)
		return err == nil && ended
	}, 10*time.Second, time.Millisecond)
}

// Promise D11: only a primary is asked.
func TestFault_StandbyIsRefused(t *testing.T) {
	t.Parallel()
	b := newBranch(t, options{})
	ctx := t.Context()
	res, err := b.place(ctx, b.runner, "k")
	require.NoError(t, err)
	standby := b.standby(t)
	require.NoError(t, standby.CatchUp(ctx, b.primary))
	refused := func(t *testing.T, err error) {
		t.Helper()
		require.ErrorIs(t, err, idempotency.ErrReadOnly)
		require.ErrorContains(t, err, "(a standby), connect to the primary")
	}

	pool, err := connect(ctx, standby.URL(), options{})
	require.NoError(t, err)
	t.Cleanup(pool.Close)
	r, err := txn.New(pool, &txn.Config{Operations: []idempotency.Operation{create}})
	require.NoError(t, err)
	refused(t, r.Check(ctx))
	for _, key := range []string{"k", "new"} { // also what it could replay
		_, err = b.place(ctx, r, key)
		refused(t, err)
	}
	err = pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error {
		req, err := request("new")
		if err != nil {
			return err
		}
		_, err = txn.WithIdempotencyTx(ctx, r, tx, req, func(ctx context.Context, tx pgx.Tx) (order, error) {
			return insertOrder(ctx, tx, "new")
		})
		return err
	})
	refused(t, err)

	// A runner that worked on the primary, and is led to the standby by its address.
	require.NoError(t, b.proxy.Retarget(standby.URL()))
	b.proxy.Down()
	b.proxy.Up()
	for _, key := range []string{"k", "new"} {
		_, err = b.place(ctx, b.runner, key)
		refused(t, err)
		_, err = b.retry(ctx, key)
		refused(t, err)
	}
	refused(t, b.runner.Check(ctx))

	// The standby becomes the primary: the same runners go on.
	require.NoError(t, b.primary.Kill())
	require.NoError(t, standby.Promote(ctx))
	b.direct = b.pool(t, standby)
	again, err := b.retry(ctx, "k")
	require.NoError(t, err)
	require.True(t, again.Replayed)
	require.Equal(t, res.Value, again.Value)
	_, err = b.place(ctx, r, "new")
	require.NoError(t, err)
	b.check(t, &tally{}, 2, nil)
}

// retry says that it is one, which is answered by a plain read where that can answer.
func (b *branch) retry(ctx context.Context, key string) (txn.Result[order], error) {
	req, err := request(key)
	if err != nil {
		return txn.Result[order]{}, err
	}
	req.Retry = true
	return txn.WithIdempotency(ctx, b.runner, req, func(ctx context.Context, tx pgx.Tx) (order, error) {
		return insertOrder(ctx, tx, key)
	})
}

// asked is a Resolver that knows that everything was paid.
type asked struct{ then func() }

func (a asked) Ask(context.Context, idempotency.Record, []idempotency.Step) (idempotency.Resolution, error) {
	a.then()
	return idempotency.Resolution{Outcome: idempotency.OutcomeSucceeded, ResultType: "json/1", Result: []byte("1")}, nil
}

func (asked) Commit(ctx context.Context, tx pgx.Tx, r idempotency.Record, _ idempotency.Resolution) error {
	_, err := insertOrder(ctx, tx, r.Key.Value())
	return err
}

// What a compensator commits nobody may see before it is replicated: not an outcome that a caller would be told, and not
// that a record has another owner.
func TestFault_CompensatorsCommitWaitsForMissingStandby(t *testing.T) {
	t.Parallel()
	b := newBranch(t, options{})
	ctx := t.Context()
	standby := b.standby(t)
	require.NoError(t, standby.Kill())
	resolver := asked{then: func() { b.synchronous(t, standby) }} // between the takeover's commit and the outcome's
	operations := []idempotency.Operation{
		{Name: "rerun", Takeover: idempotency.TakeoverRerun}, {Name: "resolve", Resolver: resolver},
	}
	c, err := compensator.New(b.shop.pool, &compensator.Config{Operations: operations, Timeout: 5 * time.Second})
	require.NoError(t, err)
	own, err := pgx.Connect(ctx, b.primary.URL())
	require.NoError(t, err)
	defer func() { require.NoError(t, own.Close(context.WithoutCancel(ctx))) }()
	_, err = own.Exec(ctx, `SET synchronous_commit = local`) // it does not wait
	require.NoError(t, err)
	store := idempotency.NewStore(pgx.QueryExecModeCacheStatement)
	outcomes := []struct {
		key   string
		op    idempotency.Operation
		state idempotency.State
	}{{"paid", operations[1], idempotency.StateSuccess}, {"again", operations[0], idempotency.StateFailed}}
	for _, of := range outcomes {
		key, err := of.op.Key("acme", of.key)
		require.NoError(t, err)
		_, err = store.AcquireLease(ctx, own, &idempotency.LeaseRequest{
			Request:      idempotency.Request{Key: key, Fingerprint: idempotency.FingerprintBytes([]byte(of.key))},
			AttemptToken: idempotency.NewAttemptToken(), Lease: time.Hour, Takeover: of.op.WithDefaults().Takeover,
		})
		require.NoError(t, err)
	}
	const ended = `SELECT count(*) FROM idempotency.records WHERE key = $1 AND state = $2`
	for i, of := range outcomes {
		_, err = own.Exec(ctx, `UPDATE idempotency.records SET lease_expires_at = statement_timestamp() - interval '1 s' WHERE key = $1`, of.key)
		require.NoError(t, err)
		_, err = c.RunOnce(ctx)
		require.ErrorIs(t, err, context.DeadlineExceeded)
		require.Equal(t, i+1, b.count(t, waiting))
		require.Zero(t, b.proxy.Stats().Cancels)
		require.Zero(t, b.count(t, ended, of.key, of.state), "told before it is replicated")
	}
	require.NoError(t, standby.Start(ctx))
	for _, of := range outcomes {
		require.Eventually(t, func() bool { return b.count(t, ended, of.key, of.state) == 1 }, 10*time.Second, 10*time.Millisecond)
	}
}
