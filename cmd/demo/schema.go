package main

import (
	"context"
	_ "embed"
	"fmt"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
)

//go:embed schema.sql
var schemaSQL string

// createSchema makes the shop's tables and fills its shelves, all or nothing.
func createSchema(ctx context.Context, pool *pgxpool.Pool) error {
	// In the simple protocol many statements are one transaction.
	if _, err := pool.Exec(ctx, schemaSQL, pgx.QueryExecModeSimpleProtocol); err != nil {
		return fmt.Errorf("create schema demo: %w", err)
	}
	return nil
}
