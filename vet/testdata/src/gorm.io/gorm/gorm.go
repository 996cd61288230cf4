// Package gorm is what the tests need of it.
package gorm

import (
	"context"
	"database/sql"
)

type ConnPool interface {
	ExecContext(ctx context.Context, query string, args ...any) (sql.Result, error)
}

type Statement struct{ ConnPool ConnPool }

type Session struct{ NewDB bool }

type DB struct {
	Error     error
	Statement *Statement
}

func (db *DB) Create(value any) *DB                    { return db }
func (db *DB) Find(dest any) *DB                       { return db }
func (db *DB) Where(query any, args ...any) *DB        { return db }
func (db *DB) WithContext(ctx context.Context) *DB     { return db }
func (db *DB) Session(s *Session) *DB                  { return db }
func (db *DB) Transaction(fc func(tx *DB) error) error { return nil }
