package idempotencyhttp

import (
	"maps"
	"net/http"
	"slices"
	"strings"
)

// recordedHeaders say what the response is, whoever gets it and when.
var recordedHeaders = []string{
	"Allow", "Cache-Control", "Content-Disposition", "Content-Encoding", "Content-Language", "Content-Length",
	"Content-Location", "Content-Type", "Etag", "Last-Modified", "Link", "Location", "Preference-Applied", "Vary",
}

// RecordedHeaders are the headers of a response that are recorded and replayed; the first caller gets all that the handler
// set. Config.Headers adds others.
func RecordedHeaders() []string { return slices.Clone(recordedHeaders) }

// neverRecorded: secrets of one caller, what belongs to one connection or one moment, and CORS, which depends on who asks.
func neverRecorded(name string) bool {
	switch name {
	case "Authentication-Info", "Authorization", "Connection", "Date", "Idempotent-Replayed", "Keep-Alive", "Set-Cookie",
		"Set-Cookie2", "Te", "Trailer", "Transfer-Encoding", "Upgrade", "Www-Authenticate":
		return true
	}
	return strings.HasPrefix(name, "Proxy-") || strings.HasPrefix(name, "Access-Control-")
}

// fate is what becomes of a handler's response.
type fate int

const (
	fateCommit   fate = iota // with the business rows
	fateFinal                // recorded, the business rows rolled back
	fateRollBack             // not recorded
)

func (m *Middleware) fateOf(status int) fate {
	switch {
	case status >= 200 && status < 400:
		return fateCommit
	case status < 400 || status > 499, slices.Contains(m.config.NotRecorded, status):
		return fateRollBack
	}
	switch status {
	case http.StatusUnauthorized, http.StatusForbidden, http.StatusRequestTimeout, http.StatusTooEarly, http.StatusTooManyRequests:
		return fateRollBack // another moment or other credentials may get another answer
	}
	return fateFinal
}

// recorded picks what is recorded of a response's headers. What was there before the handler came is not its own: whoever
// set it sets it on a replay too.
func (m *Middleware) recorded(all, before http.Header) http.Header {
	var picked http.Header
	for name, values := range all {
		old, was := before[name]
		if !m.allowed[name] || was && slices.Equal(old, values) {
			continue
		}
		if picked == nil {
			picked = make(http.Header, len(all))
		}
		picked[name] = values // nobody writes to all any more
	}
	return picked
}

func allowList(more []string) map[string]bool {
	names := map[string]bool{}
	for _, name := range slices.Concat(recordedHeaders, more) {
		names[http.CanonicalHeaderKey(name)] = true
	}
	maps.DeleteFunc(names, func(name string, _ bool) bool { return neverRecorded(name) })
	return names
}
