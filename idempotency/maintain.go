package idempotency

import (
	"context"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/pgonce/pgonce/internal/dbsqlc"
)

// Stale is a record whose lease has ended and whose owner has not come back.
type Stale struct {
	Key            Key
	Fence          int64
	Takeover       Takeover
	LeaseExpiresAt time.Time
}

// ListStale returns a page of what was stale at a time of PostgreSQL's clock, the longest dead first, behind the last one of
// the page before; nil for the first page.
func (s *Store) ListStale(ctx context.Context, db DB, until time.Time, after *Stale, limit int) ([]Stale, error) {
	p := dbsqlc.StaleListParams{Until: until, Batch: int32(limit)} //nolint:gosec // a page
	if after != nil {
		p.AfterLeaseExpiresAt, p.AfterKey = after.LeaseExpiresAt, after.Key.value
		p.AfterTenant, p.AfterOperation = after.Key.tenant, after.Key.operation
	}
	rows, err := dbsqlc.New(db).StaleList(ctx, p)
	if err != nil {
		return nil, fmt.Errorf("idempotency: list stale records: %w", translate(err))
	}
	page := make([]Stale, len(rows))
	for i, row := range rows {
		page[i] = Stale{
			Key:   Key{tenant: row.Tenant, operation: row.Operation, value: row.Key},
			Fence: row.Fence, Takeover: Takeover(textOf(row.Takeover)), LeaseExpiresAt: timeOf(row.LeaseExpiresAt),
		}
	}
	return page, nil
}

// Rescue makes a stale record with the rule RERUN or RESUME a retryable failure. false: it is not stale any more.
func (s *Store) Rescue(ctx context.Context, db DB, one Stale, actor, reason string, retention time.Duration) (bool, error) {
	rescued, err := dbsqlc.New(db).StaleRescue(ctx, dbsqlc.StaleRescueParams{
		Tenant: one.Key.tenant, Operation: one.Key.operation, Key: one.Key.value, Fence: one.Fence, Actor: actor, Reason: reason,
		RetentionUs: microseconds(retention),
	})
	if err != nil {
		return false, fmt.Errorf("idempotency: rescue %v: %w", one.Key, translate(err))
	}
	return rescued, nil
}

// CompleteLeaseTx records an outcome that was found out about, with who found it and why, in the transaction that LockLease
// was in. Its caller commits.
func (s *Store) CompleteLeaseTx(ctx context.Context, tx pgx.Tx, record *Record, c *Completion, actor, reason string) error {
	q, key := dbsqlc.New(tx), record.Key
	var err error
	if c.State == StateFailed {
		_, err = q.LeaseFail(ctx, failParams(record, c, false))
	} else {
		_, err = q.LeaseComplete(ctx, dbsqlc.LeaseCompleteParams{
			Started: c.Acquired.Started, Tenant: key.tenant, Operation: key.operation, Key: key.value, Fence: record.Fence,
			AttemptToken: record.AttemptToken[:], Result: c.Result, ResultType: c.ResultType,
			RetentionUs: microseconds(c.Retention), ResultRetentionUs: c.resultRetention(),
		})
	}
	if err == nil {
		err = q.AttemptInsertRescued(ctx, dbsqlc.AttemptInsertRescuedParams{
			Actor: actor, Reason: reason, Tenant: key.tenant, Operation: key.operation, Key: key.value, AttemptToken: record.AttemptToken[:],
		})
	}
	if err != nil {
		return fmt.Errorf("idempotency: record the outcome of %v: %w", key, translate(err))
	}
	return nil
}

// DropResults drops up to limit results whose time is over; their records stay. more: there may be others.
func (s *Store) DropResults(ctx context.Context, db DB, limit int) (n int64, more bool, err error) {
	q := dbsqlc.New(db)
	rows, err := q.ExpiredResultsList(ctx, int32(limit)) //nolint:gosec // a batch
	if err == nil && len(rows) > 0 {
		var p dbsqlc.ResultsDropParams
		for _, row := range rows {
			p.Tenants, p.Operations = append(p.Tenants, row.Tenant), append(p.Operations, row.Operation)
			p.Keys, p.Fences = append(p.Keys, row.Key), append(p.Fences, row.Fence)
		}
		n, err = q.ResultsDrop(ctx, p)
	}
	if err != nil {
		return n, false, fmt.Errorf("idempotency: drop results: %w", translate(err))
	}
	return n, len(rows) == limit, nil
}

// Purge deletes up to limit expired records, with their steps and attempts. It waits for whoever has one of them locked. full:
// there were as many.
func (s *Store) Purge(ctx context.Context, db DB, limit int) (n int64, full bool, err error) {
	n, err = dbsqlc.New(db).ExpiredDeleteHere(ctx, int32(limit)) //nolint:gosec // a batch
	if err != nil {
		return 0, false, fmt.Errorf("idempotency: purge: %w", translate(err))
	}
	return n, n == int64(limit), nil
}

// PurgeFree is Purge without the records that somebody has locked: it waits for nobody.
func (s *Store) PurgeFree(ctx context.Context, db DB, limit int) (n int64, more bool, err error) {
	n, err = dbsqlc.New(db).ExpiredDeleteFree(ctx, int32(limit)) //nolint:gosec // a batch
	if err != nil {
		return 0, false, fmt.Errorf("idempotency: purge: %w", translate(err))
	}
	return n, n > 0, nil
}

// PurgeSharded is Purge by the records' keys, for a table that is spread over several.
func (s *Store) PurgeSharded(ctx context.Context, db DB, limit int) (n int64, more bool, err error) {
	q := dbsqlc.New(db)
	rows, err := q.ExpiredList(ctx, int32(limit)) //nolint:gosec // a batch
	if err == nil && len(rows) > 0 {
		var p dbsqlc.ExpiredDeleteParams
		for _, row := range rows {
			p.Tenants, p.Operations = append(p.Tenants, row.Tenant), append(p.Operations, row.Operation)
			p.Keys, p.Fences = append(p.Keys, row.Key), append(p.Fences, row.Fence)
		}
		n, err = q.ExpiredDelete(ctx, p)
	}
	if err != nil {
		return n, false, fmt.Errorf("idempotency: purge: %w", translate(err))
	}
	return n, len(rows) == limit, nil
}

// Sharded reports whether the records are spread over several tables: partitions, or shards.
func (s *Store) Sharded(ctx context.Context, db DB) (bool, error) {
	sharded, err := dbsqlc.New(db).Sharded(ctx)
	if err != nil {
		return false, fmt.Errorf("idempotency: look at the table: %w", translate(err))
	}
	return sharded, nil
}

// CountMaintenance counts what DropResults and Purge would find.
func (s *Store) CountMaintenance(ctx context.Context, db DB) (results, records int64, err error) {
	row, err := dbsqlc.New(db).MaintenanceCount(ctx)
	if err != nil {
		return 0, 0, fmt.Errorf("idempotency: count what is past its time: %w", translate(err))
	}
	return row.Results, row.Records, nil
}

// LookupIn is Lookup wherever a plain query can be sent, without its look at whether the server is a standby.
func (s *Store) LookupIn(ctx context.Context, db DB, key Key) (r Record, found bool, err error) {
	r, found, err = scanRecord(key, db.QueryRow(ctx, dbsqlc.RecordGet, key.tenant, key.operation, key.value))
	if err != nil {
		return Record{}, false, fmt.Errorf("idempotency: look up %v: %w", key, translate(err))
	}
	return r, found, nil
}
