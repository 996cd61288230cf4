package idempotency

import (
	"context"

	"github.com/jackc/pgx/v5"
)

// Resolver finds out what became of a leased operation whose owner died: the next caller and the compensator ask it, so that
// a payment is finished also if its client never comes back.
type Resolver interface {
	// Ask asks whoever was called, by the record's downstream keys, without a transaction. The key is the asker's meanwhile.
	Ask(ctx context.Context, r Record, steps []Step) (Resolution, error)
	// Commit writes the business rows of a resolution, in the transaction that records it.
	Commit(ctx context.Context, tx pgx.Tx, r Record, found Resolution) error
}

// Resolution is what a Resolver found out. The zero value means that nobody can tell yet: the record stays for the next one
// who asks.
type Resolution struct {
	Outcome    Outcome
	ResultType string // "json/1", "bytes/1"
	Result     []byte // of OutcomeSucceeded, or the body of a failure
	Code       string // of OutcomeFailed
	Message    string
}

// Outcome is what happened.
type Outcome int

// The outcomes.
const (
	OutcomeUnknown   Outcome = iota
	OutcomeSucceeded         // it was done, with this result
	OutcomeFailed            // it was not, and whoever was called will refuse its downstream key from now on
)
