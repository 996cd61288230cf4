package frameworks_test

import (
	"context"
	"net"
	"net/http"
	"testing"

	"github.com/go-chi/chi/v5"
	"github.com/stretchr/testify/require"

	"github.com/pgonce/pgonce/idempotencyhttp/frameworks/idempotencychi"
	"github.com/pgonce/pgonce/txn"
)

// chi leaves the route that it takes in the request's context, where a second run finds it.
func TestChi_AboveARouterThatMounts(t *testing.T) {
	t.Parallel()
	runs, pattern := 0, ""
	do := func(ctx context.Context, customer, key, _ string) result {
		runs++
		insert(ctx, key)
		if runs == 1 {
			tx, _ := txn.FromContext(ctx)
			_, _ = tx.Exec(ctx, `DO $$ BEGIN RAISE EXCEPTION 'on purpose' USING ERRCODE = '40001'; END $$`)
		}
		return result{status: http.StatusCreated, body: customer}
	}
	start := func(t *testing.T, l net.Listener, once protect, do work) {
		t.Helper()
		sub := chi.NewRouter()
		sub.Post("/orders", func(w http.ResponseWriter, r *http.Request) { write(w, r, chi.URLParam(r, "customer"), do) })
		r := chi.NewRouter()
		r.Use(func(next http.Handler) http.Handler {
			return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
				next.ServeHTTP(w, r)
				pattern = chi.RouteContext(r.Context()).RoutePattern()
			})
		}, idempotencychi.Middleware(once))
		r.Mount("/customers/{customer}", sub)
		serve(t, l, r)
	}
	one(t, start, do, func(t *testing.T, s *site) {
		t.Helper()
		a := s.send(t, http.MethodPost, "k", "")
		require.Equal(t, http.StatusCreated, a.status)
		require.Equal(t, "c-7", a.body)
		require.Equal(t, 1, s.orders(t, "k"))
		require.Equal(t, "/customers/{customer}/orders", pattern, "who logs the route outside sees it")
		require.Equal(t, a.body, s.send(t, http.MethodPost, "k", "").body)
	})
}
