package txnsql_test

import (
	"context"
	"database/sql"
	"fmt"
	"math/rand/v2"
	"runtime"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// odd is what a function does with its transaction, by and by all of it. What it leaves behind goes into the group.
var odd = []func(ctx context.Context, tx *sql.Tx, left *sync.WaitGroup) error{
	func(context.Context, *sql.Tx, *sync.WaitGroup) error { return nil },
	func(context.Context, *sql.Tx, *sync.WaitGroup) error { panic("boom") },
	func(context.Context, *sql.Tx, *sync.WaitGroup) error { runtime.Goexit(); return nil },
	func(_ context.Context, tx *sql.Tx, _ *sync.WaitGroup) error { _ = tx.Rollback(); return nil },
	func(ctx context.Context, tx *sql.Tx, _ *sync.WaitGroup) error {
		_, err := tx.QueryContext(ctx, `SELECT generate_series(1, 10000)`)
		return err
	},
	func(ctx context.Context, tx *sql.Tx, left *sync.WaitGroup) error {
		rows, err := tx.QueryContext(ctx, `SELECT generate_series(1, 10000)`)
		if err == nil {
			left.Go(func() {
				for rows.Next() {
				}
			})
		}
		return err
	},
	func(ctx context.Context, tx *sql.Tx, left *sync.WaitGroup) error {
		for range 3 {
			left.Go(func() {
				for ok := true; ok; {
					_, err := tx.ExecContext(context.WithoutCancel(ctx), `SELECT 1`)
					ok = err == nil
				}
			})
		}
		return nil
	},
	func(ctx context.Context, tx *sql.Tx, _ *sync.WaitGroup) error {
		var n int
		prepared, err := tx.PrepareContext(ctx, `SELECT $1::int`)
		if err != nil {
			return err
		}
		return prepared.QueryRowContext(ctx, 4).Scan(&n)
	},
	func(_ context.Context, tx *sql.Tx, left *sync.WaitGroup) error {
		left.Go(func() { _ = tx.Rollback() })
		return nil
	},
	func(ctx context.Context, tx *sql.Tx, left *sync.WaitGroup) error {
		left.Go(func() { _ = tx.Commit() })
		left.Go(func() { _, _ = tx.ExecContext(context.WithoutCancel(ctx), `SELECT pg_sleep(0.005)`) })
		return nil
	},
}

// Everything at once: callers of the same keys whose functions are odd and whose contexts end, sessions that are killed, connections
// that live for a millisecond. Orders and records agree, and nothing is left in use.
func TestFault_Chaos(t *testing.T) {
	t.Parallel()
	for _, conns := range []int{1, 6} {
		t.Run(fmt.Sprint(conns, " connections"), func(t *testing.T) {
			t.Parallel()
			s := newShopAt(t, func(url string) string { return url + "&application_name=odd" })
			s.db.SetMaxOpenConns(conns)
			s.db.SetConnMaxLifetime(time.Millisecond)
			stop := make(chan struct{})
			var killer, callers, left sync.WaitGroup
			killer.Go(func() { s.killSome(t, stop) })
			for g := range 12 {
				callers.Go(func() {
					for i := range 12 {
						s.beOdd(t, fmt.Sprint("k", g/3, "-", i), &left)
					}
				})
			}
			callers.Wait()
			left.Wait()
			close(stop)
			killer.Wait()
			var orders, distinct, records int
			require.NoError(t, s.direct.QueryRow(t.Context(), `SELECT count(*), count(DISTINCT key), (SELECT count(*) FROM idempotency.records WHERE state = 'SUCCESS') FROM orders`).
				Scan(&orders, &distinct, &records))
			require.Equal(t, []int{orders, orders}, []int{distinct, records})
			require.NotZero(t, orders)
			s.db.SetConnMaxLifetime(0)
			res, err := s.place(t.Context(), request(t, create, "after", "body"))
			require.NoError(t, err)
			s.requireOnce(t, request(t, create, "after", "body"), res.Value)
		})
	}
}

// killSome ends sessions of the shop now and then.
func (s *shop) killSome(t *testing.T, stop <-chan struct{}) {
	t.Helper()
	for {
		select {
		case <-stop:
			return
		case <-time.After(20 * time.Millisecond):
		}
		_, _ = s.direct.Exec(t.Context(), `SELECT pg_terminate_backend(pid) FROM pg_stat_activity
			WHERE datname = current_database() AND application_name = 'odd' AND random() < 0.3`)
	}
}

// beOdd is one call, in a goroutine of its own since it may panic or exit.
func (s *shop) beOdd(t *testing.T, key string, left *sync.WaitGroup) {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	if rand.IntN(4) == 0 {
		time.AfterFunc(time.Duration(rand.IntN(20_000))*time.Microsecond, cancel)
	}
	do := odd[rand.IntN(len(odd))]
	req := request(t, create, key, "body")
	gone := make(chan struct{})
	go func() {
		defer close(gone)
		defer func() { _ = recover() }()
		_, _ = s.call(ctx, req, func(ctx context.Context, tx *sql.Tx) error { return do(ctx, tx, left) })
	}()
	<-gone
}
