package txn_test

import (
	"context"
	"errors"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/pgonce/pgonce/idempotency"
	"github.com/pgonce/pgonce/txn"
)

func TestWithIdempotency_FirstCallRunsRetryReplays(t *testing.T) {
	t.Parallel()
	s := newShop(t)
	req := request(t, "k1", "body")
	first, err := s.place(t.Context(), req)
	require.NoError(t, err)
	require.False(t, first.Replayed)
	require.Equal(t, idempotency.StateSuccess, first.Record.State)
	for _, retry := range []bool{false, true} {
		req.Retry = retry
		again, err := s.place(t.Context(), req)
		require.NoError(t, err)
		require.True(t, again.Replayed)
		require.Equal(t, first.Value, again.Value)
		require.Equal(t, first.Record, again.Record)
	}
	require.Equal(t, 1, s.orders(t, "k1"))
}

func TestWithIdempotency_ErrorLeavesNothing(t *testing.T) {
	t.Parallel()
	s := newShop(t)
	req := request(t, "k1", "body")
	boom := errors.New("boom")
	_, err := txn.WithIdempotency(t.Context(), s.runner, req, func(ctx context.Context, tx pgx.Tx) (order, error) {
		_, _ = insertOrder(ctx, tx, "k1")
		return order{}, boom
	})
	require.ErrorIs(t, err, boom)
	_, found := s.record(t, req)
	require.False(t, found)
	require.Zero(t, s.orders(t, "k1"))
	_, err = s.place(t.Context(), req)
	require.NoError(t, err)
}

func TestWithIdempotency_FinalIsRecordedAndReplayed(t *testing.T) {
	t.Parallel()
	s := newShop(t)
	req := request(t, "k1", "body")
	empty := errors.New("shelf is empty")
	runs := 0
	for i := range 3 {
		res, err := txn.WithIdempotency(t.Context(), s.runner, req, func(ctx context.Context, tx pgx.Tx) (order, error) {
			runs++
			_, _ = insertOrder(ctx, tx, "k1")
			return order{ID: -1}, txn.Final("out_of_stock", empty)
		})
		var failed *idempotency.FailedError
		require.ErrorAs(t, err, &failed)
		require.Equal(t, "out_of_stock", failed.Code)
		require.Equal(t, "shelf is empty", failed.Message)
		require.Equal(t, int64(-1), res.Value.ID)
		require.Equal(t, i > 0, res.Replayed)
		require.Equal(t, i == 0, errors.Is(err, empty))
	}
	require.Equal(t, 1, runs)
	require.Zero(t, s.orders(t, "k1"))
}

// A rollback that fails closes the connection. The failure is recorded once the key is free again, and so is rolled back.
func TestWithIdempotency_FinalIsRecordedAfterAFailedRollback(t *testing.T) {
	t.Parallel()
	s := newShop(t, impatient)
	req, runs := request(t, "k", "body"), 0
	_, err := txn.WithIdempotency(t.Context(), s.runner, req, func(ctx context.Context, tx pgx.Tx) (order, error) {
		runs++
		o, err := insertOrder(ctx, tx, "k")
		require.NoError(t, err)
		s.terminate(ctx, t, `pid = $1`, backend(ctx, t, tx))
		return o, txn.Final("out_of_stock", errors.New("shelf is empty"))
	})
	require.ErrorIs(t, err, idempotency.ErrFailed)
	require.Equal(t, 1, runs)
	require.Zero(t, s.orders(t, "k"))
	r, found := s.record(t, req)
	require.True(t, found)
	require.Equal(t, "out_of_stock", r.ErrorCode)
}

func TestWithIdempotency_OtherPayloadIsMismatch(t *testing.T) {
	t.Parallel()
	s := newShop(t)
	_, err := s.place(t.Context(), request(t, "k1", "one"))
	require.NoError(t, err)
	_, err = s.place(t.Context(), request(t, "k1", "two"))
	require.ErrorIs(t, err, idempotency.ErrMismatch)
}
