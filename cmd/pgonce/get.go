package main

import (
	"context"
	"encoding/json"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/spf13/cobra"

	"github.com/pgonce/pgonce/idempotency"
)

// maxSameValue is how many records of one value are shown: more of them need a tenant or an operation.
const maxSameValue = 20

func (a *app) newGet() *cobra.Command {
	var key keyFlags
	cmd := &cobra.Command{
		Use:   "get KEY",
		Short: "Show everything that is known of a key, and whether somebody runs it right now",
		Long: "Show everything that is known of a key, and whether a transaction holds it right now.\n\n" +
			"The key's value alone finds every record of it. With --tenant and --operation the key is also looked for among the\n" +
			"running transactions when it has no record: in the transactional mode nothing is stored before the commit.",
		Example: "  pgonce get k-1001\n  pgonce get k-1001 --tenant acme --operation order.create --json",
		Args:    cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			return a.withStore(cmd.Context(), func(ctx context.Context, pool *pgxpool.Pool, s *idempotency.Store) error {
				return a.get(ctx, pool, s, &key, args[0])
			})
		},
	}
	key.add(cmd)
	return cmd
}

// keyView is what get prints of one key.
type keyView struct {
	Tenant    string `json:"tenant"`
	Operation string `json:"operation"`
	Key       string `json:"key"`
	LogName   string `json:"log_name"`
	// State is empty where there is no record.
	State     string      `json:"state,omitempty"`
	Next      string      `json:"next"`
	HeldBy    []heldView  `json:"held_by"`
	Record    *recordView `json:"record"`
	ReadAt    *time.Time  `json:"read_at,omitempty"`
	StepNames []string    `json:"steps,omitempty"`
	Attempts  int         `json:"attempts"` // rows of idempotency.attempts
}

type recordView struct {
	Attempt         int             `json:"attempt"`
	AgeSeconds      float64         `json:"age_seconds"`
	DurationSeconds float64         `json:"duration_seconds"`
	Executor        string          `json:"executor,omitempty"`
	Client          string          `json:"client,omitempty"`
	TraceID         string          `json:"trace_id,omitempty"`
	CreatedAt       *time.Time      `json:"created_at"`
	AcquiredAt      *time.Time      `json:"acquired_at"`
	CompletedAt     *time.Time      `json:"completed_at"`
	LeaseExpiresAt  *time.Time      `json:"lease_expires_at"`
	ExpiresAt       *time.Time      `json:"expires_at"`
	Error           string          `json:"error,omitempty"`
	Retryable       bool            `json:"retryable"`
	Takeover        string          `json:"takeover,omitempty"`
	Fence           int64           `json:"fence"`
	Generation      int64           `json:"generation"`
	ResultType      string          `json:"result_type,omitempty"`
	ResultBytes     int64           `json:"result_bytes"`
	ResultDropped   bool            `json:"result_dropped"`
	Result          json.RawMessage `json:"result"`
}

type heldView struct {
	PID          int        `json:"pid"`
	Application  string     `json:"application"`
	Address      string     `json:"address,omitempty"`
	User         string     `json:"user,omitempty"`
	State        string     `json:"state,omitempty"`
	Since        *time.Time `json:"since"`
	SinceSeconds float64    `json:"since_seconds"`
}

func (a *app) get(ctx context.Context, pool *pgxpool.Pool, s *idempotency.Store, flags *keyFlags, value string) error {
	lines, more, err := s.Find(ctx, pool, flags.filter(value), maxSameValue)
	if err != nil {
		return err
	}
	views := make([]keyView, 0, len(lines))
	for i := range lines {
		view, err := viewOf(ctx, pool, s, &lines[i])
		if err != nil {
			return err
		}
		views = append(views, view)
	}
	if key, full, err := flags.full(value); err != nil {
		return err
	} else if full && len(lines) == 0 {
		view, err := viewOfAbsent(ctx, pool, s, key)
		if err != nil {
			return err
		}
		if len(view.HeldBy) > 0 {
			views = append(views, view)
		}
	}
	if a.json {
		if err := a.printJSON(map[string]any{"keys": views, "more": more}); err != nil {
			return err
		}
	} else {
		for i := range views {
			if i > 0 {
				a.printf("\n")
			}
			a.printKey(&views[i])
		}
	}
	if more {
		a.notef("pgonce: there are more than %d records of this value: give --tenant or --operation\n", maxSameValue)
	}
	if len(views) == 0 {
		hint := ""
		if flags.tenant == "" || flags.operation == "" {
			hint = "; give --tenant and --operation to see whether it runs right now"
		}
		return fmt.Errorf("%w%s", errNoRecord, hint)
	}
	return nil
}

func heldViews(ctx context.Context, pool *pgxpool.Pool, s *idempotency.Store, key idempotency.Key) ([]heldView, error) {
	holders, err := s.Holders(ctx, pool, key)
	if err != nil {
		return nil, err
	}
	held := make([]heldView, 0, len(holders))
	for i := range holders {
		h := &holders[i]
		view := heldView{
			PID: h.PID, Application: h.ApplicationName, Address: h.ClientAddress, User: h.User, State: h.State,
			Since: optionalTime(h.TransactionStart),
		}
		if view.Since != nil {
			view.SinceSeconds = h.ReadAt.Sub(h.TransactionStart).Seconds()
		}
		held = append(held, view)
	}
	return held, nil
}

func viewOfAbsent(ctx context.Context, pool *pgxpool.Pool, s *idempotency.Store, key idempotency.Key) (keyView, error) {
	held, err := heldViews(ctx, pool, s, key)
	return keyView{
		Tenant: key.Tenant(), Operation: key.Operation(), Key: key.Value(), LogName: key.String(), HeldBy: held,
		Next: "a transaction runs it; its record comes with its commit, and a duplicate is told \"in progress\"",
	}, err
}

func viewOf(ctx context.Context, pool *pgxpool.Pool, s *idempotency.Store, l *idempotency.AuditLine) (keyView, error) {
	view := keyView{
		Tenant: l.Key.Tenant(), Operation: l.Key.Operation(), Key: l.Key.Value(), LogName: l.Key.String(),
		State: string(l.State), ReadAt: optionalTime(l.ReadAt),
		Record: &recordView{
			Attempt: l.Attempt, AgeSeconds: l.Age().Seconds(), DurationSeconds: l.Duration().Seconds(), Executor: l.Executor,
			Client: l.Client, TraceID: l.TraceID, CreatedAt: optionalTime(l.CreatedAt), AcquiredAt: optionalTime(l.AcquiredAt),
			CompletedAt: optionalTime(l.CompletedAt), LeaseExpiresAt: optionalTime(l.LeaseExpiresAt),
			ExpiresAt: optionalTime(l.ExpiresAt), Error: l.Error, Retryable: l.Retryable, Takeover: string(l.Takeover),
			Fence: l.Fence, Generation: l.Generation, ResultType: l.ResultType, ResultBytes: l.ResultBytes,
			ResultDropped: l.ResultDropped,
		},
	}
	if l.Result != "" {
		view.Record.Result = json.RawMessage(l.Result)
	}
	var err error
	if view.HeldBy, err = heldViews(ctx, pool, s, l.Key); err != nil {
		return view, err
	}
	attempts, _, err := s.Trace(ctx, pool, filterOf(l.Key), idempotency.MaxPage)
	if err != nil {
		return view, err
	}
	view.Attempts = len(attempts)
	steps, err := s.Steps(ctx, pool, &idempotency.Record{Key: l.Key, Generation: l.Generation})
	for _, step := range steps {
		view.StepNames = append(view.StepNames, step.Name)
	}
	view.Next = next(l, len(view.HeldBy) > 0)
	return view, err
}

func filterOf(key idempotency.Key) idempotency.KeyFilter {
	return idempotency.KeyFilter{Value: key.Value(), Tenant: key.Tenant(), Operation: key.Operation()}
}

// next says what becomes of the key, and what a person may do.
func next(l *idempotency.AuditLine, held bool) string {
	if held && l.State != idempotency.StateSuccess && (l.State != idempotency.StateFailed || l.Retryable) {
		return "a transaction holds the key: wait for it"
	}
	switch l.State {
	case idempotency.StateInit:
		return "an issued token: its first caller runs the operation"
	case idempotency.StateProcessing:
		return "its owner has the lease; a duplicate is told \"in progress\""
	case idempotency.StateExpired:
		return "counts as absent: the next caller runs the operation"
	case idempotency.StateSuccess:
		if l.ResultDropped {
			return "done, answer gone: a duplicate is told so and runs nothing"
		}
		return "a duplicate gets this answer"
	case idempotency.StateFailed:
		if !l.Retryable {
			return "a duplicate gets this failure"
		}
		if l.Takeover == idempotency.TakeoverManual || l.Takeover == idempotency.TakeoverResolve {
			return "the next caller runs it again if every earlier attempt has a recorded end, see trace; otherwise as " + string(l.Takeover) + " says"
		}
		return "the next caller runs it again"
	}
	switch l.Takeover { // TIMEOUT
	case idempotency.TakeoverManual:
		return "its owner is gone and nobody may take over: find out what it did, then `pgonce fail`"
	case idempotency.TakeoverResolve:
		return "its owner is gone: the compensator or the next caller asks the other side; where that has no answer, find out and `pgonce fail`"
	case idempotency.TakeoverResume:
		return "its owner is gone: the compensator or the next caller takes over, without the finished steps"
	}
	return "its owner is gone: the compensator or the next caller takes over"
}

func (a *app) printKey(v *keyView) {
	a.printf("%s  %s  %s\n", printable(v.Tenant), printable(v.Operation), printable(v.Key))
	state := v.State
	if state == "" {
		state = "no record yet"
	}
	rows := [][2]string{{"state", state}}
	if r := v.Record; r != nil {
		rows = append(rows, [][2]string{
			{"attempt", fmt.Sprint(r.Attempt)},
			{"age", span(seconds(r.AgeSeconds))},
			{"duration", span(seconds(r.DurationSeconds))},
			{"error", r.Error},
			{"retryable", map[bool]string{true: "yes"}[r.Retryable]},
			{"takeover", r.Takeover},
			{"result", resultText(r)},
			{"steps", joined(v.StepNames)},
			{"executor", r.Executor},
			{"client", r.Client},
			{"trace id", r.TraceID},
			{"created", momentOf(r.CreatedAt)},
			{"acquired", momentOf(r.AcquiredAt)},
			{"completed", momentOf(r.CompletedAt)},
			{"lease ends", momentOf(r.LeaseExpiresAt)},
			{"kept until", keptUntil(v.State, r)},
			{"fence", fmt.Sprintf("%d (generation %d)", r.Fence, r.Generation)},
			{"attempts", map[bool]string{true: fmt.Sprintf("%d rows, see pgonce trace", v.Attempts)}[v.Attempts > 0]},
		}...)
	}
	rows = append(rows, [2]string{"in logs", v.LogName})
	if len(v.HeldBy) == 0 {
		rows = append(rows, [2]string{"held now", "no"})
	}
	for _, h := range v.HeldBy {
		text := fmt.Sprintf("by pid %d", h.PID)
		for _, part := range []string{h.Application, h.User, h.Address, h.State} {
			if part != "" {
				text += ", " + part
			}
		}
		if h.Since != nil {
			text += ", for " + span(seconds(h.SinceSeconds))
		}
		rows = append(rows, [2]string{"held now", text})
	}
	facts(a.out, append(rows, [2]string{"next", v.Next}))
}

func resultText(r *recordView) string {
	switch {
	case r.ResultDropped:
		return "dropped (was " + r.ResultType + ")"
	case r.Result != nil:
		return string(r.Result)
	case r.ResultType != "":
		return fmt.Sprintf("%d bytes of %s", r.ResultBytes, r.ResultType)
	}
	return ""
}

func keptUntil(state string, r *recordView) string {
	switch {
	case r.ExpiresAt != nil:
		return momentOf(r.ExpiresAt)
	case state == string(idempotency.StateProcessing) || state == string(idempotency.StateTimeout):
		return "PROCESSING never expires"
	}
	return "for ever"
}

func momentOf(t *time.Time) string {
	if t == nil {
		return ""
	}
	return moment(*t)
}

func seconds(s float64) time.Duration { return time.Duration(s * float64(time.Second)) }
