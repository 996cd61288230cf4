package idempotencygrpc

import (
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	"github.com/pgonce/pgonce/idempotencygrpc/internal/unary"
	"github.com/pgonce/pgonce/internal/results"
)

// Reply is what is recorded of a method's outcome: a message, or a status with its details. Tests and resolvers make them.
type Reply struct {
	Message proto.Message
	Status  *status.Status // nil: OK
}

var _ results.Formed = (*Reply)(nil)

// Result is the reply in its recorded form, for an idempotency.Resolution.
func (r Reply) Result() (result []byte, resultType string, err error) { return r.EncodeResult() }

// EncodeResult is for package txn.
func (r *Reply) EncodeResult() (data []byte, resultType string, err error) {
	return (*unary.Reply)(r).EncodeResult()
}

// DecodeResult is for package txn. The message's type is found among those linked into the program.
func (r *Reply) DecodeResult(kind string, data []byte) error {
	return (*unary.Reply)(r).DecodeResult(kind, data)
}
