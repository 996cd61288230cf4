package redisfront_test

import (
	"context"
	"fmt"
	"math"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"github.com/pgonce/pgonce/idempotency"
	"github.com/pgonce/pgonce/redisfront"
)

const ttl = 10 * time.Second

func TestFront_MarkThenPublishThenReplay(t *testing.T) {
	t.Parallel()
	ctx, f, key := t.Context(), newFront(t), newKey(t)
	_, found := lookup(t, f, about(key))
	require.False(t, found)

	e := success(key, 7, "the answer")
	require.NoError(t, begin(t, f, about(key), e.Mark))
	require.ErrorIs(t, begin(t, f, about(key), idempotency.NewAttemptToken()), idempotency.ErrInProgress)
	asOther := about(key)
	asOther.Fingerprint = other
	require.ErrorIs(t, begin(t, f, asOther, idempotency.NewAttemptToken()), idempotency.ErrMismatch, "the running payload is known")

	publish(t, f, e)
	publish(t, f, e) // sent again
	for _, look := range []func() (idempotency.Record, bool, error){
		func() (idempotency.Record, bool, error) { return f.Lookup(ctx, about(key)) },
		func() (idempotency.Record, bool, error) {
			return f.Begin(ctx, about(key), idempotency.NewAttemptToken(), ttl)
		},
	} {
		got, found, err := look()
		require.NoError(t, err)
		require.True(t, found)
		require.Equal(t, e.Record, got)
	}
	_, _, err := f.Lookup(ctx, asOther)
	require.ErrorIs(t, err, idempotency.ErrMismatch)
	require.NoError(t, f.Wait(ctx, key), "publishing has removed the mark")

	require.NoError(t, f.Evict(ctx, key))
	_, found = lookup(t, f, about(key))
	require.False(t, found)
}

func TestFront_OnlyItsOwnMark(t *testing.T) {
	t.Parallel()
	ctx, f, key := t.Context(), newFront(t), newKey(t)
	own, foreign := idempotency.NewAttemptToken(), idempotency.NewAttemptToken()
	require.NoError(t, begin(t, f, about(key), own))
	require.NoError(t, begin(t, f, about(key), own), "the reply was lost, and it is sent again")
	end(t, f, key, foreign)
	require.NoError(t, f.Renew(ctx, key, foreign, time.Millisecond))
	time.Sleep(20 * time.Millisecond)
	require.ErrorIs(t, begin(t, f, about(key), foreign), idempotency.ErrInProgress)
	end(t, f, key, own)
	require.NoError(t, begin(t, f, about(key), foreign))
	end(t, f, key, own)
	require.ErrorIs(t, begin(t, f, about(key), own), idempotency.ErrInProgress)

	// A read-repair has no mark: it leaves whoever runs alone.
	repair := success(key, 1, "found in PostgreSQL")
	repair.Mark = idempotency.AttemptToken{}
	publish(t, f, repair)
	require.NoError(t, f.Evict(ctx, key))
	require.ErrorIs(t, begin(t, f, about(key), own), idempotency.ErrInProgress)
}

func TestFront_EpochAndFence(t *testing.T) {
	t.Parallel()
	f, key := newFront(t), newKey(t)
	read := func(epoch string) string {
		ask := about(key)
		ask.Epoch = epoch
		result, _ := lookup(t, f, ask)
		return result
	}
	// Fences that differ by one where a double has no digits left.
	publish(t, f, success(key, math.MaxInt64-1, "new"))
	publish(t, f, success(key, math.MaxInt64-2, "old"))
	require.Equal(t, "new", read("one"))
	publish(t, f, success(key, math.MaxInt64, "newer"))
	require.Equal(t, "newer", read("one"))
	require.Empty(t, read("two"), "another epoch's entry is a miss")

	second := success(key, 1, "after the failover")
	second.Epoch = "two"
	publish(t, f, second)
	require.Equal(t, "after the failover", read("two"), "another epoch's entry is overwritten, whatever its fence")
	require.Empty(t, read("one"))
	unknown := success(key, 9, "of no known epoch")
	unknown.Epoch = ""
	publish(t, f, unknown)
	require.Equal(t, "after the failover", read("two"))
}

func TestFront_WhatIsKept(t *testing.T) {
	t.Parallel()
	for name, test := range map[string]struct {
		change func(*idempotency.Entry)
		found  bool
	}{
		"a success":       {func(*idempotency.Entry) {}, true},
		"kept for ever":   {func(e *idempotency.Entry) { e.Record.ExpiresAt = time.Time{} }, true},
		"an empty result": {func(e *idempotency.Entry) { e.Record.Result = []byte{} }, true},
		"a tombstone":     {func(e *idempotency.Entry) { e.Record.Result = nil }, true},
		"a failure": {func(e *idempotency.Entry) {
			e.Record.State, e.Record.ErrorCode = idempotency.StateFailed, "out_of_stock"
		}, true},
		"a result over the limit": {func(e *idempotency.Entry) { e.Record.Result = make([]byte, 1001) }, false},
		"a retryable failure": {func(e *idempotency.Entry) {
			e.Record.State, e.Record.Retryable = idempotency.StateFailed, true
		}, false},
		"one about to expire": {func(e *idempotency.Entry) { e.Life = time.Second }, false},
		"an expired one":      {func(e *idempotency.Entry) { e.Life = -time.Second }, false},
		"one that runs":       {func(e *idempotency.Entry) { e.Record.State = idempotency.StateProcessing }, false},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			ctx, key := t.Context(), newKey(t)
			f := newFront(t, func(c *redisfront.Config) { c.ResultLimit = 1000 })
			e := success(key, 1, "answer")
			test.change(&e)
			require.NoError(t, begin(t, f, about(key), e.Mark))
			publish(t, f, e)
			got, found, err := f.Lookup(ctx, about(key))
			require.NoError(t, err)
			require.Equal(t, test.found, found)
			if found {
				require.Equal(t, e.Record, got)
			}
			require.NoError(t, f.Wait(ctx, key), "the mark is gone in every case")
		})
	}
}

// Case L05 and S06: what a caller sends never shapes a name, and names never meet.
func TestCase_L05_NamesOfHostileKeys(t *testing.T) {
	t.Parallel()
	ctx, client := t.Context(), newClient(t)
	prefix := newPrefix()
	f := newFront(t, func(c *redisfront.Config) { c.Prefix = prefix })
	values := []string{"}{", "{}", "{a", "a}", "{a}{b}", "*", "?", "[a]", ":", "a:b", `\`, "'", `"`, "𐍈", strings.Repeat("k", 255)}
	for i, value := range values {
		key, err := create.Key("a{tenant}", value)
		require.NoError(t, err)
		publish(t, f, success(key, 1, fmt.Sprint(i)))
		marked, err := create.Key("b{tenant}", value)
		require.NoError(t, err)
		require.NoError(t, begin(t, f, about(marked), idempotency.NewAttemptToken()))
		result, found := lookup(t, f, about(key))
		require.True(t, found)
		require.Equal(t, fmt.Sprint(i), result)
	}
	names, err := client.Keys(ctx, prefix+"*").Result()
	require.NoError(t, err)
	require.Len(t, names, 2*len(values))
	for _, name := range names {
		require.Regexp(t, `^`+prefix+`[0-9a-f]{8}:\{[A-Za-z0-9_-]{22}\}:(entry|mark)$`, name)
		left, err := client.PTTL(ctx, name).Result()
		require.NoError(t, err)
		require.Positive(t, left, "nothing without a time to live")
	}
}

// Case L03: the scripts' text is sent where the server does not know them, also for a pipeline's.
func TestCase_L03_ScriptsAreLoadedAgain(t *testing.T) {
	ctx, f, client := t.Context(), newFront(t), newClient(t)
	for range 3 {
		key := newKey(t)
		require.NoError(t, client.ScriptFlush(ctx).Err())
		require.NoError(t, begin(t, f, about(key), idempotency.NewAttemptToken()))
		require.NoError(t, client.ScriptFlush(ctx).Err())
		publish(t, f, success(key, 1, "x"))
		require.NoError(t, client.ScriptFlush(ctx).Err())
		_, found := lookup(t, f, about(key))
		require.True(t, found)
	}
	require.False(t, f.Degraded())
}

func TestFront_WaitersAreWoken(t *testing.T) {
	t.Parallel()
	ctx, f, key := t.Context(), newFront(t), newKey(t)
	mark := idempotency.NewAttemptToken()
	_, _, err := f.Begin(ctx, about(key), mark, time.Minute)
	require.NoError(t, err)
	var group sync.WaitGroup
	errs := make([]error, 50)
	for i := range errs {
		group.Go(func() { errs[i] = f.Wait(ctx, key) })
	}
	bounded, cancel := context.WithTimeout(ctx, 50*time.Millisecond)
	defer cancel()
	require.ErrorIs(t, f.Wait(bounded, key), context.DeadlineExceeded)
	f.End(ctx, key, mark)
	group.Wait()
	for _, err := range errs {
		require.NoError(t, err)
	}
	require.NoError(t, f.Wait(ctx, key))
}

func TestFront_WaitersSeeAMarkThatEndsByItself(t *testing.T) {
	t.Parallel()
	ctx, f, key := t.Context(), newFront(t), newKey(t)
	_, _, err := f.Begin(ctx, about(key), idempotency.NewAttemptToken(), 50*time.Millisecond)
	require.NoError(t, err)
	require.NoError(t, f.Wait(ctx, key))
}

func TestFront_ErrorsHaveCodes(t *testing.T) {
	t.Parallel()
	ctx, key := t.Context(), newKey(t)
	client := redis.NewClient(&redis.Options{
		Addr: "127.0.0.1:1", ContextTimeoutEnabled: true, MaxRetries: -1, DialerRetries: 1,
	})
	t.Cleanup(func() { require.NoError(t, client.Close()) })
	events := newEvents()
	f, err := redisfront.New(client, &redisfront.Config{OnEvent: events.add})
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, f.Close()) })
	_, found, err := f.Lookup(ctx, about(key))
	require.False(t, found)
	var e *redisfront.Error
	require.ErrorAs(t, err, &e)
	require.Equal(t, redisfront.CodeUnavailable, e.Code)
	require.Equal(t, "lookup", e.Script)
	require.Equal(t, 1, count[idempotency.FrontFailed](events))
	require.True(t, f.Degraded())
}

func TestNew_RefusesAWrongConfig(t *testing.T) {
	t.Parallel()
	good := newClient(t)
	slow := redis.NewClient(&redis.Options{})
	t.Cleanup(func() { require.NoError(t, slow.Close()) })
	for name, test := range map[string]struct {
		client redis.UniversalClient
		config *redisfront.Config
	}{
		"Prefix":                {good, &redisfront.Config{Prefix: "a{b}"}},
		"Timeout":               {good, &redisfront.Config{Timeout: time.Hour}},
		"ResultLimit":           {good, &redisfront.Config{ResultLimit: -2}},
		"Margin":                {good, &redisfront.Config{Margin: -2}},
		"ContextTimeoutEnabled": {slow, nil},
		"must not be nil":       {nil, nil},
	} {
		_, err := redisfront.New(test.client, test.config)
		require.ErrorIs(t, err, idempotency.ErrConfig)
		require.ErrorContains(t, err, name)
	}
}
