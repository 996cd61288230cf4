package txn_test

import (
	"context"
	"errors"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/pgonce/pgonce/idempotency"
	"github.com/pgonce/pgonce/txn"
)

// S01: a dead worker's key stayed in progress, and every retry failed until the record expired.
func TestCase_S01_ADeadOwnersKeyIsTakenOver(t *testing.T) {
	t.Parallel()
	s, d := newLeaseShop(t, capture), &downstream{}
	req := leaseRequest(t, capture, "k")
	stopped, resume := make(chan *txn.Lease), make(chan struct{})
	firstErr := make(chan error, 1)
	var stepRuns atomic.Int64
	reserve := func(context.Context, string) (int, error) { return int(stepRuns.Add(1)), nil }
	go func() {
		_, err := s.pay(context.Background(), req, func(ctx context.Context, l *txn.Lease) (string, error) {
			_, err := txn.Step(ctx, l, "reserve", reserve)
			require.NoError(t, err)
			charge, err := d.foreign(ctx, l)
			stopped <- l
			<-resume // as a process that is stopped
			return charge, err
		})
		firstErr <- err
	}()
	old := <-stopped
	second := s.another(t, capture)
	noWait := capture
	noWait.Wait = idempotency.NoWait
	_, err := s.another(t, noWait).pay(t.Context(), req, d.foreign)
	require.ErrorIs(t, err, idempotency.ErrInProgress, "S02: a live owner is left alone")
	// A caller that gives up in a pause is told so; in the middle of a question it knows nothing yet.
	require.Eventually(t, func() bool {
		ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
		defer cancel()
		_, err := second.pay(ctx, req, d.foreign)
		return errors.Is(err, idempotency.ErrInProgress) && errors.Is(err, context.DeadlineExceeded)
	}, patience, time.Millisecond)
	s.die(t)
	res, err := second.pay(t.Context(), req, func(ctx context.Context, l *txn.Lease) (string, error) {
		require.Equal(t, 2, l.Record().Attempt)
		require.Greater(t, l.Record().Fence, old.Record().Fence)
		n, err := txn.Step(ctx, l, "reserve", reserve)
		require.NoError(t, err)
		require.Equal(t, 1, n, "the finished step is replayed")
		return d.foreign(ctx, l)
	})
	require.NoError(t, err)
	require.Equal(t, "charge-1", res.Value.Charge)
	close(resume)
	require.ErrorIs(t, <-firstErr, idempotency.ErrLeaseLost, "who comes back later has nothing to say")
	_, err = txn.Step(t.Context(), old, "late", reserve)
	require.ErrorIs(t, err, idempotency.ErrLeaseLost)
	require.Equal(t, 1, d.charges())
	require.Equal(t, 1, s.orders(t, "k"))
	require.EqualValues(t, 1, stepRuns.Load())
	require.Equal(t, []string{"ACQUIRED 1", "LEASE_LOST 1", "TAKEOVER 2"}, s.trace(t))
}

// A lost lease ends the function's context, with its cause.
func TestLease_LossEndsTheContext(t *testing.T) {
	t.Parallel()
	short := capture
	short.Lease = 3 * time.Second
	var lost atomic.Int64
	s := newShop(t, func(c *txn.Config) {
		c.Operations = []idempotency.Operation{short}
		c.OnEvent = func(_ context.Context, e idempotency.Event) {
			if _, is := e.(idempotency.LeaseLost); is {
				lost.Add(1)
			}
		}
	})
	t.Cleanup(s.runner.Close)
	req := leaseRequest(t, short, "k")
	_, err := s.pay(t.Context(), req, func(ctx context.Context, l *txn.Lease) (string, error) {
		var r idempotency.Record
		// Until it was renewed behind the end that it had at first.
		require.Eventually(t, func() bool { //nolint:contextcheck // the test's own look
			r, _ = s.record(t, req)
			return r.LeaseExpiresAt.After(l.Record().LeaseExpiresAt.Add(short.Lease))
		}, patience, 20*time.Millisecond)
		require.False(t, r.TimedOut, "it is renewed")
		_, err := s.direct.Exec(ctx, `UPDATE idempotency.records SET fence = nextval('idempotency.fence') WHERE state = 'PROCESSING'`)
		require.NoError(t, err)
		<-ctx.Done()
		require.ErrorIs(t, context.Cause(ctx), idempotency.ErrLeaseLost)
		return "", ctx.Err()
	})
	require.ErrorIs(t, err, idempotency.ErrLeaseLost)
	require.EqualValues(t, 1, lost.Load())
}

func TestLease_ManualIsForPeople(t *testing.T) {
	t.Parallel()
	manual := capture
	manual.Takeover = idempotency.TakeoverManual
	s, d := newLeaseShop(t, manual), &downstream{}
	req := leaseRequest(t, manual, "k")
	s.abandon(t, req, manual)
	_, err := s.pay(t.Context(), req, d.foreign)
	require.ErrorIs(t, err, idempotency.ErrManual)
	r, _ := s.record(t, req)
	require.Equal(t, idempotency.StateProcessing, r.State)
	require.EqualValues(t, 0, d.calls.Load())
}

// abandon leaves what an owner leaves that was killed.
func (s *shop) abandon(t testing.TB, req idempotency.Request, op idempotency.Operation) {
	t.Helper()
	op = op.WithDefaults()
	a, err := idempotency.NewStore(pgx.QueryExecModeCacheStatement).AcquireLease(t.Context(), s.direct, &idempotency.LeaseRequest{
		Request: req, AttemptToken: idempotency.NewAttemptToken(), Lease: op.Lease, Takeover: op.Takeover,
	})
	require.NoError(t, err)
	require.Equal(t, idempotency.VerdictRun, a.Verdict)
	s.die(t)
}

// resolver knows what the provider did.
type resolver struct {
	found idempotency.Resolution
	err   error
	asked atomic.Int64
}

func (r *resolver) Ask(context.Context, idempotency.Record, []idempotency.Step) (idempotency.Resolution, error) {
	r.asked.Add(1)
	return r.found, r.err
}

func (r *resolver) Commit(ctx context.Context, tx pgx.Tx, record idempotency.Record, found idempotency.Resolution) error {
	_, err := tx.Exec(ctx, `INSERT INTO orders (key, note) VALUES ($1, $2)`, record.Key.Value(), string(found.Result))
	return err
}

func TestLease_Resolver(t *testing.T) {
	t.Parallel()
	for name, test := range map[string]struct {
		found  idempotency.Resolution
		err    error
		check  func(*testing.T, txn.Result[payment], error)
		state  idempotency.State
		orders int
	}{
		"succeeded": {
			found: idempotency.Resolution{Outcome: idempotency.OutcomeSucceeded, ResultType: "json/1", Result: []byte(`{"charge":"ch_7"}`)},
			check: func(t *testing.T, res txn.Result[payment], err error) {
				t.Helper()
				require.NoError(t, err)
				require.Equal(t, "ch_7", res.Value.Charge)
			},
			state: idempotency.StateSuccess, orders: 1,
		},
		"failed": {
			found: idempotency.Resolution{Outcome: idempotency.OutcomeFailed, Code: "refused", Message: "no money"},
			check: func(t *testing.T, _ txn.Result[payment], err error) {
				t.Helper()
				var failed *idempotency.FailedError
				require.ErrorAs(t, err, &failed)
				require.Equal(t, "refused", failed.Code)
			},
			state: idempotency.StateFailed, orders: 1,
		},
		"unknown": {
			check: func(t *testing.T, _ txn.Result[payment], err error) {
				t.Helper()
				require.ErrorIs(t, err, idempotency.ErrInProgress)
				require.ErrorIs(t, err, idempotency.ErrManual)
			},
			state: idempotency.StateProcessing,
		},
		"cannot be asked": {
			err: errors.New("the provider is away"),
			check: func(t *testing.T, _ txn.Result[payment], err error) {
				t.Helper()
				require.ErrorContains(t, err, "the provider is away")
			},
			state: idempotency.StateProcessing,
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			known := &resolver{found: test.found, err: test.err}
			op := idempotency.Operation{Name: "payment.capture", Resolver: known}
			s, d := newLeaseShop(t, op), &downstream{}
			req := leaseRequest(t, op, "k")
			s.abandon(t, req, op)
			res, err := s.pay(t.Context(), req, d.foreign)
			test.check(t, res, err)
			r, _ := s.record(t, req)
			require.Equal(t, test.state, r.State)
			require.Equal(t, test.orders, s.orders(t, "k"))
			require.EqualValues(t, 0, d.calls.Load())
			if r.State != idempotency.StateProcessing {
				again, err := s.another(t, op).pay(t.Context(), req, d.foreign)
				test.check(t, again, err)
			}
			require.EqualValues(t, 1, known.asked.Load())
		})
	}
}
