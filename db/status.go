package db

import (
	"context"
	"fmt"
	"slices"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
)

// Status is what a database has of our migrations.
type Status struct {
	Version int // what idempotency.schema_version() answers; 0: there is no schema
	// Listed are the versions in VersionTable, goose's list. It should end with Version.
	Listed []int
	// ListHidden: this role may not read the list, as a service's need not.
	ListHidden bool
	// Pooled reports whether a pooler stands between this program and PostgreSQL.
	Pooled bool
	// ServerVersion is as server_version_num counts it.
	ServerVersion int
	InRecovery    bool
	Encoding      string
}

// Agrees reports whether goose's list is that of the schema. It is not after somebody has dropped or restored one of the two.
// A list that may not be read is not blamed.
func (s *Status) Agrees() bool {
	if s.ListHidden {
		return true
	}
	for n := 1; n <= s.Version; n++ {
		if !slices.Contains(s.Listed, n) {
			return false
		}
	}
	return len(s.Listed) == s.Version
}

// ReadStatus only reads, and works through a pooler and on a standby too.
func ReadStatus(ctx context.Context, pool *pgxpool.Pool) (Status, error) {
	found, err := inspect(ctx, pool)
	if err != nil {
		return Status{}, fmt.Errorf("db: status: %w", err)
	}
	s := Status{
		Version: found.schemaVersion, Pooled: found.pooled, ServerVersion: found.version, InRecovery: found.inRecovery,
		Encoding: found.encoding,
	}
	var readable *bool // NULL: there is none
	if err := pool.QueryRow(ctx, `SELECT has_table_privilege(to_regclass($1), 'SELECT')`, pgx.QueryExecModeExec,
		VersionTable).Scan(&readable); err != nil {
		return Status{}, fmt.Errorf("db: status: %w", err)
	}
	if readable == nil || !*readable {
		s.ListHidden = readable != nil
		return s, nil
	}
	// Version 0 is goose's own first row.
	rows, err := pool.Query(ctx, `SELECT DISTINCT version_id::integer FROM `+VersionTable+` WHERE is_applied AND version_id > 0 ORDER BY 1`,
		pgx.QueryExecModeExec)
	if err != nil {
		return Status{}, fmt.Errorf("db: status: %w", err)
	}
	if s.Listed, err = pgx.CollectRows(rows, pgx.RowTo[int]); err != nil {
		return Status{}, fmt.Errorf("db: status: %w", err)
	}
	return s, nil
}
