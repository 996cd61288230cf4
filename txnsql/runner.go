package txnsql

import (
	"database/sql"
	"fmt"

	"github.com/jackc/pgx/v5/stdlib"

	"github.com/pgonce/pgonce/idempotency"
	"github.com/pgonce/pgonce/txn"
)

// Runner runs functions once per key, on the connections of a sql.DB. The embedded one is for everything that takes a
// *txn.Runner: txn.Issue, and the edges, in whose functions FromContext is the *sql.Tx.
type Runner struct{ *txn.Runner }

// New returns a runner on a sql.DB of OpenDB or OpenDBFromPool. It does not connect; the first call checks the schema. With
// fronts it keeps one connection of its own beside the sql.DB's. The error is an *idempotency.ConfigError that names field and
// rule.
func New(db *sql.DB, cfg *txn.Config) (*Runner, error) {
	if db == nil {
		return nil, &idempotency.ConfigError{Field: "db", Rule: "must not be nil"}
	}
	switch d := db.Driver().(type) {
	case *pgxDriver:
		runner, err := txn.NewOn(&source{db: db, config: d.config}, cfg)
		if err != nil {
			return nil, err
		}
		return &Runner{runner}, nil
	case *stdlib.Driver:
		return nil, &idempotency.ConfigError{
			Field: "db", Rule: "must be opened by txnsql.OpenDB or OpenDBFromPool, not by sql.Open or stdlib.OpenDB: a runner needs hooks on every connection",
		}
	default:
		return nil, &idempotency.ConfigError{
			Field: "db", Rule: fmt.Sprintf("must be over pgx: its driver is %T; open it by txnsql.OpenDB", d),
		}
	}
}
