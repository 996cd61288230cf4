package idempotencyconnect

import (
	"context"
	"log/slog"

	"connectrpc.com/connect"
	"google.golang.org/grpc/codes"

	"github.com/pgonce/pgonce/idempotency"
	"github.com/pgonce/pgonce/idempotencygrpc/internal/unary"
	"github.com/pgonce/pgonce/txn"
)

// Headers of a call that may be sent again, and of its answer. For an error the second one is in its Meta.
const (
	HeaderKey      = "Idempotency-Key"
	HeaderReplayed = "Idempotent-Replayed"
)

// Tenant says whose key a call brings, from what the program has made sure of: the peer's certificate, the token's subject. An
// error, and a tenant that breaks a rule, ends the call with internal, unless the error is a *connect.Error: nobody may share a
// tenant by accident.
type Tenant func(context.Context) (string, error)

// SingleTenant is for programs that have only one: whoever knows a key may ask for its answer.
func SingleTenant(context.Context) (string, error) { return idempotency.SingleTenant, nil }

// Config configures an Interceptor. A zero field means its default.
type Config struct {
	// Optional lets a call without a key through to the handler, which then runs unprotected and without a transaction in its
	// context.
	// Default: false, such a call ends with invalid_argument.
	Optional bool
	// Untransacted accepts a success of a handler that asked nothing of its transaction.
	// Default: false, such a success is rolled back and ends with internal.
	Untransacted bool
	// NotRecorded are codes that are never recorded, beside those that never are.
	// Default: none.
	NotRecorded []connect.Code
	// Client names the caller in the record, for audit; at most 255 bytes.
	// Default: none.
	Client func(context.Context) string
	// Log receives the errors behind answers that tell nothing of the program's inside.
	// Default: slog.Default().
	Log *slog.Logger
}

// Interceptor protects methods of handlers, given to them by connect.WithInterceptors, behind whatever authenticates. It is safe
// for concurrent use.
type Interceptor struct{ rules unary.Rules }

var _ connect.Interceptor = (*Interceptor)(nil)

// New returns an interceptor for these methods: full names as the generated constants have them, "/package.Service/Method", and
// the operation of each. All others pass. tenant has no default, since one that everybody shares must be a choice: SingleTenant.
// The error is an *idempotency.ConfigError that names field and rule.
func New(runner *txn.Runner, tenant Tenant, methods map[string]string, cfg *Config) (*Interceptor, error) {
	if cfg == nil {
		cfg = &Config{}
	}
	i := &Interceptor{unary.Rules{
		Runner: runner, Tenant: tenant, Optional: cfg.Optional, Untransacted: cfg.Untransacted, Client: cfg.Client, Log: cfg.Log,
		Status: statusFrom,
	}}
	for _, code := range cfg.NotRecorded {
		i.rules.NotRecorded = append(i.rules.NotRecorded, codes.Code(code))
	}
	if err := i.rules.Protect(methods); err != nil {
		return nil, err
	}
	return i, nil
}
