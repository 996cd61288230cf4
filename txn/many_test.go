package txn_test

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/pgonce/pgonce/idempotency"
	"github.com/pgonce/pgonce/txn"
)

// placeMany places an order for every request; trouble may end one in its own way, behind its insert.
func (s *shop) placeMany(ctx context.Context, reqs []idempotency.Request, trouble func(ctx context.Context, tx pgx.Tx, i int) error) ([]txn.Outcome[order], error) {
	return txn.WithIdempotencyMany(ctx, s.runner, reqs, func(ctx context.Context, tx pgx.Tx, i int) (order, error) {
		o, err := insertOrder(ctx, tx, reqs[i].Key.Value())
		if err == nil && trouble != nil {
			err = trouble(ctx, tx, i)
		}
		return o, err
	})
}

func (s *shop) allOrders(t testing.TB) (n int) {
	t.Helper()
	require.NoError(t, s.direct.QueryRow(context.WithoutCancel(t.Context()), `SELECT count(*) FROM orders`).Scan(&n))
	return n
}

func requests(t testing.TB, keys ...string) []idempotency.Request {
	t.Helper()
	reqs := make([]idempotency.Request, len(keys))
	for i, key := range keys {
		reqs[i] = request(t, key, key)
	}
	return reqs
}

func numbered(n int) []string {
	keys := make([]string, n)
	for i := range keys {
		keys[i] = fmt.Sprintf("k%d", i)
	}
	return keys
}

func TestMany_AllInOneTransactionAndReplayed(t *testing.T) {
	t.Parallel()
	s := newShop(t)
	reqs := requests(t, numbered(txn.MaxMany)...)
	first, err := s.placeMany(t.Context(), reqs, nil)
	require.NoError(t, err)
	require.Len(t, first, len(reqs))
	for i, out := range first {
		require.NoError(t, out.Err)
		require.False(t, out.Replayed)
		require.Equal(t, reqs[i].Key.Value(), out.Value.Key)
		require.Equal(t, idempotency.StateSuccess, out.Record.State)
	}
	var transactions int
	require.NoError(t, s.direct.QueryRow(t.Context(), `SELECT count(DISTINCT created_at) FROM idempotency.records`).Scan(&transactions))
	require.Equal(t, 1, transactions, "one transaction start for all")

	again, err := s.placeMany(t.Context(), reqs, func(context.Context, pgx.Tx, int) error { return errors.New("must not run") })
	require.NoError(t, err)
	for i, out := range again {
		require.NoError(t, out.Err)
		require.True(t, out.Replayed)
		require.Equal(t, first[i].Value, out.Value)
		require.Equal(t, first[i].Record.Fence, out.Record.Fence)
	}
	single, err := s.place(t.Context(), reqs[7])
	require.NoError(t, err)
	require.True(t, single.Replayed)
	require.Equal(t, len(reqs), s.allOrders(t))
}

func TestMany_RefusedBeforeAnything(t *testing.T) {
	t.Parallel()
	s := newShop(t)
	_, err := s.placeMany(t.Context(), make([]idempotency.Request, txn.MaxMany+1), nil)
	require.ErrorIs(t, err, idempotency.ErrConfig)
	require.ErrorContains(t, err, "at most 500")

	none, err := s.placeMany(t.Context(), nil, nil)
	require.NoError(t, err)
	require.Empty(t, none)

	// What is wrong with one request is that one's.
	reqs := requests(t, "a", "b", "c")
	reqs[1] = idempotency.Request{}
	outcomes, err := s.placeMany(t.Context(), reqs, nil)
	require.NoError(t, err)
	require.NoError(t, outcomes[0].Err)
	require.ErrorIs(t, outcomes[1].Err, idempotency.ErrConfig)
	require.NoError(t, outcomes[2].Err)

	_, err = s.placeMany(t.Context(), requests(t, "outer"), func(ctx context.Context, _ pgx.Tx, _ int) error {
		_, err := s.placeMany(ctx, requests(t, "inner"), nil)
		require.ErrorIs(t, err, idempotency.ErrNested)
		return nil
	})
	require.NoError(t, err)
}

func TestMany_FoldsDuplicatesOfOneCall(t *testing.T) {
	t.Parallel()
	s := newShop(t)
	reqs := []idempotency.Request{
		request(t, "a", "a"), request(t, "b", "b"), request(t, "a", "a"), request(t, "a", "other"), request(t, "b", "b"),
		request(t, "bad", "x"), request(t, "bad", "x"), request(t, "bad", "y"),
	}
	refused := errors.New("refused")
	runs := map[int]int{}
	outcomes, err := s.placeMany(t.Context(), reqs, func(_ context.Context, _ pgx.Tx, i int) error {
		if runs[i]++; i == 5 {
			return refused
		}
		return nil
	})
	require.NoError(t, err)
	require.Equal(t, map[int]int{0: 1, 1: 1, 5: 1}, runs)
	for _, i := range []int{0, 1, 2, 4} {
		require.NoError(t, outcomes[i].Err)
		require.Equal(t, i > 1, outcomes[i].Replayed)
	}
	require.Equal(t, outcomes[0].Value, outcomes[2].Value)
	require.Equal(t, outcomes[1].Value, outcomes[4].Value)
	var mismatch *idempotency.MismatchError
	require.ErrorAs(t, outcomes[3].Err, &mismatch)
	require.Equal(t, outcomes[0].Record.CreatedAt, mismatch.CreatedAt)
	require.ErrorIs(t, outcomes[5].Err, refused)
	require.ErrorIs(t, outcomes[6].Err, refused, "one run, one error")
	require.ErrorIs(t, outcomes[7].Err, idempotency.ErrMismatch)

	// The record decides, not which of two payloads comes first in the call.
	outcomes, err = s.placeMany(t.Context(), []idempotency.Request{request(t, "a", "other"), request(t, "a", "a")}, nil)
	require.NoError(t, err)
	require.ErrorIs(t, outcomes[0].Err, idempotency.ErrMismatch)
	require.NoError(t, outcomes[1].Err)
	require.True(t, outcomes[1].Replayed)
	require.Equal(t, 2, s.allOrders(t))
}

func TestMany_MixtureEachItsOwnOutcome(t *testing.T) {
	t.Parallel()
	s := newShopWith(t, atLeastConns(3))
	_, err := s.place(t.Context(), request(t, "done", "done"))
	require.NoError(t, err)

	entered, leave := make(chan struct{}), make(chan struct{})
	enter := sync.OnceFunc(func() { close(entered) }) // it may run again
	var group sync.WaitGroup
	group.Go(func() {
		_, err := txn.WithIdempotency(t.Context(), s.runner, request(t, "busy", "busy"), func(ctx context.Context, tx pgx.Tx) (order, error) {
			enter()
			<-leave
			return insertOrder(ctx, tx, "busy")
		})
		require.NoError(t, err)
	})
	<-entered

	refused, soldOut := errors.New("refused"), errors.New("sold out")
	reqs := []idempotency.Request{
		request(t, "fresh1", "1"), request(t, "done", "done"), request(t, "done2", "x"), request(t, "busy", "busy"),
		request(t, "bad", "bad"), request(t, "sqlbad", "sqlbad"), request(t, "final", "final"), request(t, "fresh2", "2"),
		request(t, "busy", "other"),
	}
	reqs[2].Key = reqs[1].Key // with another payload
	began := time.Now()
	outcomes, err := s.placeMany(t.Context(), reqs, func(ctx context.Context, tx pgx.Tx, i int) error {
		switch i {
		case 4:
			return refused
		case 5:
			_, err := tx.Exec(ctx, `SELECT 1/0`)
			return err
		case 6:
			return txn.Final("sold_out", soldOut)
		}
		return nil
	})
	took := time.Since(began)
	require.NoError(t, err)
	require.NoError(t, outcomes[0].Err)
	require.NoError(t, outcomes[1].Err)
	require.True(t, outcomes[1].Replayed)
	require.ErrorIs(t, outcomes[2].Err, idempotency.ErrMismatch)
	require.ErrorIs(t, outcomes[3].Err, idempotency.ErrInProgress)
	require.Less(t, took, patience, "it does not wait")
	require.ErrorIs(t, outcomes[4].Err, refused)
	require.ErrorContains(t, outcomes[5].Err, "division by zero")
	require.ErrorIs(t, outcomes[6].Err, idempotency.ErrFailed)
	require.ErrorIs(t, outcomes[6].Err, soldOut)
	require.NoError(t, outcomes[7].Err)
	require.ErrorIs(t, outcomes[8].Err, idempotency.ErrInProgress, "nobody knows yet whose payload has it")
	close(leave)
	group.Wait()

	for key, want := range map[string]int{"fresh1": 1, "fresh2": 1, "done": 1, "busy": 1, "bad": 0, "sqlbad": 0, "final": 0} {
		require.Equal(t, want, s.orders(t, key), key)
	}
	r, found := s.record(t, reqs[6])
	require.True(t, found)
	require.Equal(t, idempotency.StateFailed, r.State)
	var attempts int
	require.NoError(t, s.direct.QueryRow(t.Context(), `SELECT count(*) FROM idempotency.attempts WHERE key = 'final'`).Scan(&attempts))
	require.Equal(t, 1, attempts)
	_, found = s.record(t, reqs[4])
	require.False(t, found)
	again, err := s.placeMany(t.Context(), reqs[4:7], nil)
	require.NoError(t, err)
	require.NoError(t, again[0].Err, "what was not recorded runs again")
	require.NoError(t, again[1].Err)
	require.ErrorIs(t, again[2].Err, idempotency.ErrFailed)
}

func TestMany_CancelledContext(t *testing.T) {
	t.Parallel()
	s := newShop(t)
	require.NoError(t, s.runner.Check(t.Context()))
	ctx, cancel := context.WithCancel(t.Context())
	reqs := requests(t, numbered(5)...)
	outcomes, err := s.placeMany(ctx, reqs, func(_ context.Context, _ pgx.Tx, i int) error {
		if i == 2 {
			cancel()
		}
		return nil
	})
	require.NoError(t, err)
	// The statement behind the function that cancelled meets the end of the context, so whether that index is in is open.
	for i, out := range outcomes {
		_, found := s.record(t, reqs[i])
		require.Equal(t, out.Err == nil, found, "%d: %v", i, out.Err)
		require.Equal(t, map[bool]int{true: 1, false: 0}[found], s.orders(t, reqs[i].Key.Value()))
	}
	require.ErrorIs(t, outcomes[3].Err, context.Canceled)
	require.ErrorIs(t, outcomes[4].Err, context.Canceled)

	_, err = s.placeMany(ctx, requests(t, "late"), nil)
	require.ErrorIs(t, err, context.Canceled)

	for _, out := range must(s.placeMany(t.Context(), reqs, nil))(t) {
		require.NoError(t, out.Err)
	}
	require.Equal(t, 5, s.allOrders(t))
}

func must[T any](v T, err error) func(testing.TB) T {
	return func(t testing.TB) T {
		t.Helper()
		require.NoError(t, err)
		return v
	}
}

func TestMany_APanicRollsBackAndGoesOn(t *testing.T) {
	t.Parallel()
	s := newShop(t)
	reqs := requests(t, "a", "b")
	require.PanicsWithValue(t, "oh", func() {
		_, _ = s.placeMany(t.Context(), reqs, func(_ context.Context, _ pgx.Tx, i int) error {
			if i == 1 {
				panic("oh")
			}
			return nil
		})
	})
	require.Zero(t, s.allOrders(t))
	for _, out := range must(s.placeMany(t.Context(), reqs, nil))(t) {
		require.NoError(t, out.Err)
		require.False(t, out.Replayed)
	}
}

func TestMany_InsideTheTransactionOfATest(t *testing.T) {
	t.Parallel()
	s := newShop(t)
	tx, err := s.direct.Begin(t.Context())
	require.NoError(t, err)
	s.runner = s.runner.Within(tx)
	outcomes, err := s.placeMany(t.Context(), append(requests(t, "a", "b"), request(t, "a", "a")), nil)
	require.NoError(t, err)
	require.False(t, outcomes[1].Replayed)
	require.True(t, outcomes[2].Replayed)
	require.NoError(t, tx.Rollback(t.Context()))
	require.Zero(t, s.allOrders(t))
}
