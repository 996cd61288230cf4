package txn

import (
	"context"

	"github.com/pgonce/pgonce/idempotency"
)

// Issue makes a token for one use of an operation and records it, in a transaction of its own: give the client the token's
// Key.Value, as the key of its call. For an operation with RequireIssued no other key runs. A token that nobody uses ends by
// itself, after the operation's TokenLife, and is purged by the compensator: so after an error just issue another one.
//
// Who may have a token, and how many, is the program's to say before it calls: each is a row.
func Issue(ctx context.Context, r *Runner, tenant, operation string) (idempotency.Token, error) {
	if err := nested(ctx, r, r.pool, idempotency.Key{}); err != nil {
		return idempotency.Token{}, err // it would wait for a connection while the function holds one
	}
	ctx = ownWork(ctx)
	op, err := r.operation(operation)
	if err != nil {
		return idempotency.Token{}, err
	}
	if op.Tokens == nil {
		return idempotency.Token{}, &idempotency.ConfigError{
			Field: "Operation " + operation + ": Tokens", Rule: "must be set to issue tokens: use ids.NewTokens",
		}
	}
	key, err := op.Key(tenant, op.Tokens.Make(tenant, operation))
	if err != nil {
		return idempotency.Token{}, err
	}
	var db idempotency.DB = r.pool
	if r.within != nil {
		r.within.mu.Lock()
		defer r.within.mu.Unlock()
		db = r.within.tx
	}
	if err := r.checkDatabase(ctx, db); err != nil {
		return idempotency.Token{}, err
	}
	return r.store.Issue(ctx, db, key, op.TokenLife)
}
