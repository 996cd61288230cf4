package txn_test

import (
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/pgonce/pgonce/idempotency"
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
