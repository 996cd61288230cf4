package idempotencyhttp_test

import (
	"bytes"
	"compress/gzip"
	"io"
	"net/http"
	"strings"
	"testing"
	"testing/iotest"

	"github.com/stretchr/testify/require"

	"github.com/pgonce/pgonce/idempotencyhttp"
)

// Every way to write a response: what a client of the bare handler gets, the first caller gets, and so does a retry.
func TestWrites_FirstAndReplayAreWhatTheBareHandlerSends(t *testing.T) {
	t.Parallel()
	large := strings.Repeat("0123456789abcdef", 20_000)
	shared := newSite(t)
	for name, write := range map[string]http.HandlerFunc{
		"Nothing":         func(http.ResponseWriter, *http.Request) {},
		"WriteHeaderOnly": func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(http.StatusAccepted) },
		"WriteTwice": func(w http.ResponseWriter, _ *http.Request) {
			_, _ = io.WriteString(w, "<html>")
			_, _ = w.Write([]byte("<body>"))
		},
		"WriteHeaderTwice": func(w http.ResponseWriter, _ *http.Request) {
			w.WriteHeader(http.StatusCreated)
			w.WriteHeader(http.StatusInternalServerError)
			_, _ = io.WriteString(w, "x")
		},
		"HeaderAfterWriteHeader": func(w http.ResponseWriter, _ *http.Request) {
			w.Header().Set("Location", "/before")
			w.WriteHeader(http.StatusCreated)
			w.Header().Set("Location", "/after")
			w.Header().Set("Etag", `"after"`)
		},
		"Copy": func(w http.ResponseWriter, _ *http.Request) { _, _ = io.Copy(w, strings.NewReader(large)) },
		"ReadFrom": func(w http.ResponseWriter, _ *http.Request) {
			_, err := w.(io.ReaderFrom).ReadFrom(iotest.HalfReader(strings.NewReader(large)))
			if err != nil {
				panic(err)
			}
		},
		"EmptyWrite": func(w http.ResponseWriter, _ *http.Request) { _, _ = w.Write(nil) },
		"Informational": func(w http.ResponseWriter, _ *http.Request) {
			w.Header().Set("Link", "</a.css>; rel=preload")
			w.WriteHeader(http.StatusEarlyHints)
			w.WriteHeader(http.StatusCreated)
			_, _ = io.WriteString(w, "x")
		},
		"DeclaredTrailer": func(w http.ResponseWriter, _ *http.Request) {
			w.Header().Set("Trailer", "Etag")
			_, _ = io.WriteString(w, large)
			w.Header().Set("Etag", `"t"`)
		},
		"UndeclaredTrailer": func(w http.ResponseWriter, _ *http.Request) {
			_, _ = io.WriteString(w, large)
			w.Header().Set(http.TrailerPrefix+"Etag", `"t"`)
		},
		"ContentLength": func(w http.ResponseWriter, _ *http.Request) {
			w.Header().Set("Content-Length", "3")
			_, _ = io.WriteString(w, "abc")
		},
		"ContentLengthOfNothing": func(w http.ResponseWriter, _ *http.Request) {
			w.Header().Set("Content-Length", "0")
			w.WriteHeader(http.StatusCreated)
		},
		"MoreThanContentLength": func(w http.ResponseWriter, _ *http.Request) {
			w.Header().Set("Content-Length", "3")
			_, _ = io.WriteString(w, "abc")
			if _, err := io.WriteString(w, "defghi"); err == nil {
				panic("written")
			}
		},
		"ContentLengthIsNoNumber": func(w http.ResponseWriter, _ *http.Request) {
			w.Header().Set("Content-Length", "many")
			_, _ = io.WriteString(w, "abc")
		},
		"BodyWhereNoneIsAllowed": func(w http.ResponseWriter, _ *http.Request) {
			w.WriteHeader(http.StatusNoContent)
			if _, err := io.WriteString(w, "abc"); err == nil {
				panic("written")
			}
		},
		"NotText":    func(w http.ResponseWriter, _ *http.Request) { _, _ = w.Write([]byte{0x89, 'P', 'N', 'G', 0xff, 0}) },
		"NUL":        func(w http.ResponseWriter, _ *http.Request) { _, _ = io.WriteString(w, "a\x00b") },
		"Separators": func(w http.ResponseWriter, _ *http.Request) { _, _ = io.WriteString(w, "a\u2028b\ufffd<&>\\\"\r\n") },
		"NoSniffing": func(w http.ResponseWriter, _ *http.Request) {
			w.Header()["Content-Type"] = nil
			_, _ = io.WriteString(w, "<html>")
		},
		"TypeByHand": func(w http.ResponseWriter, _ *http.Request) {
			w.Header().Set("Content-Type", "text/x")
			_, _ = io.WriteString(w, "<html>")
		},
		"TwoLinks": func(w http.ResponseWriter, _ *http.Request) { w.Header()["Link"] = []string{"<a>", "<b>"} },
		"Redirect": func(w http.ResponseWriter, r *http.Request) { http.Redirect(w, r, "/else", http.StatusSeeOther) },
		"ServeFromFS": func(w http.ResponseWriter, r *http.Request) {
			http.ServeContent(w, r, "a.txt", modified, strings.NewReader(large))
		},
		"GzipInside": func(w http.ResponseWriter, _ *http.Request) {
			w.Header().Set("Content-Encoding", "gzip")
			z := gzip.NewWriter(w)
			_, _ = io.WriteString(z, large)
			_ = z.Close()
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s, bare := shared.another(), shared.another()
			s.client.Transport.(*http.Transport).DisableCompression = true
			s.client.CheckRedirect = func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse }
			bare.client = s.client
			bare.open(t, write)
			want, err := bare.try(t.Context(), http.MethodPost, "/orders", nil, nil)
			require.NoError(t, err)
			s.serve(t, write, func(c *idempotencyhttp.Config) { c.Untransacted = true })
			for _, replayed := range []bool{false, true} {
				got := s.post(t, name, "")
				require.Equal(t, replayed, got.replayed())
				require.Equal(t, want.status, got.status)
				require.Equal(t, want.body, got.body)
				require.Equal(t, plain(want.header), plain(got.header))
				require.Equal(t, want.trailer.Get("Etag"), got.trailer.Get("Etag"))
				require.Equal(t, strings.Contains(name, "Trailer"), got.trailer.Get("Etag") != "")
			}
		})
	}
}

// plain leaves out what differs from one sending to the next.
func plain(h http.Header) http.Header {
	h = h.Clone()
	h.Del("Date")
	h.Del(idempotencyhttp.HeaderReplayed)
	// A short body that is written at once has one by net/http's own doing.
	h.Del("Content-Length")
	h.Del("Accept-Ranges") // says nothing of a response to POST
	return h
}

func TestWrites_SecretsAreNeverRecorded(t *testing.T) {
	t.Parallel()
	s := newSite(t)
	secrets := []string{
		"Set-Cookie", "Authorization", "Www-Authenticate", "Proxy-Authenticate", "Authentication-Info", "Access-Control-Allow-Origin", "X-Request-Id",
	}
	s.serve(t, func(w http.ResponseWriter, r *http.Request) {
		for _, name := range secrets {
			w.Header().Set(name, "secret")
		}
		w.Header().Set("X-Order", "7")
		w.Header().Set(idempotencyhttp.HeaderReplayed, "maybe")
		place(w, r)
	}, func(c *idempotencyhttp.Config) { c.Headers = []string{"x-order"} })
	first, again := s.post(t, "k", ""), s.post(t, "k", "")
	require.True(t, again.replayed())
	for _, name := range secrets {
		require.Equal(t, "secret", first.header.Get(name))
		require.NotContains(t, again.header, name)
	}
	require.Equal(t, "7", again.header.Get("X-Order"))
	require.Equal(t, first.header.Get("Location"), again.header.Get("Location"))
	require.Equal(t, first.body, again.body)
	var result []byte
	require.NoError(t, s.pool.QueryRow(t.Context(), `SELECT result FROM idempotency.records`).Scan(&result))
	require.NotContains(t, string(result), "secret")
}

func TestWrites_HeadersOfOuterMiddlewareStayItsOwn(t *testing.T) {
	t.Parallel()
	s := newSite(t)
	var n count
	once := s.middleware(t)
	inner := once.Operation(create.Name)(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		w.Header().Del("X-Powered-By")
		w.Header().Add("Vary", "Accept")
		place(w, r)
	}))
	s.open(t, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Cache-Control", "max-age="+strings.Repeat("1", n.add()))
		w.Header().Set("X-Powered-By", "us")
		w.Header().Add("Vary", "Origin")
		inner.ServeHTTP(w, r)
	}))
	first, again := s.post(t, "k", ""), s.post(t, "k", "")
	require.Empty(t, first.header.Get("X-Powered-By"), "a handler may take it away")
	require.Equal(t, "max-age=1", first.header.Get("Cache-Control"))
	require.Equal(t, "max-age=11", again.header.Get("Cache-Control"), "the replay has the outer one of its own request")
	require.Equal(t, []string{"Origin", "Accept"}, first.header["Vary"])
	require.Equal(t, first.header["Vary"], again.header["Vary"])
}

func TestWrites_GzipOutside(t *testing.T) {
	t.Parallel()
	s := newSite(t)
	text := strings.Repeat("tea ", 1000)
	inner := s.middleware(t).Operation(create.Name)(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if _, err := insert(r); err != nil {
			panic(err)
		}
		_, _ = io.WriteString(w, text)
	}))
	s.open(t, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Content-Encoding", "gzip")
		z := gzip.NewWriter(w)
		inner.ServeHTTP(&gzipped{w, z}, r)
		_ = z.Close()
	}))
	s.client.Transport.(*http.Transport).DisableCompression = true
	first, again := s.post(t, "k", ""), s.post(t, "k", "")
	require.True(t, again.replayed())
	require.Equal(t, first.body, again.body)
	z, err := gzip.NewReader(bytes.NewReader([]byte(again.body)))
	require.NoError(t, err)
	unzipped, err := io.ReadAll(z)
	require.NoError(t, err)
	require.Equal(t, text, string(unzipped))
	var body string
	require.NoError(t, s.pool.QueryRow(t.Context(), `SELECT result->>'body' FROM idempotency.audit`).Scan(&body))
	require.Equal(t, text, body, "recorded as the handler wrote it")
}

type gzipped struct {
	http.ResponseWriter
	z *gzip.Writer
}

func (g *gzipped) Write(p []byte) (int, error) { return g.z.Write(p) }
