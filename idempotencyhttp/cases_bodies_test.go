package idempotencyhttp_test

import (
	"bufio"
	"bytes"
	"compress/gzip"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/pgonce/pgonce/idempotencyhttp"
)

const hundredMegabytes = 100 << 20

// counted counts what is read of a body.
type counted struct {
	io.Reader
	n atomic.Int64
}

func (c *counted) Read(p []byte) (int, error) {
	n, err := c.Reader.Read(p)
	c.n.Add(int64(n))
	return n, err
}

func (c *counted) Close() error { return nil }

// zeros is an endless body.
type zeros struct{}

func (zeros) Read(p []byte) (int, error) { clear(p); return len(p), nil }

func TestCase_M05_ABodyOverTheLimitIsRefusedBeforeItIsRead(t *testing.T) {
	t.Parallel()
	s := newSite(t)
	limit := int64(idempotencyhttp.DefaultMaxBody)
	handler := s.middleware(t).Operation(create.Name)(http.HandlerFunc(func(http.ResponseWriter, *http.Request) { panic("entered") }))
	for name, c := range map[string]struct {
		body   io.Reader
		length int64
		read   int64 // at most
	}{
		"Declared":   {io.LimitReader(zeros{}, hundredMegabytes), hundredMegabytes, 0},
		"Chunked":    {io.LimitReader(zeros{}, hundredMegabytes), -1, limit + 1},
		"GzipBomb":   {bomb(t), -1, limit + 1},
		"OneTooMany": {io.LimitReader(zeros{}, limit+1), -1, limit + 1},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			body := &counted{Reader: c.body}
			r := httptest.NewRequestWithContext(t.Context(), http.MethodPost, "/orders", body)
			r.Header.Set(idempotencyhttp.HeaderKey, name)
			r.ContentLength = c.length
			w := httptest.NewRecorder()
			handler.ServeHTTP(w, r)
			requireProblem(t, answer{w.Code, w.Header(), nil, w.Body.String()}, http.StatusRequestEntityTooLarge, "body-too-large")
			require.LessOrEqual(t, body.n.Load(), c.read)
			s.requireState(t, name, "")
		})
	}
}

// bomb is what a decompressing middleware before us reads: 100 MB from 100 kB.
func bomb(t *testing.T) io.Reader {
	t.Helper()
	var small bytes.Buffer
	w := gzip.NewWriter(&small)
	_, err := io.CopyN(w, zeros{}, hundredMegabytes)
	require.NoError(t, err)
	require.NoError(t, w.Close())
	require.Less(t, small.Len(), 200<<10)
	r, err := gzip.NewReader(&small)
	require.NoError(t, err)
	return r
}

func TestCase_M05_ABodyWithinTheLimitIsThereForEveryRun(t *testing.T) {
	t.Parallel()
	s := newSite(t)
	var runs count
	s.serve(t, func(w http.ResponseWriter, r *http.Request) {
		body, err := io.ReadAll(r.Body)
		if err != nil || len(body) != idempotencyhttp.DefaultMaxBody || r.ContentLength != int64(len(body)) {
			panic(fmt.Sprint(len(body), r.ContentLength, err))
		}
		if runs.add() == 1 {
			http.Error(w, sqlError(r, "40001").Error(), http.StatusInternalServerError) // run again, with the body as it came
			return
		}
		place(w, r)
	})
	key := http.Header{idempotencyhttp.HeaderKey: {"k"}, "Expect": {"100-continue"}}
	for _, replayed := range []bool{false, true} {
		a := s.send(t, http.MethodPost, "/orders", key, io.LimitReader(zeros{}, idempotencyhttp.DefaultMaxBody))
		require.Equal(t, http.StatusCreated, a.status, a.body)
		require.Equal(t, replayed, a.replayed())
	}
	require.Equal(t, 2, runs.get())
	require.Equal(t, 1, s.orders(t, "k"))
}

func TestCase_M05_ABodyThatDoesNotArriveWholeLeavesTheKeyAlone(t *testing.T) {
	t.Parallel()
	s := newSite(t).serve(t, place)
	for name, c := range map[string]struct{ head, body string }{
		"ShorterThanDeclared": {"Content-Length: 10", "12345"},
		"BrokenChunk":         {"Transfer-Encoding: chunked", "5\r\n12345\r\nnonsense\r\n"},
		"NoLastChunk":         {"Transfer-Encoding: chunked", "5\r\n12345\r\n"},
	} {
		a := s.raw(t, fmt.Sprintf("POST /orders HTTP/1.1\r\nHost: h\r\nIdempotency-Key: k\r\n%s\r\n\r\n%s", c.head, c.body))
		requireProblem(t, a, http.StatusBadRequest, "invalid-request")
		s.requireState(t, "k", "")
		require.Zero(t, s.orders(t, "k"), name)
	}
	require.Equal(t, http.StatusCreated, s.post(t, "k", "1234567890").status, "the key is as good as new")

	// An error of whatever stands before us, such as a checksum.
	r := httptest.NewRequestWithContext(t.Context(), http.MethodPost, "/orders", io.MultiReader(strings.NewReader("12345"), broken{}))
	r.Header.Set(idempotencyhttp.HeaderKey, "broken")
	w := httptest.NewRecorder()
	s.middleware(t).Operation(create.Name)(http.HandlerFunc(place)).ServeHTTP(w, r)
	requireProblem(t, answer{w.Code, w.Header(), nil, w.Body.String()}, http.StatusBadRequest, "invalid-request")
	s.requireState(t, "broken", "")
}

type broken struct{}

func (broken) Read([]byte) (int, error) { return 0, errors.New("checksum") }

// A client that asks first is told before it sends 100 MB.
func TestCase_M05_ExpectContinueIsAnsweredWithoutTheBody(t *testing.T) {
	t.Parallel()
	s := newSite(t).serve(t, place)
	a := s.raw(t, fmt.Sprintf("POST /orders HTTP/1.1\r\nHost: h\r\nIdempotency-Key: k\r\nContent-Length: %d\r\nExpect: 100-continue\r\n\r\n", hundredMegabytes))
	requireProblem(t, a, http.StatusRequestEntityTooLarge, "body-too-large")
	s.requireState(t, "k", "")
}

// raw sends bytes, and no more after them.
func (s *site) raw(t *testing.T, request string) answer {
	t.Helper()
	conn, err := new(net.Dialer).DialContext(t.Context(), "tcp", strings.TrimPrefix(s.url, "http://"))
	require.NoError(t, err)
	defer func() { _ = conn.Close() }()
	_, err = io.WriteString(conn, request)
	require.NoError(t, err)
	require.NoError(t, conn.(*net.TCPConn).CloseWrite())
	resp, err := http.ReadResponse(bufio.NewReader(conn), nil)
	require.NoError(t, err)
	defer func() { _ = resp.Body.Close() }()
	text, err := io.ReadAll(resp.Body)
	require.NoError(t, err)
	return answer{resp.StatusCode, resp.Header, resp.Trailer, string(text)}
}
