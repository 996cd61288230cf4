package txn

import (
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgonce/pgonce/idempotency"
	"github.com/pgonce/pgonce/internal/pgguard"
)

// ConfigurePool prepares a pool's configuration for a Runner, or a Compensator; call it before pgxpool.NewWithConfig, after
// setting hooks of your own. It does two things on every connection of the pool:
//
// From the moment COMMIT is sent, also that of a pgx.Tx of your own, the connection dials no cancel request. pgx sends one
// whenever a connection breaks or the context of a Commit ends, and PostgreSQL answers it by committing without waiting for
// the synchronous standby: an acknowledged commit could be lost.
//
// The server's last error, and a COMMIT sent by a function itself, are remembered, so that a transaction which a
// serialization failure has aborted is run again even where the function hides that error, and one that the function has
// ended is not.
func ConfigurePool(config *pgxpool.Config) { pgguard.Configure(config) }

var errPoolNotConfigured = &idempotency.ConfigError{Field: "pool", Rule: pgguard.Rule}

// guardOf returns the connection's guard, or an error if the pool's hook was replaced after ConfigurePool.
func guardOf(conn *pgx.Conn) (*pgguard.Guard, error) {
	if g := pgguard.Of(conn); g != nil {
		return g, nil
	}
	return nil, errPoolNotConfigured
}
