package idempotencyconnect

import (
	"connectrpc.com/connect"
	"google.golang.org/protobuf/proto"

	"github.com/pgonce/pgonce/idempotencygrpc/internal/unary"
	"github.com/pgonce/pgonce/internal/results"
)

// Reply is what is recorded of a method's outcome: a message, or an error with its details. Tests and resolvers make them.
type Reply struct {
	Message proto.Message
	Error   *connect.Error // nil: a success
}

var _ results.Formed = (*Reply)(nil)

// Result is the reply in its recorded form, for an idempotency.Resolution. It is that of idempotencygrpc.
func (r Reply) Result() (result []byte, resultType string, err error) { return r.EncodeResult() }

// EncodeResult is for package txn.
func (r *Reply) EncodeResult() (data []byte, resultType string, err error) {
	stored := unary.Reply{Message: r.Message}
	if r.Error != nil {
		stored.Status, _ = statusFrom(r.Error)
	}
	return stored.EncodeResult()
}

// DecodeResult is for package txn. The message's type is found among those linked into the program.
func (r *Reply) DecodeResult(kind string, data []byte) error {
	var stored unary.Reply
	if err := stored.DecodeResult(kind, data); err != nil {
		return err
	}
	*r = Reply{Message: stored.Message}
	if stored.Status != nil {
		r.Error = errorOf(stored.Status)
	}
	return nil
}
