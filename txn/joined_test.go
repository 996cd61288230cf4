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

func (s *shop) join(ctx context.Context, tx pgx.Tx, req idempotency.Request) (*txn.Joined[order], error) {
	return txn.WithIdempotencyTx(ctx, s.runner, tx, req, func(ctx context.Context, tx pgx.Tx) (order, error) {
		return insertOrder(ctx, tx, req.Key.Value())
	})
}

func (s *shop) begin(t *testing.T, options pgx.TxOptions) pgx.Tx {
	t.Helper()
	tx, err := s.pool.BeginTx(t.Context(), options)
	require.NoError(t, err)
	t.Cleanup(func() { _ = tx.Rollback(context.WithoutCancel(t.Context())) })
	return tx
}

func TestJoined_CommitsWithTheCaller(t *testing.T) {
	t.Parallel()
	s := newShopWith(t, atLeastConns(2)) // AfterCommit while the transaction is open
	tx := s.begin(t, pgx.TxOptions{})
	joined, err := s.join(t.Context(), tx, request(t, "k", "body"))
	require.NoError(t, err)
	require.ErrorIs(t, joined.AfterCommit(t.Context()), idempotency.ErrOutcomeUnknown, "not committed yet")
	require.NoError(t, tx.Commit(t.Context()))
	require.NoError(t, joined.AfterCommit(t.Context()))

	tx = s.begin(t, pgx.TxOptions{})
	again, err := s.join(t.Context(), tx, request(t, "k", "body"))
	require.NoError(t, err)
	require.True(t, again.Replayed)
	require.Equal(t, joined.Value, again.Value)
	require.NoError(t, again.AfterCommit(t.Context()), "a replay depends on no commit")
	require.Equal(t, 1, s.orders(t, "k"))
}

func TestJoined_RollbackOfTheCallerLeavesNothing(t *testing.T) {
	t.Parallel()
	s := newShop(t)
	tx := s.begin(t, pgx.TxOptions{})
	joined, err := s.join(t.Context(), tx, request(t, "k", "body"))
	require.NoError(t, err)
	require.NoError(t, tx.Rollback(t.Context()))
	require.ErrorIs(t, joined.AfterCommit(t.Context()), idempotency.ErrNotRecorded)
	_, found := s.record(t, request(t, "k", "body"))
	require.False(t, found)
}

func TestJoined_ErrorLeavesTheCallersTransactionUsable(t *testing.T) {
	t.Parallel()
	s := newShop(t)
	tx := s.begin(t, pgx.TxOptions{})
	_, err := insertOrder(t.Context(), tx, "callers")
	require.NoError(t, err)
	_, err = txn.WithIdempotencyTx(t.Context(), s.runner, tx, request(t, "k", "body"), func(ctx context.Context, tx pgx.Tx) (order, error) {
		_, _ = insertOrder(ctx, tx, "k")
		_, err := tx.Exec(ctx, `SELECT 1/0`)
		return order{}, err
	})
	require.ErrorContains(t, err, "division by zero")
	require.NoError(t, tx.Commit(t.Context()))
	require.Equal(t, 1, s.orders(t, "callers"))
	require.Zero(t, s.orders(t, "k"))
}

func TestJoined_PanicLeavesTheCallersTransactionUsable(t *testing.T) {
	t.Parallel()
	s := newShop(t)
	tx := s.begin(t, pgx.TxOptions{})
	require.PanicsWithValue(t, "boom", func() {
		_, _ = txn.WithIdempotencyTx(t.Context(), s.runner, tx, request(t, "k", "body"), func(ctx context.Context, tx pgx.Tx) (order, error) {
			_, _ = insertOrder(ctx, tx, "k")
			panic("boom")
		})
	})
	require.NoError(t, tx.Commit(t.Context()))
	require.Zero(t, s.orders(t, "k"))
}

func TestJoined_FinalLastsIfTheCallerCommits(t *testing.T) {
	t.Parallel()
	s := newShop(t)
	for _, commits := range []bool{false, true} {
		tx := s.begin(t, pgx.TxOptions{})
		joined, err := txn.WithIdempotencyTx(t.Context(), s.runner, tx, request(t, "k", "body"), func(ctx context.Context, tx pgx.Tx) (order, error) {
			_, _ = insertOrder(ctx, tx, "k")
			return order{ID: 7}, txn.Final("out_of_stock", errors.New("shelf is empty"))
		})
		require.ErrorIs(t, err, idempotency.ErrFailed)
		require.Equal(t, int64(7), joined.Value.ID)
		if !commits {
			require.NoError(t, tx.Rollback(t.Context()))
			require.ErrorIs(t, joined.AfterCommit(t.Context()), idempotency.ErrNotRecorded)
			continue
		}
		require.NoError(t, tx.Commit(t.Context()))
		require.NoError(t, joined.AfterCommit(t.Context()))
	}
	_, err := s.place(t.Context(), request(t, "k", "body"))
	require.ErrorIs(t, err, idempotency.ErrFailed)
	require.Zero(t, s.orders(t, "k"))
}

func TestJoined_NeverWaits(t *testing.T) {
	t.Parallel()
	s := newShop(t)
	release := s.replica(t).held(t, request(t, "k", "body"))
	tx := s.begin(t, pgx.TxOptions{})
	_, err := s.join(t.Context(), tx, request(t, "k", "body"))
	require.ErrorIs(t, err, idempotency.ErrInProgress)
	_, err = release()
	require.NoError(t, err)
	joined, err := s.join(t.Context(), tx, request(t, "k", "body"))
	require.NoError(t, err)
	require.True(t, joined.Replayed, "READ COMMITTED sees it in the same transaction")
}

func TestJoined_OlderSnapshotMustRestart(t *testing.T) {
	t.Parallel()
	for _, level := range []pgx.TxIsoLevel{pgx.RepeatableRead, pgx.Serializable} {
		t.Run(string(level), func(t *testing.T) {
			t.Parallel()
			s := newShopWith(t, atLeastConns(4))
			tx := s.begin(t, pgx.TxOptions{IsoLevel: level})
			_, err := tx.Exec(t.Context(), `SELECT count(*) FROM orders`) // takes the snapshot
			require.NoError(t, err)
			_, err = s.replica(t).place(t.Context(), request(t, "k", "body"))
			require.NoError(t, err)
			_, err = s.join(t.Context(), tx, request(t, "k", "body"))
			require.ErrorIs(t, err, idempotency.ErrRestartOuter)
			require.NoError(t, tx.Rollback(t.Context()))
			require.Equal(t, 1, s.orders(t, "k"))
		})
	}
}

func TestJoined_SettingsAreTheCallers(t *testing.T) {
	t.Parallel()
	s := newShop(t)
	tx := s.begin(t, pgx.TxOptions{})
	_, err := tx.Exec(t.Context(), `SET LOCAL synchronous_commit = off`)
	require.NoError(t, err)
	_, err = s.join(t.Context(), tx, request(t, "k", "body"))
	require.NoError(t, err)
	var got, idle string
	require.NoError(t, tx.QueryRow(t.Context(), `SELECT current_setting('synchronous_commit'), current_setting('idle_in_transaction_session_timeout')`).Scan(&got, &idle))
	require.Equal(t, "off", got)
	require.Equal(t, "0", idle)
}

func TestJoined_FunctionMayNotEndTheSavepoint(t *testing.T) {
	t.Parallel()
	s := newShop(t)
	tx := s.begin(t, pgx.TxOptions{})
	_, err := txn.WithIdempotencyTx(t.Context(), s.runner, tx, request(t, "k", "body"), func(ctx context.Context, tx pgx.Tx) (order, error) {
		require.ErrorIs(t, tx.Commit(ctx), txn.ErrRunnerOwnsTransaction)
		require.ErrorIs(t, tx.Rollback(ctx), txn.ErrRunnerOwnsTransaction)
		return insertOrder(ctx, tx, "k")
	})
	require.NoError(t, err)
	require.NoError(t, tx.Commit(t.Context()))
	require.Equal(t, 1, s.orders(t, "k"))
}
