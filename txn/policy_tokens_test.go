package txn_test

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/pgonce/pgonce/idempotency"
	"github.com/pgonce/pgonce/txn"
)

// Who may run at all is no matter of a policy.
func TestPolicy_TokensAreRequiredWhateverIsSwitchedOff(t *testing.T) {
	t.Parallel()
	made := tokens(t)
	p := (&policyShop{shop: newTokenShop(t, made)}).withRunner(t, func(c *txn.Config) { c.Operations = issuedOnly(made) })
	for _, enforcement := range []string{"off", "shadow"} {
		p.policy(t, "all", "", enforcement)
		_, err := p.place(t.Context(), request(t, "made up", "{}"))
		require.ErrorIs(t, err, idempotency.ErrNotIssued)
	}
	p.policy(t, "all", "", "off")
	token := p.issue(t, "order.create")
	p.ok(t, token)
	p.policy(t, "all", "", "enforce")
	_, err := p.place(t.Context(), request(t, token, "{}"))
	require.ErrorIs(t, err, idempotency.ErrResultExpired, "it was used, though its record does not say so")
	require.Equal(t, 1, p.orders(t, token))
}
