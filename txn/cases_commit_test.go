package txn_test

import (
	"context"
	"errors"
	"fmt"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgonce/pgonce/idempotency"
	"github.com/pgonce/pgonce/txn"
)

func TestCase_M02_ClientThatHangsUpBeforeCommitDoesNotStopIt(t *testing.T) {
	t.Parallel()
	s := newShop(t)
	for i := range 50 {
		req := request(t, fmt.Sprintf("k%d", i), "body")
		ctx, cancel := context.WithCancel(t.Context())
		first, err := txn.WithIdempotency(ctx, s.runner, req, func(ctx context.Context, tx pgx.Tx) (order, error) {
			o, err := insertOrder(ctx, tx, req.Key.Value())
			cancel()
			return o, err
		})
		require.NoError(t, err, "the work is done: it is finished")
		again, err := s.place(t.Context(), req)
		require.NoError(t, err)
		require.True(t, again.Replayed)
		require.Equal(t, first.Value, again.Value)
		require.Equal(t, first.Record, again.Record)
		require.Equal(t, 1, s.orders(t, req.Key.Value()))
	}
	s.requireIdle(t)
}

// A hidden SQL error has rolled back the function's work, whatever it returns.
func TestCase_P05_SwallowedErrorIsNeverASuccess(t *testing.T) {
	t.Parallel()
	s := newShop(t, impatient)
	for i := range 100 {
		req := request(t, fmt.Sprintf("k%d", i), "body")
		_, err := txn.WithIdempotency(t.Context(), s.runner, req, func(ctx context.Context, tx pgx.Tx) (order, error) {
			o, err := insertOrder(ctx, tx, req.Key.Value())
			_, _ = tx.Exec(ctx, `SELECT 1/0`)
			if i%2 == 0 {
				_, _ = insertOrder(ctx, tx, req.Key.Value())
			}
			return o, err
		})
		require.ErrorIs(t, err, idempotency.ErrAborted)
		var cause *pgconn.PgError
		require.ErrorAs(t, err, &cause)
		_, found := s.record(t, req)
		require.False(t, found)
		require.Zero(t, s.orders(t, req.Key.Value()))
		res, err := s.place(t.Context(), req)
		require.NoError(t, err, "the key is free at once")
		require.False(t, res.Replayed)
		require.Equal(t, 1, s.orders(t, req.Key.Value()))
	}
	s.requireIdle(t)
}

// A server may answer COMMIT with ROLLBACK, and no error: the tag decides. Here the statement of that name rolls back.
func TestCase_P05_CommitThatAnswersRollbackIsNoSuccess(t *testing.T) {
	t.Parallel()
	s := newShopWith(t, func(c *pgxpool.Config) { c.MaxConns = 1 })
	req := request(t, "k", "body")
	_, err := txn.WithIdempotency(t.Context(), s.runner, req, func(ctx context.Context, tx pgx.Tx) (order, error) {
		o, err := insertOrder(ctx, tx, "k")
		require.NoError(t, err)
		_, err = tx.Exec(ctx, `DEALLOCATE pgonce_commit`)
		require.NoError(t, err)
		_, err = tx.Prepare(ctx, "pgonce_commit", "ROLLBACK")
		return o, err
	})
	require.ErrorIs(t, err, idempotency.ErrAborted)
	require.ErrorContains(t, err, "COMMIT answered ROLLBACK")
	s.requireNoRecord(t, req)
	s.requireIdle(t)
}

// hiding runs a function whose first run meets a serialization failure and does hide with it.
func hiding(t *testing.T, s *shop, key string, hide func(ctx context.Context, tx pgx.Tx, conflict error) error) {
	t.Helper()
	s.exec(t, `INSERT INTO stock VALUES ($1, 10)`, key)
	runs := 0
	res, err := txn.WithIdempotency(t.Context(), s.runner, request(t, key, "body"), func(ctx context.Context, tx pgx.Tx) (order, error) {
		runs++
		var n int
		if err := tx.QueryRow(ctx, `SELECT n FROM stock WHERE item = $1`, key).Scan(&n); err != nil {
			return order{}, err
		}
		if runs == 1 {
			// Somebody else, after our snapshot.
			if _, err := s.direct.Exec(ctx, `UPDATE stock SET n = n - 1 WHERE item = $1`, key); err != nil {
				return order{}, err
			}
		}
		o, err := insertOrder(ctx, tx, key)
		if err != nil {
			return o, err
		}
		if _, err := tx.Exec(ctx, `UPDATE stock SET n = n - 1 WHERE item = $1`, key); err != nil {
			return o, hide(ctx, tx, err)
		}
		return o, nil
	})
	require.NoError(t, err)
	require.False(t, res.Replayed)
	require.Equal(t, 2, runs)
	require.Equal(t, 1, s.orders(t, key))
	var n int
	require.NoError(t, s.direct.QueryRow(t.Context(), `SELECT n FROM stock WHERE item = $1`, key).Scan(&n))
	require.Equal(t, 8, n, "nothing of the failed run is left")
}

func TestCase_P02_SerializationFailureIsRetriedHoweverTheFunctionHidesIt(t *testing.T) {
	t.Parallel()
	opaque := errors.New("stock is being changed")
	ways := map[string]func(ctx context.Context, tx pgx.Tx, conflict error) error{
		"returned":   func(_ context.Context, _ pgx.Tx, conflict error) error { return conflict },
		"wrapped":    func(_ context.Context, _ pgx.Tx, conflict error) error { return fmt.Errorf("stock: %w", conflict) },
		"swallowed":  func(context.Context, pgx.Tx, error) error { return nil },
		"replaced":   func(context.Context, pgx.Tx, error) error { return opaque },
		"made final": func(context.Context, pgx.Tx, error) error { return txn.Final("out_of_stock", opaque) },
		"swallowed, and went on": func(ctx context.Context, tx pgx.Tx, _ error) error {
			_, _ = tx.Exec(ctx, `SELECT 1`) // 25P02: the server's last error is another one now
			return nil
		},
		"swallowed, and returned the next error": func(ctx context.Context, tx pgx.Tx, _ error) error {
			_, err := tx.Exec(ctx, `SELECT 1`)
			return err
		},
		"made final, and went on": func(ctx context.Context, tx pgx.Tx, _ error) error {
			_, err := tx.Exec(ctx, `SELECT 1`)
			return txn.Final("out_of_stock", err)
		},
	}
	for _, iso := range []pgx.TxIsoLevel{pgx.RepeatableRead, pgx.Serializable} {
		t.Run(string(iso), func(t *testing.T) {
			t.Parallel()
			s := newShop(t, isolated(iso))
			s.exec(t, `CREATE TABLE stock (item text PRIMARY KEY, n int NOT NULL)`)
			for name, hide := range ways {
				t.Run(name, func(t *testing.T) { hiding(t, s, name, hide) })
			}
			s.requireIdle(t)
		})
	}
}

func TestCase_P02_FailureAtCommitIsRetried(t *testing.T) {
	t.Parallel()
	s := newShop(t, isolated(pgx.Serializable))
	s.exec(t, `CREATE TABLE doctors (name text PRIMARY KEY, on_call bool NOT NULL)`)
	s.exec(t, `INSERT INTO doctors VALUES ('ann', true), ('bob', true)`)
	leave := func(s *shop, name string, read func()) (bool, int, error) {
		runs := 0
		res, err := txn.WithIdempotency(t.Context(), s.runner, request(t, name, "body"), func(ctx context.Context, tx pgx.Tx) (bool, error) {
			runs++
			var n int
			if err := tx.QueryRow(ctx, `SELECT count(*) FROM doctors WHERE on_call`).Scan(&n); err != nil {
				return false, err
			}
			if runs == 1 {
				read()
			}
			if n < 2 {
				return false, nil
			}
			_, err := tx.Exec(ctx, `UPDATE doctors SET on_call = false WHERE name = $1`, name)
			return true, err
		})
		return res.Value, runs, err
	}
	// Bob leaves completely between Ann's look and her write: only one of the two may.
	var bobLeft bool
	annLeft, runs, err := leave(s, "ann", func() {
		var err error
		bobLeft, _, err = leave(s.replica(t, isolated(pgx.Serializable)), "bob", func() {})
		require.NoError(t, err)
	})
	require.NoError(t, err)
	require.True(t, bobLeft)
	require.False(t, annLeft)
	require.Equal(t, 2, runs)
	var n int
	require.NoError(t, s.direct.QueryRow(t.Context(), `SELECT count(*) FROM doctors WHERE on_call`).Scan(&n))
	require.Equal(t, 1, n)
}

func TestCase_P02_FinalFailureLeavesNothing(t *testing.T) {
	t.Parallel()
	s := newShop(t, func(c *txn.Config) { c.MaxRetries = 2 })
	req, runs := request(t, "k1", "body"), 0
	_, err := txn.WithIdempotency(t.Context(), s.runner, req, func(ctx context.Context, tx pgx.Tx) (order, error) {
		runs++
		o, _ := insertOrder(ctx, tx, "k1")
		_, err := tx.Exec(ctx, `DO $$ BEGIN RAISE EXCEPTION USING ERRCODE = '40001'; END $$`)
		return o, err
	})
	var cause *pgconn.PgError
	require.ErrorAs(t, err, &cause)
	require.Equal(t, "40001", cause.Code)
	require.Equal(t, 3, runs)
	_, found := s.record(t, req)
	require.False(t, found)
	require.Zero(t, s.orders(t, "k1"))
	s.requireIdle(t)
}
