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

func (a *app) newTrace() *cobra.Command {
	var key keyFlags
	var limit int
	cmd := &cobra.Command{
		Use:   "trace KEY",
		Short: "Show every attempt of a key: who, when, what came of it, and what a person did",
		Long: "Show every attempt of a key, oldest first, and its record at the end.\n\n" +
			"A success in the transactional mode has no attempt on record: its record says it all. What a person did is OPERATOR, with\n" +
			"the fence of the attempt it ended; an OPERATOR without an outcome expired the record.",
		Example: "  pgonce trace k-2003",
		Args:    cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			if limit < 1 || limit > idempotency.MaxPage {
				return usagef("--limit must be from 1 to %d", idempotency.MaxPage)
			}
			return a.withStore(cmd.Context(), func(ctx context.Context, pool *pgxpool.Pool, s *idempotency.Store) error {
				return a.trace(ctx, pool, s, key.filter(args[0]), limit)
			})
		},
	}
	key.add(cmd)
	cmd.Flags().IntVar(&limit, "limit", 1000, "attempts to show")
	return cmd
}

type attemptView struct {
	Tenant       string     `json:"tenant"`
	Operation    string     `json:"operation"`
	Key          string     `json:"key"`
	ID           int64      `json:"id"`
	Event        string     `json:"event"`
	Outcome      string     `json:"outcome,omitempty"`
	Generation   int64      `json:"generation"`
	Fence        int64      `json:"fence"`
	Attempt      int        `json:"attempt"`
	Executor     string     `json:"executor,omitempty"`
	TraceID      string     `json:"trace_id,omitempty"`
	StartedAt    *time.Time `json:"started_at"`
	EndedAt      *time.Time `json:"ended_at"`
	RecordedAt   *time.Time `json:"recorded_at"`
	ErrorCode    string     `json:"error_code,omitempty"`
	ErrorMessage string     `json:"error_message,omitempty"`
	Actor        string     `json:"actor,omitempty"`
	Reason       string     `json:"reason,omitempty"`
}

type traceRecord struct {
	Tenant      string     `json:"tenant"`
	Operation   string     `json:"operation"`
	Key         string     `json:"key"`
	State       string     `json:"state"`
	Attempt     int        `json:"attempt"`
	Fence       int64      `json:"fence"`
	Generation  int64      `json:"generation"`
	Executor    string     `json:"executor,omitempty"`
	AcquiredAt  *time.Time `json:"acquired_at"`
	CompletedAt *time.Time `json:"completed_at"`
	Error       string     `json:"error,omitempty"`
}

func (a *app) trace(ctx context.Context, pool *pgxpool.Pool, s *idempotency.Store, f idempotency.KeyFilter, limit int) error {
	attempts, more, err := s.Trace(ctx, pool, f, limit)
	if err != nil {
		return err
	}
	records, moreRecords, err := s.Find(ctx, pool, f, maxSameValue)
	if err != nil {
		return err
	}
	if a.json {
		err = a.printTraceJSON(attempts, records, more || moreRecords)
	} else {
		a.printTrace(attempts, records)
		if more {
			a.notef("there are more attempts: raise --limit\n")
		}
		if moreRecords {
			a.notef("there are more records of this value: give --tenant or --operation\n")
		}
	}
	if err == nil && len(attempts) == 0 && len(records) == 0 {
		return errNoRecord
	}
	return err
}

func (a *app) printTraceJSON(attempts []idempotency.AttemptLine, records []idempotency.AuditLine, more bool) error {
	views := make([]attemptView, 0, len(attempts))
	for i := range attempts {
		l := &attempts[i]
		views = append(views, attemptView{
			Tenant: l.Key.Tenant(), Operation: l.Key.Operation(), Key: l.Key.Value(), ID: l.ID, Event: l.Event,
			Outcome: string(l.Outcome), Generation: l.Generation, Fence: l.Fence, Attempt: l.Attempt, Executor: l.Executor,
			TraceID: l.TraceID, StartedAt: optionalTime(l.StartedAt), EndedAt: optionalTime(l.EndedAt),
			RecordedAt: optionalTime(l.RecordedAt), ErrorCode: l.ErrorCode, ErrorMessage: l.ErrorMessage, Actor: l.Actor,
			Reason: l.Reason,
		})
	}
	now := make([]traceRecord, 0, len(records))
	for i := range records {
		l := &records[i]
		now = append(now, traceRecord{
			Tenant: l.Key.Tenant(), Operation: l.Key.Operation(), Key: l.Key.Value(), State: string(l.State), Attempt: l.Attempt,
			Fence: l.Fence, Generation: l.Generation, Executor: l.Executor, AcquiredAt: optionalTime(l.AcquiredAt),
			CompletedAt: optionalTime(l.CompletedAt), Error: l.Error,
		})
	}
	return a.printJSON(map[string]any{"attempts": views, "records": now, "more": more})
}

func (a *app) printTrace(attempts []idempotency.AttemptLine, records []idempotency.AuditLine) {
	if len(attempts) == 0 && len(records) == 0 {
		return
	}
	rows := [][]string{{"TENANT", "OPERATION", "EVENT", "OUTCOME", "ATTEMPT", "FENCE", "STARTED", "ENDED", "EXECUTOR", "ACTOR", "WHY"}}
	for i := range attempts {
		l := &attempts[i]
		why := l.Reason
		if why == "" && l.ErrorCode != "" {
			why = fmt.Sprintf("%s: %s", l.ErrorCode, l.ErrorMessage)
		}
		rows = append(rows, []string{
			l.Key.Tenant(), l.Key.Operation(), l.Event, string(l.Outcome), strconv.Itoa(l.Attempt), strconv.FormatInt(l.Fence, 10),
			moment(l.StartedAt), moment(l.EndedAt), l.Executor, l.Actor, why,
		})
	}
	for i := range records {
		l := &records[i]
		rows = append(rows, []string{
			l.Key.Tenant(), l.Key.Operation(), "(record)", string(l.State), strconv.Itoa(l.Attempt), strconv.FormatInt(l.Fence, 10),
			moment(l.AcquiredAt), moment(l.CompletedAt), l.Executor, "", l.Error,
		})
	}
	table(a.out, rows)
}
