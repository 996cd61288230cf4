package idempotencyclient

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"mime"
	"net/http"
	"time"
)

// ProblemError is an answer of 400 or above: the problem it carries (RFC 9457), or what else the service said. It unwraps to the
// sentinel of its type, if the type is the library's.
type ProblemError struct {
	Type   string // about:blank if the answer is no problem
	Title  string
	Status int
	Detail string
	Field  string // of an invalid request
	Rule   string // that the field breaks

	RetryAfter time.Duration // 0: the service names none
	Replayed   bool          // it was recorded before, and stays the answer to this key
	Key        string        // as it stood in the request's header
	Body       []byte        // as it came, at most 1 MiB of it
}

func (e *ProblemError) Error() string {
	text := fmt.Sprintf("idempotencyclient: the service answered %d", e.Status)
	for _, more := range []string{e.Title, e.Detail} {
		if more != "" {
			text += " " + more
		}
	}
	return text
}

func (e *ProblemError) Unwrap() error { return byType[e.Type] }

// Do sends a request and makes an error of an answer of 400 or above: a *ProblemError. The caller closes the body of any other.
func Do(client *http.Client, req *http.Request) (*http.Response, error) {
	resp, err := client.Do(req)
	if err != nil {
		return nil, err
	}
	if err := Check(resp); err != nil {
		return nil, err
	}
	return resp, nil
}

// Check returns the *ProblemError of an answer of 400 or above, whose body it has read and closed then. It leaves others alone.
func Check(resp *http.Response) error {
	if resp.StatusCode < http.StatusBadRequest {
		return nil
	}
	text, err := io.ReadAll(io.LimitReader(resp.Body, DefaultMaxAnswer))
	_ = resp.Body.Close() // it has been read, or the error says why not
	resp.Body = io.NopCloser(bytes.NewReader(text))
	p := problemOf(resp, text)
	if err != nil {
		return fmt.Errorf("%w: read its body: %w", p, err)
	}
	return p
}

// problemOf reads what an answer says.
func problemOf(resp *http.Response, text []byte) *ProblemError {
	e := &ProblemError{}
	if mediaType, _, err := mime.ParseMediaType(resp.Header.Get("Content-Type")); err == nil && mediaType == "application/problem+json" {
		var p struct{ Type, Title, Detail, Field, Rule string }
		if json.Unmarshal(text, &p) == nil { // else it is whatever it is
			e.Type, e.Title, e.Detail, e.Field, e.Rule = p.Type, p.Title, p.Detail, p.Field, p.Rule
		}
	}
	if e.Type == "" {
		e.Type = "about:blank"
	}
	if e.Title == "" {
		e.Title = http.StatusText(resp.StatusCode)
	}
	// The status line's: a body may say what it likes.
	e.Status, e.Body, e.Replayed, e.RetryAfter = resp.StatusCode, text, Replayed(resp), retryAfter(resp.Header)
	if resp.Request != nil {
		e.Key = resp.Request.Header.Get(HeaderKey)
	}
	return e
}
