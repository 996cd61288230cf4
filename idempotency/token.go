package idempotency

import (
	"context"
	"fmt"
	"time"

	"github.com/pgonce/pgonce/internal/dbsqlc"
)

// Token is an issued token: the value of a key that may be used once, for the tenant and the operation it was issued for.
type Token struct {
	Key Key // its Value is what the client is given
	// ExpiresAt is until when its first use must come, by PostgreSQL's clock. An outcome is then kept for the operation's
	// Retention, as ever.
	ExpiresAt time.Time
}

// Tokens makes values of issued tokens, and refuses those it cannot have made. It never asks anybody. ids.Tokens is one.
type Tokens interface {
	// Make returns a value that was never made before: nobody can guess it.
	Make(tenant, operation string) string
	// Verify returns ErrNotIssued for a value that Make cannot have returned for the tenant and the operation.
	Verify(tenant, operation, value string) error
}

// Issue records a key as an issued token. ErrRecordExists: the key was used before. After any other error it may have been
// recorded: issue another one, this one ends by itself.
func (s *Store) Issue(ctx context.Context, db DB, key Key, life time.Duration) (Token, error) {
	expires, err := dbsqlc.New(db).RecordIssue(ctx, dbsqlc.RecordIssueParams{
		Tenant: key.tenant, Operation: key.operation, Key: key.value, LifeUs: life.Microseconds(),
	})
	if err != nil {
		return Token{}, fmt.Errorf("idempotency: issue %v: %w", key, translate(err))
	}
	return Token{Key: key, ExpiresAt: expires.UTC()}, nil
}
