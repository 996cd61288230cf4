package txn_test

import (
	"context"
	"errors"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/pgonce/pgonce/idempotency"
	"github.com/pgonce/pgonce/txn"
)

// What was asked of somebody else cannot be rolled back, so a policy never has it asked twice.
func TestPolicy_LeasedCallsAreAlwaysEnforced(t *testing.T) {
	t.Parallel()
	for _, enforcement := range []string{"off", "shadow"} {
		t.Run(enforcement, func(t *testing.T) {
			t.Parallel()
			s, d := newLeaseShop(t, capture), &downstream{}
			p := (&policyShop{shop: s}).withRunner(t, func(c *txn.Config) { c.Operations = []idempotency.Operation{capture} })
			t.Cleanup(p.runner.Close)
			p.policy(t, "all", "", enforcement)
			req := leaseRequest(t, capture, "k")
			first, err := s.pay(t.Context(), req, d.foreign)
			require.NoError(t, err)
			again, err := s.pay(t.Context(), req, d.foreign)
			require.NoError(t, err)
			require.True(t, again.Replayed)
			require.Equal(t, first.Value, again.Value)
			require.EqualValues(t, 1, d.calls.Load())
			require.Empty(t, p.bypasses(t, "k"))
			ignored := eventsOf[idempotency.PolicyIgnored](&p.events)
			require.Len(t, ignored, 2)
			require.Equal(t, idempotency.Enforcement(enforcement), ignored[0].Enforcement)

			// Nor does a call in the other mode run beside a lease.
			inside, leave, done := make(chan struct{}), make(chan struct{}), make(chan error, 1)
			go func() {
				_, err := s.pay(t.Context(), leaseRequest(t, capture, "running"), func(ctx context.Context, l *txn.Lease) (string, error) {
					close(inside)
					<-leave
					return d.foreign(ctx, l)
				})
				done <- err
			}()
			<-inside
			_, err = txn.WithIdempotency(t.Context(), p.runner, leaseRequest(t, capture, "running"), func(context.Context, pgx.Tx) (payment, error) {
				return payment{}, errors.New("entered")
			})
			require.ErrorIs(t, err, idempotency.ErrWrongMode)
			close(leave)
			require.NoError(t, <-done)
			require.EqualValues(t, 2, d.calls.Load())
		})
	}
}
