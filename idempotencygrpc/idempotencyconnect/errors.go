package idempotencyconnect

import (
	"errors"

	"connectrpc.com/connect"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/anypb"

	spb "google.golang.org/genproto/googleapis/rpc/status"

	"github.com/pgonce/pgonce/idempotencygrpc/internal/unary"
)

// ErrorDomain is the domain of the google.rpc.ErrorInfo in every error of this package. Its reason, one of idempotencygrpc's, is
// stable and for programs; texts are for people and may change.
const ErrorDomain = unary.ErrorDomain

// ErrorOf gives the *connect.Error of an error of this library, for handlers that call package txn themselves. Errors it does not
// know are internal, and tell nothing of the program's inside.
func ErrorOf(err error) *connect.Error { return errorOf(unary.StatusOf(err)) }

// statusFrom gives the status of a *connect.Error: code, text and details. Its headers stay behind.
func statusFrom(err error) (*status.Status, bool) {
	from, is := errors.AsType[*connect.Error](err)
	if !is {
		return nil, false
	}
	s := &spb.Status{Code: int32(from.Code()), Message: from.Message()} //nolint:gosec // the same numbers, 1 to 16
	for _, detail := range from.Details() {
		s.Details = append(s.Details, &anypb.Any{TypeUrl: "type.googleapis.com/" + detail.Type(), Value: detail.Bytes()})
	}
	return status.FromProto(s), true
}

func errorOf(s *status.Status) *connect.Error {
	to := connect.NewError(connect.Code(s.Code()), errors.New(s.Message()))
	for _, detail := range s.Proto().GetDetails() {
		if one, err := connect.NewErrorDetail(detail); err == nil {
			to.AddDetail(one)
		}
	}
	return to
}

// statusOfCall is statusFrom for a client, to whom any other error says that the call did not get through.
func statusOfCall(err error) *status.Status {
	if s, is := statusFrom(err); is {
		return s
	}
	return status.New(codes.Unknown, err.Error())
}
