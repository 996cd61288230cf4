package main

import (
	"context"
	"fmt"
	"strconv"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/spf13/cobra"

	"github.com/pgonce/pgonce/idempotency"
)

func (a *app) newPolicy() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "policy",
		Short: "Release gradually, switch off, and see what was executed without a record",
		Long: "Change what running processes do with keys, and see what came of it. A policy is for one operation, for all whose names\n" +
			"begin alike, or for all; the narrowest counts, as a whole. Processes obey within seconds; a call keeps what it began with.",
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error { return cmd.Help() },
	}
	cmd.AddCommand(
		a.newPolicyList(), a.newPolicyHistory(), a.newPolicySet(), a.newPolicyOff(), a.newPolicyOn(), a.newPolicyRemove(),
		a.newPolicyReport(), a.newPolicyReused(), a.newPolicyBypassed(), a.newPolicyReconcile(),
	)
	return cmd
}

// policyLine is a policy for scripts.
type policyLine struct {
	Policy      string     `json:"policy"` // order.create, order.*, or *
	Scope       string     `json:"scope"`
	Name        string     `json:"name"`
	Enforcement string     `json:"enforcement"`
	Percentage  int        `json:"percentage"`
	Strategy    string     `json:"strategy,omitempty"`
	Local       *bool      `json:"local_front,omitempty"`
	WaitSeconds *float64   `json:"wait_seconds,omitempty"`
	Actor       string     `json:"actor"`
	Reason      string     `json:"reason"`
	ChangedAt   *time.Time `json:"changed_at,omitempty"`
	Change      int64      `json:"change,omitempty"`
}

func lineOf(p *idempotency.Policy) policyLine {
	l := policyLine{
		Policy: p.String(), Scope: string(p.Scope), Name: p.Name, Enforcement: string(p.Enforcement), Percentage: p.Percentage,
		Strategy: string(p.Strategy), Local: p.Local, Actor: p.Actor, Reason: p.Reason, ChangedAt: optionalTime(p.ChangedAt), Change: p.Change,
	}
	if p.Wait != nil {
		seconds := p.Wait.Seconds()
		l.WaitSeconds = &seconds
	}
	return l
}

var policyHeads = []string{"POLICY", "ENFORCEMENT", "SHARE", "STRATEGY", "LOCAL", "WAIT", "CHANGED", "ACTOR", "REASON"}

// cells are a policy for people. A minus is what the program declares.
func cells(p *idempotency.Policy) []string {
	share, strategy, local, wait := "", string(p.Strategy), "-", "-"
	if p.Enforcement == idempotency.EnforcementEnforce {
		share = strconv.Itoa(p.Percentage) + " %"
	}
	if strategy == "" {
		strategy = "-"
	}
	if p.Local != nil {
		local = map[bool]string{true: "on", false: "off"}[*p.Local]
	}
	if p.Wait != nil {
		wait = p.Wait.String()
	}
	return []string{p.String(), string(p.Enforcement), share, strategy, local, wait, moment(p.ChangedAt), p.Actor, p.Reason}
}

func (a *app) newPolicyList() *cobra.Command {
	return &cobra.Command{
		Use:     "list",
		Short:   "List the policies; without any, everything is enforced as it is declared",
		Example: "  pgonce policy list",
		Args:    cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			return a.withStore(cmd.Context(), func(ctx context.Context, pool *pgxpool.Pool, s *idempotency.Store) error {
				all, doubts, err := s.ListPolicies(ctx, pool)
				if err != nil {
					return err
				}
				if a.json {
					lines := make([]policyLine, 0, len(all))
					for i := range all {
						lines = append(lines, lineOf(&all[i]))
					}
					if err := a.printJSON(map[string]any{"policies": lines}); err != nil {
						return err
					}
				} else if len(all) > 0 {
					rows := [][]string{policyHeads}
					for i := range all {
						rows = append(rows, cells(&all[i]))
					}
					table(a.out, rows)
				}
				if len(all) == 0 {
					a.notef("no policies: everything is enforced as it is declared\n")
				}
				return doubts
			})
		},
	}
}

func (a *app) newPolicyHistory() *cobra.Command {
	var limit int
	cmd := &cobra.Command{
		Use:     "history",
		Short:   "List who changed which policy, when, why, and from what to what",
		Example: "  pgonce policy history --limit 20",
		Args:    cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if limit < 1 || limit > maxList {
				return usagef("--limit must be from 1 to %d", maxList)
			}
			return a.withStore(cmd.Context(), func(ctx context.Context, pool *pgxpool.Pool, s *idempotency.Store) error {
				changes, err := s.PolicyChanges(ctx, pool, limit)
				if err != nil {
					return err
				}
				return a.printHistory(changes)
			})
		},
	}
	cmd.Flags().IntVar(&limit, "limit", 50, fmt.Sprintf("changes, the youngest first, at most %d", maxList))
	return cmd
}

// policyChange is a change for scripts.
type policyChange struct {
	ID        int64     `json:"id"`
	Policy    string    `json:"policy"`
	At        time.Time `json:"at"`
	Actor     string    `json:"actor"`
	Reason    string    `json:"reason"`
	ChangedBy string    `json:"changed_by"`
	Before    rawObject `json:"before"`
	After     rawObject `json:"after"`
}

// rawObject is JSON as it is stored; empty: null.
type rawObject string

func (r rawObject) MarshalJSON() ([]byte, error) {
	if r == "" {
		return []byte("null"), nil
	}
	return []byte(r), nil
}

func (a *app) printHistory(changes []idempotency.PolicyChange) error {
	lines := make([]policyChange, 0, len(changes))
	rows := [][]string{{"CHANGE", "AT", "POLICY", "ACTOR", "REASON", "USER", "WHAT"}}
	for i := range changes {
		c := &changes[i]
		name := (&idempotency.Policy{Scope: c.Scope, Name: c.Name}).String()
		lines = append(lines, policyChange{c.ID, name, c.ChangedAt, c.Actor, c.Reason, c.ChangedBy, rawObject(c.Before), rawObject(c.After)})
		what, err := whatChanged(c)
		if err != nil {
			return err
		}
		rows = append(rows, []string{strconv.FormatInt(c.ID, 10), moment(c.ChangedAt), name, c.Actor, c.Reason, c.ChangedBy, what})
	}
	if a.json {
		return a.printJSON(map[string]any{"changes": lines})
	}
	if len(changes) == 0 {
		a.notef("no policy was ever changed\n")
		return nil
	}
	table(a.out, rows)
	return nil
}
