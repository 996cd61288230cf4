package txn

import (
	"context"
	"errors"
	"fmt"
	"sync/atomic"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgonce/pgonce/idempotency"
	"github.com/pgonce/pgonce/internal/pgguard"
	"github.com/pgonce/pgonce/internal/pgsource"
)

// Runner runs functions once per key. It is safe for concurrent use; make one per pool and process.
type Runner struct {
	pool       pgsource.Source
	store      *idempotency.Store
	config     Config
	operations map[string]*operation
	flights    flights
	fronts     fronts
	keeper     *keeper
	direct     bool    // a connection of the pool stays with one session of PostgreSQL
	within     *within // nil: every call has a transaction of its own
	waiters    atomic.Int64
	checked    atomic.Bool
}

// operation is a declared operation and what the runner has learned of it.
type operation struct {
	idempotency.Operation
	duplicates rate
	fresh      fresh
	latency    latency
}

// New returns a runner on a pool whose configuration went through ConfigurePool. It does not connect; the first call
// checks the schema. The error is an *idempotency.ConfigError that names field and rule.
func New(pool *pgxpool.Pool, cfg *Config) (*Runner, error) {
	if pool == nil {
		return nil, &idempotency.ConfigError{Field: "pool", Rule: "must not be nil"}
	}
	return NewOn(pgsource.Pool{Pool: pool}, cfg)
}

// NewOn is New for package txnsql, whose connections are a sql.DB's. Programs use New, or txnsql.New.
func NewOn(pool pgsource.Source, cfg *Config) (*Runner, error) {
	config := cfg.withDefaults()
	if err := config.validate(); err != nil {
		return nil, err
	}
	operations, err := config.operations()
	if err != nil {
		return nil, err
	}
	poolConfig := pool.Config()
	if !pgguard.Configured(poolConfig) {
		return nil, errPoolNotConfigured
	}
	if poolConfig.ConnConfig.DefaultQueryExecMode == pgx.QueryExecModeSimpleProtocol {
		// pgx reports a lost reply to a statement of the simple protocol as safe to repeat, also where it was a write.
		return nil, &idempotency.ConfigError{Field: "pool", Rule: "must not use the simple protocol: use pgx.QueryExecModeExec behind a pooler"}
	}
	fronts, err := newFronts(config.Fronts)
	if err != nil {
		return nil, err
	}
	r := &Runner{
		pool:       pool,
		store:      idempotency.NewStore(poolConfig.ConnConfig.DefaultQueryExecMode),
		config:     config,
		operations: operations,
		flights:    flights{running: map[idempotency.Key]*flight{}},
		fronts:     fronts,
		direct:     poolConfig.ConnConfig.DefaultQueryExecMode == pgx.QueryExecModeCacheStatement,
	}
	r.fronts.epochs = newEpochWatch(r.store, poolConfig, config.OnEvent)
	r.fronts.doubles = newDoubleCheck(r)
	r.keeper = &keeper{watch: r.fronts.epochs, store: r.store}
	return r, nil
}

// Operation returns an operation as it is declared, with its defaults; false: it is not.
func (r *Runner) Operation(name string) (idempotency.Operation, bool) {
	op := r.operations[name]
	if op == nil {
		return idempotency.Operation{}, false
	}
	return op.Operation, true
}

// Close ends what a runner with fronts or leases does beside its calls. The calls that run go on, without fronts. The pool and
// the fronts stay open, they are the caller's.
func (r *Runner) Close() {
	r.keeper.close()
	r.fronts.epochs.close()
	r.fronts.doubles.close()
}

// Check asks PostgreSQL whether the runner can work: for a program's start and its readiness. The errors are
// idempotency.ErrSchema, ErrReadOnly (a standby), or the connection's.
func (r *Runner) Check(ctx context.Context) error {
	ctx = ownWork(ctx)
	err := r.store.Check(ctx, r.pool)
	if err == nil && r.fronts.configured() {
		_, _, err = r.store.Epoch(ctx, r.pool) // without it the fronts are never asked
	}
	return err
}

// check refuses what needs no database to be refused, and once per runner a database we cannot work on.
func (r *Runner) check(ctx context.Context, q idempotency.Querier, req idempotency.Request) (*operation, error) {
	if err := nested(ctx, r, q, req.Key); err != nil {
		return nil, err
	}
	op, err := r.declared(req)
	if err != nil {
		return nil, err
	}
	return op, r.checkDatabase(ctx, q)
}

// declared is the operation of a request that is valid.
func (r *Runner) declared(req idempotency.Request) (*operation, error) {
	if err := req.Validate(); err != nil {
		return nil, err
	}
	op, err := r.operation(req.Key.Operation())
	if err != nil {
		return nil, err
	}
	if op.RequireIssued && op.Tokens != nil {
		// Also before fronts are asked: whoever sends made-up tokens costs nobody but this process.
		if err := op.Tokens.Verify(req.Key.Tenant(), req.Key.Operation(), req.Key.Value()); err != nil {
			return nil, err
		}
	}
	return op, nil
}

// operation returns a declared operation.
func (r *Runner) operation(name string) (*operation, error) {
	op := r.operations[name]
	if op == nil {
		return nil, &idempotency.ConfigError{
			Field: "operation",
			Rule:  fmt.Sprintf("must be declared in Config.Operations, %q is not", name),
		}
	}
	return op, nil
}

// checkDatabase refuses, once per runner, a database we cannot work on.
func (r *Runner) checkDatabase(ctx context.Context, q idempotency.Querier) error {
	if r.checked.Load() {
		return nil
	}
	err := r.store.Check(ctx, q)
	if err != nil && !errors.Is(err, idempotency.ErrSchema) && q == idempotency.Querier(r.pool) && ctx.Err() == nil {
		err = r.store.Check(ctx, q) // once more: the first may have met a connection that was dead already
	}
	switch {
	case err == nil:
		r.checked.Store(true)
		return nil
	case errors.Is(err, idempotency.ErrSchema) || errors.Is(err, idempotency.ErrReadOnly) || ctx.Err() != nil || refusedForGood(err):
		return err
	}
	return fmt.Errorf("%w: %w", idempotency.ErrRestart, err)
}

// rate is an exponentially weighted share of calls, the last 32 or so.
type rate struct{ scaled atomic.Int64 }

const rateOne = 1 << 20

// add may lose a concurrent call's update: it is an estimate.
func (r *rate) add(duplicate bool) {
	old, target := r.scaled.Load(), int64(0)
	if duplicate {
		target = rateOne
	}
	r.scaled.Store(old + (target-old)/32)
}

func (r *rate) high() bool { return r.scaled.Load() > rateOne/2 }

// fresh counts the calls of an operation since its last duplicate, whoever answered that.
type fresh struct{ n atomic.Int64 }

// quietAfter is how many calls without a duplicate make an operation quiet. A duplicate that comes then costs what it costs
// without a far front, and the next ones find it asked.
const quietAfter = 64

func (f *fresh) add(duplicate bool) {
	if duplicate {
		f.n.Store(0)
		return
	}
	f.n.Add(1)
}

func (f *fresh) quiet() bool { return f.n.Load() >= quietAfter }
