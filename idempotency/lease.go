package idempotency

import (
	"context"
	"crypto/sha256"
	"encoding/base64"
	"encoding/binary"
	"errors"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/pgonce/pgonce/internal/dbsqlc"
	"github.com/pgonce/pgonce/internal/failpoint"
)

// DB is a pool, a connection or a transaction of pgx.
type DB interface {
	Querier
	Exec(ctx context.Context, sql string, args ...any) (pgconn.CommandTag, error)
	Query(ctx context.Context, sql string, args ...any) (pgx.Rows, error)
}

// Owner is an attempt that has got a leased key: nobody may write its outcome who does not present all of it.
type Owner struct {
	Key          Key
	Fence        int64
	AttemptToken AttemptToken
}

// LeaseRequest asks for a key in the leased mode.
type LeaseRequest struct {
	Request
	AttemptToken AttemptToken // asked again with the same one after a lost answer, the key is the same attempt's
	Lease        time.Duration
	Takeover     Takeover // of a new record; an old one keeps its own
	CanResolve   bool     // the caller asks the operation's Resolver if it must
	TraceID      string
	// RequireIssued refuses a key that is no issued token.
	RequireIssued bool
}

// LeaseAcquisition is what PostgreSQL said. With VerdictRun and VerdictResolve the key is the caller's, as Record.Fence.
type LeaseAcquisition struct {
	Verdict Verdict
	Record  Record
	Found   bool
}

const (
	leaseArguments = `($1::text, $2::text, $3::text, $4::bytea, $5::bytea,
	$6::bigint * interval '1 microsecond', $7::text, $8::text, $9::text, $10::text, $11::bytea[], $12::boolean)`
	leaseAcquire       = `SELECT * FROM idempotency.acquire` + leaseArguments
	leaseAcquireIssued = `SELECT * FROM idempotency.acquire_issued` + leaseArguments
)

// verdicts are those of the function in PostgreSQL.
var verdicts = map[string]Verdict{
	"RUN": VerdictRun, "RESOLVE": VerdictResolve, "REPLAY": VerdictReplay, "MISMATCH": VerdictMismatch, "GONE": VerdictGone,
	"IN_PROGRESS": VerdictInProgress, "MANUAL": VerdictManual, "NOT_ISSUED": VerdictNotIssued,
}

// AcquireLease asks for a key, in a transaction of its own where db is a pool or a connection. It never waits.
func (s *Store) AcquireLease(ctx context.Context, db DB, req *LeaseRequest) (LeaseAcquisition, error) {
	key := req.Key
	also := make([][]byte, 0, len(req.Fingerprint.also))
	for _, other := range req.Fingerprint.also {
		also = append(also, other.Bytes())
	}
	ask := leaseAcquire
	if req.RequireIssued {
		ask = leaseAcquireIssued
	}
	row := db.QueryRow(ctx, ask, key.tenant, key.operation, key.value, req.Fingerprint.Bytes(), req.AttemptToken[:],
		req.Lease.Microseconds(), string(req.Takeover), s.executor, optional(req.Client), optional(storable(req.TraceID, MaxTraceBytes)),
		also, req.CanResolve)
	a, err := scanAcquisition(key, row)
	if err != nil {
		return a, fmt.Errorf("idempotency: acquire lease of %v: %w", key, translate(err))
	}
	if a.Verdict == VerdictMismatch && !a.Record.Fingerprint.Known() {
		a.Verdict = VerdictNewer
	}
	return a, nil
}

func scanAcquisition(key Key, row pgx.Row) (a LeaseAcquisition, err error) {
	var verdict string
	var g struct {
		state, takeover, executor, client, trace, code, message, resultType *string
		fence, generation                                                   *int64
		attempt                                                             *int32
		retryable, expired, timedOut                                        *bool
		fingerprint, token, result                                          []byte
		created, acquired, completed, lease, resultExpires, expires         *time.Time
	}
	err = row.Scan(&verdict, &g.state, &g.fence, &g.generation, &g.attempt, &g.retryable, &g.fingerprint, &g.token, &g.takeover,
		&g.executor, &g.client, &g.trace, &g.created, &g.acquired, &g.completed, &g.lease, &g.resultExpires, &g.expires, &g.code,
		&g.message, &g.resultType, &g.result, &g.expired, &g.timedOut)
	if err != nil {
		return a, err
	}
	known := false
	if a.Verdict, known = verdicts[verdict]; !known {
		return a, fmt.Errorf("unknown verdict %q: update this program", verdict)
	}
	if a.Found = g.state != nil; !a.Found {
		return a, nil
	}
	a.Record = Record{
		Key: key, State: State(*g.state), Fence: *g.fence, Generation: *g.generation, Attempt: int(*g.attempt),
		Retryable: *g.retryable, Takeover: Takeover(textOf(g.takeover)), Executor: textOf(g.executor), Client: textOf(g.client),
		TraceID: textOf(g.trace), CreatedAt: timeOf(g.created), AcquiredAt: timeOf(g.acquired), CompletedAt: timeOf(g.completed),
		LeaseExpiresAt: timeOf(g.lease), ResultExpiresAt: timeOf(g.resultExpires), ExpiresAt: timeOf(g.expires),
		ErrorCode: textOf(g.code), ErrorMessage: textOf(g.message), ResultType: textOf(g.resultType), Result: g.result,
		Expired: g.expired != nil && *g.expired, TimedOut: g.timedOut != nil && *g.timedOut,
	}
	return a, a.Record.setIdentity(g.fingerprint, g.token)
}

// Owner is the attempt that a record names.
func (r *Record) Owner() Owner {
	return Owner{Key: r.Key, Fence: r.Fence, AttemptToken: r.AttemptToken}
}

// Renew keeps the key for another lease, also after its end if nobody has taken over, and returns the end by PostgreSQL's
// clock. ErrLeaseLost: it is not the owner's any more.
func (s *Store) Renew(ctx context.Context, db DB, o Owner, lease time.Duration) (time.Time, error) {
	until, err := dbsqlc.New(db).LeaseRenew(ctx, dbsqlc.LeaseRenewParams{
		Tenant: o.Key.tenant, Operation: o.Key.operation, Key: o.Key.value, Fence: o.Fence, AttemptToken: o.AttemptToken[:],
		LeaseUs: lease.Microseconds(),
	})
	if err != nil {
		return until, fmt.Errorf("idempotency: renew lease of %v: %w", o.Key, translate(err))
	}
	return until.UTC(), nil
}

// ErrRowLocked means that somebody else has the record's row at this moment, most likely to take it over.
var ErrRowLocked = errors.New("idempotency: the record is being written by somebody else")

// LockLease locks the record in the transaction that will complete it, and returns that transaction's start. ErrLeaseLost:
// the key is not the owner's any more. ErrRowLocked: ask again in a moment.
func (s *Store) LockLease(ctx context.Context, tx DB, o Owner) (started time.Time, err error) {
	row, err := dbsqlc.New(tx).LeaseLock(ctx, dbsqlc.LeaseLockParams{Tenant: o.Key.tenant, Operation: o.Key.operation, Key: o.Key.value})
	var server *pgconn.PgError
	switch {
	case errors.Is(err, pgx.ErrNoRows):
		return started, ErrLeaseLost
	case errors.As(err, &server) && server.Code == "55P03": // lock_not_available
		return started, ErrRowLocked
	case err != nil:
		return started, fmt.Errorf("idempotency: lock %v: %w", o.Key, translate(err))
	case State(row.State) != StateProcessing || row.Fence != o.Fence || AttemptToken(row.AttemptToken) != o.AttemptToken:
		return started, ErrLeaseLost
	}
	return row.Started, nil
}

var (
	leaseComplete = &statement{"pgonce_lease_complete", dbsqlc.LeaseComplete, nil}
	leaseFail     = &statement{"pgonce_lease_fail", dbsqlc.LeaseFail, nil}
)

// CompleteLease records the outcome and commits the transaction that LockLease was in, in one round trip. Errors as for
// Complete, and ErrLeaseLost.
func (s *Store) CompleteLease(ctx context.Context, conn *pgx.Conn, record *Record, c *Completion) (Record, error) {
	st, values := leaseComplete, [][]byte{
		encodeTime(c.Acquired.Started), []byte(record.Key.tenant), []byte(record.Key.operation), []byte(record.Key.value),
		encodeInt8(record.Fence), record.AttemptToken[:], c.Result, []byte(c.ResultType),
		encodeOptionalInt8(microseconds(c.Retention)), encodeOptionalInt8(c.resultRetention()),
	}
	if c.State == StateFailed {
		p := failParams(record, c, false)
		st, values = leaseFail, [][]byte{
			values[1], values[2], values[3], values[4], values[5], []byte(p.ErrorCode), []byte(p.ErrorMessage), encodeBool(false),
			p.Result, encodeOptionalText(p.ResultType), values[8], values[9],
		}
	}
	prepared, err := s.prepare(ctx, conn, st, commit)
	if err != nil {
		if conn.IsClosed() {
			return Record{}, fmt.Errorf("%w: %w", ErrRestart, err)
		}
		return Record{}, translate(err)
	}
	to := &sender{pipeline: conn.PgConn().StartPipeline(ctx), prepared: prepared}
	defer func() { _ = to.pipeline.Close() }() // its errors have been read before
	to.send(st, values...)
	to.send(commit)
	if err := to.pipeline.Sync(); err != nil {
		return Record{}, unknown(err)
	}
	failpoint.Hit(failpoint.CommitSent)
	rows, err := readCommit(to, 1)
	if err != nil {
		return Record{}, err
	}
	return record.ended(c, false, decodeTime(rows[0][0])), nil
}

// resultRetention is NULL where the result is kept as long as its record, which keeps it out of the index of results to drop.
func (c *Completion) resultRetention() *int64 {
	if c.ResultRetention == c.Retention {
		return nil
	}
	return microseconds(c.ResultRetention)
}

func failParams(record *Record, c *Completion, retryable bool) dbsqlc.LeaseFailParams {
	return dbsqlc.LeaseFailParams{
		Tenant: record.Key.tenant, Operation: record.Key.operation, Key: record.Key.value, Fence: record.Fence,
		AttemptToken: record.AttemptToken[:], ErrorCode: storable(c.ErrorCode, MaxErrorBytes),
		ErrorMessage: storable(c.ErrorMessage, MaxErrorBytes), Retryable: retryable, Result: c.Result,
		ResultType: optional(c.ResultType), RetentionUs: microseconds(c.Retention), ResultRetentionUs: c.resultRetention(),
	}
}

// FailLease records a failure, final or retryable, in a statement of its own: sent again after a lost answer it says the
// same. ErrLeaseLost: the key is not the owner's any more.
func (s *Store) FailLease(ctx context.Context, db DB, record *Record, c *Completion, retryable bool) (Record, error) {
	at, err := dbsqlc.New(db).LeaseFail(ctx, failParams(record, c, retryable))
	if err != nil {
		return Record{}, fmt.Errorf("idempotency: fail %v: %w", record.Key, translate(err))
	}
	return record.ended(c, retryable, at), nil
}

// ended is the record of an owner after its end.
func (r Record) ended(c *Completion, retryable bool, at time.Time) Record {
	r.State, r.LeaseExpiresAt, r.TimedOut, r.Retryable = c.State, time.Time{}, false, retryable
	r.ErrorCode, r.ErrorMessage, r.ResultType, r.Result = "", "", c.ResultType, c.Result
	if c.State == StateFailed {
		r.ErrorCode, r.ErrorMessage = storable(c.ErrorCode, MaxErrorBytes), storable(c.ErrorMessage, MaxErrorBytes)
	}
	r.complete(c, at)
	return r
}

// complete sets what PostgreSQL computes from the time of completion.
func (r *Record) complete(c *Completion, at time.Time) {
	r.CompletedAt = at.UTC()
	if c.Retention != Forever {
		r.ExpiresAt = r.CompletedAt.Add(c.Retention.Truncate(time.Microsecond))
	}
	if c.ResultRetention != c.Retention && c.ResultRetention != Forever {
		r.ResultExpiresAt = r.CompletedAt.Add(c.ResultRetention.Truncate(time.Microsecond))
	}
}

// Step is the recorded outcome of one step of a leased operation.
type Step struct {
	Name       string
	Fence      int64 // of the attempt that finished it
	RecordedAt time.Time
	ResultType string
	Result     []byte
}

// Steps returns the finished steps of a record's life, in the order in which they were recorded.
func (s *Store) Steps(ctx context.Context, db DB, record *Record) ([]Step, error) {
	rows, err := dbsqlc.New(db).StepsOf(ctx, dbsqlc.StepsOfParams{
		Tenant: record.Key.tenant, Operation: record.Key.operation, Key: record.Key.value, Generation: record.Generation,
	})
	if err != nil {
		return nil, fmt.Errorf("idempotency: read steps of %v: %w", record.Key, translate(err))
	}
	steps := make([]Step, len(rows))
	for i, row := range rows {
		steps[i] = Step{Name: row.Name, Fence: row.Fence, RecordedAt: row.RecordedAt.UTC(), ResultType: row.ResultType, Result: row.Result}
	}
	return steps, nil
}

// RecordStep records what a step came to. ErrLeaseLost: the key is not the owner's any more.
func (s *Store) RecordStep(ctx context.Context, db DB, o Owner, step *Step) error {
	err := dbsqlc.New(db).StepRecord(ctx, dbsqlc.StepRecordParams{
		Tenant: o.Key.tenant, Operation: o.Key.operation, Key: o.Key.value, Fence: o.Fence, AttemptToken: o.AttemptToken[:],
		Name: step.Name, Result: step.Result, ResultType: step.ResultType,
	})
	if err != nil {
		return fmt.Errorf("idempotency: record step %q of %v: %w", step.Name, o.Key, translate(err))
	}
	return nil
}

// DownstreamKey is what a call to somebody else presents as its idempotency key: the same for every attempt of one life of the
// key, another one for every name, and for the next life. It tells nothing of the key's value.
func (r *Record) DownstreamKey(name string) string {
	h := sha256.New()
	for _, part := range []string{r.Key.tenant, r.Key.operation, r.Key.value, name} {
		h.Write(binary.BigEndian.AppendUint64(nil, uint64(len(part))))
		h.Write([]byte(part))
	}
	h.Write(binary.BigEndian.AppendUint64(nil, uint64(r.Generation))) //nolint:gosec // a fence is positive
	return base64.RawURLEncoding.EncodeToString(h.Sum(nil)[:24])
}
