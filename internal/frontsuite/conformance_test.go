package frontsuite

import (
	"cmp"
	"context"
	"fmt"
	"os"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"github.com/pgonce/pgonce/idempotency/idempotencytest"
	"github.com/pgonce/pgonce/internal/devstack"
)

// The fronts of the table in docs/fronts.md, and what happens to Redis meanwhile.
var (
	columns = []struct {
		name string
		with fronts
	}{
		{"PostgreSQL alone", fronts{}},
		{"local", fronts{local: true}},
		{"Redis", fronts{redis: true}},
		{"local and Redis", fronts{local: true, redis: true}},
	}
	conditions = []struct {
		name  string
		lines []string // of Redis' configuration
		begin func(t *testing.T, at *redisAt)
	}{
		{name: "healthy"},
		{name: "flushed every 50 ms", begin: func(t *testing.T, at *redisAt) {
			t.Helper()
			during(t, 50*time.Millisecond, func(ctx context.Context) error { return at.admin.FlushAll(ctx).Err() })
		}},
		{name: "killed and restarted", begin: func(t *testing.T, at *redisAt) {
			t.Helper()
			during(t, 300*time.Millisecond, func(ctx context.Context) error {
				if err := at.node.Kill(); err != nil {
					return err
				}
				time.Sleep(200 * time.Millisecond)
				return at.node.Start(context.WithoutCancel(ctx))
			})
		}},
		{name: "evicting at 3 MB", lines: []string{"maxmemory 3mb", "maxmemory-policy allkeys-lru"}, begin: func(t *testing.T, at *redisAt) {
			t.Helper()
			filler, n := strings.Repeat("x", 64<<10), 0
			during(t, 2*time.Millisecond, func(ctx context.Context) error { // others fill it, and push ours out
				n++
				return at.admin.Set(ctx, fmt.Sprint("filler", n), filler, time.Minute).Err()
			})
			t.Cleanup(func() { requireStat(t, at.admin, "evicted_keys:") })
		}},
		{name: "out of memory, noeviction", lines: []string{"maxmemory 1", "maxmemory-policy noeviction"}},
		{name: "SCRIPT FLUSH every 20 ms", begin: func(t *testing.T, at *redisAt) {
			t.Helper()
			during(t, 20*time.Millisecond, func(ctx context.Context) error { return at.admin.ScriptFlush(ctx).Err() })
		}},
		{name: "every script's reply lost once", begin: func(t *testing.T, at *redisAt) {
			t.Helper()
			at.proxy.losing.Store(true)
			t.Cleanup(func() { require.Positive(t, at.proxy.lost.Load()) })
		}},
		{name: "5 s latency", begin: func(t *testing.T, at *redisAt) {
			t.Helper()
			at.proxy.delay.Store(int64(5 * time.Second))
		}},
		{name: "a read-only replica", begin: func(t *testing.T, at *redisAt) {
			t.Helper()
			require.NoError(t, at.admin.ReplicaOf(t.Context(), "127.0.0.1", "1").Err())
		}},
	}
)

// requireStat requires that one of Redis' own counters is not 0.
func requireStat(t *testing.T, client *redis.Client, name string) {
	t.Helper()
	stats, err := client.Info(context.WithoutCancel(t.Context()), "stats").Result()
	require.NoError(t, err)
	require.Regexp(t, name+`[1-9]`, stats)
}

// redisAt is the Redis of one examination.
type redisAt struct {
	node  *devstack.RedisNode
	proxy *proxy
	admin *redis.Client
}

// The same answers everywhere, and the table in docs/fronts.md that says so.
func TestCase_S11_SameAnswersEverywhere(t *testing.T) { //nolint:tparallel // the table needs all of them
	t.Parallel()
	var mu sync.Mutex
	verdicts := map[string]string{}
	record := func(t *testing.T, cell string) {
		t.Helper()
		t.Cleanup(func() {
			mu.Lock()
			defer mu.Unlock()
			verdicts[cell] = "same answer"
			if t.Failed() {
				verdicts[cell] = "FAILED"
			}
		})
	}
	t.Run("with", func(t *testing.T) { //nolint:paralleltest // it ends when all of them have
		for _, column := range columns {
			if !column.with.redis {
				t.Run(column.name, func(t *testing.T) {
					t.Parallel()
					record(t, column.name+"/"+conditions[0].name)
					idempotencytest.Run(t, newShop(t, column.with, "", "", nil).service())
				})
				continue
			}
			for _, condition := range conditions {
				t.Run(column.name+"/"+condition.name, func(t *testing.T) {
					t.Parallel()
					record(t, column.name+"/"+condition.name)
					node, password := ownRedis(t, condition.lines...)
					at := &redisAt{node: node, proxy: newProxy(t, node.Address()), admin: admin(t, node, password)}
					s := newShop(t, column.with, at.proxy.address(), password, nil)
					if condition.begin != nil {
						condition.begin(t, at)
					}
					idempotencytest.Run(t, s.service())
				})
			}
		}
	})
	if len(verdicts) < 2+2*len(conditions) {
		return // only some were asked for
	}
	requireInGuide(t, tableOf(verdicts))
}

// tableOf has the conditions as rows and the fronts as columns.
func tableOf(verdicts map[string]string) string {
	var b strings.Builder
	b.WriteString("| Redis |")
	rule := "|---|"
	for _, column := range columns {
		b.WriteString(" " + column.name + " |")
		rule += "---|"
	}
	b.WriteString("\n" + rule + "\n")
	for _, condition := range conditions {
		b.WriteString("| " + condition.name + " |")
		for _, column := range columns {
			b.WriteString(" " + cmp.Or(verdicts[column.name+"/"+condition.name], "no Redis") + " |")
		}
		b.WriteString("\n")
	}
	return b.String()
}

const guide = "../../docs/fronts.md"

// requireInGuide compares with the guide, or writes it anew with PGONCE_UPDATE=1.
func requireInGuide(t *testing.T, table string) {
	t.Helper()
	text, err := os.ReadFile(guide)
	require.NoError(t, err)
	const begin, end = "<!-- the suite's table -->\n\n", "\n<!-- end of it -->"
	before, rest, found := strings.Cut(string(text), begin)
	require.True(t, found)
	old, after, found := strings.Cut(rest, end)
	require.True(t, found)
	if os.Getenv("PGONCE_UPDATE") != "" && !t.Failed() {
		require.NoError(t, os.WriteFile(guide, []byte(before+begin+table+end+after), 0o600))
		return
	}
	require.Equal(t, table, old, "run the test with PGONCE_UPDATE=1 to write the table anew")
}
