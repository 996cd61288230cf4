package main

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/spf13/cobra"

	"github.com/pgonce/pgonce/idempotency"
	"github.com/pgonce/pgonce/txn"
)

// app is what every command has.
type app struct {
	*world
	database string
	json     bool
	timeout  time.Duration
	redis    redisFlags
}

// databaseVariable is not DATABASE_URL, which names somebody else's database often enough.
const databaseVariable = "PGONCE_DATABASE_URL"

func newRoot(w *world) *cobra.Command {
	a := &app{world: w}
	root := &cobra.Command{
		Use:   "pgonce",
		Short: "Look into idempotency records, change them by hand, migrate, examine",
		Long: "Look into idempotency records, change them by hand, migrate the schema, examine PostgreSQL and Redis.\n\n" +
			"Exit status: 0 done and well, 1 a finding, a refusal or no answer, 2 a wrong command line.",
		SilenceErrors: true,
		SilenceUsage:  true,
		Args:          cobra.NoArgs,
		RunE:          func(cmd *cobra.Command, _ []string) error { return cmd.Help() },
	}
	root.SetFlagErrorFunc(func(_ *cobra.Command, err error) error { return &usageError{err} })
	flags := root.PersistentFlags()
	flags.StringVar(&a.database, "database", "", "PostgreSQL, as postgres://... (default $"+databaseVariable+")")
	flags.BoolVar(&a.json, "json", false, "print JSON")
	flags.DurationVar(&a.timeout, "timeout", 30*time.Second, "give up after this time; 0: never")
	root.AddCommand(
		a.newGet(), a.newList(), a.newTrace(), a.newFail(), a.newExpire(), a.newEvict(), a.newCompensate(), a.newDrift(), a.newPolicy(), a.newMigrate(), a.newDoctor(),
	)
	wrapArgs(root)
	return root
}

// wrapArgs makes wrong arguments a wrong command line.
func wrapArgs(cmd *cobra.Command) {
	if check := cmd.Args; check != nil {
		cmd.Args = func(cmd *cobra.Command, args []string) error {
			if err := check(cmd, args); err != nil {
				return &usageError{fmt.Errorf("%w (pgonce %s --help)", err, cmd.Name())}
			}
			return nil
		}
	}
	for _, sub := range cmd.Commands() {
		wrapArgs(sub)
	}
}

// bounded is the command's context, which ends after --timeout.
func (a *app) bounded(ctx context.Context) (context.Context, context.CancelFunc) {
	if a.timeout <= 0 {
		return context.WithCancel(ctx)
	}
	return context.WithTimeoutCause(ctx, a.timeout, fmt.Errorf("no answer within --timeout %v", a.timeout))
}

// poolConfig never prepares by name: it must work through any pooler, and the planner must see what is asked.
func (a *app) poolConfig() (*pgxpool.Config, error) {
	url := a.database
	if url == "" {
		url = a.getenv(databaseVariable)
	}
	if url == "" {
		return nil, usagef("which database? give --database, or set %s", databaseVariable)
	}
	cfg, err := pgxpool.ParseConfig(url)
	if err != nil {
		// pgx blanks the password of what it repeats.
		return nil, &usageError{fmt.Errorf("--database: %w", err)}
	}
	cfg.ConnConfig.DefaultQueryExecMode = pgx.QueryExecModeExec
	if cfg.ConnConfig.RuntimeParams["application_name"] == "" {
		cfg.ConnConfig.RuntimeParams["application_name"] = "pgonce"
	}
	if cfg.ConnConfig.ConnectTimeout == 0 {
		cfg.ConnConfig.ConnectTimeout = 10 * time.Second
	}
	cfg.MaxConns, cfg.MinConns, cfg.MinIdleConns = 4, 0, 0
	txn.ConfigurePool(cfg)
	return cfg, nil
}

// withPool runs ask with a pool of the command's own.
func (a *app) withPool(ctx context.Context, ask func(context.Context, *pgxpool.Pool) error) error {
	cfg, err := a.poolConfig()
	if err != nil {
		return err
	}
	ctx, cancel := a.bounded(ctx)
	defer cancel()
	pool, err := pgxpool.NewWithConfig(ctx, cfg)
	if err != nil {
		return fmt.Errorf("connect: %w", err)
	}
	defer pool.Close()
	err = ask(ctx, pool)
	if err != nil && errors.Is(err, context.DeadlineExceeded) && ctx.Err() != nil {
		return fmt.Errorf("%w: %w", context.Cause(ctx), err)
	}
	return err
}

// withStore is withPool for what needs our tables.
func (a *app) withStore(ctx context.Context, ask func(context.Context, *pgxpool.Pool, *idempotency.Store) error) error {
	return a.withPool(ctx, func(ctx context.Context, pool *pgxpool.Pool) error {
		store := newStore()
		if err := store.Check(ctx, pool); err != nil {
			return err
		}
		return ask(ctx, pool, store)
	})
}

func newStore() *idempotency.Store { return idempotency.NewStore(pgx.QueryExecModeExec) }
