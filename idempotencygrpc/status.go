package idempotencygrpc

import (
	"google.golang.org/grpc/status"

	"github.com/pgonce/pgonce/idempotencygrpc/internal/unary"
)

// ErrorDomain is the domain of the google.rpc.ErrorInfo in every status of this package. Its reason is stable and for
// programs; texts are for people and may change.
const ErrorDomain = unary.ErrorDomain

// The reasons.
const (
	ReasonKeyMissing     = unary.ReasonKeyMissing
	ReasonKeyInvalid     = unary.ReasonKeyInvalid
	ReasonInvalid        = unary.ReasonInvalid
	ReasonMismatch       = unary.ReasonMismatch
	ReasonNotIssued      = unary.ReasonNotIssued
	ReasonInProgress     = unary.ReasonInProgress
	ReasonNeedsAPerson   = unary.ReasonNeedsAPerson
	ReasonResultGone     = unary.ReasonResultGone
	ReasonUnreadable     = unary.ReasonUnreadable
	ReasonOutcomeUnknown = unary.ReasonOutcomeUnknown
	ReasonUnavailable    = unary.ReasonUnavailable
	ReasonFailed         = unary.ReasonFailed
	ReasonProgramError   = unary.ReasonProgramError
	ReasonInternal       = unary.ReasonInternal
)

// StatusOf gives the status of an error of this library, for handlers that call package txn themselves. Errors it does not know
// are INTERNAL, and tell nothing of the program's inside.
func StatusOf(err error) *status.Status { return unary.StatusOf(err) }
