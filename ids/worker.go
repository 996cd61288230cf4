package ids

import (
	"context"
	"errors"
	"math/rand/v2"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/pgonce/pgonce/idempotency"
)

// Defaults of a WorkerConfig.
const (
	DefaultLease  = 30 * time.Second
	DefaultMargin = 30 * time.Second
)

// askTimeout bounds leasing a number, and giving it back when Run ends.
const askTimeout = 5 * time.Second

// WorkerConfig configures a Worker. A zero field means its default.
type WorkerConfig struct {
	// Lease is how long PostgreSQL may be away before Next returns ErrNoWorker. It is renewed three times as often.
	// Default: 30 s.
	Lease time.Duration
	// Margin is how long behind the end of its lease a number is left alone before another process may get it; -1: not at all.
	// Default: 30 s.
	Margin time.Duration
	// MaxBack is Config.MaxBack, for a clock of PostgreSQL that was set back.
	// Default: 100 ms.
	MaxBack time.Duration
	// OnError is told of each pass of Run that failed. Run goes on.
	// Default: nobody is told.
	OnError func(context.Context, error)
	// Clock tells the process's time, for tests.
	// Default: time.Now.
	Clock func() time.Time
}

func (c *WorkerConfig) withDefaults() WorkerConfig {
	var d WorkerConfig
	if c != nil {
		d = *c
	}
	if d.Lease == 0 {
		d.Lease = DefaultLease
	}
	if d.Margin == 0 {
		d.Margin = DefaultMargin
	}
	if d.OnError == nil {
		d.OnError = func(context.Context, error) {}
	}
	return d
}

func (c *WorkerConfig) validate() error {
	switch {
	case c.Lease < time.Second || c.Lease > time.Hour:
		return invalid("WorkerConfig.Lease", "must be from 1s to 1h")
	case c.Margin < -1 || c.Margin > time.Hour:
		return invalid("WorkerConfig.Margin", "must be up to 1h, or -1 for none")
	}
	return nil
}

// Worker makes ids like a Generator, with a worker number that it leases from PostgreSQL. Its ids have PostgreSQL's time: the
// process's clock is compared with it at each lease and renewal, and only counts what has passed since. So it does not matter
// what the clocks of different machines say, or that one is set. It is safe for concurrent use.
//
// A process that makes ids has its number's milliseconds reserved in PostgreSQL before it uses them. So two that had the
// same number one after the other never made the same ID, whatever their clocks did, and however long one of them was stopped.
// What is lost in PostgreSQL is no protection: after an asynchronous failover that has lost a lease, or the restore of a
// backup, begin no new process before one Lease has passed.
type Worker struct {
	store     *idempotency.Store
	db        idempotency.DB
	config    WorkerConfig
	generator *Generator

	mu    sync.Mutex // one pass at a time
	lease *idempotency.WorkerLease
	skew  time.Duration
}

// NewWorker returns a Worker on a pool. It has no number before the first RunOnce. The error is an *idempotency.ConfigError.
func NewWorker(pool idempotency.DB, cfg *WorkerConfig) (*Worker, error) {
	config := cfg.withDefaults()
	if err := config.validate(); err != nil {
		return nil, err
	}
	generator := (&Config{MaxBack: config.MaxBack, Clock: config.Clock}).withDefaults()
	if err := generator.validate(); err != nil {
		return nil, err
	}
	if pool == nil {
		return nil, invalid("pool", "must not be nil")
	}
	config.Clock = generator.Clock
	return &Worker{
		store: idempotency.NewStore(pgx.QueryExecModeExec), db: pool, config: config, generator: newGenerator(&generator),
	}, nil
}

// Next returns an ID, without asking PostgreSQL. ErrNoWorker: there is no number at this time. Otherwise as Generator.Next.
func (w *Worker) Next() (ID, error) { return w.generator.Next() }

// Number returns the leased worker number; ok is false where there is none. It may be lost in the next moment.
func (w *Worker) Number() (number int, ok bool) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.lease == nil {
		return 0, false
	}
	return w.lease.Worker, true
}

// Skew is how far PostgreSQL's clock was before the process's when the number was leased or renewed last, to about the time
// that the question took. Ids do not depend on it.
func (w *Worker) Skew() time.Duration {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.skew
}

// Run keeps a worker number until ctx ends, and then gives it back: after that Next returns ErrNoWorker. Where a pass fails,
// the ids go on until the end of what is reserved, and Run tries again. Call RunOnce before it, to begin with a number.
func (w *Worker) Run(ctx context.Context) {
	defer w.release(ctx)
	for {
		every := w.config.Lease / 3
		if err := w.RunOnce(ctx); err != nil && ctx.Err() == nil {
			w.config.OnError(ctx, err)
			every /= 4
		}
		timer := time.NewTimer(every*9/10 + rand.N(every/5)) // processes begun together must not come together for ever
		select {
		case <-timer.C:
		case <-ctx.Done():
			timer.Stop()
			return
		}
	}
}

// RunOnce leases a worker number, or renews the one that is leased, or leases another one where that is lost.
// idempotency.ErrNoWorker: all 1024 are taken.
func (w *Worker) RunOnce(ctx context.Context) error {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.lease != nil {
		err := w.renew(ctx)
		if !errors.Is(err, idempotency.ErrLeaseLost) {
			return err
		}
		w.generator.revoke()
		w.lease = nil
	}
	ctx, cancel := context.WithTimeout(ctx, askTimeout)
	defer cancel()
	before := w.config.Clock()
	lease, err := w.store.LeaseWorker(ctx, w.db, w.config.Lease, max(0, w.config.Margin))
	if err != nil {
		return err
	}
	w.lease = &lease
	w.compare(before, w.config.Clock())
	w.generator.assign(lease.Worker, lease.IssuedBefore.UnixMilli(), lease.IssuedUntil.UnixMilli())
	return nil
}

func (w *Worker) renew(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, w.config.Lease/3) // so that there is time for another try
	defer cancel()
	before := w.config.Clock()
	if err := w.store.RenewWorker(ctx, w.db, w.lease, w.config.Lease); err != nil {
		return err
	}
	w.compare(before, w.config.Clock())
	w.generator.extend(w.lease.IssuedUntil.UnixMilli())
	return nil
}

// compare sets the generator's clock: PostgreSQL said its time between before and after.
func (w *Worker) compare(before, after time.Time) {
	w.skew = w.lease.Now.Sub(before.Round(0).Add(after.Sub(before) / 2))
	w.generator.compare(before, after, w.lease.Now)
}

// release gives the number back, also when ctx has ended.
func (w *Worker) release(ctx context.Context) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.lease == nil {
		return
	}
	lease := w.lease
	w.lease = nil
	last := w.generator.revoke() // before the mark is set back to it
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), askTimeout)
	defer cancel()
	if err := w.store.ReleaseWorker(ctx, w.db, lease, time.UnixMilli(last)); err != nil {
		w.config.OnError(ctx, err) // its lease ends by itself
	}
}
