package idempotency

import (
	"context"
	"time"
)

// Front is a tier that stands before PostgreSQL: it may answer "done, here is the result" and "somebody is running it",
// and never says "go ahead". Losing one changes speed, not answers, so an error of a front is never an error of the call.
// A front is safe for concurrent use. No front exists yet: the contract may still change with the first one.
type Front interface {
	// Lookup returns the final record of a key, only if it carries the same key and a fingerprint that fp matches.
	// found is false for a miss and for everything that is not certain. It returns ErrMismatch if the front knows that
	// the key was used with another payload.
	Lookup(ctx context.Context, key Key, fp Fingerprint) (r Record, found bool, err error)
	// Begin marks the key as running by this attempt for at most ttl. It returns ErrInProgress if another attempt's mark
	// is there: a reason to ask PostgreSQL and to wait, nothing more.
	Begin(ctx context.Context, key Key, fp Fingerprint, attempt AttemptToken, ttl time.Duration) error
	// Wait returns when the key's running mark goes, or when ctx ends, with its error.
	Wait(ctx context.Context, key Key) error
	// Publish stores a final record that PostgreSQL has committed. An older fence never overwrites a newer one.
	Publish(ctx context.Context, r Record) error
	// Evict forgets what is known of a key.
	Evict(ctx context.Context, key Key) error
	// End removes the running mark, if it is this attempt's own.
	End(ctx context.Context, key Key, attempt AttemptToken) error
}

// NoFront is the front that knows nothing.
type NoFront struct{}

var _ Front = NoFront{}

// Lookup never finds anything.
func (NoFront) Lookup(context.Context, Key, Fingerprint) (Record, bool, error) {
	return Record{}, false, nil
}

// Begin marks nothing.
func (NoFront) Begin(context.Context, Key, Fingerprint, AttemptToken, time.Duration) error {
	return nil
}

// Wait returns at once: there is no mark.
func (NoFront) Wait(context.Context, Key) error { return nil }

// Publish stores nothing.
func (NoFront) Publish(context.Context, Record) error { return nil }

// Evict has nothing to forget.
func (NoFront) Evict(context.Context, Key) error { return nil }

// End has no mark to remove.
func (NoFront) End(context.Context, Key, AttemptToken) error { return nil }
