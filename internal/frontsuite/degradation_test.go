package frontsuite

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"github.com/pgonce/pgonce/idempotency"
	"github.com/pgonce/pgonce/idempotency/idempotencytest"
	"github.com/pgonce/pgonce/internal/devstack"
	"github.com/pgonce/pgonce/internal/pgproxy"
	"github.com/pgonce/pgonce/internal/pgtest"
	"github.com/pgonce/pgonce/localfront"
	"github.com/pgonce/pgonce/redisfront"
	"github.com/pgonce/pgonce/txn"
)

// The operations of the table: the same, under each strategy.
var degraded = map[idempotency.Strategy]idempotency.Operation{
	idempotency.StrategyHybrid: {Name: "order.hybrid", Strategy: idempotency.StrategyHybrid},
	idempotency.StrategyStrict: {Name: "order.strict", Strategy: idempotency.StrategyStrict},
}

// process is a service whose servers can be taken away.
type process struct {
	runner *txn.Runner
	redis  *redisfront.Front

	mu   sync.Mutex
	from string // what answered last
}

func newProcess(t *testing.T, pool *pgxpool.Pool, node *devstack.RedisNode, password string) *process {
	t.Helper()
	p := &process{}
	local, err := localfront.New(nil)
	require.NoError(t, err)
	client := redis.NewClient(&redis.Options{Addr: node.Address(), Password: password, ContextTimeoutEnabled: true})
	p.redis, err = redisfront.New(client, nil)
	require.NoError(t, err)
	cfg := &txn.Config{Fronts: []idempotency.Front{local, p.redis}, OnEvent: p.add}
	for _, op := range degraded {
		cfg.Operations = append(cfg.Operations, op)
	}
	p.runner, err = txn.New(pool, cfg)
	require.NoError(t, err)
	t.Cleanup(func() {
		p.runner.Close()
		_ = p.redis.Close()
		_ = client.Close()
		require.NoError(t, local.Close())
	})
	return p
}

func (p *process) add(_ context.Context, event idempotency.Event) {
	if e, ok := event.(idempotency.Replayed); ok {
		p.mu.Lock()
		defer p.mu.Unlock()
		p.from = map[string]string{localfront.Name: "memory", redisfront.Name: "Redis", "": "PostgreSQL"}[e.From]
	}
}

// ask calls once and names what the caller saw.
func (p *process) ask(t *testing.T, strategy idempotency.Strategy, value string) string {
	t.Helper()
	key, err := degraded[strategy].Key(idempotency.SingleTenant, value)
	require.NoError(t, err)
	req := idempotency.Request{Key: key, Fingerprint: idempotency.FingerprintBytes([]byte("payload"))}
	res, err := txn.WithIdempotency(t.Context(), p.runner, req, func(ctx context.Context, tx pgx.Tx) (string, error) {
		_, err := tx.Exec(ctx, `INSERT INTO suite_orders (key) VALUES ($1)`, value)
		return value, err
	})
	switch {
	case errors.Is(err, idempotency.ErrRestart):
		return "`ErrRestart`"
	case err != nil:
		return err.Error()
	case res.Value != value:
		return "another's answer: " + res.Value
	case !res.Replayed:
		return "runs"
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	return "replay from " + p.from
}

// enough are the keys that were done before: who has found an outcome anywhere has it in memory from then on, so that every
// look takes another one.
const enough = 100

// await asks until the answer is the one that stays: a change of what is there is noticed within a second.
func (p *process) await(t *testing.T, strategy idempotency.Strategy, want string) (last string) {
	t.Helper()
	pause := time.Millisecond
	for i := 0; i < 10*enough && last != want; i++ {
		if want != "`ErrRestart`" && i == enough {
			break
		}
		last = p.ask(t, strategy, fmt.Sprint("done ", i%enough))
		require.True(t, strings.HasPrefix(last, "replay from ") || last == "`ErrRestart`", last)
		<-time.After(pause)
		pause = min(pause+time.Millisecond, 100*time.Millisecond) // 5 s for so many
	}
	return last
}

// All eight mixes of what is up, as docs/fronts.md has them.
func TestDegradation_TheTableOfAllMixes(t *testing.T) {
	t.Parallel()
	text, err := os.ReadFile("../../docs/fronts.md")
	require.NoError(t, err)
	for _, redisUp := range []bool{true, false} {
		for _, postgresUp := range []bool{true, false} {
			t.Run(fmt.Sprintf("redis %v, postgres %v", redisUp, postgresUp), func(t *testing.T) {
				t.Parallel()
				direct := pgtest.Pool(t)
				_, err := direct.Exec(t.Context(), idempotencytest.Table)
				require.NoError(t, err)
				proxy, err := pgproxy.Start(t.Context(), direct.Config().ConnString(), nil)
				require.NoError(t, err)
				t.Cleanup(func() { require.NoError(t, proxy.Close()) })
				cfg, err := pgxpool.ParseConfig(proxy.URL(direct.Config().ConnString()))
				require.NoError(t, err)
				txn.ConfigurePool(cfg)
				pool, err := pgxpool.NewWithConfig(t.Context(), cfg)
				require.NoError(t, err)
				t.Cleanup(pool.Close)
				node, password := ownRedis(t)
				with, without := newProcess(t, pool, node, password), newProcess(t, pool, node, password)

				for strategy := range degraded {
					for _, p := range []*process{with, without} { // knows the epoch, and is connected
						require.Equal(t, "runs", p.ask(t, strategy, fmt.Sprintf("warm %p", p)))
					}
				}
				hybrid := idempotency.StrategyHybrid
				require.Eventually(t, func() bool {
					return with.ask(t, hybrid, "await") == "replay from memory" && without.ask(t, hybrid, fmt.Sprintf("warm %p", without)) != ""
				}, 60*time.Second, 10*time.Millisecond)
				for strategy := range degraded {
					for i := range enough {
						require.Equal(t, "runs", with.ask(t, strategy, fmt.Sprint("done ", i)))
					}
				}
				require.NoError(t, with.redis.Flush(t.Context()))

				if !redisUp {
					require.NoError(t, node.Kill())
				}
				if !postgresUp {
					proxy.Down()
				}
				for _, hit := range []bool{true, false} {
					p, local := with, "hit"
					if !hit {
						p, local = without, "miss"
					}
					row := []string{up(redisUp), up(postgresUp), local}
					for _, strategy := range []idempotency.Strategy{hybrid, idempotency.StrategyStrict} {
						done := expected(redisUp, postgresUp, hit, strategy)
						row = append(row, p.await(t, strategy, done))
						row = append(row, p.ask(t, strategy, "new "+local))
					}
					line := "| " + strings.Join(row, " | ") + " |"
					require.True(t, strings.Contains(string(text), line+"\n"), "not in docs/fronts.md: %s", line)
				}
				var twice int
				require.NoError(t, direct.QueryRow(t.Context(), `SELECT count(*) FROM (SELECT FROM suite_orders WHERE key LIKE 'done%' GROUP BY key HAVING count(*) <> 2) AS k`).Scan(&twice))
				require.Zero(t, twice, "once for each strategy")
			})
		}
	}
}

func up(yes bool) string {
	if yes {
		return "up"
	}
	return "down"
}

// expected is what a duplicate gets as soon as the process has noticed what is down.
func expected(redisUp, postgresUp, hit bool, strategy idempotency.Strategy) string {
	switch {
	case !postgresUp:
		return "`ErrRestart`"
	case strategy == idempotency.StrategyStrict:
		return "replay from PostgreSQL"
	case hit:
		return "replay from memory"
	case redisUp:
		return "replay from Redis"
	}
	return "replay from PostgreSQL"
}
