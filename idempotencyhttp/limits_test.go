package idempotencyhttp_test

import (
	"io"
	"net/http"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/pgonce/pgonce/idempotency"
	"github.com/pgonce/pgonce/idempotencyhttp"
	"github.com/pgonce/pgonce/txn"
)

func TestOperation_ResponseOverTheLimitIsSentWholeAndItsRecordIsATombstone(t *testing.T) {
	t.Parallel()
	s := newSite(t, func(c *txn.Config) {
		c.Operations = []idempotency.Operation{{Name: create.Name, ResultLimit: 1000}}
	})
	text := strings.Repeat("x", 5000)
	s.serve(t, func(w http.ResponseWriter, r *http.Request) {
		if _, err := insert(r); err != nil {
			panic(err)
		}
		body, _ := io.ReadAll(r.Body)
		if string(body) == "refuse" {
			w.WriteHeader(http.StatusNotFound)
		}
		_, _ = io.WriteString(w, text)
	})
	for _, body := range []string{"accept", "refuse"} {
		first := s.post(t, body, body)
		require.Equal(t, text, first.body)
		require.Equal(t, body == "accept", first.status == http.StatusOK)
		requireProblem(t, s.post(t, body, body), http.StatusGone, "result-gone")
	}
	require.Equal(t, 1, s.orders(t, "accept"))
	require.Zero(t, s.orders(t, "refuse"))
}

func TestOperation_ResponseOverTheHardLimitIsRolledBack(t *testing.T) {
	t.Parallel()
	s := newSite(t)
	s.serve(t, func(w http.ResponseWriter, r *http.Request) {
		place(w, r)
		_, _ = io.WriteString(w, strings.Repeat("x", 1001))
	}, func(c *idempotencyhttp.Config) { c.MaxResponse = 1000 })
	requireProblem(t, s.post(t, "k", ""), http.StatusInternalServerError, "response-too-large")
	require.Zero(t, s.orders(t, "k"))
	s.requireState(t, "k", "")
}

func TestOperation_ResponseShorterThanItsContentLengthIsRolledBack(t *testing.T) {
	t.Parallel()
	s := newSite(t).serve(t, func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Content-Length", "1000")
		place(w, r)
	})
	requireProblem(t, s.post(t, "k", ""), http.StatusInternalServerError, "internal")
	require.Zero(t, s.orders(t, "k"))
}

func TestOperation_BodyOverTheLimit(t *testing.T) {
	t.Parallel()
	s := newSite(t).serve(t, place, func(c *idempotencyhttp.Config) { c.MaxBody = 1000 })
	large := strings.Repeat("x", 1001)
	key := http.Header{idempotencyhttp.HeaderKey: {"k"}}
	for _, body := range []io.Reader{
		strings.NewReader(large),                 // Content-Length tells
		io.MultiReader(strings.NewReader(large)), // chunked: net/http does not see the length
	} {
		requireProblem(t, s.send(t, http.MethodPost, "/orders", key, body), http.StatusRequestEntityTooLarge, "body-too-large")
	}
	require.Equal(t, http.StatusCreated, s.post(t, "k", large[:1000]).status, "the key is as good as new")
	for limit, want := range map[int64]int{-1: http.StatusCreated, 0: http.StatusRequestEntityTooLarge} {
		s.serve(t, place, func(c *idempotencyhttp.Config) { c.MaxBody = limit })
		require.Equal(t, want, s.post(t, "larger", strings.Repeat("x", idempotencyhttp.DefaultMaxBody+1)).status)
	}
}
