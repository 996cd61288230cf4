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

// What Fill spreads its records over.
const (
	Tenants    = 1000
	Operations = 10
)

// fillBatch is how many records one statement inserts.
const fillBatch = 100_000

// Fill is what to put into an empty schema idempotency.
type Fill struct {
	Records     int
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
	for from := 1; from <= f.Records; from += fillBatch {
		to := min(from+fillBatch-1, f.Records)
		if _, err := conn.Exec(ctx, fillSQL, from, to, f.Records, f.RandomKeys, f.Fingerprint); err != nil {
			return fmt.Errorf("audittest: fill: %w", err)
		}
		if f.Progress != nil {
			f.Progress(to)
		}
	}
	// No fence is given twice.
	if _, err := conn.Exec(ctx, `SELECT setval('idempotency.fence', $1)`, f.Records); err != nil {
		return fmt.Errorf("audittest: fill: %w", err)
	}
	// VACUUM: a table of that age has been vacuumed, and an index-only scan needs it.
	if _, err := conn.Exec(ctx, `VACUUM ANALYZE idempotency.records`); err != nil {
		return fmt.Errorf("audittest: fill: %w", err)
	}
	return nil
}
