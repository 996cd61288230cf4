package idempotencyhttp_test

import (
	"net/http"
	"net/http/httptest"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/pgonce/pgonce/idempotencyhttp"
)

// RFC 9457, section 3.1.1: without a type it is about:blank, and an empty one would be a reference to the request itself.
func TestProblem_WithoutATypeHasNone(t *testing.T) {
	t.Parallel()
	w := httptest.NewRecorder()
	(&idempotencyhttp.Problem{Title: "Who are you?", Status: http.StatusUnauthorized}).Write(w)
	require.Equal(t, http.StatusUnauthorized, w.Code)
	require.JSONEq(t, `{"title":"Who are you?","status":401}`, w.Body.String())
}
