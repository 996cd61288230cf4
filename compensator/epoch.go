package compensator

import (
	"context"
	"time"
)

// readEpoch notes whether the database is in another history than at the pass before, a failover or a restore, and returns
// PostgreSQL's time.
func (c *Compensator) readEpoch(ctx context.Context, report *Report) (now time.Time, err error) {
	err = c.call(ctx, func(ctx context.Context) (err error) {
		report.Epoch, now, err = c.store.Epoch(ctx, c.pool)
		return err
	})
	if err == nil {
		report.EpochChanged = c.epoch != "" && c.epoch != report.Epoch
		c.epoch = report.Epoch
	}
	return now, err
}
