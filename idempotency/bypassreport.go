package idempotency

import (
	"context"
	"fmt"
	"time"

	"github.com/pgonce/pgonce/internal/dbsqlc"
)

// ShadowLine says what EnforcementEnforce would have done with calls of an operation that shadow has executed.
type ShadowLine struct {
	Operation       string
	WouldBe         WouldBe
	Calls, Keys     int64
	FirstAt, LastAt time.Time
	// ExampleKey is one of the keys, and ExampleTrace one of the calls' traces, if they have any.
	ExampleKey, ExampleTrace string
}

// ShadowReport returns a line for each operation and each thing that would have been done differently, of the last time. An
// empty operation is all. It reads what was logged in that time.
func (s *Store) ShadowReport(ctx context.Context, db DB, operation string, last time.Duration) ([]ShadowLine, error) {
	if err := validateOwners("", operation); err != nil {
		return nil, err
	}
	rows, err := dbsqlc.New(db).ShadowReport(ctx, dbsqlc.ShadowReportParams{Operation: operation, SinceUs: last.Microseconds()})
	if err != nil {
		return nil, fmt.Errorf("idempotency: report of shadow: %w", translate(err))
	}
	lines := make([]ShadowLine, len(rows))
	for i, row := range rows {
		lines[i] = ShadowLine{
			Operation: row.Operation, WouldBe: WouldBe(row.WouldBe), Calls: row.Calls, Keys: row.Keys,
			FirstAt: row.FirstAt.UTC(), LastAt: row.LastAt.UTC(), ExampleKey: row.ExampleKey, ExampleTrace: row.ExampleTrace,
		}
	}
	return lines, nil
}

// ReusedKey is a value that one tenant uses for several operations. It is no error: they are several keys. But a client that
// believes one value to be one request may be surprised.
type ReusedKey struct {
	Tenant, Value string
	Operations    []string
}

// ReusedKeys returns at most limit of them, in the order of value and tenant, behind the last one of the page before; nil for
// the first page. It reads the primary key's index from there on until it has found so many.
func (s *Store) ReusedKeys(ctx context.Context, db DB, after *ReusedKey, limit int) ([]ReusedKey, error) {
	p := dbsqlc.ReusedKeysParams{Rows: int32(limit)} //nolint:gosec // a page
	if after != nil {
		p.AfterKey, p.AfterTenant = after.Value, after.Tenant
	}
	rows, err := dbsqlc.New(db).ReusedKeys(ctx, p)
	if err != nil {
		return nil, fmt.Errorf("idempotency: list reused keys: %w", translate(err))
	}
	keys := make([]ReusedKey, len(rows))
	for i, row := range rows {
		keys[i] = ReusedKey{Tenant: row.Tenant, Value: row.Key, Operations: row.Operations}
	}
	return keys, nil
}

// BypassedKey is a key that was executed without a record: while the kill switch was on, or in shadow beside a running call.
type BypassedKey struct {
	Key        Key
	Executions int64
	Payloads   int64 // different ones
	// Record is the state of the record that the key has meanwhile; empty: none.
	Record          State
	Outcome         string // SUCCESS; ENDED: the function has ended its transaction, a part may be committed
	FirstAt, LastAt time.Time
	ExampleTrace    string
	Change          int64 // of the last policy it was executed under
	// Resolution is what a person has decided about its executions; empty: of one of them, nothing yet.
	Resolution Resolved
}

// Duplicate reports whether the operation was certainly done more than once.
func (k *BypassedKey) Duplicate() bool { return k.Executions > 1 || k.Record == StateSuccess }

// Resolved is what a person has decided about executions without a record.
type Resolved string

// The decisions.
const (
	ResolvedDone  Resolved = "DONE"  // it is done: a late call is told so, ErrResultExpired
	ResolvedRerun Resolved = "RERUN" // a later call may run the operation
)

// BypassFilter chooses keys of Bypassed.
type BypassFilter struct {
	Operation  string // empty: all
	Duplicates bool   // only those that were done more than once
	Reconciled bool   // also those about which a person has decided that they are done
	After      Key    // the last one of the page before
}

// Bypassed returns a page of keys that were executed without a record, in the order of operation, value and tenant. more: there
// are others.
func (s *Store) Bypassed(ctx context.Context, db DB, f *BypassFilter, limit int) (page []BypassedKey, more bool, err error) {
	if err := validateOwners("", f.Operation); err != nil {
		return nil, false, err
	}
	rows, err := dbsqlc.New(db).BypassedList(ctx, dbsqlc.BypassedListParams{
		Reconciled: f.Reconciled, OnlyOperation: f.Operation, Duplicates: f.Duplicates,
		AfterOperation: f.After.operation, AfterKey: f.After.value, AfterTenant: f.After.tenant, Rows: int32(limit) + 1, //nolint:gosec // a page
	})
	if err != nil {
		return nil, false, fmt.Errorf("idempotency: list bypassed keys: %w", translate(err))
	}
	if more = len(rows) > limit; more {
		rows = rows[:limit]
	}
	page = make([]BypassedKey, len(rows))
	for i, row := range rows {
		page[i] = BypassedKey{
			Key:        Key{tenant: row.Tenant, operation: row.Operation, value: row.Key},
			Executions: row.Executions, Payloads: row.Payloads, Record: State(row.Record), Outcome: row.Outcome,
			FirstAt: row.FirstAt.UTC(), LastAt: row.LastAt.UTC(), ExampleTrace: row.ExampleTrace, Change: row.PolicyChange,
		}
		if !row.Unreconciled {
			page[i].Resolution = Resolved(row.Resolution)
		}
	}
	return page, more, nil
}

// CountBypassed counts executions without a record that nobody has reconciled, up to most.
func (s *Store) CountBypassed(ctx context.Context, db DB, most int) (int64, error) {
	n, err := dbsqlc.New(db).BypassCount(ctx, int32(most)) //nolint:gosec // a bound of the caller's
	if err != nil {
		return 0, fmt.Errorf("idempotency: count bypassed keys: %w", translate(err))
	}
	return n, nil
}

// Reconcile notes what a person has decided about a key's executions without a record, with who and why; it is in
// idempotency.attempts too. It returns how many executions that changed. ErrOutcomeUnknown: look before doing it again.
func (s *Store) Reconcile(ctx context.Context, db Beginner, key Key, as Resolved, b Blame) (changed int64, err error) {
	switch {
	case key.IsZero():
		return 0, &InvalidError{Field: "key", Rule: "must be set"}
	case as != ResolvedDone && as != ResolvedRerun:
		return 0, &InvalidError{Field: "resolution", Rule: "must be DONE or RERUN"}
	}
	if err := b.Validate(); err != nil {
		return 0, err
	}
	err = inOperatorTx(ctx, db, fmt.Sprintf("reconcile %v", key), func(q *dbsqlc.Queries) error {
		if err := q.PolicyBlame(ctx, dbsqlc.PolicyBlameParams{Actor: b.Actor, Reason: b.Reason}); err != nil {
			return err
		}
		changed, err = q.BypassReconcile(ctx, dbsqlc.BypassReconcileParams{
			Resolution: string(as), Actor: b.Actor, Reason: b.Reason, Tenant: key.tenant, Operation: key.operation, Key: key.value,
		})
		if err != nil || changed == 0 {
			return err
		}
		return q.BypassReconcileAttempt(ctx, dbsqlc.BypassReconcileAttemptParams{
			Actor: b.Actor, Reason: b.Reason, Tenant: key.tenant, Operation: key.operation, Key: key.value,
		})
	})
	if err != nil {
		return 0, err
	}
	return changed, nil
}

// PurgeBypasses deletes up to limit rows of idempotency.bypasses that are older than age. What the kill switch has let through
// stays until a person has reconciled it. more: there may be others.
func (s *Store) PurgeBypasses(ctx context.Context, db DB, age time.Duration, limit int) (gone int64, more bool, err error) {
	q := dbsqlc.New(db)
	rows, err := q.BypassPurgeList(ctx, dbsqlc.BypassPurgeListParams{AgeUs: age.Microseconds(), Batch: int32(limit)}) //nolint:gosec // a batch
	if err == nil && len(rows) > 0 {
		var p dbsqlc.BypassDeleteParams
		for _, row := range rows {
			p.Tenants, p.Operations = append(p.Tenants, row.Tenant), append(p.Operations, row.Operation)
			p.Keys, p.Tokens = append(p.Keys, row.Key), append(p.Tokens, row.AttemptToken)
		}
		gone, err = q.BypassDelete(ctx, p)
	}
	if err != nil {
		return 0, false, fmt.Errorf("idempotency: purge executions without a record: %w", translate(err))
	}
	return gone, len(rows) == limit, nil
}

// CountOldBypasses counts what PurgeBypasses would delete.
func (s *Store) CountOldBypasses(ctx context.Context, db DB, age time.Duration) (int64, error) {
	n, err := dbsqlc.New(db).BypassPurgeCount(ctx, age.Microseconds())
	if err != nil {
		return 0, fmt.Errorf("idempotency: count executions without a record: %w", translate(err))
	}
	return n, nil
}
