package idempotencyhttp_test

import (
	"bytes"
	"fmt"
	"mime/multipart"
	"net/http"
	"net/http/httptest"
	"net/textproto"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/pgonce/pgonce/idempotency"
	"github.com/pgonce/pgonce/idempotencyhttp"
)

func fingerprint(t *testing.T, of idempotencyhttp.Fingerprint, method, target, contentType, body string) idempotency.Fingerprint {
	t.Helper()
	r := httptest.NewRequestWithContext(t.Context(), method, target, nil)
	if contentType != "" {
		r.Header.Set("Content-Type", contentType)
	}
	f, err := of(r, []byte(body))
	require.NoError(t, err)
	return f
}

func TestFingerprintRequest_WhatCounts(t *testing.T) {
	t.Parallel()
	of := func(method, target, contentType, body string) idempotency.Fingerprint {
		return fingerprint(t, idempotencyhttp.FingerprintRequest, method, target, contentType, body)
	}
	base := of("POST", "/orders/a%2Fb?x=1", "application/json; charset=utf-8", "body")
	for name, same := range map[string]idempotency.Fingerprint{
		"Again":    of("POST", "/orders/a%2Fb?x=1", "application/json; charset=utf-8", "body"),
		"Spelling": of("POST", "/orders/a%2Fb?x=1", ` Application/JSON ;CHARSET="UTF-8"`, "body"),
		"Host":     of("POST", "http://other.example/orders/a%2Fb?x=1", "application/json; charset=utf-8", "body"),
	} {
		require.True(t, same.Matches(base), name)
	}
	for name, other := range map[string]idempotency.Fingerprint{
		"Method":   of("PUT", "/orders/a%2Fb?x=1", "application/json; charset=utf-8", "body"),
		"Path":     of("POST", "/orders/a/b?x=1", "application/json; charset=utf-8", "body"),
		"Query":    of("POST", "/orders/a%2Fb?x=2", "application/json; charset=utf-8", "body"),
		"NoQuery":  of("POST", "/orders/a%2Fb", "application/json; charset=utf-8", "body"),
		"Type":     of("POST", "/orders/a%2Fb?x=1", "text/plain; charset=utf-8", "body"),
		"Charset":  of("POST", "/orders/a%2Fb?x=1", "application/json; charset=latin1", "body"),
		"NoType":   of("POST", "/orders/a%2Fb?x=1", "", "body"),
		"Nonsense": of("POST", "/orders/a%2Fb?x=1", ";;;", "body"),
		"Body":     of("POST", "/orders/a%2Fb?x=1", "application/json; charset=utf-8", "body "),
		"NoBody":   of("POST", "/orders/a%2Fb?x=1", "application/json; charset=utf-8", ""),
	} {
		require.False(t, other.Matches(base), name)
	}
	zipped := httptest.NewRequestWithContext(t.Context(), "POST", "/orders/a%2Fb?x=1", nil)
	zipped.Header = http.Header{"Content-Type": {"application/json; charset=utf-8"}, "Content-Encoding": {"gzip"}}
	f, err := idempotencyhttp.FingerprintRequest(zipped, []byte("body"))
	require.NoError(t, err)
	require.False(t, f.Matches(base), "the encoding says what the bytes are")
}

func TestCase_F06_TheQueryCountsAndTheOrderOfItsNamesDoesNot(t *testing.T) {
	t.Parallel()
	for name, of := range map[string]idempotencyhttp.Fingerprint{"request": idempotencyhttp.FingerprintRequest, "json": idempotencyhttp.FingerprintJSON} {
		base := fingerprint(t, of, "POST", "/orders?dry=0&tag=a&tag=b", "application/json", `{}`)
		for _, same := range []string{"tag=a&tag=b&dry=0", "tag=a&dry=0&tag=b"} {
			require.True(t, fingerprint(t, of, "POST", "/orders?"+same, "application/json", `{}`).Matches(base), "%s: %s", name, same)
		}
		for _, other := range []string{
			"", "dry=1&tag=a&tag=b", "dry=0&tag=a", "dry=0&tag=a&tag=b&x", "dry=0&tag=a&tag=b&dry=0", "dry=0&tag=b&tag=a", "tag=b&dry=0&tag=a",
			"dry=0&%74ag=b&tag=a", "dry=0&tag=a&tag=b&", "dry=0%26tag=a&tag=b", "dry=0;tag=a;tag=b", "dry=0&tag=a&tag=b&%zz",
		} {
			require.False(t, fingerprint(t, of, "POST", "/orders?"+other, "application/json", `{}`).Matches(base), "%s: %s", name, other)
		}
		spelled := fingerprint(t, of, "POST", "/orders?tag=a&%74ag=b", "application/json", `{}`)
		require.False(t, fingerprint(t, of, "POST", "/orders?%74ag=b&tag=a", "application/json", `{}`).Matches(spelled), "one name in two spellings")
	}

	s := newSite(t).serve(t, place)
	send := func(query string) answer {
		return s.send(t, http.MethodPost, "/orders?"+query, http.Header{idempotencyhttp.HeaderKey: {"k"}}, nil)
	}
	first := send("dry=0&sku=tea")
	require.Equal(t, http.StatusCreated, first.status)
	again := send("sku=tea&dry=0")
	require.True(t, again.replayed())
	require.Equal(t, first.body, again.body)
	requireProblem(t, send("dry=1&sku=tea"), http.StatusUnprocessableEntity, "mismatch")
	requireProblem(t, send("sku=tea"), http.StatusUnprocessableEntity, "mismatch")
}

func form(t *testing.T, boundary, field, file string) (contentType, body string) {
	t.Helper()
	var b bytes.Buffer
	w := multipart.NewWriter(&b)
	require.NoError(t, w.SetBoundary(boundary))
	require.NoError(t, w.WriteField("field", field))
	part, err := w.CreatePart(textproto.MIMEHeader{
		"Content-Type": {"image/png"}, "Content-Disposition": {`form-data; name="file"; filename="a.png"`},
	})
	require.NoError(t, err)
	_, err = part.Write([]byte(file))
	require.NoError(t, err)
	require.NoError(t, w.Close())
	return w.FormDataContentType(), b.String()
}

func TestFingerprintRequest_ABoundaryIsNoDifference(t *testing.T) {
	t.Parallel()
	of := func(boundary, field, file string) idempotency.Fingerprint {
		contentType, body := form(t, boundary, field, file)
		return fingerprint(t, idempotencyhttp.FingerprintRequest, "POST", "/", contentType, body)
	}
	base := of("one", "a", "b")
	require.True(t, of("two", "a", "b").Matches(base))
	require.False(t, of("one", "a", "c").Matches(base))
	require.False(t, of("one", "ab", "").Matches(base))
	contentType, body := form(t, "one", "a", "b")
	cut := fingerprint(t, idempotencyhttp.FingerprintRequest, "POST", "/", contentType, body[:len(body)-10])
	require.False(t, cut.Matches(base), "a body that does not split is taken as it is")
	require.True(t, fingerprint(t, idempotencyhttp.FingerprintRequest, "POST", "/", contentType, body[:len(body)-10]).Matches(cut))
}

func TestFingerprintJSON_OneDocumentHasManySpellings(t *testing.T) {
	t.Parallel()
	of := func(contentType, body string) idempotency.Fingerprint {
		return fingerprint(t, idempotencyhttp.FingerprintJSON, "POST", "/", contentType, body)
	}
	for _, contentType := range []string{"application/json", "application/vnd.order+json; charset=utf-8"} {
		base := of(contentType, `{"a":1,"b":[1.0]}`)
		require.True(t, of(contentType, ` { "b" : [1], "a":1 } `).Matches(base))
		require.False(t, of(contentType, `{"a":2,"b":[1.0]}`).Matches(base))
	}
	require.False(t, of("text/plain", `{"a":1}`).Matches(of("text/plain", `{"a": 1}`)))

	s := newSite(t).serve(t, place, func(c *idempotencyhttp.Config) { c.Fingerprint = idempotencyhttp.FingerprintJSON })
	h := http.Header{idempotencyhttp.HeaderKey: {"k"}, "Content-Type": {"application/json"}}
	first := s.send(t, http.MethodPost, "/", h, bytes.NewReader([]byte(`{"a":1,"b":2}`)))
	require.Equal(t, http.StatusCreated, first.status, first.body)
	require.True(t, s.send(t, http.MethodPost, "/", h, bytes.NewReader([]byte(`{"b":2,"a":1}`))).replayed())
	for i, wrong := range []string{`{`, `{"a":1,"a":2}`, ``} {
		h[idempotencyhttp.HeaderKey] = []string{fmt.Sprint("wrong-", i)}
		requireProblem(t, s.send(t, http.MethodPost, "/", h, bytes.NewReader([]byte(wrong))), http.StatusBadRequest, "invalid-request")
	}
}
