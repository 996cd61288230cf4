package edgetest

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/getkin/kin-openapi/openapi3"
	"github.com/getkin/kin-openapi/openapi3filter"
	"github.com/getkin/kin-openapi/routers"
	"github.com/getkin/kin-openapi/routers/gorillamux"
	"github.com/stretchr/testify/require"
)

// document is the demo's own description of itself.
type document struct {
	*openapi3.T
	router routers.Router

	mu   sync.Mutex
	seen map[string]bool // "createOrder 201"
}

// readDocument gets it from the demo, and fails if it is not valid.
func readDocument(t *testing.T, d *demo) *document {
	t.Helper()
	status, text := get(t, d, "/openapi.yaml")
	require.Equal(t, http.StatusOK, status)
	parsed, err := openapi3.NewLoader().LoadFromData(text)
	require.NoError(t, err)
	require.NoError(t, parsed.Validate(t.Context()))
	router, err := gorillamux.NewRouter(parsed)
	require.NoError(t, err)
	return &document{T: parsed, router: router, seen: map[string]bool{}}
}

func get(t *testing.T, d *demo, path string) (status int, text []byte) {
	t.Helper()
	req, err := http.NewRequestWithContext(t.Context(), http.MethodGet, d.base.JoinPath(path).String(), nil)
	require.NoError(t, err)
	resp, err := http.DefaultClient.Do(req)
	require.NoError(t, err)
	text, err = io.ReadAll(resp.Body)
	require.NoError(t, err)
	require.NoError(t, resp.Body.Close())
	t.Cleanup(http.DefaultClient.CloseIdleConnections)
	return resp.StatusCode, text
}

// compare says in what an answer differs from the document: its status, headers or body. A request that was taken is compared too.
func (d *document) compare(req *http.Request, body []byte, resp *http.Response, text []byte) error {
	if req.Method == http.MethodOptions {
		return nil // a pre-flight is no request of the service
	}
	route, params, err := d.router.FindRoute(req)
	if errors.Is(err, routers.ErrPathNotFound) || errors.Is(err, routers.ErrMethodNotAllowed) {
		if resp.StatusCode != http.StatusNotFound && resp.StatusCode != http.StatusMethodNotAllowed {
			return fmt.Errorf("it is not in the document: %w", err)
		}
		return nil
	}
	if err != nil {
		return err
	}
	d.mu.Lock()
	d.seen[fmt.Sprint(route.Operation.OperationID, " ", resp.StatusCode)] = true
	d.mu.Unlock()
	again := req.Clone(req.Context())
	again.Body = io.NopCloser(bytes.NewReader(body))
	in := &openapi3filter.RequestValidationInput{Request: again, PathParams: params, Route: route, Options: &openapi3filter.Options{MultiError: true}}
	if resp.StatusCode < http.StatusBadRequest {
		if err := openapi3filter.ValidateRequest(req.Context(), in); err != nil {
			return fmt.Errorf("the request: %w", err)
		}
	}
	out := (&openapi3filter.ResponseValidationInput{
		RequestValidationInput: in, Status: resp.StatusCode, Header: resp.Header,
		Options: &openapi3filter.Options{MultiError: true, IncludeResponseStatus: true},
	}).SetBodyBytes(text)
	if err := openapi3filter.ValidateResponse(req.Context(), out); err != nil {
		return err
	}
	return undocumented(route.Operation.Responses.Status(resp.StatusCode).Value, resp.Header)
}

// undocumented finds headers of the service's own that the document does not name.
func undocumented(said *openapi3.Response, h http.Header) error {
	for _, name := range []string{"Idempotent-Replayed", "Pgonce-Answered-By", "Retry-After", "Location"} {
		if _, named := said.Headers[name]; h.Get(name) != "" && !named {
			return fmt.Errorf("the header %s is not in the document", name)
		}
	}
	return nil
}

// compared lists what was compared so far.
func (d *document) compared() (all []string) {
	d.mu.Lock()
	defer d.mu.Unlock()
	for one := range d.seen {
		all = append(all, one)
	}
	return all
}

// The demo tells its routes to whoever asks for another one.
func TestOpenAPI_HasTheDemosRoutesAndNoOthers(t *testing.T) {
	t.Parallel()
	d := startDemo(t, "-strict")
	doc := readDocument(t, d)
	status, text := get(t, d, "/nothing")
	require.Equal(t, http.StatusNotFound, status)
	var said struct{ Detail string }
	require.NoError(t, json.Unmarshal(text, &said))
	served := strings.Split(strings.TrimSuffix(strings.TrimPrefix(said.Detail, "Try "), "."), ", ")
	require.Greater(t, len(served), 7)
	var documented []string
	for path, item := range doc.Paths.Map() {
		for method := range item.Operations() {
			documented = append(documented, method+" "+path)
		}
	}
	require.ElementsMatch(t, served, documented)
}

func TestOpenAPI_HasTheProblemsOfTheirPages(t *testing.T) {
	t.Parallel()
	text, err := os.ReadFile("../openapi.yaml")
	require.NoError(t, err)
	parsed, err := openapi3.NewLoader().LoadFromData(text)
	require.NoError(t, err)
	pages, err := filepath.Glob(root + "/docs/problems/*.md")
	require.NoError(t, err)
	require.NotEmpty(t, pages)
	var want, have []string
	for _, page := range pages {
		said, err := os.ReadFile(page)
		require.NoError(t, err)
		status := regexp.MustCompile(`status \*\*(\d{3})\*\*`).FindSubmatch(said)
		require.NotNil(t, status, page)
		want = append(want, string(status[1])+" urn:pgonce:problem:"+strings.TrimSuffix(filepath.Base(page), ".md"))
	}
	for name, schema := range parsed.Components.Schemas {
		if !regexp.MustCompile(`^Problem\d{3}$`).MatchString(name) {
			continue
		}
		own := schema.Value.AllOf[1].Value.Properties
		require.Len(t, own["status"].Value.Enum, 1)
		require.Equal(t, strings.TrimPrefix(name, "Problem"), fmt.Sprint(own["status"].Value.Enum[0]))
		for _, kind := range own["type"].Value.Enum {
			have = append(have, fmt.Sprint(own["status"].Value.Enum[0], " ", kind))
		}
	}
	slices.Sort(want)
	slices.Sort(have)
	require.Equal(t, want, have)
}

// What compares everything below notices what is wrong.
func TestOpenAPI_WrongAnswersAreNoticed(t *testing.T) {
	t.Parallel()
	doc := readDocument(t, startDemo(t, "-strict"))
	const order = `{"id":1,"customer":"c","sku":"tea","quantity":1,"status":"created","created_at":"2026-01-01T00:00:00Z"}`
	const unavailable = `{"type":"urn:pgonce:problem:unavailable","title":"t","status":503}`
	for name, tt := range map[string]struct {
		path, key string
		status    int
		kind      string
		header    http.Header
		body      string
		right     bool
	}{
		"right":             {status: 201, header: http.Header{"Location": {"/orders/1"}}, body: order, right: true},
		"status":            {status: 200, body: order},
		"header missing":    {status: 201, body: order},
		"header wrong":      {status: 201, header: http.Header{"Location": {"/stock/1"}}, body: order},
		"header's value":    {status: 201, header: http.Header{"Location": {"/orders/1"}, "Idempotent-Replayed": {"yes"}}, body: order},
		"header not named":  {status: 201, header: http.Header{"Location": {"/orders/1"}, "Retry-After": {"1"}}, body: order},
		"member missing":    {status: 201, header: http.Header{"Location": {"/orders/1"}}, body: `{"id":1}`},
		"another member":    {status: 201, header: http.Header{"Location": {"/orders/1"}}, body: strings.Replace(order, `{`, `{"price":1,`, 1)},
		"content's type":    {status: 201, kind: "text/plain", header: http.Header{"Location": {"/orders/1"}}, body: order},
		"right problem":     {status: 503, kind: "application/problem+json", header: http.Header{"Retry-After": {"1"}}, body: unavailable, right: true},
		"no Retry-After":    {status: 503, kind: "application/problem+json", body: unavailable},
		"type of another":   {status: 422, kind: "application/problem+json", body: strings.Replace(unavailable, "503", "422", 1)},
		"path not there":    {path: "/other", status: 201, body: order},
		"taken without key": {key: "-", status: 201, header: http.Header{"Location": {"/orders/1"}}, body: order},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			sent := []byte(`{"customer":"c","sku":"tea","quantity":1}`)
			path := tt.path
			if path == "" {
				path = "/orders"
			}
			req, err := http.NewRequestWithContext(t.Context(), http.MethodPost, "http://127.0.0.1"+path, bytes.NewReader(sent))
			require.NoError(t, err)
			req.Header.Set("Content-Type", "application/json")
			if tt.key == "" {
				req.Header.Set("Idempotency-Key", "k")
			}
			h := http.Header{"Content-Type": {"application/json"}}
			if tt.kind != "" {
				h.Set("Content-Type", tt.kind)
			}
			for name, values := range tt.header {
				h[name] = values
			}
			err = doc.compare(req, sent, &http.Response{StatusCode: tt.status, Header: h}, []byte(tt.body))
			require.Equal(t, tt.right, err == nil, "%v", err)
		})
	}
}
