package txn_test

import (
	"context"
	"log/slog"
	"sync/atomic"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgonce/pgonce/idempotency"
	"github.com/pgonce/pgonce/txn"
)

// Everything that a function and the library may do: nothing is reported, and with Refuse everything works.
func TestTracer_NoFalseReports(t *testing.T) {
	t.Parallel()
	for way, call := range ways {
		t.Run(way, func(t *testing.T) {
			t.Parallel()
			s, another, seen := newTracedShop(t, true, 8)
			inner := &shop{pool: s.pool, runner: newRunner(t, s.pool, seen.config)}
			kept, now, unrelated := make(chan context.Context, 1), make(chan struct{}), make(chan error, 1)
			go func() {
				<-now
				_, err := s.pool.Exec(t.Context(), outsideInsert, "unrelated")
				unrelated <- err
			}()
			_, err := call(t.Context(), s, request(t, "k", "body"), doing("k", func(ctx context.Context, tx pgx.Tx) error {
				kept <- ctx
				inside, found := txn.FromContext(ctx)
				require.True(t, found)
				require.NoError(t, statements(`INSERT INTO orders (key) VALUES ('own')`)(ctx, inside))
				require.NoError(t, pgx.BeginFunc(ctx, tx, func(savepoint pgx.Tx) error {
					b := &pgx.Batch{}
					b.Queue(outsideInsert, "own")
					if err := savepoint.SendBatch(ctx, b).Close(); err != nil {
						return err
					}
					_, err := savepoint.CopyFrom(ctx, pgx.Identifier{"orders"}, []string{"key"}, pgx.CopyFromRows([][]any{{"own"}}))
					return err
				}))
				_, err := tx.Prepare(ctx, "", outsideInsert)
				require.NoError(t, err)
				_, err = tx.Conn().Exec(ctx, outsideInsert, "own")
				require.NoError(t, err)
				large := tx.LargeObjects()
				_, err = large.Create(ctx, 0)
				require.NoError(t, err)

				_, err = inner.join(ctx, tx, request(t, "joined inside", "body"))
				require.NoError(t, err, "another runner in this transaction")
				_, err = inner.place(ctx, request(t, "alone inside", "body"))
				require.NoError(t, err, "another runner in its own")
				_, err = inner.place(ctx, request(t, "alone inside", "body"))
				require.NoError(t, err, "its replay")
				outcomes, err := txn.WithIdempotencyMany(ctx, inner.runner, []idempotency.Request{request(t, "many 1", "body"), request(t, "many 2", "body")},
					func(ctx context.Context, tx pgx.Tx, _ int) (order, error) { return insertOrder(ctx, tx, "many") })
				require.NoError(t, err)
				require.NoError(t, outcomes[0].Err)
				_, err = txn.WithLease(ctx, inner.runner, request(t, "leased inside", "body"), func(ctx context.Context, l *txn.Lease) (int, error) {
					_, err := txn.Step(ctx, l, "step", func(context.Context, string) (int, error) { return 1, nil })
					require.NoError(t, err)
					_, err = s.pool.Exec(ctx, outsideInsert, "foreign")
					return 1, err
				}, func(ctx context.Context, tx pgx.Tx, _ int) (order, error) { return insertOrder(ctx, tx, "leased") })
				require.NoError(t, err)
				require.NoError(t, inner.runner.Check(ctx))

				close(now)
				return <-unrelated
			}))
			require.NoError(t, err)
			_, err = another.Exec(context.WithoutCancel(<-kept), outsideInsert, "afterwards")
			require.NoError(t, err, "the function has returned")

			_, err = txn.WithLease(t.Context(), s.runner, request(t, "leased", "body"), func(ctx context.Context, _ *txn.Lease) (int, error) {
				_, err := s.pool.Exec(ctx, outsideInsert, "foreign")
				return 1, err
			}, func(ctx context.Context, tx pgx.Tx, _ int) (order, error) { return insertOrder(ctx, tx, "leased") })
			require.NoError(t, err)
			_, err = call(t.Context(), s, request(t, "failed", "body"), doing("failed", statements(`nonsense`)))
			require.Error(t, err)
			require.NotErrorIs(t, err, txn.ErrOutsideTransaction)
			require.Empty(t, seen.take())
			require.Equal(t, 2, s.orders(t, "foreign"))
		})
	}
}

// The leased mode's second function is one like any other, and so is every function of a batch.
func TestTracer_ReportsInEveryKindOfFunction(t *testing.T) {
	t.Parallel()
	s, another, seen := newTracedShop(t, false, 8)
	inner := &shop{pool: s.pool, runner: newRunner(t, s.pool, seen.config)}
	outside := func(ctx context.Context) (int, error) {
		_, err := another.Exec(ctx, outsideInsert, "outside")
		return 0, err
	}
	_, err := txn.WithLease(t.Context(), s.runner, request(t, "leased", "body"), func(context.Context, *txn.Lease) (int, error) { return 1, nil },
		func(ctx context.Context, _ pgx.Tx, _ int) (int, error) { return outside(ctx) })
	require.NoError(t, err)
	require.Len(t, seen.take(), 2)

	_, err = txn.WithIdempotencyMany(t.Context(), s.runner, []idempotency.Request{request(t, "1", "body"), request(t, "2", "body")},
		func(ctx context.Context, _ pgx.Tx, _ int) (int, error) { return outside(ctx) })
	require.NoError(t, err)
	require.Len(t, seen.take(), 4)

	// A function inside a function: what it does is its own, and what the outer one does behind it is the outer one's.
	_, err = txn.WithIdempotency(t.Context(), s.runner, request(t, "outer", "body"), func(ctx context.Context, tx pgx.Tx) (int, error) {
		_, err := txn.WithIdempotencyTx(ctx, inner.runner, tx, request(t, "inner", "body"), func(ctx context.Context, _ pgx.Tx) (int, error) { return outside(ctx) })
		require.NoError(t, err)
		for _, e := range seen.take() {
			require.Equal(t, "inner", e.Key.Value())
		}
		return outside(ctx)
	})
	require.NoError(t, err)
	events := seen.take()
	require.Len(t, events, 2)
	require.Equal(t, "outer", events[0].Key.Value())
}

// counting is a user's tracer, of queries and acquisitions.
type counting struct{ queries, ends, acquired atomic.Int64 }

func (c *counting) TraceQueryStart(ctx context.Context, _ *pgx.Conn, _ pgx.TraceQueryStartData) context.Context {
	c.queries.Add(1)
	return ctx
}

func (c *counting) TraceQueryEnd(context.Context, *pgx.Conn, pgx.TraceQueryEndData) { c.ends.Add(1) }

func (c *counting) TraceAcquireStart(ctx context.Context, _ *pgxpool.Pool, _ pgxpool.TraceAcquireStartData) context.Context {
	c.acquired.Add(1)
	return ctx
}
func (c *counting) TraceAcquireEnd(context.Context, *pgxpool.Pool, pgxpool.TraceAcquireEndData) {}

func TestTracer_IsBesideTheUsersOwn(t *testing.T) {
	t.Parallel()
	users := &counting{}
	var seen sightings
	s := newShopWith(t, func(c *pgxpool.Config) {
		c.MaxConns = max(c.MaxConns, 4)
		c.ConnConfig.Tracer = users
		txn.NewTracer(&txn.TracerConfig{Refuse: true, Log: slog.New(slog.DiscardHandler)}).AddTo(c.ConnConfig)
	}, func(c *txn.Config) { c.OnEvent = seen.onEvent })
	_, err := txn.WithIdempotency(t.Context(), s.runner, request(t, "k", "body"), doing("k", func(ctx context.Context, _ pgx.Tx) error {
		before := users.acquired.Load()
		_, err := s.pool.Exec(ctx, outsideInsert, "outside")
		require.Equal(t, before+1, users.acquired.Load())
		return err
	}))
	require.ErrorIs(t, err, txn.ErrOutsideTransaction)
	require.Len(t, seen.take(), 1)
	require.Positive(t, users.queries.Load())
	require.Equal(t, users.queries.Load(), users.ends.Load())
}

// What a statement costs that is nobody's business: nothing is allocated.
func TestTracer_AllocatesNothingUnlessItReports(t *testing.T) {
	s, _, _ := newTracedShop(t, false, 4)
	tracer := txn.NewTracer(nil)
	conn, err := s.direct.Acquire(t.Context())
	require.NoError(t, err)
	defer conn.Release()
	require.Zero(t, testing.AllocsPerRun(100, func() {
		tracer.TraceAcquireStart(t.Context(), s.pool, pgxpool.TraceAcquireStartData{})
		tracer.TraceQueryStart(t.Context(), conn.Conn(), pgx.TraceQueryStartData{SQL: outsideInsert})
	}), "outside functions")
	_, err = txn.WithIdempotency(t.Context(), s.runner, request(t, "k", "body"), func(ctx context.Context, tx pgx.Tx) (int, error) {
		own := tx.Conn()
		require.Zero(t, testing.AllocsPerRun(100, func() {
			tracer.TraceQueryStart(ctx, own, pgx.TraceQueryStartData{SQL: outsideInsert})
		}), "in the function's transaction")
		return 0, nil
	})
	require.NoError(t, err)
}

func BenchmarkTracer(b *testing.B) {
	s, _, _ := newTracedShop(b, false, 4)
	tracer := txn.NewTracer(nil)
	loop := func(b *testing.B, ctx context.Context, conn *pgx.Conn) {
		b.Helper()
		b.ReportAllocs()
		for b.Loop() {
			tracer.TraceQueryStart(ctx, conn, pgx.TraceQueryStartData{SQL: outsideInsert})
		}
	}
	b.Run("outside functions", func(b *testing.B) { loop(b, b.Context(), nil) })
	_, err := txn.WithIdempotency(b.Context(), s.runner, request(b, "k", "body"), func(ctx context.Context, tx pgx.Tx) (int, error) {
		b.Run("in the transaction", func(b *testing.B) { loop(b, ctx, tx.Conn()) })
		return 0, nil
	})
	require.NoError(b, err)
}
