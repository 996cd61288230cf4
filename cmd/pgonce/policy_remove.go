package main

import (
	"context"
	"fmt"
	"strings"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/spf13/cobra"

	"github.com/pgonce/pgonce/idempotency"
)

func (a *app) newPolicyRemove() *cobra.Command {
	var c policyFlags
	cmd := &cobra.Command{
		Use:     "remove (--operation NAME | --prefix BEGINNING | --all) --reason WHY",
		Short:   "Remove a policy: a wider one counts, or what the program declares, enforced",
		Example: "  pgonce policy remove --operation order.create --reason 'release 4.2 is done'",
		Args:    cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if err := c.blame.complete(); err != nil {
				return err
			}
			return a.withStore(cmd.Context(), func(ctx context.Context, pool *pgxpool.Pool, s *idempotency.Store) error {
				return a.removePolicy(ctx, pool, s, &c)
			})
		},
	}
	c.add(cmd)
	return cmd
}

// removePolicy shows what will count afterwards, asks, and removes the policy.
func (a *app) removePolicy(ctx context.Context, pool *pgxpool.Pool, s *idempotency.Store, c *policyFlags) error {
	scope, name := c.scope()
	policy := &idempotency.Policy{Scope: scope, Name: name}
	all, _, err := s.ListPolicies(ctx, pool) // whatever is not known of a row: it may be removed
	if err != nil {
		return err
	}
	for i := range all {
		if all[i].Scope == scope && all[i].Name == name {
			a.notef("now:  %s\n", printable(strings.Join(cells(&all[i])[:6], "  ")))
		}
	}
	question := fmt.Sprintf("Remove the policy of %s?", printable(policy.String()))
	wide := wider(all, policy)
	if wide == nil {
		a.notef("then: enforced as it is declared\n")
	} else {
		a.notef("then: %s\n", printable(strings.Join(cells(wide)[:6], "  ")))
		if warning := warningOf(wide); warning != "" && c.blame.yes {
			a.notef("%s\n", warning)
		} else if warning != "" {
			question = warning + "\n" + question
		}
	}
	if err := a.confirm(c.blame.yes, question); err != nil {
		return err
	}
	removed, err := s.RemovePolicy(ctx, pool, scope, name, c.blame.Blame)
	switch {
	case err != nil:
		return explainedPolicy(err)
	case a.json:
		return a.printJSON(map[string]any{"policy": policy.String(), "removed": removed})
	case !removed:
		a.printf("%s: there is none\n", printable(policy.String()))
	default:
		a.printf("%s: removed\n", printable(policy.String()))
	}
	return nil
}

// wider is the policy that counts where this one is removed, nil: none.
func wider(all []idempotency.Policy, narrow *idempotency.Policy) (found *idempotency.Policy) {
	for i := range all {
		p := &all[i]
		covers := narrow.Scope != idempotency.ScopeAll && (p.Scope == idempotency.ScopeAll || p.Scope == idempotency.ScopePrefix &&
			strings.HasPrefix(narrow.Name, p.Name) && (narrow.Scope == idempotency.ScopeOperation || p.Name != narrow.Name))
		if covers && (found == nil || len(p.Name) > len(found.Name)) {
			found = p
		}
	}
	return found
}

// warningOf is what is to be said before a policy gets its way; empty: nothing gets weaker.
func warningOf(p *idempotency.Policy) string {
	switch {
	case p.Enforcement == idempotency.EnforcementOff:
		return offWarning
	case p.Enforcement == idempotency.EnforcementShadow || p.Percentage < 100:
		return shadowWarning
	}
	return ""
}
