// Package redisfront puts Redis before PostgreSQL: it answers duplicates with the final record, and marks keys that are
// running, so that duplicates wait without asking PostgreSQL. It may forget everything at any moment, and it never says
// "go ahead": PostgreSQL decides, with or without it.
//
// What Redis holds of a key are two values of one hash slot, both with a time to live: the entry (a final record, under
// the epoch of its commit) and the mark (who runs). Every script leaves the same state when its reply is lost and it is
// sent again, as go-redis does.
package redisfront
