package idempotencygrpc

import (
	"context"
	"fmt"
	"log/slog"
	"maps"
	"strings"

	"google.golang.org/grpc/codes"

	"github.com/pgonce/pgonce/idempotency"
	"github.com/pgonce/pgonce/txn"
)

// Metadata of a call that may be sent again, and of its answer.
const (
	MetadataKey      = "idempotency-key"
	MetadataReplayed = "idempotent-replayed"
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

func (c *Config) withDefaults() Config {
	var d Config
	if c != nil {
		d = *c
	}
	if d.Client == nil {
		d.Client = func(context.Context) string { return "" }
	}
	if d.Log == nil {
		d.Log = slog.Default()
	}
	return d
}

// Interceptor protects methods. It is safe for concurrent use.
type Interceptor struct {
	runner  *txn.Runner
	tenant  Tenant
	methods map[string]idempotency.Operation
	config  Config
}

// New returns an interceptor for these methods: full names, "/package.Service/Method", and the operation of each. All others
// pass. tenant has no default, since one that everybody shares must be a choice: SingleTenant. The error is an
// *idempotency.ConfigError that names field and rule.
func New(runner *txn.Runner, tenant Tenant, methods map[string]string, cfg *Config) (*Interceptor, error) {
	invalid := func(field, rule string) error { return &idempotency.ConfigError{Field: field, Rule: rule} }
	switch {
	case runner == nil:
		return nil, invalid("runner", "must not be nil")
	case tenant == nil:
		return nil, invalid("tenant", "must not be nil: use SingleTenant if there is only one")
	case len(methods) == 0:
		return nil, invalid("methods", "must name at least one method")
	}
	i := &Interceptor{runner: runner, tenant: tenant, methods: map[string]idempotency.Operation{}, config: cfg.withDefaults()}
	for method, name := range maps.All(methods) {
		op, declared := runner.Operation(name)
		switch {
		case !strings.HasPrefix(method, "/") || strings.Count(method, "/") != 2:
			return nil, invalid("methods", fmt.Sprintf("must be full names such as /shop.Orders/Create, is %q", method))
		case !declared:
			return nil, invalid("methods", fmt.Sprintf("must have operations of txn.Config.Operations, %q of %s is none", name, method))
		}
		i.methods[method] = op
	}
	for _, code := range i.config.NotRecorded {
		if code == codes.OK {
			return nil, invalid("Config.NotRecorded", "must not hold OK: a success is recorded with its business rows")
		}
	}
	return i, nil
}
