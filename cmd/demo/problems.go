package main

import (
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"strings"
	"time"

	"github.com/jackc/pgx/v5/pgconn"

	"github.com/pgonce/pgonce/idempotency"
	"github.com/pgonce/pgonce/idempotencyhttp"
)

// problem is the body of every answer that is no success: RFC 9457.
type problem = idempotencyhttp.Problem

// shopTypeBase begins the types of the shop's own problems; those of the library begin with idempotencyhttp.TypeBase.
const shopTypeBase = "urn:pgonce:demo:"

func newProblem(status int, name, title, detail string) *problem {
	return &problem{Type: shopTypeBase + name, Title: title, Status: status, Detail: detail}
}

func notFound(detail string) *problem {
	return newProblem(http.StatusNotFound, "not-found", "There is nothing here.", detail)
}

// problemOf gives the answer to an error: the shop's own, and the library's to those of the library. Errors that nobody knows
// are a 500 that tells nothing of our inside.
func problemOf(err error) *problem {
	var (
		failed  *idempotency.FailedError
		refused *refusal
		moved   *idempotency.TransitionError
	)
	switch {
	// First: it may wrap any of the others, and only it says that nobody knows.
	case errors.Is(err, idempotency.ErrOutcomeUnknown):
	case errors.As(err, &moved):
		return newProblem(http.StatusConflict, "transition-refused", "The order cannot come to be "+moved.To+".",
			fmt.Sprintf("It is %s, and from there it can be: %s.", moved.From, cmp.Or(strings.Join(moved.Allowed, ", "), "nothing else")))
	case errors.As(err, &failed):
		return refusalProblem(failed.Code, failed.Message)
	case errors.As(err, &refused):
		return refusalProblem(refused.code, refused.message)
	case errors.Is(err, errGateway):
		p := newProblem(http.StatusBadGateway, "gateway", "The payment gateway does not work at the moment.", "Retry with the same key.")
		p.RetryAfter = time.Second
		return p
	case unavailable(err):
		return idempotencyhttp.ProblemOf(idempotency.ErrRestart)
	}
	return idempotencyhttp.ProblemOf(err)
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
	return idempotencyhttp.ProblemOf(nil) // which nobody knows: internal
}

// sentence makes one of an error's text.
func sentence(text string) string {
	if text == "" {
		return ""
	}
	return strings.ToUpper(text[:1]) + text[1:] + "."
}

// unavailable reports whether the database is away, so that trying later makes sense: what a handler sees of that, while the
// library tells its own.
func unavailable(err error) bool {
	var connect *pgconn.ConnectError
	var server *pgconn.PgError
	switch {
	case errors.As(err, &connect):
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

// writeJSON writes v and a line's end. An error means that the client has gone: there is nobody to tell.
func writeJSON(w http.ResponseWriter, status int, v any) {
	body := jsonLine(v)
	w.WriteHeader(status)
	_, _ = w.Write(body)
}

func jsonLine(v any) []byte {
	body, err := json.Marshal(v)
	if err != nil {
		panic(err) // our own types always have a JSON form
	}
	return append(body, '\n')
}
