package idempotencyhttp

import (
	"encoding/json"
	"net/http"
	"time"

	"github.com/pgonce/pgonce/idempotency"
	"github.com/pgonce/pgonce/txn"
)

// IssuedToken is the answer of Tokens.
type IssuedToken struct {
	Token     string    `json:"token"` // to be sent as the idempotency key
	Operation string    `json:"operation"`
	ExpiresAt time.Time `json:"expires_at"` // of its first use
}

// Tokens answers POST with an issued token of an operation, for the tenant of the request: for a route such as POST
// /orders/tokens, behind whoever authenticates and limits. It panics as Operation does, also if the operation has no Tokens.
func (m *Middleware) Tokens(name string) http.Handler {
	op := m.declared(name)
	if op.Tokens == nil {
		panic(&idempotency.ConfigError{Field: "Operation " + name + ": Tokens", Rule: "must be set to issue tokens: use ids.NewTokens"})
	}
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.Method != http.MethodPost {
			w.Header().Set("Allow", http.MethodPost)
			http.Error(w, "a token is made by POST", http.StatusMethodNotAllowed)
			return
		}
		tenant, err := m.tenantOf(r, op)
		if err != nil {
			m.fail(w, r, idempotency.Key{}, err)
			return
		}
		token, err := txn.Issue(r.Context(), m.runner, tenant, name)
		if err != nil {
			m.fail(w, r, idempotency.Key{}, err)
			return
		}
		w.Header().Set("Content-Type", "application/json")
		w.Header().Set("Cache-Control", "no-store") // a token is for one client
		w.WriteHeader(http.StatusCreated)
		_ = json.NewEncoder(w).Encode(IssuedToken{Token: token.Key.Value(), Operation: name, ExpiresAt: token.ExpiresAt}) // an error: it has gone
	})
}
