package idempotencyhttp

import (
	"net/http"
	"strings"

	"github.com/dunglas/httpsfv"

	"github.com/pgonce/pgonce/idempotency"
)

// The headers of a request that may be sent again, and of its answer.
const (
	HeaderKey      = "Idempotency-Key"
	HeaderReplayed = "Idempotent-Replayed"
)

// KeyValue reads the value of the header Idempotency-Key. There, what is in double quotes is a string of RFC 9651, as the
// IETF draft wants it; anything else that is printable ASCII is taken as it is, unless strict. Both spellings of a value are
// the same key. Space around the header's value is not part of it, which is HTTP's rule; in quotes nothing is trimmed.
//
// The error is a *Problem: key-missing, or key-invalid. A header that is there and empty is invalid, also where keys are
// optional: whoever sends it wants to be protected.
func KeyValue(h http.Header, strict bool) (string, error) {
	values := h.Values(HeaderKey)
	switch len(values) {
	case 0:
		return "", problem(keyMissing, HeaderKey, "must be set: to a new value for every new request, to the same one for its retries")
	case 1:
	default:
		return "", badKey("must be set once")
	}
	value := strings.Trim(values[0], " \t")
	switch {
	case strings.HasPrefix(value, `"`):
		item, err := httpsfv.UnmarshalItem([]string{value})
		text, isText := item.Value.(string)
		switch {
		case err != nil || !isText:
			return "", badKey("must end with the quote it begins with, hold printable ASCII, and escape quotes and backslashes and nothing else")
		case item.Params != nil && len(item.Params.Names()) > 0:
			return "", badKey("must have no parameters behind it")
		}
		return text, nil
	case strict:
		return "", badKey(`must be in double quotes, such as "0197a6ba-9c3e"`)
	}
	for i := range len(value) {
		if value[i] < ' ' || value[i] > '~' {
			return "", badKey("must be printable ASCII")
		}
	}
	return value, nil
}

func badKey(rule string) *Problem { return problem(keyInvalid, HeaderKey, rule) }

// Key is the key of a request, as the middleware reads it: for handlers that call package txn themselves. Its errors are for
// ProblemOf.
func (m *Middleware) Key(r *http.Request, op idempotency.Operation) (idempotency.Key, error) {
	value, err := KeyValue(r.Header, m.config.Strict)
	if err != nil {
		return idempotency.Key{}, err
	}
	tenant, err := m.tenantOf(r, op)
	if err != nil {
		return idempotency.Key{}, err
	}
	key, err := op.Key(tenant, value)
	if rule, wrong := ruleOf(err); wrong {
		return key, badKey(rule)
	}
	return key, err
}

// tenantOf is the tenant of a request. A wrong one is the program's fault and not the client's.
func (m *Middleware) tenantOf(r *http.Request, op idempotency.Operation) (string, error) {
	tenant, err := m.tenant(r)
	if err != nil {
		return "", err
	}
	if _, err := op.Key(tenant, "k"); err != nil {
		return "", &idempotency.ConfigError{Field: "tenant", Rule: "must be one for every request: " + err.Error()}
	}
	return tenant, nil
}
