package idempotencygrpc

import (
	"context"
	"log/slog"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/pgonce/pgonce/idempotency"
	"github.com/pgonce/pgonce/idempotencygrpc/internal/unary"
	"github.com/pgonce/pgonce/txn"
)

// Metadata of a call that may be sent again, and of its answer.
const (
	MetadataKey      = unary.MetadataKey
	MetadataReplayed = unary.MetadataReplayed
)

// Tenant says whose key a call brings, from what the program has made sure of: the peer's certificate, the token's subject. An
// error, and a tenant that breaks a rule, ends the call with INTERNAL, unless the error is a status of its own: nobody may
// share a tenant by accident.
type Tenant func(context.Context) (string, error)

// SingleTenant is for programs that have only one: whoever knows a key may ask for its answer.
func SingleTenant(context.Context) (string, error) { return idempotency.SingleTenant, nil }

// Config configures an Interceptor. A zero field means its default.
type Config struct {
	// Optional lets a call without a key through to the handler, which then runs unprotected and without a transaction in its
	// context.
	// Default: false, such a call ends with INVALID_ARGUMENT.
	Optional bool
	// Untransacted accepts a success of a handler that asked nothing of its transaction.
	// Default: false, such a success is rolled back and ends with INTERNAL.
	Untransacted bool
	// NotRecorded are codes that are never recorded, beside those that never are.
	// Default: none.
	NotRecorded []codes.Code
	// Client names the caller in the record, for audit; at most 255 bytes.
	// Default: none.
	Client func(context.Context) string
	// Log receives the errors behind answers that tell nothing of the program's inside.
	// Default: slog.Default().
	Log *slog.Logger
}

// Interceptor protects methods. It is safe for concurrent use.
type Interceptor struct{ rules unary.Rules }

// New returns an interceptor for these methods: full names, "/package.Service/Method", and the operation of each. All others
// pass. tenant has no default, since one that everybody shares must be a choice: SingleTenant. The error is an
// *idempotency.ConfigError that names field and rule.
func New(runner *txn.Runner, tenant Tenant, methods map[string]string, cfg *Config) (*Interceptor, error) {
	if cfg == nil {
		cfg = &Config{}
	}
	i := &Interceptor{unary.Rules{
		Runner: runner, Tenant: tenant, Optional: cfg.Optional, Untransacted: cfg.Untransacted, NotRecorded: cfg.NotRecorded,
		Client: cfg.Client, Log: cfg.Log, Status: status.FromError,
	}}
	if err := i.rules.Protect(methods); err != nil {
		return nil, err
	}
	return i, nil
}
