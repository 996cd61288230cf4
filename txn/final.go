package txn

import (
	"errors"
	"fmt"

	"github.com/pgonce/pgonce/idempotency"
)

// Final marks an error as a business outcome: everything the function wrote is rolled back, and the failure is recorded
// and replayed to every retry of the key as an *idempotency.FailedError. The value returned beside it is kept as its
// body. Use it for what will not change when the client tries again (out of stock, card refused), and never for what may
// (timeouts, rate limits, missing permission). code is for programs: 1 to 128 bytes, for example "out_of_stock".
//
// The error's text is stored and told to every retry: keep secrets out of it.
//
// Final returns nil for a nil error.
func Final(code string, err error) error {
	if err == nil {
		return nil
	}
	return &finalError{code: code, err: err}
}

type finalError struct {
	code string
	err  error
}

func (e *finalError) Error() string { return fmt.Sprintf("%s: %v", e.code, e.err) }
func (e *finalError) Unwrap() error { return e.err }

// CodeTransactionEnded is recorded when a function ended its transaction by itself. It is not for Final.
const CodeTransactionEnded = "pgonce.transaction_ended"

// MaxCodeBytes bounds the code of a Final.
const MaxCodeBytes = 128

// checkFinal refuses a Final that cannot be recorded as it is; nothing is recorded then.
func checkFinal(err error) error {
	var final *finalError
	switch {
	case !errors.As(err, &final):
		return nil
	case final.code == "" || len(final.code) > MaxCodeBytes || final.code == CodeTransactionEnded:
		return &idempotency.ConfigError{
			Field: "Final's code", Rule: fmt.Sprintf("must be 1 to %d bytes and not %q, is %.140q", MaxCodeBytes, CodeTransactionEnded, final.code),
		}
	}
	return nil
}

// failure is a final failure that waits to be recorded, in a transaction of its own.
type failure struct {
	code, message string
	cause         error
	result        payload
}

// finalFailure makes one of the function's Final, or nil.
func finalFailure(err error, result payload) *failure {
	var final *finalError
	if !errors.As(err, &final) {
		return nil
	}
	// Without the mark: an outer function that returns it must not record our failure as its own.
	return &failure{code: final.code, message: final.err.Error(), cause: final.err, result: result}
}
