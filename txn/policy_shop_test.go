package txn_test

import (
	"context"
	"sync"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/pgonce/pgonce/idempotency"
	"github.com/pgonce/pgonce/txn"
)

// events are what a runner and its policies told.
type events struct {
	mu  sync.Mutex
	all []idempotency.Event
}

func (e *events) add(_ context.Context, one idempotency.Event) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.all = append(e.all, one)
}

func eventsOf[T idempotency.Event](e *events) (found []T) {
	e.mu.Lock()
	defer e.mu.Unlock()
	for _, one := range e.all {
		if t, ok := one.(T); ok {
			found = append(found, t)
		}
	}
	return found
}

// policyShop is a shop whose runner obeys policies.
type policyShop struct {
	*shop
	events
	policies *idempotency.Policies
}

func newPolicyShop(t testing.TB, config ...func(*txn.Config)) *policyShop {
	t.Helper()
	return (&policyShop{shop: newShopWith(t, atLeastConns(4))}).withRunner(t, config...)
}

// withRunner makes a runner that obeys policies.
func (p *policyShop) withRunner(t testing.TB, config ...func(*txn.Config)) *policyShop {
	t.Helper()
	var err error
	p.policies, err = idempotency.NewPolicies(p.pool, &idempotency.PoliciesConfig{OnEvent: p.add})
	require.NoError(t, err)
	p.runner = newRunner(t, p.pool, append(config, func(c *txn.Config) { c.OnEvent, c.Policies = p.add, p.policies })...)
	return p
}

func (p *policyShop) requireUnrecorded(t testing.TB, key string) {
	t.Helper()
	_, found := p.record(t, request(t, key, "{}"))
	require.False(t, found)
}

// policy writes a row, as SQL, and has the process read it.
func (p *policyShop) policy(t testing.TB, scope, name, enforcement string) {
	t.Helper()
	writePolicy(t, p.shop, scope, name, enforcement)
	_, err := p.policies.RunOnce(context.WithoutCancel(t.Context()))
	require.NoError(t, err)
}

func writePolicy(t testing.TB, s *shop, scope, name, enforcement string) {
	t.Helper()
	_, err := s.direct.Exec(context.WithoutCancel(t.Context()), `INSERT INTO idempotency.policies (scope, name, enforcement, actor, reason)
		VALUES ($1, $2, $3, 'ada', 'ticket 4711') ON CONFLICT (scope, name) DO UPDATE SET enforcement = EXCLUDED.enforcement, actor = EXCLUDED.actor, reason = EXCLUDED.reason`, scope, name, enforcement)
	require.NoError(t, err)
}

// bypasses are what was executed without a record, in the order of time.
func (s *shop) bypasses(t testing.TB, key string) (rows []string) {
	t.Helper()
	found, err := s.direct.Query(context.WithoutCancel(t.Context()), `SELECT enforcement || ' ' || would_be || ' ' || outcome
		FROM idempotency.bypasses WHERE key = $1 ORDER BY bypassed_at`, key)
	require.NoError(t, err)
	rows, err = pgx.CollectRows(found, pgx.RowTo[string])
	require.NoError(t, err)
	return rows
}

func (p *policyShop) ok(t testing.TB, key string) txn.Result[order] {
	t.Helper()
	res, err := p.place(context.WithoutCancel(t.Context()), request(t, key, "{}"))
	require.NoError(t, err)
	return res
}

// forgetWeakPolicies makes the last change of policies an old one, and reads them.
func (p *policyShop) forgetWeakPolicies(t testing.TB) {
	t.Helper()
	p.exec(t, `ALTER TABLE idempotency.policy_changes DISABLE TRIGGER USER`)
	p.exec(t, `UPDATE idempotency.policy_changes SET changed_at = changed_at - interval '16 minutes'`)
	p.exec(t, `ALTER TABLE idempotency.policy_changes ENABLE TRIGGER USER`)
	_, err := p.policies.RunOnce(t.Context())
	require.NoError(t, err)
}

// inTx places an order in a transaction of the caller.
func (p *policyShop) inTx(t testing.TB, req idempotency.Request, commit bool) error {
	t.Helper()
	tx, err := p.pool.Begin(t.Context())
	require.NoError(t, err)
	defer func() { _ = tx.Rollback(context.WithoutCancel(t.Context())) }()
	joined, err := txn.WithIdempotencyTx(t.Context(), p.runner, tx, req, func(ctx context.Context, tx pgx.Tx) (order, error) {
		return insertOrder(ctx, tx, req.Key.Value())
	})
	if err != nil {
		return err
	}
	if !commit {
		require.NoError(t, tx.Rollback(t.Context()))
		return joined.AfterCommit(t.Context())
	}
	require.NoError(t, tx.Commit(t.Context()))
	return joined.AfterCommit(t.Context())
}
