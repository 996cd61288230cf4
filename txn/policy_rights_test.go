package txn_test

import (
	"context"
	"os"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgonce/pgonce/idempotency"
	"github.com/pgonce/pgonce/txn"
)

// A service's role with the rights that docs/policies.md names obeys policies, and cannot change them.
func TestPolicy_RightsOfTheGuide(t *testing.T) {
	t.Parallel()
	text, err := os.ReadFile("../docs/policies.md")
	require.NoError(t, err)
	_, grants, _ := strings.Cut(string(text), "```\nGRANT ")
	grants, _, _ = strings.Cut(grants, "```")
	s := newShop(t)
	s.exec(t, `CREATE ROLE policy_service; GRANT USAGE ON SCHEMA idempotency TO policy_service; GRANT USAGE ON SEQUENCE idempotency.fence TO policy_service;
		GRANT SELECT, INSERT, UPDATE ON idempotency.records TO policy_service; GRANT SELECT, INSERT ON orders TO policy_service;
		GRANT `+strings.ReplaceAll(grants, "my_service", "policy_service"), pgx.QueryExecModeSimpleProtocol)
	pool := poolOfRole(t, s, "policy_service")
	p := (&policyShop{shop: &shop{pool: pool, direct: s.direct}}).withRunner(t)
	for _, enforcement := range []string{"off", "shadow", "enforce"} {
		p.policy(t, "all", "", enforcement)
		p.ok(t, enforcement)
		p.ok(t, enforcement)
	}
	require.Equal(t, []string{"off RUN SUCCESS", "off RUN SUCCESS"}, p.bypasses(t, "off"))
	require.Equal(t, []string{"shadow REPLAY SUCCESS"}, p.bypasses(t, "shadow"))
	_, err = p.place(t.Context(), request(t, "off", "{}"))
	require.ErrorIs(t, err, idempotency.ErrResultExpired)
	for _, sql := range []string{
		`UPDATE idempotency.policies SET enforcement = 'off'`, `DELETE FROM idempotency.bypasses`,
		`UPDATE idempotency.bypasses SET resolution = 'RERUN'`, `INSERT INTO idempotency.policy_changes (scope, name) VALUES ('all', '')`,
	} {
		_, err := pool.Exec(t.Context(), sql)
		require.ErrorContains(t, err, "permission denied", sql)
	}
}

// poolOfRole is a pool of a service whose role is dropped when the test ends: it belongs to the server, not to the database.
func poolOfRole(t *testing.T, s *shop, role string) *pgxpool.Pool {
	t.Helper()
	cfg := s.direct.Config()
	txn.ConfigurePool(cfg)
	cfg.ConnConfig.RuntimeParams["role"] = role
	pool, err := pgxpool.NewWithConfig(t.Context(), cfg)
	require.NoError(t, err)
	t.Cleanup(func() {
		pool.Close()
		_, err := s.direct.Exec(context.WithoutCancel(t.Context()), `DROP OWNED BY `+role+`; DROP ROLE `+role, pgx.QueryExecModeSimpleProtocol)
		require.NoError(t, err)
	})
	return pool
}

// F06: however an operation's protection is released or taken back, nobody gets the answer of another request.
func TestCase_F06_NoStageOfARolloutReplaysAnotherRequest(t *testing.T) {
	t.Parallel()
	p := newPolicyShop(t)
	first := p.ok(t, "k")
	for _, stage := range []string{
		`enforcement = 'shadow'`, `enforcement = 'enforce', percentage = 0`, `percentage = 5`, `percentage = 50`, `percentage = 100`,
		`enforcement = 'off'`, `enforcement = 'enforce'`,
	} {
		p.policy(t, "all", "", "enforce")
		p.exec(t, `UPDATE idempotency.policies SET percentage = 100`)
		p.exec(t, `UPDATE idempotency.policies SET actor = 'ada', reason = 'x', `+stage)
		_, err := p.policies.RunOnce(t.Context())
		require.NoError(t, err)
		res, err := p.place(t.Context(), request(t, "k", "another query string"))
		if err != nil {
			require.ErrorIs(t, err, idempotency.ErrMismatch, stage)
			continue
		}
		require.False(t, res.Replayed, stage)
		require.NotEqual(t, first.Value, res.Value, stage)
	}
	require.NotContains(t, p.bypasses(t, "k"), "shadow REPLAY SUCCESS")
	require.True(t, p.ok(t, "k").Replayed)
}
