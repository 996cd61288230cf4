// Package invariant asks PostgreSQL whether what clients were told, the records and the orders agree.
//
// A round of a test collects what every client was told, and then checks:
//
//	I1     one order per tenant, operation and key
//	I2     what a client was told is what is recorded: outcome and bytes
//	I3     the record says SUCCESS if and only if the order is there
//	I4     between two snapshots a key only moves as the state machine allows, and its fence only grows
//	floor  at least so many orders were placed, so that a round in which nothing worked does not pass
//
// I1 to I3 read one snapshot of the database. Records must not be purged before the check.
package invariant

import (
	"context"
	"fmt"
	"strings"

	"github.com/jackc/pgx/v5"
)

// The invariants, as Violation names them.
const (
	I1    = "I1"
	I2    = "I2"
	I3    = "I3"
	I4    = "I4"
	Floor = "floor"
)

// Orders says where the orders of an operation are.
type Orders struct {
	Table     string // "orders", or with its schema "shop.orders"
	KeyColumn string // has the key's value, as text or as something that casts to text; NULL: the order has no key
	Operation string // the operation that places these orders

	// Tenant owns all orders, unless TenantColumn names a column that says whose each is. One of the two is needed.
	Tenant, TenantColumn string

	// OperationColumn names a column that says which operation placed an order, where several share the table.
	// Default: none, all orders are of Operation.
	OperationColumn string
}

// Outcome is what a client was told.
type Outcome string

// The outcomes.
const (
	Succeeded Outcome = "succeeded" // by its own call or by a replay
	Failed    Outcome = "failed"    // a failure that is recorded and replayed
	NotDone   Outcome = "not done"  // a definite error: nothing was recorded by this call
	Unknown   Outcome = "unknown"   // no answer, or none that decides, as of a client that was killed
)

// Told is what one client was told about one call.
type Told struct {
	Tenant, Key string
	Outcome     Outcome
	Replayed    bool

	// Result is the recorded result as the client got it, byte for byte.
	// Default: nil, which is not compared.
	Result []byte
}

// Check is one round's check.
type Check struct {
	Orders Orders
	Told   []Told

	// Before is the snapshot that I4 compares with.
	// Default: nil, I4 is not checked.
	Before *Snapshot

	// AtLeast is the floor: how many different keys must have been told Succeeded.
	// Default: 1. -1 switches it off.
	AtLeast int
}

// Violation is an invariant that a key broke.
type Violation struct {
	Invariant   string
	Tenant, Key string
	What        string
}

// String is one line.
func (v Violation) String() string {
	if v.Key == "" {
		return v.Invariant + ": " + v.What
	}
	return fmt.Sprintf("%s: %s/%s: %s", v.Invariant, v.Tenant, v.Key, v.What)
}

// Report is what a check came to.
type Report struct {
	Violations []Violation
	Useful     int // different keys that were told Succeeded
	Orders     int // rows
	Records    int // of the operation
	After      *Snapshot
}

// shown bounds the text of a report.
const shown = 30

// Err is nil if no invariant is broken, and else an error that names every key and its invariant, up to 30 of them.
func (r *Report) Err() error {
	if len(r.Violations) == 0 {
		return nil
	}
	lines := []string{fmt.Sprintf("invariant: %d violations (%d useful keys, %d orders, %d records)",
		len(r.Violations), r.Useful, r.Orders, r.Records)}
	for i, v := range r.Violations {
		if i == shown {
			lines = append(lines, fmt.Sprintf("... and %d more", len(r.Violations)-shown))
			break
		}
		lines = append(lines, v.String())
	}
	return &Error{Violations: r.Violations, text: strings.Join(lines, "\n\t")}
}

// Error carries the violations.
type Error struct {
	Violations []Violation
	text       string
}

func (e *Error) Error() string { return e.text }

// Database is a pool or a connection of pgx.
type Database interface {
	BeginTx(ctx context.Context, options pgx.TxOptions) (pgx.Tx, error)
}

// Run checks. The error says that it could not; what is broken is in the report, see Report.Err.
func (c *Check) Run(ctx context.Context, db Database) (*Report, error) {
	orders, err := c.Orders.query()
	if err != nil {
		return nil, err
	}
	report := &Report{}
	// One snapshot: an order that is committed between two reads would look like one without its record.
	options := pgx.TxOptions{IsoLevel: pgx.RepeatableRead, AccessMode: pgx.ReadOnly}
	err = pgx.BeginTxFunc(ctx, db, options, func(tx pgx.Tx) error {
		for _, check := range []func(context.Context, pgx.Tx, string, *Report) error{
			c.count, c.oneOrder, c.asTold, c.successIffOrder,
		} {
			if err := check(ctx, tx, orders, report); err != nil {
				return err
			}
		}
		var err error
		report.After, err = take(ctx, tx, c.Orders.Operation)
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("invariant: check: %w", err)
	}
	if c.Before != nil {
		report.Violations = append(report.Violations, c.Before.Compare(report.After)...)
	}
	c.floor(report)
	return report, nil
}

func (c *Check) floor(report *Report) {
	useful := map[[2]string]bool{}
	for _, t := range c.Told {
		if t.Outcome == Succeeded {
			useful[[2]string{t.Tenant, t.Key}] = true
		}
	}
	report.Useful = len(useful)
	atLeast := c.AtLeast
	if atLeast == 0 {
		atLeast = 1
	}
	if report.Useful < atLeast {
		report.Violations = append(report.Violations, Violation{
			Invariant: Floor, What: fmt.Sprintf("only %d keys succeeded, %d are the least", report.Useful, atLeast),
		})
	}
}
