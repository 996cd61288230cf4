// Package idempotencytest is the conformance suite: what every way to pgonce (with and without fronts, from Go, from SQL)
// must answer, whatever happens to the tiers before PostgreSQL.
package idempotencytest
