package redisfront_test

import (
	"context"
	"encoding/json"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgonce/pgonce/idempotency"
	"github.com/pgonce/pgonce/redisfront"
)

func TestDo_Results(t *testing.T) {
	t.Parallel()
	ctx, f := t.Context(), newFront(t, declares(func(op *idempotency.Operation) { op.ResultLimit = 100 }))
	t.Run("bytes", func(t *testing.T) {
		t.Parallel()
		twice(t, f, []byte{0, 1, 255})
		twice(t, f, []byte{})
	})
	// Case L18: nothing in Lua reads a result.
	t.Run("JSON", func(t *testing.T) {
		t.Parallel()
		twice(t, f, json.RawMessage(`{"id": 9007199254740993, "a":[], "o":{}, "n":1.10}`))
		twice(t, f, receipt{9007199254740993})
		twice(t, f, struct{}{})
		twice[*receipt](t, f, nil)
	})
	t.Run("too large", func(t *testing.T) {
		t.Parallel()
		req, large := mailRequest(t), make([]byte, 101)
		fn := func(context.Context) ([]byte, error) { return large, nil }
		res, err := redisfront.Do(ctx, f, req, fn)
		require.NoError(t, err)
		require.Equal(t, large, res.Value)
		_, err = redisfront.Do(ctx, f, req, fn)
		require.ErrorIs(t, err, idempotency.ErrResultExpired, "done, and never run again")
	})
	t.Run("not encodable", func(t *testing.T) {
		t.Parallel()
		req := mailRequest(t)
		fn := func(context.Context) (func(), error) { return func() {}, nil }
		_, err := redisfront.Do(ctx, f, req, fn)
		require.ErrorContains(t, err, "encode result")
		_, err = redisfront.Do(ctx, f, req, fn)
		require.ErrorIs(t, err, idempotency.ErrResultExpired, "done, and never run again")
		_, err = redisfront.Do(ctx, f, req, func(context.Context) (error, error) { return nil, nil })
		require.ErrorIs(t, err, idempotency.ErrConfig)
	})
	t.Run("another type", func(t *testing.T) {
		t.Parallel()
		req, s := mailRequest(t), sends{}
		_, err := redisfront.Do(ctx, f, req, s.send)
		require.NoError(t, err)
		_, err = redisfront.Do(ctx, f, req, func(context.Context) ([]byte, error) { return nil, nil })
		var decode *idempotency.ResultDecodeError
		require.ErrorAs(t, err, &decode)
		require.Equal(t, `{"id":1}`, string(decode.Result))
	})
}

// twice runs a function that returns v, and demands it from the replay.
func twice[T any](t *testing.T, f *redisfront.Front, v T) {
	t.Helper()
	req := mailRequest(t)
	for i := range 2 {
		res, err := redisfront.Do(t.Context(), f, req, func(context.Context) (T, error) { return v, nil })
		require.NoError(t, err)
		require.Equal(t, v, res.Value)
		require.Equal(t, i == 1, res.Replayed)
	}
}

func TestDo_Sealed(t *testing.T) {
	t.Parallel()
	ctx, client := t.Context(), newClient(t)
	sealer, err := redisfront.NewAESGCM(1, map[byte][]byte{1: make([]byte, 32)})
	require.NoError(t, err)
	prefix := newPrefix()
	with := func(s redisfront.Sealer) *redisfront.Front {
		return newFront(t, declares(), func(c *redisfront.Config) { c.Prefix, c.Sealer = prefix, s })
	}
	s, req, runs := sends{}, mailRequest(t), func(context.Context) (string, error) { return "a secret answer", nil }
	f := with(sealer)
	for i := range 2 {
		res, err := redisfront.Do(ctx, f, req, runs)
		require.NoError(t, err)
		require.Equal(t, "a secret answer", res.Value)
		require.Equal(t, i == 1, res.Replayed)
	}
	names, err := client.Keys(ctx, prefix+"*").Result()
	require.NoError(t, err)
	require.Len(t, names, 1)
	dump, err := client.Dump(ctx, names[0]).Result()
	require.NoError(t, err)
	require.NotContains(t, dump, "secret")
	_, err = redisfront.Do(ctx, with(nil), req, s.send)
	require.ErrorIs(t, err, idempotency.ErrResultDecode, "it is done, whatever it was")
	require.Zero(t, s.n.Load())
}

func TestDo_RefusesWhatIsNotItsOwn(t *testing.T) {
	t.Parallel()
	ctx, s := t.Context(), sends{}
	_, err := redisfront.Do(ctx, newFront(t), mailRequest(t), s.send)
	require.ErrorIs(t, err, idempotency.ErrConfig)
	require.ErrorContains(t, err, "mail.send")
	req := mailRequest(t)
	req.Fingerprint = idempotency.Fingerprint{}
	_, err = redisfront.Do(ctx, newFront(t, declares()), req, s.send)
	require.ErrorIs(t, err, idempotency.ErrConfig)
	for field, op := range map[string]idempotency.Operation{
		"Strategy":        {Name: "x"},
		"Retention":       {Name: "x", Strategy: idempotency.StrategyCache, Retention: idempotency.Forever},
		"ResultRetention": {Name: "x", Strategy: idempotency.StrategyCache, ResultRetention: time.Hour},
		"Lease":           {Name: "x", Strategy: idempotency.StrategyCache, Lease: time.Millisecond},
	} {
		_, err := redisfront.New(newClient(t), &redisfront.Config{Operations: []idempotency.Operation{op}})
		require.ErrorIs(t, err, idempotency.ErrConfig)
		require.ErrorContains(t, err, field)
	}
	_, err = redisfront.New(newClient(t), &redisfront.Config{Operations: []idempotency.Operation{mail, mail}})
	require.ErrorContains(t, err, "twice")
	require.Zero(t, s.n.Load())
}
