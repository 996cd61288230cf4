package idempotency

import (
	"context"
	"time"
)

// Auditable is a front whose content can be listed and held against PostgreSQL, as the compensator does. What it finds wrong
// it discards, and publishes the record that is right.
type Auditable interface {
	Front
	// Scan goes through what the front keeps of these operations.
	Scan(operations []string) Scanner
	// Inspect returns what the front keeps of these keys: one Kept for each, in their order. One that is not there has no Name.
	Inspect(ctx context.Context, keys []Key) ([]Kept, error)
	// Reinspect looks again at what a Scanner or Inspect has returned. One that is not there any more has no Name.
	Reinspect(ctx context.Context, kept []Kept) ([]Kept, error)
	// Discard removes what was found, unless something else has taken its place meanwhile. It returns how many were removed.
	Discard(ctx context.Context, kept []Kept) (int, error)
	// Flush returns when what was published so far has been stored, or dropped.
	Flush(ctx context.Context) error
}

// Scanner goes through the content of a front, page by page. It is not safe for concurrent use.
type Scanner interface {
	// Next returns a page, which may be empty, and whether the front has been gone through: then it begins again. Something may
	// come twice, and what came or went meanwhile may be missed.
	Next(ctx context.Context) (page []Kept, done bool, err error)
}

// Kept is something a front keeps: the outcome of a key, or a mark that says that somebody runs it.
type Kept struct {
	Name   string // the front's name for it; empty: not there
	Mark   bool
	LockID int64         // the key's, see Key.LockID
	Life   time.Duration // what is left of it; negative: it would stay for ever
	// Unreadable: no record can be read from it, by this release and with this sealer. Nobody here replays it.
	Unreadable bool
	// Foreign: it has not even the form of what the front keeps, and every call about its key fails.
	Foreign bool

	// Of an outcome: the record as the front would replay it, its epoch, and whether its result is in PostgreSQL alone.
	Record    Record
	Epoch     string
	Elsewhere bool

	// Content is what Discard compares. It is the front's own.
	Content []string
}
