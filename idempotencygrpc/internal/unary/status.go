package unary

import (
	"context"
	"errors"
	"time"

	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/protoadapt"
	"google.golang.org/protobuf/types/known/durationpb"

	"github.com/pgonce/pgonce/idempotency"
)

// ErrorDomain is the domain of the google.rpc.ErrorInfo in every status of this package. Its reason is stable and for
// programs; texts are for people and may change.
const ErrorDomain = "pgonce"

// The reasons.
const (
	ReasonKeyMissing     = "KEY_MISSING"
	ReasonKeyInvalid     = "KEY_INVALID"
	ReasonInvalid        = "INVALID_REQUEST"
	ReasonMismatch       = "MISMATCH"
	ReasonNotIssued      = "NOT_ISSUED"
	ReasonInProgress     = "IN_PROGRESS"
	ReasonNeedsAPerson   = "NEEDS_A_PERSON"
	ReasonResultGone     = "RESULT_GONE"
	ReasonUnreadable     = "RESULT_UNREADABLE"
	ReasonOutcomeUnknown = "OUTCOME_UNKNOWN"
	ReasonUnavailable    = "UNAVAILABLE"
	ReasonFailed         = "FAILED"
	ReasonProgramError   = "PROGRAM_ERROR"
	ReasonInternal       = "INTERNAL"
)

// statusOf makes a status with its reason and, where a retry with the same key makes sense, the pause before it.
func statusOf(code codes.Code, reason, text string, pause time.Duration) *status.Status {
	s := status.New(code, text)
	details := []protoadapt.MessageV1{protoadapt.MessageV1Of(&errdetails.ErrorInfo{Reason: reason, Domain: ErrorDomain})}
	if pause > 0 {
		details = append(details, protoadapt.MessageV1Of(&errdetails.RetryInfo{RetryDelay: durationpb.New(pause)}))
	}
	if with, err := s.WithDetails(details...); err == nil {
		return with
	}
	return s
}

// StatusOf gives the status of an error of this library, for handlers that call package txn themselves. Errors it does not know
// are INTERNAL, and tell nothing of the program's inside.
func StatusOf(err error) *status.Status {
	var busy *idempotency.InProgressError
	var invalid *idempotency.InvalidError
	var failed *idempotency.FailedError
	switch {
	// First: it may wrap any of the others, and only it says that nobody knows.
	case errors.Is(err, idempotency.ErrOutcomeUnknown):
		return statusOf(codes.Unavailable, ReasonOutcomeUnknown, "nobody knows yet whether this was done: retry with the same key", time.Second)
	case errors.As(err, &invalid):
		return statusOf(codes.InvalidArgument, ReasonInvalid, invalid.Field+" "+invalid.Rule, 0)
	case errors.Is(err, idempotency.ErrManual):
		return statusOf(codes.Aborted, ReasonNeedsAPerson, "nobody knows what became of this, and somebody has to find out", 0)
	case errors.As(err, &busy):
		return statusOf(codes.Aborted, ReasonInProgress, "a call with this key is still running: retry with the same key", busy.RetryAfter)
	case errors.Is(err, idempotency.ErrMismatch):
		return statusOf(codes.InvalidArgument, ReasonMismatch, "this key was used for another request: for a new request take a new key", 0)
	case errors.Is(err, idempotency.ErrNotIssued):
		return statusOf(codes.InvalidArgument, ReasonNotIssued, "the key is no issued token, or its time is over: ask for a new one", 0)
	case errors.Is(err, idempotency.ErrResultExpired):
		return statusOf(codes.FailedPrecondition, ReasonResultGone, "this was done, and its answer is no longer kept; it is never done again for this key", 0)
	case errors.Is(err, idempotency.ErrResultDecode):
		return statusOf(codes.Internal, ReasonUnreadable, "this was done, and its answer cannot be read; it is never done again for this key", 0)
	case errors.As(err, &failed):
		return statusOf(codes.Internal, ReasonFailed, "this failed for good, and that is recorded: for a new request take a new key", 0)
	}
	for _, again := range []error{
		idempotency.ErrRestart, idempotency.ErrLeaseLost, idempotency.ErrReadOnly, idempotency.ErrNewerRecord,
	} {
		if errors.Is(err, again) {
			return statusOf(codes.Unavailable, ReasonUnavailable, "the service cannot work at the moment: retry with the same key", time.Second)
		}
	}
	switch {
	case errors.Is(err, context.DeadlineExceeded):
		return statusOf(codes.DeadlineExceeded, ReasonUnavailable, "the deadline is over: retry with the same key", 0)
	case errors.Is(err, context.Canceled):
		return statusOf(codes.Canceled, ReasonUnavailable, "the caller is gone", 0)
	}
	for _, mistake := range []error{ // of the program, which the same call meets again
		idempotency.ErrResultTooLarge, idempotency.ErrResultEncode, idempotency.ErrConfig, idempotency.ErrWrongMode, idempotency.ErrNested,
	} {
		if errors.Is(err, mistake) {
			return statusOf(codes.Internal, ReasonProgramError, "the service is put together wrongly: a retry comes to the same", 0)
		}
	}
	return statusOf(codes.Internal, ReasonInternal, "something went wrong on our side: retry with the same key", 0)
}
