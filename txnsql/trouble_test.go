package txnsql_test

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgconn"
	"github.com/stretchr/testify/require"

	"github.com/pgonce/pgonce/idempotency"
	"github.com/pgonce/pgonce/internal/pgproxy"
	"github.com/pgonce/pgonce/txn"
	"github.com/pgonce/pgonce/txnsql"
)

// newProxiedShop is a shop whose connections can be broken.
func newProxiedShop(t *testing.T, config ...func(*txn.Config)) (*shop, *pgproxy.Proxy) {
	t.Helper()
	var proxy *pgproxy.Proxy
	s := newShopAt(t, func(url string) string {
		var err error
		proxy, err = pgproxy.Start(t.Context(), url, nil)
		require.NoError(t, err)
		t.Cleanup(func() { require.NoError(t, proxy.Close()) })
		return proxy.URL(url)
	}, config...)
	return s, proxy
}

// The answer of a COMMIT is lost: its attempt token tells what it did.
func TestCase_D05_LostCommitIsResolved(t *testing.T) {
	t.Parallel()
	for _, do := range []pgproxy.Action{pgproxy.CutBefore, pgproxy.CutAfter, pgproxy.CutInReply} {
		t.Run(string(do), func(t *testing.T) {
			t.Parallel()
			var unknown, resolved atomic.Int64
			s, proxy := newProxiedShop(t, func(c *txn.Config) {
				c.OnEvent = func(_ context.Context, e idempotency.Event) {
					switch e.(type) {
					case idempotency.CommitUnknown:
						unknown.Add(1)
					case idempotency.CommitResolved:
						resolved.Add(1)
					}
				}
			})
			for i := range 20 {
				req := request(t, create, fmt.Sprint("k", i), "body")
				proxy.Next(pgproxy.Rule{Do: do})
				res, err := s.place(t.Context(), req)
				require.NoError(t, err)
				require.False(t, res.Replayed)
				require.Zero(t, proxy.Waiting())
				s.requireOnce(t, req, res.Value)
			}
			require.EqualValues(t, 20, unknown.Load())
			require.EqualValues(t, 20, resolved.Load())
			require.Zero(t, proxy.Stats().Cancels, "a cancel request after COMMIT could lose it on a standby")
		})
	}
}

func TestCase_D05_UnresolvedCommitIsUnknown(t *testing.T) {
	t.Parallel()
	s, proxy := newProxiedShop(t, func(c *txn.Config) { c.CommitTimeout = time.Second })
	req := request(t, create, "k", "body")
	_, err := txnsql.WithIdempotency(t.Context(), s.runner, req, func(ctx context.Context, tx *sql.Tx) (int64, error) {
		id, err := insertOrder(ctx, tx, "k")
		proxy.Next(pgproxy.Rule{Do: pgproxy.HoldBytes, WholeFlush: true})
		return id, err
	})
	require.ErrorIs(t, err, idempotency.ErrOutcomeUnknown, "the old session still has the key")
	require.Zero(t, s.orders(t, "k"))
	proxy.Drop()
	res, err := s.place(t.Context(), req)
	require.NoError(t, err)
	s.requireOnce(t, req, res.Value)
}

func (s *shop) kill(ctx context.Context, t testing.TB, tx *sql.Tx) {
	t.Helper()
	var pid int
	require.NoError(t, tx.QueryRowContext(ctx, `SELECT pg_backend_pid()`).Scan(&pid))
	_, err := s.direct.Exec(ctx, `SELECT pg_terminate_backend($1, 10000)`, pid)
	require.NoError(t, err)
}

func TestFault_KilledSessionIsRunAgain(t *testing.T) {
	t.Parallel()
	s := newShop(t)
	for _, hidden := range []bool{false, true} {
		req, runs := request(t, create, fmt.Sprint("hidden ", hidden), "body"), 0
		res, err := txnsql.WithIdempotency(t.Context(), s.runner, req, func(ctx context.Context, tx *sql.Tx) (int64, error) {
			runs++
			id, err := insertOrder(ctx, tx, req.Key.Value())
			if runs == 1 {
				s.kill(ctx, t, tx)
				if _, err := insertOrder(ctx, tx, req.Key.Value()); err != nil && !hidden {
					return 0, err
				}
			}
			return id, err
		})
		require.NoError(t, err)
		require.Equal(t, 2, runs)
		s.requireOnce(t, req, res.Value)
	}
}

// The reply to a statement of the function is lost: nothing sends that statement again, the function is run again from its start.
func TestCase_D07_LostReplyInTheFunction(t *testing.T) {
	t.Parallel()
	s, proxy := newProxiedShop(t)
	for i := range 3 {
		req, runs := request(t, create, fmt.Sprint("k", i), "body"), 0
		var group sync.WaitGroup
		res, err := txnsql.WithIdempotency(t.Context(), s.runner, req, func(ctx context.Context, tx *sql.Tx) (id int64, err error) {
			if runs++; runs == 1 {
				group.Go(func() {
					for running := false; !running; { // it has been sent
						err := s.direct.QueryRow(ctx, `SELECT count(*) > 0 FROM pg_stat_activity
							WHERE datname = current_database() AND state = 'active' AND query LIKE 'INSERT%pg_sleep%'`).Scan(&running)
						if err != nil {
							panic(err)
						}
					}
					proxy.Down()
					proxy.Up()
				})
				_, err = tx.ExecContext(ctx, `INSERT INTO orders (key) SELECT $1 FROM pg_sleep(30)`, req.Key.Value())
				require.Error(t, err)
				group.Wait()
				return 0, err
			}
			return insertOrder(ctx, tx, req.Key.Value())
		})
		require.NoError(t, err)
		require.Equal(t, 2, runs)
		s.requireOnce(t, req, res.Value)
	}
}

// An idle connection that the server has closed costs nobody an error.
func TestFault_ConnectionsKilledWhileIdle(t *testing.T) {
	t.Parallel()
	s := newShop(t)
	var group sync.WaitGroup
	for i := range 8 {
		group.Go(func() { _, _ = s.place(t.Context(), request(t, create, fmt.Sprint("warm", i), "body")) })
	}
	group.Wait()
	_, err := s.direct.Exec(t.Context(), `SELECT pg_terminate_backend(pid, 10000) FROM pg_stat_activity
		WHERE datname = current_database() AND pid <> pg_backend_pid() AND query NOT LIKE '%pg_terminate%'`)
	require.NoError(t, err)
	for i := range 8 {
		req := request(t, create, fmt.Sprint("k", i), "body")
		res, err := s.place(t.Context(), req)
		require.NoError(t, err)
		s.requireOnce(t, req, res.Value)
	}
}

func TestCase_D04_SerializationFailuresAndDeadlocksAreRunAgain(t *testing.T) {
	t.Parallel()
	s := newShop(t)
	for _, code := range []string{"40001", "40P01"} {
		for _, hidden := range []bool{false, true} {
			req, runs := request(t, create, fmt.Sprint(code, hidden), "body"), 0
			res, err := txnsql.WithIdempotency(t.Context(), s.runner, req, func(ctx context.Context, tx *sql.Tx) (int64, error) {
				runs++
				id, err := insertOrder(ctx, tx, req.Key.Value())
				if err != nil || runs == 3 {
					return id, err
				}
				_, err = tx.ExecContext(ctx, `DO $$BEGIN RAISE EXCEPTION 'as if' USING ERRCODE = '`+code+`'; END$$`)
				if hidden {
					_ = tx.Rollback() // as a program does that is used to it
					return id, errors.New("try again later")
				}
				return id, err
			})
			require.NoError(t, err)
			require.Equal(t, 3, runs, "from the start")
			s.requireOnce(t, req, res.Value)
		}
	}
}

// Two functions that lock two rows in opposite order.
func TestCase_D04_RealDeadlock(t *testing.T) {
	t.Parallel()
	s := newShop(t)
	_, err := s.direct.Exec(t.Context(), `CREATE TABLE stock (item int PRIMARY KEY, n int); INSERT INTO stock VALUES (0, 10), (1, 10)`)
	require.NoError(t, err)
	var met sync.WaitGroup // both hold their first row
	met.Add(2)
	var group sync.WaitGroup
	errs := make([]error, 2)
	for i := range 2 {
		group.Go(func() {
			var once sync.Once
			_, errs[i] = txnsql.WithIdempotency(t.Context(), s.runner, request(t, create, fmt.Sprint("k", i), "body"), func(ctx context.Context, tx *sql.Tx) (int64, error) {
				for at, item := range []int{i, 1 - i} {
					if _, err := tx.ExecContext(ctx, `UPDATE stock SET n = n - 1 WHERE item = $1`, item); err != nil {
						return 0, err
					}
					if at == 0 {
						once.Do(func() { met.Done(); met.Wait() })
					}
				}
				return insertOrder(ctx, tx, fmt.Sprint("k", i))
			})
		})
	}
	group.Wait()
	require.NoError(t, errors.Join(errs...))
	var left int
	require.NoError(t, s.direct.QueryRow(t.Context(), `SELECT sum(n) FROM stock`).Scan(&left))
	require.Equal(t, 16, left)
}

// A hidden SQL error has undone the function's work, whatever it returns.
func TestCase_P05_SwallowedErrorIsNoSuccess(t *testing.T) {
	t.Parallel()
	s := newShop(t)
	req := request(t, create, "k", "body")
	_, err := txnsql.WithIdempotency(t.Context(), s.runner, req, func(ctx context.Context, tx *sql.Tx) (int64, error) {
		id, err := insertOrder(ctx, tx, "k")
		_, _ = tx.ExecContext(ctx, `SELECT 1/0`)
		return id, err
	})
	require.ErrorIs(t, err, idempotency.ErrAborted)
	var cause *pgconn.PgError
	require.ErrorAs(t, err, &cause)
	require.Equal(t, "22012", cause.Code)
	s.requireNothing(t, req)
}

// COMMIT answers ROLLBACK, and no error: the tag decides. Here the statement of that name rolls back.
func TestCase_P05_CommitThatAnswersRollback(t *testing.T) {
	t.Parallel()
	s := newShop(t)
	s.db.SetMaxOpenConns(1)
	req := request(t, create, "k", "body")
	_, err := txnsql.WithIdempotency(t.Context(), s.runner, req, func(ctx context.Context, tx *sql.Tx) (int64, error) {
		id, err := insertOrder(ctx, tx, "k")
		require.NoError(t, err)
		_, err = tx.ExecContext(ctx, `DEALLOCATE pgonce_commit`)
		require.NoError(t, err)
		inner, running := txn.FromContext(ctx)
		require.True(t, running)
		_, err = inner.Prepare(ctx, "pgonce_commit", "ROLLBACK")
		return id, err
	})
	require.ErrorIs(t, err, idempotency.ErrAborted)
	require.ErrorContains(t, err, "COMMIT answered ROLLBACK")
	require.Zero(t, s.orders(t, "k"))
	require.Empty(t, s.state(t, req))
}

// The caller hangs up at every step.
func TestCase_D10_CancelledAtEveryStep(t *testing.T) {
	t.Parallel()
	s := newShop(t)
	// place runs an order whose context ends at the step; the function notices where its statements do.
	place := func(req idempotency.Request, step string) error {
		ctx, cancel := context.WithCancel(t.Context())
		defer cancel()
		at := func(here string) {
			if here == step {
				cancel()
			}
		}
		at("before")
		_, err := txnsql.WithIdempotency(ctx, s.runner, req, func(ctx context.Context, tx *sql.Tx) (int64, error) {
			at("first")
			id, err := insertOrder(ctx, tx, req.Key.Value())
			if err != nil {
				return 0, err
			}
			at("second")
			if _, err := tx.ExecContext(ctx, `SELECT 1`); err != nil {
				return 0, err
			}
			rows, err := tx.QueryContext(ctx, `SELECT generate_series(1, 10000)`)
			if err != nil {
				return 0, err
			}
			defer rows.Close() //nolint:errcheck // looked at below
			at("in rows")
			for rows.Next() {
				if step == "in a statement" {
					break
				}
			}
			if err := errors.Join(rows.Err(), rows.Close()); err != nil {
				return 0, err
			}
			if step == "in a statement" {
				time.AfterFunc(10*time.Millisecond, cancel)
				if _, err := tx.ExecContext(ctx, `SELECT pg_sleep(60)`); err != nil {
					return 0, err
				}
			}
			at("at the end")
			return id, nil
		})
		return err
	}
	for _, step := range []string{"before", "first", "second", "in a statement"} {
		req := request(t, create, step, "body")
		require.ErrorIs(t, place(req, step), context.Canceled, step)
		s.requireNothing(t, req)
	}
	req := request(t, create, "at the end", "body")
	require.NoError(t, place(req, "at the end"), "the work is done: COMMIT is not the request's")
	require.Equal(t, "SUCCESS", s.state(t, req))
	req = request(t, create, "in rows", "body")
	if err := place(req, "in rows"); err != nil { // all of them may have arrived by then
		s.requireNothing(t, req)
	}
	// At any moment: whatever the answer was, the record and the order go together.
	for i := range 150 {
		req := request(t, create, fmt.Sprint("k", i), "body")
		ctx, cancel := context.WithTimeout(t.Context(), time.Duration(i)*40*time.Microsecond)
		res, err := s.place(ctx, req)
		cancel()
		if err == nil {
			s.requireOnce(t, req, res.Value)
			continue
		}
		require.Equal(t, s.state(t, req) == "SUCCESS", s.orders(t, req.Key.Value()) == 1)
	}
}
