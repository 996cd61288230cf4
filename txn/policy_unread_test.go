package txn_test

import (
	"context"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgonce/pgonce/idempotency"
	"github.com/pgonce/pgonce/txn"
)

// A process that has just been started knows nothing yet, also not that a kill switch was on.
func TestPolicy_BeforeTheFirstReadNothingIsDoneAgain(t *testing.T) {
	t.Parallel()
	p := newPolicyShop(t)
	p.policy(t, "all", "", "off")
	p.ok(t, "k")
	p.policy(t, "all", "", "enforce")

	young := (&policyShop{shop: &shop{pool: p.pool, direct: p.direct}}).withRunner(t)
	_, err := young.place(t.Context(), request(t, "k", "{}"))
	require.ErrorIs(t, err, idempotency.ErrResultExpired)
	require.Equal(t, 1, p.orders(t, "k"))
	require.False(t, young.ok(t, "new").Replayed)
	require.True(t, young.ok(t, "new").Replayed)
}

// A role that was never given the rights on policies works as if there were none.
func TestPolicy_WithoutRightsEverythingIsEnforced(t *testing.T) {
	t.Parallel()
	s := newShop(t)
	s.exec(t, `CREATE ROLE policy_stranger; GRANT USAGE ON SCHEMA idempotency TO policy_stranger; GRANT USAGE ON SEQUENCE idempotency.fence TO policy_stranger;
		GRANT SELECT, INSERT, UPDATE ON idempotency.records TO policy_stranger; GRANT SELECT, INSERT ON orders TO policy_stranger`, pgx.QueryExecModeSimpleProtocol)
	p := (&policyShop{shop: &shop{pool: poolOfRole(t, s, "policy_stranger"), direct: s.direct}}).withRunner(t)
	_, err := p.policies.RunOnce(t.Context())
	require.ErrorContains(t, err, "permission denied")
	writePolicy(t, p.shop, "all", "", "off")
	require.False(t, p.ok(t, "k").Replayed)
	require.True(t, p.ok(t, "k").Replayed)
}

// A duplicate that has waited since before the switch looks at what the process has learnt meanwhile.
func TestPolicy_WhoWaitsWhileItIsSwitchedOffDoesNothingAgain(t *testing.T) {
	t.Parallel()
	var lent atomic.Int64
	s := newShopWith(t, func(cfg *pgxpool.Config) {
		atLeastConns(4)(cfg)
		cfg.PrepareConn = func(context.Context, *pgx.Conn) (bool, error) { lent.Add(1); return true, nil }
	})
	patient := func(c *txn.Config) {
		waiting(time.Minute)(c)
		c.Isolation = pgx.ReadCommitted // in the others the snapshot may be older than the lock
	}
	early, late := (&policyShop{shop: s}).withRunner(t, patient), (&policyShop{shop: &shop{pool: s.pool, direct: s.direct}}).withRunner(t, patient)
	_, err := late.policies.RunOnce(t.Context())
	require.NoError(t, err)
	early.policy(t, "all", "", "off")
	answered := make(chan error, 1)
	_, err = txn.WithIdempotency(t.Context(), early.runner, request(t, "k", "{}"), func(ctx context.Context, tx pgx.Tx) (order, error) {
		before := lent.Load()
		go func() { //nolint:contextcheck // another caller
			_, err := late.place(context.WithoutCancel(t.Context()), request(t, "k", "{}"))
			answered <- err
		}()
		require.Eventually(t, func() bool { return lent.Load() >= before+3 }, 30*time.Second, time.Millisecond, "it has begun, and waits")
		_, err := late.policies.RunOnce(t.Context()) //nolint:contextcheck // another process
		require.NoError(t, err)
		return insertOrder(ctx, tx, "k")
	})
	require.NoError(t, err)
	require.ErrorIs(t, <-answered, idempotency.ErrResultExpired)
	require.Equal(t, 1, s.orders(t, "k"))
}

// Where no policy was ever weak, a new key costs no look at what was executed without a record.
func TestPolicy_NoLookWhereNothingWasEverWeak(t *testing.T) {
	t.Parallel()
	p := newPolicyShop(t)
	_, err := p.policies.RunOnce(t.Context())
	require.NoError(t, err)
	p.exec(t, `ALTER TABLE idempotency.bypasses RENAME TO away`)
	require.NotZero(t, p.ok(t, "none").Record.Fence)
	p.exec(t, `ALTER TABLE idempotency.away RENAME TO bypasses`)
	p.policy(t, "all", "", "enforce")
	p.forgetWeakPolicies(t)
	p.exec(t, `ALTER TABLE idempotency.bypasses RENAME TO away`)
	require.NotZero(t, p.ok(t, "enforced").Record.Fence)
}
