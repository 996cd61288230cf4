package txn_test

import (
	"context"
	"fmt"
	"log/slog"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgonce/pgonce/idempotency"
	"github.com/pgonce/pgonce/internal/pgtest"
	"github.com/pgonce/pgonce/txn"
)

// newObedientRunner makes a runner that obeys idempotency.policies, and reads them until ctx ends.
func newObedientRunner(ctx context.Context, pool *pgxpool.Pool) (*txn.Runner, *idempotency.Policies, error) {
	policies, err := idempotency.NewPolicies(pool, &idempotency.PoliciesConfig{
		OnReport: func(ctx context.Context, _ idempotency.PoliciesReport, err error) {
			if err != nil { // those read last stay in force
				slog.WarnContext(ctx, "policies", "error", err)
			}
		},
	})
	if err != nil {
		return nil, nil, err
	}
	if _, err := policies.RunOnce(ctx); err != nil { // so that a restart does not begin with "enforce"
		return nil, nil, err
	}
	go policies.Run(ctx)
	runner, err := txn.New(pool, &txn.Config{Operations: []idempotency.Operation{create}, Policies: policies})
	return runner, policies, err
}

func ExampleConfig_policies() {
	database, drop := pgtest.ExampleURL()
	defer drop()
	ctx, stop := context.WithCancel(context.Background())
	pool, err := openPool(ctx, database)
	if err != nil {
		fmt.Println(err)
		stop()
		return
	}
	defer pool.Close()
	defer stop() // policies no longer read when the pool closes
	store := idempotency.NewStore(pgx.QueryExecModeExec)
	_, _, err = store.ChangePolicy(ctx, pool, idempotency.ScopeOperation, create.Name,
		idempotency.Blame{Actor: "ada", Reason: "release 4.2"},
		func(p *idempotency.Policy) { p.Enforcement = idempotency.EnforcementShadow })
	if err != nil {
		fmt.Println(err)
		return
	}
	runner, policies, err := newObedientRunner(ctx, pool)
	if err != nil {
		fmt.Println(err)
		return
	}
	key, err := create.Key("acme", "k-1")
	if err != nil {
		fmt.Println(err)
		return
	}
	req := idempotency.Request{Key: key, Fingerprint: idempotency.FingerprintBytes([]byte("body"))}
	fmt.Println(policies.For(key).Enforcement)
	for range 2 {
		res, err := txn.WithIdempotency(ctx, runner, req, func(context.Context, pgx.Tx) (string, error) { return "done", nil })
		fmt.Println(res.Value, res.Replayed, err)
	}
	report, err := store.ShadowReport(ctx, pool, create.Name, idempotency.DefaultRetention)
	if err != nil {
		fmt.Println(err)
		return
	}
	for _, line := range report {
		fmt.Println(line.Operation, line.WouldBe, line.Calls)
	}
	// Output:
	// shadow
	// done false <nil>
	// done false <nil>
	// order.create REPLAY 1
}
