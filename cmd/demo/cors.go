package main

import (
	"net/http"

	"github.com/pgonce/pgonce/idempotencyhttp"
)

// crossOrigin lets pages of one other origin use the service. It stands outside of the middleware, as docs/http.md says: a replay has
// the CORS headers of its own request, and a pre-flight is no request of the handler.
func crossOrigin(origin string, next http.Handler) http.Handler {
	if origin == "" {
		return next
	}
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		h := w.Header()
		h.Add("Vary", "Origin")
		if r.Header.Get("Origin") == origin {
			h.Set("Access-Control-Allow-Origin", origin)
			h.Set("Access-Control-Expose-Headers", idempotencyhttp.HeaderReplayed+", Retry-After, Location, "+headerAnsweredBy)
		}
		if r.Method != http.MethodOptions || r.Header.Get("Access-Control-Request-Method") == "" {
			next.ServeHTTP(w, r)
			return
		}
		if r.Header.Get("Origin") == origin {
			h.Set("Access-Control-Allow-Methods", "GET, POST, PUT")
			h.Set("Access-Control-Allow-Headers", "Content-Type, "+idempotencyhttp.HeaderKey)
			h.Set("Access-Control-Max-Age", "600")
		}
		w.WriteHeader(http.StatusNoContent)
	})
}
