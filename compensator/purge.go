package compensator

import (
	"context"
	"errors"
	"time"

	"github.com/pgonce/pgonce/idempotency"
)

// maxDeadlocks bounds what one pass puts up with: PostgreSQL ends one of two, so that each of them means progress.
const maxDeadlocks = 20

// purge drops results first, since most of the bytes are theirs, and then records.
func (c *Compensator) purge(ctx context.Context, report *Report) error {
	if c.config.DryRun {
		return c.call(ctx, func(ctx context.Context) (err error) {
			report.ResultsDropped, report.Purged, err = c.store.CountMaintenance(ctx, c.pool)
			return err
		})
	}
	return errors.Join(
		c.repeat(ctx, &c.results, &report.ResultsDropped, func(ctx context.Context, n int) (int64, bool, error) {
			return c.store.DropResults(ctx, c.pool, n)
		}),
		c.repeat(ctx, &c.records, &report.Purged, func(ctx context.Context, n int) (int64, bool, error) {
			return c.store.Purge(ctx, c.pool, n)
		}),
	)
}

// repeat changes batch after batch until nothing is left.
func (c *Compensator) repeat(ctx context.Context, b *batch, total *int64, do func(context.Context, int) (int64, bool, error)) error {
	deadlocks := 0
	for more := true; more; {
		began := time.Now()
		err := c.call(ctx, func(ctx context.Context) (err error) {
			var n int64
			n, more, err = do(ctx, b.size)
			*total += n
			return err
		})
		switch {
		case err == nil:
			b.took(time.Since(began), c.config.Timeout)
		case errors.Is(err, context.DeadlineExceeded) && b.shrink():
			more = true // a smaller one may get through
		case idempotency.Restartable(err) && deadlocks < maxDeadlocks:
			deadlocks++
			more = true // another replica deletes the same rows in another order
		default:
			return err
		}
	}
	return nil
}

// batch is a size that a loaded database can take.
type batch struct{ size, most int }

func newBatch(most int) batch { return batch{size: most, most: most} }

// shrink returns false if it cannot.
func (b *batch) shrink() bool {
	if b.size == 1 {
		return false
	}
	b.size = max(1, b.size/2)
	return true
}

func (b *batch) took(d, limit time.Duration) {
	if d < limit/4 {
		b.size = min(b.most, b.size+max(1, b.size/2))
	}
}
