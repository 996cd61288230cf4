// Package idempotencygrpc makes unary gRPC methods run once per idempotency key, which clients send in the metadata
// idempotency-key.
//
// The handler runs inside the transaction of package txn, which it takes from its context (txn.FromContext). Its reply is
// recorded in the transaction of its business rows and sent after COMMIT; a retry gets the recorded reply, with
// idempotent-replayed in the header metadata. A status that will not change when the client tries again (INVALID_ARGUMENT,
// NOT_FOUND, ALREADY_EXISTS, FAILED_PRECONDITION, OUT_OF_RANGE) rolls back, and is recorded and replayed with its details; any
// other rolls back and is not.
//
// Whoever the caller is must be known, and may do what it asks, before this interceptor: a replay asks no handler.
package idempotencygrpc
