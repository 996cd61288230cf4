// Package compensator repairs: it finishes what a crash has left half done, and removes what is past its time. It is not the
// saga's compensation, which undoes.
//
// One pass looks for leased records whose owner died and finishes them as their operation says, makes fronts agree with
// PostgreSQL, drops results and records past their retention, and reads the epoch. Any number of replicas may run passes at the same time: every change repeats its
// condition inside the statement, so none is made twice.
package compensator

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgonce/pgonce/idempotency"
	"github.com/pgonce/pgonce/internal/pgguard"
)

// Defaults of a Config.
const (
	DefaultInterval = time.Minute
	DefaultBatch    = 2000
	DefaultTimeout  = 10 * time.Second
	DefaultWorkers  = 8
	DefaultActor    = "compensator"

	DefaultLookback  = 10 * time.Minute
	DefaultHealLimit = 100_000

	DefaultBypassRetention = 30 * 24 * time.Hour
)

// Config configures a Compensator. A zero field means its default.
type Config struct {
	// Operations are the same declarations that the runners have. Records of others are counted and left alone. Required.
	Operations []idempotency.Operation
	// Interval is the pause between the passes of Run, with a jitter of a tenth.
	// Default: 1 min.
	Interval time.Duration
	// Batch is the most rows that one statement changes. A statement that takes longer than Timeout is tried with half of it.
	// Default: 2,000.
	Batch int
	// Timeout bounds every statement.
	// Default: 10 s.
	Timeout time.Duration
	// Workers are the stale records that are worked on at the same time: their Resolvers may be slow.
	// Default: 8.
	Workers int
	// Fronts are made to agree with PostgreSQL: the same, or made with the same configuration, that the runners have.
	// Default: none.
	Fronts []idempotency.Auditable
	// Lookback is how far back outcomes are looked for that did not get to the fronts, in a compensator's first pass; later ones
	// begin where the one before ended.
	// Default: 10 min.
	Lookback time.Duration
	// HealLimit is how many names of a front one pass looks at, others' names included; the next one goes on behind it.
	// Default: 100,000.
	HealLimit int
	// OnDrift is told of every difference between a front and PostgreSQL. It must be quick.
	// Default: none.
	OnDrift func(context.Context, Drift)
	// BypassRetention is how long executions without a record are kept that nobody has to reconcile (any more); at least an hour.
	// Default: 30 days.
	BypassRetention time.Duration
	// DryRun counts and changes nothing.
	// Default: false.
	DryRun bool
	// Actor is named in idempotency.attempts as who did it.
	// Default: "compensator".
	Actor string
	// OnReport is told of every pass of Run.
	// Default: none.
	OnReport func(context.Context, Report, error)
}

func (c *Config) withDefaults() Config {
	var d Config
	if c != nil {
		d = *c
	}
	if d.Interval == 0 {
		d.Interval = DefaultInterval
	}
	if d.Batch == 0 {
		d.Batch = DefaultBatch
	}
	if d.Timeout == 0 {
		d.Timeout = DefaultTimeout
	}
	if d.Workers == 0 {
		d.Workers = DefaultWorkers
	}
	if d.Actor == "" {
		d.Actor = DefaultActor
	}
	if d.Lookback == 0 {
		d.Lookback = DefaultLookback
	}
	if d.HealLimit == 0 {
		d.HealLimit = DefaultHealLimit
	}
	if d.BypassRetention == 0 {
		d.BypassRetention = DefaultBypassRetention
	}
	if d.OnDrift == nil {
		d.OnDrift = func(context.Context, Drift) {}
	}
	if d.OnReport == nil {
		d.OnReport = func(context.Context, Report, error) {}
	}
	return d
}

func (c *Config) validate() error {
	invalid := func(field, rule string) error {
		return &idempotency.ConfigError{Field: "compensator.Config." + field, Rule: rule}
	}
	switch {
	case len(c.Operations) == 0:
		return invalid("Operations", "must declare at least one operation")
	case c.Interval < time.Second:
		return invalid("Interval", "must be at least 1s")
	case c.Batch < 1 || c.Batch > 10_000:
		return invalid("Batch", "must be from 1 to 10000")
	case c.Timeout < 10*time.Millisecond:
		return invalid("Timeout", "must be at least 10ms")
	case c.Workers < 1 || c.Workers > 1000:
		return invalid("Workers", "must be from 1 to 1000")
	case slices.Contains(c.Fronts, nil):
		return invalid("Fronts", "must not hold nil")
	case c.Lookback < time.Second:
		return invalid("Lookback", "must be at least 1s")
	case c.HealLimit < 1:
		return invalid("HealLimit", "must be at least 1")
	case c.BypassRetention < time.Hour:
		return invalid("BypassRetention", "must be at least 1h")
	}
	return nil
}

// Report is what one pass came to. In a dry run it says what a pass would meet.
type Report struct {
	Stale      int // records past their lease when the pass began
	Rescued    int // of them: made a retryable failure, by the rules RERUN and RESUME
	Resolved   int // finished by their operation's Resolver
	Unresolved int // the Resolver could not tell, or failed
	Manual     int // wait for a person
	Undeclared int // of operations that this compensator does not know

	Examined   int // entries and marks of fronts that were held against PostgreSQL
	Missing    int // differences, one field for each DriftKind
	NoRecord   int
	OtherEpoch int
	Wrong      int
	Endless    int
	NoOwner    int
	Unreadable int
	Discarded  int // removed from fronts
	Published  int // given to fronts

	ResultsDropped int64
	Purged         int64
	BypassesPurged int64

	Epoch        string
	EpochChanged bool // since this compensator's pass before

	Duration time.Duration
}

// Compensator runs passes. It is safe for concurrent use; one pass runs at a time.
type Compensator struct {
	pool       *pgxpool.Pool
	store      *idempotency.Store
	config     Config
	operations map[string]idempotency.Operation
	running    chan struct{} // holds the pass that runs
	epoch      string        // of the pass before
	results    batch
	records    batch
	bypasses   batch
	healers    []*healer
}

// New returns a compensator on a pool of the primary whose configuration went through txn.ConfigurePool. It does not connect.
func New(pool *pgxpool.Pool, cfg *Config) (*Compensator, error) {
	if pool == nil {
		return nil, &idempotency.ConfigError{Field: "pool", Rule: "must not be nil"}
	}
	config := cfg.withDefaults()
	if err := config.validate(); err != nil {
		return nil, err
	}
	poolConfig := pool.Config()
	if !pgguard.Configured(poolConfig) {
		return nil, &idempotency.ConfigError{Field: "pool", Rule: pgguard.Rule}
	}
	operations := map[string]idempotency.Operation{}
	for _, declared := range config.Operations {
		op := declared.WithDefaults()
		if err := op.Validate(); err != nil {
			return nil, err
		}
		if _, twice := operations[op.Name]; twice {
			return nil, &idempotency.ConfigError{Field: "compensator.Config.Operations", Rule: fmt.Sprintf("must be declared once each, %q is there twice", op.Name)}
		}
		operations[op.Name] = op
	}
	c := &Compensator{
		pool: pool, store: idempotency.NewStore(poolConfig.ConnConfig.DefaultQueryExecMode), config: config,
		operations: operations, running: make(chan struct{}, 1),
	}
	c.results, c.records, c.bypasses = newBatch(config.Batch), newBatch(config.Batch), newBatch(config.Batch)
	c.newHealers()
	return c, nil
}

// Run runs passes until ctx ends: then what is on its way is finished, and Run returns. Errors do not end it; OnReport is told.
func (c *Compensator) Run(ctx context.Context) {
	for ctx.Err() == nil {
		report, err := c.RunOnce(ctx)
		c.config.OnReport(ctx, report, err)
		timer := time.NewTimer(jittered(c.config.Interval))
		select {
		case <-timer.C:
		case <-ctx.Done():
			timer.Stop()
		}
	}
}

// jittered is a tenth less to a tenth more: replicas that were started together must not come together for ever.
func jittered(d time.Duration) time.Duration { return d*9/10 + rand.N(d/5) }

// RunOnce runs one pass, after any other of this compensator. A pass that fails in one part goes on with the next, and returns
// all errors. When ctx ends it finishes what is on its way, and returns what ctx ended with.
func (c *Compensator) RunOnce(ctx context.Context) (Report, error) {
	return c.pass(ctx, func(ctx context.Context, began time.Time, report *Report) error {
		return errors.Join(c.rescue(ctx, began, report), c.heal(ctx, began, report), c.purge(ctx, report))
	})
}

// pass runs parts of a pass, alone, on a database that can be worked on.
func (c *Compensator) pass(ctx context.Context, parts func(context.Context, time.Time, *Report) error) (report Report, err error) {
	select {
	case c.running <- struct{}{}:
		defer func() { <-c.running }()
	case <-ctx.Done():
		return report, context.Cause(ctx)
	}
	watch := time.Now()
	defer func() { report.Duration = time.Since(watch) }()
	if err := c.call(ctx, func(ctx context.Context) error { return c.store.Check(ctx, c.pool) }); err != nil {
		return report, err
	}
	began, err := c.readEpoch(ctx, &report)
	if err != nil {
		return report, err
	}
	err = parts(ctx, began, &report)
	return report, err
}

// HealOnce runs the part of a pass that makes fronts agree with PostgreSQL, or in a dry run only says where they do not.
func (c *Compensator) HealOnce(ctx context.Context) (Report, error) {
	return c.pass(ctx, c.heal)
}

// call gives one statement its time. What is on its way when ctx ends is not cut off.
func (c *Compensator) call(ctx context.Context, do func(context.Context) error) error {
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	bounded, cancel := context.WithTimeout(context.WithoutCancel(ctx), c.config.Timeout)
	defer cancel()
	return do(bounded)
}

// change is call for a statement that says who owns a record, and that waits for nothing but its commit. A cancel request
// would end that wait, and the change would be seen before it is replicated.
func (c *Compensator) change(ctx context.Context, do func(context.Context, *pgx.Conn) error) error {
	return c.call(ctx, func(ctx context.Context) error {
		conn, err := c.pool.Acquire(ctx)
		if err != nil {
			return err
		}
		defer conn.Release()
		return pgguard.Of(conn.Conn()).Commit(conn.Conn(), func() error { return do(ctx, conn.Conn()) })
	})
}

// inTx is call for a transaction. Its connection's guard sees the COMMIT.
func (c *Compensator) inTx(ctx context.Context, do func(context.Context, pgx.Tx) error) error {
	return c.call(ctx, func(ctx context.Context) error {
		return pgx.BeginTxFunc(ctx, c.pool, pgx.TxOptions{IsoLevel: pgx.ReadCommitted, AccessMode: pgx.ReadWrite}, func(tx pgx.Tx) error {
			return do(ctx, tx)
		})
	})
}
