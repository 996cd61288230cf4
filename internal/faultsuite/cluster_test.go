package faultsuite

import (
	"context"
	"os"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgonce/pgonce/db"
	"github.com/pgonce/pgonce/internal/devstack"
	"github.com/pgonce/pgonce/txn"
)

// branch is a shop on servers of its own, which may die.
type branch struct {
	*shop
	cluster *devstack.Cluster
	primary *devstack.Node // where the proxy leads to
}

func newBranch(t *testing.T, o options) *branch {
	t.Helper()
	cluster, err := devstack.StartCluster(t.Context(), &devstack.Config{
		// What the machine's own crash would lose does not matter here. The long delay makes a commit that does not wait
		// for the disk very likely to be lost with its server.
		Settings: map[string]string{"fsync": "off", "wal_writer_delay": "10s"},
		Out:      os.Stderr,
	})
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, cluster.Stop()) })
	b := &branch{cluster: cluster, primary: cluster.Primary()}
	direct := b.pool(t, b.primary)
	require.NoError(t, db.Migrate(t.Context(), direct))
	b.shop = newShopOn(t, direct, o)
	return b
}

// pool is past the proxy.
func (b *branch) pool(t *testing.T, n *devstack.Node) *pgxpool.Pool {
	t.Helper()
	pool, err := pgxpool.New(t.Context(), n.URL())
	require.NoError(t, err)
	t.Cleanup(pool.Close)
	return pool
}

// another is a runner of another process, which follows the proxy too.
func (b *branch) another(t *testing.T) *txn.Runner {
	t.Helper()
	return b.anotherAt(t, b.proxy.URL(b.primary.URL()))
}

func (b *branch) standby(t *testing.T) *devstack.Node {
	t.Helper()
	n, err := b.primary.Standby(t.Context())
	require.NoError(t, err)
	return n
}

// synchronous makes the primary wait for a standby.
func (b *branch) synchronous(t *testing.T, standby *devstack.Node) {
	t.Helper()
	require.NoError(t, b.primary.Set(t.Context(), "synchronous_standby_names", standby.Name()))
}

// moveTo leads everybody to another server.
func (b *branch) moveTo(t *testing.T, n *devstack.Node) {
	t.Helper()
	require.NoError(t, b.proxy.Retarget(n.URL()))
	b.primary, b.direct = n, b.pool(t, n)
}

// during does something when the clients have had so many answers.
func (s *shop) during(ctx context.Context, answers int, do func() error) <-chan error {
	done := make(chan error, 1)
	go func() {
		for len(s.all()) < answers {
			select {
			case <-time.After(time.Millisecond):
			case <-ctx.Done():
				done <- ctx.Err()
				return
			}
		}
		done <- do()
	}()
	return done
}
