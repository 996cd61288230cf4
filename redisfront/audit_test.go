package redisfront_test

import (
	"context"
	"fmt"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"github.com/pgonce/pgonce/idempotency"
	"github.com/pgonce/pgonce/redisfront"
)

// everything goes through a front once.
func everything(t *testing.T, f *redisfront.Front, operations ...string) (all []idempotency.Kept) {
	t.Helper()
	scanner := f.Scan(operations)
	for {
		page, done, err := scanner.Next(t.Context())
		require.NoError(t, err)
		all = append(all, page...)
		if done {
			return all
		}
	}
}

func TestAudit_TellsWhatIsThere(t *testing.T) {
	t.Parallel()
	f, client := newFront(t), newClient(t)
	key, marked := newKey(t), newKey(t)
	own := success(key, 7, "result")
	publish(t, f, own)
	require.NoError(t, begin(t, f, about(marked), idempotency.NewAttemptToken()))
	all := everything(t, f, key.Operation())
	require.Len(t, all, 2)
	for _, k := range all {
		require.False(t, k.Unreadable)
		require.Positive(t, k.Life)
		if k.Mark {
			require.Equal(t, f.MarkName(marked), k.Name)
			require.Equal(t, marked.LockID(), k.LockID, "the lock in PostgreSQL is found by the name alone")
			continue
		}
		require.Equal(t, f.EntryName(key), k.Name)
		require.Equal(t, key.LockID(), k.LockID)
		require.Equal(t, own.Record, k.Record)
		require.Equal(t, "one", k.Epoch)
	}
	require.Empty(t, everything(t, f, "another"))

	kept, err := f.Inspect(t.Context(), []idempotency.Key{marked, key})
	require.NoError(t, err)
	require.Empty(t, kept[0].Name)
	require.Equal(t, own.Record, kept[1].Record)

	// An entry under another key's name is no entry.
	copied := newKey(t)
	body, err := client.HGetAll(t.Context(), f.EntryName(key)).Result()
	require.NoError(t, err)
	require.NoError(t, client.HSet(t.Context(), f.EntryName(copied), body).Err())
	kept, err = f.Inspect(t.Context(), []idempotency.Key{copied})
	require.NoError(t, err)
	require.True(t, kept[0].Unreadable)
	require.Negative(t, kept[0].Life)
	require.NoError(t, client.Del(t.Context(), f.EntryName(copied)).Err())
}

// Between the look and the removal something else may come: that stays.
func TestAudit_DiscardsOnlyWhatWasSeen(t *testing.T) {
	t.Parallel()
	f, client := newFront(t), newClient(t)
	ctx, key := t.Context(), newKey(t)
	look := func() []idempotency.Kept {
		all := everything(t, f, key.Operation())
		require.Len(t, all, 1)
		return all
	}
	discard := func(kept []idempotency.Kept) int {
		n, err := f.Discard(ctx, kept)
		require.NoError(t, err)
		return n
	}
	publish(t, f, success(key, 1, "first"))
	seen := look()
	publish(t, f, success(key, 1, "second")) // the same fence, another body
	require.Zero(t, discard(seen))
	seen = look()
	publish(t, f, success(key, 2, "third"))
	require.Zero(t, discard(seen))
	seen = look()
	require.Equal(t, 1, discard(seen))
	require.Zero(t, discard(seen), "sent again it finds nothing")
	require.Empty(t, everything(t, f, key.Operation()))

	mark := idempotency.NewAttemptToken()
	require.NoError(t, begin(t, f, about(key), mark))
	seen = look()
	end(t, f, key, mark)
	require.NoError(t, begin(t, f, about(key), idempotency.NewAttemptToken()))
	require.Zero(t, discard(seen))
	again, err := f.Reinspect(ctx, seen)
	require.NoError(t, err)
	require.NotEqual(t, seen[0].Content, again[0].Content)
	woken := make(chan error, 1)
	go func() { woken <- f.Wait(ctx, key) }()
	time.Sleep(20 * time.Millisecond)
	require.Equal(t, 1, discard(look()))
	require.NoError(t, <-woken, "who waited for it is woken")

	require.NoError(t, client.LPush(ctx, f.EntryName(key), "x").Err())
	seen = look()
	require.True(t, seen[0].Foreign)
	require.NoError(t, client.Del(ctx, f.EntryName(key)).Err())
	publish(t, f, success(key, 3, "fourth"))
	require.Zero(t, discard(seen))
	require.Equal(t, 1, discard(look()))
}

func TestAudit_OfWhatIsSealed(t *testing.T) {
	t.Parallel()
	sealer, err := redisfront.NewAESGCM(1, map[byte][]byte{1: []byte("0123456789abcdef")})
	require.NoError(t, err)
	prefix := newPrefix()
	f := newFront(t, func(c *redisfront.Config) { c.Sealer, c.Prefix = sealer, prefix })
	key := newKey(t)
	own := success(key, 1, "secret")
	publish(t, f, own)
	all := everything(t, f, key.Operation())
	require.Len(t, all, 1)
	require.Equal(t, own.Record, all[0].Record)
	plain := newFront(t, func(c *redisfront.Config) { c.Prefix = prefix })
	all = everything(t, plain, key.Operation())
	require.Len(t, all, 1)
	require.True(t, all[0].Unreadable)
}

// A prefix is text, not a pattern, and more than one page is gone through.
func TestAudit_ManyAndAnOddPrefix(t *testing.T) {
	t.Parallel()
	prefix := newPrefix() + `*[a]?\:`
	f := newFront(t, func(c *redisfront.Config) { c.Prefix = prefix })
	newer := newFront(t, func(c *redisfront.Config) { c.Prefix = newPrefix() + "x[a]y:" })
	const many = 1700
	seen := map[string]bool{}
	for i := range many {
		key, err := idempotency.NewKey("acme", "order.create", fmt.Sprint("k", i))
		require.NoError(t, err)
		f.Publish(t.Context(), success(key, 1, "x"))
	}
	require.NoError(t, f.Flush(t.Context()))
	for _, k := range everything(t, f, "order.create") {
		seen[k.Name] = true
	}
	require.Len(t, seen, many)
	require.Empty(t, everything(t, newer, "order.create"))
}

// A user who may not list keys is told so, and callers are served all the same.
func TestAudit_NeedsMoreThanCallers(t *testing.T) {
	t.Parallel()
	node, err := startNodes(t).Add(t.Context())
	require.NoError(t, err)
	setUser(t, direct(t, node))
	client := redis.NewClient(&redis.Options{Addr: node.Address(), Username: "pgonce", Password: "secret", ContextTimeoutEnabled: true})
	t.Cleanup(func() { _ = client.Close() })
	f := frontOn(t, client, patient)
	key := newKey(t)
	publish(t, f, success(key, 1, "x"))
	_, _, err = f.Scan([]string{key.Operation()}).Next(t.Context())
	require.ErrorContains(t, err, "docs/redis.md")
	require.False(t, f.Degraded())
	require.NoError(t, direct(t, node).Do(t.Context(), "ACL", "SETUSER", "pgonce", "+scan", "+type").Err()) // as the guide says
	all := everything(t, f, key.Operation())
	require.Len(t, all, 1)
	n, err := f.Discard(t.Context(), all)
	require.NoError(t, err)
	require.Equal(t, 1, n)
}

func TestAudit_OfACluster(t *testing.T) {
	t.Parallel()
	c := startCluster(t, 5*time.Second)
	for _, s := range c.shards {
		for _, node := range []*redis.Client{direct(t, s.master), direct(t, s.replica)} {
			require.NoError(t, node.Do(t.Context(), "ACL", "SETUSER", "pgonce", "+scan", "+type").Err())
		}
	}
	f := frontOn(t, c.client, patient)
	const many = 300
	var own []idempotency.Key
	for range many {
		key := newKey(t)
		own = append(own, key)
		f.Publish(t.Context(), success(key, 1, "x"))
	}
	require.NoError(t, f.Flush(t.Context()))
	all := everything(t, f, own[0].Operation())
	require.Len(t, all, many)
	n, err := f.Discard(t.Context(), all)
	require.NoError(t, err)
	require.Equal(t, many, n)
	kept, err := f.Inspect(context.WithoutCancel(t.Context()), own)
	require.NoError(t, err)
	for _, k := range kept {
		require.Empty(t, k.Name)
	}
}
