package idempotency

import (
	"context"
	"fmt"
	"time"

	"github.com/pgonce/pgonce/internal/dbsqlc"
)

// Epoch returns the name of the history the database is in, and PostgreSQL's time. The name changes when a standby is
// promoted and when somebody says that a backup was restored: commits may have been lost then, and what fronts keep of
// before is not believed. On a standby it is ErrReadOnly.
func (s *Store) Epoch(ctx context.Context, q Querier) (epoch string, now time.Time, err error) {
	var name *string
	if err := q.QueryRow(ctx, dbsqlc.EpochGet).Scan(&name, &now); err != nil {
		return "", time.Time{}, fmt.Errorf("idempotency: read epoch: %w", translate(err))
	}
	if name == nil {
		return "", time.Time{}, ErrReadOnly
	}
	return *name, now, nil
}
