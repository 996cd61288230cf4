// Package faultsuite breaks PostgreSQL, its connections and whole processes while orders are placed, lets standbys take
// over, and asks afterwards whether every key has one order and every client was told the truth. It holds tests only.
//
// A run prints one line per suite, with -v, that begins with "faults:". PGONCE_FAULTS=full makes the long run; processes
// are killed at failpoints only in a build with the tag failpoints:
//
//	PGONCE_FAULTS=full go test -tags failpoints -timeout 15m -v ./internal/faultsuite
package faultsuite
