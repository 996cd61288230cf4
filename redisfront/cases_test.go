package redisfront_test

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"github.com/pgonce/pgonce/idempotency"
	"github.com/pgonce/pgonce/redisfront"
)

// Two requests of one payload are two callers: the mark is held by a token, not by what is asked for.
func TestCase_R07_TwoIdenticalRequestsAreTwoCallers(t *testing.T) {
	t.Parallel()
	f, key := newFront(t), newKey(t)
	require.NoError(t, begin(t, f, about(key), idempotency.NewAttemptToken()))
	require.ErrorIs(t, begin(t, f, about(key), idempotency.NewAttemptToken()), idempotency.ErrInProgress)
}

// Every script whose reply is lost is sent again by go-redis: what is in Redis afterwards is the same.
func TestCase_L01_ScriptsMayBeSentTwice(t *testing.T) {
	t.Parallel()
	client := newClient(t)
	mark, foreign := idempotency.NewAttemptToken(), idempotency.NewAttemptToken()
	steps := []struct {
		name string
		do   func(ctx context.Context, f *redisfront.Front, key idempotency.Key)
	}{
		{"begin", func(ctx context.Context, f *redisfront.Front, key idempotency.Key) {
			_, _, _ = f.Begin(ctx, about(key), mark, ttl)
		}},
		{"renew", func(ctx context.Context, f *redisfront.Front, key idempotency.Key) { _ = f.Renew(ctx, key, mark, ttl) }},
		{"another's end", func(ctx context.Context, f *redisfront.Front, key idempotency.Key) { f.End(ctx, key, foreign) }},
		{"publish", func(ctx context.Context, f *redisfront.Front, key idempotency.Key) {
			e := success(key, 2, "answer")
			e.Mark, e.Record.AttemptToken = mark, mark
			f.Publish(ctx, e)
		}},
		{"an older publish", func(ctx context.Context, f *redisfront.Front, key idempotency.Key) {
			f.Publish(ctx, success(key, 1, "older"))
		}},
		{"end", func(ctx context.Context, f *redisfront.Front, key idempotency.Key) { f.End(ctx, key, mark) }},
		{"evict", func(ctx context.Context, f *redisfront.Front, key idempotency.Key) { _ = f.Evict(ctx, key) }},
	}
	for upTo := range steps {
		t.Run(steps[upTo].name, func(t *testing.T) {
			t.Parallel()
			var states []string
			for times := 1; times <= 3; times++ {
				ctx := t.Context()
				prefix := fmt.Sprintf("l01-%d-%d:", upTo, times)
				f := newFront(t, func(c *redisfront.Config) { c.Prefix = prefix })
				key, err := create.Key(idempotency.SingleTenant, fmt.Sprint("l01-", upTo))
				require.NoError(t, err)
				for i := range upTo {
					steps[i].do(ctx, f, key)
					require.NoError(t, f.Flush(ctx))
				}
				for range times {
					steps[upTo].do(ctx, f, key)
					require.NoError(t, f.Flush(ctx))
				}
				states = append(states, strings.ReplaceAll(state(t, client, prefix), prefix, ""))
			}
			require.Equal(t, states[0], states[1])
			require.Equal(t, states[0], states[2])
		})
	}
}

// state is everything under a prefix, and whether it has a time to live.
func state(t *testing.T, client *redis.Client, prefix string) string {
	t.Helper()
	names, err := client.Keys(t.Context(), prefix+"*").Result()
	require.NoError(t, err)
	var b strings.Builder
	for _, name := range names {
		left, err := client.TTL(t.Context(), name).Result()
		require.NoError(t, err)
		if strings.HasSuffix(name, ":entry") {
			fields, err := client.HGetAll(t.Context(), name).Result()
			require.NoError(t, err)
			fmt.Fprintln(&b, name, fields, left > 0)
			continue
		}
		value, err := client.Get(t.Context(), name).Result()
		require.NoError(t, err)
		fmt.Fprintf(&b, "%s %q %v\n", name, value, left > 0)
	}
	return b.String()
}

// Names reach a script as KEYS, all with one hash tag, and it makes none itself.
func TestCase_L04_ScriptsTouchOnlyTheirKeys(t *testing.T) {
	t.Parallel()
	files, err := filepath.Glob("lua/*.lua")
	require.NoError(t, err)
	require.NotEmpty(t, files)
	call := regexp.MustCompile(`redis\.call\('([A-Z]+)', ([^,)]+)`)
	for _, file := range files {
		source, err := os.ReadFile(file)
		require.NoError(t, err)
		calls := call.FindAllStringSubmatch(string(source), -1)
		require.Len(t, calls, strings.Count(string(source), "redis.call("), file)
		for _, c := range calls {
			if c[1] != "PUBLISH" { // a channel is no key
				require.Regexp(t, `^KEYS\[\d\]$`, c[2], file)
			}
		}
	}
}

// Nothing is ever there without a time to live, and the time is set in the same step.
func TestCase_L06_NothingWithoutATimeToLive(t *testing.T) {
	t.Parallel()
	ctx, client, f := t.Context(), newClient(t), newFront(t, func(c *redisfront.Config) { c.Prefix = "l06:" })
	for i, ttl := range []time.Duration{-time.Hour, 0, 1, time.Microsecond, time.Millisecond, time.Hour} {
		key := newKey(t)
		_, _, err := f.Begin(ctx, about(key), idempotency.NewAttemptToken(), ttl)
		require.NoError(t, err)
		e := success(key, 1, "x")
		e.Life = ttl
		publish(t, f, e)
		forEver := success(newKey(t), int64(i), "x")
		forEver.Record.ExpiresAt = time.Time{}
		publish(t, f, forEver)
	}
	names, err := client.Keys(ctx, "l06:*").Result()
	require.NoError(t, err)
	require.NotEmpty(t, names)
	for _, name := range names {
		left, err := client.PTTL(ctx, name).Result()
		require.NoError(t, err)
		require.NotEqual(t, time.Duration(-1), left, "%s lives for ever", name)
	}
}

// A slow owner whose mark ran out does not end the next owner's.
func TestCase_L07_ASlowOwnerLeavesTheNextOnesMark(t *testing.T) {
	t.Parallel()
	ctx, f, key := t.Context(), newFront(t), newKey(t)
	slow, next := idempotency.NewAttemptToken(), idempotency.NewAttemptToken()
	_, _, err := f.Begin(ctx, about(key), slow, 20*time.Millisecond)
	require.NoError(t, err)
	time.Sleep(50 * time.Millisecond)
	require.NoError(t, begin(t, f, about(key), next))
	end(t, f, key, slow)
	late := success(key, 1, "late")
	late.Mark = slow
	publish(t, f, late)
	require.NoError(t, f.Evict(ctx, key))
	require.ErrorIs(t, begin(t, f, about(key), slow), idempotency.ErrInProgress)
}

// Zero, less than a millisecond and negative are the shortest time there is, and neither for ever nor an error.
func TestCase_L17_ShortTimes(t *testing.T) {
	t.Parallel()
	for _, ttl := range []time.Duration{-time.Hour, 0, 1, time.Millisecond} {
		f, key := newFront(t), newKey(t)
		_, _, err := f.Begin(t.Context(), about(key), idempotency.NewAttemptToken(), ttl)
		require.NoError(t, err)
		time.Sleep(10 * time.Millisecond)
		require.NoError(t, begin(t, f, about(key), idempotency.NewAttemptToken()), "%v", ttl)
	}
}

// Lua neither reads nor writes what it stores.
func TestCase_L18_BytesAndBigNumbersComeBackAsTheyWere(t *testing.T) {
	t.Parallel()
	for _, result := range []string{`{"id":12345678901234567,"items":[]}`, "\x00\xff\r\n", "1e400", ""} {
		f, key := newFront(t), newKey(t)
		e := success(key, 9007199254740993, result)
		e.Record.Generation = 9007199254740993
		publish(t, f, e)
		r, found, err := f.Lookup(t.Context(), about(key))
		require.NoError(t, err)
		require.True(t, found)
		require.Equal(t, e.Record, r)
	}
}

// What is evicted is what was stored, whoever's key it is.
func TestCase_L21_EvictFindsWhatWasStored(t *testing.T) {
	t.Parallel()
	f := newFront(t)
	for _, tenant := range []string{idempotency.SingleTenant, "acme", "{acme}", "Köln"} {
		key, err := create.Key(tenant, "k")
		require.NoError(t, err)
		publish(t, f, success(key, 1, "x"))
		_, found := lookup(t, f, about(key))
		require.True(t, found)
		require.NoError(t, f.Evict(t.Context(), key))
		_, found = lookup(t, f, about(key))
		require.False(t, found, tenant)
	}
}

// A closed front leaves no goroutine behind, whatever it was doing.
func TestCase_L22_NothingRunsOnAfterClose(t *testing.T) { //nolint:paralleltest // looks at all goroutines
	ignored := goleak.IgnoreCurrent()
	client := newUnmanagedClient(t)
	f, err := redisfront.New(client, &redisfront.Config{Prefix: "l22:"})
	require.NoError(t, err)
	for range 50 {
		key := newKey(t)
		require.NoError(t, begin(t, f, about(key), idempotency.NewAttemptToken()))
		bounded, cancel := context.WithTimeout(t.Context(), time.Millisecond)
		_ = f.Wait(bounded, key)
		cancel()
	}
	require.NoError(t, f.Close())
	away := redis.NewClient(&redis.Options{Addr: "127.0.0.1:1", ContextTimeoutEnabled: true, MaxRetries: -1, DialerRetries: 1})
	degraded, err := redisfront.New(away, nil)
	require.NoError(t, err)
	_, _, err = degraded.Lookup(t.Context(), about(newKey(t)))
	require.Error(t, err)
	require.NoError(t, degraded.Close())
	require.NoError(t, client.Close())
	require.NoError(t, away.Close())
	require.NoError(t, goleak.Find(ignored))
}

// The fingerprint goes with the entry.
func TestCase_F10_ThePayloadIsCheckedOnEveryWay(t *testing.T) {
	t.Parallel()
	f, key := newFront(t), newKey(t)
	e := success(key, 1, "x")
	asOther := about(key)
	asOther.Fingerprint = other
	require.NoError(t, begin(t, f, about(key), e.Mark))
	for range 2 { // by the mark, then by the entry
		_, _, err := f.Lookup(t.Context(), asOther)
		require.ErrorIs(t, err, idempotency.ErrMismatch)
		require.ErrorIs(t, begin(t, f, asOther, idempotency.NewAttemptToken()), idempotency.ErrMismatch)
		publish(t, f, e)
	}
}

// Times to live are milliseconds on the way to Redis and nothing else.
func TestCase_S04_TimesToLiveAreWhatTheySay(t *testing.T) {
	t.Parallel()
	ctx, client := t.Context(), newClient(t)
	f := newFront(t, func(c *redisfront.Config) { c.Prefix = "s04:" })
	key := newKey(t)
	_, _, err := f.Begin(ctx, about(key), idempotency.NewAttemptToken(), 90*time.Second)
	require.NoError(t, err)
	publish(t, f, success(key, 1, "x"))
	for pattern, want := range map[string]time.Duration{"s04:*:mark": 90 * time.Second, "s04:*:entry": time.Hour - redisfront.DefaultMargin} {
		names, err := client.Keys(ctx, pattern).Result()
		require.NoError(t, err)
		require.Len(t, names, 1)
		left, err := client.PTTL(ctx, names[0]).Result()
		require.NoError(t, err)
		require.InDelta(t, want, left, float64(10*time.Second), pattern)
		require.LessOrEqual(t, left, want)
	}
}
