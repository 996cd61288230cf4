// Package idempotency is what the tests need of it.
package idempotency

type (
	Request    struct{}
	Record     struct{}
	Resolution struct{}
)
