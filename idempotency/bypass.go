package idempotency

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/pgonce/pgonce/internal/dbsqlc"
)

// WouldBe is what EnforcementEnforce would have done with a call that was executed without a record.
type WouldBe string

// What it would have been.
const (
	WouldRun      WouldBe = "RUN"         // the same, and recorded: EnforcementOff
	WouldReplay   WouldBe = "REPLAY"      // the first outcome given again
	WouldMismatch WouldBe = "MISMATCH"    // refused: another payload has the key
	WouldBeBusy   WouldBe = "IN_PROGRESS" // waited for whoever runs the key
	WouldBeGone   WouldBe = "GONE"        // told that it is done, and its result gone
	WouldBeNewer  WouldBe = "NEWER"       // refused: the record is of a newer release
)

// Bypass makes a Completion a row of idempotency.bypasses instead of a record.
type Bypass struct {
	Enforcement Enforcement // Off or Shadow
	WouldBe     WouldBe
	Change      int64 // the policy's
	Ended       bool  // the function has ended its transaction by itself
}

// The outcomes of an execution without a record, beside the states of a record.
const bypassEnded = "ENDED"

func (b *Bypass) outcome(s State) string {
	if b.Ended {
		return bypassEnded
	}
	return string(s)
}

// bypassParams are what is written in the place of a record.
func (s *Store) bypassParams(c *Completion, durable bool) dbsqlc.BypassInsertParams {
	key := c.Request.Key
	p := dbsqlc.BypassInsertParams{
		Tenant: key.tenant, Operation: key.operation, Key: key.value, AttemptToken: c.AttemptToken[:],
		Fingerprint: c.Request.Fingerprint.Bytes(), Enforcement: string(c.Bypass.Enforcement), WouldBe: string(c.Bypass.WouldBe),
		Started: c.Acquired.Started, Outcome: c.Bypass.outcome(c.State), Executor: s.executor,
		Client: optional(c.Request.Client), TraceID: optional(storable(c.TraceID, MaxTraceBytes)), PolicyChange: c.Bypass.Change,
		RetentionUs: microseconds(c.Retention), Durable: durable,
	}
	if c.State == StateFailed {
		code := storable(c.ErrorCode, MaxErrorBytes)
		p.ErrorCode = &code
	}
	return p
}

// encodeBypass gives the parameters in the order of bypassInsert.
func encodeBypass(p *dbsqlc.BypassInsertParams) [][]byte {
	return [][]byte{
		[]byte(p.Tenant), []byte(p.Operation), []byte(p.Key), p.AttemptToken, p.Fingerprint, []byte(p.Enforcement), []byte(p.WouldBe),
		encodeTime(p.Started), []byte(p.Outcome), encodeOptionalText(p.ErrorCode), []byte(p.Executor), encodeOptionalText(p.Client),
		encodeOptionalText(p.TraceID), encodeInt8(p.PolicyChange), encodeOptionalInt8(p.RetentionUs), encodeBool(p.Durable),
	}
}

// bypassed is what the caller is told of an execution without a record: a Record that has no fence, since nothing has it.
func (s *Store) bypassed(c *Completion, at time.Time) Record {
	r := s.record(c)
	r.CreatedAt, r.AcquiredAt, r.CompletedAt, r.Attempt = c.Acquired.Started, c.Acquired.Started, at, 1
	return r
}

// LookupBypass looks for a committed execution without a record of one of these attempts. Where a synchronous standby is
// configured its answer is proven to be replicated.
func (s *Store) LookupBypass(ctx context.Context, conn *pgx.Conn, key Key, attempts []AttemptToken) (r Record, found bool, err error) {
	tokens := make([][]byte, len(attempts))
	for i := range attempts {
		tokens[i] = attempts[i][:]
	}
	err = pgx.BeginTxFunc(ctx, conn, pgx.TxOptions{IsoLevel: pgx.ReadCommitted, AccessMode: pgx.ReadWrite}, func(tx pgx.Tx) error {
		row, err := dbsqlc.New(tx).BypassGetAttempt(ctx, dbsqlc.BypassGetAttemptParams{
			Tenant: key.tenant, Operation: key.operation, Key: key.value, AttemptTokens: tokens,
		})
		switch {
		case errors.Is(err, pgx.ErrNoRows):
			return nil
		case err != nil:
			return err
		}
		found = true
		r = Record{
			Key: key, State: StateSuccess, Attempt: 1, ErrorCode: row.ErrorCode,
			CreatedAt: row.BeganAt.UTC(), AcquiredAt: row.BeganAt.UTC(), CompletedAt: row.BypassedAt.UTC(),
		}
		if row.Outcome != string(StateSuccess) {
			r.State = StateFailed
		}
		copy(r.AttemptToken[:], row.AttemptToken)
		_, err = tx.Exec(ctx, dbsqlc.ProveReplicated)
		return err
	})
	if err != nil {
		return Record{}, false, fmt.Errorf("idempotency: look for executions of %v: %w", key, translate(err))
	}
	return r, found, nil
}

// OpenBypass looks for an execution without a record of a key that has none, in the transaction that has acquired it, and
// gives the verdict of that: VerdictGone, since it is done and its result was never kept, VerdictMismatch or VerdictNewer;
// VerdictRun: there is none within its retention, or a person has said that it may run again.
func (s *Store) OpenBypass(ctx context.Context, db DB, req Request) (Verdict, Record, error) {
	key := req.Key
	row, err := dbsqlc.New(db).BypassOpen(ctx, dbsqlc.BypassOpenParams{
		Tenant: key.tenant, Operation: key.operation, Key: key.value,
	})
	switch {
	case errors.Is(err, pgx.ErrNoRows):
		return VerdictRun, Record{}, nil
	case err != nil:
		return "", Record{}, fmt.Errorf("idempotency: look for executions of %v: %w", key, translate(err))
	}
	r := Record{Key: key, State: StateSuccess, CreatedAt: row.BypassedAt.UTC(), CompletedAt: row.BypassedAt.UTC()}
	if r.Fingerprint, err = ParseFingerprint(row.Fingerprint); err != nil {
		return "", Record{}, err
	}
	if v, same := r.compare(req.Fingerprint); !same {
		return v, r, nil
	}
	return VerdictGone, r, nil
}
