package txn_test

import (
	"context"
	"errors"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/pgonce/pgonce/idempotency"
	"github.com/pgonce/pgonce/txn"
)

func TestPolicy_OffExecutesAndLogs(t *testing.T) {
	t.Parallel()
	p := newPolicyShop(t, func(c *txn.Config) { c.TraceID = func(context.Context) string { return "trace-1" } })
	recorded := p.ok(t, "before")
	p.policy(t, "all", "", "off")
	off := eventsOf[idempotency.PolicyChanged](&p.events)
	require.Len(t, off, 1)
	require.Equal(t, idempotency.EnforcementOff, off[0].Policy.Enforcement)
	require.Equal(t, idempotency.Blame{Actor: "ada", Reason: "ticket 4711"}, off[0].Policy.Blame)

	// What is recorded is replayed, and answers other payloads too.
	again := p.ok(t, "before")
	require.True(t, again.Replayed)
	require.Equal(t, recorded.Value, again.Value)
	_, err := p.place(t.Context(), request(t, "before", "other"))
	require.ErrorIs(t, err, idempotency.ErrMismatch)
	require.Empty(t, p.bypasses(t, "before"))

	// What is not is executed, and none is written.
	first, second := p.ok(t, "k"), p.ok(t, "k")
	require.False(t, first.Replayed)
	require.False(t, second.Replayed)
	require.NotEqual(t, first.Value.ID, second.Value.ID)
	require.Equal(t, "k", second.Value.Key)
	require.Zero(t, second.Record.Fence)
	require.Equal(t, 2, p.orders(t, "k"))
	p.requireUnrecorded(t, "k")
	require.Equal(t, []string{"off RUN SUCCESS", "off RUN SUCCESS"}, p.bypasses(t, "k"))
	told := eventsOf[idempotency.Bypassed](&p.events)
	require.Len(t, told, 2)
	require.Equal(t, idempotency.WouldRun, told[0].WouldBe)
	require.Equal(t, idempotency.EnforcementOff, told[0].Enforcement)
	require.Equal(t, 1, told[0].Runs)

	// With what a person needs to find out.
	var who, why, trace string
	require.NoError(t, p.direct.QueryRow(t.Context(), `SELECT c.actor, c.reason, b.trace_id FROM idempotency.bypasses AS b
		JOIN idempotency.policy_changes AS c ON c.id = b.policy_change LIMIT 1`).Scan(&who, &why, &trace))
	require.Equal(t, []string{"ada", "ticket 4711", "trace-1"}, []string{who, why, trace})
}

func TestPolicy_OffLeavesNothingOfWhatIsRolledBack(t *testing.T) {
	t.Parallel()
	p := newPolicyShop(t)
	p.policy(t, "operation", "order.create", "off")
	broken := errors.New("broken")
	run := func(fail func() error) error {
		_, err := txn.WithIdempotency(t.Context(), p.runner, request(t, "k", "{}"), func(ctx context.Context, tx pgx.Tx) (order, error) {
			o, err := insertOrder(ctx, tx, "k")
			if err != nil {
				return o, err
			}
			return o, fail()
		})
		return err
	}
	require.ErrorIs(t, run(func() error { return broken }), broken)
	require.Panics(t, func() { _ = run(func() error { panic("broken") }) })
	require.Zero(t, p.orders(t, "k"))
	require.Empty(t, p.bypasses(t, "k"))

	// A Final was told to somebody: that is kept, its writes are not.
	var failed *idempotency.FailedError
	require.ErrorAs(t, run(func() error { return txn.Final("out_of_stock", broken) }), &failed)
	require.Equal(t, "out_of_stock", failed.Code)
	require.ErrorIs(t, failed, broken)
	require.Zero(t, p.orders(t, "k"))
	require.Equal(t, []string{"off RUN FAILED"}, p.bypasses(t, "k"))
	p.requireUnrecorded(t, "k")
}

// What the switch is for: records themselves make calls fail.
func TestPolicy_OffGoesOnWhereRecordsRefuseInserts(t *testing.T) {
	t.Parallel()
	p := newPolicyShop(t)
	p.ok(t, "before")
	p.exec(t, `CREATE FUNCTION broken() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RAISE EXCEPTION 'disk is full' USING ERRCODE = 'disk_full'; END $$`)
	p.exec(t, `CREATE TRIGGER broken BEFORE INSERT OR UPDATE ON idempotency.records FOR EACH ROW EXECUTE FUNCTION broken()`)
	_, err := p.place(t.Context(), request(t, "k", "{}"))
	require.ErrorContains(t, err, "disk is full")
	p.policy(t, "all", "", "off")
	p.ok(t, "k")
	require.True(t, p.ok(t, "before").Replayed)
	require.Equal(t, 1, p.orders(t, "k"))

	// But nothing is done without a log of it.
	p.exec(t, `CREATE TRIGGER broken BEFORE INSERT ON idempotency.bypasses FOR EACH ROW EXECUTE FUNCTION broken()`)
	_, err = p.place(t.Context(), request(t, "unlogged", "{}"))
	require.ErrorContains(t, err, "disk is full")
	require.Zero(t, p.orders(t, "unlogged"))
}

// What a function has committed by itself is known of, and enforced later.
func TestPolicy_OffNotesATransactionThatTheFunctionEnded(t *testing.T) {
	t.Parallel()
	p := newPolicyShop(t)
	p.policy(t, "all", "", "off")
	_, err := txn.WithIdempotency(t.Context(), p.runner, request(t, "k", "{}"), func(ctx context.Context, tx pgx.Tx) (order, error) {
		o, err := insertOrder(ctx, tx, "k")
		if err == nil {
			_, err = tx.Exec(ctx, "COMMIT")
		}
		return o, err
	})
	require.ErrorIs(t, err, idempotency.ErrTransactionEnded)
	require.Equal(t, 1, p.orders(t, "k"))
	require.Equal(t, []string{"off RUN ENDED"}, p.bypasses(t, "k"))
	p.policy(t, "all", "", "enforce")
	_, err = p.place(t.Context(), request(t, "k", "{}"))
	require.ErrorIs(t, err, idempotency.ErrResultExpired)
}

// A key that was executed while the switch was off is not executed again once it is on.
func TestPolicy_EnforceKnowsWhatOffLetThrough(t *testing.T) {
	t.Parallel()
	for _, level := range []pgx.TxIsoLevel{pgx.ReadCommitted, pgx.RepeatableRead, pgx.Serializable} {
		t.Run(string(level), func(t *testing.T) {
			t.Parallel()
			p := newPolicyShop(t, func(c *txn.Config) { c.Isolation = level })
			p.policy(t, "prefix", "order.", "off")
			p.ok(t, "k")
			p.policy(t, "prefix", "order.", "enforce")
			for range 2 {
				_, err := p.place(t.Context(), request(t, "k", "{}"))
				require.ErrorIs(t, err, idempotency.ErrResultExpired)
				require.ErrorContains(t, err, "a person must reconcile it")
				_, err = p.place(t.Context(), request(t, "k", "other"))
				require.ErrorIs(t, err, idempotency.ErrMismatch)
				outcomes, err := txn.WithIdempotencyMany(t.Context(), p.runner, []idempotency.Request{request(t, "k", "{}"), request(t, "new", "{}")},
					func(ctx context.Context, tx pgx.Tx, _ int) (order, error) { return insertOrder(ctx, tx, "new") })
				require.NoError(t, err)
				require.ErrorIs(t, outcomes[0].Err, idempotency.ErrResultExpired)
				require.NoError(t, outcomes[1].Err)
				require.NoError(t, p.inTx(t, request(t, "other", "{}"), true))
				require.ErrorIs(t, p.inTx(t, request(t, "k", "{}"), true), idempotency.ErrResultExpired)
				p.forgetWeakPolicies(t) // and once nothing but the row tells
			}
			require.Equal(t, 1, p.orders(t, "k"))
			require.Equal(t, 1, p.orders(t, "new"))

			// As long as its record would have been kept, or until a person says otherwise.
			p.exec(t, `UPDATE idempotency.bypasses SET expires_at = expires_at - interval '73 hours'`)
			require.False(t, p.ok(t, "k").Replayed)
			require.True(t, p.ok(t, "k").Replayed)
		})
	}
}

// A process that is late, or a call that takes long, commits without a record although this process enforces already.
func TestPolicy_EnforceKnowsOfThoseThatAreLate(t *testing.T) {
	t.Parallel()
	for name, change := range map[string]string{
		"off to enforce":    `UPDATE idempotency.policies SET enforcement = 'enforce'`,
		"a narrower policy": `INSERT INTO idempotency.policies (scope, name) VALUES ('operation', 'order.create')`,
		"a removed policy":  `DELETE FROM idempotency.policies`,
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			p := newPolicyShop(t)
			p.policy(t, "prefix", "order.", "off")
			late := (&policyShop{shop: &shop{pool: p.pool, direct: p.direct}}).withRunner(t)
			_, err := late.policies.RunOnce(t.Context())
			require.NoError(t, err)
			p.exec(t, change)
			_, err = p.policies.RunOnce(t.Context())
			require.NoError(t, err)
			late.ok(t, "k")
			_, err = p.place(t.Context(), request(t, "k", "{}"))
			require.ErrorIs(t, err, idempotency.ErrResultExpired)
			require.Equal(t, 1, p.orders(t, "k"))
			require.True(t, p.ok(t, "new").Record.Fence > 0)
			require.True(t, late.ok(t, "new").Replayed, "and what one of them has recorded, the others replay")
		})
	}
}

func TestPolicy_ShadowExecutesAndLogsWhatItWouldReplay(t *testing.T) {
	t.Parallel()
	p := newPolicyShop(t)
	p.policy(t, "operation", "order.create", "shadow")
	first := p.ok(t, "k")
	require.NotZero(t, first.Record.Fence, "the first outcome is recorded")
	require.Empty(t, p.bypasses(t, "k"))
	before, _ := p.record(t, request(t, "k", "{}"))
	second := p.ok(t, "k")
	require.False(t, second.Replayed)
	require.NotEqual(t, first.Value.ID, second.Value.ID, "the caller gets what was executed for it")
	_, err := p.place(t.Context(), request(t, "k", "other"))
	require.NoError(t, err)
	retry := request(t, "k", "{}")
	retry.Retry = true
	_, err = p.place(t.Context(), retry)
	require.NoError(t, err)
	require.Equal(t, 4, p.orders(t, "k"))
	require.Equal(t, []string{"shadow REPLAY SUCCESS", "shadow MISMATCH SUCCESS", "shadow REPLAY SUCCESS"}, p.bypasses(t, "k"))
	after, _ := p.record(t, request(t, "k", "{}"))
	before.Expired, after.Expired = false, false
	require.Equal(t, before, after, "the record stays as it is")
	require.Len(t, eventsOf[idempotency.Bypassed](&p.events), 3)
	require.Empty(t, eventsOf[idempotency.Replayed](&p.events))

	p.policy(t, "operation", "order.create", "enforce")
	replayed := p.ok(t, "k")
	require.True(t, replayed.Replayed)
	require.Equal(t, first.Value, replayed.Value, "the first is replayed")
}

// Nobody is held up in shadow, and a call beside a running one is executed.
func TestPolicy_ShadowDoesNotWait(t *testing.T) {
	t.Parallel()
	p := newPolicyShop(t)
	p.policy(t, "all", "", "shadow")
	inside, leave, done := make(chan struct{}), make(chan struct{}), make(chan error, 1)
	go func() {
		_, err := txn.WithIdempotency(t.Context(), p.runner, request(t, "k", "{}"), func(ctx context.Context, tx pgx.Tx) (order, error) {
			close(inside)
			<-leave
			return insertOrder(ctx, tx, "k")
		})
		done <- err
	}()
	<-inside
	p.ok(t, "k")
	require.NoError(t, p.inTx(t, request(t, "k", "{}"), true))
	outcomes, err := txn.WithIdempotencyMany(t.Context(), p.runner, []idempotency.Request{request(t, "k", "{}"), request(t, "k", "{}")},
		func(ctx context.Context, tx pgx.Tx, _ int) (order, error) { return insertOrder(ctx, tx, "k") })
	require.NoError(t, err)
	require.NoError(t, outcomes[0].Err)
	require.NoError(t, outcomes[1].Err)
	require.Equal(t, 4, p.orders(t, "k"))
	close(leave)
	require.NoError(t, <-done)
	require.Equal(t, 5, p.orders(t, "k"))
	require.Equal(t, []string{"shadow IN_PROGRESS SUCCESS", "shadow IN_PROGRESS SUCCESS", "shadow IN_PROGRESS SUCCESS", "shadow IN_PROGRESS SUCCESS"},
		p.bypasses(t, "k"))
	_, found := p.record(t, request(t, "k", "{}"))
	require.True(t, found, "the first outcome is that of the one who had the key")
}

// While off, what runs is not run beside.
func TestPolicy_OffStillWaitsForWhatRuns(t *testing.T) {
	t.Parallel()
	p := newPolicyShop(t)
	inside, leave, done := make(chan struct{}), make(chan struct{}), make(chan error, 1)
	go func() { // began under enforce, and keeps it
		_, err := txn.WithIdempotency(t.Context(), p.runner, request(t, "k", "{}"), func(ctx context.Context, tx pgx.Tx) (order, error) {
			close(inside)
			<-leave
			return insertOrder(ctx, tx, "k")
		})
		done <- err
	}()
	<-inside
	p.policy(t, "all", "", "off")
	p.exec(t, `UPDATE idempotency.policies SET wait = '0', actor = 'ada', reason = 'x'`)
	_, err := p.policies.RunOnce(t.Context())
	require.NoError(t, err)
	_, err = p.place(t.Context(), request(t, "k", "{}"))
	require.ErrorIs(t, err, idempotency.ErrInProgress)
	close(leave)
	require.NoError(t, <-done)
	require.True(t, p.ok(t, "k").Replayed, "it recorded, since it began before the switch")
	require.Equal(t, 1, p.orders(t, "k"))
	require.Empty(t, p.bypasses(t, "k"))
}

// First call and retry are on the same side, in every process, and a share that grows takes nobody out.
func TestPolicy_PercentageIsByKey(t *testing.T) {
	t.Parallel()
	p := newPolicyShop(t)
	sides := map[int]map[string]bool{}
	keys := make([]string, 400)
	for i := range keys {
		keys[i] = time.Duration(i).String()
	}
	for _, share := range []int{0, 5, 50, 100} {
		p.policy(t, "operation", "order.create", "enforce")
		p.exec(t, `UPDATE idempotency.policies SET percentage = $1`, share)
		_, err := p.policies.RunOnce(t.Context())
		require.NoError(t, err)
		sides[share] = map[string]bool{}
		for _, key := range keys {
			if p.policies.For(request(t, key, "{}").Key).Enforcement == idempotency.EnforcementEnforce {
				sides[share][key] = true
			}
		}
	}
	require.Empty(t, sides[0])
	require.Len(t, sides[100], len(keys))
	require.InDelta(t, 20, len(sides[5]), 18)
	require.InDelta(t, 200, len(sides[50]), 60)
	for key := range sides[5] {
		require.True(t, sides[50][key])
	}

	p.exec(t, `UPDATE idempotency.policies SET percentage = 50`)
	_, err := p.policies.RunOnce(t.Context())
	require.NoError(t, err)
	for _, key := range keys[:40] {
		first, second := p.ok(t, key), p.ok(t, key)
		require.False(t, first.Replayed)
		require.NotZero(t, first.Record.Fence)
		require.Equal(t, sides[50][key], second.Replayed)
		logged := []string{"shadow REPLAY SUCCESS"}
		if sides[50][key] {
			logged = []string{}
		}
		require.Equal(t, logged, p.bypasses(t, key))
	}
}
