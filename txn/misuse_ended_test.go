package txn_test

import (
	"context"
	"errors"
	"runtime"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgonce/pgonce/idempotency"
	"github.com/pgonce/pgonce/txn"
)

// requireEnded requires that the key is recorded as ended by its function, and that it never runs again.
func (s *shop) requireEnded(t *testing.T, req idempotency.Request, orders int) {
	t.Helper()
	r, found := s.record(t, req)
	require.True(t, found)
	require.Equal(t, idempotency.StateFailed, r.State)
	require.Equal(t, txn.CodeTransactionEnded, r.ErrorCode)
	require.Positive(t, r.Fence)
	for way, call := range ways {
		_, err := call(t.Context(), s, req, func(context.Context, pgx.Tx) (order, error) { panic("entered") })
		require.ErrorIs(t, err, idempotency.ErrTransactionEnded, way)
	}
	require.Equal(t, orders, s.orders(t, req.Key.Value()))
	s.requireIdle(t)
}

// The function ends the transaction of its caller. That cannot be undone, so it is recorded, in a transaction of its own.
func TestMisuse_JoinedTransactionEndedByTheFunction(t *testing.T) {
	t.Parallel()
	boom := errors.New("boom")
	for _, c := range []struct {
		name    string
		sql     []string
		fails   error
		orders  int // of the function, and of the caller before it: what was committed stays
		nothing bool
	}{
		{name: "COMMIT", sql: []string{"COMMIT"}, orders: 1},
		{name: "COMMIT, then error", sql: []string{"COMMIT"}, fails: boom, orders: 1},
		{name: "COMMIT, then Final", sql: []string{"COMMIT"}, fails: txn.Final("no", boom), orders: 1},
		{name: "COMMIT and BEGIN", sql: []string{"COMMIT", "BEGIN"}, orders: 1},
		{name: "COMMIT and BEGIN in one message", sql: []string{"COMMIT; BEGIN"}, orders: 1},
		{name: "COMMIT, BEGIN and our savepoint", sql: []string{"COMMIT", "BEGIN", "SAVEPOINT pgonce"}, orders: 1},
		{name: "COMMIT AND CHAIN", sql: []string{"COMMIT AND CHAIN"}, orders: 1},
		{name: "COMMIT and BEGIN, then error", sql: []string{"COMMIT", "BEGIN"}, fails: boom, orders: 1},
		{name: "COMMIT and BEGIN, then aborted", sql: []string{"COMMIT", "BEGIN", "SELECT 1/0"}, orders: 1},
		{name: "ROLLBACK", sql: []string{"ROLLBACK"}},
		{name: "ROLLBACK and BEGIN", sql: []string{"ROLLBACK", "BEGIN"}},
		// Nothing was committed, and nothing says whose ROLLBACK it was: an aborted transaction, and a key that is free.
		{name: "ROLLBACK AND CHAIN", sql: []string{"ROLLBACK AND CHAIN"}, nothing: true},
		{name: "our savepoint released", sql: []string{"RELEASE SAVEPOINT pgonce"}, nothing: true},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			s := newShopWith(t, atLeastConns(4))
			req := request(t, "k", "body")
			tx := s.begin(t, pgx.TxOptions{})
			_, err := insertOrder(t.Context(), tx, "callers")
			require.NoError(t, err)
			_, err = txn.WithIdempotencyTx(t.Context(), s.runner, tx, req, func(ctx context.Context, tx pgx.Tx) (order, error) {
				o, err := insertOrder(ctx, tx, "k")
				require.NoError(t, err)
				for _, sql := range c.sql {
					_, _ = tx.Exec(ctx, sql)
				}
				return o, c.fails
			})
			_, after := tx.Exec(t.Context(), `INSERT INTO orders (key) VALUES ('afterwards')`)
			require.Error(t, after, "it would not be part of any transaction")
			require.Error(t, tx.Commit(t.Context()))
			require.Zero(t, s.orders(t, "afterwards"))
			require.Equal(t, c.orders, s.orders(t, "callers"))
			if c.nothing {
				require.ErrorIs(t, err, idempotency.ErrAborted)
				s.requireSound(t, req, false)
				return
			}
			require.ErrorIs(t, err, idempotency.ErrTransactionEnded)
			var failed *idempotency.FailedError
			require.ErrorAs(t, err, &failed)
			require.Equal(t, c.fails, failed.Cause)
			s.requireEnded(t, req, c.orders)
		})
	}
}

func TestMisuse_JoinedTransactionEndedThenPanic(t *testing.T) {
	t.Parallel()
	for name, leave := range map[string]func(){"panic": func() { panic("boom") }, "Goexit": runtime.Goexit} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := newShopWith(t, atLeastConns(4))
			tx := s.begin(t, pgx.TxOptions{})
			over := make(chan struct{})
			go func() {
				defer close(over)
				defer func() { _ = recover() }()
				_, _ = txn.WithIdempotencyTx(t.Context(), s.runner, tx, request(t, "k", "body"), func(ctx context.Context, tx pgx.Tx) (order, error) {
					_, _ = insertOrder(ctx, tx, "k")
					_, _ = tx.Exec(ctx, `COMMIT`)
					leave()
					return order{}, nil
				})
			}()
			<-over
			require.Error(t, tx.Rollback(t.Context()), "its connection is closed")
			s.requireEnded(t, request(t, "k", "body"), 1)
		})
	}
}

// The caller holds the pool's only connection: what happened cannot be recorded, which the error says in bounded time.
func TestMisuse_JoinedTransactionEndedOnAPoolOfOne(t *testing.T) {
	t.Parallel()
	s := newShopWith(t, func(c *pgxpool.Config) { c.MaxConns = 1 })
	tx := s.begin(t, pgx.TxOptions{})
	_, err := txn.WithIdempotencyTx(t.Context(), s.runner, tx, request(t, "k", "body"), doing("k", statements(`COMMIT`)))
	require.ErrorIs(t, err, idempotency.ErrTransactionEnded)
	require.ErrorContains(t, err, "could not be recorded")
}

// PREPARE TRANSACTION takes rows and lock out of the function's hands: whatever becomes of them, the key never runs again.
func TestMisuse_PrepareTransaction(t *testing.T) {
	t.Parallel()
	for way, call := range ways {
		for _, end := range []string{"COMMIT PREPARED", "ROLLBACK PREPARED"} {
			t.Run(way+"/"+end, func(t *testing.T) {
				t.Parallel()
				s := newShopWith(t, atLeastConns(4))
				req := request(t, "k", "body")
				id := "'" + s.pool.Config().ConnConfig.Database + "'" // one name for the whole server
				_, err := call(t.Context(), s, req, doing("k", statements(`PREPARE TRANSACTION `+id)))
				var allowed bool
				require.NoError(t, s.pool.QueryRow(t.Context(), `SELECT current_setting('max_prepared_transactions')::int > 0`).Scan(&allowed))
				if !allowed { // PostgreSQL's default
					require.ErrorContains(t, err, "55000")
					s.requireSound(t, req, false)
					return
				}
				require.ErrorIs(t, err, idempotency.ErrTransactionEnded)
				r, found := s.record(t, req)
				require.True(t, found, "recorded while the prepared transaction still holds the key's lock")
				require.Equal(t, txn.CodeTransactionEnded, r.ErrorCode)
				_, err = s.pool.Exec(t.Context(), end+" "+id)
				require.NoError(t, err)
				s.requireEnded(t, req, strings.Count(end, "COMMIT"))
			})
		}
	}
}

// A function has committed, and a duplicate on another replica gets the key before that is recorded: one of them, and
// only one, says what came of the key.
func TestMisuse_DuplicateBetweenOwnCommitAndItsRecord(t *testing.T) {
	t.Parallel()
	s := newShop(t)
	replica := s.replica(t)
	req := request(t, "k", "body")
	var second *held
	_, err := txn.WithIdempotency(t.Context(), s.runner, req, doing("k", func(ctx context.Context, tx pgx.Tx) error {
		if err := statements(`COMMIT`)(ctx, tx); err != nil {
			return err
		}
		second = replica.hold(t, req) //nolint:contextcheck // another client. It has the lock, and its order is not committed
		return nil
	}))
	require.ErrorIs(t, err, idempotency.ErrTransactionEnded)
	a := second.letGo()
	require.ErrorIs(t, a.err, idempotency.ErrTransactionEnded, "its own order was rolled back")
	require.True(t, a.Replayed)
	s.requireEnded(t, req, 1)
}
