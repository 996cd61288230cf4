package txnsql_test

import (
	"context"
	"database/sql"
	"database/sql/driver"
	"errors"
	"fmt"
	"io"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/stdlib"
	"github.com/stretchr/testify/require"

	"github.com/pgonce/pgonce/idempotency"
	"github.com/pgonce/pgonce/txn"
	"github.com/pgonce/pgonce/txnsql"
)

// join places an order in a transaction of the caller; do comes behind the INSERT.
func (s *shop) join(ctx context.Context, tx *sql.Tx, req idempotency.Request, do ...func(*sql.Tx) error) (*txn.Joined[int64], error) {
	return txnsql.WithIdempotencyTx(ctx, s.runner, tx, req, func(ctx context.Context, tx *sql.Tx) (int64, error) {
		id, err := insertOrder(ctx, tx, req.Key.Value())
		for _, d := range do {
			err = errors.Join(err, d(tx))
		}
		return id, err
	})
}

func (s *shop) begin(ctx context.Context, t testing.TB) *sql.Tx {
	t.Helper()
	tx, err := s.db.BeginTx(ctx, nil)
	require.NoError(t, err)
	t.Cleanup(func() { _ = tx.Rollback() })
	return tx
}

func TestJoined_CommitsWithTheCaller(t *testing.T) {
	t.Parallel()
	s := newShop(t)
	s.db.SetMaxOpenConns(1)
	req := request(t, create, "k", "body")
	tx := s.begin(t.Context(), t)
	joined, err := s.join(t.Context(), tx, req)
	require.NoError(t, err)
	require.Zero(t, s.orders(t, "k"))
	require.NoError(t, tx.Commit())
	require.NoError(t, joined.AfterCommit(t.Context()))
	s.requireOnce(t, req, joined.Value)

	tx = s.begin(t.Context(), t)
	again, err := s.join(t.Context(), tx, req)
	require.NoError(t, err)
	require.True(t, again.Replayed)
	require.NoError(t, tx.Commit())
}

func TestJoined_RollbackOfTheCallerLeavesNothing(t *testing.T) {
	t.Parallel()
	s := newShop(t)
	req := request(t, create, "k", "body")
	tx := s.begin(t.Context(), t)
	joined, err := s.join(t.Context(), tx, req)
	require.NoError(t, err)
	require.NoError(t, tx.Rollback())
	require.ErrorIs(t, joined.AfterCommit(t.Context()), idempotency.ErrNotRecorded)
	s.requireNothing(t, req)
}

func TestJoined_ErrorsLeaveTheCallersTransactionUsable(t *testing.T) {
	t.Parallel()
	s := newShop(t)
	boom := errors.New("boom")
	tx := s.begin(t.Context(), t)
	_, err := s.join(t.Context(), tx, request(t, create, "error", "body"), func(*sql.Tx) error { return boom })
	require.ErrorIs(t, err, boom)
	_, err = s.join(t.Context(), tx, request(t, create, "hidden", "body"), func(tx *sql.Tx) error { _, _ = tx.ExecContext(t.Context(), `SELECT 1/0`); return nil })
	require.ErrorIs(t, err, idempotency.ErrAborted)
	require.PanicsWithValue(t, "boom", func() {
		_, _ = s.join(t.Context(), tx, request(t, create, "panics", "body"), func(*sql.Tx) error { panic("boom") })
	})
	_, err = s.join(t.Context(), tx, request(t, create, "final", "body"), func(*sql.Tx) error { return txn.Final("no", boom) })
	require.ErrorIs(t, err, idempotency.ErrFailed)
	good, err := s.join(t.Context(), tx, request(t, create, "good", "body"))
	require.NoError(t, err)
	require.NoError(t, tx.Commit())
	require.NoError(t, good.AfterCommit(t.Context()))
	for _, key := range []string{"error", "hidden", "panics"} {
		s.requireNothing(t, request(t, create, key, "body"))
	}
	require.Zero(t, s.orders(t, "final"))
	require.Equal(t, "FAILED", s.state(t, request(t, create, "final", "body")))
	s.requireOnce(t, request(t, create, "good", "body"), good.Value)
}

func TestJoined_NeverWaits(t *testing.T) {
	t.Parallel()
	s := newShop(t)
	req := request(t, create, "k", "body")
	first, second := s.begin(t.Context(), t), s.begin(t.Context(), t)
	_, err := s.join(t.Context(), first, req)
	require.NoError(t, err)
	_, err = s.join(t.Context(), second, req)
	require.ErrorIs(t, err, idempotency.ErrInProgress)
	require.NoError(t, first.Rollback())
	joined, err := s.join(t.Context(), second, req)
	require.NoError(t, err)
	require.NoError(t, second.Commit())
	s.requireOnce(t, req, joined.Value)
}

// The function must not end the caller's transaction: what was in it is rolled back, and nothing is recorded.
func TestJoined_SQLTransactionEndedByTheFunction(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		name string
		end  func(*sql.Tx) error
	}{
		{"Commit", (*sql.Tx).Commit},
		{"Rollback", (*sql.Tx).Rollback},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			s := newShop(t)
			req := request(t, create, "k", "body")
			tx := s.begin(t.Context(), t)
			_, err := tx.ExecContext(t.Context(), `INSERT INTO orders (key) VALUES ('before')`)
			require.NoError(t, err)
			_, err = s.join(t.Context(), tx, req, func(tx *sql.Tx) error {
				require.ErrorIs(t, c.end(tx), txn.ErrRunnerOwnsTransaction)
				return nil // hidden
			})
			require.ErrorIs(t, err, sql.ErrTxDone)
			require.ErrorIs(t, tx.Commit(), sql.ErrTxDone)
			require.Zero(t, s.orders(t, "before"))
			s.requireNothing(t, req)
		})
	}
	t.Run("statement", func(t *testing.T) {
		t.Parallel()
		s := newShop(t)
		req := request(t, create, "k", "body")
		tx := s.begin(t.Context(), t)
		_, err := s.join(t.Context(), tx, req, func(tx *sql.Tx) error { _, err := tx.ExecContext(t.Context(), "COMMIT"); return err })
		require.ErrorIs(t, err, idempotency.ErrTransactionEnded)
		require.Error(t, tx.Commit())
		require.Equal(t, "FAILED", s.state(t, req))
	})
}

// database/sql ends a transaction whose context has ended, at any moment and from another goroutine. The connection must
// then not go to somebody else while a call is on it.
func TestJoined_ContextOfTheCallersTransactionEnds(t *testing.T) {
	t.Parallel()
	s := newShop(t)
	s.db.SetMaxOpenConns(1)
	for i := range 30 {
		req := request(t, create, fmt.Sprint("k", i), "body")
		ctx, cancel := context.WithCancel(t.Context())
		tx := s.begin(ctx, t)
		_, err := txnsql.WithIdempotencyTx(t.Context(), s.runner, tx, req, func(inside context.Context, tx *sql.Tx) (int64, error) {
			_, err := insertOrder(inside, tx, req.Key.Value())
			require.NoError(t, err)
			cancel()
			for {
				if _, err := tx.ExecContext(inside, `SELECT 1`); err != nil { // until database/sql has noticed
					require.ErrorIs(t, err, sql.ErrTxDone)
					break
				}
			}
			// The sql.DB has let go of its only connection: the next one is another.
			_, err = s.db.ExecContext(inside, `INSERT INTO orders (key) VALUES ('beside')`)
			require.NoError(t, err)
			inner, running := txn.FromContext(inside)
			require.True(t, running)
			_, err = inner.Exec(inside, `SELECT 1`)
			require.NoError(t, err, "it is the call's to its end")
			return 0, nil
		})
		require.ErrorIs(t, err, sql.ErrTxDone)
		require.ErrorIs(t, tx.Commit(), sql.ErrTxDone)
		require.Equal(t, i+1, s.orders(t, "beside"))
		s.requireNothing(t, req)
	}
}

func TestJoined_InTheTransactionOfAnotherRunner(t *testing.T) {
	t.Parallel()
	s := newShop(t)
	s.db.SetMaxOpenConns(1)
	other := newRunner(t, s.db)
	outer, inner := request(t, create, "outer", "body"), request(t, invoice, "inner", "body")
	call := func(fails error) (txn.Result[int64], error) {
		return s.call(t.Context(), outer, func(ctx context.Context, tx *sql.Tx) error {
			_, err := txnsql.WithIdempotencyTx(ctx, other, tx, inner, func(ctx context.Context, same *sql.Tx) (int64, error) {
				within, running := txnsql.FromContext(ctx)
				require.True(t, running)
				require.Same(t, same, within)
				return insertOrder(ctx, same, "inner")
			})
			require.NoError(t, err)
			return fails
		})
	}
	boom := errors.New("boom")
	_, err := call(boom)
	require.ErrorIs(t, err, boom)
	require.Zero(t, s.orders(t, "inner"))
	require.Empty(t, s.state(t, inner))
	res, err := call(nil)
	require.NoError(t, err)
	require.Equal(t, "SUCCESS", s.state(t, inner))
	require.Equal(t, 1, s.orders(t, "inner"))
	s.requireOnce(t, outer, res.Value)
}

// foreign is a driver that takes everything and sends nothing anywhere.
type foreign struct{ sent int }

func (f *foreign) Connect(context.Context) (driver.Conn, error) { return f, nil }
func (f *foreign) Driver() driver.Driver                        { return f }
func (f *foreign) Open(string) (driver.Conn, error)             { return f, nil }
func (f *foreign) Prepare(string) (driver.Stmt, error)          { f.sent++; return nil, io.ErrUnexpectedEOF }
func (f *foreign) Begin() (driver.Tx, error)                    { return f, nil }
func (f *foreign) Close() error                                 { return nil }
func (f *foreign) Commit() error                                { return nil }
func (f *foreign) Rollback() error                              { return nil }

func TestJoined_TransactionOfAnotherDriver(t *testing.T) {
	t.Parallel()
	s := newShop(t)
	never := func(context.Context, *sql.Tx) (int, error) { panic("must not run") }
	refused := func(tx *sql.Tx) {
		_, err := txnsql.WithIdempotencyTx(t.Context(), s.runner, tx, request(t, create, "k", "body"), never)
		require.ErrorIs(t, err, idempotency.ErrConfig)
		if tx != nil {
			require.ErrorContains(t, err, "txnsql.OpenDB")
			require.NoError(t, tx.Commit(), "nothing was sent, nothing is spoilt")
		}
	}
	refused(nil)
	f := &foreign{}
	db := sql.OpenDB(f)
	defer func() { require.NoError(t, db.Close()) }()
	tx, err := db.BeginTx(t.Context(), nil)
	require.NoError(t, err)
	refused(tx)
	require.LessOrEqual(t, f.sent, 1, "an empty statement at most")

	plain := stdlib.OpenDB(*s.direct.Config().ConnConfig)
	defer func() { require.NoError(t, plain.Close()) }()
	tx, err = plain.BeginTx(t.Context(), nil)
	require.NoError(t, err)
	refused(tx)

	tx = s.begin(t.Context(), t)
	require.NoError(t, tx.Commit())
	_, err = txnsql.WithIdempotencyTx(t.Context(), s.runner, tx, request(t, create, "k", "body"), never)
	require.ErrorIs(t, err, sql.ErrTxDone)
}

// A caller that has hung up is told that, and nothing about its transaction's driver.
func TestJoined_ContextHasEnded(t *testing.T) {
	t.Parallel()
	s := newShop(t)
	req := request(t, create, "k", "body")
	tx := s.begin(t.Context(), t)
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	_, err := s.join(ctx, tx, req)
	require.ErrorIs(t, err, context.Canceled)
	require.NotErrorIs(t, err, idempotency.ErrConfig)
	_ = tx.Rollback() // an error where the session was closed
	s.requireNothing(t, req)
}

// Rollback in a joined call is of the whole transaction, also where the function around it is an edge's and hides the error: the
// savepoint that is rolled back does not bring the transaction back to life.
func TestJoined_RollbackSpoilsTheFunctionAround(t *testing.T) {
	t.Parallel()
	s := newShop(t)
	other := newRunner(t, s.db)
	outer, inner := request(t, create, "outer", "body"), request(t, invoice, "inner", "body")
	_, err := txn.WithIdempotency(t.Context(), s.runner.Runner, outer, func(ctx context.Context, _ pgx.Tx) (int64, error) {
		tx, running := txnsql.FromContext(ctx)
		require.True(t, running)
		id, err := insertOrder(ctx, tx, "outer")
		require.NoError(t, err)
		_, err = txnsql.WithIdempotencyTx(ctx, other, tx, inner, func(_ context.Context, tx *sql.Tx) (int64, error) { return 0, tx.Rollback() })
		require.ErrorIs(t, err, txn.ErrRunnerOwnsTransaction)
		return id, nil
	})
	require.ErrorIs(t, err, idempotency.ErrAborted)
	s.requireNothing(t, outer)
}

// Of one key in one transaction two runners would make two records, and one would refuse the other.
func TestJoined_SameKeyInTheTransactionOfAnotherRunner(t *testing.T) {
	t.Parallel()
	s := newShop(t)
	other := newRunner(t, s.db)
	req := request(t, create, "k", "body")
	res, err := s.call(t.Context(), req, func(ctx context.Context, tx *sql.Tx) error {
		_, err := txnsql.WithIdempotencyTx(ctx, other, tx, req, func(context.Context, *sql.Tx) (int, error) { panic("must not run") })
		require.ErrorIs(t, err, idempotency.ErrNested)
		return nil
	})
	require.NoError(t, err)
	s.requireOnce(t, req, res.Value)
}
