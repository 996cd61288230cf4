package idempotencyhttp

import (
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/textproto"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/pgonce/pgonce/idempotency"
)

// recorder is the http.ResponseWriter of one run of a handler. It keeps everything: nothing reaches the client before COMMIT.
// So it cannot flush or hijack, and says so (http.ErrNotSupported); it has no Unwrap, by which both would go past it. What
// http.ResponseController sets on the connection does work.
type recorder struct {
	client http.ResponseWriter
	before http.Header // what was set when the handler came
	limit  int

	mu       sync.Mutex // a handler's goroutine may outlive it
	header   http.Header
	written  http.Header // header as it was at WriteHeader
	status   int         // 0: nothing was written
	declared int64       // the handler's Content-Length; -1: none
	body     []byte
	tooLarge bool
	over     bool
}

var (
	_ http.ResponseWriter = (*recorder)(nil)
	_ io.ReaderFrom       = (*recorder)(nil)
	_ io.StringWriter     = (*recorder)(nil)

	errOver     = errors.New("idempotencyhttp: the handler has returned")
	errTooLarge = errors.New("idempotencyhttp: the response is over Config.MaxResponse")
)

func newRecorder(client http.ResponseWriter, limit int) *recorder {
	before := client.Header()
	return &recorder{client: client, before: before, limit: limit, header: cloned(before), declared: -1}
}

// cloned is never nil.
func cloned(h http.Header) http.Header {
	if h == nil {
		return http.Header{}
	}
	return h.Clone()
}

func (r *recorder) Header() http.Header { return r.header }

// WriteHeader is net/http's, but that informational answers are not sent: they would be there before COMMIT.
func (r *recorder) WriteHeader(status int) {
	if status < 100 || status > 999 {
		panic(fmt.Sprintf("idempotencyhttp: invalid WriteHeader code %v", status)) // as net/http does
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	r.writeHeader(status)
}

func (r *recorder) writeHeader(status int) {
	if r.over || r.status != 0 || status < 200 && status != http.StatusSwitchingProtocols {
		return
	}
	r.status, r.written = status, r.header.Clone()
	if declared := r.written.Get("Content-Length"); declared != "" {
		n, err := strconv.ParseInt(declared, 10, 64)
		if err != nil || n < 0 {
			r.written.Del("Content-Length")
			return
		}
		r.declared = n
	}
}

func (r *recorder) Write(p []byte) (int, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.writeHeader(http.StatusOK)
	switch {
	case r.over:
		return 0, errOver
	case !bodyAllowed(r.status):
		return 0, http.ErrBodyNotAllowed
	case r.declared >= 0 && int64(len(r.body)+len(p)) > r.declared:
		return 0, http.ErrContentLength
	case len(r.body)+len(p) > r.limit:
		r.tooLarge = true
		return 0, errTooLarge
	}
	r.body = append(r.body, p...)
	return len(p), nil
}

func (r *recorder) WriteString(s string) (int, error) { return r.Write([]byte(s)) }

func (r *recorder) ReadFrom(src io.Reader) (int64, error) {
	return io.Copy(struct{ io.Writer }{r}, src)
}

// SetReadDeadline is for http.ResponseController.
func (r *recorder) SetReadDeadline(deadline time.Time) error {
	return http.NewResponseController(r.client).SetReadDeadline(deadline)
}

// SetWriteDeadline is for http.ResponseController.
func (r *recorder) SetWriteDeadline(deadline time.Time) error {
	return http.NewResponseController(r.client).SetWriteDeadline(deadline)
}

// EnableFullDuplex is for http.ResponseController. The request's body has been read already.
func (r *recorder) EnableFullDuplex() error { return nil }

func bodyAllowed(status int) bool {
	return status >= 200 && status != http.StatusNoContent && status != http.StatusNotModified
}

// silent reports whether nothing was written so far.
func (r *recorder) silent() bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.status == 0
}

// end ends the run without a response.
func (r *recorder) end() {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.over = true
}

// finish ends the run and gives its response. An error says that there is none that could be sent.
func (r *recorder) finish() (Response, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.writeHeader(http.StatusOK) // a handler that wrote nothing
	r.over = true
	switch {
	case r.tooLarge:
		p := responseTooLarge.problem()
		return Response{}, fmt.Errorf("%w: %w", p, errTooLarge)
	case r.status == http.StatusSwitchingProtocols:
		return Response{}, &idempotency.ConfigError{Field: "protected route", Rule: "cannot switch protocols: let such requests pass it by"}
	case r.declared > int64(len(r.body)) && bodyAllowed(r.status):
		return Response{}, fmt.Errorf("idempotencyhttp: the handler declared Content-Length %d and wrote %d bytes", r.declared, len(r.body))
	}
	return Response{Status: r.status, Body: r.body, all: r.written, allTrailers: r.trailers()}, nil
}

// trailers takes them out of the headers: those that were declared and set, and those set by http.TrailerPrefix.
func (r *recorder) trailers() http.Header {
	var found http.Header
	set := func(name string, values []string) {
		if found == nil {
			found = http.Header{}
		}
		found[name] = slices.Clone(values) // a goroutine of the handler may still write to r.header
	}
	for _, list := range r.written["Trailer"] {
		for _, name := range strings.Split(list, ",") {
			name = http.CanonicalHeaderKey(textproto.TrimString(name))
			delete(r.written, name)
			if values, is := r.header[name]; is {
				set(name, values)
			}
		}
	}
	delete(r.written, "Trailer")
	for name, values := range r.header {
		if short, is := strings.CutPrefix(name, http.TrailerPrefix); is {
			delete(r.written, name)
			set(http.CanonicalHeaderKey(short), values)
		}
	}
	return found
}
