package ids

import (
	"errors"
	"fmt"
	"time"

	"github.com/pgonce/pgonce/idempotency"
)

// ErrClock means that the clock cannot be trusted for an ID; see ClockError. Nothing was made.
var ErrClock = errors.New("ids: the clock does not allow an id")

// ErrNoWorker is idempotency.ErrNoWorker: Worker.Run does not run, PostgreSQL could not be asked in time, or all numbers are in
// use. Nothing was made; later there may be one.
var ErrNoWorker = idempotency.ErrNoWorker

// ClockError unwraps to ErrClock.
type ClockError struct {
	Now time.Time
	// Behind is how far the clock is behind the last ID. 0: it is before Epoch, behind the last ID there can be, or stands
	// still.
	Behind time.Duration
}

func (e *ClockError) Error() string {
	if e.Behind > 0 {
		return fmt.Sprintf("%v: it says %s, %v before the last id: it was set back, set it right or wait", ErrClock,
			e.Now.UTC().Format(time.RFC3339Nano), e.Behind)
	}
	return fmt.Sprintf("%v: it says %s, which is no time for an id, or stands still: set it right", ErrClock, e.Now.UTC().Format(time.RFC3339Nano))
}

// Unwrap returns ErrClock.
func (e *ClockError) Unwrap() error { return ErrClock }

func invalid(field, rule string) error {
	return &idempotency.ConfigError{Field: field, Rule: rule}
}
