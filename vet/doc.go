// Package vet finds, before a program runs, functions of package txn that go past their transaction: a pool used inside, the
// transaction ended or given away, a call to somebody else while it is open. cmd/pgoncevet is the command, for go vet and by
// itself.
//
// It looks at the functions given to WithIdempotency, WithIdempotencyTx, WithIdempotencyMany and, as the second one, WithLease of
// packages txn and txnsql, also through functions of the program that only give them on; at handlers of idempotencymsg, at what
// is given to idempotencyhttp.OnCommit and wrapped by Middleware.Operation and OperationOf, at the Commit of an
// idempotency.Resolver, and at what takes its transaction by FromContext. It follows calls of functions, methods and what a
// variable holds, also into other packages. It does not follow calls through interfaces and what else is a function value: a
// txn.Tracer sees those when they happen.
//
// A comment with a reason, in the line or in the one above, accepts a finding:
//
//	//pgonce:allow pool: the audit row must stay when the order fails
package vet
