package redisfront_test

import (
	"context"
	"errors"
	"runtime"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"github.com/pgonce/pgonce/idempotency"
	"github.com/pgonce/pgonce/redisfront"
)

var mail = idempotency.Operation{Name: "mail.send", Strategy: idempotency.StrategyCache, Wait: 10 * time.Second, Lease: time.Second}

// declares makes a front on which Do knows mail, changed.
func declares(change ...func(*idempotency.Operation)) func(*redisfront.Config) {
	op := mail
	for _, c := range change {
		c(&op)
	}
	return func(c *redisfront.Config) { c.Operations = []idempotency.Operation{op} }
}

func noWait(op *idempotency.Operation) { op.Wait = idempotency.NoWait }

func mailRequest(t *testing.T) idempotency.Request {
	t.Helper()
	key, err := mail.Key(idempotency.SingleTenant, newKey(t).Value())
	require.NoError(t, err)
	return idempotency.Request{Key: key, Fingerprint: payload}
}

type receipt struct {
	ID int64 `json:"id"`
}

// sends counts how often the effect was made, and returns its number.
type sends struct{ n atomic.Int64 }

// requireEnds waits for a context's end.
func requireEnds(t *testing.T, ctx context.Context) {
	t.Helper()
	select {
	case <-ctx.Done():
	case <-time.After(10 * mail.Lease):
		require.FailNow(t, "the context does not end")
	}
}

func (s *sends) send(context.Context) (receipt, error) { return receipt{s.n.Add(1)}, nil }

func TestDo_OnceThenReplays(t *testing.T) {
	t.Parallel()
	ctx, events, s, req := t.Context(), newEvents(), sends{}, mailRequest(t)
	f := newFront(t, declares(), func(c *redisfront.Config) { c.OnEvent = events.add })
	first, err := redisfront.Do(ctx, f, req, s.send)
	require.NoError(t, err)
	require.Equal(t, receipt{1}, first.Value)
	require.False(t, first.Replayed)
	require.True(t, first.Kept)
	for range 3 {
		again, err := redisfront.Do(ctx, f, req, s.send)
		require.NoError(t, err)
		require.True(t, again.Replayed)
		require.Equal(t, first.Value, again.Value)
		require.Equal(t, first.Record, again.Record)
	}
	changed := req
	changed.Fingerprint = other
	_, err = redisfront.Do(ctx, f, changed, s.send)
	require.ErrorIs(t, err, idempotency.ErrMismatch)
	require.EqualValues(t, 1, s.n.Load())
	require.Equal(t, 1, count[idempotency.Executed](events))
	require.Equal(t, 3, count[idempotency.Replayed](events))
	require.Equal(t, 1, count[idempotency.Refused](events))

	ask := idempotency.Ask{Key: req.Key, Fingerprint: payload, Epoch: "cache"}
	_, found := lookup(t, f, ask)
	require.False(t, found, "no other strategy sees it")
}

// Cases L06, S05 and L17: everything has an end from its first moment on, and the lock's is not the outcome's.
func TestCase_S05_TimesToLive(t *testing.T) {
	t.Parallel()
	ctx, client, prefix := t.Context(), newClient(t), newPrefix()
	f := newFront(t, declares(), func(c *redisfront.Config) { c.Prefix = prefix })
	only := func() (string, time.Duration) {
		names, err := client.Keys(ctx, prefix+"*").Result()
		require.NoError(t, err)
		require.Len(t, names, 1)
		left, err := client.PTTL(ctx, names[0]).Result()
		require.NoError(t, err)
		return names[0], left
	}
	_, err := redisfront.Do(ctx, f, mailRequest(t), func(context.Context) (receipt, error) {
		name, left := only()
		require.Regexp(t, `^`+prefix+`[0-9a-f]{8}:\{[A-Za-z0-9_-]{22}\}:mark:cache$`, name)
		require.Positive(t, left)
		require.LessOrEqual(t, left, mail.Lease)
		return receipt{1}, nil
	})
	require.NoError(t, err)
	name, left := only()
	require.Regexp(t, `:entry:cache$`, name)
	require.InDelta(t, redisfront.DefaultCacheRetention, left, float64(time.Minute))
}

// Case R05: duplicates wait for the first, in one process and in another, and replay it.
func TestCase_R05_DuplicatesWaitAndReplay(t *testing.T) {
	t.Parallel()
	ctx, s, req := t.Context(), sends{}, mailRequest(t)
	prefix := newPrefix()
	same := func(c *redisfront.Config) { c.Prefix = prefix }
	fronts := []*redisfront.Front{newFront(t, declares(), same), newFront(t, declares(), same)}
	var group sync.WaitGroup
	var replays atomic.Int64
	for i := range 50 {
		group.Go(func() {
			res, err := redisfront.Do(ctx, fronts[i%2], req, func(ctx context.Context) (receipt, error) {
				time.Sleep(200 * time.Millisecond)
				return s.send(ctx)
			})
			if err == nil && res.Value == (receipt{1}) && res.Replayed {
				replays.Add(1)
			}
		})
	}
	group.Wait()
	require.EqualValues(t, 1, s.n.Load())
	require.EqualValues(t, 49, replays.Load())
}

func TestDo_InProgress(t *testing.T) {
	t.Parallel()
	ctx, s, req := t.Context(), sends{}, mailRequest(t)
	f := newFront(t, declares(noWait))
	_, err := redisfront.Do(ctx, f, req, func(ctx context.Context) (receipt, error) {
		_, err := redisfront.Do(ctx, f, req, s.send)
		var busy *idempotency.InProgressError
		require.ErrorAs(t, err, &busy)
		require.GreaterOrEqual(t, busy.RetryAfter, time.Second)
		changed := req
		changed.Fingerprint = other
		_, err = redisfront.Do(ctx, f, changed, s.send)
		require.ErrorIs(t, err, idempotency.ErrMismatch)
		return receipt{7}, nil
	})
	require.NoError(t, err)
	require.Zero(t, s.n.Load())
}

// Cases L21 and S12: however the function ends without an outcome, a retry runs at once.
func TestCase_L21_EveryOddExitFreesTheKey(t *testing.T) {
	t.Parallel()
	wrong := errors.New("mailbox is full")
	for name, end := range map[string]func() (receipt, error){
		"error":  func() (receipt, error) { return receipt{}, wrong },
		"panic":  func() (receipt, error) { panic(wrong) },
		"Goexit": func() (receipt, error) { runtime.Goexit(); return receipt{}, nil },
		// Sentinels of ours that are another call's.
		"another's error": func() (receipt, error) { return receipt{}, redisfront.ErrUnavailable },
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			ctx, req, s, events := t.Context(), mailRequest(t), sends{}, newEvents()
			f := newFront(t, declares(noWait), func(c *redisfront.Config) { c.OnEvent, c.Unprotected = events.add, true })
			ended := make(chan struct{})
			runs := 0
			go func() {
				defer close(ended)
				defer func() { _ = recover() }()
				_, err := redisfront.Do(ctx, f, req, func(context.Context) (receipt, error) { runs++; return end() })
				if err == nil || !errors.Is(err, wrong) && !errors.Is(err, redisfront.ErrUnavailable) {
					t.Errorf("returned %v", err)
				}
			}()
			<-ended
			require.Equal(t, 1, runs)
			res, err := redisfront.Do(ctx, f, req, s.send)
			require.NoError(t, err)
			require.False(t, res.Replayed)
			require.EqualValues(t, 1, s.n.Load())
		})
	}
}

// Case L10 and L07: the lock of a function that takes longer is renewed; one that is lost is another's, and a late owner
// changes nothing.
func TestCase_L07_LateOwnerChangesNothing(t *testing.T) { //nolint:tparallel // its parts end one another's locks
	t.Parallel()
	ctx, client, prefix := t.Context(), newClient(t), newPrefix()
	same := func(c *redisfront.Config) { c.Prefix = prefix }
	f := newFront(t, declares(noWait), same)
	// steal ends the lock, as Redis does when its owner was stopped for longer than the lock lives.
	steal := func() {
		names, err := client.Keys(ctx, prefix+"*:mark:cache").Result()
		require.NoError(t, err)
		require.NoError(t, client.Del(ctx, names...).Err())
	}

	t.Run("renewed", func(t *testing.T) {
		s, req := sends{}, mailRequest(t)
		_, err := redisfront.Do(ctx, f, req, func(fctx context.Context) (receipt, error) {
			for began := time.Now(); time.Since(began) < 2500*time.Millisecond; time.Sleep(20 * time.Millisecond) {
				_, err := redisfront.Do(ctx, f, req, s.send)
				require.ErrorIs(t, err, idempotency.ErrInProgress)
			}
			return receipt{7}, fctx.Err()
		})
		require.NoError(t, err)
	})
	t.Run("nobody followed", func(t *testing.T) {
		req := mailRequest(t)
		res, err := redisfront.Do(ctx, f, req, func(fctx context.Context) (receipt, error) {
			steal()
			time.Sleep(mail.Lease) // it is taken again
			names, err := client.Keys(ctx, prefix+"*:mark:cache").Result()
			require.NoError(t, err)
			require.Len(t, names, 1)
			return receipt{7}, fctx.Err()
		})
		require.NoError(t, err)
		require.True(t, res.Kept)
	})
	t.Run("the next one is done", func(t *testing.T) {
		s, req := sends{}, mailRequest(t)
		res, err := redisfront.Do(ctx, f, req, func(fctx context.Context) (receipt, error) {
			steal()
			next, err := redisfront.Do(ctx, f, req, s.send)
			require.NoError(t, err)
			require.False(t, next.Replayed)
			requireEnds(t, fctx)
			require.ErrorIs(t, context.Cause(fctx), redisfront.ErrLockLost)
			return receipt{99}, nil
		})
		require.NoError(t, err)
		require.True(t, res.Replayed)
		require.Equal(t, receipt{1}, res.Value, "the one that was told first")
	})
	t.Run("the next one runs", func(t *testing.T) {
		s, req := sends{}, mailRequest(t)
		nextRuns, finish, nextEnded := make(chan struct{}), make(chan struct{}), make(chan error)
		_, err := redisfront.Do(ctx, f, req, func(context.Context) (receipt, error) {
			steal()
			go func() {
				_, err := redisfront.Do(ctx, f, req, func(ctx context.Context) (receipt, error) {
					close(nextRuns)
					<-finish
					return s.send(ctx)
				})
				nextEnded <- err
			}()
			<-nextRuns
			return receipt{99}, nil
		})
		require.ErrorIs(t, err, redisfront.ErrLockLost)
		_, err = redisfront.Do(ctx, f, req, s.send)
		require.ErrorIs(t, err, idempotency.ErrInProgress, "the late owner has left the next one's lock alone")
		close(finish)
		require.NoError(t, <-nextEnded)
		res, err := redisfront.Do(ctx, f, req, s.send)
		require.NoError(t, err)
		require.Equal(t, receipt{1}, res.Value)
		require.True(t, res.Replayed)
	})
}

// Case L15, for CACHE: an error and no run, or by choice a run that is not kept; and it is over by itself.
func TestCase_L15_RedisIsAway(t *testing.T) {
	t.Parallel()
	ctx, node := t.Context(), startNodes(t)
	server, err := node.Add(ctx)
	require.NoError(t, err)
	client := direct(t, server)
	prefix := newPrefix()
	on := func(unprotected bool) *redisfront.Front {
		return frontOn(t, client, declares(), hurried, func(c *redisfront.Config) { c.Prefix, c.Unprotected = prefix, unprotected })
	}
	careful, careless := on(false), on(true)
	require.NoError(t, server.Kill())
	began, s, req := time.Now(), sends{}, mailRequest(t)
	for range 100 {
		_, err := redisfront.Do(ctx, careful, req, s.send)
		require.ErrorIs(t, err, redisfront.ErrUnavailable)
		var e *redisfront.Error
		require.ErrorAs(t, err, &e)
	}
	require.Zero(t, s.n.Load())
	for i := range 100 {
		res, err := redisfront.Do(ctx, careless, req, s.send)
		require.NoError(t, err)
		require.Equal(t, receipt{int64(i + 1)}, res.Value)
		require.False(t, res.Kept)
	}
	require.Less(t, time.Since(began), 5*time.Second, "two timeouts, and 198 calls that were not made")
	require.NoError(t, server.Start(ctx))
	for _, f := range []*redisfront.Front{careful, careless} {
		require.Eventually(t, func() bool { return !f.Degraded() }, 10*time.Second, 10*time.Millisecond)
	}
	_, err = redisfront.Do(ctx, careful, req, s.send)
	require.NoError(t, err)
	res, err := redisfront.Do(ctx, careless, req, s.send)
	require.NoError(t, err)
	require.True(t, res.Replayed)

	// It goes away while the function runs: the caller has its value, and is told that it is not kept.
	began = time.Now()
	res, err = redisfront.Do(ctx, careful, mailRequest(t), func(fctx context.Context) (receipt, error) {
		require.NoError(t, server.Kill())
		requireEnds(t, fctx)
		require.ErrorIs(t, context.Cause(fctx), redisfront.ErrLockLost, "nobody knows who has the lock")
		return receipt{5}, nil
	})
	require.NoError(t, err)
	require.False(t, res.Kept)
	require.Equal(t, receipt{5}, res.Value)
	require.Less(t, time.Since(began), 5*time.Second)
}

// Case L01: a reply that is lost and a script that is sent again.
func TestCase_L01_KeepIsSentAgain(t *testing.T) {
	t.Parallel()
	ctx, client := t.Context(), newClient(t)
	source, err := redisfront.Source("keep")
	require.NoError(t, err)
	entry, mark := newPrefix()+"{l01}:entry", newPrefix()+"{l01}:mark"
	keep := func(token, body string) any {
		reply, err := redis.NewScript(source).Run(ctx, client, []string{entry, mark}, "cache", token, body, 60000, "l01").Slice()
		require.NoError(t, err)
		return reply[0]
	}
	require.NoError(t, client.Set(ctx, mark, "token-a and a fingerprint", time.Minute).Err())
	for range 2 {
		require.EqualValues(t, redisfront.CodeOK, keep("token-a", "first"))
	}
	require.EqualValues(t, redisfront.CodeDone, keep("token-b", "second"))
	body, err := client.HGet(ctx, entry, "body").Result()
	require.NoError(t, err)
	require.Equal(t, "first", body)
	require.Zero(t, client.Exists(ctx, mark).Val())
	require.NoError(t, client.Del(ctx, entry).Err())
	require.NoError(t, client.Set(ctx, mark, "token-b and a fingerprint", time.Minute).Err())
	require.EqualValues(t, redisfront.CodeBusy, keep("token-a", "late"))
	require.Zero(t, client.Exists(ctx, entry).Val())
}

// Case L19: a caller that goes away while it waits harms nobody.
func TestCase_L19_CallersThatGoAway(t *testing.T) {
	t.Parallel()
	ctx, s, req := t.Context(), sends{}, mailRequest(t)
	f := newFront(t, declares())
	_, err := redisfront.Do(ctx, f, req, func(context.Context) (receipt, error) {
		gone, cancel := context.WithTimeout(ctx, 30*time.Millisecond)
		defer cancel()
		_, err := redisfront.Do(gone, f, req, s.send)
		require.ErrorIs(t, err, idempotency.ErrInProgress)
		require.ErrorIs(t, err, context.DeadlineExceeded)
		return receipt{7}, nil
	})
	require.NoError(t, err)
	// The first caller's end does not stop the outcome.
	leaving, leave := context.WithCancel(ctx)
	second := mailRequest(t)
	res, err := redisfront.Do(leaving, f, second, func(context.Context) (receipt, error) { leave(); return receipt{8}, nil })
	require.NoError(t, err)
	require.True(t, res.Kept)
	res, err = redisfront.Do(ctx, f, second, s.send)
	require.NoError(t, err)
	require.Equal(t, receipt{8}, res.Value)
	require.Zero(t, s.n.Load())
}
