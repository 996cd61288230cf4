package idempotencyhttp_test

import (
	"fmt"
	"io"
	"net/http"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/pgonce/pgonce/idempotencyhttp"
)

// The table of docs/http.md.
func TestCase_S07_OnlyWhatWillNotChangeIsReplayed(t *testing.T) {
	t.Parallel()
	s := newSite(t)
	var runs count
	s.serve(t, func(w http.ResponseWriter, r *http.Request) {
		if _, err := insert(r); err != nil {
			panic(err)
		}
		var status int
		body, _ := io.ReadAll(r.Body)
		_, _ = fmt.Sscan(string(body), &status)
		w.Header().Set("Content-Type", "text/plain; charset=utf-8")
		w.WriteHeader(status)
		if status != http.StatusNoContent && status != http.StatusNotModified {
			_, _ = fmt.Fprintf(w, "run %d", runs.add())
		}
	})
	for status, state := range map[int]string{
		200: "SUCCESS", 201: "SUCCESS", 202: "SUCCESS", 204: "SUCCESS", 206: "SUCCESS", 299: "SUCCESS",
		301: "SUCCESS", 303: "SUCCESS", 304: "SUCCESS", 307: "SUCCESS",
		400: "FAILED", 402: "FAILED", 404: "FAILED", 405: "FAILED", 409: "FAILED", 410: "FAILED", 413: "FAILED", 422: "FAILED", 451: "FAILED",
		401: "", 403: "", 408: "", 425: "", 429: "", 500: "", 501: "", 502: "", 503: "", 504: "", 599: "", 600: "", 999: "",
	} {
		t.Run(fmt.Sprint(status), func(t *testing.T) {
			t.Parallel()
			s := s.another()
			s.client.CheckRedirect = func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse }
			key := fmt.Sprint("k-", status)
			first := s.post(t, key, fmt.Sprint(status))
			require.Equal(t, status, first.status)
			require.False(t, first.replayed())
			s.requireState(t, key, state)
			again := s.post(t, key, fmt.Sprint(status))
			require.Equal(t, status, again.status)
			require.Equal(t, state != "", again.replayed())
			require.Equal(t, state != "", first.body == again.body && first.header.Get("Content-Type") == again.header.Get("Content-Type"),
				"%q, then %q", first.body, again.body)
			want := 0
			if state == "SUCCESS" {
				want = 1
			}
			require.Equal(t, want, s.orders(t, key), "only a success keeps its rows")
		})
	}
}

func TestStatuses_AProgramMayKeepMoreOutOfTheRecord(t *testing.T) {
	t.Parallel()
	s := newSite(t)
	s.serve(t, func(w http.ResponseWriter, _ *http.Request) { http.Error(w, "busy", http.StatusConflict) },
		func(c *idempotencyhttp.Config) { c.NotRecorded = []int{http.StatusConflict} })
	require.Equal(t, http.StatusConflict, s.post(t, "k", "").status)
	s.requireState(t, "k", "")
}

func TestStatuses_FailureIsReadableForPeople(t *testing.T) {
	t.Parallel()
	s := newSite(t)
	s.serve(t, func(w http.ResponseWriter, _ *http.Request) { http.Error(w, `<out of "tea">`, http.StatusNotFound) })
	s.post(t, "k", "")
	var message, body string
	require.NoError(t, s.pool.QueryRow(t.Context(), `SELECT error, result->>'body' FROM idempotency.audit WHERE key = 'k'`).Scan(&message, &body))
	require.Equal(t, "http_404: the handler answered 404 Not Found", message)
	require.Equal(t, "<out of \"tea\">\n", body)
}
