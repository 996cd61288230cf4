package main

import (
	"context"
	"fmt"
	"strconv"
	"strings"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/spf13/cobra"

	"github.com/pgonce/pgonce/idempotency"
)

func (a *app) newPolicyReport() *cobra.Command {
	var operation string
	var last time.Duration
	cmd := &cobra.Command{
		Use:   "report",
		Short: "Say what enforce would have done with the calls that shadow has executed",
		Long: "Say what enforce would have done with the calls that shadow has executed, by operation, with an example of each.\n\n" +
			"REPLAY: the first outcome would have been given again. MISMATCH: refused, since another payload has the key; look at these\n" +
			"before you enforce. IN_PROGRESS: would have waited. GONE: told that it is done. NEWER: refused.",
		Example: "  pgonce policy report --last 24h --operation order.create",
		Args:    cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if last <= 0 {
				return usagef("--last must be positive")
			}
			return a.withStore(cmd.Context(), func(ctx context.Context, pool *pgxpool.Pool, s *idempotency.Store) error {
				lines, err := s.ShadowReport(ctx, pool, operation, last)
				if err != nil {
					return err
				}
				return a.printReport(lines)
			})
		},
	}
	cmd.Flags().StringVar(&operation, "operation", "", "of this operation only")
	cmd.Flags().DurationVar(&last, "last", 24*time.Hour, "how far back")
	return cmd
}

// shadowLine is a line for scripts.
type shadowLine struct {
	Operation    string    `json:"operation"`
	WouldBe      string    `json:"would_be"`
	Calls        int64     `json:"calls"`
	Keys         int64     `json:"keys"`
	FirstAt      time.Time `json:"first_at"`
	LastAt       time.Time `json:"last_at"`
	ExampleKey   string    `json:"example_key"`
	ExampleTrace string    `json:"example_trace,omitempty"`
}

func (a *app) printReport(lines []idempotency.ShadowLine) error {
	if a.json {
		views := make([]shadowLine, 0, len(lines))
		for _, l := range lines {
			views = append(views, shadowLine{l.Operation, string(l.WouldBe), l.Calls, l.Keys, l.FirstAt, l.LastAt, l.ExampleKey, l.ExampleTrace})
		}
		return a.printJSON(map[string]any{"lines": views})
	}
	if len(lines) == 0 {
		a.notef("shadow has executed nothing that enforce would have treated differently\n")
		return nil
	}
	rows := [][]string{{"OPERATION", "WOULD BE", "CALLS", "KEYS", "FIRST", "LAST", "EXAMPLE", "TRACE"}}
	for _, l := range lines {
		rows = append(rows, []string{
			l.Operation, string(l.WouldBe), strconv.FormatInt(l.Calls, 10), strconv.FormatInt(l.Keys, 10), moment(l.FirstAt), moment(l.LastAt),
			l.ExampleKey, l.ExampleTrace,
		})
	}
	table(a.out, rows)
	return nil
}

func (a *app) newPolicyReused() *cobra.Command {
	var limit int
	var after string
	cmd := &cobra.Command{
		Use:   "reused",
		Short: "List values that one tenant uses as keys of several operations",
		Long: "List values that one tenant uses as keys of several operations. They are several keys, so nothing is wrong; but a client\n" +
			"that takes one value for one request may not know. Reads the index of the primary key until it has found --limit of them.",
		Example: "  pgonce policy reused --limit 20",
		Args:    cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if limit < 1 || limit > maxList {
				return usagef("--limit must be from 1 to %d", maxList)
			}
			last, err := readCursor(after)
			if err != nil {
				return err
			}
			var from *idempotency.ReusedKey
			if !last.IsZero() {
				from = &idempotency.ReusedKey{Tenant: last.Tenant(), Value: last.Value()}
			}
			return a.withStore(cmd.Context(), func(ctx context.Context, pool *pgxpool.Pool, s *idempotency.Store) error {
				keys, err := s.ReusedKeys(ctx, pool, from, limit)
				if err != nil {
					return err
				}
				return a.printReused(keys, limit)
			})
		},
	}
	cmd.Flags().IntVar(&limit, "limit", 50, fmt.Sprintf("values of a page, at most %d", maxList))
	cmd.Flags().StringVar(&after, "after", "", "the cursor that the page before ended with")
	return cmd
}

func (a *app) printReused(keys []idempotency.ReusedKey, limit int) error {
	cursor := ""
	if len(keys) == limit {
		last := keys[len(keys)-1]
		key, err := idempotency.NewKey(last.Tenant, last.Operations[0], last.Value)
		if err != nil {
			return err
		}
		cursor = writeCursor(key)
	}
	if a.json {
		type line struct {
			Key        string   `json:"key"`
			Tenant     string   `json:"tenant"`
			Operations []string `json:"operations"`
		}
		lines := make([]line, 0, len(keys))
		for _, k := range keys {
			lines = append(lines, line{k.Value, k.Tenant, k.Operations})
		}
		return a.printJSON(map[string]any{"keys": lines, "after": cursor})
	}
	if len(keys) == 0 {
		a.notef("no value is a key of several operations\n")
		return nil
	}
	rows := [][]string{{"KEY", "TENANT", "OPERATIONS"}}
	for _, k := range keys {
		rows = append(rows, []string{k.Value, k.Tenant, joined(k.Operations)})
	}
	table(a.out, rows)
	if cursor != "" {
		a.notef("there may be more: --after %s\n", cursor)
	}
	return nil
}

func (a *app) newPolicyBypassed() *cobra.Command {
	var f idempotency.BypassFilter
	var limit int
	var after string
	cmd := &cobra.Command{
		Use:   "bypassed",
		Short: "List keys that the kill switch has let through: what somebody must reconcile",
		Long: "List keys that were executed without a record: while the kill switch was on, or in shadow beside a running call. A key that was\n" +
			"executed more than once, or has a record of a success meanwhile, was DONE TWICE. Under enforce these keys are refused, as done with\n" +
			"their result gone, until their retention is over or somebody decides: pgonce policy reconcile.",
		Example: "  pgonce policy bypassed --duplicates --operation order.create",
		Args:    cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if limit < 1 || limit > maxList {
				return usagef("--limit must be from 1 to %d", maxList)
			}
			var err error
			if f.After, err = readCursor(after); err != nil {
				return err
			}
			return a.withStore(cmd.Context(), func(ctx context.Context, pool *pgxpool.Pool, s *idempotency.Store) error {
				keys, more, err := s.Bypassed(ctx, pool, &f, limit)
				if err != nil {
					return err
				}
				return a.printBypassed(keys, more)
			})
		},
	}
	flags := cmd.Flags()
	flags.StringVar(&f.Operation, "operation", "", "of this operation only")
	flags.BoolVar(&f.Duplicates, "duplicates", false, "only those that were done more than once")
	flags.BoolVar(&f.Reconciled, "reconciled", false, "also those that somebody has called done")
	flags.IntVar(&limit, "limit", 50, fmt.Sprintf("keys of a page, at most %d", maxList))
	flags.StringVar(&after, "after", "", "the cursor that the page before ended with")
	return cmd
}

// bypassedLine is a key for scripts.
type bypassedLine struct {
	Tenant       string    `json:"tenant"`
	Operation    string    `json:"operation"`
	Key          string    `json:"key"`
	Executions   int64     `json:"executions"`
	Payloads     int64     `json:"payloads"`
	Record       string    `json:"record,omitempty"`
	Duplicate    bool      `json:"duplicate"`
	Outcome      string    `json:"outcome"`
	FirstAt      time.Time `json:"first_at"`
	LastAt       time.Time `json:"last_at"`
	ExampleTrace string    `json:"example_trace,omitempty"`
	Change       int64     `json:"policy_change"`
	Resolution   string    `json:"resolution,omitempty"`
}

func (a *app) printBypassed(keys []idempotency.BypassedKey, more bool) error {
	cursor := ""
	if more {
		cursor = writeCursor(keys[len(keys)-1].Key)
	}
	if a.json {
		lines := make([]bypassedLine, 0, len(keys))
		for i := range keys {
			k := &keys[i]
			lines = append(lines, bypassedLine{
				k.Key.Tenant(), k.Key.Operation(), k.Key.Value(), k.Executions, k.Payloads, string(k.Record), k.Duplicate(), k.Outcome,
				k.FirstAt, k.LastAt, k.ExampleTrace, k.Change, string(k.Resolution),
			})
		}
		return a.printJSON(map[string]any{"keys": lines, "more": more, "after": cursor})
	}
	if len(keys) == 0 {
		a.notef("nothing to reconcile\n")
		return nil
	}
	rows := [][]string{{"KEY", "TENANT", "OPERATION", "EXECUTIONS", "RECORD", "FIRST", "LAST", "NOTE"}}
	for i := range keys {
		k := &keys[i]
		var notes []string
		if k.Duplicate() {
			notes = append(notes, "DONE TWICE")
		}
		if k.Payloads > 1 {
			notes = append(notes, strconv.FormatInt(k.Payloads, 10)+" payloads")
		}
		if k.Outcome != string(idempotency.StateSuccess) {
			notes = append(notes, "maybe done in part")
		}
		if k.Resolution != "" {
			notes = append(notes, "reconciled: "+string(k.Resolution))
		}
		rows = append(rows, []string{
			k.Key.Value(), k.Key.Tenant(), k.Key.Operation(), strconv.FormatInt(k.Executions, 10), string(k.Record), moment(k.FirstAt),
			moment(k.LastAt), strings.Join(notes, ", "),
		})
	}
	table(a.out, rows)
	if more {
		a.notef("there are more: --after %s\n", cursor)
	}
	return nil
}

func (a *app) newPolicyReconcile() *cobra.Command {
	var c changeFlags
	var as string
	cmd := &cobra.Command{
		Use:   "reconcile KEY --tenant WHOSE --operation WHAT --as done|rerun --reason WHY",
		Short: "Note what was decided about a key that was executed without a record",
		Long: "Note what was decided about a key's executions without a record, with who and why.\n\n" +
			"done: it is done, and what was done twice is mended. A late call is told that it is done, and its result gone.\n" +
			"rerun: it was taken back. The next call of the key RUNS THE OPERATION.",
		Example: "  pgonce policy reconcile k-4001 --tenant acme --operation order.create --as done --reason 'second order cancelled, ticket 4713'",
		Args:    cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			if err := c.complete(); err != nil {
				return err
			}
			key, full, err := c.full(args[0])
			switch {
			case err != nil:
				return err
			case !full:
				return usagef("give --tenant and --operation: nothing is guessed here")
			}
			resolved := idempotency.Resolved(strings.ToUpper(as))
			if resolved != idempotency.ResolvedDone && resolved != idempotency.ResolvedRerun {
				return usagef("--as must be done or rerun")
			}
			question := "Note that it is done?"
			if resolved == idempotency.ResolvedRerun {
				question = "WARNING: the next caller with this key runs the operation."
			}
			return a.withStore(cmd.Context(), func(ctx context.Context, pool *pgxpool.Pool, s *idempotency.Store) error {
				if err := a.confirm(c.yes, question); err != nil {
					return err
				}
				n, err := s.Reconcile(ctx, pool, key, resolved, c.Blame)
				if err != nil {
					return explainedPolicy(err)
				}
				if a.json {
					return a.printJSON(map[string]any{"key": key.Value(), "tenant": key.Tenant(), "operation": key.Operation(), "as": resolved, "changed": n})
				}
				a.printf("%s: %d executions reconciled, %s\n", printable(key.String()), n, strings.ToLower(string(resolved)))
				return nil
			})
		},
	}
	c.add(cmd)
	cmd.Flags().StringVar(&as, "as", "", "done or rerun (required)")
	_ = cmd.MarkFlagRequired("as")
	return cmd
}
