package main

import (
	"context"
	"encoding/base64"
	"encoding/json"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/spf13/cobra"

	"github.com/pgonce/pgonce/idempotency"
)

// maxList is the largest page.
const maxList = 1000

var listStates = []string{"INIT", "PROCESSING", "SUCCESS", "FAILED", "TIMEOUT", "EXPIRED"}

func (a *app) newList() *cobra.Command {
	var filter idempotency.ListFilter
	var state, after string
	var limit int
	cmd := &cobra.Command{
		Use:   "list",
		Short: "List records by state, operation, tenant and age, a page at a time",
		Long: "List records in the order of key, tenant, operation. A page ends with the cursor of the next one, if there are more.\n\n" +
			"TIMEOUT (running past its lease), PROCESSING and EXPIRED are found by indexes; another choice that few records\n" +
			"answer to may read the whole table: --timeout bounds it.",
		Example: "  pgonce list --state TIMEOUT\n  pgonce list --state FAILED --operation order.create --younger-than 24h --limit 20",
		Args:    cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if limit < 1 || limit > maxList {
				return usagef("--limit must be from 1 to %d", maxList)
			}
			if filter.OlderThan < 0 || filter.Younger < 0 {
				return usagef("--older-than and --younger-than must not be negative")
			}
			filter.State = idempotency.State(strings.ToUpper(state))
			if state != "" && !slices.Contains(listStates, string(filter.State)) {
				return usagef("--state must be one of %s", strings.Join(listStates, ", "))
			}
			var err error
			if filter.After, err = readCursor(after); err != nil {
				return err
			}
			return a.withStore(cmd.Context(), func(ctx context.Context, pool *pgxpool.Pool, s *idempotency.Store) error {
				return a.list(ctx, pool, s, &filter, limit)
			})
		},
	}
	flags := cmd.Flags()
	flags.StringVar(&state, "state", "", strings.Join(listStates, ", "))
	flags.StringVar(&filter.Tenant, "tenant", "", "whose keys")
	flags.StringVar(&filter.Operation, "operation", "", "what the keys are for")
	flags.DurationVar(&filter.OlderThan, "older-than", 0, "created at least so long ago, for example 90m")
	flags.DurationVar(&filter.Younger, "younger-than", 0, "created at most so long ago")
	flags.IntVar(&limit, "limit", 50, fmt.Sprintf("records of a page, at most %d", maxList))
	flags.StringVar(&after, "after", "", "the cursor that the page before ended with")
	_ = cmd.RegisterFlagCompletionFunc("state", cobra.FixedCompletions(listStates, cobra.ShellCompDirectiveNoFileComp))
	return cmd
}

type listLine struct {
	Tenant     string     `json:"tenant"`
	Operation  string     `json:"operation"`
	Key        string     `json:"key"`
	State      string     `json:"state"`
	Attempt    int        `json:"attempt"`
	AgeSeconds float64    `json:"age_seconds"`
	CreatedAt  *time.Time `json:"created_at"`
	Executor   string     `json:"executor,omitempty"`
	Takeover   string     `json:"takeover,omitempty"`
	Retryable  bool       `json:"retryable"`
	Error      string     `json:"error,omitempty"`
}

func (a *app) list(ctx context.Context, pool *pgxpool.Pool, s *idempotency.Store, f *idempotency.ListFilter, limit int) error {
	lines, more, err := s.List(ctx, pool, f, limit)
	if err != nil {
		return err
	}
	cursor := ""
	if more {
		cursor = writeCursor(lines[len(lines)-1].Key)
	}
	if a.json {
		views := make([]listLine, 0, len(lines))
		for i := range lines {
			l := &lines[i]
			views = append(views, listLine{
				Tenant: l.Key.Tenant(), Operation: l.Key.Operation(), Key: l.Key.Value(), State: string(l.State), Attempt: l.Attempt,
				AgeSeconds: l.Age().Seconds(), CreatedAt: optionalTime(l.CreatedAt), Executor: l.Executor,
				Takeover: string(l.Takeover), Retryable: l.Retryable, Error: l.Error,
			})
		}
		return a.printJSON(map[string]any{"records": views, "more": more, "after": cursor})
	}
	if len(lines) == 0 {
		a.notef("no records\n")
		return nil
	}
	rows := [][]string{{"KEY", "TENANT", "OPERATION", "STATE", "AGE", "ATTEMPT", "EXECUTOR", "NOTE"}}
	for i := range lines {
		l := &lines[i]
		rows = append(rows, []string{
			l.Key.Value(), l.Key.Tenant(), l.Key.Operation(), string(l.State), span(l.Age()), strconv.Itoa(l.Attempt), l.Executor, note(l),
		})
	}
	table(a.out, rows)
	if more {
		a.notef("there are more: --after %s\n", cursor)
	}
	return nil
}

func note(l *idempotency.AuditLine) string {
	var parts []string
	if l.Error != "" {
		parts = append(parts, l.Error)
	}
	if l.Retryable {
		parts = append(parts, "retryable")
	}
	if l.State == idempotency.StateTimeout {
		parts = append(parts, string(l.Takeover))
	}
	return strings.Join(parts, ", ")
}

// A cursor is the last key of a page, in a form that no shell changes.
func writeCursor(key idempotency.Key) string {
	text, _ := json.Marshal([]string{key.Tenant(), key.Operation(), key.Value()})
	return base64.RawURLEncoding.EncodeToString(text)
}

func readCursor(cursor string) (idempotency.Key, error) {
	if cursor == "" {
		return idempotency.Key{}, nil
	}
	var parts []string
	text, err := base64.RawURLEncoding.DecodeString(cursor)
	if err == nil {
		err = json.Unmarshal(text, &parts)
	}
	if err != nil || len(parts) != 3 {
		return idempotency.Key{}, usagef("--after is not a cursor that a page ended with")
	}
	return idempotency.NewKey(parts[0], parts[1], parts[2])
}

func joined(names []string) string { return strings.Join(names, ", ") }
