package txn_test

import (
	"context"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/pgonce/pgonce/idempotency"
	"github.com/pgonce/pgonce/txn"
)

func give[T any](s *shop, ctx context.Context, req idempotency.Request, v T) (txn.Result[T], error) {
	return txn.WithIdempotency(ctx, s.runner, req, func(context.Context, pgx.Tx) (T, error) { return v, nil })
}

func TestCodec_BytesAreStoredAsTheyAre(t *testing.T) {
	t.Parallel()
	s := newShop(t)
	for i, value := range [][]byte{nil, {}, []byte(`{"b":1, "a":1.0,"a":2}`), {0, 0xff, 0xfe}} {
		req := request(t, strings.Repeat("k", i+1), "body")
		_, err := give(s, t.Context(), req, value)
		require.NoError(t, err)
		again, err := give(s, t.Context(), req, []byte("other"))
		require.NoError(t, err)
		require.True(t, again.Replayed)
		require.Equal(t, string(value), string(again.Value))
	}
}

func TestCodec_ReplayIsNotAliased(t *testing.T) {
	t.Parallel()
	s := newShop(t)
	req := request(t, "k", "body")
	value := []byte("first")
	res, err := give(s, t.Context(), req, value)
	require.NoError(t, err)
	value[0], res.Value[1] = 'X', 'X'
	again, err := give(s, t.Context(), req, value)
	require.NoError(t, err)
	require.Equal(t, "first", string(again.Value))
}

func TestCodec_ResultThatDoesNotDecodeIsNeverRunAgain(t *testing.T) {
	t.Parallel()
	s := newShop(t)
	req := request(t, "k", "body")
	_, err := give(s, t.Context(), req, "a string")
	require.NoError(t, err)
	res, err := give(s, t.Context(), req, 42)
	var decode *idempotency.ResultDecodeError
	require.ErrorAs(t, err, &decode)
	require.Equal(t, `"a string"`, string(decode.Result))
	require.Equal(t, "json/1", decode.ResultType)
	require.True(t, res.Replayed)
	_, err = give(s, t.Context(), req, []byte("bytes"))
	require.ErrorAs(t, err, &decode)
}

func TestCodec_ResultThatDoesNotEncodeRollsBack(t *testing.T) {
	t.Parallel()
	s := newShop(t)
	req := request(t, "k", "body")
	_, err := txn.WithIdempotency(t.Context(), s.runner, req, func(ctx context.Context, tx pgx.Tx) (func(), error) {
		_, err := insertOrder(ctx, tx, "k")
		return func() {}, err
	})
	require.ErrorIs(t, err, idempotency.ErrResultEncode)
	require.ErrorContains(t, err, "encode result")
	require.Zero(t, s.orders(t, "k"))
}

func TestResult_OverTheLimit(t *testing.T) {
	t.Parallel()
	plain, tomb := create, create
	plain.ResultLimit = 10
	tomb.Name, tomb.ResultLimit, tomb.Tombstone = "tomb", 10, true
	s := newShop(t, func(c *txn.Config) { c.Operations = []idempotency.Operation{plain, tomb} })
	_, err := give(s, t.Context(), request(t, "k", "body"), []byte("0123456789"))
	require.NoError(t, err, "the limit itself is allowed")
	_, err = give(s, t.Context(), request(t, "k2", "body"), []byte("0123456789a"))
	require.ErrorIs(t, err, idempotency.ErrResultTooLarge)
	_, found := s.record(t, request(t, "k2", "body"))
	require.False(t, found)

	key, err := tomb.Key(idempotency.SingleTenant, "k")
	require.NoError(t, err)
	req := idempotency.Request{Key: key, Fingerprint: idempotency.NoFingerprint}
	first, err := give(s, t.Context(), req, []byte("0123456789a"))
	require.NoError(t, err)
	require.Equal(t, "0123456789a", string(first.Value), "the first caller gets it whole")
	_, err = give(s, t.Context(), req, []byte("again"))
	require.ErrorIs(t, err, idempotency.ErrResultExpired)
}

func TestResult_DroppedEarlyIsATombstone(t *testing.T) {
	t.Parallel()
	op := create
	op.ResultRetention = time.Hour
	s := newShop(t, func(c *txn.Config) { c.Operations = []idempotency.Operation{op} })
	req := request(t, "k", "body")
	res, err := s.place(t.Context(), req)
	require.NoError(t, err)
	require.Equal(t, time.Hour, res.Record.ResultExpiresAt.Sub(res.Record.CompletedAt))
	// By time, before the purge has dropped it; and dropped.
	for _, change := range []string{`result_expires_at = statement_timestamp()`, `result = NULL`} {
		_, err := s.direct.Exec(t.Context(), `UPDATE idempotency.records SET `+change)
		require.NoError(t, err)
		for _, retry := range []bool{false, true} {
			req.Retry = retry
			_, err = s.place(t.Context(), req)
			require.ErrorIs(t, err, idempotency.ErrResultExpired)
		}
	}
	require.Equal(t, 1, s.orders(t, "k"))
}

func TestRetention_ForeverHasNoEnd(t *testing.T) {
	t.Parallel()
	op := create
	op.Retention = idempotency.Forever
	s := newShop(t, func(c *txn.Config) { c.Operations = []idempotency.Operation{op} })
	res, err := s.place(t.Context(), request(t, "k", "body"))
	require.NoError(t, err)
	require.True(t, res.Record.ExpiresAt.IsZero())
	require.True(t, res.Record.ResultExpiresAt.IsZero())
}
