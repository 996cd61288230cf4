package idempotencyhttp_test

import (
	"net/http"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/pgonce/pgonce/idempotency"
	"github.com/pgonce/pgonce/idempotencyhttp"
	"github.com/pgonce/pgonce/txn"
)

// What clients see while an operation is released, switched off, and on again.
func TestPolicies_WhatClientsSee(t *testing.T) {
	t.Parallel()
	s := newSite(t)
	policies, err := idempotency.NewPolicies(s.pool, nil)
	require.NoError(t, err)
	s.runner, err = txn.New(s.pool, &txn.Config{Operations: []idempotency.Operation{create}, Policies: policies})
	require.NoError(t, err)
	s.serve(t, func(w http.ResponseWriter, r *http.Request) {
		if _, err := insert(r); err != nil {
			t.Error(err)
		}
		w.WriteHeader(http.StatusCreated)
		_, _ = w.Write([]byte("order"))
	})
	policy := func(enforcement string) {
		_, err := s.pool.Exec(t.Context(), `INSERT INTO idempotency.policies (scope, enforcement, actor, reason) VALUES ('all', $1, 'ada', 'x')
			ON CONFLICT (scope, name) DO UPDATE SET enforcement = EXCLUDED.enforcement, actor = EXCLUDED.actor, reason = EXCLUDED.reason`, enforcement)
		require.NoError(t, err)
		_, err = policies.RunOnce(t.Context())
		require.NoError(t, err)
	}
	executed := func(key, body string) {
		// Its error would be that a success has no record, which is what off is for.
		a, _ := s.try(t.Context(), http.MethodPost, "/orders", http.Header{idempotencyhttp.HeaderKey: {key}}, strings.NewReader(body))
		require.Equal(t, http.StatusCreated, a.status, a.body)
		require.Equal(t, "order", a.body)
		require.Empty(t, a.header.Values(idempotencyhttp.HeaderReplayed))
	}

	policy("shadow")
	executed("s", "{}")
	executed("s", "{}")
	executed("s", "another payload")
	require.Equal(t, 3, s.orders(t, "s"))

	policy("off")
	require.True(t, s.post(t, "s", "{}").replayed(), "what is recorded is replayed")
	require.Equal(t, http.StatusUnprocessableEntity, s.post(t, "s", "another payload").status)
	executed("o", "{}")
	executed("o", "{}")
	require.Equal(t, 2, s.orders(t, "o"))

	policy("enforce")
	require.True(t, s.post(t, "s", "{}").replayed())
	gone := s.post(t, "o", "{}")
	require.Equal(t, http.StatusGone, gone.status, gone.body)
	require.Equal(t, http.StatusUnprocessableEntity, s.post(t, "o", "another payload").status)
	require.Equal(t, 2, s.orders(t, "o"))
	require.Equal(t, 3, s.orders(t, "s"))
}
