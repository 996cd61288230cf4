package redisfront_test

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"github.com/pgonce/pgonce/idempotency"
	"github.com/pgonce/pgonce/internal/devstack"
	"github.com/pgonce/pgonce/redisfront"
)

// load is callers who do what a runner does with a front, and who remember what they were told.
type load struct {
	front *redisfront.Front
	name  string // of its keys
	next  atomic.Int64

	mu    sync.Mutex
	done  []idempotency.Entry // published
	wrong []string

	hits, misses, failures atomic.Int64
}

func (l *load) key(n int64) idempotency.Key {
	key, err := create.Key(idempotency.SingleTenant, fmt.Sprint(l.name, " ", n))
	if err != nil {
		panic(err) // the names are constants
	}
	return key
}

// run places keys and asks for earlier ones until ctx ends.
func (l *load) run(ctx context.Context, callers int) {
	var group sync.WaitGroup
	for range callers {
		group.Go(func() {
			for ctx.Err() == nil {
				l.place(ctx)
				l.replay(ctx, l.next.Load()*7919)
				time.Sleep(2 * time.Millisecond)
			}
		})
	}
	group.Wait()
}

func (l *load) place(ctx context.Context) {
	n := l.next.Add(1)
	e := success(l.key(n), n, fmt.Sprint("answer ", n))
	_, found, err := l.front.Begin(ctx, about(e.Record.Key), e.Mark, ttl)
	switch {
	case found, errors.Is(err, idempotency.ErrInProgress), errors.Is(err, idempotency.ErrMismatch):
		l.complain(fmt.Sprint("a key that nobody has used: ", found, err))
	case err != nil:
		l.failures.Add(1)
	}
	l.front.Publish(ctx, e)
	l.mu.Lock()
	defer l.mu.Unlock()
	l.done = append(l.done, e)
}

// replay asks for a key that was published: it is there as it was, or a miss.
func (l *load) replay(ctx context.Context, choice int64) {
	l.mu.Lock()
	e := l.done[choice%int64(len(l.done))]
	l.mu.Unlock()
	got, found, err := l.front.Lookup(ctx, about(e.Record.Key))
	switch {
	case errors.Is(err, idempotency.ErrMismatch):
		l.complain(err.Error())
	case err != nil:
		l.failures.Add(1)
	case !found:
		l.misses.Add(1)
	case string(got.Result) != string(e.Record.Result) || got.Fence != e.Record.Fence || got.Key != e.Record.Key:
		l.complain(fmt.Sprintf("%q for %q", got.Result, e.Record.Result))
	default:
		l.hits.Add(1)
	}
}

func (l *load) complain(what string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.wrong = append(l.wrong, what)
}

// spoil makes a master useless, and undo lets it come back if that is not its end.
type spoil struct {
	name string
	do   func(*devstack.RedisNode) error
	undo func(context.Context, *devstack.RedisNode) error
}

var (
	killed = spoil{"killed", (*devstack.RedisNode).Kill, func(ctx context.Context, n *devstack.RedisNode) error { return n.Start(ctx) }}
	paused = spoil{
		"paused", (*devstack.RedisNode).Pause,
		func(_ context.Context, n *devstack.RedisNode) error { return n.Resume() },
	}
)

// failover spoils a master in mid-load and demands that the front is used again, and told no lie.
func failover(t *testing.T, f *redisfront.Front, how spoil, master, replica *devstack.RedisNode, keyThere func() idempotency.Key) {
	t.Helper()
	ctx, l := t.Context(), &load{front: f, name: t.Name() + " " + how.name}
	loading, stop := context.WithCancel(ctx)
	var group sync.WaitGroup
	group.Go(func() { l.run(loading, 4) })
	defer group.Wait()
	defer stop()
	time.Sleep(300 * time.Millisecond) // of load

	// What the replica has confirmed is there afterwards, and no older fence comes over it.
	fenced, lookup := keyThere(), keyThere()
	published := func(fence int64, result string) func() bool {
		return func() bool { // a breaker that is open for another reason drops it
			f.Publish(ctx, success(fenced, fence, result))
			return f.Flush(ctx) == nil
		}
	}
	require.Eventually(t, func() bool { // a publish that took too long opens no breaker, and is lost too
		if !published(2, "new")() {
			return false
		}
		_, there, err := f.Lookup(ctx, about(fenced))
		return err == nil && there
	}, 10*time.Second, 10*time.Millisecond)
	onMaster, onReplica := direct(t, master), direct(t, replica)
	require.Eventually(t, func() bool { return replicated(ctx, onMaster, onReplica) }, 5*time.Second, 5*time.Millisecond)
	source, err := redisfront.Source("lookup")
	require.NoError(t, err)
	hash := redis.NewScript(source).Hash()
	known, err := onReplica.ScriptExists(ctx, hash).Result()
	require.NoError(t, err)
	require.Equal(t, []bool{false}, known, "scripts are not replicated")
	hits := l.hits.Load()

	began := time.Now()
	require.NoError(t, how.do(master))
	require.Eventually(t, func() bool { return isMaster(ctx, onReplica) }, 20*time.Second, 20*time.Millisecond)
	promoted := time.Since(began)
	require.Eventually(t, func() bool {
		_, _, err := f.Lookup(ctx, about(lookup))
		return err == nil && !f.Degraded()
	}, 20*time.Second, 10*time.Millisecond, "without a restart")
	back := time.Since(began)

	require.Eventually(t, published(1, "old"), 10*time.Second, 10*time.Millisecond)
	var got idempotency.Record
	require.Eventually(t, func() bool {
		var found bool
		got, found, err = f.Lookup(ctx, about(fenced))
		return err == nil && found
	}, 10*time.Second, 10*time.Millisecond)
	require.Equal(t, "new", string(got.Result))
	known, err = onReplica.ScriptExists(ctx, hash).Result()
	require.NoError(t, err)
	require.Equal(t, []bool{true}, known, "the new master was given them")

	if scaled(0, 1) == 1 { // a sentinel takes its 10 s
		require.NoError(t, how.undo(ctx, master))
		require.Eventually(t, func() bool {
			info, err := onMaster.InfoMap(ctx, "replication").Result()
			return err == nil && info["Replication"]["role"] == "slave"
		}, 20*time.Second, 20*time.Millisecond, "the old master follows the new one")
	}
	require.Eventually(t, func() bool { return l.hits.Load() > hits+100 }, 20*time.Second, 10*time.Millisecond)
	stop()
	group.Wait()
	require.Empty(t, l.wrong)
	t.Logf("faults: redis master %s: promoted after %v, used again after %v; keys %d, hits %d, misses %d, not served %d, wrong 0",
		how.name, promoted.Round(time.Millisecond), back.Round(time.Millisecond), l.next.Load(), l.hits.Load(), l.misses.Load(), l.failures.Load())
}

// replicated reports whether the replica has had all that the master has had until now.
func replicated(ctx context.Context, master, replica *redis.Client) bool {
	offset := func(c *redis.Client, field string) string {
		info, _ := c.InfoMap(ctx, "replication").Result()
		return info["Replication"][field]
	}
	m, r := offset(master, "master_repl_offset"), offset(replica, "slave_repl_offset")
	return m != "" && (len(r) > len(m) || len(r) == len(m) && r >= m)
}

// Case L14, with Sentinel.
func TestCase_L14_SentinelFailoverInMidLoad(t *testing.T) { //nolint:tparallel // alone: its timeouts are short
	for _, how := range []spoil{killed, paused}[:scaled(1, 2)] {
		t.Run(how.name, func(t *testing.T) {
			t.Parallel()
			w := startWatched(t)
			failover(t, frontOn(t, w.client, hurried), how, w.master, w.replica, func() idempotency.Key { return newKey(t) })
		})
	}
}

// Cases L03, L04, L05 and L14, in one cluster: a cluster takes 3 s to start.
func TestCase_L04_Cluster(t *testing.T) {
	c := startCluster(t, time.Second)
	t.Run("scripts", c.scripts)
	t.Run("waiters", c.waiters)
	for i, how := range []spoil{killed, paused}[:scaled(1, 2)] {
		t.Run("failover, "+how.name, func(t *testing.T) {
			events, s := newEvents(), c.shards[i]
			f := frontOn(t, c.client, hurried, func(cfg *redisfront.Config) { cfg.OnEvent = events.add })
			failover(t, f, how, s.master, s.replica, func() idempotency.Key { return c.keyIn(t, f, s) })
			require.GreaterOrEqual(t, count[idempotency.FrontDegraded](events), 2)
		})
	}
}

// keyIn returns a key of a shard.
func (c *cluster) keyIn(t *testing.T, f *redisfront.Front, s shard) idempotency.Key {
	t.Helper()
	for {
		key := newKey(t)
		slot, err := c.admin.ClusterKeySlot(t.Context(), f.EntryName(key)).Result()
		require.NoError(t, err)
		if int(slot) >= s.first && int(slot) <= s.last {
			return key
		}
	}
}

// scripts: every one, hostile keys, and pipelines that go to all nodes, with and without loaded scripts.
func (c *cluster) scripts(t *testing.T) {
	ctx, events := t.Context(), newEvents()
	f := frontOn(t, c.client, patient, func(cfg *redisfront.Config) { cfg.OnEvent = events.add })
	values := []string{"a}b{c", "{}", "{x}{y}", "{", "}", "p{q{r}s}"}
	for i := range 60 {
		values = append(values, fmt.Sprint("random ", i))
	}
	perShard := make([]int, len(c.shards))
	for round := range 2 {
		entries := make([]idempotency.Entry, 0, len(values))
		for _, value := range values {
			key, err := create.Key(fmt.Sprint("tenant ", round), value)
			require.NoError(t, err)
			e := success(key, 1, value)
			require.NoError(t, begin(t, f, about(key), e.Mark))
			require.NoError(t, f.Renew(ctx, key, e.Mark, ttl))
			entries = append(entries, e)
			slot, err := c.admin.ClusterKeySlot(ctx, f.EntryName(key)).Result()
			require.NoError(t, err)
			perShard[slices.IndexFunc(c.shards, func(s shard) bool { return int(slot) <= s.last })]++
		}
		if round == 1 {
			for _, s := range c.shards {
				require.NoError(t, direct(t, s.master).ScriptFlush(ctx).Err())
			}
		}
		for _, e := range entries {
			f.Publish(ctx, e)
		}
		require.NoError(t, f.Flush(ctx))
		for _, e := range entries {
			result, found := lookup(t, f, about(e.Record.Key))
			require.True(t, found)
			require.Equal(t, string(e.Record.Result), result)
			require.NoError(t, f.Wait(ctx, e.Record.Key))
			require.NoError(t, f.Evict(ctx, e.Record.Key))
			own := idempotency.NewAttemptToken()
			require.NoError(t, begin(t, f, about(e.Record.Key), own))
			end(t, f, e.Record.Key, own)
		}
	}
	for _, n := range perShard {
		require.Positive(t, n, "keys of every node")
	}
	require.Zero(t, count[idempotency.FrontFailed](events))
}

// waiters: messages of one node reach those who listen to another. Whoever is woken by one does not look any more; three of four
// are, where the machine leaves a message the 500 ms until the next look.
func (c *cluster) waiters(t *testing.T) {
	const waiters, rounds = 60, 10
	f, looks := frontOn(t, c.client, patient), newLooks(t)
	c.client.AddHook(onCommand(looks.hook))
	for round := 1; ; round++ {
		var woken atomic.Int64
		var group sync.WaitGroup
		for range waiters {
			key, mark := newKey(t), idempotency.NewAttemptToken()
			_, _, err := f.Begin(t.Context(), about(key), mark, time.Minute)
			require.NoError(t, err)
			group.Go(func() {
				waited := make(chan error, 1)
				go func() { waited <- f.Wait(t.Context(), key) }()
				for looks.of(f.MarkName(key)) < 6 { // every 500 ms from then on
					time.Sleep(time.Millisecond)
				}
				before := looks.of(f.MarkName(key))
				f.End(t.Context(), key, mark)
				if <-waited == nil && looks.of(f.MarkName(key)) == before {
					woken.Add(1)
				}
			})
		}
		group.Wait()
		if woken.Load() >= waiters*3/4 {
			return
		}
		require.Less(t, round, rounds, "%d of %d were woken by a message", woken.Load(), waiters)
	}
}

// looks counts how often waiters have looked at marks.
type looks struct {
	held string // the script

	mu sync.Mutex
	n  map[string]int
}

func newLooks(t *testing.T) *looks {
	t.Helper()
	source, err := redisfront.Source("held")
	require.NoError(t, err)
	return &looks{held: redis.NewScript(source).Hash(), n: map[string]int{}}
}

func (l *looks) of(mark string) int {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.n[mark]
}

func (l *looks) hook(next redis.ProcessHook) redis.ProcessHook {
	return func(ctx context.Context, cmd redis.Cmder) error {
		err := next(ctx, cmd)
		if args := cmd.Args(); len(args) > 3 && args[1] == l.held {
			l.mu.Lock()
			defer l.mu.Unlock()
			l.n[fmt.Sprint(args[3])]++
		}
		return err
	}
}

// The texts that are sent are the files and nothing of a caller's.
func TestScripts_NameNoKey(t *testing.T) {
	t.Parallel()
	for _, name := range []string{"begin", "end", "evict", "held", "lookup", "publish", "renew"} {
		source, err := redisfront.Source(name)
		require.NoError(t, err)
		for _, line := range strings.Split(source, "\n") {
			if strings.Contains(line, "redis.call") {
				require.Regexp(t, `redis\.call\('[A-Z]+', (KEYS\[\d\]|ARGV\[\d\], '')`, line, "all keys are in KEYS")
			}
		}
	}
}
