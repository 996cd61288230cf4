package txn_test

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/pgonce/pgonce/idempotency"
	"github.com/pgonce/pgonce/txn"
)

// capture's lease is so long that its owner does not renew it during a test, behind the back of die.
var capture = idempotency.Operation{Name: "payment.capture", Takeover: idempotency.TakeoverResume, Lease: time.Hour}

// downstream is somebody else: it does a thing once per key of its own, and remembers who asked.
type downstream struct {
	mu    sync.Mutex
	done  map[string]int
	calls atomic.Int64
}

func (d *downstream) charge(key string) string {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.calls.Add(1)
	if d.done == nil {
		d.done = map[string]int{}
	}
	if d.done[key] == 0 {
		d.done[key] = len(d.done) + 1
	}
	return fmt.Sprint("charge-", d.done[key])
}

func (d *downstream) charges() int {
	d.mu.Lock()
	defer d.mu.Unlock()
	return len(d.done)
}

func newLeaseShop(t testing.TB, op idempotency.Operation) *shop {
	t.Helper()
	s := newShop(t, func(c *txn.Config) { c.Operations = []idempotency.Operation{op, create} })
	t.Cleanup(s.runner.Close)
	return s
}

// another is a runner of another process, as far as the library can tell.
func (s *shop) another(t testing.TB, op idempotency.Operation) *shop {
	t.Helper()
	other := *s
	other.runner = newRunner(t, s.pool, func(c *txn.Config) { c.Operations = []idempotency.Operation{op, create} })
	t.Cleanup(other.runner.Close)
	return &other
}

func leaseRequest(t testing.TB, op idempotency.Operation, key string) idempotency.Request {
	t.Helper()
	k, err := op.Key(idempotency.SingleTenant, key)
	require.NoError(t, err)
	return idempotency.Request{Key: k, Fingerprint: idempotency.FingerprintBytes([]byte("10 EUR"))}
}

type payment struct {
	Charge string `json:"charge"`
}

type foreign func(context.Context, *txn.Lease) (string, error)

// pay charges downstream and writes an order.
func (s *shop) pay(ctx context.Context, req idempotency.Request, call foreign) (txn.Result[payment], error) {
	return txn.WithLease(ctx, s.runner, req, call, func(ctx context.Context, tx pgx.Tx, charge string) (payment, error) {
		_, err := tx.Exec(ctx, `INSERT INTO orders (key, note) VALUES ($1, $2)`, req.Key.Value(), charge)
		return payment{Charge: charge}, err
	})
}

func (d *downstream) foreign(_ context.Context, l *txn.Lease) (string, error) {
	return d.charge(l.DownstreamKey("charge")), nil
}

// die makes the record what a killed owner leaves behind.
func (s *shop) die(t testing.TB) {
	t.Helper()
	_, err := s.direct.Exec(t.Context(), `UPDATE idempotency.records SET lease_expires_at = statement_timestamp() - interval '1 s' WHERE state = 'PROCESSING'`)
	require.NoError(t, err)
}

func (s *shop) trace(t testing.TB) []string {
	t.Helper()
	rows, err := s.direct.Query(t.Context(), `SELECT event || ' ' || attempt FROM idempotency.attempts ORDER BY id`)
	require.NoError(t, err)
	events, err := pgx.CollectRows(rows, pgx.RowTo[string])
	require.NoError(t, err)
	return events
}

func TestLease_OnceAndReplayed(t *testing.T) {
	t.Parallel()
	s, d := newLeaseShop(t, capture), &downstream{}
	req := leaseRequest(t, capture, "k")
	first, err := s.pay(t.Context(), req, func(ctx context.Context, l *txn.Lease) (string, error) {
		r, found := s.record(t, req) //nolint:contextcheck // the test's own look
		require.True(t, found)
		require.Equal(t, idempotency.StateProcessing, r.State, "it is committed before anybody is called")
		require.Equal(t, r.Fence, l.Record().Fence)
		require.True(t, r.LeaseExpiresAt.After(r.AcquiredAt))
		return d.foreign(ctx, l)
	})
	require.NoError(t, err)
	require.False(t, first.Replayed)
	for _, shop := range []*shop{s, s.another(t, capture)} {
		again, err := shop.pay(t.Context(), req, d.foreign)
		require.NoError(t, err)
		require.True(t, again.Replayed)
		require.Equal(t, first.Value, again.Value)
		require.Equal(t, first.Record, again.Record, "what was returned is what is stored")
	}
	other := req
	other.Fingerprint = idempotency.FingerprintBytes([]byte("99 EUR"))
	_, err = s.pay(t.Context(), other, d.foreign)
	require.ErrorIs(t, err, idempotency.ErrMismatch)
	require.EqualValues(t, 1, d.calls.Load())
	require.Equal(t, 1, s.orders(t, "k"))
	require.Equal(t, []string{"ACQUIRED 1"}, s.trace(t))
}

// B01: the key's row was unique, but two requests saw it without a result and both called the provider.
func TestCase_B01_OneCallerCallsTheProvider(t *testing.T) {
	t.Parallel()
	s, d := newLeaseShop(t, capture), &downstream{}
	shops := []*shop{s, s.another(t, capture), s.another(t, capture)}
	req := leaseRequest(t, capture, "k")
	var all sync.WaitGroup
	var replayed atomic.Int64
	const callers = 30
	for i := range callers {
		all.Go(func() {
			res, err := shops[i%len(shops)].pay(t.Context(), req, func(ctx context.Context, l *txn.Lease) (string, error) {
				time.Sleep(100 * time.Millisecond)
				return d.foreign(ctx, l)
			})
			if err != nil || res.Value.Charge != "charge-1" {
				t.Error(res, err)
			}
			if res.Replayed {
				replayed.Add(1)
			}
		})
	}
	all.Wait()
	require.EqualValues(t, 1, d.calls.Load())
	require.EqualValues(t, callers-1, replayed.Load())
	require.Equal(t, 1, s.orders(t, "k"))
}

// The transactional mode and the leased one do not mix on a running key, and agree on a finished one.
func TestLease_BesideTheTransactionalMode(t *testing.T) {
	t.Parallel()
	s, d := newLeaseShop(t, capture), &downstream{}
	req := leaseRequest(t, capture, "k")
	_, err := s.pay(t.Context(), req, func(ctx context.Context, l *txn.Lease) (string, error) {
		_, err := s.another(t, capture).place(ctx, req)
		require.ErrorIs(t, err, idempotency.ErrWrongMode)
		return d.foreign(ctx, l)
	})
	require.NoError(t, err)
	res, err := txn.WithIdempotency(t.Context(), s.runner, req, func(context.Context, pgx.Tx) (payment, error) { return payment{}, nil })
	require.NoError(t, err)
	require.True(t, res.Replayed)
	require.Equal(t, "charge-1", res.Value.Charge)
}

func TestLease_ErrorsAreTriedAgain(t *testing.T) {
	t.Parallel()
	s, d := newLeaseShop(t, capture), &downstream{}
	req := leaseRequest(t, capture, "k")
	away := errors.New("the provider is away")
	_, err := s.pay(t.Context(), req, func(context.Context, *txn.Lease) (string, error) { return "", away })
	require.ErrorIs(t, err, away)
	r, _ := s.record(t, req)
	require.Equal(t, idempotency.StateFailed, r.State)
	require.True(t, r.Retryable)

	// commit's error too: the provider is asked again, with the same key.
	_, err = txn.WithLease(t.Context(), s.runner, req, d.foreign, func(ctx context.Context, tx pgx.Tx, _ string) (payment, error) {
		_, err := insertOrder(ctx, tx, "k")
		return payment{}, errors.Join(err, away)
	})
	require.ErrorIs(t, err, away)
	require.Equal(t, 0, s.orders(t, "k"))
	// A panic is an error that goes on.
	require.PanicsWithValue(t, "oh no", func() {
		_, _ = s.pay(t.Context(), req, func(context.Context, *txn.Lease) (string, error) { panic("oh no") })
	})
	res, err := s.pay(t.Context(), req, d.foreign)
	require.NoError(t, err)
	require.Equal(t, 4, res.Record.Attempt)
	require.Equal(t, 1, d.charges(), "both times the same downstream key")
	require.Equal(t, []string{"ACQUIRED 1", "FAILED 1", "ACQUIRED 2", "FAILED 2", "ACQUIRED 3", "FAILED 3", "ACQUIRED 4"}, s.trace(t))
}

func TestLease_FinalIsReplayed(t *testing.T) {
	t.Parallel()
	s, d := newLeaseShop(t, capture), &downstream{}
	refused := txn.Final("card_refused", errors.New("the card was refused"))
	for name, pay := range map[string]func(idempotency.Request) error{
		"foreign": func(req idempotency.Request) error {
			_, err := s.pay(t.Context(), req, func(context.Context, *txn.Lease) (string, error) { return "", refused })
			return err
		},
		"commit": func(req idempotency.Request) error {
			_, err := txn.WithLease(t.Context(), s.runner, req, d.foreign, func(ctx context.Context, tx pgx.Tx, _ string) (payment, error) {
				_, err := insertOrder(ctx, tx, req.Key.Value())
				require.NoError(t, err)
				return payment{Charge: "none"}, refused
			})
			return err
		},
	} {
		req := leaseRequest(t, capture, name)
		for range 2 {
			var failed *idempotency.FailedError
			require.ErrorAs(t, pay(req), &failed)
			require.Equal(t, "card_refused", failed.Code)
		}
		require.Equal(t, 0, s.orders(t, name))
	}
}

func TestLease_LostAnswerOfCommit(t *testing.T) {
	t.Parallel()
	for _, mode := range []string{"before", "after"} {
		t.Run(mode+" forwarding", func(t *testing.T) {
			t.Parallel()
			s, c := newCutShop(t, func(cfg *txn.Config) { cfg.Operations = []idempotency.Operation{capture, create} })
			t.Cleanup(s.runner.Close)
			d := &downstream{}
			for i := range 20 {
				req := leaseRequest(t, capture, fmt.Sprint("k", i))
				res, err := s.pay(t.Context(), req, func(ctx context.Context, l *txn.Lease) (string, error) {
					c.mode.Store(mode)
					return d.foreign(ctx, l)
				})
				require.NoError(t, err)
				require.False(t, res.Replayed)
				require.Equal(t, 1, s.orders(t, req.Key.Value()))
				r, _ := s.record(t, req)
				require.Equal(t, idempotency.StateSuccess, r.State)
			}
			require.EqualValues(t, 20, c.cuts.Load())
			require.EqualValues(t, 20, d.calls.Load())
		})
	}
}

// A caller that goes away stops the foreign function by its context; once that has succeeded the outcome is recorded.
func TestLease_CallerGoesAway(t *testing.T) {
	t.Parallel()
	s, d := newLeaseShop(t, capture), &downstream{}
	req := leaseRequest(t, capture, "stops")
	ctx, cancel := context.WithCancel(t.Context())
	_, err := s.pay(ctx, req, func(ctx context.Context, _ *txn.Lease) (string, error) {
		cancel()
		<-ctx.Done()
		return "", ctx.Err()
	})
	require.ErrorIs(t, err, context.Canceled)
	r, _ := s.record(t, req)
	require.True(t, r.Retryable, "nobody has to wait for the lease's end")

	req = leaseRequest(t, capture, "done")
	ctx, cancel = context.WithCancel(t.Context())
	res, err := s.pay(ctx, req, func(ctx context.Context, l *txn.Lease) (string, error) {
		cancel()
		return d.foreign(ctx, l)
	})
	require.NoError(t, err)
	require.Equal(t, "charge-1", res.Value.Charge)
	require.Equal(t, 1, s.orders(t, "done"))
}

func TestLease_MisuseHasAnAnswer(t *testing.T) {
	t.Parallel()
	s, d := newLeaseShop(t, capture), &downstream{}
	t.Run("commit ends its transaction", func(t *testing.T) {
		t.Parallel()
		req := leaseRequest(t, capture, "ended")
		_, err := txn.WithLease(t.Context(), s.runner, req, d.foreign, func(ctx context.Context, tx pgx.Tx, _ string) (payment, error) {
			_, err := tx.Exec(ctx, `COMMIT`)
			return payment{}, err
		})
		require.ErrorIs(t, err, idempotency.ErrTransactionEnded)
		r, _ := s.record(t, req)
		require.Equal(t, idempotency.StateFailed, r.State)
		require.False(t, r.Retryable)
	})
	t.Run("a step twice, at once and with a wrong name", func(t *testing.T) {
		t.Parallel()
		_, err := s.pay(t.Context(), leaseRequest(t, capture, "steps"), func(ctx context.Context, l *txn.Lease) (string, error) {
			nothing := func(context.Context, string) (string, error) { return "", nil }
			_, err := txn.Step(ctx, l, "", nothing)
			require.ErrorIs(t, err, idempotency.ErrConfig)
			keys := map[string]bool{}
			return txn.Step(ctx, l, "outer", func(ctx context.Context, key string) (string, error) {
				_, err := txn.Step(ctx, l, "outer", nothing)
				require.ErrorIs(t, err, idempotency.ErrConfig)
				keys[key] = true
				for i := range 3 { // items of one request
					_, err := txn.Step(ctx, l, fmt.Sprint("item-", i), func(_ context.Context, key string) (string, error) {
						keys[key] = true
						return key, nil
					})
					require.NoError(t, err)
				}
				require.Len(t, keys, 4)
				return "ok", nil
			})
		})
		require.NoError(t, err)
	})
	t.Run("a step that fails is run again", func(t *testing.T) {
		t.Parallel()
		_, err := s.pay(t.Context(), leaseRequest(t, capture, "again"), func(ctx context.Context, l *txn.Lease) (string, error) {
			_, err := txn.Step(ctx, l, "s", func(context.Context, string) (string, error) { return "", errors.New("no") })
			require.ErrorContains(t, err, "no")
			return txn.Step(ctx, l, "s", func(context.Context, string) (string, error) { return "yes", nil })
		})
		require.NoError(t, err)
	})
}

// Who waits for a connection may leave: nothing is recorded yet.
func TestLease_ImpatientCallerOfAFullPool(t *testing.T) {
	t.Parallel()
	s, d := newLeaseShop(t, capture), &downstream{}
	_, err := s.pay(t.Context(), leaseRequest(t, capture, "warm"), d.foreign) // the schema is checked
	require.NoError(t, err)
	var held []interface{ Release() }
	for range s.pool.Config().MaxConns {
		conn, err := s.pool.Acquire(t.Context())
		require.NoError(t, err)
		held = append(held, conn)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
	defer cancel()
	left := make(chan error, 1)
	req := leaseRequest(t, capture, "k")
	go func() {
		_, err := s.pay(ctx, req, d.foreign)
		left <- err
	}()
	select {
	case err := <-left:
		require.ErrorIs(t, err, context.DeadlineExceeded)
	case <-time.After(patience):
		t.Error("it waits on")
	}
	for _, conn := range held {
		conn.Release()
	}
	_, found := s.record(t, req)
	require.False(t, found)
}
