package idempotencyhttp_test

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgonce/pgonce/idempotency"
	"github.com/pgonce/pgonce/idempotencyhttp"
)

func TestNew_WrongConfigurationNamesFieldAndRule(t *testing.T) {
	t.Parallel()
	s := newSite(t)
	for name, tt := range map[string]struct {
		config idempotencyhttp.Config
		field  string
	}{
		"MaxBody":     {idempotencyhttp.Config{MaxBody: -2}, "Config.MaxBody"},
		"MaxResponse": {idempotencyhttp.Config{MaxResponse: -1}, "Config.MaxResponse"},
		"Cookie":      {idempotencyhttp.Config{Headers: []string{"X-Fine", "set-cookie"}}, "Config.Headers"},
		"Proxy":       {idempotencyhttp.Config{Headers: []string{"Proxy-Authenticate"}}, "Config.Headers"},
		"CORS":        {idempotencyhttp.Config{Headers: []string{"Access-Control-Allow-Origin"}}, "Config.Headers"},
		"NoName":      {idempotencyhttp.Config{Headers: []string{""}}, "Config.Headers"},
		"Status":      {idempotencyhttp.Config{NotRecorded: []int{500}}, "Config.NotRecorded"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			_, err := idempotencyhttp.New(s.runner, idempotencyhttp.SingleTenant, &tt.config)
			var wrong *idempotency.ConfigError
			require.ErrorAs(t, err, &wrong)
			require.Equal(t, tt.field, wrong.Field)
			require.NotEmpty(t, wrong.Rule)
		})
	}
	_, err := idempotencyhttp.New(nil, idempotencyhttp.SingleTenant, nil)
	require.ErrorIs(t, err, idempotency.ErrConfig)
	once, err := idempotencyhttp.New(s.runner, idempotencyhttp.SingleTenant, nil)
	require.NoError(t, err)
	for _, use := range []func(string) func(http.Handler) http.Handler{once.Operation, once.Leased} {
		require.PanicsWithError(t, `idempotency: operation must be declared in txn.Config.Operations, "nobody.knows" is not`, func() { use("nobody.knows") })
	}
}

func TestConfig_ClientIsRecorded(t *testing.T) {
	t.Parallel()
	s := newSite(t)
	name := "someone"
	s.serve(t, place, func(c *idempotencyhttp.Config) { c.Client = func(*http.Request, []byte) string { return name } })
	s.post(t, "k", "")
	var client string
	require.NoError(t, s.pool.QueryRow(t.Context(), `SELECT client FROM idempotency.records`).Scan(&client))
	require.Equal(t, name, client)
	name = strings.Repeat("x", 256)
	requireProblem(t, s.post(t, "k2", ""), http.StatusInternalServerError, "program-error")
	require.Contains(t, s.log.String(), "Config.Client")
}

// every problem, and an error that it answers.
var problems = map[string]struct {
	err        error
	status     int
	retryAfter string
}{
	"invalid-request":    {&idempotency.InvalidError{Field: "json", Rule: "must be JSON"}, 400, ""},
	"body-too-large":     {&http.MaxBytesError{Limit: 5}, 413, ""},
	"in-progress":        {&idempotency.InProgressError{RetryAfter: 1500 * time.Millisecond}, 409, "2"},
	"needs-a-person":     {fmt.Errorf("%w: secret", idempotency.ErrManual), 409, ""},
	"mismatch":           {&idempotency.MismatchError{}, 422, ""},
	"result-gone":        {fmt.Errorf("%w: secret", idempotency.ErrResultExpired), 410, ""},
	"failed":             {fmt.Errorf("%w: %w", idempotency.ErrTransactionEnded, &idempotency.FailedError{Message: "secret"}), 500, ""},
	"result-unreadable":  {&idempotency.ResultDecodeError{Err: errors.New("secret")}, 500, ""},
	"internal":           {errors.New("secret"), 500, ""},
	"program-error":      {&idempotency.ConfigError{Field: "secret", Rule: "secret"}, 500, ""},
	"unavailable":        {fmt.Errorf("secret: %w", idempotency.ErrRestart), 503, "1"},
	"outcome-unknown":    {fmt.Errorf("%w: %w", idempotency.ErrOutcomeUnknown, idempotency.ErrRestart), 503, "1"},
	"key-missing":        {keyProblem(http.Header{}), 400, ""},
	"key-invalid":        {keyProblem(http.Header{idempotencyhttp.HeaderKey: {`"`}}), 400, ""},
	"not-issued":         {idempotency.ErrNotIssued, 400, ""},
	"response-too-large": {fmt.Errorf("%w: secret", idempotency.ErrResultTooLarge), 500, ""},
}

func keyProblem(h http.Header) error {
	_, err := idempotencyhttp.KeyValue(h, false)
	return err
}

func TestProblemOf_EveryErrorHasItsAnswer(t *testing.T) {
	t.Parallel()
	for name, tt := range problems {
		if tt.err == nil {
			continue
		}
		w := httptest.NewRecorder()
		idempotencyhttp.ProblemOf(tt.err).Write(w)
		a := answer{status: w.Code, header: w.Header(), body: w.Body.String()}
		requireProblem(t, a, tt.status, name)
		require.Equal(t, tt.retryAfter, a.header.Get("Retry-After"), name)
		require.NotContains(t, a.body, "secret")
	}
	for _, err := range []error{
		context.Canceled, context.DeadlineExceeded, idempotency.ErrReadOnly, idempotency.ErrLeaseLost, idempotency.ErrNewerRecord,
	} {
		require.Equal(t, http.StatusServiceUnavailable, idempotencyhttp.ProblemOf(fmt.Errorf("x: %w", err)).Status, err)
	}
	for _, err := range []error{idempotency.ErrResultEncode, idempotency.ErrWrongMode, idempotency.ErrNested} {
		require.Equal(t, idempotencyhttp.TypeBase+"program-error", idempotencyhttp.ProblemOf(fmt.Errorf("x: %w", err)).Type, err)
	}
}

func TestProblems_EachHasItsPage(t *testing.T) {
	t.Parallel()
	pages, err := filepath.Glob(filepath.Join("..", "docs", "problems", "*.md"))
	require.NoError(t, err)
	found := map[string]string{}
	for _, page := range pages {
		text, err := os.ReadFile(page)
		require.NoError(t, err)
		found[strings.TrimSuffix(filepath.Base(page), ".md")] = string(text)
	}
	source, err := os.ReadFile("problem.go")
	require.NoError(t, err)
	for name, tt := range problems {
		require.Contains(t, string(source), `kind{"`+name+`"`)
		require.Contains(t, found[name], "`"+idempotencyhttp.TypeBase+name+"`", name)
		require.Contains(t, found[name], fmt.Sprintf("**%d**", tt.status), name)
	}
	require.Equal(t, len(problems), strings.Count(string(source), `= kind{"`), "a problem that no test knows")
	require.Len(t, found, len(problems), "a page of nothing")
}
