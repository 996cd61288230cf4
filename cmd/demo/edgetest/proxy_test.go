package edgetest

import (
	"bytes"
	"context"
	"io"
	"log/slog"
	"maps"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"testing"

	"github.com/stretchr/testify/require"
)

// proxy stands between clients and the demo. It compares all answers with the document, and loses some of them.
type proxy struct {
	t        *testing.T
	demo     *demo
	document *document
	url      string
	client   *http.Transport

	mu      sync.Mutex
	loses   map[string]loss // by key, the first answer of each
	came    map[string]int  // requests, by key
	arrived map[string]chan struct{}
}

// loss is how an answer is lost. The demo has given it, and so committed, in every case.
type loss int

const (
	cut  loss = iota + 1 // the connection is closed instead
	half                 // it is closed in the middle of the body
	hold                 // nothing comes, until the client leaves
)

func newProxy(t *testing.T, d *demo) *proxy {
	t.Helper()
	p := &proxy{
		t: t, demo: d, client: &http.Transport{DialContext: (&net.Dialer{}).DialContext},
		loses: map[string]loss{}, came: map[string]int{}, arrived: map[string]chan struct{}{},
	}
	p.document = readDocument(t, d)
	server := httptest.NewUnstartedServer(p)
	server.Config.ErrorLog = slog.NewLogLogger(slog.DiscardHandler, slog.LevelError)
	server.Start()
	t.Cleanup(p.client.CloseIdleConnections)
	t.Cleanup(server.Close)
	p.url = server.URL
	return p
}

// lose loses the first answer of a key. The channel is closed when the demo has given it.
func (p *proxy) lose(key string, how loss) <-chan struct{} {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.loses[key], p.arrived[key] = how, make(chan struct{})
	return p.arrived[key]
}

// requests is how many with the key have come.
func (p *proxy) requests(key string) int {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.came[key]
}

// next is how the answer to a request is lost, if it is.
func (p *proxy) next(key string) (how loss, arrived chan struct{}) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.came[key]++
	how, arrived = p.loses[key], p.arrived[key]
	delete(p.loses, key)
	return how, arrived
}

func (p *proxy) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	body, err := io.ReadAll(r.Body)
	if err != nil {
		return // it has gone
	}
	how, arrived := p.next(strings.Trim(r.Header.Get("Idempotency-Key"), `"`))
	ctx := r.Context()
	if how != 0 {
		ctx = context.WithoutCancel(ctx) // the demo has time to commit, whatever its client does
	}
	out := r.Clone(ctx)
	out.URL.Scheme, out.URL.Host, out.Body, out.RequestURI = "http", p.demo.base.Host, io.NopCloser(bytes.NewReader(body)), ""
	resp, err := p.client.RoundTrip(out)
	if err != nil {
		panic(http.ErrAbortHandler)
	}
	text, err := io.ReadAll(resp.Body)
	_ = resp.Body.Close()
	if err != nil {
		panic(http.ErrAbortHandler)
	}
	if err := p.document.compare(out, body, resp, text); err != nil {
		p.t.Errorf("%s %s: %d %s: %v", r.Method, r.URL.Path, resp.StatusCode, text, err)
	}
	if arrived != nil && how != 0 {
		close(arrived)
	}
	maps.Copy(w.Header(), resp.Header)
	switch how {
	case cut:
		panic(http.ErrAbortHandler)
	case half:
		w.WriteHeader(resp.StatusCode)
		_, _ = w.Write(text[:len(text)/2])
		_ = http.NewResponseController(w).Flush() // an error: it has gone
		panic(http.ErrAbortHandler)
	case hold:
		<-r.Context().Done()
		return
	}
	w.WriteHeader(resp.StatusCode)
	_, _ = w.Write(text)
}

// A client that does not come as far as the document would prove nothing.
func (p *proxy) requireCompared(t *testing.T, want ...string) {
	t.Helper()
	require.Subset(t, p.document.compared(), want)
}
