package main

import (
	"errors"
	"net/http"
	"strings"

	"github.com/pgonce/pgonce/idempotency"
)

// The headers of a request that may be sent again, and of its answer.
const (
	headerKey      = "Idempotency-Key"
	headerReplayed = "Idempotent-Replayed"
)

// parseKey makes the key of a request.
func parseKey(op idempotency.Operation, h http.Header) (idempotency.Key, error) {
	value, err := keyValue(h)
	if err != nil {
		return idempotency.Key{}, err
	}
	key, err := op.Key(idempotency.SingleTenant, value)
	if wrong := (*idempotency.InvalidError)(nil); errors.As(err, &wrong) {
		return idempotency.Key{}, invalid(headerKey, wrong.Rule)
	}
	return key, err
}

// keyValue reads the key's value: bare, or quoted as the IETF draft wants it. Both spellings are the same key.
func keyValue(h http.Header) (string, error) {
	values := h.Values(headerKey)
	switch {
	case len(values) == 0:
		return "", invalid(headerKey, "must be set: to a new value for every new request, to the same one for its retries")
	case len(values) > 1:
		return "", invalid(headerKey, "must be set once")
	}
	value := values[0]
	if strings.HasPrefix(value, `"`) {
		var ok bool
		if value, ok = unquote(value); !ok {
			return "", invalid(headerKey, "must end with the quote it begins with, and escape only quotes and backslashes")
		}
	}
	for i := range len(value) {
		if value[i] < ' ' || value[i] > '~' {
			return "", invalid(headerKey, "must be printable ASCII")
		}
	}
	return value, nil
}

// unquote reads a string of RFC 9651.
func unquote(s string) (string, bool) {
	var b strings.Builder
	for i := 1; i < len(s); i++ {
		switch s[i] {
		case '"':
			return b.String(), i == len(s)-1
		case '\\':
			if i++; i == len(s) || (s[i] != '"' && s[i] != '\\') {
				return "", false
			}
		}
		b.WriteByte(s[i])
	}
	return "", false
}
