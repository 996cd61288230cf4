// Package audittest asks the questions of docs/audit.md about many records: it makes the records, reads the questions and
// their remedies from the guides, and runs them with EXPLAIN. The tests of db use it, and the benchmark.
package audittest

import (
	"context"
	_ "embed"
	"errors"
	"fmt"

	"github.com/jackc/pgx/v5"
)

//go:embed fill.sql
var fillSQL string

// Tenants is the number of tenants of a Fill's records: acme, globex, tenant-002 and so on.
const Tenants = 1000

// Operations are what a Fill's records are for: each tenant has all of them.
var Operations = []string{
	"order.create", "order.cancel", "payment.capture", "payment.refund", "invoice.issue",
	"shipment.book", "stock.reserve", "coupon.redeem", "account.open", "label.print",
}

// fillBatch is how many records one statement inserts.
const fillBatch = 100_000

// Fill is what to put into a schema idempotency, empty or filled before.
type Fill struct {
	From        int    // records that an earlier Fill left
	Records     int    // to insert
	RandomKeys  bool   // UUIDv4; else UUIDv7
	Fingerprint []byte // of all records, 33 bytes
	// Progress, if set, is told after each batch.
	Progress func(done int)
}

// Run inserts the records. Their keys' index grows as in a service, but the trigger is spared: it would only check what
// is right.
func (f Fill) Run(ctx context.Context, conn *pgx.Conn) (err error) {
	const trigger = `ALTER TABLE idempotency.records %s TRIGGER records_check`
	if _, err := conn.Exec(ctx, fmt.Sprintf(trigger, "DISABLE")); err != nil {
		return fmt.Errorf("audittest: fill: %w", err)
	}
	defer func() {
		_, enableErr := conn.Exec(ctx, fmt.Sprintf(trigger, "ENABLE"))
		err = errors.Join(err, enableErr)
	}()
	all := f.From + f.Records
	for from := f.From + 1; from <= all; from += fillBatch {
		to := min(from+fillBatch-1, all)
		if _, err := conn.Exec(ctx, fillSQL, from, to, all, f.RandomKeys, f.Fingerprint, Operations, Tenants); err != nil {
			return fmt.Errorf("audittest: fill: %w", err)
		}
		if f.Progress != nil {
			f.Progress(to)
		}
	}
	// No fence is given twice.
	if _, err := conn.Exec(ctx, `SELECT setval('idempotency.fence', greatest($1, (SELECT last_value FROM idempotency.fence)))`, all); err != nil {
		return fmt.Errorf("audittest: fill: %w", err)
	}
	// VACUUM: a table of that age has been vacuumed, and an index-only scan needs it.
	if _, err := conn.Exec(ctx, `VACUUM ANALYZE idempotency.records`); err != nil {
		return fmt.Errorf("audittest: fill: %w", err)
	}
	return nil
}
