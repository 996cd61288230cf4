package idempotency

import (
	"context"
	"time"
)

// Front is a tier that stands before PostgreSQL: it may answer "done, here is the result" and "somebody is running it",
// and never says "go ahead" on its own authority. Losing one changes speed, not answers, so an error of a front is never
// an error of the call. A front is safe for concurrent use, and keeps nothing that it is handed without copying it.
type Front interface {
	// Name tells fronts apart in events and metrics: "local", "redis".
	Name() string
	// Near reports whether it answers from this process's memory. A near front is asked before concurrent calls are merged,
	// and not at all for an operation with NoLocal; it marks nothing.
	Near() bool
	// Lookup returns the entry of a key as a record, if it has the same key, epoch and fingerprint. found is false for a miss
	// and for everything that is not certain. It returns ErrMismatch if the front knows that the key was used with another
	// payload.
	Lookup(ctx context.Context, ask Ask) (r Record, found bool, err error)
	// Begin marks the key as running for at most ttl, unless its entry is there already: then it returns it, as Lookup does,
	// and marks nothing. It returns ErrInProgress if another call's mark is there: a reason to wait and to ask PostgreSQL,
	// nothing more.
	Begin(ctx context.Context, ask Ask, mark AttemptToken, ttl time.Duration) (r Record, found bool, err error)
	// Renew keeps the call's own mark for ttl from now.
	Renew(ctx context.Context, key Key, mark AttemptToken, ttl time.Duration) error
	// Wait returns when the key's mark goes, or when ctx ends, with its error.
	Wait(ctx context.Context, key Key) error
	// Publish stores an entry and removes its call's mark. Within an epoch an older fence never overwrites a newer one. It
	// does not wait for another machine: what could not be stored is lost, and found again by the next reader or by the
	// compensator.
	Publish(ctx context.Context, e Entry)
	// End removes the call's own mark, as Publish does, without an entry.
	End(ctx context.Context, key Key, mark AttemptToken)
	// Evict forgets the entry of a key.
	Evict(ctx context.Context, key Key) error
}

// Ask is what a caller wants to know of a front.
type Ask struct {
	Key         Key
	Fingerprint Fingerprint
	Epoch       string // an entry of another one is a miss
}

// Entry is what a front keeps of a committed record.
type Entry struct {
	Record Record
	// Epoch is that of the session that committed or read the record, read before it did: it may be an older one, never a
	// later. See Store.Epoch.
	Epoch string
	// Life is what PostgreSQL's clock leaves of the record and of its result.
	Life time.Duration
	// Mark is the call's own mark, which the entry replaces. Zero: there is none.
	Mark AttemptToken
}

// maxLife stands for records that are kept for ever: no front needs one for longer.
const maxLife = 30 * 24 * time.Hour

// Life is how long the record, with its result, is still to live at a time of PostgreSQL's clock; negative if that is over.
func (r *Record) Life(now time.Time) time.Duration {
	life := maxLife
	for _, end := range [...]time.Time{r.ExpiresAt, r.ResultExpiresAt} {
		if !end.IsZero() {
			life = min(life, end.Sub(now))
		}
	}
	return life
}

// Keepable reports whether fronts may keep the record: its outcome is there, and will never be another one in this life of
// the key.
func (r *Record) Keepable() bool {
	return r.State == StateSuccess || r.State == StateFailed && !r.Retryable
}
