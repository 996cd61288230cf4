package compensator

import (
	"context"
	"errors"
	"time"

	"github.com/pgonce/pgonce/idempotency"
)

// maxDeadlocks bounds what one pass puts up with: PostgreSQL ends one of two, so that each of them means progress.
const maxDeadlocks = 20

// purge drops results first, since most of the bytes are theirs, then records, and what was executed without one.
func (c *Compensator) purge(ctx context.Context, report *Report) error {
	if c.config.DryRun {
		return c.call(ctx, func(ctx context.Context) (err error) {
			report.ResultsDropped, report.Purged, err = c.store.CountMaintenance(ctx, c.pool)
			if err == nil {
				report.BypassesPurged, err = c.store.CountOldBypasses(ctx, c.pool, c.config.BypassRetention)
			}
			return err
		})
	}
	purge := c.purgeHere()
	err := c.call(ctx, func(ctx context.Context) error {
		sharded, err := c.store.Sharded(ctx, c.pool)
		if sharded {
			purge = func(ctx context.Context, n int) (int64, bool, error) { return c.store.PurgeSharded(ctx, c.pool, n) }
		}
		return err
	})
	if err != nil {
		return err
	}
	return errors.Join(
		c.repeat(ctx, &c.results, &report.ResultsDropped, func(ctx context.Context, n int) (int64, bool, error) {
			return c.store.DropResults(ctx, c.pool, n)
		}),
		c.repeat(ctx, &c.records, &report.Purged, purge),
		c.repeat(ctx, &c.bypasses, &report.BypassesPurged, func(ctx context.Context, n int) (int64, bool, error) {
			return c.store.PurgeBypasses(ctx, c.pool, c.config.BypassRetention, n)
		}),
	)
}

// maxStalls is how many batches in a row may take too long before it is somebody's lock and not the disk.
const maxStalls = 5

// purgeHere deletes batch after batch; where there are no more, or somebody holds up all of it, what nobody has locked: a caller's
// long transaction, or another replica.
func (c *Compensator) purgeHere() func(context.Context, int) (int64, bool, error) {
	free, stalls := false, 0
	return func(ctx context.Context, n int) (gone int64, more bool, err error) {
		if free {
			return c.store.PurgeFree(ctx, c.pool, n)
		}
		gone, full, err := c.store.Purge(ctx, c.pool, n)
		switch {
		case err == nil:
			free, stalls = !full, 0
		case errors.Is(err, context.DeadlineExceeded):
			if stalls++; stalls == maxStalls || n == 1 {
				free, err = true, nil
			}
		}
		return gone, true, err
	}
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
			took := time.Since(began)
			b.took(took, c.config.Timeout)
			if more {
				rest(ctx, took)
			}
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

// rest leaves the database to others for twice as long as it has worked for us: whoever takes orders must not notice. Most of
// what they would notice is the log, which a purge fills faster than a disk takes it.
func rest(ctx context.Context, took time.Duration) {
	timer := time.NewTimer(2 * took)
	defer timer.Stop()
	select {
	case <-timer.C:
	case <-ctx.Done():
	}
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
