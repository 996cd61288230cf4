// Package unary is what happens to a protected unary call, whichever transport it comes by: idempotencygrpc and
// idempotencyconnect are its two edges. Statuses are those of gRPC, which both speak.
package unary

import (
	"context"
	"fmt"
	"log/slog"
	"slices"
	"strings"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/pgonce/pgonce/idempotency"
	"github.com/pgonce/pgonce/txn"
)

// Metadata of a call that may be sent again, and of its answer.
const (
	MetadataKey      = "idempotency-key"
	MetadataReplayed = "idempotent-replayed"
)

// Rules are the edges' configuration. The fields are documented there.
type Rules struct {
	Runner       *txn.Runner
	Tenant       func(context.Context) (string, error)
	Optional     bool
	Untransacted bool
	NotRecorded  []codes.Code
	Client       func(context.Context) string
	Log          *slog.Logger
	// Status gives the status that an error of the transport carries. false: it is some other error.
	Status func(error) (*status.Status, bool)

	methods map[string]idempotency.Operation
}

// Protect validates the rules, with the methods and the operation of each, and sets their defaults.
func (r *Rules) Protect(methods map[string]string) error {
	invalid := func(field, rule string) error { return &idempotency.ConfigError{Field: field, Rule: rule} }
	switch {
	case r.Runner == nil:
		return invalid("runner", "must not be nil")
	case r.Tenant == nil:
		return invalid("tenant", "must not be nil: use SingleTenant if there is only one")
	case len(methods) == 0:
		return invalid("methods", "must name at least one method")
	case slices.Contains(r.NotRecorded, codes.OK):
		return invalid("Config.NotRecorded", "must not hold OK: a success is recorded with its business rows")
	}
	r.methods = map[string]idempotency.Operation{}
	for method, name := range methods {
		op, declared := r.Runner.Operation(name)
		switch {
		case !strings.HasPrefix(method, "/") || strings.Count(method, "/") != 2:
			return invalid("methods", fmt.Sprintf("must be full names such as /shop.Orders/Create, is %q", method))
		case !declared:
			return invalid("methods", fmt.Sprintf("must have operations of txn.Config.Operations, %q of %s is none", name, method))
		}
		r.methods[method] = op
	}
	if r.Client == nil {
		r.Client = func(context.Context) string { return "" }
	}
	if r.Log == nil {
		r.Log = slog.Default()
	}
	return nil
}

// Protects reports whether a call of the method with these keys is to be made by Do: all others pass.
func (r *Rules) Protects(method string, keys []string) bool {
	_, protected := r.methods[method]
	return protected && (len(keys) > 0 || !r.Optional)
}

// RefuseStream is the answer to a stream of a protected method, which no record could hold. nil: it passes.
func (r *Rules) RefuseStream(method string) *status.Status {
	if _, protected := r.methods[method]; !protected {
		return nil
	}
	return statusOf(codes.Internal, ReasonProgramError, "a stream cannot be protected by a key: take "+method+" off the methods", 0)
}

// recorded reports whether a status will be the same when the client tries again.
func (r *Rules) recorded(code codes.Code) bool {
	switch code {
	case codes.InvalidArgument, codes.NotFound, codes.AlreadyExists, codes.FailedPrecondition, codes.OutOfRange:
		return !slices.Contains(r.NotRecorded, code)
	}
	return false
}
