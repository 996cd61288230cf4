package compensator

import "context"

// readEpoch notes whether the database is in another history than at the pass before: a failover or a restore.
func (c *Compensator) readEpoch(ctx context.Context, report *Report) error {
	return c.call(ctx, func(ctx context.Context) error {
		epoch, _, err := c.store.Epoch(ctx, c.pool)
		if err != nil {
			return err
		}
		report.Epoch, report.EpochChanged = epoch, c.epoch != "" && c.epoch != epoch
		c.epoch = epoch
		return nil
	})
}
