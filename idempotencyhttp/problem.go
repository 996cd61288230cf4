package idempotencyhttp

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"net/http"
	"strconv"
	"time"

	"github.com/pgonce/pgonce/idempotency"
)

// TypeBase begins the type of every problem of this package. The rest is the name of its page in docs/problems.
const TypeBase = "urn:pgonce:problem:"

// Problem is an answer that is no success, as RFC 9457 has it. Type is stable and for programs, Title and Detail are for
// people and may change. It is an error too: a Tenant or a Fingerprint may return one as the answer.
type Problem struct { //nolint:errname // an answer first, by the name that RFC 9457 gives it
	Type   string `json:"type,omitempty"` // empty: the status says all
	Title  string `json:"title"`
	Status int    `json:"status"`
	Detail string `json:"detail,omitempty"`
	Field  string `json:"field,omitempty"` // of an invalid request
	Rule   string `json:"rule,omitempty"`  // that the field breaks

	// RetryAfter becomes the header of that name, in whole seconds.
	RetryAfter time.Duration `json:"-"`
}

// The problems, by name.
var (
	keyMissing       = kind{"key-missing", http.StatusBadRequest, "The request needs an idempotency key.", "", 0}
	keyInvalid       = kind{"key-invalid", http.StatusBadRequest, "The idempotency key breaks a rule.", "", 0}
	invalidRequest   = kind{"invalid-request", http.StatusBadRequest, "The request breaks a rule.", "", 0}
	notIssued        = kind{"not-issued", http.StatusBadRequest, "The idempotency key is no issued token, or its time is over.", "Nothing was done. Ask for a new token.", 0}
	bodyTooLarge     = kind{"body-too-large", http.StatusRequestEntityTooLarge, "The body is too large.", "", 0}
	inProgress       = kind{"in-progress", http.StatusConflict, "A request with this key is still running.", "Retry with the same key, after the pause that Retry-After names.", 0}
	needsAPerson     = kind{"needs-a-person", http.StatusConflict, "Nobody knows what became of this.", "Somebody has to find out. Nothing is done again before.", 0}
	mismatch         = kind{"mismatch", http.StatusUnprocessableEntity, "This key was used for another request.", "A retry must be the same request as the first. For a new request use a new key.", 0}
	resultGone       = kind{"result-gone", http.StatusGone, "This was done, and its answer is no longer kept.", "It is never done again for this key.", 0}
	recordedFailure  = kind{"failed", http.StatusInternalServerError, "This failed for good, and that is recorded.", "It is never tried again for this key. For a new request use a new key.", 0}
	resultUnreadable = kind{"result-unreadable", http.StatusInternalServerError, "This was done, and its answer cannot be read.", "It is never done again for this key.", 0}
	responseTooLarge = kind{"response-too-large", http.StatusInternalServerError, "The answer is too large.", "Everything was undone.", 0}
	programError     = kind{"program-error", http.StatusInternalServerError, "The service is put together wrongly.", "Everything done in the transaction was undone. A retry comes to the same: tell the operator.", 0}
	internalError    = kind{"internal", http.StatusInternalServerError, "Something went wrong on our side.", "Retry with the same key.", 0}
	unavailable      = kind{"unavailable", http.StatusServiceUnavailable, "The service cannot work at the moment.", "Retry with the same key.", time.Second}
	outcomeUnknown   = kind{"outcome-unknown", http.StatusServiceUnavailable, "Nobody knows yet whether this was done.", "Retry with the same key: you get the outcome if there is one, and nothing happens twice.", time.Second}
)

type kind struct {
	name   string
	status int
	title  string
	detail string
	pause  time.Duration
}

func (k kind) problem() *Problem {
	return &Problem{Type: TypeBase + k.name, Title: k.title, Status: k.status, Detail: k.detail, RetryAfter: k.pause}
}

// problem is one of a field that breaks a rule.
func problem(k kind, field, rule string) *Problem {
	p := k.problem()
	p.Field, p.Rule, p.Detail = field, rule, field+" "+rule+"."
	return p
}

func (p *Problem) Error() string {
	if p.Detail == "" {
		return fmt.Sprintf("idempotencyhttp: %d %s", p.Status, p.Title)
	}
	return fmt.Sprintf("idempotencyhttp: %d %s %s", p.Status, p.Title, p.Detail)
}

// Write answers with the problem.
func (p *Problem) Write(w http.ResponseWriter) {
	body, err := json.Marshal(p)
	if err != nil {
		panic(err) // strings and a number always have a JSON form
	}
	h := w.Header()
	if p.RetryAfter > 0 {
		h.Set("Retry-After", strconv.Itoa(int(math.Ceil(p.RetryAfter.Seconds()))))
	}
	h.Set("Content-Type", "application/problem+json")
	h.Set("Cache-Control", "no-store") // a 410 could be kept by caches, and a retry must reach us
	w.WriteHeader(p.Status)
	_, _ = w.Write(append(body, '\n')) // an error means that the client has gone
}

// ProblemOf gives the answer to an error of this library, for handlers that call package txn themselves. Errors it does not
// know are a 500 that tells nothing of the program's inside.
func ProblemOf(err error) *Problem {
	var (
		own      *Problem
		busy     *idempotency.InProgressError
		invalid  *idempotency.InvalidError
		tooLarge *http.MaxBytesError
	)
	switch {
	// First: it may wrap any of the others, and only it says that nobody knows.
	case errors.Is(err, idempotency.ErrOutcomeUnknown):
		return outcomeUnknown.problem()
	case errors.As(err, &own):
		return own
	case errors.As(err, &tooLarge):
		p := bodyTooLarge.problem()
		p.Detail = fmt.Sprintf("At most %d bytes.", tooLarge.Limit)
		return p
	case errors.As(err, &invalid):
		return problem(invalidRequest, invalid.Field, invalid.Rule)
	case errors.As(err, &busy):
		p := inProgress.problem()
		p.RetryAfter = busy.RetryAfter
		return p
	}
	for _, answer := range []struct {
		err  error
		kind kind
	}{
		{idempotency.ErrMismatch, mismatch},
		{idempotency.ErrNotIssued, notIssued},
		{idempotency.ErrResultExpired, resultGone},
		{idempotency.ErrResultDecode, resultUnreadable},
		{idempotency.ErrFailed, recordedFailure},
		{idempotency.ErrManual, needsAPerson},
		{idempotency.ErrRestart, unavailable},
		{idempotency.ErrLeaseLost, unavailable},
		{idempotency.ErrReadOnly, unavailable},
		{idempotency.ErrNewerRecord, unavailable}, // and soon this program is newer too
		{context.DeadlineExceeded, unavailable},
		{context.Canceled, unavailable},
		{idempotency.ErrResultTooLarge, responseTooLarge},
		// Mistakes of the program, which the same request meets again.
		{idempotency.ErrResultEncode, programError},
		{idempotency.ErrConfig, programError},
		{idempotency.ErrWrongMode, programError},
		{idempotency.ErrNested, programError},
	} {
		if errors.Is(err, answer.err) {
			return answer.kind.problem()
		}
	}
	return internalError.problem()
}

// ruleOf is the rule that a value breaks.
func ruleOf(err error) (rule string, wrong bool) {
	if err == nil {
		return "", false // before invalid is allocated
	}
	var invalid *idempotency.InvalidError
	if errors.As(err, &invalid) {
		return invalid.Rule, true
	}
	return "", false
}
