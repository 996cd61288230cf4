package frontsuite

import (
	"context"
	"errors"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"github.com/pgonce/pgonce/idempotency"
	"github.com/pgonce/pgonce/idempotency/idempotencytest"
	"github.com/pgonce/pgonce/internal/devstack"
	"github.com/pgonce/pgonce/internal/pgtest"
	"github.com/pgonce/pgonce/localfront"
	"github.com/pgonce/pgonce/redisfront"
	"github.com/pgonce/pgonce/txn"
)

func TestMain(m *testing.M) { pgtest.Main(m) }

// shop is a database, and a service on it with some of the fronts.
type shop struct {
	pool   *pgxpool.Pool
	runner *txn.Runner
	local  *localfront.Front // nil: without
	redis  *redisfront.Front // nil: without
	events counters
}

// counters count what the service tells.
type counters struct {
	executed, local, redis, postgres, shared, failed, degraded, mismatch atomic.Int64
}

func (c *counters) add(_ context.Context, event idempotency.Event) {
	switch e := event.(type) {
	case idempotency.Executed:
		c.executed.Add(1)
	case idempotency.Replayed:
		switch {
		case e.Shared:
			c.shared.Add(1)
		case e.From == localfront.Name:
			c.local.Add(1)
		case e.From == redisfront.Name:
			c.redis.Add(1)
		default:
			c.postgres.Add(1)
		}
	case idempotency.FrontFailed:
		c.failed.Add(1)
	case idempotency.FrontDegraded:
		c.degraded.Add(1)
	case idempotency.FrontMismatch:
		c.mismatch.Add(1)
	}
}

// fronts says which ones a shop has.
type fronts struct {
	local, redis bool
	patient      bool // with a Redis that a busy machine makes late, and that nobody makes hang
}

// patience is a Redis' time where it is not what is examined: what comes too late is not published.
const patience = 10 * time.Second

// newShop makes a service with these fronts, Redis at this address, on a database of its own, or on that of another shop.
func newShop(t *testing.T, with fronts, address, password string, pool *pgxpool.Pool) *shop {
	t.Helper()
	if pool == nil {
		pool = pgtest.Pool(t, txn.ConfigurePool)
		_, err := pool.Exec(t.Context(), idempotencytest.Table)
		require.NoError(t, err)
	}
	s := &shop{pool: pool}
	config := &txn.Config{Operations: idempotencytest.Operations(), OnEvent: s.events.add}
	if with.local {
		var err error
		s.local, err = localfront.New(nil)
		require.NoError(t, err)
		t.Cleanup(func() { require.NoError(t, s.local.Close()) })
		config.Fronts = append(config.Fronts, s.local)
	}
	if with.redis {
		client := redis.NewClient(&redis.Options{Addr: address, Password: password, ContextTimeoutEnabled: true})
		t.Cleanup(func() { require.NoError(t, client.Close()) })
		var err error
		cfg := &redisfront.Config{OnEvent: s.events.add}
		if with.patient {
			cfg.Timeout = patience
		}
		s.redis, err = redisfront.New(client, cfg)
		require.NoError(t, err)
		t.Cleanup(func() { _ = s.redis.Close() }) // says so where Redis was away
		config.Fronts = append(config.Fronts, s.redis)
	}
	var err error
	s.runner, err = txn.New(pool, config)
	require.NoError(t, err)
	t.Cleanup(s.runner.Close)
	if with.local || with.redis {
		s.awaitEpoch(t)
	}
	return s
}

// awaitEpoch returns when the fronts are asked: the first calls of a runner go to PostgreSQL.
func (s *shop) awaitEpoch(t *testing.T) {
	t.Helper()
	key, err := idempotencytest.Orders.Key("await", t.Name())
	require.NoError(t, err)
	req := idempotency.Request{Key: key, Fingerprint: idempotency.NoFingerprint}
	require.Eventually(t, func() bool {
		_, err := s.call(t.Context(), req, func(context.Context, pgx.Tx) ([]byte, error) { return nil, nil })
		return err == nil && (s.local == nil || s.events.local.Load() > 0) &&
			(s.local != nil || s.redis.Degraded() || s.events.redis.Load() > 0)
	}, 10*time.Second, 10*time.Millisecond)
}

func (s *shop) call(ctx context.Context, req idempotency.Request, fn idempotencytest.Function) (idempotencytest.Answer, error) {
	res, err := txn.WithIdempotency(ctx, s.runner, req, fn)
	return idempotencytest.Answer{Result: res.Value, Replayed: res.Replayed, Record: res.Record}, err
}

func (s *shop) service() *idempotencytest.Service {
	return &idempotencytest.Service{Call: s.call, Final: txn.Final, Querier: s.pool}
}

// ownRedis starts a Redis that the test may spoil.
func ownRedis(t *testing.T, lines ...string) (*devstack.RedisNode, string) {
	t.Helper()
	nodes, err := devstack.StartRedisNodes(t.Context(), &devstack.Config{Out: t.Output()})
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, nodes.Stop()) })
	node, err := nodes.Add(t.Context(), lines...)
	require.NoError(t, err)
	return node, nodes.Password()
}

// admin is a client for the test's own commands.
func admin(t *testing.T, node *devstack.RedisNode, password string) *redis.Client {
	t.Helper()
	client := redis.NewClient(&redis.Options{Addr: node.Address(), Password: password, MaxRetries: -1})
	t.Cleanup(func() { require.NoError(t, client.Close()) })
	return client
}

// during calls do again and again until the test's examination is over.
func during(t *testing.T, every time.Duration, do func(ctx context.Context) error) {
	t.Helper()
	ctx, cancel := context.WithCancel(context.WithoutCancel(t.Context()))
	done := make(chan error, 1)
	go func() {
		var errs error
		for {
			select {
			case <-ctx.Done():
				done <- errs
				return
			case <-time.After(every):
				if err := do(ctx); err != nil && ctx.Err() == nil {
					errs = errors.Join(errs, err)
				}
			}
		}
	}()
	t.Cleanup(func() {
		cancel()
		require.NoError(t, <-done)
	})
}
