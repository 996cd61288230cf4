package main

import (
	"context"
	"errors"
	"fmt"
	"strings"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/spf13/cobra"
)

// severity orders findings.
type severity string

// The severities. Warnings and errors make the exit status 1.
const (
	fine    severity = "ok"
	remark  severity = "note"
	warning severity = "warning"
	wrong   severity = "error"
)

// finding is what one look came to.
type finding struct {
	Check    string   `json:"check"`
	Severity severity `json:"severity"`
	Found    string   `json:"found"`
	Fix      string   `json:"fix,omitempty"`
}

// findings are collected in the order of the looks.
type findings []finding

func (f *findings) ok(check, found string, args ...any) { f.add(check, fine, "", found, args...) }

func (f *findings) note(check, fix, found string, args ...any) {
	f.add(check, remark, fix, found, args...)
}

func (f *findings) warn(check, fix, found string, args ...any) {
	f.add(check, warning, fix, found, args...)
}

func (f *findings) bad(check, fix, found string, args ...any) {
	f.add(check, wrong, fix, found, args...)
}

func (f *findings) add(check string, s severity, fix, found string, args ...any) {
	*f = append(*f, finding{Check: check, Severity: s, Found: fmt.Sprintf(found, args...), Fix: fix})
}

func (f findings) count(s severity) (n int) {
	for _, found := range f {
		if found.Severity == s {
			n++
		}
	}
	return n
}

// look is one group of checks. What it cannot ask is a finding, not the end of the examination.
type look struct {
	name string
	at   func(context.Context, *pgxpool.Pool, *findings) error
}

func looks() []look {
	return []look{
		{"server", lookAtServer},
		{"clock", lookAtClock},
		{"pooler", lookAtPooler},
		{"settings", lookAtSettings},
		{"durability", lookAtDurability},
		{"schema", lookAtSchema},
		{"epoch", lookAtEpoch},
		{"stale", lookAtStale},
		{"policies", lookAtPolicies},
	}
}

func (a *app) newDoctor() *cobra.Command {
	var cache bool
	cmd := &cobra.Command{
		Use:   "doctor",
		Short: "Examine PostgreSQL, what stands before it, the schema, and Redis; status 1 if anything is wrong",
		Long: "Examine PostgreSQL, what stands before it, the schema, and Redis (with --redis). Nothing is changed.\n\n" +
			"Settings are those of the role, the database and the way that --database names: give the one of the service. The service's\n" +
			"own pool cannot be seen from here: it must be made with txn.ConfigurePool.",
		Example: "  pgonce doctor --redis redis://cache:6379/0",
		Args:    cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if err := a.checkRedis(); err != nil {
				return err
			}
			return a.doctor(cmd.Context(), cache)
		},
	}
	a.addRedis(cmd)
	cmd.Flags().BoolVar(&cache, "redis-cache", false, "this Redis serves redisfront.Do (CACHE) too: what it forgets is run again")
	return cmd
}

func (a *app) doctor(ctx context.Context, cache bool) error {
	var found findings
	err := a.withPool(ctx, func(ctx context.Context, pool *pgxpool.Pool) error {
		if err := pool.Ping(ctx); err != nil {
			found.bad("connection", "mend --database, the network or the role's rights; nothing else can be asked", "%v", err)
			return nil
		}
		for _, look := range looks() {
			if err := look.at(ctx, pool, &found); err != nil {
				found.bad(look.name, "give the role the right to ask, or try again", "could not be asked: %v", err)
			}
		}
		return nil
	})
	if err != nil {
		return err
	}
	if a.redisGiven() {
		ctx, cancel := a.bounded(ctx)
		defer cancel()
		if err := a.lookAtRedis(ctx, cache, &found); err != nil {
			return err
		}
	}
	return a.report(found)
}

func (a *app) report(found findings) error {
	errs, warnings := found.count(wrong), found.count(warning)
	if a.json {
		if err := a.printJSON(map[string]any{"findings": found, "errors": errs, "warnings": warnings}); err != nil {
			return err
		}
	} else {
		rows := [][]string{{"", "CHECK", "FOUND"}}
		for _, f := range found {
			rows = append(rows, []string{strings.ToUpper(string(f.Severity)), f.Check, f.Found})
		}
		table(a.out, rows)
		for _, f := range found {
			if f.Fix != "" {
				a.printf("\n%s, %s:\n  %s\n", strings.ToUpper(string(f.Severity)), f.Check, printable(f.Fix))
			}
		}
		a.printf("\n%d errors, %d warnings\n", errs, warnings)
	}
	if errs+warnings > 0 {
		return errSaid
	}
	return nil
}

// denied reports whether the role may not ask.
func denied(err error) bool {
	var server interface{ SQLState() string }
	return errors.As(err, &server) && server.SQLState() == "42501" // insufficient_privilege
}
