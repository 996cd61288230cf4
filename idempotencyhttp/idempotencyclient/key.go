package idempotencyclient

import (
	"context"
	"fmt"
	"net/http"
	"strings"
)

// The headers of a request that may be sent again, and of its answer.
const (
	HeaderKey      = "Idempotency-Key"
	HeaderReplayed = "Idempotent-Replayed"
)

type keyOfContext struct{}

// WithKey gives the request made with the context a key of the caller's own: one that must survive the process is stored with what
// it is for, before anything is sent. It is for one request and its retries: another request with it is refused (ErrMismatch).
func WithKey(ctx context.Context, key string) context.Context {
	return context.WithValue(ctx, keyOfContext{}, key)
}

// Replayed tells whether an answer was recorded before, by an earlier attempt.
func Replayed(resp *http.Response) bool { return resp.Header.Get(HeaderReplayed) == "true" }

// keyFor is the value of the request's header: what it has, or the context's key, or a fresh one. Of those it is the IETF draft's
// string in quotes, which the service takes for the same key as the bare one.
func (t *Transport) keyFor(req *http.Request) (string, error) {
	switch own := req.Header.Values(HeaderKey); {
	case len(own) == 1:
		return own[0], checkHeader(own[0])
	case len(own) > 1:
		return "", invalidKey("must be set once")
	}
	if key, given := req.Context().Value(keyOfContext{}).(string); given {
		return quoted(key)
	}
	// A redirect that keeps method and body (307, 308) is the same request still.
	if from := req.Response; from != nil && from.Request != nil && from.Request.URL.Host == req.URL.Host && from.Request.Header.Get(HeaderKey) != "" {
		return from.Request.Header.Get(HeaderKey), nil
	}
	key, err := t.config.NewKey()
	if err != nil {
		return "", fmt.Errorf("idempotencyclient: make key: %w", err)
	}
	return quoted(key)
}

// checkHeader refuses what cannot be a key in any form. A blank one would be sent again and again, and protect nothing where
// keys are optional.
func checkHeader(value string) error {
	if strings.TrimSpace(value) == "" {
		return invalidKey("must not be blank: leave it out to have one made")
	}
	return printable(value)
}

func printable(value string) error {
	for i := range len(value) {
		if value[i] < ' ' || value[i] > '~' {
			return invalidKey("must be printable ASCII")
		}
	}
	return nil
}

func quoted(key string) (string, error) {
	if len(key) < 1 || len(key) > 255 {
		return "", invalidKey("must be 1 to 255 bytes")
	}
	if err := printable(key); err != nil {
		return "", err
	}
	return `"` + strings.NewReplacer(`\`, `\\`, `"`, `\"`).Replace(key) + `"`, nil
}

func invalidKey(rule string) error {
	return fmt.Errorf("idempotencyclient: %s %s: %w", HeaderKey, rule, ErrKeyInvalid)
}
