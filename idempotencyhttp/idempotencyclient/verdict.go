package idempotencyclient

import (
	"context"
	"crypto/tls"
	"errors"
	"math"
	"net"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"time"
)

// worthARetry: with the same key the same request may end otherwise.
func (t *Transport) worthARetry(p *ProblemError) bool {
	switch {
	case p.Status < http.StatusBadRequest || p.Replayed:
		return false
	case p.Status == http.StatusTooManyRequests:
		return true
	}
	switch p.Unwrap() { //nolint:errorlint // a sentinel of ours, and nothing around it
	case ErrInProgress, ErrOutcomeUnknown, ErrUnavailable, ErrInternal:
		return true
	case nil:
		return slices.Contains(t.config.Statuses, p.Status)
	}
	return false
}

// final: no other attempt comes to anything else.
func final(err error) bool {
	var stranger *tls.CertificateVerificationError
	var body *bodyError
	return errors.As(err, &stranger) || errors.As(err, &body) || errors.Is(err, errNothing)
}

// unsent: the service has not even been reached.
func unsent(err error) bool {
	var op *net.OpError
	var dns *net.DNSError
	var stranger *tls.CertificateVerificationError
	var body *bodyError
	return errors.As(err, &op) && op.Op == "dial" || errors.As(err, &dns) || errors.As(err, &stranger) || errors.As(err, &body)
}

// bodyError is that of GetBody.
type bodyError struct{ err error }

func (e *bodyError) Error() string {
	return "idempotencyclient: get the request's body again: " + e.err.Error()
}
func (e *bodyError) Unwrap() error { return e.err }

// retryAfter reads Retry-After: seconds, or a date. 0: there is none that can be read. A date counts from the answer's own, since
// the clocks of client and service may differ.
func retryAfter(h http.Header) time.Duration {
	value := strings.TrimSpace(h.Get("Retry-After"))
	if seconds, err := strconv.ParseUint(value, 10, 64); err == nil || errors.Is(err, strconv.ErrRange) {
		const most = uint64(math.MaxInt64 / time.Second)
		return time.Duration(min(seconds, most)) * time.Second //nolint:gosec // bounded
	}
	at, err := http.ParseTime(value)
	if err != nil {
		return 0
	}
	now, err := http.ParseTime(h.Get("Date"))
	if err != nil {
		now = time.Now()
	}
	return max(at.Sub(now), 0)
}

// bounded is a context with a limit, or without one.
func bounded(ctx context.Context, limit time.Duration) (context.Context, context.CancelFunc) {
	if limit < 0 {
		return context.WithCancel(ctx)
	}
	return context.WithTimeout(ctx, limit)
}
