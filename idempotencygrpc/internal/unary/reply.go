package unary

import (
	"encoding/json"
	"errors"
	"fmt"
	"strings"
	"unicode/utf8"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/anypb"

	spb "google.golang.org/genproto/googleapis/rpc/status"

	"github.com/pgonce/pgonce/internal/results"
)

// Reply is what is recorded of a method's outcome: a message, or a status with its details.
type Reply struct {
	Message proto.Message
	Status  *status.Status // nil: OK
}

var _ results.Formed = (*Reply)(nil)

// resultType begins with json, so that people see code and type in the view idempotency.audit.
const resultType = "json-grpc/1"

// stored is the recorded form.
type stored struct {
	Code   string `json:"code"`
	Type   string `json:"type,omitempty"`   // of the message
	Reply  []byte `json:"reply,omitempty"`  // the message
	Text   string `json:"text,omitempty"`   // of the status
	Status []byte `json:"status,omitempty"` // google.rpc.Status, with the details
}

// EncodeResult is for package txn.
func (r *Reply) EncodeResult() (data []byte, _ string, err error) {
	s := stored{Code: codes.OK.String()}
	switch {
	case r.Status != nil && r.Status.Code() != codes.OK:
		kept := storable(r.Status)
		s.Code, s.Text = kept.Code().String(), kept.Message()
		s.Status, err = proto.Marshal(kept.Proto())
	case r.Message != nil:
		s.Type = string(r.Message.ProtoReflect().Descriptor().FullName())
		s.Reply, err = proto.Marshal(r.Message)
	}
	if err != nil {
		return nil, "", fmt.Errorf("idempotencygrpc: encode reply: %w", err)
	}
	data, err = json.Marshal(s)
	return data, resultType, err
}

// storable is the status with a text that a message can hold: transports take any bytes, protobuf does not.
func storable(s *status.Status) *status.Status {
	if utf8.ValidString(s.Message()) {
		return s
	}
	p := s.Proto()
	p.Message = strings.ToValidUTF8(p.Message, "\uFFFD")
	return status.FromProto(p)
}

// DecodeResult is for package txn. The message's type is found among those linked into the program.
func (r *Reply) DecodeResult(kind string, data []byte) error {
	if kind != resultType {
		return errors.New("was not stored as a gRPC reply")
	}
	var s stored
	if err := json.Unmarshal(data, &s); err != nil {
		return err
	}
	switch {
	case s.Status != nil:
		var p spb.Status
		if err := proto.Unmarshal(s.Status, &p); err != nil {
			return err
		}
		*r = Reply{Status: status.FromProto(&p)}
	case s.Type != "":
		message, err := anypb.UnmarshalNew(&anypb.Any{TypeUrl: "/" + s.Type, Value: s.Reply}, proto.UnmarshalOptions{})
		if err != nil {
			return fmt.Errorf("has a message %s: %w", s.Type, err)
		}
		*r = Reply{Message: message}
	default:
		return errors.New("has neither message nor status")
	}
	return nil
}
