// Package store writes through the pool.
package store

import (
	"context"

	"github.com/jackc/pgx/v5/pgxpool"
)

// Store keeps a pool.
type Store struct{ Pool *pgxpool.Pool }

// Audit writes by itself.
func (s *Store) Audit(ctx context.Context, what string) error {
	_, err := s.Pool.Exec(ctx, `INSERT INTO audit (what) VALUES ($1)`, what)
	return err
}
