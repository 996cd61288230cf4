package idempotency

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/pgonce/pgonce/internal/dbsqlc"
	"github.com/pgonce/pgonce/internal/failpoint"
)

// Completion is a final outcome about to be recorded.
type Completion struct {
	Request      Request
	Acquired     Acquisition // by the same transaction
	AttemptToken AttemptToken
	TraceID      string

	State                      State // Success or Failed
	ErrorCode, ErrorMessage    string
	ResultType                 string
	Result                     []byte // nil with a ResultType: a tombstone
	Retention, ResultRetention time.Duration

	// Bypass: no record is written, but that it was executed without one. nil: a record.
	Bypass *Bypass
}

// MaxErrorBytes and MaxTraceBytes bound the stored error text and trace id; longer ones are cut.
const (
	MaxErrorBytes = 4096
	MaxTraceBytes = 255
)

// params are what is written. durable: make the commit wait for the disk.
func (s *Store) params(c *Completion, durable bool) dbsqlc.RecordInsertParams {
	key := c.Request.Key
	p := dbsqlc.RecordInsertParams{
		Tenant: key.tenant, Operation: key.operation, Key: key.value,
		Started: c.Acquired.Started, State: string(c.State), Fence: c.Acquired.Fence,
		RetentionUs: microseconds(c.Retention), ResultRetentionUs: c.resultRetention(),
		Fingerprint: c.Request.Fingerprint.Bytes(), AttemptToken: c.AttemptToken[:],
		Executor: s.executor, Client: optional(c.Request.Client), TraceID: optional(storable(c.TraceID, MaxTraceBytes)),
		ResultType: optional(c.ResultType), Result: c.Result,
		Durable: durable,
	}
	if c.Acquired.Found {
		p.Fence = max(p.Fence, c.Acquired.Record.Fence+1) // a failover may have set the sequence back behind the old fence
	}
	if c.State == StateFailed {
		code, message := storable(c.ErrorCode, MaxErrorBytes), storable(c.ErrorMessage, MaxErrorBytes)
		p.ErrorCode, p.ErrorMessage = &code, &message
	}
	return p
}

// optional makes NULL of the empty string.
func optional(s string) *string {
	if s == "" {
		return nil
	}
	return &s
}

// microseconds makes NULL of Forever.
func microseconds(d time.Duration) *int64 {
	if d == Forever {
		return nil
	}
	us := d.Microseconds()
	return &us
}

// encode gives the parameters in the order of recordInsert and recordReplace.
func encode(p *dbsqlc.RecordInsertParams) [][]byte {
	return [][]byte{
		[]byte(p.Tenant), []byte(p.Operation), []byte(p.Key), encodeTime(p.Started), []byte(p.State), encodeInt8(p.Fence),
		encodeOptionalInt8(p.ResultRetentionUs), encodeOptionalInt8(p.RetentionUs), p.Fingerprint, p.AttemptToken,
		[]byte(p.Executor), encodeOptionalText(p.Client), encodeOptionalText(p.TraceID), encodeOptionalText(p.ErrorCode),
		encodeOptionalText(p.ErrorMessage), encodeOptionalText(p.ResultType), p.Result, encodeBool(p.Durable),
	}
}

// storable makes any text one that PostgreSQL takes: the work is done, and its report must not fail over a NUL byte.
func storable(text string, limit int) string {
	text = strings.ReplaceAll(strings.ToValidUTF8(text, "\uFFFD"), "\x00", "\uFFFD")
	if len(text) > limit {
		text = strings.ToValidUTF8(text[:limit-3], "") + "..."
	}
	return text
}

// Complete records the outcome and commits the transaction that Acquire opened, in one round trip: the record, then
// COMMIT, which the server skips when it has refused the record. The transaction is then still open.
//
// Definite errors, nothing was committed: ErrRecordExists (look at the key again), ErrTransactionEnded (by the
// function's own SQL; what that committed stays), ErrRestart (run everything again), or the server's error.
// ErrOutcomeUnknown: COMMIT was sent and its answer never came. ctx must not be the request's: cancelling it does not
// take COMMIT back.
func (s *Store) Complete(ctx context.Context, conn *pgx.Conn, c *Completion) (Record, error) {
	records, err := s.CompleteMany(ctx, conn, []*Completion{c})
	if err != nil {
		return Record{}, err
	}
	return records[0], nil
}

// CompleteMany is Complete for outcomes of several keys that the same transaction has acquired: all of them or none.
func (s *Store) CompleteMany(ctx context.Context, conn *pgx.Conn, all []*Completion) ([]Record, error) {
	statements := make([]*statement, 0, 4)
	for _, c := range all {
		statements = append(statements, c.statement())
		if c.audited() {
			statements = append(statements, attemptFailed)
		}
	}
	statements = append(statements, commit)
	prepared, err := s.prepare(ctx, conn, statements...) // those that few transactions need
	if err != nil {
		if conn.IsClosed() {
			return nil, fmt.Errorf("%w: %w", ErrRestart, err) // nothing of ours was sent yet
		}
		return nil, translate(err)
	}
	to := &sender{pipeline: conn.PgConn().StartPipeline(ctx), prepared: prepared}
	defer func() { _ = to.pipeline.Close() }() // its errors have been read before
	for _, c := range all {
		if c.Bypass != nil {
			params := s.bypassParams(c, true)
			to.send(bypassInsert, encodeBypass(&params)...)
			continue
		}
		params := s.params(c, true)
		values := encode(&params)
		to.send(c.statement(), values...)
		if c.audited() {
			to.send(attemptFailed, values[0], values[1], values[2], params.AttemptToken)
		}
	}
	to.send(commit)
	if err := to.pipeline.Sync(); err != nil {
		return nil, unknown(err) // some of it may have been sent
	}
	failpoint.Hit(failpoint.CommitSent)
	rows, err := readCommit(to, len(statements)-1)
	if err != nil {
		return nil, err
	}
	records, next := make([]Record, len(all)), 0
	for i, c := range all {
		records[i] = s.completed(c, decodeInt8(rows[next][0]), decodeTime(rows[next][1]))
		next++
		if c.audited() {
			next++
		}
	}
	return records, nil
}

func (c *Completion) statement() *statement {
	switch {
	case c.Bypass != nil:
		return bypassInsert
	case c.Acquired.Found:
		return recordReplace
	}
	return recordInsert
}

// audited: a recorded failure is in idempotency.attempts too.
func (c *Completion) audited() bool { return c.State == StateFailed && c.Bypass == nil }

// readCommit reads the answers to statements and to the COMMIT behind them, and returns each one's row.
func readCommit(to *sender, statements int) (rows [][][]byte, err error) {
	rows = make([][][]byte, statements)
	for i := range statements {
		row, _, err := to.next()
		switch {
		case err != nil && (definite(err) || endedForTime(err)):
			// Or the session was over before our statement: either way, before COMMIT.
			return nil, translate(err)
		case err != nil:
			return nil, unknown(err)
		}
		rows[i] = row
	}
	_, tag, err := to.next()
	switch {
	case err != nil && !definite(err):
		return nil, unknown(err)
	case err != nil && Restartable(err):
		return nil, fmt.Errorf("%w: %w", ErrRestart, err)
	case err != nil:
		// A deferred constraint or trigger of the service: its own error, whatever its SQLSTATE.
		return nil, fmt.Errorf("idempotency: commit: %w", err)
	}
	_ = to.sync() // COMMIT has answered: what is lost behind it changes nothing
	if tag.String() != "COMMIT" {
		return nil, fmt.Errorf("idempotency: COMMIT answered %s: %w", tag, ErrAborted)
	}
	return rows, nil
}

func unknown(err error) error { return fmt.Errorf("%w: %w", ErrOutcomeUnknown, err) }

// completed is the record as it was written.
func (s *Store) completed(c *Completion, fence int64, completedAt time.Time) Record {
	if c.Bypass != nil {
		return s.bypassed(c, completedAt)
	}
	r := s.record(c)
	r.Fence, r.Generation, r.Attempt = fence, fence, 1
	r.CreatedAt, r.AcquiredAt = c.Acquired.Started, c.Acquired.Started
	r.complete(c, completedAt)
	return r
}

func (s *Store) record(c *Completion) Record {
	r := Record{
		Key: c.Request.Key, State: c.State, Fingerprint: c.Request.Fingerprint, AttemptToken: c.AttemptToken,
		Executor: s.executor, Client: c.Request.Client, TraceID: storable(c.TraceID, MaxTraceBytes), ResultType: c.ResultType, Result: c.Result,
	}
	if c.State == StateFailed {
		r.ErrorCode, r.ErrorMessage = storable(c.ErrorCode, MaxErrorBytes), storable(c.ErrorMessage, MaxErrorBytes)
	}
	return r
}

// CompleteTx records the outcome in a transaction of the caller, who commits. Errors as for Complete.
func (s *Store) CompleteTx(ctx context.Context, tx pgx.Tx, c *Completion) (Record, error) {
	q, p := dbsqlc.New(tx), s.params(c, false)
	var row dbsqlc.RecordInsertRow
	var err error
	switch {
	case c.Bypass != nil:
		var bypassed dbsqlc.BypassInsertRow
		bypassed, err = q.BypassInsert(ctx, s.bypassParams(c, false))
		row.CompletedAt = &bypassed.CompletedAt
	case c.Acquired.Found:
		var replaced dbsqlc.RecordReplaceRow
		replaced, err = q.RecordReplace(ctx, dbsqlc.RecordReplaceParams(p))
		row = dbsqlc.RecordInsertRow(replaced)
	default:
		row, err = q.RecordInsert(ctx, p)
	}
	if err == nil && c.audited() {
		err = q.AttemptInsertFailed(ctx, dbsqlc.AttemptInsertFailedParams{
			Tenant: p.Tenant, Operation: p.Operation, Key: p.Key, AttemptToken: p.AttemptToken,
		})
	}
	if err != nil {
		return Record{}, fmt.Errorf("idempotency: record %v: %w", c.Request.Key, translate(err))
	}
	return s.completed(c, row.Fence, timeOf(row.CompletedAt)), nil
}

// definite reports whether the server itself said that the statement failed and the session goes on. FATAL ends the
// session, class 08 and 40003 say that nobody knows.
func definite(err error) bool {
	var server *pgconn.PgError
	return errors.As(err, &server) && server.SeverityUnlocalized == "ERROR" &&
		!strings.HasPrefix(server.Code, "08") && server.Code != "40003"
}

// endedForTime reports whether the server ended the session because the function took too long.
func endedForTime(err error) bool {
	var server *pgconn.PgError
	return errors.As(err, &server) && (server.Code == "25P03" || server.Code == "25P04")
}
