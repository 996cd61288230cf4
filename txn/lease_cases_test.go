package txn_test

import (
	"context"
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/pgonce/pgonce/idempotency"
	"github.com/pgonce/pgonce/txn"
)

// What was done before an error is done once, wherever it was done.
func TestCase_S06_AnErrorRepeatsNoEffect(t *testing.T) {
	t.Parallel()
	broken := errors.New("broken")
	t.Run("rolled back with the record", func(t *testing.T) {
		t.Parallel()
		s, runs := newShop(t), 0
		req := request(t, "k", "{}")
		call := func() error {
			_, err := txn.WithIdempotency(t.Context(), s.runner, req, func(ctx context.Context, tx pgx.Tx) (int, error) {
				runs++
				_, err := tx.Exec(ctx, `INSERT INTO orders (key) VALUES ($1)`, req.Key.Value())
				if err == nil && runs == 1 {
					err = broken
				}
				return runs, err
			})
			return err
		}
		require.ErrorIs(t, call(), broken)
		require.Zero(t, s.orders(t, "k"))
		s.requireNoRecord(t, req)
		require.NoError(t, call())
		require.NoError(t, call())
		require.Equal(t, 2, runs)
		require.Equal(t, 1, s.orders(t, "k"))
	})
	t.Run("committed, and the answer was lost", func(t *testing.T) {
		t.Parallel()
		s := newShop(t)
		req := request(t, "k", "{}")
		first, err := s.place(t.Context(), req)
		require.NoError(t, err)
		again, err := s.place(t.Context(), req) // its service has answered 500 meanwhile, for all the caller knows
		require.NoError(t, err)
		require.True(t, again.Replayed)
		require.Equal(t, first.Value, again.Value)
		require.Equal(t, 1, s.orders(t, "k"))
	})
	t.Run("somebody else was called", func(t *testing.T) {
		t.Parallel()
		s, d := newLeaseShop(t, capture), &downstream{}
		req := leaseRequest(t, capture, "k")
		_, err := s.pay(t.Context(), req, func(ctx context.Context, l *txn.Lease) (string, error) {
			charge, err := d.foreign(ctx, l)
			return charge, errors.Join(err, broken)
		})
		require.ErrorIs(t, err, broken)
		res, err := s.pay(t.Context(), req, d.foreign)
		require.NoError(t, err)
		require.Equal(t, "charge-1", res.Value.Charge)
		require.EqualValues(t, 2, d.calls.Load(), "it was asked twice")
		require.Equal(t, 1, d.charges(), "by one key, so it has charged once")
		require.Equal(t, 1, s.orders(t, "k"))
	})
}

// Every item of a request has a downstream key of its own, the same in every attempt, another one in another life of the key.
func TestLease_DownstreamKeysOfItems(t *testing.T) {
	t.Parallel()
	s := newLeaseShop(t, capture)
	req := leaseRequest(t, capture, "k")
	var lives [3]map[string]string // by name
	for life := range lives {
		names := map[string]string{}
		_, err := s.pay(t.Context(), req, func(_ context.Context, l *txn.Lease) (string, error) {
			for i := range 10_000 {
				name := fmt.Sprint("item-", i)
				names[name] = l.DownstreamKey(name)
			}
			if life == 0 {
				return "", errors.New("broken")
			}
			return "", nil
		})
		require.Equal(t, life == 0, err != nil)
		lives[life] = names
		seen := map[string]bool{}
		for _, key := range names {
			require.False(t, seen[key])
			seen[key] = true
		}
		if life == 1 {
			_, err = s.direct.Exec(t.Context(), `UPDATE idempotency.records SET expires_at = statement_timestamp() - interval '1 s'`)
			require.NoError(t, err)
		}
	}
	require.Equal(t, lives[0], lives[1], "the attempt after an error")
	for name, key := range lives[2] {
		require.NotEqual(t, lives[1][name], key, "a new life of the key")
	}
}

// An answer that is kept for a shorter time than its key: told so, never done again.
func TestLease_ResultIsDroppedBeforeItsKey(t *testing.T) {
	t.Parallel()
	brief := idempotency.Operation{Name: "payment.brief", Takeover: idempotency.TakeoverResume, ResultRetention: time.Hour}
	s, d := newLeaseShop(t, brief), &downstream{}
	req := leaseRequest(t, brief, "k")
	_, err := s.pay(t.Context(), req, d.foreign)
	require.NoError(t, err)
	r, _ := s.record(t, req)
	require.WithinDuration(t, r.CompletedAt.Add(time.Hour), r.ResultExpiresAt, 0)
	require.WithinDuration(t, r.CompletedAt.Add(72*time.Hour), r.ExpiresAt, 0)
	_, err = s.direct.Exec(t.Context(), `UPDATE idempotency.records SET result_expires_at = statement_timestamp() - interval '1 s'`)
	require.NoError(t, err)
	for range 2 {
		_, err = s.pay(t.Context(), req, d.foreign)
		require.ErrorIs(t, err, idempotency.ErrResultExpired)
		_, _, err = idempotency.NewStore(pgx.QueryExecModeCacheStatement).DropResults(t.Context(), s.direct, 10) // and the purge has been there
		require.NoError(t, err)
	}
	require.EqualValues(t, 1, d.calls.Load())
	_, err = s.direct.Exec(t.Context(), `UPDATE idempotency.records SET expires_at = statement_timestamp() - interval '1 s'`)
	require.NoError(t, err)
	_, err = s.pay(t.Context(), req, d.foreign)
	require.NoError(t, err)
	require.EqualValues(t, 2, d.calls.Load(), "a new life of the key, with a new downstream key")
	require.Equal(t, 2, d.charges())
}

// Nobody waits for the lease's end because commit panicked.
func TestLease_PanicOfCommitIsTriedAgain(t *testing.T) {
	t.Parallel()
	s, d := newLeaseShop(t, capture), &downstream{}
	req := leaseRequest(t, capture, "k")
	require.PanicsWithValue(t, "oh no", func() {
		_, _ = txn.WithLease(t.Context(), s.runner, req, d.foreign, func(ctx context.Context, tx pgx.Tx, _ string) (payment, error) {
			_, err := insertOrder(ctx, tx, "k")
			require.NoError(t, err)
			panic("oh no")
		})
	})
	r, _ := s.record(t, req)
	require.Equal(t, idempotency.StateFailed, r.State)
	require.True(t, r.Retryable)
	require.Equal(t, 0, s.orders(t, "k"))
	res, err := s.pay(t.Context(), req, d.foreign)
	require.NoError(t, err)
	require.Equal(t, 2, res.Record.Attempt)
	require.Equal(t, 1, d.charges())

	// One that has ended its transaction before it panics is not run again: part of it may be committed.
	req = leaseRequest(t, capture, "ended")
	require.PanicsWithValue(t, "oh no", func() {
		_, _ = txn.WithLease(t.Context(), s.runner, req, d.foreign, func(ctx context.Context, tx pgx.Tx, _ string) (payment, error) {
			_, err := tx.Exec(ctx, `COMMIT`)
			require.NoError(t, err)
			panic("oh no")
		})
	})
	r, _ = s.record(t, req)
	require.Equal(t, idempotency.StateFailed, r.State)
	require.False(t, r.Retryable)
}
