package brokers

import (
	"context"
	"fmt"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgonce/pgonce/internal/childtest"
	"github.com/pgonce/pgonce/internal/pgtest"
)

// broker is one that a test has started.
type broker interface {
	url() string
	publish(t *testing.T, ids []string)
	left(ctx context.Context) (int64, error) // messages that are not acknowledged
}

func TestNATS_EffectsAreTheDistinctMessages(t *testing.T) {
	t.Parallel()
	storm(t, "nats", startNATS(t))
}

func TestRedisStreams_EffectsAreTheDistinctMessages(t *testing.T) {
	t.Parallel()
	storm(t, "redis", startRedis(t))
}

const (
	consumers = 2
	kills     = 5
	poisons   = 10
)

// storm publishes some messages twice, loses a fifth of the first acknowledgements, and kills consumers.
func storm(t *testing.T, kind string, b broker) {
	t.Helper()
	pool := pgtest.Pool(t)
	_, err := pool.Exec(t.Context(), `
		CREATE TABLE effects (id text NOT NULL);
		CREATE TABLE dead_letters (id text NOT NULL, reason text NOT NULL)`)
	require.NoError(t, err)
	n := scaled(5_000, 100_000)
	ids := make([]string, 0, n+n/20+2*poisons)
	for i := range n {
		ids = append(ids, fmt.Sprintf("m%d", i))
	}
	ids = append(ids, ids[:n/20]...)
	for i := range 2 * poisons {
		ids = append(ids, fmt.Sprintf("poison%d", i%poisons))
	}
	rand.Shuffle(len(ids), func(i, j int) { ids[i], ids[j] = ids[j], ids[i] })

	began := time.Now()
	var all, alive []*childtest.Process[batch]
	start := func() {
		c := consumer.Start(t, consumerArgs{
			Broker: kind, BrokerURL: b.url(), DatabaseURL: pgtest.ServiceURL(t, pool.Config().ConnString()), Name: fmt.Sprintf("c%d", len(all)),
		})
		all, alive = append(all, c), append(alive, c)
	}
	b.publish(t, ids)
	for range consumers {
		start()
	}
	for k := range kills {
		await(t, func() bool { return count(t, pool, `SELECT count(*) FROM effects`) >= n*(k+1)/(kills+2) })
		alive[0].Kill(t)
		alive = alive[1:]
		start()
	}
	await(t, func() bool {
		left, err := b.left(t.Context())
		require.NoError(t, err)
		return left == 0
	})
	var told batch
	for _, c := range all {
		c.Kill(t)
		for _, f := range c.Facts() {
			told.Deliveries, told.Handled, told.Duplicates = told.Deliveries+f.Deliveries, told.Handled+f.Handled, told.Duplicates+f.Duplicates
			told.Dead, told.Retries = told.Dead+f.Dead, told.Retries+f.Retries
		}
		require.ErrorIs(t, c.Wait(t), childtest.ErrKilled, "no consumer ended by itself")
	}
	t.Logf("faults: %s: %d messages in %d deliveries (%d handled, %d duplicates, %d dead-lettered, %d nacked, as far as told), %d kills, %v",
		kind, n, told.Deliveries, told.Handled, told.Duplicates, told.Dead, told.Retries, kills, time.Since(began).Round(time.Second))

	require.Equal(t, n, count(t, pool, `SELECT count(*) FROM effects`), "effects = distinct messages")
	require.Equal(t, n, count(t, pool, `SELECT count(DISTINCT id) FROM effects`))
	require.Equal(t, poisons, count(t, pool, `SELECT count(*) FROM dead_letters`))
	require.Equal(t, n+poisons, count(t, pool, `SELECT count(*) FROM idempotency.records`))
	require.GreaterOrEqual(t, told.Deliveries, len(ids)+n/6, "about a fifth came again")
}

// await asks until it is so. A consumer that hangs has failed the test.
func await(t *testing.T, so func() bool) {
	t.Helper()
	limit := time.Now().Add(time.Duration(scaled(3, 9)) * time.Minute)
	for !so() {
		require.True(t, time.Now().Before(limit), "it takes too long")
		select {
		case <-t.Context().Done():
			require.NoError(t, t.Context().Err())
		case <-time.After(50 * time.Millisecond):
		}
	}
}

func count(t *testing.T, pool *pgxpool.Pool, query string) (n int) {
	t.Helper()
	require.NoError(t, pool.QueryRow(t.Context(), query).Scan(&n))
	return n
}
