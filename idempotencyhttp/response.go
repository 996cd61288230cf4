package idempotencyhttp

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"slices"
	"unicode/utf8"

	"github.com/pgonce/pgonce/internal/results"
)

// Response is what is recorded of a handler's response. Tests and resolvers make them; see Result.
type Response struct {
	Status  int
	Header  http.Header
	Trailer http.Header
	Body    []byte

	// What the handler set, for its own caller. nil: this response was recorded before.
	all, allTrailers http.Header
}

var _ results.Formed = (*Response)(nil)

// resultType begins with json, so that people see responses in the view idempotency.audit.
const resultType = "json-http/1"

// stored is the recorded form. The body is text where it can be, for people who read records.
type stored struct {
	Status  int         `json:"status"`
	Header  http.Header `json:"header,omitempty"`
	Trailer http.Header `json:"trailer,omitempty"`
	Text    string      `json:"body,omitempty"`
	Bytes   []byte      `json:"body_base64,omitempty"`
}

// Result is the response in its recorded form, for an idempotency.Resolution.
func (p Response) Result() (result []byte, resultType string, err error) { return p.EncodeResult() }

// EncodeResult is for package txn.
func (p *Response) EncodeResult() (data []byte, _ string, err error) {
	s := stored{Status: p.Status, Header: p.Header, Trailer: p.Trailer}
	// PostgreSQL's json has no NUL.
	if utf8.Valid(p.Body) && !bytes.Contains(p.Body, []byte{0}) {
		s.Text = string(p.Body)
	} else {
		s.Bytes = p.Body
	}
	var buffer bytes.Buffer
	encoder := json.NewEncoder(&buffer)
	encoder.SetEscapeHTML(false) // for people, again
	if err := encoder.Encode(s); err != nil {
		return nil, "", fmt.Errorf("idempotencyhttp: encode response: %w", err)
	}
	return bytes.TrimSuffix(buffer.Bytes(), []byte("\n")), resultType, nil
}

// DecodeResult is for package txn.
func (p *Response) DecodeResult(kind string, data []byte) error {
	if kind != resultType {
		return errors.New("was not stored as an HTTP response")
	}
	var s stored
	if err := json.Unmarshal(data, &s); err != nil {
		return err
	}
	if s.Status < 100 || s.Status > 999 {
		return fmt.Errorf("has no HTTP status, but %d", s.Status)
	}
	*p = Response{Status: s.Status, Header: s.Header, Trailer: s.Trailer, Body: s.Bytes}
	if s.Bytes == nil {
		p.Body = []byte(s.Text)
	}
	return nil
}

// write sends the response. An error means that the client has gone: it is recorded, and there for the retry.
func (p *Response) write(w http.ResponseWriter, replayed bool) {
	h := w.Header()
	header, trailer := p.Header, p.Trailer
	if p.all != nil {
		header, trailer = p.all, p.allTrailers
		for name := range h { // the handler may have taken away what was there before it
			if _, kept := header[name]; !kept {
				delete(h, name)
			}
		}
	}
	for name, values := range header {
		h[name] = slices.Clone(values)
	}
	if replayed {
		h.Set(HeaderReplayed, "true")
	}
	for name := range trailer {
		h.Add("Trailer", name)
	}
	w.WriteHeader(p.Status)
	if len(p.Body) > 0 {
		_, _ = w.Write(p.Body)
	}
	for name, values := range trailer {
		h[name] = slices.Clone(values)
	}
}
