package idempotencyclient

import (
	"fmt"
	"net/http"
	"time"

	"github.com/google/uuid"
)

// Defaults of a Config.
const (
	DefaultAttempts    = 8
	DefaultPause       = 100 * time.Millisecond
	DefaultMaxPause    = 5 * time.Second
	DefaultAttemptTime = 30 * time.Second
	DefaultMaxTime     = 2 * time.Minute
	DefaultMaxAnswer   = 1 << 20
)

// Config configures a Transport. A zero field means its default.
type Config struct {
	// Attempts at most, the first one included; 1: none is made again.
	// Default: 8.
	Attempts int
	// Pause is that before the second attempt. It doubles, with jitter; Retry-After is obeyed if it is longer.
	// Default: 100 ms.
	Pause time.Duration
	// MaxPause bounds the growing pause, but not Retry-After: to come sooner would only be told the same again.
	// Default: 5 s.
	MaxPause time.Duration
	// AttemptTime bounds one attempt, until its answer is read; -1: no limit. Then the next one is made.
	// Default: 30 s.
	AttemptTime time.Duration
	// MaxTime bounds all attempts and pauses of a request together; -1: no limit but the request's context. A pause that would go
	// beyond it, or beyond the context's deadline, is not begun: the caller gets the last answer.
	// Default: 2 min.
	MaxTime time.Duration
	// MaxAnswer is how many bytes of an answer's body are read before it is handed on, so that one that breaks off is asked for
	// again. The rest of a longer one is read by the caller, at the caller's risk. Of answers of 400 and above it is 64 KiB at least.
	// Default: 1 MiB.
	MaxAnswer int
	// Statuses from 500 to 599 that are worth a retry beside the problems of the library: those of a proxy in front of the service,
	// such as 502 and 504. A problem that is known to be final stays so.
	// Default: none.
	Statuses []int
	// Protected tells whether the service runs a request once per key. Others pass untouched; safe methods are not asked about.
	// Default: every request is.
	Protected func(*http.Request) bool
	// NewKey makes the key of a request that has none: 1 to 255 bytes of printable ASCII, never the same twice.
	// Default: a UUID of version 7, whose beginning is the time, which keeps the service's index small.
	NewKey func() (string, error)
}

func (c *Config) withDefaults() Config {
	var d Config
	if c != nil {
		d = *c
	}
	if d.Attempts == 0 {
		d.Attempts = DefaultAttempts
	}
	if d.Pause == 0 {
		d.Pause = DefaultPause
	}
	if d.MaxPause == 0 {
		d.MaxPause = max(DefaultMaxPause, d.Pause)
	}
	if d.AttemptTime == 0 {
		d.AttemptTime = DefaultAttemptTime
	}
	if d.MaxTime == 0 {
		d.MaxTime = DefaultMaxTime
	}
	if d.MaxAnswer == 0 {
		d.MaxAnswer = DefaultMaxAnswer
	}
	if d.Protected == nil {
		d.Protected = func(*http.Request) bool { return true }
	}
	if d.NewKey == nil {
		d.NewKey = newKey
	}
	return d
}

func (c *Config) validate() error {
	invalid := func(field, rule string) error { return &ConfigError{Field: "Config." + field, Rule: rule} }
	switch {
	case c.Attempts < 1 || c.Attempts > 100:
		return invalid("Attempts", "must be from 1 to 100")
	case c.Pause < 0:
		return invalid("Pause", "must be positive")
	case c.MaxPause < c.Pause:
		return invalid("MaxPause", "must not be below Pause")
	case c.AttemptTime < 0 && c.AttemptTime != -1:
		return invalid("AttemptTime", "must be positive, or -1 for no limit")
	case c.MaxTime < 0 && c.MaxTime != -1:
		return invalid("MaxTime", "must be positive, or -1 for no limit")
	case c.MaxAnswer < 0:
		return invalid("MaxAnswer", "must be positive")
	}
	for _, status := range c.Statuses {
		if status < 500 || status > 599 {
			return invalid("Statuses", fmt.Sprintf("must be statuses from 500 to 599, %d is not", status))
		}
	}
	return nil
}

func newKey() (string, error) {
	id, err := uuid.NewV7()
	return id.String(), err
}
