// Package idempotencyconnect makes unary methods of Connect servers (connectrpc.com/connect) run once per idempotency key, which
// clients send in the header Idempotency-Key: in the protocols of Connect, gRPC and gRPC-Web alike.
//
// The rules are those of package idempotencygrpc. The handler runs inside the transaction of package txn, which it takes from its
// context (txn.FromContext). Its reply is recorded in the transaction of its business rows and sent after COMMIT; a retry gets
// the recorded reply, with the header Idempotent-Replayed. An error that will not change when the client tries again
// (invalid_argument, not_found, already_exists, failed_precondition, out_of_range) rolls back, and is recorded and replayed with its
// details; any other rolls back and is not. Headers and trailers are not recorded. A record says nothing of the transport: a key
// that was used by gRPC is replayed by Connect.
//
// Whoever the caller is must be known, and may do what it asks, before this interceptor: a replay asks no handler.
package idempotencyconnect
