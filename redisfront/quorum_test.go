package redisfront_test

import (
	"context"
	"errors"
	"fmt"
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

// ensemble is the servers of a quorum.
type ensemble struct {
	nodes   []*devstack.RedisNode
	clients []redis.UniversalClient
	prefix  string
}

func startEnsemble(t *testing.T, n int) *ensemble {
	t.Helper()
	servers, e := startNodes(t), &ensemble{prefix: newPrefix()}
	for range n {
		node, err := servers.Add(t.Context())
		require.NoError(t, err)
		e.nodes, e.clients = append(e.nodes, node), append(e.clients, direct(t, node))
	}
	return e
}

// front is one process's.
func (e *ensemble) front(t *testing.T, client redis.UniversalClient, change ...func(*redisfront.Config)) *redisfront.Front {
	t.Helper()
	return frontOn(t, client, append(change, func(c *redisfront.Config) { c.Quorum, c.Prefix = e.clients, e.prefix })...)
}

// marks counts the servers that have a key's mark.
func (e *ensemble) marks(ctx context.Context, f *redisfront.Front, key idempotency.Key) (n int64) {
	for _, c := range e.clients {
		n += c.Exists(ctx, f.MarkName(key)).Val()
	}
	return n
}

func TestQuorum_SurvivesAMinority(t *testing.T) {
	t.Parallel()
	for _, n := range []int{3, 5, 7} {
		t.Run(fmt.Sprint(n), func(t *testing.T) {
			t.Parallel()
			ctx, e, client := t.Context(), startEnsemble(t, n), newClient(t)
			f, other := e.front(t, client), e.front(t, client)
			for i := range n / 2 { // killed and paused by turns
				if i%2 == 0 {
					require.NoError(t, e.nodes[i].Kill())
				} else {
					require.NoError(t, e.nodes[i].Pause())
				}
			}
			key, mark := newKey(t), idempotency.NewAttemptToken()
			began := time.Now()
			require.NoError(t, begin(t, f, about(key), mark))
			require.Less(t, time.Since(began), time.Second)
			require.ErrorIs(t, begin(t, other, about(key), idempotency.NewAttemptToken()), idempotency.ErrInProgress)
			require.NoError(t, f.Renew(ctx, key, mark, time.Minute))
			waiting, woken := make(chan struct{}), make(chan error)
			go func() { close(waiting); woken <- other.Wait(ctx, key) }()
			<-waiting
			publish(t, f, success(key, 1, "a foreign mark stays"))
			require.NoError(t, other.Evict(ctx, key))
			require.ErrorIs(t, begin(t, other, about(key), idempotency.NewAttemptToken()), idempotency.ErrInProgress)
			f.End(ctx, key, mark)
			require.NoError(t, <-woken)

			own := success(key, 2, "answer")
			require.Eventually(t, func() bool { return begin(t, other, about(key), own.Mark) == nil }, 5*time.Second, 5*time.Millisecond)
			publish(t, other, own)
			result, found := lookup(t, f, about(key))
			require.True(t, found)
			require.Equal(t, "answer", result)
			require.Eventually(t, func() bool { return f.Wait(ctx, key) == nil }, 5*time.Second, 5*time.Millisecond)

			// One more, and there is no majority: no mark, and the entries are not concerned.
			last := e.nodes[n/2]
			require.NoError(t, last.Kill())
			require.Eventually(t, func() bool {
				err := begin(t, f, about(newKey(t)), idempotency.NewAttemptToken())
				return err != nil && !errors.Is(err, idempotency.ErrInProgress)
			}, 5*time.Second, 5*time.Millisecond)
			asked := &asked{marks: map[any]bool{}}
			for _, c := range e.clients {
				c.AddHook(onCommand(asked.hook))
			}
			for range 100 {
				key := newKey(t)
				require.Error(t, begin(t, f, about(key), idempotency.NewAttemptToken()))
				require.False(t, asked.about(f.MarkName(key)), "not asked again by callers")
			}
			require.False(t, f.Degraded())
			_, found = lookup(t, f, about(key))
			require.True(t, found)
			require.NoError(t, last.Start(ctx))
			require.Eventually(t, func() bool {
				key := newKey(t)
				return begin(t, f, about(key), idempotency.NewAttemptToken()) == nil && asked.about(f.MarkName(key))
			}, 30*time.Second, 10*time.Millisecond, "asked again, which is seen")
		})
	}
}

// asked notes for which marks nodes were asked.
type asked struct {
	mu    sync.Mutex
	marks map[any]bool
}

func (a *asked) about(mark string) bool {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.marks[mark]
}

func (a *asked) hook(next redis.ProcessHook) redis.ProcessHook {
	return func(ctx context.Context, cmd redis.Cmder) error {
		if cmd.Name() == "set" {
			a.mu.Lock()
			a.marks[cmd.Args()[1]] = true
			a.mu.Unlock()
		}
		return next(ctx, cmd)
	}
}

// Marks keep duplicates apart also while the entries cannot be asked.
func TestQuorum_WithoutTheEntries(t *testing.T) {
	t.Parallel()
	e, entries := startEnsemble(t, 3), startNodes(t)
	node, err := entries.Add(t.Context())
	require.NoError(t, err)
	client := direct(t, node)
	f, other, key := e.front(t, client), e.front(t, client), newKey(t)
	require.NoError(t, node.Kill())
	mark := idempotency.NewAttemptToken()
	require.NoError(t, begin(t, f, about(key), mark))
	require.ErrorIs(t, begin(t, other, about(key), idempotency.NewAttemptToken()), idempotency.ErrInProgress)
	f.End(t.Context(), key, mark)
	require.NoError(t, other.Wait(t.Context(), key))
	require.Eventually(t, func() bool { return e.marks(t.Context(), f, key) == 0 }, 5*time.Second, 5*time.Millisecond)
}

// What a caller has got on some nodes when it goes away does not stay there for the mark's life.
func TestQuorum_NothingStaysOfACallerThatIsGone(t *testing.T) {
	t.Parallel()
	e := startEnsemble(t, 3)
	f, key := e.front(t, newClient(t)), newKey(t)
	ctx, cancel := context.WithCancel(t.Context())
	require.NoError(t, e.nodes[0].Pause())
	require.NoError(t, e.nodes[1].Pause())
	ended := make(chan error)
	go func() {
		_, err := f.TakeOnQuorum(ctx, key, idempotency.NewAttemptToken(), time.Hour)
		ended <- err
	}()
	require.Eventually(t, func() bool { return e.clients[2].Exists(t.Context(), f.MarkName(key)).Val() == 1 }, 5*time.Second, time.Millisecond)
	cancel()
	require.NoError(t, e.nodes[0].Resume())
	require.NoError(t, e.nodes[1].Resume())
	require.ErrorIs(t, <-ended, context.Canceled)
	require.Eventually(t, func() bool { return e.marks(t.Context(), f, key) == 0 }, 5*time.Second, 5*time.Millisecond)
}

// A majority is enough for a mark: what ends it, or what somebody else was refused, may overtake its request to the slowest node.
func TestQuorum_NothingStaysOnASlowNode(t *testing.T) {
	t.Parallel()
	ctx, e := t.Context(), startEnsemble(t, 3)
	slow := &slowWrites{}
	e.clients[2].AddHook(onCommand(slow.hook))
	f, other, key, mark := e.front(t, newClient(t)), e.front(t, newClient(t)), newKey(t), idempotency.NewAttemptToken()
	_, err := f.TakeOnQuorum(ctx, key, mark, time.Hour)
	require.NoError(t, err)
	_, err = other.TakeOnQuorum(ctx, key, idempotency.NewAttemptToken(), time.Hour)
	require.Error(t, err)
	f.End(ctx, key, mark)
	require.Eventually(t, func() bool { return slow.written.Load() == 2 && e.marks(ctx, f, key) == 0 }, 30*time.Second, 5*time.Millisecond)
}

// slowWrites has a node's marks set a moment late.
type slowWrites struct{ written atomic.Int64 }

func (s *slowWrites) hook(next redis.ProcessHook) redis.ProcessHook {
	return func(ctx context.Context, cmd redis.Cmder) error {
		if cmd.Name() != "set" {
			return next(ctx, cmd)
		}
		time.Sleep(50 * time.Millisecond) // an end takes less than one
		defer s.written.Add(1)
		return next(context.WithoutCancel(ctx), cmd) // it was on its way when nobody waited for it any more
	}
}

// Three tries: the votes are split when it begins, and not any more a moment later.
func TestQuorum_SplitVotesAreTriedAgain(t *testing.T) {
	t.Parallel()
	ctx, e := t.Context(), startEnsemble(t, 3)
	f, key := e.front(t, newClient(t)), newKey(t)
	require.NoError(t, e.nodes[0].Kill())
	require.NoError(t, e.clients[1].Set(ctx, f.MarkName(key), "another attempt's", time.Minute).Err())
	e.clients[1].AddHook(yields(direct(t, e.nodes[1]), f.MarkName(key)))
	began := time.Now()
	left, err := f.TakeOnQuorum(ctx, key, idempotency.NewAttemptToken(), time.Minute)
	require.NoError(t, err)
	require.GreaterOrEqual(t, time.Since(began), 50*time.Millisecond, "half of the first pause")
	require.InDelta(t, time.Minute-time.Minute/100, left, float64(time.Second), "less the drift")

	require.NoError(t, e.clients[1].Set(ctx, f.MarkName(newKey(t)), "another attempt's", time.Minute).Err())
	split := newKey(t)
	require.NoError(t, e.clients[1].Set(ctx, f.MarkName(split), "another attempt's", time.Minute).Err())
	began = time.Now()
	_, err = f.TakeOnQuorum(ctx, split, idempotency.NewAttemptToken(), time.Minute)
	require.Error(t, err)
	require.GreaterOrEqual(t, time.Since(began), 150*time.Millisecond, "half of both pauses")
	require.EqualValues(t, 1, e.marks(ctx, f, split), "the other's only")
}

// yields lets go of a mark when it has refused somebody.
func yields(client *redis.Client, mark string) onCommand {
	once := sync.OnceFunc(func() { _ = client.Del(context.Background(), mark) })
	return func(next redis.ProcessHook) redis.ProcessHook {
		return func(ctx context.Context, cmd redis.Cmder) error {
			err := next(ctx, cmd)
			if cmd.Name() == "set" && cmd.Args()[1] == mark {
				once()
			}
			return err
		}
	}
}

// While a minority is paused again and again, no two callers have the same mark at one time.
func TestQuorum_OneAtATime(t *testing.T) {
	t.Parallel()
	ctx, e, client := t.Context(), startEnsemble(t, 3), newClient(t)
	key := newKey(t)
	until := time.Now().Add(time.Duration(scaled(2, 10)) * time.Second)
	var inside, most, turns atomic.Int64
	more := func() bool { // on a slow machine until there were enough turns
		now := time.Now()
		return now.Before(until) || turns.Load() <= 5 && now.Before(until.Add(time.Minute))
	}
	var group sync.WaitGroup
	for range 4 {
		f := e.front(t, client)
		group.Go(func() {
			for more() {
				mark := idempotency.NewAttemptToken()
				if _, _, err := f.Begin(ctx, about(key), mark, time.Minute); err != nil {
					time.Sleep(5 * time.Millisecond)
					continue
				}
				turns.Add(1)
				most.Store(max(most.Load(), inside.Add(1)))
				time.Sleep(5 * time.Millisecond)
				inside.Add(-1)
				f.End(ctx, key, mark)
			}
		})
	}
	for i := 0; more(); i++ {
		node := e.nodes[i%3]
		require.NoError(t, node.Pause())
		time.Sleep(100 * time.Millisecond)
		require.NoError(t, node.Resume())
		time.Sleep(100 * time.Millisecond)
	}
	group.Wait()
	require.EqualValues(t, 1, most.Load())
	require.Greater(t, turns.Load(), int64(5))
	t.Logf("faults: redis quorum of 3, one paused by turns: %d turns, at most %d at a time", turns.Load(), most.Load())
}

func TestNew_RefusesAWrongQuorum(t *testing.T) {
	t.Parallel()
	good := newClient(t)
	slow := redis.NewClient(&redis.Options{})
	t.Cleanup(func() { require.NoError(t, slow.Close()) })
	for _, nodes := range [][]redis.UniversalClient{
		{good}, {good, good}, {good, good, good, good}, {good, good, nil}, {good, slow, good}, make([]redis.UniversalClient, 9),
	} {
		_, err := redisfront.New(good, &redisfront.Config{Quorum: nodes})
		require.ErrorIs(t, err, idempotency.ErrConfig)
		require.ErrorContains(t, err, "Quorum")
	}
}
