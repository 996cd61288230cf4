package localfront

import (
	"math"
	"time"

	"github.com/maypok86/otter/v2"

	"github.com/pgonce/pgonce/idempotency"
)

// otterCache is otter. It bounds one number only: what an entry weighs is its bytes, or as many as would be its share if
// there were as many entries as may be.
type otterCache struct {
	items *otter.Cache[idempotency.Key, living]
}

// living is an entry and how long it has from the time it came.
type living struct {
	*entry
	life time.Duration
}

func newOtterCache(config Config) (cache, error) {
	records := int64(config.MaxRecords)
	share := (config.MaxBytes + records - 1) / records
	items, err := otter.New(&otter.Options[idempotency.Key, living]{
		MaximumWeight: uint64(config.MaxBytes), //nolint:gosec // validated
		Weigher: func(_ idempotency.Key, l living) uint32 {
			return uint32(min(max(l.size, share), math.MaxUint32)) //nolint:gosec // as it says
		},
		ExpiryCalculator: otter.ExpiryWritingFunc(func(e otter.Entry[idempotency.Key, living]) time.Duration { return e.Value.life }),
	})
	if err != nil {
		return nil, err
	}
	return &otterCache{items: items}, nil
}

func (c *otterCache) get(key idempotency.Key) *entry {
	l, _ := c.items.GetIfPresent(key)
	return l.entry
}

func (c *otterCache) put(e *entry, life time.Duration) {
	c.items.Compute(e.Record.Key, func(old living, found bool) (living, otter.ComputeOp) {
		if found && !e.newer(old.entry) {
			return old, otter.CancelOp
		}
		return living{entry: e, life: life}, otter.WriteOp
	})
}

func (c *otterCache) remove(key idempotency.Key) { c.items.Invalidate(key) }

func (c *otterCache) stats() Stats {
	c.items.CleanUp()
	s := Stats{Records: c.items.EstimatedSize()}
	for l := range c.items.Values() {
		s.Bytes += l.size
	}
	return s
}

func (c *otterCache) close() { c.items.StopAllGoroutines() }
