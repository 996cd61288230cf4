// Package idempotencytest is for tests: helpers that make a service meet the outcomes which are rare in life (in progress, a
// replay, a mismatch, an unknown COMMIT), and the conformance suite, which says what every way to pgonce must answer,
// whatever happens to the tiers before PostgreSQL.
package idempotencytest
