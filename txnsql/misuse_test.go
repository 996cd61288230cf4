package txnsql_test

import (
	"context"
	"database/sql"
	"errors"
	"runtime"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/pgonce/pgonce/idempotency"
	"github.com/pgonce/pgonce/txn"
	"github.com/pgonce/pgonce/txnsql"
)

// call places an order and has the function do something else with its transaction.
func (s *shop) call(ctx context.Context, req idempotency.Request, do func(ctx context.Context, tx *sql.Tx) error) (txn.Result[int64], error) {
	return txnsql.WithIdempotency(ctx, s.runner, req, func(ctx context.Context, tx *sql.Tx) (int64, error) {
		id, err := insertOrder(ctx, tx, req.Key.Value())
		if err != nil {
			return id, err
		}
		return id, do(ctx, tx)
	})
}

func TestMisuse_SQLCommitByTheFunction(t *testing.T) {
	t.Parallel()
	s := newShop(t)
	returned := request(t, create, "returned", "body")
	_, err := s.call(t.Context(), returned, func(_ context.Context, tx *sql.Tx) error { return tx.Commit() })
	require.ErrorIs(t, err, txn.ErrRunnerOwnsTransaction)
	s.requireNothing(t, returned)

	hidden := request(t, create, "hidden", "body")
	res, err := s.call(t.Context(), hidden, func(ctx context.Context, tx *sql.Tx) error {
		require.ErrorIs(t, tx.Commit(), txn.ErrRunnerOwnsTransaction)
		require.Zero(t, s.orders(t, "hidden"), "nothing is committed yet") //nolint:contextcheck // the test's own look
		_, err := insertOrder(ctx, tx, "hidden")
		require.ErrorIs(t, err, sql.ErrTxDone)
		return nil
	})
	require.NoError(t, err)
	s.requireOnce(t, hidden, res.Value)
}

// What the function has rolled back is not committed, whatever it returns.
func TestMisuse_SQLRollbackByTheFunction(t *testing.T) {
	t.Parallel()
	s := newShop(t)
	boom := errors.New("boom")
	for _, c := range []struct {
		name    string
		returns error
		is      error
	}{
		{"nil", nil, txn.ErrRunnerOwnsTransaction},
		{"error", boom, boom},
	} {
		req := request(t, create, c.name, "body")
		_, err := s.call(t.Context(), req, func(_ context.Context, tx *sql.Tx) error {
			require.ErrorIs(t, tx.Rollback(), txn.ErrRunnerOwnsTransaction)
			return c.returns
		})
		require.ErrorIs(t, err, c.is)
		s.requireNothing(t, req)
	}
	deferred := request(t, create, "deferred", "body")
	_, err := txnsql.WithIdempotency(t.Context(), s.runner, deferred, func(ctx context.Context, tx *sql.Tx) (int64, error) {
		defer tx.Rollback() //nolint:errcheck // the habit
		return insertOrder(ctx, tx, "deferred")
	})
	require.ErrorIs(t, err, txn.ErrRunnerOwnsTransaction)
	s.requireNothing(t, deferred)

	final := request(t, create, "final", "body")
	for range 2 {
		_, err = s.call(t.Context(), final, func(_ context.Context, tx *sql.Tx) error {
			_ = tx.Rollback()
			return txn.Final("out_of_stock", boom)
		})
		require.ErrorIs(t, err, idempotency.ErrFailed)
	}
	require.Equal(t, "FAILED", s.state(t, final))

	// In the function of an edge, which knows nothing of database/sql.
	edge := request(t, create, "edge", "body")
	_, err = txn.WithIdempotency(t.Context(), s.runner.Runner, edge, func(ctx context.Context, _ pgx.Tx) (int64, error) {
		tx, running := txnsql.FromContext(ctx)
		require.True(t, running)
		id, err := insertOrder(ctx, tx, "edge")
		_ = tx.Rollback()
		return id, err
	})
	require.ErrorIs(t, err, idempotency.ErrAborted)
	require.ErrorContains(t, err, "return an error instead")
	s.requireNothing(t, edge)
}

func TestMisuse_SQLTransactionEndedByAStatement(t *testing.T) {
	t.Parallel()
	s := newShop(t)
	for _, c := range []struct {
		statement string
		orders    int
	}{{"COMMIT", 1}, {"COMMIT; BEGIN", 1}, {"COMMIT AND CHAIN", 1}, {"ROLLBACK", 0}} {
		req, runs := request(t, create, c.statement, "body"), 0
		for range 3 {
			_, err := s.call(t.Context(), req, func(ctx context.Context, tx *sql.Tx) error {
				runs++
				_, err := tx.ExecContext(ctx, c.statement)
				return err
			})
			require.ErrorIs(t, err, idempotency.ErrTransactionEnded)
		}
		require.Equal(t, 1, runs)
		require.Equal(t, "FAILED", s.state(t, req))
		require.Equal(t, c.orders, s.orders(t, c.statement), "what it committed stays")
	}
}

func TestMisuse_SQLOddExits(t *testing.T) {
	t.Parallel()
	s := newShop(t)
	panics := request(t, create, "panics", "body")
	require.PanicsWithValue(t, "boom", func() {
		_, _ = s.call(t.Context(), panics, func(context.Context, *sql.Tx) error { panic("boom") })
	})
	s.requireNothing(t, panics)

	withRows := request(t, create, "panics with rows", "body")
	require.PanicsWithValue(t, "boom", func() {
		_, _ = s.call(t.Context(), withRows, func(ctx context.Context, tx *sql.Tx) error {
			_, err := tx.QueryContext(ctx, `SELECT generate_series(1, 100000)`) //nolint:sqlclosecheck,rowserrcheck,gocritic // left open
			require.NoError(t, err)
			panic("boom")
		})
	})
	s.requireNothing(t, withRows)

	exits := request(t, create, "exits", "body")
	gone := make(chan struct{})
	go func() {
		defer close(gone)
		_, _ = s.call(t.Context(), exits, func(context.Context, *sql.Tx) error { runtime.Goexit(); return nil })
	}()
	<-gone
	s.requireNothing(t, exits)
}

// database/sql closes the rows of a transaction that ends: here it does so before the commit.
func TestMisuse_SQLRowsLeftOpen(t *testing.T) {
	t.Parallel()
	s := newShop(t)
	req := request(t, create, "k", "body")
	var left *sql.Rows
	res, err := s.call(t.Context(), req, func(ctx context.Context, tx *sql.Tx) (err error) {
		left, err = tx.QueryContext(ctx, `SELECT generate_series(1, 100000)`) //nolint:sqlclosecheck,rowserrcheck // left open
		return err
	})
	require.NoError(t, err)
	require.False(t, left.Next())
	s.requireOnce(t, req, res.Value)

	broken := request(t, create, "broken", "body")
	_, err = s.call(t.Context(), broken, func(ctx context.Context, tx *sql.Tx) (err error) {
		left, err = tx.QueryContext(ctx, `SELECT 1 / (100000 - n) FROM generate_series(1, 100000) n`) //nolint:sqlclosecheck,rowserrcheck // left open
		return err
	})
	require.ErrorIs(t, err, idempotency.ErrAborted, "what nobody has read was an error")
	s.requireNothing(t, broken)
}

// Rows of the pgx.Tx nobody closes: the session is given up, and its transaction does not wait among the idle connections.
func TestMisuse_SQLRowsOfThePgxTxLeftOpen(t *testing.T) {
	t.Parallel()
	s := newShop(t)
	s.db.SetMaxOpenConns(1)
	req := request(t, create, "k", "body")
	_, err := s.call(t.Context(), req, func(ctx context.Context, _ *sql.Tx) error {
		tx, _ := txn.FromContext(ctx)
		_, err := tx.Query(ctx, `SELECT generate_series(1, 100000)`) //nolint:sqlclosecheck,gocritic // left open
		return err
	})
	require.ErrorContains(t, err, "close them")
	require.Zero(t, s.db.Stats().OpenConnections)
	s.requireNothing(t, req)
}

// A goroutine that outlives the function loses its transaction, and a statement of it is waited for.
func TestMisuse_SQLGoroutineOutlivesTheFunction(t *testing.T) {
	t.Parallel()
	s := newShop(t)
	var kept *sql.Tx
	var group sync.WaitGroup
	last := make(chan error, 1)
	req := request(t, create, "k", "body")
	res, err := s.call(t.Context(), req, func(ctx context.Context, tx *sql.Tx) error {
		kept = tx
		begun := make(chan struct{})
		group.Go(func() {
			for i := 0; ; i++ {
				_, err := tx.ExecContext(context.WithoutCancel(ctx), `SELECT 1`)
				if i == 0 {
					close(begun)
				}
				if err != nil {
					last <- err
					return
				}
			}
		})
		<-begun
		return nil
	})
	group.Wait()
	require.NoError(t, err)
	require.ErrorIs(t, <-last, sql.ErrTxDone)
	_, err = kept.ExecContext(t.Context(), `SELECT 1`)
	require.ErrorIs(t, err, sql.ErrTxDone)
	s.requireOnce(t, req, res.Value)
}

// The caller has hung up: the statements obey their own contexts, and what the function returns decides.
func TestMisuse_SQLFunctionIgnoresItsContext(t *testing.T) {
	t.Parallel()
	s := newShop(t)
	req := request(t, create, "k", "body")
	ctx, cancel := context.WithCancel(t.Context())
	res, err := s.call(ctx, req, func(ctx context.Context, tx *sql.Tx) error {
		cancel()
		_, err := tx.ExecContext(ctx, `SELECT 1`)
		require.ErrorIs(t, err, context.Canceled)
		for range 100 {
			if _, err := tx.ExecContext(context.WithoutCancel(ctx), `SELECT pg_sleep(0.001)`); err != nil {
				return err
			}
		}
		return nil
	})
	require.NoError(t, err)
	s.requireOnce(t, req, res.Value)
}

// The sql.DB inside the function is another connection: what is written there is not part of the transaction.
func TestMisuse_SQLDBInside(t *testing.T) {
	t.Parallel()
	s := newShop(t)
	boom := errors.New("boom")
	req := request(t, create, "k", "body")
	_, err := s.call(t.Context(), req, func(ctx context.Context, _ *sql.Tx) error {
		_, err := s.db.ExecContext(ctx, `INSERT INTO orders (key) VALUES ('beside')`)
		require.NoError(t, err)
		return boom
	})
	require.ErrorIs(t, err, boom)
	require.Equal(t, 1, s.orders(t, "beside"), "it stays")
	s.requireNothing(t, req)

	s.db.SetMaxOpenConns(1)
	ctx, cancel := context.WithTimeout(t.Context(), 500*time.Millisecond)
	defer cancel()
	only := request(t, create, "only", "body")
	_, err = s.call(ctx, only, func(ctx context.Context, _ *sql.Tx) error { return s.db.PingContext(ctx) })
	require.ErrorIs(t, err, context.DeadlineExceeded, "its own call has the only connection")
	s.requireNothing(t, only)
}

func TestMisuse_SQLSameRunnerInside(t *testing.T) {
	t.Parallel()
	s := newShop(t)
	req := request(t, create, "k", "body")
	res, err := s.call(t.Context(), req, func(ctx context.Context, tx *sql.Tx) error {
		_, err := s.place(ctx, request(t, create, "other", "body"))
		require.ErrorIs(t, err, idempotency.ErrNested)
		_, err = txnsql.WithIdempotencyTx(ctx, s.runner, tx, request(t, create, "other", "body"), func(context.Context, *sql.Tx) (int, error) { return 0, nil })
		require.ErrorIs(t, err, idempotency.ErrNested)
		return nil
	})
	require.NoError(t, err)
	s.requireOnce(t, req, res.Value)
}

// Statements prepared on the sql.DB are its own: they work in the function, and are closed after it.
func TestTx_StatementsFromOutsideAndInside(t *testing.T) {
	t.Parallel()
	s := newShop(t)
	outside, err := s.db.PrepareContext(t.Context(), `INSERT INTO orders (key) VALUES ($1)`)
	require.NoError(t, err)
	defer func() { require.NoError(t, outside.Close()) }()
	for i := range 5 {
		req := request(t, create, string(rune('a'+i)), "body")
		res, err := txnsql.WithIdempotency(t.Context(), s.runner, req, func(ctx context.Context, tx *sql.Tx) (id int64, err error) {
			if _, err := tx.StmtContext(ctx, outside).ExecContext(ctx, req.Key.Value()); err != nil { //nolint:sqlclosecheck // with the transaction
				return 0, err
			}
			inside, err := tx.PrepareContext(ctx, `SELECT id FROM orders WHERE key = $1`) //nolint:sqlclosecheck // with the transaction
			if err != nil {
				return 0, err
			}
			err = inside.QueryRowContext(ctx, req.Key.Value()).Scan(&id)
			return id, err
		})
		require.NoError(t, err)
		s.requireOnce(t, req, res.Value)
	}
}
