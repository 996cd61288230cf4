// Package idempotencychi lets the middleware of package idempotencyhttp stand above a router of chi.
package idempotencychi

import (
	"context"
	"net/http"
	"slices"

	"github.com/go-chi/chi/v5"
)

// Middleware is protect, which is of an idempotencyhttp.Middleware, for Router.Use. chi notes in the request's context how far it
// has come with the path, and a second run, which a transaction may need, would go on from there and end in a 404 if a router is
// mounted below. Here every run begins where the first did. Router.With and Router.Group need none of this.
func Middleware(protect func(http.Handler) http.Handler) func(http.Handler) http.Handler {
	return func(next http.Handler) http.Handler {
		return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			route := chi.RouteContext(r.Context())
			if route == nil { // above chi, which then begins anew by itself
				protect(next).ServeHTTP(w, r)
				return
			}
			last := route
			protect(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
				run := *route
				run.URLParams.Keys, run.URLParams.Values = slices.Clone(route.URLParams.Keys), slices.Clone(route.URLParams.Values)
				run.RoutePatterns = slices.Clone(route.RoutePatterns)
				last = &run
				next.ServeHTTP(w, r.WithContext(context.WithValue(r.Context(), chi.RouteCtxKey, last)))
			})).ServeHTTP(w, r)
			*route = *last // for those outside who ask for the route afterwards
		})
	}
}
