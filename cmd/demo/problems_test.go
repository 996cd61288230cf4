package main

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgconn"
	"github.com/stretchr/testify/require"

	"github.com/pgonce/pgonce/idempotency"
)

func TestProblemOf_EveryErrorHasItsAnswer(t *testing.T) {
	t.Parallel()
	secret := errors.New("secret")
	for name, tt := range map[string]struct {
		err        error
		status     int
		kind       string
		retryAfter time.Duration
	}{
		"Invalid":    {&idempotency.InvalidError{Field: "f", Rule: "must be r"}, http.StatusBadRequest, "invalid-request", 0},
		"InProgress": {&idempotency.InProgressError{RetryAfter: 2 * time.Second}, http.StatusConflict, "in-progress", 2 * time.Second},
		"Mismatch":   {&idempotency.MismatchError{}, http.StatusUnprocessableEntity, "mismatch", 0},
		"Gone":       {fmt.Errorf("%w: then", idempotency.ErrResultExpired), http.StatusGone, "result-gone", 0},
		"TooLarge":   {&http.MaxBytesError{Limit: 5}, http.StatusRequestEntityTooLarge, "body-too-large", 0},
		"Unknown":    {fmt.Errorf("%w: %w", idempotency.ErrOutcomeUnknown, secret), http.StatusServiceUnavailable, "outcome-unknown", time.Second},
		// Only the first says the truth.
		"UnknownAndBusy": {
			fmt.Errorf("%w: %w", idempotency.ErrOutcomeUnknown, &idempotency.InProgressError{}),
			http.StatusServiceUnavailable, "outcome-unknown", time.Second,
		},
		"Refused":     {&idempotency.FailedError{Code: codeCouponUsed, Message: "m"}, http.StatusBadRequest, "coupon-used", 0},
		"PlainRefuse": {&refusal{codeOutOfStock, "m"}, http.StatusBadRequest, "out-of-stock", 0},
		"OtherFailed": {
			fmt.Errorf("%w: %w", idempotency.ErrTransactionEnded, &idempotency.FailedError{Code: "transaction_ended", Message: "secret"}),
			http.StatusInternalServerError, "internal", 0,
		},
		"NoServer":  {&pgconn.ConnectError{}, http.StatusServiceUnavailable, "unavailable", time.Second},
		"Shutdown":  {&pgconn.PgError{Code: "57P01", Message: "secret"}, http.StatusServiceUnavailable, "unavailable", time.Second},
		"Full":      {&pgconn.PgError{Code: "53300", Message: "secret"}, http.StatusServiceUnavailable, "unavailable", time.Second},
		"Conflicts": {&pgconn.PgError{Code: "40001", Message: "secret"}, http.StatusServiceUnavailable, "unavailable", time.Second},
		"Deadline":  {fmt.Errorf("secret: %w", context.DeadlineExceeded), http.StatusServiceUnavailable, "unavailable", time.Second},
		"Syntax":    {&pgconn.PgError{Code: "42601", Message: "secret"}, http.StatusInternalServerError, "internal", 0},
		"Other":     {secret, http.StatusInternalServerError, "internal", 0},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			p := problemOf(tt.err)
			require.Equal(t, tt.status, p.Status)
			require.Equal(t, typeOf(tt.kind), p.Type)
			require.Equal(t, tt.retryAfter, p.RetryAfter)
			require.NotContains(t, p.Detail+p.Title, "secret")
		})
	}
}
