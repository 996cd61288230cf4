package main

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"net/http"
	"strconv"
	"strings"
	"time"

	"github.com/jackc/pgx/v5/pgconn"

	"github.com/pgonce/pgonce/idempotency"
)

// problem is the body of every answer that is no success: RFC 9457. Type is stable, for programs; the rest may change.
type problem struct {
	Type   string `json:"type"`
	Title  string `json:"title"`
	Status int    `json:"status"`
	Detail string `json:"detail,omitempty"`
	Field  string `json:"field,omitempty"` // of an invalid request
	Rule   string `json:"rule,omitempty"`  // that the field breaks

	retryAfter time.Duration
}

// problemType begins every type.
const problemType = "urn:pgonce:problem:"

func newProblem(status int, name, title, detail string) *problem {
	return &problem{Type: problemType + name, Title: title, Status: status, Detail: detail}
}

func notFound(detail string) *problem {
	return newProblem(http.StatusNotFound, "not-found", "There is nothing here.", detail)
}

// problemOf gives the answer to an error. Errors it does not know are a 500 that tells nothing of our inside.
func problemOf(err error) *problem {
	var (
		invalid  *idempotency.InvalidError
		busy     *idempotency.InProgressError
		failed   *idempotency.FailedError
		refused  *refusal
		tooLarge *http.MaxBytesError
		moved    *idempotency.TransitionError
	)
	switch {
	// First: it may wrap any of the others, and only it says that nobody knows.
	case errors.Is(err, idempotency.ErrOutcomeUnknown):
		p := newProblem(http.StatusServiceUnavailable, "outcome-unknown", "Nobody knows yet whether this was done.",
			"Retry with the same key: you get the outcome if there is one, and nothing happens twice.")
		p.retryAfter = time.Second
		return p
	case errors.As(err, &invalid):
		p := newProblem(http.StatusBadRequest, "invalid-request", "The request breaks a rule.", invalid.Field+" "+invalid.Rule+".")
		p.Field, p.Rule = invalid.Field, invalid.Rule
		return p
	case errors.As(err, &tooLarge):
		return newProblem(http.StatusRequestEntityTooLarge, "body-too-large", "The body is too large.",
			"At most "+strconv.FormatInt(tooLarge.Limit, 10)+" bytes.")
	case errors.As(err, &busy):
		p := newProblem(http.StatusConflict, "in-progress", "A request with this key is still running.",
			"Retry with the same key, after the pause that Retry-After names.")
		p.retryAfter = busy.RetryAfter
		return p
	case errors.Is(err, idempotency.ErrMismatch):
		return newProblem(http.StatusUnprocessableEntity, "mismatch", "This key was used for another request.",
			"A retry must have the body of the first request. For a new request use a new key.")
	case errors.Is(err, idempotency.ErrResultExpired):
		return newProblem(http.StatusGone, "result-gone", "This was done, and its answer is no longer kept.",
			"It is never done again for this key.")
	case errors.As(err, &moved):
		return newProblem(http.StatusConflict, "transition-refused", "The order cannot come to be "+moved.To+".",
			fmt.Sprintf("It is %s, and from there it can be: %s.", moved.From, cmp.Or(strings.Join(moved.Allowed, ", "), "nothing else")))
	case errors.As(err, &failed):
		return refusalProblem(failed.Code, failed.Message)
	case errors.As(err, &refused):
		return refusalProblem(refused.code, refused.message)
	case errors.Is(err, idempotency.ErrManual):
		return newProblem(http.StatusConflict, "needs-a-person", "Nobody knows what became of this.",
			"Somebody has to find out. Nothing is done again before.")
	case errors.Is(err, errGateway):
		p := newProblem(http.StatusBadGateway, "gateway", "The payment gateway does not work at the moment.", "Retry with the same key.")
		p.retryAfter = time.Second
		return p
	case unavailable(err):
		p := newProblem(http.StatusServiceUnavailable, "unavailable", "The service cannot work at the moment.",
			"Retry with the same key.")
		p.retryAfter = time.Second
		return p
	}
	return internalProblem()
}

func internalProblem() *problem {
	return newProblem(http.StatusInternalServerError, "internal", "Something went wrong on our side.", "Retry with the same key.")
}

// refusalProblem is the answer to the customer whose order was refused, the first time and every time after.
func refusalProblem(code, message string) *problem {
	switch code {
	case codeOutOfStock, codeUnknownSKU, codeCouponUsed, codeUnknownCoupon:
		return newProblem(http.StatusBadRequest, strings.ReplaceAll(code, "_", "-"), "The order was refused.", message)
	}
	switch code {
	case codeCardRefused, codeNotCharged:
		return newProblem(http.StatusPaymentRequired, strings.ReplaceAll(code, "_", "-"), "The order was not paid.", sentence(message))
	case codeUnknownOrder:
		return notFound("There is no such order.")
	case codeNotPayable:
		return newProblem(http.StatusConflict, "not-payable", "The order cannot be paid.", sentence(message))
	}
	return internalProblem()
}

// sentence makes one of an error's text.
func sentence(text string) string {
	if text == "" {
		return ""
	}
	return strings.ToUpper(text[:1]) + text[1:] + "."
}

// unavailable reports whether the database is away, so that trying later makes sense.
func unavailable(err error) bool {
	var connect *pgconn.ConnectError
	var server *pgconn.PgError
	switch {
	case errors.As(err, &connect), errors.Is(err, context.DeadlineExceeded),
		errors.Is(err, idempotency.ErrReadOnly), errors.Is(err, idempotency.ErrRestart), errors.Is(err, idempotency.ErrLeaseLost):
		return true
	case errors.As(err, &server):
		for _, prefix := range []string{
			"08", "40", "53", // connection, conflict with another transaction, resources
			"57P01", "57P02", "57P03", // shutdown, crash, starting up
		} {
			if strings.HasPrefix(server.Code, prefix) {
				return true
			}
		}
	}
	return false
}

func (p *problem) write(w http.ResponseWriter) {
	if p.retryAfter > 0 {
		w.Header().Set("Retry-After", strconv.Itoa(int(math.Ceil(p.retryAfter.Seconds()))))
	}
	w.Header().Set("Content-Type", "application/problem+json")
	writeJSON(w, p.Status, p)
}

// writeJSON writes v and a line's end. An error means that the client has gone: there is nobody to tell.
func writeJSON(w http.ResponseWriter, status int, v any) {
	body, err := json.Marshal(v)
	if err != nil {
		panic(err) // our own types always have a JSON form
	}
	w.WriteHeader(status)
	_, _ = w.Write(append(body, '\n'))
}
