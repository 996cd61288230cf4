package faultsuite

import (
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/pgonce/pgonce/idempotency"
	"github.com/pgonce/pgonce/internal/devstack"
	"github.com/pgonce/pgonce/internal/invariant"
	"github.com/pgonce/pgonce/internal/pgproxy"
	"github.com/pgonce/pgonce/txn"
)

// An asynchronous standby takes over without the last of what was acknowledged. That is lost whole, and the fences that it
// had are handed out again, which confuses nobody.
func TestFault_AsynchronousFailoverLosesRecordsWithTheirOrders(t *testing.T) {
	t.Parallel()
	total := &tally{}
	gone := 0
	for range scaled(1, 5) {
		b := newBranch(t, options{config: func(c *txn.Config) { c.CommitTimeout = 2 * time.Minute }})
		f := &failover{branch: b, standby: b.standby(t)}
		gone += f.run(t, total, scaled(150, 400))
		b.outlivesItsSequence(t)
	}
	t.Logf("faults: asynchronous failover: %v, acknowledged and gone %d", total, gone)
}

type failover struct {
	*branch
	standby *devstack.Node
	before  map[string]position // on the dead primary
	rival   txn.Result[order]   // of another process, for the key of the call in flight
}

// position is what a record is told apart by.
type position struct {
	fence int64
	token idempotency.AttemptToken
}

func (b *branch) positions(t *testing.T) map[string]position {
	t.Helper()
	rows, err := b.direct.Query(t.Context(), "SELECT key, fence, attempt_token FROM idempotency.records")
	require.NoError(t, err)
	all := map[string]position{}
	var key string
	var fence int64
	var token []byte
	_, err = pgx.ForEachRow(rows, []any{&key, &fence, &token}, func() error {
		all[key] = position{fence, idempotency.AttemptToken(token)}
		return nil
	})
	require.NoError(t, err)
	return all
}

// run returns how many acknowledged keys are gone.
func (f *failover) run(t *testing.T, total *tally, keys int) (gone int) {
	t.Helper()
	ctx := t.Context()
	runners := []*txn.Runner{f.runner, f.another(t)}
	kept, late := names("kept-", 50), names("late-", keys)
	f.storm(t, runners, kept)
	require.NoError(t, f.standby.CatchUp(ctx, f.primary))
	require.NoError(t, f.standby.PauseReceiver(ctx))
	f.storm(t, runners, late) // many more than the 32 numbers that a sequence writes ahead

	// One call is in flight over the failover: it has committed on the old primary and lost the answer.
	f.events.take()
	f.events.on(func(e idempotency.Event) {
		if _, unknown := e.(idempotency.CommitUnknown); unknown {
			f.events.on(nil)
			gone = f.takeOver(t, late) // before it can ask
		}
	})
	f.proxy.Next(pgproxy.Rule{Do: pgproxy.CutAfter})
	res, err := f.place(ctx, f.runner, "in flight")
	require.NoError(t, err)
	require.True(t, res.Replayed, "the record with its fence is another attempt's")
	require.Equal(t, f.rival.Value, res.Value)
	require.False(t, only[idempotency.CommitResolved](t, f.events.take()).Committed)
	total.cuts, total.kills, total.resolved = total.cuts+1, total.kills+2, total.resolved+1

	f.storm(t, runners, append(kept, late...)) // replayed, or run again where it was lost
	f.check(t, total, len(kept)+len(late)+1, nil)
	return gone
}

// takeOver lets the standby become the primary and places some orders there, the one of the call in flight too.
func (f *failover) takeOver(t *testing.T, late []string) (gone int) {
	t.Helper()
	ctx := t.Context()
	f.before = f.positions(t)
	require.NoError(t, f.primary.Kill())
	require.NoError(t, f.standby.Kill()) // and with it what its receiver had not read
	require.NoError(t, f.standby.Start(ctx))
	require.NoError(t, f.standby.Promote(ctx))
	f.moveTo(t, f.standby)

	for key, p := range f.positions(t) {
		require.Equal(t, f.before[key], p, key)
		delete(f.before, key)
	}
	lost := f.before
	inFlight, found := lost["in flight"]
	require.True(t, found)
	f.forget(func(told invariant.Told) bool { _, isLost := lost[told.Key]; return isLost })
	f.check(t, &tally{}, 50, nil) // also: no order without its record, no record without its order

	other := f.anotherAt(t, f.standby.URL())
	again := map[int64]bool{}
	for _, p := range lost {
		again[p.fence] = false
	}
	for _, key := range late[len(late)-50:] {
		_, isLost := lost[key]
		require.True(t, isLost, key)
		res, err := f.place(ctx, other, key)
		require.NoError(t, err)
		require.False(t, res.Replayed, "what was lost runs again")
		if _, had := again[res.Record.Fence]; had {
			again[res.Record.Fence] = true
		}
	}
	twice := 0
	for _, handedOut := range again {
		if handedOut {
			twice++
		}
	}
	require.Positive(t, twice, "fences of lost records are handed out again")

	// Until the next fence is the one that the call in flight had.
	var last int64
	require.NoError(t, f.direct.QueryRow(ctx, "SELECT last_value FROM idempotency.fence").Scan(&last))
	require.Less(t, last, inFlight.fence)
	_, err := f.direct.Exec(ctx, "SELECT nextval('idempotency.fence') FROM generate_series($1::bigint, $2)", last+2, inFlight.fence)
	require.NoError(t, err)
	f.rival, err = f.place(ctx, other, "in flight")
	require.NoError(t, err)
	require.False(t, f.rival.Replayed)
	require.Equal(t, inFlight.fence, f.rival.Record.Fence)
	require.NotEqual(t, inFlight.token, f.rival.Record.AttemptToken)
	return len(lost) - 1 // the call in flight was told nothing yet
}

// forget takes out of the ledger what clients were told of keys that are lost.
func (l *ledger) forget(lost func(invariant.Told) bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	var left []invariant.Told
	for _, told := range l.told {
		if !lost(told) {
			left = append(left, told)
		}
	}
	l.told = left
}

// outlivesItsSequence: a logical replica has the records and not the sequence. A key that is used again there, after its
// retention, still gets a higher fence.
func (b *branch) outlivesItsSequence(t *testing.T) {
	t.Helper()
	ctx := t.Context()
	old := b.positions(t)["kept-0"]
	_, err := b.direct.Exec(ctx, `UPDATE idempotency.records SET expires_at = statement_timestamp() WHERE key = 'kept-0'`)
	require.NoError(t, err)
	_, err = b.direct.Exec(ctx, `SELECT setval('idempotency.fence', 1)`)
	require.NoError(t, err)
	res, err := b.place(ctx, b.runner, "kept-0")
	require.NoError(t, err)
	require.False(t, res.Replayed)
	require.Equal(t, old.fence+1, res.Record.Fence)
	require.Equal(t, old.fence+1, b.positions(t)["kept-0"].fence)
}
