// Package db creates and upgrades the tables: schema idempotency.
//
// Three ways leave the same database, and one may change from one to another: Migrate from a program, the goose
// command on the folder migrations, and install.sql for those who use neither. The version is read from
// idempotency.schema_version(); the table public.pgonce_goose_version is goose's own list.
package db

import (
	"embed"
	"io/fs"
)

// SchemaVersion is the version of the newest migration in this package: what idempotency.schema_version() answers
// after Migrate.
const SchemaVersion = 6

// VersionTable is goose's list of applied migrations. It is not in the schema idempotency, since goose must write it
// before the first migration creates that schema.
const VersionTable = "public.pgonce_goose_version"

//go:embed migrations/*.sql
var migrations embed.FS

//go:embed install.sql
var installSQL string

// Migrations returns the goose migrations, one file each in the root: for programs that run goose by themselves.
// Tell goose to use VersionTable.
func Migrations() fs.FS {
	sub, err := fs.Sub(migrations, "migrations")
	if err != nil {
		panic(err) // the name above is not a path
	}
	return sub
}

// InstallSQL returns install.sql: all migrations as one statement, atomic, safe to run again and to run concurrently.
// It works through a transaction pooler, where Migrate does not.
func InstallSQL() string { return installSQL }
