package idempotency_test

import (
	"testing"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgonce/pgonce/db"
	"github.com/pgonce/pgonce/idempotency"
	"github.com/pgonce/pgonce/internal/devstack"
)

// What a standby shows may be hours old: a kill switch that is over, or none where one was.
func TestPolicies_AStandbyIsNotBelieved(t *testing.T) {
	t.Parallel()
	ctx := t.Context()
	cluster, err := devstack.StartCluster(ctx, &devstack.Config{Settings: map[string]string{"fsync": "off"}, Out: t.Output()})
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, cluster.Stop()) })
	primary := cluster.Primary()
	pool, err := pgxpool.New(ctx, primary.URL())
	require.NoError(t, err)
	t.Cleanup(pool.Close)
	require.NoError(t, db.Migrate(ctx, pool))
	exec(t, pool, `INSERT INTO idempotency.policies (scope, enforcement, actor, reason) VALUES ('all', 'off', 'ada', 'x')`)
	standby, err := primary.Standby(ctx)
	require.NoError(t, err)
	require.NoError(t, standby.CatchUp(ctx, primary))
	reader, err := pgxpool.New(ctx, standby.URL())
	require.NoError(t, err)
	t.Cleanup(reader.Close)

	p := newPolicies(t, reader)
	_, err = p.RunOnce(ctx)
	require.ErrorIs(t, err, idempotency.ErrReadOnly)
	require.Equal(t, idempotency.InForce{Enforcement: idempotency.EnforcementEnforce, Guarded: true}, inForce(t, p, "order"))
	require.NoError(t, standby.Promote(ctx))
	_, err = p.RunOnce(ctx)
	require.NoError(t, err)
	require.Equal(t, idempotency.EnforcementOff, inForce(t, p, "order").Enforcement)
}
