package txn_test

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/stretchr/testify/require"

	"github.com/pgonce/pgonce/idempotency"
	"github.com/pgonce/pgonce/txn"
)

func TestCase_F08_KeyBelongsToItsOperationAndPayload(t *testing.T) {
	t.Parallel()
	refund := idempotency.Operation{Name: "refund.create"}
	s := newShop(t, func(c *txn.Config) { c.Operations = append(c.Operations, refund) })
	create := request(t, "k1", "body")
	refundKey, err := refund.Key(idempotency.SingleTenant, "k1")
	require.NoError(t, err)
	other := idempotency.Request{Key: refundKey, Fingerprint: create.Fingerprint}

	first, err := returning(t, s, create, "an order", nil)
	require.NoError(t, err)
	second, err := returning(t, s, other, "a refund", nil)
	require.NoError(t, err)
	require.False(t, second.Replayed)
	for _, c := range []struct {
		req  idempotency.Request
		want txn.Result[string]
	}{{create, first}, {other, second}} {
		again, err := returning(t, s, c.req, "neither", nil)
		require.NoError(t, err)
		require.True(t, again.Replayed)
		require.Equal(t, c.want.Value, again.Value)
		require.Equal(t, c.want.Record, again.Record)
	}

	for _, retry := range []bool{false, true} {
		wrong := request(t, "k1", "resource 2")
		wrong.Retry = retry
		res, err := returning(t, s, wrong, "never", nil)
		var mismatch *idempotency.MismatchError
		require.ErrorAs(t, err, &mismatch)
		require.Equal(t, create.Key, mismatch.Key)
		require.Equal(t, first.Record.CreatedAt, mismatch.CreatedAt)
		require.Zero(t, res)
	}
	require.Equal(t, 2, s.orders(t, "k1"))

	_, err = returning(t, s, idempotency.Request{Key: mustKey(t, "t", "undeclared", "k"), Fingerprint: create.Fingerprint}, "", nil)
	require.ErrorIs(t, err, idempotency.ErrConfig)
}

func mustKey(t testing.TB, tenant, operation, value string) idempotency.Key {
	t.Helper()
	key, err := idempotency.NewKey(tenant, operation, value)
	require.NoError(t, err)
	return key
}

func TestCase_H06_TenantsNeverSeeOrBlockEachOther(t *testing.T) {
	t.Parallel()
	s := newShop(t)
	ask := func(tenant, value, body string) idempotency.Request {
		return idempotency.Request{Key: mustKey(t, tenant, create.Name, value), Fingerprint: idempotency.FingerprintBytes([]byte(body))}
	}
	// Names that a careless separator would make one.
	for _, pair := range [][2]idempotency.Request{
		{ask("A", "1", "body"), ask("B", "1", "body")},
		{ask("a", "b:c", "body"), ask("a:b", "c", "other body")},
		{ask("t", "t/k", "body"), ask("t/t", "k", "body")},
	} {
		a, b := pair[0], pair[1]
		h := s.replica(t, impatient).hold(t, a)
		fromB, err := returning(t, s.replica(t, impatient), b, "for B", nil)
		require.NoError(t, err, "B is not blocked by A")
		require.False(t, fromB.Replayed)
		fromA := h.letGo()
		require.NoError(t, fromA.err)
		require.False(t, fromA.Replayed)
		require.NotEqual(t, fromA.Record.AttemptToken, fromB.Record.AttemptToken)

		again, err := returning(t, s, b, "never", nil)
		require.NoError(t, err)
		require.True(t, again.Replayed)
		require.Equal(t, "for B", again.Value)
		stillA, err := s.place(t.Context(), a)
		require.NoError(t, err)
		require.True(t, stillA.Replayed)
		require.Equal(t, fromA.Value, stillA.Value)
	}
}

func TestCase_S12_EveryOddExitRollsBackAndFreesTheKey(t *testing.T) {
	t.Parallel()
	boom, gone := errors.New("boom"), errors.New("the client hung up")
	for _, c := range []struct {
		name string
		exit func(ctx context.Context, tx pgx.Tx, cancel context.CancelCauseFunc) error
		// What the caller sees.
		panics any
		err    error
		goexit bool
	}{
		{name: "panic(nil)", panics: new(runtime.PanicNilError), exit: func(context.Context, pgx.Tx, context.CancelCauseFunc) error {
			panic(nil)
		}},
		{name: "panic(error)", panics: boom, exit: func(context.Context, pgx.Tx, context.CancelCauseFunc) error { panic(boom) }},
		{name: "panic in a savepoint", panics: boom, exit: func(ctx context.Context, tx pgx.Tx, _ context.CancelCauseFunc) error {
			return pgx.BeginFunc(ctx, tx, func(pgx.Tx) error { panic(boom) })
		}},
		{name: "panic with open rows", panics: boom, exit: func(ctx context.Context, tx pgx.Tx, _ context.CancelCauseFunc) error {
			_ = leaveOpen(ctx, tx)
			panic(boom)
		}},
		{name: "panic in an aborted transaction", panics: boom, exit: func(ctx context.Context, tx pgx.Tx, _ context.CancelCauseFunc) error {
			_, _ = tx.Exec(ctx, `SELECT 1/0`)
			panic(boom)
		}},
		{name: "Goexit", goexit: true, exit: func(context.Context, pgx.Tx, context.CancelCauseFunc) error {
			runtime.Goexit()
			return nil
		}},
		{name: "cancelled before a statement", err: context.Canceled, exit: func(ctx context.Context, tx pgx.Tx, cancel context.CancelCauseFunc) error {
			cancel(gone)
			_, err := tx.Exec(ctx, `SELECT 1`)
			return err
		}},
		{name: "cancelled in a statement", err: gone, exit: func(ctx context.Context, tx pgx.Tx, cancel context.CancelCauseFunc) error {
			sleeping := backend(ctx, t, tx)
			go func() {
				for !sleeps(ctx, sleeping) {
					runtime.Gosched()
				}
				cancel(gone)
			}()
			_, err := tx.Exec(ctx, `SELECT pg_sleep(60)`)
			return err
		}},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			s := newShop(t)
			req := request(t, "k1", "body")
			ctx, cancel := context.WithCancelCause(context.WithValue(t.Context(), poolKey{}, s))
			defer cancel(nil)
			var panicked any
			var err error
			returned, ended := false, make(chan struct{})
			go func() { // Goexit ends a goroutine
				defer close(ended)
				defer func() { panicked = recover() }()
				_, err = txn.WithIdempotency(ctx, s.runner, req, func(ctx context.Context, tx pgx.Tx) (order, error) {
					o, err := insertOrder(ctx, tx, "k1")
					return o, errors.Join(err, c.exit(ctx, tx, cancel))
				})
				returned = true
			}()
			<-ended
			require.Equal(t, c.panics, panicked)
			require.Equal(t, c.panics == nil && !c.goexit, returned)
			if c.err != nil {
				require.ErrorIs(t, err, c.err)
				require.ErrorIs(t, err, context.Canceled)
			}
			res, err := s.place(t.Context(), req)
			require.NoError(t, err)
			require.False(t, res.Replayed)
			require.Equal(t, 1, s.orders(t, "k1"))
			s.requireIdle(t)
		})
	}
}

type poolKey struct{}

// sleeps reports whether the backend is inside pg_sleep.
func sleeps(ctx context.Context, pid uint32) (yes bool) {
	s, _ := ctx.Value(poolKey{}).(*shop)
	err := s.direct.QueryRow(context.WithoutCancel(ctx),
		`SELECT wait_event = 'PgSleep' FROM pg_stat_activity WHERE pid = $1`, pid).Scan(&yes)
	return err == nil && yes
}

// A retry must find the key free at once, not after somebody's patience: the runner here has none.
func TestCase_S12_RetryAfterAPanicNeedsNoWait(t *testing.T) {
	t.Parallel()
	s := newShop(t, impatient)
	for i := range 20 {
		req := request(t, fmt.Sprintf("k%d", i), "body")
		require.PanicsWithValue(t, "boom", func() {
			_, _ = txn.WithIdempotency(t.Context(), s.runner, req, func(ctx context.Context, tx pgx.Tx) (order, error) {
				_, _ = insertOrder(ctx, tx, req.Key.Value())
				panic("boom")
			})
		})
		require.Zero(t, s.pool.Stat().AcquiredConns())
		_, err := s.place(t.Context(), req)
		require.NoError(t, err)
		require.Equal(t, 1, s.orders(t, req.Key.Value()))
	}
}

func TestCase_B03_NewKeyForTheSameBusinessMeetsTheBusinessKey(t *testing.T) {
	t.Parallel()
	s := newShop(t)
	s.exec(t, `CREATE UNIQUE INDEX one_order_per_cart ON orders (note)`)
	checkout := func(s *shop, req idempotency.Request) error {
		_, err := txn.WithIdempotency(t.Context(), s.runner, req, func(ctx context.Context, tx pgx.Tx) (order, error) {
			o := order{Key: req.Key.Value()}
			return o, tx.QueryRow(ctx, `INSERT INTO orders (key, note) VALUES ($1, 'cart 1') RETURNING id`, o.Key).Scan(&o.ID)
		})
		return err
	}
	errs, gate := make(chan error, 2), make(chan struct{})
	for i := range 2 {
		r, req := s.replica(t), request(t, fmt.Sprintf("k%d", i), "body")
		go func() {
			<-gate
			errs <- checkout(r, req)
		}()
	}
	close(gate)
	lost := errors.Join(<-errs, <-errs)
	var violation *pgconn.PgError
	require.ErrorAs(t, lost, &violation)
	require.Equal(t, "23505", violation.Code)
	require.Equal(t, "one_order_per_cart", violation.ConstraintName)
	require.NotErrorIs(t, lost, idempotency.ErrInProgress)
	require.NotErrorIs(t, lost, idempotency.ErrFailed)
	var orders, records int
	require.NoError(t, s.direct.QueryRow(t.Context(), `SELECT (SELECT count(*) FROM orders),
		(SELECT count(*) FROM idempotency.records r JOIN orders o USING (key) WHERE r.state = 'SUCCESS')`).Scan(&orders, &records))
	require.Equal(t, 1, orders)
	require.Equal(t, 1, records)
	require.NoError(t, s.direct.QueryRow(t.Context(), `SELECT count(*) FROM idempotency.records`).Scan(&records))
	require.Equal(t, 1, records, "the loser's record is rolled back")
}

func TestCase_S15_RetentionEndsOneGenerationAndBeginsAnother(t *testing.T) {
	t.Parallel()
	s := newShop(t)
	req := request(t, "k1", "body")
	first, err := s.place(t.Context(), req)
	require.NoError(t, err)
	again, err := s.place(t.Context(), req)
	require.NoError(t, err)
	require.True(t, again.Replayed, "completed: within the retention no second run")

	last := first.Record
	for range 3 {
		s.expire(t, req, "0")
		req = request(t, "k1", "another body each time "+last.AcquiredAt.String()) // expired is absent, before any mismatch
		next, err := s.place(t.Context(), req)
		require.NoError(t, err)
		require.False(t, next.Replayed)
		require.Greater(t, next.Record.Fence, last.Fence)
		require.Equal(t, next.Record.Fence, next.Record.Generation)
		require.Equal(t, 1, next.Record.Attempt)
		require.True(t, next.Record.CreatedAt.After(last.CreatedAt))
		stored, found := s.record(t, req)
		require.True(t, found)
		require.Equal(t, next.Record, stored)
		last = next.Record
	}
	require.Equal(t, 4, s.orders(t, "k1"))

	// A failover may set the sequence back behind what was handed out.
	s.exec(t, `SELECT setval('idempotency.fence', 1)`)
	s.exec(t, `UPDATE idempotency.records SET fence = 1000, generation = 1000`)
	s.expire(t, req, "0")
	next, err := s.place(t.Context(), req)
	require.NoError(t, err)
	require.EqualValues(t, 1001, next.Record.Fence)

	failed := request(t, "k2", "body")
	for range 2 {
		_, err = returning(t, s, failed, "", txn.Final("no", errors.New("no")))
		require.ErrorIs(t, err, idempotency.ErrFailed)
	}
	s.expire(t, failed, "0")
	_, err = s.place(t.Context(), failed)
	require.NoError(t, err, "a failure is forgotten too")
	require.Equal(t, 1, s.orders(t, "k2"))
}
