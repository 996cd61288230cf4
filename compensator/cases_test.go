package compensator_test

import (
	"context"
	"fmt"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/pgonce/pgonce/compensator"
	"github.com/pgonce/pgonce/idempotency"
)

// evidence is a Resolver that asks the service's own rows: they were committed by themselves, before their record was
// completed.
type evidence struct{ shop *shop }

func (e *evidence) Ask(ctx context.Context, r idempotency.Record, _ []idempotency.Step) (found idempotency.Resolution, err error) {
	var there bool
	err = e.shop.pool.QueryRow(ctx, `SELECT EXISTS (SELECT FROM paid WHERE key = $1)`, r.Key.Value()).Scan(&there)
	if err != nil || !there {
		return found, err
	}
	return idempotency.Resolution{Outcome: idempotency.OutcomeSucceeded, ResultType: "json/1", Result: []byte(`"paid"`)}, nil
}

func (*evidence) Commit(context.Context, pgx.Tx, idempotency.Record, idempotency.Resolution) error {
	return nil
}

// The business rows are committed, and the record's completion failed: the key is never freed. Who asks for the evidence
// completes it, everybody else leaves it to a person. In the transactional mode this state cannot be: rows and record are one
// commit.
func TestCase_S09_CommittedWorkIsNeverFreed(t *testing.T) {
	t.Parallel()
	s := newShop(t)
	s.ops = append(s.ops, idempotency.Operation{Name: "evident", Resolver: &evidence{s}})
	for _, operation := range []string{"evident", "manual"} {
		rule := idempotency.TakeoverManual
		if operation == "evident" {
			rule = idempotency.TakeoverResolve
		}
		s.abandon(t, operation, operation+"-done", rule)
		s.abandon(t, operation, operation+"-not", rule)
		s.exec(t, `INSERT INTO paid (key) VALUES ($1)`, operation+"-done")
	}
	for range 2 {
		_, err := s.open(t).RunOnce(t.Context())
		require.NoError(t, err)
		require.Equal(t, "SUCCESS", s.state(t, "evident-done"))
		for _, value := range []string{"evident-not", "manual-done", "manual-not"} {
			require.Equal(t, "PROCESSING", s.state(t, value), value)
		}
	}
	key, err := idempotency.NewKey("acme", "evident", "evident-done")
	require.NoError(t, err)
	r, found, err := s.store.LookupIn(t.Context(), s.pool, key)
	require.NoError(t, err)
	require.True(t, found)
	require.Equal(t, `"paid"`, string(r.Result))
	require.Equal(t, 1, s.count(t, `SELECT count(*) FROM paid WHERE key = 'evident-done'`))
}

// Ten replicas that start together do what one does, once.
func TestCase_W10_TenReplicasAreOne(t *testing.T) {
	t.Parallel()
	s := newShop(t)
	const records = 200
	for i := range records {
		s.abandon(t, "rerun", fmt.Sprint("r", i), idempotency.TakeoverRerun)
		value := fmt.Sprint("p", i)
		s.gateway.says[value] = idempotency.Resolution{Outcome: idempotency.OutcomeSucceeded, ResultType: "json/1", Result: []byte(`{}`)}
		s.abandon(t, "resolve", value, idempotency.TakeoverResolve)
	}
	var group sync.WaitGroup
	var mu sync.Mutex
	var all compensator.Report
	for range 10 {
		c := s.open(t)
		group.Go(func() {
			report, err := c.RunOnce(t.Context())
			if err != nil {
				t.Error(err)
			}
			mu.Lock()
			defer mu.Unlock()
			all.Rescued += report.Rescued
			all.Resolved += report.Resolved
		})
	}
	group.Wait()
	require.Equal(t, records, all.Rescued)
	require.Equal(t, records, all.Resolved)
	require.Equal(t, records, s.count(t, `SELECT count(*) FROM paid`))
	require.Equal(t, 2*records, s.count(t, `SELECT count(*) FROM idempotency.attempts WHERE event = 'RESCUED'`))
	require.Equal(t, 2*records, s.count(t, `SELECT count(DISTINCT key) FROM idempotency.attempts WHERE event = 'RESCUED'`))
}

// One that is ended in the middle of its work finishes what it has begun, and the rest is for others.
func TestCase_W10_EndedInTheMiddle(t *testing.T) {
	t.Parallel()
	s := newShop(t)
	const records, begun = 60, 5
	for i := range records {
		value := fmt.Sprint("p", i)
		s.gateway.says[value] = idempotency.Resolution{Outcome: idempotency.OutcomeSucceeded, ResultType: "json/1", Result: []byte(`{}`)}
		s.abandon(t, "resolve", value, idempotency.TakeoverResolve)
	}
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	var commits atomic.Int64
	s.gateway.hangs = begun
	s.gateway.inCommit = func() {
		if commits.Add(1) == begun { // in the middle of the last one, and of an answer that does not come
			cancel()
		}
	}
	first, err := s.open(t, func(c *compensator.Config) { c.Workers = 2 }).RunOnce(ctx)
	require.ErrorIs(t, err, context.Canceled)
	require.Equal(t, begun, first.Resolved)
	require.Equal(t, first.Resolved, s.count(t, `SELECT count(*) FROM paid`), "business rows and record are one commit")
	require.Equal(t, first.Resolved, s.count(t, `SELECT count(*) FROM idempotency.records WHERE state = 'SUCCESS'`))
	s.exec(t, `UPDATE idempotency.records SET lease_expires_at = statement_timestamp() - interval '1 s' WHERE state = 'PROCESSING'`)
	s.gateway.hangs = 0
	second, err := s.open(t).RunOnce(t.Context())
	require.NoError(t, err)
	require.Equal(t, records, first.Resolved+second.Resolved)
	require.Equal(t, records, s.count(t, `SELECT count(*) FROM paid`))
}

// Replicas that were started together do not come together for ever.
func TestCase_W10_PassesAreJittered(t *testing.T) {
	t.Parallel()
	seen := map[time.Duration]bool{}
	for range 100 {
		pause := compensator.Pause(time.Minute)
		require.InDelta(t, time.Minute, pause, float64(6*time.Second))
		seen[pause] = true
	}
	require.Greater(t, len(seen), 50)
}
