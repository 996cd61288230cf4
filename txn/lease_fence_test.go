package txn_test

import (
	"context"
	"testing"

	"github.com/jackc/pgx/v5/pgconn"
	"github.com/stretchr/testify/require"

	"github.com/pgonce/pgonce/idempotency"
	"github.com/pgonce/pgonce/txn"
)

// An owner that was stopped, and comes back, would write over what its successor had written.
func TestLease_FenceGuardsWritesOutsideTheTransaction(t *testing.T) {
	t.Parallel()
	s := newLeaseShop(t, capture)
	_, err := s.direct.Exec(t.Context(), `
		CREATE TABLE shipments (key text PRIMARY KEY, status text NOT NULL, fence bigint NOT NULL);
CREATE TRIGGER shipments_fence BEFORE UPDATE ON shipments
    FOR EACH ROW EXECUTE FUNCTION idempotency.fence_guard('fence');
		INSERT INTO shipments VALUES ('k', 'ordered', 0)`)
	require.NoError(t, err)
	pool, key := s.pool, "k"
	write := func(ctx context.Context, l *txn.Lease, status string) error {
		_, err := pool.Exec(ctx, `UPDATE shipments SET status = $1, fence = $2 WHERE key = $3`, status, l.Fence(), key)
		return err
	}
	req := leaseRequest(t, capture, "k")
	stopped, resume, ended := make(chan struct{}), make(chan struct{}), make(chan error, 1)
	go func() {
		_, err := s.pay(context.Background(), req, func(ctx context.Context, l *txn.Lease) (string, error) {
			require.NoError(t, write(ctx, l, "packed by the first"))
			close(stopped)
			<-resume                         // as a process that is stopped,
			ctx = context.WithoutCancel(ctx) // which does not see that its context has ended
			return "", write(ctx, l, "sent by the first")
		})
		ended <- err
	}()
	<-stopped
	s.die(t)
	_, err = s.another(t, capture).pay(t.Context(), req, func(ctx context.Context, l *txn.Lease) (string, error) {
		return "sent", write(ctx, l, "sent by the second")
	})
	require.NoError(t, err)
	close(resume)
	err = <-ended
	require.ErrorIs(t, err, idempotency.ErrLeaseLost)
	var server *pgconn.PgError
	require.ErrorAs(t, err, &server)
	require.Equal(t, "ZP004", server.Code)
	var status string
	require.NoError(t, s.direct.QueryRow(t.Context(), `SELECT status FROM shipments`).Scan(&status))
	require.Equal(t, "sent by the second", status)
}
