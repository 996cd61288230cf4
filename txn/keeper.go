package txn

import (
	"context"
	"errors"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/pgonce/pgonce/idempotency"
)

// lateRenewal is the time for a renewal behind the lease's end.
const lateRenewal = 250 * time.Millisecond

// keepLease renews the lease until stop is called, on a connection of its own, and ends the function's context when it is
// lost or may be.
func (c *call) keepLease(ctx context.Context, asked stopwatch, lose func(error)) (stop func()) {
	done, finished := context.WithCancel(context.WithoutCancel(ctx))
	var group sync.WaitGroup
	group.Go(func() {
		every := c.op.Lease / 3 // two tries before it ends
		pause := every
		for {
			timer := time.NewTimer(min(pause, max(0, c.op.Lease-asked.elapsed())))
			select {
			case <-done.Done():
				timer.Stop()
				return
			case <-timer.C:
			}
			began := startStopwatch()
			// No longer than it is sure to be ours: then the function must end. A process that was stopped finds itself behind
			// that, and may still be in time.
			timeout := min(every, c.op.Lease-asked.elapsed())
			if timeout <= 0 {
				timeout = lateRenewal
			}
			err := c.runner.keeper.renew(done, c.lease.record.Owner(), c.op.Lease, timeout)
			switch {
			case err == nil:
				asked, pause = began, every
			case done.Err() != nil:
				return
			case errors.Is(err, idempotency.ErrLeaseLost) || asked.elapsed() >= c.op.Lease:
				c.emit(ctx, idempotency.LeaseLost{Key: c.req.Key, Fence: c.lease.record.Fence, Err: err})
				lose(errors.Join(idempotency.ErrLeaseLost, err))
				return
			default:
				pause = every / 4
			}
		}
	})
	return func() {
		finished()
		group.Wait()
	}
}

// keeper renews leases on a connection of its own: one of the pool may be minutes away when every call waits for one.
type keeper struct {
	watch *epochWatch // knows how to connect
	store *idempotency.Store

	mu   sync.Mutex
	conn *pgx.Conn
}

func (k *keeper) renew(ctx context.Context, o idempotency.Owner, lease, timeout time.Duration) error {
	ctx, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	k.mu.Lock()
	defer k.mu.Unlock()
	if ctx.Err() != nil {
		return context.Cause(ctx) // another renewal took all the time
	}
	if k.conn == nil {
		conn, err := k.watch.connect(ctx)
		if err != nil {
			return err
		}
		k.conn = conn
	}
	_, err := k.store.Renew(ctx, k.conn, o, lease)
	if err != nil && !errors.Is(err, idempotency.ErrLeaseLost) {
		k.drop()
	}
	return err
}

// drop uses no caller's context: the connection is not to be waited for.
//
//nolint:contextcheck,nolintlint // contextcheck reads this here, and nolintlint does not see that
func (k *keeper) drop() {
	k.watch.drop(k.conn)
	k.conn = nil
}

func (k *keeper) close() {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.drop()
}
