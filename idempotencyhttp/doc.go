// Package idempotencyhttp makes HTTP handlers run once per Idempotency-Key: a middleware for net/http and what speaks it.
//
// The handler runs inside the transaction of package txn, which it takes from its context (txn.FromContext). Its response is
// kept in memory, recorded in the transaction of its business rows, and sent to the client after COMMIT. A retry gets the
// recorded response, with the header Idempotent-Replayed.
//
// The status decides. 2xx and 3xx commit. Any other status rolls the business rows back: a 4xx that will not change when the
// client tries again is recorded and replayed, 401, 403, 408, 425, 429, 5xx and whatever is beyond never are. A panic rolls
// back and goes on. A handler may be entered again after a rollback, with the same request and a fresh response.
//
// Whoever the caller is must be known, and may do what it asks, before this middleware: a replay asks no handler.
package idempotencyhttp
