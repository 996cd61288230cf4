package idempotency

import (
	"errors"
	"fmt"

	"github.com/jackc/pgx/v5/pgconn"
)

// SQLSTATEs that the statements raise on purpose. Class ZP is free for applications.
const (
	codeTransactionEnded = "ZP001"
	codeRecordExists     = "ZP002"
	codeLeaseLost        = "ZP003"
)

// translate turns what the server said into our words, once, here: by SQLSTATE and constraint, never by text. What has
// no word of ours stays as it is, wrapped, for the function's own errors.
func translate(err error) error {
	var server *pgconn.PgError
	if !errors.As(err, &server) {
		return err
	}
	ours := server.SchemaName == "idempotency" && server.TableName == "records"
	switch server.Code {
	case codeTransactionEnded:
		return ErrTransactionEnded
	case codeRecordExists:
		return ErrRecordExists
	case codeLeaseLost:
		return ErrLeaseLost
	case "23505": // unique_violation: a duplicate only on our own key; a table of the service may well be named like ours
		if ours && server.ConstraintName == "records_pkey" {
			return ErrRecordExists
		}
	case "3F000", "42P01", "42703", "42883": // invalid_schema_name, undefined_table, _column, _function
		return fmt.Errorf("%w (%w)", &SchemaError{Want: SchemaVersion}, err)
	}
	if restartable(server) {
		return fmt.Errorf("%w: %w", ErrRestart, err)
	}
	return err
}

// Restartable reports whether a failed transaction is worth another run from its start: a serialization failure
// (40001), a deadlock (40P01), or a prepared statement that the session has lost. The error may come from a function's
// own statements.
func Restartable(err error) bool {
	if errors.Is(err, ErrRestart) {
		return true
	}
	var server *pgconn.PgError
	return errors.As(err, &server) && restartable(server)
}

func restartable(server *pgconn.PgError) bool {
	return server.Code == "40001" || server.Code == "40P01" || statementLost(server)
}

// StatementLost reports whether a prepared statement of the session is of no use any more: a function or a pooler has
// thrown it away, or a migration has changed the types of its result.
func StatementLost(err error) bool {
	var server *pgconn.PgError
	return errors.As(err, &server) && statementLost(server)
}

// 0A000 (feature_not_supported) says many things; only its place in the server tells that a plan is out of date.
func statementLost(server *pgconn.PgError) bool {
	return server.Code == "26000" || server.Code == "0A000" && server.Routine == "RevalidateCachedQuery"
}

// denied reports whether the server refused for want of a right.
func denied(err error) bool {
	var server *pgconn.PgError
	return errors.As(err, &server) && server.Code == "42501" // insufficient_privilege
}

// readOnly recognises a standby by what BEGIN READ WRITE answers there.
func readOnly(err error) error {
	var server *pgconn.PgError
	if errors.As(err, &server) && (server.Code == "0A000" || server.Code == "25006") {
		return fmt.Errorf("%w (%w)", ErrReadOnly, err)
	}
	return err
}
