package main

import (
	"encoding/json"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/pgonce/pgonce/idempotencyhttp"
)

func TestCheckout_RunsForIssuedTokensOnly(t *testing.T) {
	t.Parallel()
	s := newShop(t, false, noThinking)
	checkout := func(key string) answer {
		t.Helper()
		return s.do(t, http.MethodPost, "/checkout", keyHeader(key), strings.NewReader(coffee))
	}
	requireProblem(t, checkout("my-own"), http.StatusBadRequest, "not-issued")
	issued := s.do(t, http.MethodPost, "/checkout/tokens", http.Header{}, nil)
	require.Equal(t, http.StatusCreated, issued.status, issued.body)
	require.Equal(t, "no-store", issued.header.Get("Cache-Control"))
	var token idempotencyhttp.IssuedToken
	require.NoError(t, json.Unmarshal([]byte(issued.body), &token))
	first := checkout(token.Token)
	require.Equal(t, http.StatusCreated, first.status, first.body)
	again := checkout(token.Token)
	require.True(t, again.replayed())
	require.NotEmpty(t, again.by())
	require.Equal(t, first.body, again.body)
	require.Equal(t, 1, s.orders(t, token.Token))
	// The token belongs to the checkout, and is any value elsewhere.
	require.False(t, s.post(t, token.Token, coffee).replayed())
}

func TestPutStatus_WithAKeyTheFirstAnswerStays(t *testing.T) {
	t.Parallel()
	s := newShop(t, false, noThinking)
	order := s.post(t, "k", coffee).header.Get("Location")
	move := func(key, status string) answer {
		t.Helper()
		return s.do(t, http.MethodPut, order+"/status", keyHeader(key), strings.NewReader(`{"status":"`+status+`"}`))
	}
	first := move("m1", "paid")
	require.Equal(t, http.StatusOK, first.status, first.body)
	refused := move("m2", "delivered")
	requireProblem(t, refused, http.StatusConflict, "transition-refused")
	require.Equal(t, http.StatusOK, move("m3", "shipped").status)
	again := move("m1", "paid")
	require.True(t, again.replayed())
	require.Equal(t, first.body, again.body)
	require.Contains(t, s.get(t, order).body, `"shipped"`, "where it is by now")
	again = move("m2", "delivered")
	require.True(t, again.replayed(), "a refusal is an answer too")
	require.Equal(t, refused.body, again.body)
	requireProblem(t, move("m1", "refunded"), http.StatusUnprocessableEntity, "mismatch")
	require.Equal(t, http.StatusOK, s.put(t, order, `{"status":"delivered"}`).status)
	require.Equal(t, 3, s.number(t, `SELECT count(*) FROM idempotency.records WHERE operation = $1`, moveOrder.Name))
}

// Two payments of one order, with two keys, at the same time: the second is charged before it learns that it is too late, and says so.
func TestPay_WhatCannotBeBookedIsAnAnswer(t *testing.T) {
	t.Parallel()
	s := newShop(t, false, noThinking)
	order := s.post(t, "k", coffee).header.Get("Location")
	s.gateway.mu.Lock()
	s.gateway.onCharge = func(charge) { // paid by somebody else meanwhile, and sent
		_, err := s.pool.Exec(t.Context(), `UPDATE demo.orders SET status = 'shipped'`)
		if err != nil {
			t.Error(err)
		}
	}
	s.gateway.mu.Unlock()
	requireProblem(t, s.pay(t, "p", order, "4242"), http.StatusConflict, "transition-refused")
}

func TestCrossOrigin_OnePagesOriginIsAllowed(t *testing.T) {
	t.Parallel()
	const page = "http://localhost:3000"
	served := 0
	open := func(origin string) http.Handler {
		return crossOrigin(origin, http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
			served++
			w.WriteHeader(http.StatusCreated)
		}))
	}
	ask := func(h http.Handler, method, origin string, preflight bool) *httptest.ResponseRecorder {
		r := httptest.NewRequestWithContext(t.Context(), method, "/orders", nil)
		r.Header.Set("Origin", origin)
		if preflight {
			r.Header.Set("Access-Control-Request-Method", http.MethodPost)
		}
		w := httptest.NewRecorder()
		h.ServeHTTP(w, r)
		return w
	}
	before := ask(open(page), http.MethodOptions, page, true)
	require.Equal(t, http.StatusNoContent, before.Code)
	require.Equal(t, page, before.Header().Get("Access-Control-Allow-Origin"))
	require.Contains(t, before.Header().Get("Access-Control-Allow-Headers"), idempotencyhttp.HeaderKey)
	require.Zero(t, served)
	answer := ask(open(page), http.MethodPost, page, false)
	require.Equal(t, page, answer.Header().Get("Access-Control-Allow-Origin"))
	require.Contains(t, answer.Header().Get("Access-Control-Expose-Headers"), idempotencyhttp.HeaderReplayed)
	require.Equal(t, "Origin", answer.Header().Get("Vary"))
	require.Equal(t, 1, served)
	for _, stranger := range []*httptest.ResponseRecorder{
		ask(open(page), http.MethodOptions, "http://localhost:3001", true), ask(open(page), http.MethodPost, "http://localhost:3001", false),
		ask(open(""), http.MethodPost, page, false),
	} {
		require.Empty(t, stranger.Header().Get("Access-Control-Allow-Origin"))
	}
}
