package idempotency

import (
	"context"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/pgonce/pgonce/internal/dbsqlc"
)

// Batcher sends several statements in one round trip: a pool, a connection or a transaction of pgx.
type Batcher interface {
	SendBatch(ctx context.Context, b *pgx.Batch) pgx.BatchResults
}

// Snapshot is what PostgreSQL says of a page of keys.
type Snapshot struct {
	Epoch   string // read before the records
	Now     time.Time
	Records map[Key]Record // what is there, of whatever state
}

// ReadMany reads the records of many keys, and the epoch that they are of. On a standby it is ErrReadOnly.
func (s *Store) ReadMany(ctx context.Context, db Batcher, keys []Key) (Snapshot, error) {
	var b pgx.Batch
	b.Queue(dbsqlc.EpochGet)
	for _, key := range keys {
		b.Queue(dbsqlc.RecordGet, key.tenant, key.operation, key.value)
	}
	results := db.SendBatch(ctx, &b)
	defer func() { _ = results.Close() }()
	snap := Snapshot{Records: make(map[Key]Record, len(keys))}
	var epoch *string
	if err := results.QueryRow().Scan(&epoch, &snap.Now); err != nil {
		return Snapshot{}, fmt.Errorf("idempotency: read epoch: %w", translate(err))
	}
	if epoch == nil {
		return Snapshot{}, ErrReadOnly
	}
	snap.Epoch = *epoch
	for _, key := range keys {
		r, found, err := scanRecord(key, results.QueryRow())
		if err != nil {
			return Snapshot{}, fmt.Errorf("idempotency: read %v: %w", key, translate(err))
		}
		if found {
			snap.Records[key] = r
		}
	}
	return snap, nil
}

// Span asks for the outcomes recorded in a span of PostgreSQL's time, of operations with one retention.
type Span struct {
	Since, Until time.Time
	Operations   []string
	Retention    time.Duration
}

// SpanMark is where a page of ListOutcomes ended.
type SpanMark struct {
	Key       Key
	expiresAt time.Time
}

// ListOutcomes returns a page of the keys whose final outcome was recorded in a span, in no order that matters, behind the end
// of the page before; nil for the first page. Records that are kept for ever are not listed.
func (s *Store) ListOutcomes(ctx context.Context, db DB, span Span, after *SpanMark, limit int) ([]SpanMark, error) {
	p := dbsqlc.RecentOutcomesParams{
		Since: span.Since, Until: span.Until, RetentionUs: span.Retention.Microseconds(), Operations: span.Operations,
		Batch: int32(limit), //nolint:gosec // a page
	}
	if after != nil {
		p.AfterExpiresAt, p.AfterKey = after.expiresAt, after.Key.value
		p.AfterTenant, p.AfterOperation = after.Key.tenant, after.Key.operation
	}
	rows, err := dbsqlc.New(db).RecentOutcomes(ctx, p)
	if err != nil {
		return nil, fmt.Errorf("idempotency: list outcomes: %w", translate(err))
	}
	page := make([]SpanMark, len(rows))
	for i, row := range rows {
		page[i] = SpanMark{Key: Key{tenant: row.Tenant, operation: row.Operation, value: row.Key}, expiresAt: timeOf(row.ExpiresAt)}
	}
	return page, nil
}

// Running returns which of these lock ids are of keys that somebody runs right now.
func (s *Store) Running(ctx context.Context, db DB, lockIDs []int64) (map[int64]bool, error) {
	rows, err := dbsqlc.New(db).KeysRunning(ctx, lockIDs)
	if err != nil {
		return nil, fmt.Errorf("idempotency: look for who runs keys: %w", translate(err))
	}
	running := make(map[int64]bool, len(rows))
	for _, id := range rows {
		running[id] = true
	}
	return running, nil
}

// OperationSeen is an operation that records are of, for a tool that has no declarations.
type OperationSeen struct {
	Name      string
	Retention time.Duration // the longest seen; 0: none
}

// OperationsSeen returns the operations of what was recorded lately, of what is to be forgotten next, and of what runs.
func (s *Store) OperationsSeen(ctx context.Context, db DB) ([]OperationSeen, error) {
	rows, err := dbsqlc.New(db).OperationsSeen(ctx)
	if err != nil {
		return nil, fmt.Errorf("idempotency: look for operations: %w", translate(err))
	}
	seen := make([]OperationSeen, len(rows))
	for i, row := range rows {
		seen[i] = OperationSeen{Name: row.Operation, Retention: time.Duration(row.RetentionUs) * time.Microsecond}
	}
	return seen, nil
}
