package idempotencyhttp

import (
	"fmt"
	"log/slog"
	"net/http"
	"strings"

	"github.com/pgonce/pgonce/idempotency"
)

// Defaults of a Config.
const (
	DefaultMaxBody     = 1 << 20
	DefaultMaxResponse = 16 << 20
)

// Tenant says whose key a request brings, from what the program has made sure of: the token's subject, never a header or an
// address that the client may choose. An error, and a tenant that breaks a rule, is a 500, since nobody may share a tenant by
// accident; an error that is a *Problem is that answer.
type Tenant func(*http.Request) (string, error)

// SingleTenant is for programs that have only one: whoever knows a key may ask for its answer.
func SingleTenant(*http.Request) (string, error) { return idempotency.SingleTenant, nil }

// Config configures a Middleware. A zero field means its default.
type Config struct {
	// Optional lets a request without the header through to the handler, which then runs unprotected and without a
	// transaction in its context.
	// Default: false, such a request is answered 400.
	Optional bool
	// Derived names an operation for requests without the header: their key is made of the tenant, the route's operation and the
	// request's fingerprint, so that the same request counts as one for as long as the operation's Retention, 10 min to 24 h,
	// counted from the first. Two orders that are meant and equal are one then too: see docs/http.md before you use it.
	// Default: none.
	Derived string
	// Strict takes a key only in double quotes, as the IETF draft writes it.
	// Default: false, bare keys are taken too, and mean the same.
	Strict bool
	// MaxBody is the largest request body in bytes; -1: no limit. The body is held in memory.
	// Default: 1 MiB.
	MaxBody int64
	// MaxResponse is the largest response body in bytes. A larger one is rolled back, and answered 500. A smaller one that is
	// over the operation's ResultLimit reaches the client, and the record is kept without it: a retry is answered 410.
	// Default: 16 MiB.
	MaxResponse int
	// Headers of a response that are recorded beside those of RecordedHeaders.
	// Default: none.
	Headers []string
	// NotRecorded are 4xx statuses that are never recorded, beside 401, 403, 408, 425 and 429.
	// Default: none.
	NotRecorded []int
	// Untransacted accepts a success of a handler that asked nothing of its transaction. Its writes, if it makes any elsewhere,
	// are not part of the commit.
	// Default: false, such a success is rolled back and answered 500.
	Untransacted bool
	// Fingerprint tells a retry from another request.
	// Default: FingerprintRequest.
	Fingerprint Fingerprint
	// Client names the caller in the record, for audit; at most 255 bytes. body is the whole body.
	// Default: none.
	Client func(r *http.Request, body []byte) string
	// OnUnprotected is told of each request that Optional let through, to be counted.
	// Default: nobody is.
	OnUnprotected func(*http.Request)
	// Log receives the errors behind answers of 5xx that are not the handler's.
	// Default: slog.Default().
	Log *slog.Logger
}

func (c *Config) withDefaults() Config {
	var d Config
	if c != nil {
		d = *c
	}
	if d.MaxBody == 0 {
		d.MaxBody = DefaultMaxBody
	}
	if d.MaxResponse == 0 {
		d.MaxResponse = DefaultMaxResponse
	}
	if d.Fingerprint == nil {
		d.Fingerprint = FingerprintRequest
	}
	if d.Client == nil {
		d.Client = func(*http.Request, []byte) string { return "" }
	}
	if d.OnUnprotected == nil {
		d.OnUnprotected = func(*http.Request) {}
	}
	if d.Log == nil {
		d.Log = slog.Default()
	}
	return d
}

func (c *Config) validate() error {
	invalid := func(field, rule string) error {
		return &idempotency.ConfigError{Field: "Config." + field, Rule: rule}
	}
	switch {
	case c.MaxBody < -1:
		return invalid("MaxBody", "must be positive, or -1 for no limit")
	case c.MaxResponse < 0:
		return invalid("MaxResponse", "must be positive: the whole response is held in memory")
	}
	for _, name := range c.Headers {
		if neverRecorded(http.CanonicalHeaderKey(name)) || strings.TrimSpace(name) == "" {
			return invalid("Headers", fmt.Sprintf("must not name %q: it belongs to one connection, one caller or one moment", name))
		}
	}
	for _, status := range c.NotRecorded {
		if status < 400 || status > 499 {
			return invalid("NotRecorded", fmt.Sprintf("must be statuses from 400 to 499, %d is not", status))
		}
	}
	return nil
}
