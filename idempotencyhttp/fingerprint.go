package idempotencyhttp

import (
	"bytes"
	"errors"
	"io"
	"mime"
	"mime/multipart"
	"net/http"
	"net/url"
	"slices"
	"strings"

	"github.com/pgonce/pgonce/idempotency"
)

// Fingerprint tells a retry from another request with the same key. body is the whole body. An error that is an
// *idempotency.InvalidError is answered 400, a *Problem as it says, any other 500.
type Fingerprint func(r *http.Request, body []byte) (idempotency.Fingerprint, error)

// FingerprintRequest takes the method, the path, the query, the encoding and type of the content, and the body, byte for byte.
// The order of a query's different names does not count; that of one name's values does. Of the content's type the spelling
// does not count, nor does the boundary of a multipart body: clients make a new one for every try. Such a body is compared
// part by part. No other header counts.
func FingerprintRequest(r *http.Request, body []byte) (idempotency.Fingerprint, error) {
	contentType, boundary := contentTypeOf(r.Header)
	parts := append(requestParts(r, contentType), []byte("bytes"), body)
	if boundary != "" {
		if split, ok := multipartParts(body, boundary); ok {
			parts = append(append(requestParts(r, contentType), []byte("multipart")), split...)
		}
	}
	return idempotency.FingerprintBytes(parts...), nil
}

// FingerprintJSON is FingerprintRequest for clients and proxies that write the same JSON anew for every try: a JSON body is
// taken in its canonical form (see idempotency.Canonical), and one that has none is answered 400.
func FingerprintJSON(r *http.Request, body []byte) (idempotency.Fingerprint, error) {
	contentType, _ := contentTypeOf(r.Header)
	media, _, _ := strings.Cut(contentType, ";")
	if media != "application/json" && !strings.HasSuffix(media, "+json") || r.Header.Get("Content-Encoding") != "" {
		return FingerprintRequest(r, body)
	}
	return idempotency.FingerprintJSON(body, requestParts(r, contentType)...)
}

func requestParts(r *http.Request, contentType string) [][]byte {
	return [][]byte{
		[]byte(r.Method), []byte(r.URL.EscapedPath()), []byte(orderedQuery(r.URL.RawQuery)), []byte(contentType),
		[]byte(strings.Join(r.Header.Values("Content-Encoding"), ",")),
	}
}

// orderedQuery sorts a query by its names: clients and proxies make it from maps. What it says stays as it is spelled.
func orderedQuery(raw string) string {
	if !strings.Contains(raw, "&") {
		return raw
	}
	pairs := strings.Split(raw, "&")
	// Stable: the values of one name, however it is spelled, keep their order.
	slices.SortStableFunc(pairs, func(a, b string) int { return strings.Compare(queryName(a), queryName(b)) })
	return strings.Join(pairs, "&")
}

func queryName(pair string) string {
	name, _, _ := strings.Cut(pair, "=")
	if plain, err := url.QueryUnescape(name); err == nil {
		return plain
	}
	return name
}

// contentTypeOf gives one spelling of the content's type, and the boundary, which is no part of it.
func contentTypeOf(h http.Header) (contentType, boundary string) {
	raw := strings.Join(h.Values("Content-Type"), ",")
	media, params, err := mime.ParseMediaType(raw)
	if err != nil {
		return raw, ""
	}
	if strings.HasPrefix(media, "multipart/") {
		boundary = params["boundary"]
		delete(params, "boundary")
	}
	if charset, is := params["charset"]; is {
		params["charset"] = strings.ToLower(charset)
	}
	if one := mime.FormatMediaType(media, params); one != "" {
		return one, boundary
	}
	return raw, boundary
}

// multipartParts splits a body into the head and the content of each part. A body that does not split is not ok.
func multipartParts(body []byte, boundary string) (parts [][]byte, ok bool) {
	reader := multipart.NewReader(bytes.NewReader(body), boundary)
	for {
		part, err := reader.NextRawPart()
		if errors.Is(err, io.EOF) {
			return parts, true
		}
		if err != nil {
			return nil, false
		}
		content, err := io.ReadAll(part)
		if err != nil {
			return nil, false
		}
		var head []string
		for name, values := range part.Header {
			for _, value := range values {
				head = append(head, name+": "+value)
			}
		}
		slices.Sort(head)
		parts = append(parts, []byte(strings.Join(head, "\n")), content)
	}
}
