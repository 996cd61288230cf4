package idempotency_test

import (
	"context"
	"errors"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgonce/pgonce/idempotency"
	"github.com/pgonce/pgonce/internal/pgtest"
)

func exec(t testing.TB, pool *pgxpool.Pool, sql string, args ...any) {
	t.Helper()
	_, err := pool.Exec(t.Context(), sql, args...)
	require.NoError(t, err)
}

func newPolicies(t testing.TB, pool *pgxpool.Pool) *idempotency.Policies {
	t.Helper()
	p, err := idempotency.NewPolicies(pool, nil)
	require.NoError(t, err)
	return p
}

func inForce(t testing.TB, p *idempotency.Policies, operation string) idempotency.InForce {
	t.Helper()
	key, err := idempotency.NewKey("acme", operation, "k")
	require.NoError(t, err)
	return p.For(key)
}

func TestPolicies_TheNarrowestCounts(t *testing.T) {
	t.Parallel()
	pool := pgtest.Pool(t)
	exec(t, pool, `INSERT INTO idempotency.policies (scope, name, enforcement, strategy, local_front, wait, actor, reason) VALUES
		('all', '', 'off', NULL, NULL, NULL, 'ada', 'x'),
		('prefix', 'order.', 'shadow', 'STRICT', true, '10 ms', NULL, NULL),
		('prefix', 'order.cancel', 'enforce', NULL, false, NULL, NULL, NULL),
		('operation', 'order.create', 'enforce', 'HYBRID', NULL, '0', NULL, NULL)`)
	p := newPolicies(t, pool)
	require.Equal(t, idempotency.EnforcementEnforce, inForce(t, p, "payment").Enforcement, "nothing was read yet")
	report, err := p.RunOnce(t.Context())
	require.NoError(t, err)
	require.Equal(t, idempotency.PoliciesReport{Policies: 4, Changed: 4}, report)
	wait := func(d time.Duration) *time.Duration { return &d }
	yes, no := true, false
	for operation, want := range map[string]idempotency.InForce{
		"payment":          {Enforcement: "off"},
		"order":            {Enforcement: "off"},
		"order.":           {Enforcement: "shadow", Strategy: "STRICT", Local: &yes, Wait: wait(10 * time.Millisecond)},
		"order.create.old": {Enforcement: "shadow", Strategy: "STRICT", Local: &yes, Wait: wait(10 * time.Millisecond)},
		"order.create":     {Enforcement: "enforce", Strategy: "HYBRID", Wait: wait(0)},
		"order.cancel":     {Enforcement: "enforce", Local: &no},
		"order.cancelled":  {Enforcement: "enforce", Local: &no},
	} {
		got := inForce(t, p, operation)
		require.NotZero(t, got.Change)
		got.Change, got.Guarded = 0, false
		require.Equal(t, want, got, operation)
	}
	report, err = p.RunOnce(t.Context())
	require.NoError(t, err)
	require.Zero(t, report.Changed)
	require.Len(t, p.List(), 4)
}

// The look-up is on the path of every call.
func TestPolicies_LookUpAllocatesNothing(t *testing.T) {
	pool := pgtest.Pool(t)
	exec(t, pool, `INSERT INTO idempotency.policies (scope, name, percentage, wait) VALUES ('all', '', 5, '1 s'), ('prefix', 'order.', 50, NULL)`)
	p := newPolicies(t, pool)
	_, err := p.RunOnce(t.Context())
	require.NoError(t, err)
	key, err := idempotency.NewKey("acme", "order.create", "k")
	require.NoError(t, err)
	require.Zero(t, testing.AllocsPerRun(1000, func() { p.For(key) }))
}

// What cannot be read, or is of a newer release, never weakens anything.
func TestPolicies_WhatIsNotKnownIsEnforced(t *testing.T) {
	t.Parallel()
	pool := pgtest.Pool(t)
	exec(t, pool, `INSERT INTO idempotency.policies (scope, name, enforcement, actor, reason) VALUES ('operation', 'a', 'shadow', 'x', 'y'), ('operation', 'b', 'off', 'x', 'y')`)
	p := newPolicies(t, pool)
	_, err := p.RunOnce(t.Context())
	require.NoError(t, err)
	require.Equal(t, idempotency.EnforcementShadow, inForce(t, p, "a").Enforcement)

	exec(t, pool, `ALTER TABLE idempotency.policies RENAME TO elsewhere`)
	_, err = p.RunOnce(t.Context())
	require.ErrorIs(t, err, idempotency.ErrSchema)
	require.Equal(t, idempotency.EnforcementShadow, inForce(t, p, "a").Enforcement, "the last ones known stay")
	ended, cancel := context.WithCancel(t.Context())
	cancel()
	_, err = p.RunOnce(ended)
	require.ErrorIs(t, err, context.Canceled)
	require.Equal(t, idempotency.EnforcementOff, inForce(t, p, "b").Enforcement)
	fresh := newPolicies(t, pool)
	_, err = fresh.RunOnce(t.Context())
	require.Error(t, err)
	require.Equal(t, idempotency.EnforcementEnforce, inForce(t, fresh, "b").Enforcement, "where none was ever read")
	exec(t, pool, `ALTER TABLE idempotency.elsewhere RENAME TO policies`)

	for _, rule := range []string{"scope", "name", "enforcement", "share", "percentage", "strategy", "wait", "off"} {
		exec(t, pool, `ALTER TABLE idempotency.policies DROP CONSTRAINT policies_`+rule+`_check`)
	}
	exec(t, pool, `INSERT INTO idempotency.policies (scope, name, enforcement, percentage, strategy, wait) VALUES
		('operation', 'c', 'sampled', 0, NULL, NULL), ('operation', 'd', 'enforce', 250, 'CACHE', '1 day'), ('region', 'eu', 'off', 100, NULL, NULL)`)
	report, err := p.RunOnce(t.Context())
	require.ErrorIs(t, err, idempotency.ErrNewerPolicy)
	for _, part := range []string{`"sampled"`, `"250"`, `"CACHE"`, `"24h0m0s"`, `"region"`} {
		require.ErrorContains(t, err, part)
	}
	require.Equal(t, 4, report.Policies, "what is known of them is in force")
	require.Equal(t, idempotency.EnforcementShadow, inForce(t, p, "a").Enforcement)
	for _, operation := range []string{"c", "d", "eu"} {
		got := inForce(t, p, operation)
		got.Change, got.Guarded = 0, false
		require.Equal(t, idempotency.InForce{Enforcement: idempotency.EnforcementEnforce}, got, operation)
	}
}

// The table's own rules, and the history that nobody can go past.
func TestPolicies_RulesAndHistoryOfTheTable(t *testing.T) {
	t.Parallel()
	pool := pgtest.Pool(t)
	refused := func(rule, sql string, args ...any) {
		_, err := pool.Exec(t.Context(), sql, args...)
		var server *pgconn.PgError
		require.ErrorAs(t, err, &server, sql)
		require.Equal(t, rule, server.ConstraintName, sql)
	}
	const insert = `INSERT INTO idempotency.policies (scope, name, enforcement, percentage, strategy, wait, actor, reason) VALUES `
	refused("policies_scope_check", insert+`('tenant', 'x', 'shadow', 100, NULL, NULL, 'a', 'b')`)
	refused("policies_name_check", insert+`('all', 'x', 'shadow', 100, NULL, NULL, 'a', 'b')`)
	refused("policies_name_check", insert+`('prefix', '', 'shadow', 100, NULL, NULL, 'a', 'b')`)
	refused("policies_enforcement_check", insert+`('all', '', 'on', 100, NULL, NULL, 'a', 'b')`)
	refused("policies_percentage_check", insert+`('all', '', 'enforce', 101, NULL, NULL, 'a', 'b')`)
	refused("policies_share_check", insert+`('all', '', 'shadow', 5, NULL, NULL, 'a', 'b')`)
	refused("policies_strategy_check", insert+`('all', '', 'enforce', 100, 'CACHE', NULL, 'a', 'b')`)
	refused("policies_wait_check", insert+`('all', '', 'enforce', 100, NULL, '6 min', 'a', 'b')`)
	refused("policies_wait_check", insert+`('all', '', 'enforce', 100, NULL, '-1 s', 'a', 'b')`)
	for _, blame := range []string{`NULL, NULL`, `'ada', NULL`, `NULL, 'why'`, `' ', 'why'`, `'ada', ''`} {
		refused("policies_off_check", insert+`('all', '', 'off', 100, NULL, NULL, `+blame+`)`)
	}

	for range 2 { // an INSERT, and one that ends as an UPDATE
		exec(t, pool, insert+`('all', '', 'off', 100, NULL, NULL, 'ada', 'incident') ON CONFLICT (scope, name) DO UPDATE SET actor = 'ada', reason = 'incident 17'`)
	}
	_, err := pool.Exec(t.Context(), `UPDATE idempotency.policies SET scope = 'prefix', name = 'x'`)
	require.ErrorContains(t, err, "scope and name of a policy are not changed")
	require.NoError(t, pgx.BeginFunc(t.Context(), pool, func(tx pgx.Tx) error {
		_, err := tx.Exec(t.Context(), `SELECT set_config('idempotency.actor', 'bob', true), set_config('idempotency.reason', 'over', true)`)
		require.NoError(t, err)
		_, err = tx.Exec(t.Context(), `DELETE FROM idempotency.policies`)
		return err
	}))
	rolledBack := errors.New("no")
	require.ErrorIs(t, pgx.BeginFunc(t.Context(), pool, func(tx pgx.Tx) error {
		_, err := tx.Exec(t.Context(), insert+`('all', '', 'shadow', 100, NULL, NULL, 'eve', 'x')`)
		return errors.Join(rolledBack, err)
	}), rolledBack)
	exec(t, pool, insert+`('prefix', 'order.', 'shadow', 100, NULL, NULL, 'ada', 'release 4.2')`)
	for _, sql := range []string{
		`DELETE FROM idempotency.policy_changes`, `UPDATE idempotency.policy_changes SET actor = 'eve'`, `TRUNCATE idempotency.policy_changes`,
		`TRUNCATE idempotency.policies`, // its rows would be gone without a word
	} {
		_, err := pool.Exec(t.Context(), sql)
		require.ErrorContains(t, err, "the history of policies is kept")
	}
	changes, err := idempotency.NewStore(pgx.QueryExecModeExec).PolicyChanges(t.Context(), pool, 10)
	require.NoError(t, err)
	var told []string
	for _, c := range changes {
		told = append(told, c.Actor+": "+c.Reason)
		require.NotEmpty(t, c.ChangedBy)
		require.WithinDuration(t, changes[0].ChangedAt, c.ChangedAt, time.Minute)
	}
	require.Equal(t, []string{"ada: release 4.2", "bob: over", "ada: incident 17", "ada: incident"}, told)
	require.Contains(t, changes[2].Before, `"reason": "incident"`)
	require.Contains(t, changes[2].After, `"reason": "incident 17"`)
	require.Empty(t, changes[1].After)
}

func TestPolicies_WrongConfigurationNamesFieldAndRule(t *testing.T) {
	t.Parallel()
	pool := pgtest.Pool(t)
	_, err := idempotency.NewPolicies(nil, nil)
	require.ErrorContains(t, err, "db must not be nil")
	for rule, cfg := range map[string]idempotency.PoliciesConfig{
		"PoliciesConfig.Interval must be from 100ms to 1m": {Interval: time.Millisecond},
		"PoliciesConfig.Timeout must be from 10ms to 1m":   {Timeout: -1},
	} {
		_, err := idempotency.NewPolicies(pool, &cfg)
		require.ErrorIs(t, err, idempotency.ErrConfig)
		require.ErrorContains(t, err, rule)
	}
}

// unreachable is a database that cannot be asked.
type unreachable struct{ err error }

func (u unreachable) QueryRow(context.Context, string, ...any) pgx.Row { panic("not used") }
func (u unreachable) Exec(context.Context, string, ...any) (pgconn.CommandTag, error) {
	return pgconn.CommandTag{}, u.err
}
func (u unreachable) Query(context.Context, string, ...any) (pgx.Rows, error) { return nil, u.err }

// Run tells its errors, goes on, and keeps its pace.
func TestPolicies_RunGoesOn(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		away := errors.New("away")
		var mu sync.Mutex
		var told []error
		p, err := idempotency.NewPolicies(unreachable{away}, &idempotency.PoliciesConfig{OnReport: func(_ context.Context, _ idempotency.PoliciesReport, err error) {
			mu.Lock()
			defer mu.Unlock()
			told = append(told, err)
		}})
		require.NoError(t, err)
		ctx, stop := context.WithTimeout(t.Context(), time.Minute)
		defer stop()
		p.Run(ctx)
		require.InDelta(t, 12, len(told), 2, "one in 5 s")
		for _, err := range told {
			require.ErrorIs(t, err, away)
		}
	})
}
