// Package idempotency decides, for one key, whether to run, wait, replay or refuse.
//
// It is the hub of pgonce: the words (Operation, Key, Fingerprint, Record), the state machine, the errors callers
// branch on, and every SQL statement on our tables (Store). It knows neither Redis nor HTTP. Programs usually call
// package txn, which runs their function in one PostgreSQL transaction together with the record.
package idempotency
