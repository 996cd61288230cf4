package idempotencyclient

import (
	"errors"
	"fmt"
)

// The problems of the library, by the name of their page in docs/problems. A *ProblemError unwraps to its own.
var (
	ErrKeyMissing       = errors.New("key-missing")
	ErrKeyInvalid       = errors.New("key-invalid") // also before anything was sent
	ErrInvalidRequest   = errors.New("invalid-request")
	ErrNotIssued        = errors.New("not-issued")
	ErrInProgress       = errors.New("in-progress")
	ErrNeedsAPerson     = errors.New("needs-a-person")
	ErrResultGone       = errors.New("result-gone")
	ErrBodyTooLarge     = errors.New("body-too-large")
	ErrMismatch         = errors.New("mismatch")
	ErrFailed           = errors.New("failed")
	ErrInternal         = errors.New("internal")
	ErrProgramError     = errors.New("program-error")
	ErrResponseTooLarge = errors.New("response-too-large")
	ErrResultUnreadable = errors.New("result-unreadable")
	ErrOutcomeUnknown   = errors.New("outcome-unknown") // also if no answer came: see GaveUpError
	ErrUnavailable      = errors.New("unavailable")
)

// ErrBodyNotReplayable says that the request has a body that cannot be sent a second time. http.NewRequest sets GetBody for a
// bytes.Reader, bytes.Buffer and strings.Reader; for any other reader set it, or read it into one of these.
var ErrBodyNotReplayable = errors.New("idempotencyclient: the request's body cannot be sent again: set GetBody, or give http.NewRequest a bytes.Reader")

// typeBase begins the type of the library's problems.
const typeBase = "urn:pgonce:problem:"

var byType = func() map[string]error {
	all := map[string]error{}
	for _, err := range []error{
		ErrKeyMissing, ErrKeyInvalid, ErrInvalidRequest, ErrNotIssued, ErrInProgress, ErrNeedsAPerson, ErrResultGone, ErrBodyTooLarge,
		ErrMismatch, ErrFailed, ErrInternal, ErrProgramError, ErrResponseTooLarge, ErrResultUnreadable, ErrOutcomeUnknown, ErrUnavailable,
	} {
		all[typeBase+err.Error()] = err
	}
	return all
}()

// GaveUpError is what became of a request without an answer. If it is ErrOutcomeUnknown too, an attempt may have reached the
// service: send the same again, with this key (WithKey), to find out.
type GaveUpError struct {
	Key      string // as it stood in the header
	Attempts int
	Unknown  bool  // false: no attempt even reached the service
	Err      error // of the last attempt, or of the context
}

func (e *GaveUpError) Error() string {
	text := fmt.Sprintf("idempotencyclient: no answer after %d attempts", e.Attempts)
	if e.Unknown {
		text += ", and nobody knows whether it was done: send it again with the key " + e.Key
	}
	return text + ": " + e.Err.Error()
}

func (e *GaveUpError) Unwrap() []error {
	if e.Unknown {
		return []error{ErrOutcomeUnknown, e.Err}
	}
	return []error{e.Err}
}

// ConfigError says which field breaks which rule.
type ConfigError struct{ Field, Rule string }

func (e *ConfigError) Error() string { return "idempotencyclient: " + e.Field + " " + e.Rule }
