package txn_test

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"sync"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/pgonce/pgonce/idempotency"
	"github.com/pgonce/pgonce/txn"
)

// One key that breaks the whole transaction must not take the others with it.
func TestMany_OneThatBreaksTheTransaction(t *testing.T) {
	t.Parallel()
	for name, trouble := range map[string]func(context.Context, pgx.Tx) error{
		"kills its session": func(ctx context.Context, tx pgx.Tx) error {
			_, err := tx.Exec(ctx, `SELECT pg_terminate_backend(pg_backend_pid())`)
			return err
		},
		"leaves rows open": func(ctx context.Context, tx pgx.Tx) error {
			_, err := tx.Query(ctx, `SELECT generate_series(1, 10)`) //nolint:sqlclosecheck,gocritic // the point of it
			return err
		},
		"is refused at COMMIT": func(ctx context.Context, tx pgx.Tx) error {
			_, err := tx.Exec(ctx, `INSERT INTO children VALUES (1)`)
			return err
		},
		"meets a deadlock": func(ctx context.Context, tx pgx.Tx) error {
			_, err := tx.Exec(ctx, `DO $$ BEGIN RAISE EXCEPTION 'so it says' USING ERRCODE = '40P01'; END $$`)
			return err
		},
		"aborts and says nothing": func(ctx context.Context, tx pgx.Tx) error {
			_, _ = tx.Exec(ctx, `SELECT 1/0`)
			return nil
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := newShop(t, func(c *txn.Config) { c.MaxRetries = 1 })
			_, err := s.direct.Exec(t.Context(), `CREATE TABLE parents (id int PRIMARY KEY);
				CREATE TABLE children (parent int REFERENCES parents DEFERRABLE INITIALLY DEFERRED)`)
			require.NoError(t, err)
			reqs := requests(t, numbered(6)...)
			outcomes, err := s.placeMany(t.Context(), reqs, func(ctx context.Context, tx pgx.Tx, i int) error {
				if i == 3 {
					return trouble(ctx, tx)
				}
				return nil
			})
			require.NoError(t, err)
			for i, out := range outcomes {
				if i == 3 {
					require.Error(t, out.Err)
					_, found := s.record(t, reqs[i])
					require.False(t, found)
					continue
				}
				require.NoError(t, out.Err, "%d", i)
				require.False(t, out.Replayed)
				require.Equal(t, 1, s.orders(t, reqs[i].Key.Value()))
			}
			require.Equal(t, 5, s.allOrders(t))
		})
	}
}

// What a COMMIT of the function's own has committed is never run again, also that of the keys before it.
func TestMany_AFunctionThatEndsTheTransaction(t *testing.T) {
	t.Parallel()
	for _, sql := range []string{`COMMIT`, `COMMIT; BEGIN`, `ROLLBACK`} {
		for _, panics := range []bool{false, true} {
			if panics && sql == "ROLLBACK" {
				continue // nothing can be committed then
			}
			t.Run(fmt.Sprintf("%s, panic %v", sql, panics), func(t *testing.T) {
				t.Parallel()
				s := newShopWith(t, atLeastConns(3))
				reqs := requests(t, numbered(5)...)
				runs := make([]int, len(reqs))
				refused := errors.New("refused")
				place := func() ([]txn.Outcome[order], error) {
					return s.placeMany(t.Context(), reqs, func(ctx context.Context, tx pgx.Tx, i int) error {
						runs[i]++
						switch i {
						case 1:
							return refused
						case 3:
							_, err := tx.Conn().PgConn().Exec(ctx, sql).ReadAll()
							require.NoError(t, err)
							if _, err := tx.Exec(ctx, `SELECT 1`); err != nil { // shows the guard what happened
								return err
							}
							if panics {
								panic("oh")
							}
						}
						return nil
					})
				}
				if panics {
					require.Panics(t, func() { _, _ = place() })
				} else {
					outcomes, err := place()
					require.NoError(t, err)
					require.ErrorIs(t, outcomes[1].Err, refused)
					require.ErrorIs(t, outcomes[3].Err, idempotency.ErrTransactionEnded)
					require.NoError(t, outcomes[4].Err)
				}
				require.LessOrEqual(t, s.orders(t, "k0"), 1)
				before := slices.Clone(runs)
				outcomes, err := s.placeMany(t.Context(), reqs, func(context.Context, pgx.Tx, int) error { return nil })
				require.NoError(t, err)
				for _, i := range []int{0, 2, 3} {
					require.ErrorIs(t, outcomes[i].Err, idempotency.ErrTransactionEnded, "%d", i)
				}
				require.NoError(t, outcomes[1].Err)
				require.Equal(t, before, runs)
				for _, key := range numbered(5) {
					require.LessOrEqual(t, s.orders(t, key), 1, key)
				}
			})
		}
	}
}

// Two processes with the same keys in opposite orders: none waits for the other, so none can deadlock.
func TestMany_OppositeOrdersNeverDeadlock(t *testing.T) {
	t.Parallel()
	pairs, workers := 500, 4
	if os.Getenv("PGONCE_FAULTS") == "full" {
		pairs = 10_000
	}
	s := newShopWith(t, atLeastConns(int32(2*workers)))
	other := newRunner(t, s.pool)
	jobs := make(chan int)
	var group sync.WaitGroup
	var mu sync.Mutex
	fresh, busy := 0, 0
	place := func(r *txn.Runner, reqs []idempotency.Request) {
		open := reqs
		for len(open) > 0 {
			outcomes, err := txn.WithIdempotencyMany(t.Context(), r, open, func(ctx context.Context, tx pgx.Tx, i int) (order, error) {
				return insertOrder(ctx, tx, open[i].Key.Value())
			})
			if err != nil {
				t.Error(err)
				return
			}
			var left []idempotency.Request
			mu.Lock()
			for i, out := range outcomes {
				switch {
				case errors.Is(out.Err, idempotency.ErrInProgress):
					busy++
					left = append(left, open[i])
				case out.Err != nil:
					t.Error(out.Err)
				case !out.Replayed:
					fresh++
				}
			}
			mu.Unlock()
			open = left
		}
	}
	for range workers {
		group.Go(func() {
			for i := range jobs {
				reqs := requests(t, fmt.Sprintf("a%d", i), fmt.Sprintf("b%d", i))
				back := []idempotency.Request{reqs[1], reqs[0]}
				var pair sync.WaitGroup
				pair.Go(func() { place(s.runner, reqs) })
				pair.Go(func() { place(other, back) })
				pair.Wait()
			}
		})
	}
	for i := range pairs {
		jobs <- i
	}
	close(jobs)
	group.Wait()
	require.Equal(t, 2*pairs, fresh)
	require.Equal(t, 2*pairs, s.allOrders(t))
	var deadlocks int
	require.NoError(t, s.direct.QueryRow(t.Context(), `SELECT deadlocks FROM pg_stat_database WHERE datname = current_database()`).Scan(&deadlocks))
	require.Zero(t, deadlocks)
	t.Logf("%d pairs: %d fresh, %d times in progress, %d deadlocks", pairs, fresh, busy, deadlocks)
}
