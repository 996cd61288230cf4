package main

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgonce/pgonce/idempotency"
)

// maxBypassedCounted bounds the count.
const maxBypassedCounted = 1000

func lookAtPolicies(ctx context.Context, pool *pgxpool.Pool, f *findings) error {
	s := newStore()
	all, doubts, err := s.ListPolicies(ctx, pool)
	switch {
	case errors.Is(err, idempotency.ErrSchema), errors.Is(err, idempotency.ErrReadOnly):
		return nil // told already
	case denied(err):
		f.bad("policies", "GRANT SELECT ON idempotency.policies, idempotency.policy_changes TO <service>; GRANT SELECT, INSERT ON idempotency.bypasses TO <service>",
			"may not be read, so that everything is enforced: %v", err)
		return nil
	case err != nil:
		return err
	}
	if doubts != nil {
		f.bad("policies", "update the processes, or mend the row", "no process of this release can honour all of them: %v", doubts)
	}
	if err := lookAtNames(ctx, pool, s, all, f); err != nil {
		return err
	}
	for i := range all {
		p := &all[i]
		switch {
		case p.Enforcement == idempotency.EnforcementOff:
			f.warn("kill switch", "pgonce policy on, with the same "+flagOf(p)+", when it is over; then pgonce policy bypassed",
				"%s is OFF since %s, by %s: %s", p, moment(p.ChangedAt), p.Actor, p.Reason)
		case p.Enforcement == idempotency.EnforcementShadow:
			f.note("policies", "pgonce policy report says what enforce would do", "%s is in shadow since %s: duplicates are executed", p, moment(p.ChangedAt))
		case p.Percentage < 100:
			f.note("policies", "", "%s enforces %d %% of the keys since %s, the others are in shadow", p, p.Percentage, moment(p.ChangedAt))
		}
	}
	return lookAtBypassed(ctx, pool, s, len(all), f)
}

func flagOf(p *idempotency.Policy) string {
	switch p.Scope {
	case idempotency.ScopeAll:
		return "--all"
	case idempotency.ScopePrefix:
		return "--prefix"
	}
	return "--operation"
}

// lookAtNames finds policies that reach nothing, and those that leased operations do not obey.
func lookAtNames(ctx context.Context, pool *pgxpool.Pool, s *idempotency.Store, all []idempotency.Policy, f *findings) error {
	if len(all) == 0 {
		return nil
	}
	seen, err := s.OperationsSeen(ctx, pool)
	if err != nil {
		return err
	}
	running, _, err := s.List(ctx, pool, &idempotency.ListFilter{State: idempotency.StateProcessing}, maxStaleCounted)
	if err != nil {
		return err
	}
	for i := range all {
		p := &all[i]
		reaches := func(name string) bool {
			return p.Scope == idempotency.ScopeAll || p.Scope == idempotency.ScopePrefix && strings.HasPrefix(name, p.Name) || name == p.Name
		}
		if len(seen) > 0 && !slices.ContainsFunc(seen, func(o idempotency.OperationSeen) bool { return reaches(o.Name) }) {
			f.note("policies", "if the operation is not new: compare the name with pgonce list", "none of the latest records is of an operation that %s is for", p)
		}
		if p.Enforcement == idempotency.EnforcementEnforce && p.Percentage == 100 {
			continue
		}
		leased := slices.IndexFunc(running, func(l idempotency.AuditLine) bool { return reaches(l.Key.Operation()) })
		if leased >= 0 {
			f.warn("policies", "leased operations are always enforced, since what they ask of others cannot be rolled back: end their calls in the service",
				"%s says %s, which %s does not obey: it is leased", p, p.Enforcement, running[leased].Key.Operation())
		}
	}
	return nil
}

func lookAtBypassed(ctx context.Context, pool *pgxpool.Pool, s *idempotency.Store, policies int, f *findings) error {
	n, err := s.CountBypassed(ctx, pool, maxBypassedCounted)
	if err != nil {
		return err
	}
	if n == 0 {
		f.ok("policies", "%d, and nothing to reconcile", policies)
		return nil
	}
	count := fmt.Sprint(n)
	if n == maxBypassedCounted {
		count += " or more"
	}
	f.warn("bypassed keys", "pgonce policy bypassed, then pgonce policy reconcile for each", "%s executions without a record that nobody has reconciled", count)
	return nil
}
