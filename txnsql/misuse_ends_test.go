package txnsql_test

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"runtime"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/pgonce/pgonce/txn"
	"github.com/pgonce/pgonce/txnsql"
)

// A goroutine of the function ends its sql.Tx while the function returns, and while a statement of another one runs: the
// connection is the runner's when both are through with it.
func TestMisuse_SQLTxEndedByAGoroutine(t *testing.T) {
	t.Parallel()
	s := newShop(t)
	for i := range 60 {
		req := request(t, create, fmt.Sprint("k", i), "body")
		var group sync.WaitGroup
		var statement error
		rollsBack := i%2 == 0
		res, err := s.call(t.Context(), req, func(ctx context.Context, tx *sql.Tx) error {
			inner, _ := txn.FromContext(ctx)
			pid := inner.Conn().PgConn().PID()
			group.Go(func() { _, statement = tx.ExecContext(context.WithoutCancel(ctx), `SELECT pg_sleep(0.05)`) })
			s.waitForSleep(ctx, t, pid)
			ends := make(chan struct{})
			group.Go(func() {
				close(ends)
				if rollsBack {
					_ = tx.Rollback()
				} else {
					_ = tx.Commit()
				}
			})
			<-ends
			return nil
		})
		group.Wait()
		require.NoError(t, statement)
		if err != nil { // Rollback came before the end
			require.True(t, rollsBack, err)
			require.ErrorContains(t, err, "the function called Rollback of its sql.Tx") // during the statement, or after it
			s.requireNothing(t, req)
			continue
		}
		s.requireOnce(t, req, res.Value)
	}
}

// waitForSleep returns when the session runs a pg_sleep, or has run it: on a busy machine a short one may be over before it is seen.
func (s *shop) waitForSleep(ctx context.Context, t testing.TB, pid uint32) {
	t.Helper()
	for sleeps := false; !sleeps; {
		require.NoError(t, s.direct.QueryRow(ctx, `SELECT count(*) > 0 FROM pg_stat_activity WHERE pid = $1 AND query LIKE '%pg_sleep%'`, pid).Scan(&sleeps))
	}
}

// Rows scanned into sql.RawBytes cannot be closed for the function: the call fails instead of waiting for them for ever.
func TestMisuse_SQLRawBytesLeftOpen(t *testing.T) {
	t.Parallel()
	for _, query := range []string{`SELECT 'one'`, `SELECT generate_series(1, 100000)::text`} {
		t.Run(query, func(t *testing.T) {
			t.Parallel()
			s := newShop(t)
			req, runs := request(t, create, query, "body"), 0
			var left *sql.Rows
			_, err := s.call(t.Context(), req, func(ctx context.Context, tx *sql.Tx) (err error) {
				runs++
				left, err = tx.QueryContext(ctx, query) //nolint:sqlclosecheck,rowserrcheck // left open
				require.NoError(t, err)
				require.True(t, left.Next())
				var raw sql.RawBytes
				return left.Scan(&raw)
			})
			require.ErrorContains(t, err, "close them")
			require.Equal(t, 1, runs)
			require.Equal(t, 1, s.db.Stats().InUse, "until somebody closes the rows")
			s.requireNothing(t, req)
			_ = left.Close() // an error of the closed session
			for s.db.Stats().InUse > 0 {
				require.NoError(t, s.db.PingContext(t.Context()))
			}
		})
	}
}

// A goroutine that outlives the function of a joined call goes on with the caller's sql.Tx, and does not get between the call's
// own statements.
func TestJoined_GoroutineOutlivesTheFunction(t *testing.T) {
	t.Parallel()
	s := newShop(t)
	for i := range 20 {
		req := request(t, create, fmt.Sprint("k", i), "body")
		tx := s.begin(t.Context(), t)
		var group sync.WaitGroup
		var stop atomic.Bool
		errs := make([]error, 3)
		joined, err := txnsql.WithIdempotencyTx(t.Context(), s.runner, tx, req, func(ctx context.Context, tx *sql.Tx) (int64, error) {
			id, err := insertOrder(ctx, tx, req.Key.Value())
			for g := range errs {
				group.Go(func() {
					for errs[g] == nil && !stop.Load() {
						_, errs[g] = tx.ExecContext(context.WithoutCancel(ctx), `SELECT 1`)
					}
				})
			}
			return id, err
		})
		stop.Store(true)
		group.Wait()
		require.NoError(t, err)
		require.NoError(t, errors.Join(errs...))
		require.NoError(t, tx.Commit())
		s.requireOnce(t, req, joined.Value)
	}
}

// With rows scanned into sql.RawBytes a joined call fails as with any rows, also when the caller's transaction ends meanwhile,
// which then waits for them.
func TestJoined_SQLRawBytesLeftOpen(t *testing.T) {
	t.Parallel()
	for _, ends := range []bool{false, true} {
		t.Run(fmt.Sprint("context ends ", ends), func(t *testing.T) {
			t.Parallel()
			s := newShop(t)
			req := request(t, create, "k", "body")
			ctx, cancel := context.WithCancel(t.Context())
			defer cancel()
			tx, err := s.db.BeginTx(ctx, nil)
			require.NoError(t, err)
			var left *sql.Rows
			_, err = s.join(t.Context(), tx, req, func(tx *sql.Tx) (err error) {
				left, err = tx.QueryContext(t.Context(), `SELECT generate_series(1, 100000)::text`) //nolint:sqlclosecheck,rowserrcheck // left open
				require.NoError(t, err)
				require.True(t, left.Next())
				var raw sql.RawBytes
				require.NoError(t, left.Scan(&raw))
				if ends {
					cancel()
				}
				return nil
			})
			require.Error(t, err)
			_ = left.Close() // an error of the closed session
			_ = tx.Rollback()
			s.requireNothing(t, req)
		})
	}
}

// A goroutine asks for the sql.Tx of an edge's function, as the first one, while the function returns: it gets none, or one that
// ends with it.
func TestFromContext_AskedWhileTheFunctionReturns(t *testing.T) {
	t.Parallel()
	s := newShop(t)
	s.db.SetMaxOpenConns(1)
	for i := range 300 {
		var group sync.WaitGroup
		begun := make(chan struct{})
		ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
		_, err := txn.WithIdempotency(ctx, s.runner.Runner, request(t, create, fmt.Sprint("k", i), "body"), func(ctx context.Context, _ pgx.Tx) (int, error) {
			for range 4 {
				group.Go(func() {
					<-begun
					if tx, running := txnsql.FromContext(ctx); running {
						_, _ = tx.ExecContext(context.WithoutCancel(ctx), `SELECT 1`)
					}
				})
			}
			close(begun)
			for range i % 7 {
				runtime.Gosched()
			}
			return 0, nil
		})
		cancel()
		require.NoError(t, err)
		group.Wait()
	}
}
