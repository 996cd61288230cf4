package idempotencymsg_test

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/pgonce/pgonce/idempotency"
	"github.com/pgonce/pgonce/idempotencymsg"
	"github.com/pgonce/pgonce/internal/pgtest"
	"github.com/pgonce/pgonce/txn"
)

// Redelivered messages are handled again in shadow and while off, and what was handled without a record is a duplicate afterwards.
func TestInbox_ObeysPolicies(t *testing.T) {
	t.Parallel()
	p := newPost(t, idempotencymsg.Config{})
	pool := pgtest.Service(t, p.direct, txn.ConfigurePool)
	policies, err := idempotency.NewPolicies(p.direct, nil)
	require.NoError(t, err)
	runner, err := txn.New(pool, &txn.Config{Operations: []idempotency.Operation{mail}, Policies: policies})
	require.NoError(t, err)
	inbox, err := idempotencymsg.New(runner, &idempotencymsg.Config{Operation: mail, Handler: write})
	require.NoError(t, err)
	policy := func(enforcement string) {
		_, err := p.direct.Exec(t.Context(), `INSERT INTO idempotency.policies (scope, enforcement, actor, reason) VALUES ('all', $1, 'ada', 'x')
			ON CONFLICT (scope, name) DO UPDATE SET enforcement = EXCLUDED.enforcement, actor = EXCLUDED.actor, reason = EXCLUDED.reason`, enforcement)
		require.NoError(t, err)
		_, err = policies.RunOnce(t.Context())
		require.NoError(t, err)
	}
	handle := func(id string) idempotencymsg.Verdict { return inbox.Handle(t.Context(), message(id, "")).Verdict }
	effects := func(id string) (n int) {
		require.NoError(t, p.direct.QueryRow(t.Context(), `SELECT count(*) FROM effects WHERE id = $1`, id).Scan(&n))
		return n
	}
	policy("shadow")
	require.Equal(t, idempotencymsg.Handled, handle("s"))
	require.Equal(t, idempotencymsg.Handled, handle("s"))
	policy("off")
	require.Equal(t, idempotencymsg.Duplicate, handle("s"))
	require.Equal(t, idempotencymsg.Handled, handle("o"))
	for _, r := range inbox.HandleBatch(t.Context(), []idempotencymsg.Message{message("o", ""), message("many", ""), message("s", "")}) {
		require.NoError(t, r.Err)
	}
	policy("enforce")
	for _, id := range []string{"s", "o", "many"} {
		require.Equal(t, idempotencymsg.Duplicate, handle(id), id)
	}
	require.Equal(t, []int{2, 2, 1}, []int{effects("s"), effects("o"), effects("many")})
}
