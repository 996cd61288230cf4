package idempotency

import (
	"context"
	"fmt"
	"time"

	"github.com/pgonce/pgonce/internal/dbsqlc"
)

// The states that are derived and never stored, as the view idempotency.audit names them.
const (
	StateTimeout State = "TIMEOUT" // PROCESSING past its lease
	StateExpired State = "EXPIRED" // SUCCESS, FAILED or INIT past its retention: counts as absent
)

// KeyFilter names one key, or several: those of a value, whoever's they are and whatever they are for.
type KeyFilter struct {
	Value             string
	Tenant, Operation string // empty: any
}

func (f KeyFilter) validate() error {
	if err := validateKeyValue(f.Value); err != nil {
		return err
	}
	return validateOwners(f.Tenant, f.Operation)
}

func validateOwners(tenant, operation string) error {
	if tenant != "" {
		if err := validateTenant(tenant); err != nil {
			return err
		}
	}
	if operation != "" {
		return validateOperation(operation)
	}
	return nil
}

// AuditLine is what the view idempotency.audit says of a record: for people, never for a decision.
type AuditLine struct {
	Key       Key
	State     State // TIMEOUT and EXPIRED too
	Attempt   int
	Executor  string
	Client    string
	TraceID   string
	Retryable bool
	Takeover  Takeover
	Fence     int64
	// Generation is the fence that began this life of the key.
	Generation int64

	// Zero: NULL. ReadAt is PostgreSQL's time of the answer.
	CreatedAt, AcquiredAt, CompletedAt, LeaseExpiresAt, ExpiresAt, ReadAt time.Time

	Error         string // code and text
	ResultType    string
	Result        string // JSON; empty: none, dropped, or not JSON
	ResultBytes   int64
	ResultDropped bool
}

// Age is how long ago this life of the key began.
func (l *AuditLine) Age() time.Duration { return l.ReadAt.Sub(l.CreatedAt) }

// Duration is that of the latest attempt, or so far; 0 for an unused token.
func (l *AuditLine) Duration() time.Duration {
	switch {
	case l.AcquiredAt.IsZero():
		return 0
	case l.CompletedAt.IsZero():
		return l.ReadAt.Sub(l.AcquiredAt)
	}
	return l.CompletedAt.Sub(l.AcquiredAt)
}

// Find returns at most limit lines of the audit, and whether there are more. By the primary key, which begins with the value.
func (s *Store) Find(ctx context.Context, db DB, f KeyFilter, limit int) (lines []AuditLine, more bool, err error) {
	if err := f.validate(); err != nil {
		return nil, false, err
	}
	rows, err := dbsqlc.New(db).AuditByKey(ctx, dbsqlc.AuditByKeyParams{
		Key: f.Value, Tenant: f.Tenant, Operation: f.Operation, Rows: onePastEnd(limit),
	})
	if err != nil {
		return nil, false, fmt.Errorf("idempotency: find key: %w", translate(err))
	}
	rows, more = cut(rows, limit)
	for i := range rows {
		r := &rows[i]
		lines = append(lines, AuditLine{
			Key: Key{r.Tenant, r.Operation, r.Key}, State: State(r.State), Attempt: int(r.Attempt), Executor: r.Executor,
			Client: r.Client, TraceID: r.TraceID, Retryable: r.Retryable, Takeover: Takeover(r.Takeover), Fence: r.Fence,
			Generation: r.Generation, CreatedAt: r.CreatedAt.UTC(), AcquiredAt: timeOf(r.AcquiredAt),
			CompletedAt: timeOf(r.CompletedAt), LeaseExpiresAt: timeOf(r.LeaseExpiresAt), ExpiresAt: timeOf(r.ExpiresAt),
			ReadAt: r.ReadAt.UTC(), Error: r.Error, ResultType: r.ResultType, Result: r.Result, ResultBytes: r.ResultBytes,
			ResultDropped: r.ResultDropped,
		})
	}
	return lines, more, nil
}

// ListFilter chooses lines of the audit. Empty fields choose everything.
type ListFilter struct {
	State              State // TIMEOUT and EXPIRED too
	Tenant, Operation  string
	OlderThan, Younger time.Duration // by the beginning of the key's life
	After              Key           // the last one of the page before
}

// List returns a page of at most limit lines in the order of value, tenant, operation, and whether there are more. Only what
// tells records apart is in the lines. TIMEOUT and PROCESSING are found by an index, EXPIRED mostly; the others read records
// until the page is full. Ask on a connection that does not prepare: the planner must see what is asked.
func (s *Store) List(ctx context.Context, db DB, f *ListFilter, limit int) (lines []AuditLine, more bool, err error) {
	if err := validateOwners(f.Tenant, f.Operation); err != nil {
		return nil, false, err
	}
	p := dbsqlc.AuditListParams{
		State: string(f.State), Tenant: f.Tenant, Operation: f.Operation, AfterKey: f.After.value, AfterTenant: f.After.tenant,
		AfterOperation: f.After.operation, Rows: onePastEnd(limit),
	}
	switch f.State {
	case StateTimeout, StateProcessing:
		p.StoredState = string(StateProcessing)
	case StateExpired:
		p.Expired = true
	case "":
	case StateInit, StateSuccess, StateFailed:
		p.StoredState = string(f.State)
	default:
		return nil, false, &InvalidError{Field: "state", Rule: "must be INIT, PROCESSING, SUCCESS, FAILED, TIMEOUT or EXPIRED"}
	}
	if f.OlderThan > 0 {
		p.OlderUs = microseconds(f.OlderThan)
	}
	if f.Younger > 0 {
		p.YoungerUs = microseconds(f.Younger)
	}
	rows, err := dbsqlc.New(db).AuditList(ctx, p)
	if err != nil {
		return nil, false, fmt.Errorf("idempotency: list records: %w", translate(err))
	}
	rows, more = cut(rows, limit)
	for i := range rows {
		r := &rows[i]
		lines = append(lines, AuditLine{
			Key: Key{r.Tenant, r.Operation, r.Key}, State: State(r.State), Attempt: int(r.Attempt), Executor: r.Executor,
			Retryable: r.Retryable, Takeover: Takeover(r.Takeover), CreatedAt: r.CreatedAt.UTC(), ReadAt: r.ReadAt.UTC(),
			Error: r.Error,
		})
	}
	return lines, more, nil
}

// Holder is a session whose transaction holds a key's lock: somebody runs the key, or changes its record.
type Holder struct {
	PID             int
	ApplicationName string
	ClientAddress   string // empty: a Unix socket, or this role may not see it
	User            string
	State           string // "active", "idle in transaction"; empty: this role may not see it
	// Since when the transaction runs, and since when the session is in this state. Zero: not to be seen.
	TransactionStart, StateChange time.Time
	ReadAt                        time.Time // PostgreSQL's time of the answer
}

// Holders returns who holds the key's lock right now. It is somebody else's, too, if two keys have one number.
func (s *Store) Holders(ctx context.Context, db DB, key Key) ([]Holder, error) {
	rows, err := dbsqlc.New(db).KeyHolders(ctx, key.LockID())
	if err != nil {
		return nil, fmt.Errorf("idempotency: look for the holder of %v: %w", key, translate(err))
	}
	holders := make([]Holder, 0, len(rows))
	for _, r := range rows {
		holders = append(holders, Holder{
			PID: int(r.Pid), ApplicationName: r.ApplicationName, ClientAddress: r.ClientAddr, User: r.Username, State: r.State,
			TransactionStart: timeOf(r.XactStart), StateChange: timeOf(r.StateChange), ReadAt: r.ReadAt.UTC(),
		})
	}
	return holders, nil
}

// AttemptLine is a row of idempotency.attempts.
type AttemptLine struct {
	Key        Key
	ID         int64 // their order
	Event      string
	Outcome    State // empty: the event changed no state
	Generation int64
	Fence      int64
	Attempt    int
	Executor   string
	TraceID    string
	// Zero: NULL.
	StartedAt, EndedAt, RecordedAt time.Time
	ErrorCode, ErrorMessage        string
	Actor, Reason                  string
}

// Trace returns at most limit attempts, in the order of tenant, operation and time, and whether there are more.
func (s *Store) Trace(ctx context.Context, db DB, f KeyFilter, limit int) (lines []AttemptLine, more bool, err error) {
	if err := f.validate(); err != nil {
		return nil, false, err
	}
	rows, err := dbsqlc.New(db).AttemptsOf(ctx, dbsqlc.AttemptsOfParams{
		Key: f.Value, Tenant: f.Tenant, Operation: f.Operation, Rows: onePastEnd(limit),
	})
	if err != nil {
		return nil, false, fmt.Errorf("idempotency: read attempts: %w", translate(err))
	}
	rows, more = cut(rows, limit)
	for i := range rows {
		r := &rows[i]
		lines = append(lines, AttemptLine{
			Key: Key{r.Tenant, r.Operation, r.Key}, ID: r.ID, Event: r.Event, Outcome: State(r.Outcome), Generation: r.Generation,
			Fence: r.Fence, Attempt: int(r.Attempt), Executor: r.Executor, TraceID: r.TraceID, StartedAt: timeOf(r.StartedAt),
			EndedAt: timeOf(r.EndedAt), RecordedAt: r.RecordedAt.UTC(), ErrorCode: r.ErrorCode, ErrorMessage: r.ErrorMessage,
			Actor: r.Actor, Reason: r.Reason,
		})
	}
	return lines, more, nil
}

// MaxPage is the most lines that one question of a person gets.
const MaxPage = 10_000

// onePastEnd asks for one row more than is shown: it tells that there are more.
func onePastEnd(limit int) int32 { return int32(min(max(limit, 1), MaxPage)) + 1 } //nolint:gosec // bounded

func cut[T any](rows []T, limit int) ([]T, bool) {
	limit = min(max(limit, 1), MaxPage)
	if len(rows) <= limit {
		return rows, false
	}
	return rows[:limit], true
}
