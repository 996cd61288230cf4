package redisfront

import "errors"

// What callers of Do branch on, beside the errors of package idempotency.
var (
	// ErrUnavailable means that Redis could not be asked, see Error: the function was not run. Retry later with the same key.
	ErrUnavailable = errors.New("redisfront: Redis cannot be asked, the function was not run: retry later with the same key")
	// ErrLockLost means that the lock ended while the function ran, so that another call may have run it too, or still runs
	// it. It is also the cause with which the function's context ends then. Retry with the same key: the other call's
	// outcome counts.
	ErrLockLost = errors.New("redisfront: the lock was lost while the function ran")
)
