package idempotencyhttp_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"runtime"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/pgonce/pgonce/idempotencyhttp"
)

func TestCase_M07_AReplayIsTheFirstAnswer(t *testing.T) {
	t.Parallel()
	shared := newSite(t)
	for name, c := range map[string]struct {
		status int
		header http.Header
		body   string
	}{
		"200":       {200, http.Header{"Content-Type": {"application/json"}}, `{"id":7}`},
		"201":       {201, http.Header{"Location": {"/orders/7"}, "Etag": {`"v1"`}, "Content-Type": {"application/json"}}, `{"id":7}`},
		"202":       {202, http.Header{"Location": {"/jobs/7"}}, ""},
		"204":       {204, http.Header{"Etag": {`W/"v2"`}}, ""},
		"303":       {303, http.Header{"Location": {"/orders/7"}}, ""},
		"404":       {404, http.Header{"Content-Type": {"application/problem+json"}}, `{"title":"no such sku"}`},
		"406":       {406, http.Header{"Content-Type": {"text/plain"}, "Vary": {"Accept"}}, "only JSON"},
		"422":       {422, http.Header{"Content-Type": {"application/problem+json"}, "Content-Language": {"de"}}, `{"title":"Menge fehlt"}`},
		"Values":    {200, http.Header{"Link": {"</b>; rel=next", "</a>; rel=prev", "</b>; rel=next"}, "Vary": {"Origin", "Accept"}}, "x"},
		"Implicit":  {0, http.Header{"Content-Type": {"text/csv"}}, "a,b\n"},
		"NoWriting": {0, nil, ""},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := shared.another().serve(t, func(w http.ResponseWriter, r *http.Request) {
				if _, err := insert(r); err != nil {
					panic(err)
				}
				for name, values := range c.header {
					w.Header()[name] = values
				}
				if c.status != 0 {
					w.WriteHeader(c.status)
				}
				if c.body != "" {
					_, _ = io.WriteString(w, c.body)
				}
			})
			s.client.CheckRedirect = func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse }
			want := max(c.status, http.StatusOK)
			for _, replayed := range []bool{false, true, true} {
				a := s.post(t, name, "")
				require.Equal(t, want, a.status)
				require.Equal(t, c.body, a.body)
				for header, values := range c.header {
					require.Equal(t, values, a.header[header], "all values, in their order")
				}
				if replayed {
					require.Equal(t, []string{"true"}, a.header[idempotencyhttp.HeaderReplayed])
				} else {
					require.NotContains(t, a.header, idempotencyhttp.HeaderReplayed)
				}
			}
		})
	}
}

// events is a handler as streaming ones are written: it sends an event, flushes, and waits for the next.
func events(flushed func(error)) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Content-Type", "text/event-stream")
		for i := range 3 {
			if _, err := fmt.Fprintf(w, "data: %d\n\n", i); err != nil {
				return
			}
			if err := http.NewResponseController(w).Flush(); err != nil {
				flushed(err)
				http.Error(w, "no stream", http.StatusInternalServerError)
				return
			}
			if r.URL.Query().Has("wait") {
				<-r.Context().Done()
				return
			}
		}
		flushed(nil)
	}
}

func TestCase_M16_AStreamIsRefusedOrLetThroughAndNeverHeldInMemory(t *testing.T) {
	t.Parallel()
	s := newSite(t)
	flushed := make(chan error, 1)
	stream := events(func(err error) { flushed <- err })
	once := s.middleware(t)
	s.open(t, once.OperationOf(func(r *http.Request) string {
		if r.URL.Path == "/events" {
			return "" // this one streams
		}
		return create.Name
	})(stream))
	key := http.Header{idempotencyhttp.HeaderKey: {"k"}}

	protected := s.send(t, http.MethodPost, "/orders", key, nil)
	require.ErrorIs(t, <-flushed, http.ErrNotSupported, "the handler is told")
	require.NotEqual(t, http.StatusOK/100, protected.status/100)
	s.requireState(t, "k", "")

	// The other one has its events before its handler ends.
	ctx, hangUp := context.WithCancel(t.Context())
	defer hangUp()
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, s.url+"/events?wait", nil)
	require.NoError(t, err)
	resp, err := s.client.Do(req)
	require.NoError(t, err)
	defer func() { _ = resp.Body.Close() }()
	first := make([]byte, len("data: 0\n\n"))
	_, err = io.ReadFull(resp.Body, first)
	require.NoError(t, err)
	require.Equal(t, "data: 0\n\n", string(first))
}

// A gigabyte is refused at MaxResponse, by a handler that looks at errors and by one that does not.
func TestCase_M16_ADownloadIsNotHeldInMemory(t *testing.T) {
	t.Parallel()
	s := newSite(t)
	const gigabyte = 1 << 30
	var most uint64
	s.serve(t, func(w http.ResponseWriter, r *http.Request) {
		place(w, r)
		if r.URL.Query().Has("careless") {
			piece := strings.Repeat("x", 1<<20)
			for range gigabyte >> 20 {
				_, _ = io.WriteString(w, piece)
			}
		} else if _, err := io.CopyN(w, zeros{}, gigabyte); err == nil || errors.Is(err, io.EOF) {
			panic("was told nothing")
		}
		var m runtime.MemStats
		runtime.ReadMemStats(&m)
		most = max(most, m.HeapAlloc)
	})
	for _, query := range []string{"", "?careless"} {
		key := http.Header{idempotencyhttp.HeaderKey: {"k"}}
		requireProblem(t, s.send(t, http.MethodPost, "/orders"+query, key, nil), http.StatusInternalServerError, "response-too-large")
		s.requireState(t, "k", "")
		require.Zero(t, s.orders(t, "k"))
	}
	require.Less(t, most, uint64(gigabyte/2), "and other tests run beside")
}
