package main

import (
	"context"
	"math"
	"strconv"
	"strings"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/spf13/cobra"

	"github.com/pgonce/pgonce/compensator"
	"github.com/pgonce/pgonce/idempotency"
	"github.com/pgonce/pgonce/redisfront"
)

// passFlags are those of the commands that run a compensator.
type passFlags struct {
	operations []string
	lookback   time.Duration
}

func (p *passFlags) add(a *app, cmd *cobra.Command) {
	flags := cmd.Flags()
	flags.StringArrayVar(&p.operations, "operation", nil, "an operation to look after, as NAME or, with its retention, NAME=72h; may be repeated\n(default: those that records are of, with the longest retention seen)")
	flags.DurationVar(&p.lookback, "lookback", compensator.DefaultLookback, "how far back outcomes are looked for that are not in Redis")
	a.addRedis(cmd)
}

// declared are the operations that a pass looks after. The command has no Resolver: those records wait for the service's own
// compensator, or for a person.
func (p *passFlags) declared(ctx context.Context, pool *pgxpool.Pool, store *idempotency.Store) (all []idempotency.Operation, err error) {
	seen, err := store.OperationsSeen(ctx, pool)
	if err != nil {
		return nil, err
	}
	retention := map[string]time.Duration{}
	for _, one := range seen {
		retention[one.Name] = one.Retention
		if len(p.operations) == 0 {
			all = append(all, operationOf(one.Name, one.Retention))
		}
	}
	for _, text := range p.operations {
		name, span, given := strings.Cut(text, "=")
		own := retention[name]
		if given {
			if own, err = time.ParseDuration(span); err != nil || own < idempotency.MinRetention {
				return nil, usagef("--operation %s: the retention must be a duration of at least %v", text, idempotency.MinRetention)
			}
		}
		op := operationOf(name, own)
		if err := op.WithDefaults().Validate(); err != nil {
			return nil, usagef("--operation %s: %w", text, err)
		}
		all = append(all, op)
	}
	return all, nil
}

func operationOf(name string, retention time.Duration) idempotency.Operation {
	if retention = max(retention, 0); retention > 0 {
		retention = max(retention, idempotency.MinRetention) // records of it may have been expired by hand
	}
	return idempotency.Operation{Name: name, Retention: retention, Wait: idempotency.NoWait}
}

// withCompensator runs a compensator's commands.
func (a *app) withCompensator(cmd *cobra.Command, p *passFlags, change func(*compensator.Config),
	do func(context.Context, *compensator.Compensator, []idempotency.Operation) error,
) error {
	if !cmd.Flags().Changed("timeout") {
		a.timeout = 0 // a pass takes as long as there is to do; every statement has its own time
	}
	if err := a.checkRedis(); err != nil {
		return err
	}
	return a.withStore(cmd.Context(), func(ctx context.Context, pool *pgxpool.Pool, store *idempotency.Store) error {
		operations, err := p.declared(ctx, pool, store)
		if err != nil {
			return err
		}
		if len(operations) == 0 {
			a.notef("no records, so no operations\n")
			return nil
		}
		cfg := compensator.Config{Operations: operations, Actor: "pgonce compensate", Lookback: p.lookback}
		if a.redisGiven() {
			client, err := a.redisClient()
			if err != nil {
				return err
			}
			defer func() { _ = client.Close() }()
			front, err := redisfront.New(client, &redisfront.Config{Prefix: a.redis.prefix, Timeout: readTimeout}) //nolint:contextcheck // it does not connect
			if err != nil {
				return &usageError{err}
			}
			defer func() { _ = front.Close() }()
			cfg.Fronts = []idempotency.Auditable{front}
		}
		change(&cfg)
		c, err := compensator.New(pool, &cfg)
		if err != nil {
			return &usageError{err}
		}
		return do(ctx, c, operations)
	})
}

func (a *app) newCompensate() *cobra.Command {
	var p passFlags
	var once, dryRun bool
	var interval time.Duration
	cmd := &cobra.Command{
		Use:   "compensate [--once] [--dry-run] [--redis URL]",
		Short: "Repair: rescue stale records, heal Redis, purge what is past its retention",
		Long: "Repair as a compensator in the service does, once or until it is ended: records whose owner died become a retryable failure if their\n" +
			"rule is RERUN or RESUME, Redis is made to agree with PostgreSQL, results and records past their retention are removed. Those of\n" +
			"the rule RESOLVE are only counted: their Resolver is in the service.",
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if dryRun && !once {
				return usagef("--dry-run needs --once: again and again it would say the same")
			}
			change := func(c *compensator.Config) {
				c.DryRun, c.Interval = dryRun, interval
				c.OnReport = func(_ context.Context, r compensator.Report, err error) {
					_ = a.tellPass(&r, nil, false, err)
					if err != nil {
						a.notef("pgonce: %s\n", printable(err.Error()))
					}
				}
			}
			return a.withCompensator(cmd, &p, change, func(ctx context.Context, c *compensator.Compensator, operations []idempotency.Operation) error {
				if !once {
					c.Run(ctx)
					return nil
				}
				r, err := c.RunOnce(ctx)
				if reported := a.tellPass(&r, operations, dryRun, err); reported != nil {
					return reported
				}
				return err
			})
		},
	}
	flags := cmd.Flags()
	flags.BoolVar(&once, "once", false, "one pass; without it, one every --interval until the command is ended")
	flags.BoolVar(&dryRun, "dry-run", false, "say what a pass would meet, and change nothing")
	flags.DurationVar(&interval, "interval", compensator.DefaultInterval, "between passes")
	p.add(a, cmd)
	return cmd
}

// passView is a pass for scripts.
type passView struct {
	DryRun         bool      `json:"dry_run"`
	Operations     []string  `json:"operations,omitempty"`
	Stale          int       `json:"stale"`
	Rescued        int       `json:"rescued"`
	Resolve        int       `json:"wait_for_resolver_or_person"`
	Undeclared     int       `json:"undeclared"`
	Drift          driftView `json:"drift"`
	ResultsDropped int64     `json:"results_dropped"`
	Purged         int64     `json:"purged"`
	BypassesPurged int64     `json:"bypasses_purged"`
	Epoch          string    `json:"epoch"`
	Seconds        float64   `json:"seconds"`
	Error          string    `json:"error,omitempty"`
}

// driftView counts differences by kind.
type driftView struct {
	Examined   int `json:"examined"`
	Missing    int `json:"missing"`
	NoRecord   int `json:"no_record"`
	OtherEpoch int `json:"other_epoch"`
	Wrong      int `json:"wrong"`
	Endless    int `json:"endless"`
	NoOwner    int `json:"no_owner"`
	Unreadable int `json:"unreadable"`
	Discarded  int `json:"discarded"`
	Published  int `json:"published"`
}

func driftOf(r *compensator.Report) driftView {
	return driftView{
		Examined: r.Examined, Missing: r.Missing, NoRecord: r.NoRecord, OtherEpoch: r.OtherEpoch, Wrong: r.Wrong, Endless: r.Endless,
		NoOwner: r.NoOwner, Unreadable: r.Unreadable, Discarded: r.Discarded, Published: r.Published,
	}
}

// tellPass prints what a pass came to.
func (a *app) tellPass(r *compensator.Report, operations []idempotency.Operation, dryRun bool, err error) error {
	if a.json {
		v := passView{
			DryRun: dryRun, Stale: r.Stale, Rescued: r.Rescued, Resolve: r.Manual + r.Unresolved, Undeclared: r.Undeclared,
			Drift: driftOf(r), ResultsDropped: r.ResultsDropped, Purged: r.Purged, BypassesPurged: r.BypassesPurged, Epoch: r.Epoch, Seconds: r.Duration.Seconds(),
		}
		for _, op := range operations {
			v.Operations = append(v.Operations, op.Name)
		}
		if err != nil {
			v.Error = err.Error()
		}
		return a.printJSON(v)
	}
	head := "one pass"
	if dryRun {
		head = "one pass would (nothing was changed)"
	}
	a.printf("%s, %s\n", head, span(r.Duration))
	rows := [][2]string{
		{"stale records", strconv.Itoa(r.Stale)},
		{"  made a retryable failure", positive(r.Rescued)},
		{"  wait for their Resolver or a person", positive(r.Manual + r.Unresolved)},
		{"  of other operations", positive(r.Undeclared)},
		{"results dropped", strconv.FormatInt(r.ResultsDropped, 10)},
		{"records purged", strconv.FormatInt(r.Purged, 10)},
		{"executions without a record purged", positive(int(r.BypassesPurged))},
	}
	if a.redisGiven() {
		rows = append(rows, driftRows(r)...)
	}
	facts(a.out, rows)
	if len(operations) > 0 {
		a.notef("operations: %s\n", printable(joined(namesOf(operations))))
	}
	return nil
}

func driftRows(r *compensator.Report) [][2]string {
	return [][2]string{
		{"entries and marks examined", strconv.Itoa(r.Examined)},
		{"  missing", positive(r.Missing)},
		{"  without a record", positive(r.NoRecord)},
		{"  of another epoch", positive(r.OtherEpoch)},
		{"  wrong", positive(r.Wrong)},
		{"  would outlive their record", positive(r.Endless)},
		{"  marks without an owner", positive(r.NoOwner)},
		{"  unreadable", positive(r.Unreadable)},
		{"removed from Redis", positive(r.Discarded)},
		{"published", positive(r.Published)},
	}
}

// positive is empty for nothing.
func positive(n int) string {
	if n == 0 {
		return ""
	}
	return strconv.Itoa(n)
}

func namesOf(operations []idempotency.Operation) (all []string) {
	for _, op := range operations {
		all = append(all, op.Name)
	}
	return all
}

func (a *app) newDrift() *cobra.Command {
	var p passFlags
	var limit int
	cmd := &cobra.Command{
		Use:   "drift --redis URL",
		Short: "Say where Redis differs from PostgreSQL; nothing is changed",
		Long: "Go through what the fronts keep in Redis, ask PostgreSQL about all of it, and say where they differ. PostgreSQL is right.\n" +
			"Nothing is changed: compensate heals it. The status is 1 if there are differences.",
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if !a.redisGiven() {
				return usagef("which Redis? give --redis, or set %s", redisVariable)
			}
			var found []compensator.Drift
			change := func(c *compensator.Config) {
				c.DryRun, c.HealLimit = true, math.MaxInt
				c.OnDrift = func(_ context.Context, d compensator.Drift) {
					if len(found) < limit {
						found = append(found, d)
					}
				}
			}
			return a.withCompensator(cmd, &p, change, func(ctx context.Context, c *compensator.Compensator, _ []idempotency.Operation) error {
				r, err := c.HealOnce(ctx)
				if err != nil {
					return err
				}
				return a.tellDrift(&r, found)
			})
		},
	}
	cmd.Flags().IntVar(&limit, "limit", 100, "differences to show; all are counted")
	p.add(a, cmd)
	return cmd
}

// driftLine is a difference for scripts.
type driftLine struct {
	Kind      string `json:"kind"`
	Tenant    string `json:"tenant,omitempty"`
	Operation string `json:"operation,omitempty"`
	Key       string `json:"key,omitempty"`
	Name      string `json:"name,omitempty"`
	Detail    string `json:"detail"`
}

func (a *app) tellDrift(r *compensator.Report, found []compensator.Drift) error {
	if a.json {
		lines := make([]driftLine, 0, len(found))
		for _, d := range found {
			lines = append(lines, driftLine{string(d.Kind), d.Key.Tenant(), d.Key.Operation(), d.Key.Value(), d.Name, d.Detail})
		}
		if err := a.printJSON(map[string]any{"drift": driftOf(r), "found": lines}); err != nil {
			return err
		}
	} else {
		if len(found) > 0 {
			rows := [][]string{{"KIND", "KEY", "TENANT", "OPERATION", "DETAIL", "NAME"}}
			for _, d := range found {
				rows = append(rows, []string{string(d.Kind), d.Key.Value(), d.Key.Tenant(), d.Key.Operation(), d.Detail, d.Name})
			}
			table(a.out, rows)
		}
		facts(a.out, driftRows(r))
	}
	if r.Drifted() == 0 {
		a.notef("Redis agrees with PostgreSQL\n")
		return nil
	}
	a.notef("%d differences, %d shown. To heal them: pgonce compensate --once --redis ...\n", r.Drifted(), len(found))
	return errSaid
}
