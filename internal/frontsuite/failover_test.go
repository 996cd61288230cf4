package frontsuite

import (
	"context"
	"net/url"
	"strconv"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgonce/pgonce/db"
	"github.com/pgonce/pgonce/idempotency/idempotencytest"
	"github.com/pgonce/pgonce/internal/devstack"
	"github.com/pgonce/pgonce/txn"
)

// An asynchronous standby takes over without the last order. The fronts still have its outcome, and it counts no more.
func TestEpoch_AfterAFailoverWhatWasLostIsForgotten(t *testing.T) {
	t.Parallel()
	ctx := t.Context()
	cluster, err := devstack.StartCluster(ctx, &devstack.Config{Settings: map[string]string{"fsync": "off"}, Out: t.Output()})
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, cluster.Stop()) })
	primary := cluster.Primary()
	standby, err := primary.Standby(ctx)
	require.NoError(t, err)

	config, err := pgxpool.ParseConfig(either(t, primary, standby))
	require.NoError(t, err)
	txn.ConfigurePool(config)
	pool, err := pgxpool.NewWithConfig(ctx, config)
	require.NoError(t, err)
	t.Cleanup(pool.Close)
	require.NoError(t, db.Migrate(ctx, pool))
	_, err = pool.Exec(ctx, idempotencytest.Table)
	require.NoError(t, err)
	node, password := ownRedis(t)
	s := newShop(t, fronts{local: true, redis: true}, node.Address(), password, pool)

	kept, lost := request(t, idempotencytest.Orders, "kept"), request(t, idempotencytest.Orders, "lost")
	s.place(t, kept, "before")
	require.NoError(t, standby.CatchUp(ctx, primary))
	require.NoError(t, standby.PauseReceiver(ctx))
	first := s.place(t, lost, "before")
	require.NoError(t, s.redis.Flush(ctx))
	require.True(t, s.place(t, lost, "again").Replayed)

	require.NoError(t, primary.Kill())
	require.NoError(t, standby.Kill()) // and with it what its receiver had not read
	require.NoError(t, standby.Start(ctx))
	require.NoError(t, standby.Promote(ctx))
	var after idempotencytest.Answer
	require.Eventually(t, func() bool {
		bounded, cancel := context.WithTimeout(ctx, time.Second)
		defer cancel()
		a, err := s.call(bounded, lost, func(ctx context.Context, tx pgx.Tx) ([]byte, error) {
			_, err := tx.Exec(ctx, `INSERT INTO suite_orders (key) VALUES ('lost')`)
			return []byte("after"), err
		})
		if err != nil || a.Replayed && string(a.Result) == "before" {
			return false // for a second the fronts may not know yet
		}
		after = a
		return true
	}, 20*time.Second, 50*time.Millisecond)
	require.Equal(t, "after", string(after.Result), "what was lost runs again")
	require.NotEqual(t, first.Record.AttemptToken, after.Record.AttemptToken)
	require.Equal(t, 1, orders(t, pool, "lost"))
	for range 3 {
		require.Equal(t, "after", string(s.place(t, lost, "again").Result))
		require.Equal(t, "before", string(s.place(t, kept, "again").Result))
	}
	require.NoError(t, s.redis.Flush(ctx))
	// What was published under an older epoch's name is a miss for its first reader, who puts it back.
	inRedis := false
	for looks := 0; looks < 3 && !inRedis; looks++ {
		far := newShop(t, fronts{redis: true}, node.Address(), password, pool)
		from := far.events.redis.Load()
		require.Equal(t, "after", string(far.place(t, lost, "again").Result))
		inRedis = far.events.redis.Load() == from+1
		require.NoError(t, far.redis.Flush(ctx))
	}
	require.True(t, inRedis, "and Redis has the new outcome")
}

// either is the connection string of whichever is the primary.
func either(t *testing.T, nodes ...*devstack.Node) string {
	t.Helper()
	both, err := url.Parse(nodes[0].URL())
	require.NoError(t, err)
	both.Host = ""
	for i, n := range nodes {
		u, err := url.Parse(n.URL())
		require.NoError(t, err)
		port, err := strconv.Atoi(u.Port())
		require.NoError(t, err)
		if i > 0 {
			both.Host += ","
		}
		both.Host += u.Hostname() + ":" + strconv.Itoa(port)
	}
	query := both.Query()
	query.Set("target_session_attrs", "read-write")
	both.RawQuery = query.Encode()
	return both.String()
}
