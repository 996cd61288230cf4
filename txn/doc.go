// Package txn runs a service's function in one PostgreSQL transaction together with its idempotency record, and tells
// the truth about the commit.
//
// One call of WithIdempotency is: acquire the key (BEGIN, an advisory lock, the record: one round trip), run the
// function, then record the outcome and COMMIT (one round trip). A duplicate gets the first outcome back, or waits, or
// is told "in progress". The unique key in PostgreSQL decides; the lock only saves work.
//
// The function may run more than once before one of its runs is committed (serialization failures, deadlocks, lost
// connections): it must be safe to run again from its start. Only what it does through the transaction it is given is
// done once.
package txn
