package localfront

import (
	"context"
	"fmt"
	"time"

	"github.com/pgonce/pgonce/idempotency"
)

// Name is the front's, in events and metrics.
const Name = "local"

// Defaults of a Config.
const (
	DefaultMaxRecords = 10_000
	DefaultMaxBytes   = 64 << 20
	DefaultMaxAge     = 300 * time.Second
)

// Config configures a Front. A zero field means its default.
type Config struct {
	// MaxRecords bounds the number of entries; the oldest goes first.
	// Default: 10,000.
	MaxRecords int
	// MaxBytes bounds what the entries take, with about what Go adds to each of them. A record with more than an eighth of
	// it is not kept.
	// Default: 64 MiB.
	MaxBytes int64
	// MaxAge is how long an entry is believed, whatever its record's life is.
	// Default: 300 s.
	MaxAge time.Duration
}

func (c *Config) withDefaults() Config {
	var d Config
	if c != nil {
		d = *c
	}
	if d.MaxRecords == 0 {
		d.MaxRecords = DefaultMaxRecords
	}
	if d.MaxBytes == 0 {
		d.MaxBytes = DefaultMaxBytes
	}
	if d.MaxAge == 0 {
		d.MaxAge = DefaultMaxAge
	}
	return d
}

func (c *Config) validate() error {
	invalid := func(field, rule string) error {
		return &idempotency.ConfigError{Field: "localfront.Config." + field, Rule: rule}
	}
	switch {
	case c.MaxRecords < 1:
		return invalid("MaxRecords", fmt.Sprintf("must be positive, is %d", c.MaxRecords))
	case c.MaxBytes < 64<<10 || c.MaxBytes > 16<<30:
		return invalid("MaxBytes", fmt.Sprintf("must be from 64 KiB to 16 GiB, is %d", c.MaxBytes))
	case c.MaxAge < time.Second || c.MaxAge > time.Hour:
		return invalid("MaxAge", fmt.Sprintf("must be from 1s to 1h, is %v", c.MaxAge))
	}
	return nil
}

// Front is a bounded cache of final outcomes.
type Front struct {
	config  Config
	entries cache
}

var _ idempotency.Front = (*Front)(nil)

// cache is what go-cache and otter are used for. What it holds is never changed.
type cache interface {
	get(key idempotency.Key) *entry
	put(e *entry, life time.Duration)
	remove(key idempotency.Key)
	stats() Stats
	close()
}

// entry is a copy of a published one.
type entry struct {
	idempotency.Entry
	size int64
	ends time.Time // by this process's monotonic clock: the wall clock may be set back
}

// overhead is about what an entry takes beside its texts and bytes.
const overhead = 640

func newEntry(e idempotency.Entry, life time.Duration) *entry {
	e.Record = e.Record.Clone()
	r := &e.Record
	texts := len(r.Key.Tenant()) + len(r.Key.Operation()) + len(r.Key.Value()) + len(r.Executor) + len(r.Client) + len(r.TraceID) +
		len(r.ErrorCode) + len(r.ErrorMessage) + len(r.ResultType) + len(e.Epoch)
	return &entry{
		Entry: e, size: int64(overhead + texts + len(r.Result)),
		ends: time.Now().Add(life),
	}
}

// Stats is how full a front is.
type Stats struct {
	Records int
	Bytes   int64
}

// New returns a front on go-cache. Close it: it sweeps what has ended.
func New(cfg *Config) (*Front, error) {
	return newFront(cfg, func(c Config) (cache, error) { return newGoCache(c), nil })
}

// NewOtter returns the same on otter, for programs whose processors are many: its reads take no common lock, and what goes
// first is what is used least.
func NewOtter(cfg *Config) (*Front, error) {
	return newFront(cfg, newOtterCache)
}

func newFront(cfg *Config, make func(Config) (cache, error)) (*Front, error) {
	config := cfg.withDefaults()
	if err := config.validate(); err != nil {
		return nil, err
	}
	entries, err := make(config)
	if err != nil {
		return nil, fmt.Errorf("localfront: %w", err)
	}
	return &Front{config: config, entries: entries}, nil
}

// Close ends the front.
func (f *Front) Close() error {
	f.entries.close()
	return nil
}

// Stats says how full the front is.
func (f *Front) Stats() Stats { return f.entries.stats() }

// Name is Name.
func (*Front) Name() string { return Name }

// Near is true.
func (*Front) Near() bool { return true }

// Lookup returns a copy of the entry with this key, epoch and fingerprint.
func (f *Front) Lookup(ctx context.Context, ask idempotency.Ask) (idempotency.Record, bool, error) {
	if r, found := memoOf(ctx).lookup(ask); found {
		return r, true, nil
	}
	r, found := f.entries.get(ask.Key).answer(ask)
	return r, found, nil
}

// answer is nil's too: a miss. Another payload is a miss: PostgreSQL says what it is.
func (e *entry) answer(ask idempotency.Ask) (idempotency.Record, bool) {
	if e == nil || e.Record.Key != ask.Key || e.Epoch != ask.Epoch {
		return idempotency.Record{}, false
	}
	if !time.Now().Before(e.ends) {
		return idempotency.Record{}, false
	}
	if v, _ := e.Record.Verdict(ask.Fingerprint); v != idempotency.VerdictReplay {
		return idempotency.Record{}, false
	}
	return e.Record.Clone(), true
}

// Publish keeps a copy of the entry.
func (f *Front) Publish(ctx context.Context, e idempotency.Entry) {
	if e.Epoch == "" || e.Life <= 0 || !e.Record.Keepable() {
		return
	}
	life := min(e.Life, f.config.MaxAge)
	own := newEntry(e, life)
	memoOf(ctx).keep(own)
	if own.size > f.config.MaxBytes/8 {
		f.entries.remove(e.Record.Key) // what is there is older
		return
	}
	f.entries.put(own, life)
}

// newer reports whether e may replace what is there.
func (e *entry) newer(there *entry) bool {
	return there == nil || there.Epoch != e.Epoch || there.Record.Key != e.Record.Key || there.Record.Fence <= e.Record.Fence
}

// Evict forgets the entry of a key.
func (f *Front) Evict(ctx context.Context, key idempotency.Key) error {
	memoOf(ctx).forget(key)
	f.entries.remove(key)
	return nil
}

// Begin is Lookup: it marks nothing, concurrent calls of one process are merged before.
func (f *Front) Begin(ctx context.Context, ask idempotency.Ask, _ idempotency.AttemptToken, _ time.Duration) (idempotency.Record, bool, error) {
	return f.Lookup(ctx, ask)
}

// Renew has no mark to keep.
func (*Front) Renew(context.Context, idempotency.Key, idempotency.AttemptToken, time.Duration) error {
	return nil
}

// Wait returns at once: there is no mark.
func (*Front) Wait(context.Context, idempotency.Key) error { return nil }

// End has no mark to remove.
func (*Front) End(context.Context, idempotency.Key, idempotency.AttemptToken) {}
