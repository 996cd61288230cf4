package txn_test

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgonce/pgonce/idempotency"
	"github.com/pgonce/pgonce/txn"
)

// newEventShop is a shop whose pool has a tracer, and whose OnEvent is the test's. It may use the pool.
func newEventShop(t *testing.T, onEvent func(ctx context.Context, pool *pgxpool.Pool, e idempotency.OutsideTransaction)) *shop {
	t.Helper()
	var pool atomic.Pointer[pgxpool.Pool]
	s := newShopWith(t, func(c *pgxpool.Config) {
		c.MaxConns = 8
		txn.NewTracer(&txn.TracerConfig{Log: slog.New(slog.DiscardHandler)}).AddTo(c.ConnConfig)
	}, func(c *txn.Config) {
		c.Isolation = pgx.ReadCommitted
		c.OnEvent = func(ctx context.Context, e idempotency.Event) {
			if out, is := e.(idempotency.OutsideTransaction); is {
				onEvent(ctx, pool.Load(), out)
			}
		}
	})
	pool.Store(s.pool)
	return s
}

// Whoever writes reports into the database does not cause reports.
func TestTracer_OnEventMayUseThePool(t *testing.T) {
	t.Parallel()
	var reports atomic.Int64
	s := newEventShop(t, func(ctx context.Context, pool *pgxpool.Pool, _ idempotency.OutsideTransaction) {
		if reports.Add(1) > 100 {
			panic("for ever")
		}
		for _, ctx := range []context.Context{ctx, context.WithoutCancel(ctx)} {
			_, err := pool.Exec(ctx, outsideInsert, "report") //nolint:contextcheck // the report's own, and one derived from it
			require.NoError(t, err)
		}
	})
	_, err := txn.WithIdempotency(t.Context(), s.runner, request(t, "k", "body"), doing("k", func(ctx context.Context, _ pgx.Tx) error {
		_, err := s.pool.Exec(ctx, outsideInsert, "outside")
		return err
	}))
	require.NoError(t, err)
	require.EqualValues(t, 2, reports.Load())
	require.Equal(t, 4, s.orders(t, "report"))
}

// A panic of OnEvent is the call's error, and no connection is lost.
func TestTracer_OnEventThatPanics(t *testing.T) {
	t.Parallel()
	for _, at := range []string{"acquire", "query"} {
		t.Run(at, func(t *testing.T) {
			t.Parallel()
			s := newEventShop(t, func(_ context.Context, _ *pgxpool.Pool, e idempotency.OutsideTransaction) {
				if e.Call == at {
					panic("OnEvent")
				}
			})
			for range 20 {
				_, err := txn.WithIdempotency(t.Context(), s.runner, request(t, "k", "body"), doing("k", func(ctx context.Context, _ pgx.Tx) error {
					rows, err := s.pool.Query(ctx, `SELECT 1`)
					rows.Close()
					return errors.Join(err, rows.Err())
				}))
				require.ErrorContains(t, err, "panic: OnEvent")
			}
			require.Zero(t, s.pool.Stat().AcquiredConns())
			_, err := s.place(t.Context(), request(t, "k", "body"))
			require.NoError(t, err)
		})
	}
}

// Many functions at once, each with goroutines that go past its transaction while it ends: every report has its own function's key.
func TestTracer_ManyAtOnce(t *testing.T) {
	t.Parallel()
	var wrong sync.Map
	s := newEventShop(t, func(ctx context.Context, _ *pgxpool.Pool, e idempotency.OutsideTransaction) {
		if want, is := ctx.Value(keyOfFunction{}).(string); !is || want != e.Key.Value() {
			wrong.Store(e.Key.Value(), want)
		}
	})
	var group sync.WaitGroup
	for i := range 8 {
		key := fmt.Sprint("k", i)
		group.Go(func() {
			for n := range 10 {
				var inside sync.WaitGroup
				ctx := context.WithValue(t.Context(), keyOfFunction{}, fmt.Sprint(key, n))
				_, err := txn.WithIdempotency(ctx, s.runner, request(t, fmt.Sprint(key, n), "body"), doing("k", func(ctx context.Context, tx pgx.Tx) error {
					ctx = context.WithoutCancel(ctx)
					for range 2 {
						inside.Go(func() { _, _ = s.direct.Exec(ctx, `SELECT 1`) })
						inside.Go(func() { _, _ = s.pool.Exec(ctx, `SELECT 1`) })
					}
					_, err := tx.Exec(ctx, `SELECT 1`)
					return err
				}))
				inside.Wait()
				if err != nil {
					t.Error(err)
				}
			}
		})
	}
	group.Wait()
	wrong.Range(func(key, want any) bool {
		t.Errorf("a report of %v in the function of %v", key, want)
		return true
	})
}

type keyOfFunction struct{}
