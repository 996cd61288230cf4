package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/spf13/cobra"

	"github.com/pgonce/pgonce/idempotency"
)

// policyFlags name a policy, and say who changes it.
type policyFlags struct {
	operation, prefix string
	all               bool
	blame             changeFlags
}

func (p *policyFlags) add(cmd *cobra.Command) {
	flags := cmd.Flags()
	flags.StringVar(&p.operation, "operation", "", "the operation of this name")
	flags.StringVar(&p.prefix, "prefix", "", "all operations whose names begin so, for example order.")
	flags.BoolVar(&p.all, "all", false, "all operations")
	flags.StringVar(&p.blame.Reason, "reason", "", "why, for those who look at it later (required)")
	flags.StringVar(&p.blame.Actor, "actor", "", "who (default: the user of this machine)")
	flags.BoolVarP(&p.blame.yes, "yes", "y", false, "do not ask")
	cmd.MarkFlagsMutuallyExclusive("operation", "prefix", "all")
	cmd.MarkFlagsOneRequired("operation", "prefix", "all")
	_ = cmd.MarkFlagRequired("reason")
}

func (p *policyFlags) scope() (idempotency.Scope, string) {
	switch {
	case p.all:
		return idempotency.ScopeAll, ""
	case p.prefix != "":
		return idempotency.ScopePrefix, p.prefix
	}
	return idempotency.ScopeOperation, p.operation
}

// policyChanger is how set, off and on change a policy.
type policyChanger struct {
	policyFlags
	change  func(*idempotency.Policy)
	warning string
}

// do shows what it is about to change, asks, and changes it.
func (a *app) changePolicy(ctx context.Context, c *policyChanger) error {
	if err := c.blame.complete(); err != nil {
		return err
	}
	scope, name := c.scope()
	planned := &idempotency.Policy{Scope: scope, Name: name, Enforcement: idempotency.EnforcementEnforce, Percentage: 100}
	return a.withStore(ctx, func(ctx context.Context, pool *pgxpool.Pool, s *idempotency.Store) error {
		all, doubts, err := s.ListPolicies(ctx, pool)
		if err := errors.Join(err, doubts); err != nil {
			return err
		}
		for i := range all {
			if all[i].Scope == scope && all[i].Name == name {
				was := all[i]
				planned = &was
				a.notef("now:  %s\n", printable(strings.Join(cells(&all[i])[:6], "  ")))
			}
		}
		c.change(planned)
		planned.Blame = c.blame.Blame
		if err := planned.Validate(); err != nil {
			return err
		}
		a.notef("then: %s\n", printable(strings.Join(cells(planned)[:6], "  ")))
		if kept := narrower(all, planned); len(kept) > 0 {
			a.notef("These are narrower, and stay as they are: %s\n", printable(joined(kept)))
		}
		if c.warning != "" && c.blame.yes {
			a.notef("%s\n", c.warning)
		}
		if err := a.confirm(c.blame.yes, c.warning); err != nil {
			return err
		}
		_, after, err := s.ChangePolicy(ctx, pool, scope, name, c.blame.Blame, c.change)
		if err != nil {
			return explainedPolicy(err)
		}
		if a.json {
			return a.printJSON(lineOf(after))
		}
		a.printf("%s: %s\n", printable(after.String()), after.Enforcement)
		return nil
	})
}

// narrower are the policies that a wider one does not reach.
func narrower(all []idempotency.Policy, wide *idempotency.Policy) (names []string) {
	for i := range all {
		p := &all[i]
		below := p.Scope != idempotency.ScopeAll && (wide.Scope == idempotency.ScopeAll ||
			wide.Scope == idempotency.ScopePrefix && strings.HasPrefix(p.Name, wide.Name) && (p.Scope == idempotency.ScopeOperation || p.Name != wide.Name))
		if below {
			names = append(names, p.String()+" ("+string(p.Enforcement)+")")
		}
	}
	return names
}

func explainedPolicy(err error) error {
	if errors.Is(err, idempotency.ErrOutcomeUnknown) {
		return fmt.Errorf("%w\nThe change may be stored or not. Look: pgonce policy list", err)
	}
	return err
}

func (a *app) newPolicySet() *cobra.Command {
	var c policyChanger
	var enforcement, strategy, local, wait string
	var percentage int
	cmd := &cobra.Command{
		Use:   "set (--operation NAME | --prefix BEGINNING | --all) --reason WHY",
		Short: "Change a policy, or make one; what is not named stays as it is",
		Long: "Change a policy, or make one that enforces everything but for what is said here. What is not named stays as it is.\n\n" +
			"shadow: the first outcome of a key is recorded, later calls are executed and logged: pgonce policy report.\n" +
			"--percentage 5: this share of the keys is enforced, the others are in shadow. \"declared\" is what the program says.",
		Example: "  pgonce policy set --operation order.create --enforcement shadow --reason 'release 4.2'\n" +
			"  pgonce policy set --operation order.create --percentage 5 --reason 'release 4.2, second day'",
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			var changes []func(*idempotency.Policy)
			given := func(name string, change func(*idempotency.Policy)) {
				if cmd.Flags().Changed(name) {
					changes = append(changes, change)
				}
			}
			if enforcement == string(idempotency.EnforcementOff) {
				return usagef("--enforcement off is the kill switch: pgonce policy off")
			}
			given("enforcement", func(p *idempotency.Policy) {
				p.Enforcement, p.Percentage = idempotency.Enforcement(enforcement), 100
			})
			given("percentage", func(p *idempotency.Policy) {
				if p.Percentage = percentage; !cmd.Flags().Changed("enforcement") {
					p.Enforcement = idempotency.EnforcementEnforce
				}
			})
			if cmd.Flags().Changed("strategy") && strategy == "" {
				return usagef("--strategy must be STRICT, HYBRID or %s", declared)
			}
			given("strategy", func(p *idempotency.Policy) {
				if p.Strategy = idempotency.Strategy(strings.ToUpper(strategy)); strategy == declared {
					p.Strategy = ""
				}
			})
			on := local == "on"
			// Given and empty is no choice, but a variable that was never set.
			if cmd.Flags().Changed("local") && local != declared && local != "off" && !on {
				return usagef("--local must be on, off or %s", declared)
			}
			given("local", func(p *idempotency.Policy) {
				if p.Local = &on; local == declared {
					p.Local = nil
				}
			})
			var bound time.Duration
			if cmd.Flags().Changed("wait") && wait != declared {
				var err error
				if bound, err = time.ParseDuration(wait); err != nil {
					return usagef("--wait must be a time such as 500ms, 0, or %s", declared)
				}
			}
			given("wait", func(p *idempotency.Policy) {
				if p.Wait = &bound; wait == declared {
					p.Wait = nil
				}
			})
			if len(changes) == 0 {
				return usagef("what is to be changed? give --enforcement, --percentage, --strategy, --local or --wait")
			}
			c.change = func(p *idempotency.Policy) {
				for _, change := range changes {
					change(p)
				}
			}
			if enforcement == string(idempotency.EnforcementShadow) || cmd.Flags().Changed("percentage") && percentage < 100 {
				c.warning = shadowWarning
			}
			return a.changePolicy(cmd.Context(), &c)
		},
	}
	c.add(cmd)
	flags := cmd.Flags()
	flags.StringVar(&enforcement, "enforcement", "", "enforce or shadow; off is a command of its own")
	flags.IntVar(&percentage, "percentage", 100, "share of the keys that is enforced, the others are in shadow")
	flags.StringVar(&strategy, "strategy", "", "STRICT (PostgreSQL alone), HYBRID (fronts too), or "+declared)
	flags.StringVar(&local, "local", "", "whether outcomes are kept in the processes' memory: on, off or "+declared)
	flags.StringVar(&wait, "wait", "", fmt.Sprintf("how long a duplicate waits: 0 to %v, or %s", idempotency.MaxPolicyWait, declared))
	return cmd
}

// declared is what the program says.
const declared = "declared"

// What is said before something gets weaker.
const (
	shadowWarning = "In shadow a duplicate IS EXECUTED. Only new operations, or those that bear it, belong there."
	offWarning    = "KILL SWITCH. Records that exist are replayed, none is written: a retry of anything new IS EXECUTED AGAIN. Every execution\n" +
		"is logged, and somebody must reconcile them afterwards (pgonce policy bypassed). Leased operations stay enforced."
)

func (a *app) newPolicyOff() *cobra.Command {
	c := policyChanger{
		change:  func(p *idempotency.Policy) { p.Enforcement, p.Percentage = idempotency.EnforcementOff, 100 },
		warning: offWarning,
	}
	cmd := &cobra.Command{
		Use:   "off (--operation NAME | --prefix BEGINNING | --all) --reason WHY",
		Short: "Kill switch: execute without records, and log every execution; DUPLICATES ARE EXECUTED",
		Long: c.warning + "\n\nProcesses obey within their interval, 5 s by default. Policies that are narrower stay as they are, and are named." +
			"\nThe switch itself is in pgonce policy history, for ever.",
		Example: "  pgonce policy off --prefix order. --reason 'incident 17: records refuse inserts'",
		Args:    cobra.NoArgs,
		RunE:    func(cmd *cobra.Command, _ []string) error { return a.changePolicy(cmd.Context(), &c) },
	}
	c.add(cmd)
	return cmd
}

func (a *app) newPolicyOn() *cobra.Command {
	c := policyChanger{
		change: func(p *idempotency.Policy) { p.Enforcement, p.Percentage = idempotency.EnforcementEnforce, 100 },
		warning: "Keys that were executed without a record are refused from now on (410, done and result gone), until their retention is over\n" +
			"or somebody has reconciled them: pgonce policy bypassed.",
	}
	cmd := &cobra.Command{
		Use:     "on (--operation NAME | --prefix BEGINNING | --all) --reason WHY",
		Short:   "Enforce again, all keys",
		Long:    "Enforce all keys of the policy, whatever it was. Strategy, local front and wait stay as they are.\n\n" + c.warning,
		Example: "  pgonce policy on --prefix order. --reason 'incident 17 is over'",
		Args:    cobra.NoArgs,
		RunE:    func(cmd *cobra.Command, _ []string) error { return a.changePolicy(cmd.Context(), &c) },
	}
	c.add(cmd)
	return cmd
}

// whatChanged names the columns that a change has changed.
func whatChanged(c *idempotency.PolicyChange) (string, error) {
	before, after := map[string]any{}, map[string]any{}
	for text, row := range map[string]map[string]any{c.Before: before, c.After: after} {
		if text == "" {
			continue
		}
		if err := json.Unmarshal([]byte(text), &row); err != nil {
			return "", fmt.Errorf("change %d of policies: %w", c.ID, err)
		}
	}
	if c.After == "" {
		return fmt.Sprintf("removed, was %v", before["enforcement"]), nil
	}
	var parts []string
	for _, column := range []string{"enforcement", "percentage", "strategy", "local_front", "wait"} {
		switch from, to := before[column], after[column]; {
		case fmt.Sprint(from) == fmt.Sprint(to):
		case c.Before == "":
			parts = append(parts, fmt.Sprintf("%s %v", column, to))
		default:
			parts = append(parts, fmt.Sprintf("%s %v -> %v", column, shown(from), shown(to)))
		}
	}
	if len(parts) == 0 {
		parts = append(parts, "the same")
	}
	return strings.Join(slices.Clip(parts), ", "), nil
}

func shown(v any) any {
	if v == nil {
		return declared
	}
	return v
}
