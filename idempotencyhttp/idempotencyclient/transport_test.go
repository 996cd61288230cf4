package idempotencyclient_test

import (
	"errors"
	"io"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgonce/pgonce/idempotencyhttp"
	"github.com/pgonce/pgonce/idempotencyhttp/idempotencyclient"
)

// sentinels by the name of their page.
var sentinels = map[string]error{
	"body-too-large": idempotencyclient.ErrBodyTooLarge, "failed": idempotencyclient.ErrFailed, "in-progress": idempotencyclient.ErrInProgress,
	"internal": idempotencyclient.ErrInternal, "invalid-request": idempotencyclient.ErrInvalidRequest, "key-invalid": idempotencyclient.ErrKeyInvalid,
	"key-missing": idempotencyclient.ErrKeyMissing, "mismatch": idempotencyclient.ErrMismatch, "needs-a-person": idempotencyclient.ErrNeedsAPerson,
	"not-issued": idempotencyclient.ErrNotIssued, "outcome-unknown": idempotencyclient.ErrOutcomeUnknown,
	"program-error":      idempotencyclient.ErrProgramError,
	"response-too-large": idempotencyclient.ErrResponseTooLarge, "result-gone": idempotencyclient.ErrResultGone,
	"result-unreadable": idempotencyclient.ErrResultUnreadable, "unavailable": idempotencyclient.ErrUnavailable,
}

// What is sent again is what the problem's page says so of, and nothing else.
func TestTransport_RetriesTheProblemsWhosePageSaysSo(t *testing.T) {
	t.Parallel()
	pages, err := filepath.Glob("../../docs/problems/*.md")
	require.NoError(t, err)
	require.Len(t, pages, len(sentinels))
	retryable := regexp.MustCompile(`What to do\.\*\* (Retry (\*\*)?with the same key|Send the same request with the same key)`)
	again := 0
	for _, page := range pages {
		name := strings.TrimSuffix(filepath.Base(page), ".md")
		said, err := os.ReadFile(page)
		require.NoError(t, err)
		found := regexp.MustCompile(`status \*\*(\d{3})\*\*`).FindStringSubmatch(string(said))
		require.Len(t, found, 2, page)
		status, err := strconv.Atoi(found[1])
		require.NoError(t, err)
		want := 1
		if retryable.Match(said) {
			want, again = 3, again+1
		}
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			p := &idempotencyhttp.Problem{Type: idempotencyhttp.TypeBase + name, Title: "So it is.", Detail: "And not otherwise.", Status: status}
			url, keys := serve(t, func(_ int, w http.ResponseWriter, _ *http.Request) { p.Write(w) })
			client := newClient(t, func(c *idempotencyclient.Config) {
				c.Attempts, c.Statuses = 3, []int{500, 503} // which do not make a final problem of the library another
			})
			_, err := idempotencyclient.Do(client, post(t.Context(), t, url, "tea")) //nolint:bodyclose // there is none
			require.ErrorIs(t, err, sentinels[name])
			var problem *idempotencyclient.ProblemError
			require.ErrorAs(t, err, &problem)
			require.Equal(t, p.Type, problem.Type)
			require.Equal(t, p.Status, problem.Status)
			require.Equal(t, p.Title, problem.Title)
			require.Equal(t, p.Detail, problem.Detail)
			require.Len(t, keys.all(), want)
		})
	}
	require.Equal(t, 4, again)
}

func TestTransport_OtherAnswers(t *testing.T) {
	t.Parallel()
	inProgress := func(h http.Header) { h.Set("Content-Type", "application/problem+json; charset=utf-8") }
	for name, tt := range map[string]struct {
		status   int
		header   func(http.Header)
		body     string
		statuses []int
		want     int
	}{
		"too many requests":             {status: 429, want: 3},
		"unavailable, said by a proxy":  {status: 503, body: "<html>", want: 1},
		"bad gateway that was asked to": {status: 502, body: "<html>", statuses: []int{502}, want: 3},
		"problem of the handler's own":  {status: 409, header: inProgress, body: `{"type":"https://shop.example/sold-out"}`, want: 1},
		"problem with a parameter":      {status: 409, header: inProgress, body: `{"type":"urn:pgonce:problem:in-progress"}`, want: 3},
		"problem that is no JSON":       {status: 409, header: inProgress, body: `{`, want: 1},
		"problem under another type":    {status: 409, header: func(h http.Header) { h.Set("Content-Type", "text/plain") }, body: `{"type":"urn:pgonce:problem:in-progress"}`, want: 1},
		"conflict":                      {status: 409, want: 1},
		"replayed failure": {
			status: 503, header: func(h http.Header) { h.Set(idempotencyclient.HeaderReplayed, "true") }, statuses: []int{503}, want: 1,
		},
		"success that looks like a problem": {status: 200, header: inProgress, body: `{"type":"urn:pgonce:problem:in-progress"}`, want: 1},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			url, keys := serve(t, func(_ int, w http.ResponseWriter, _ *http.Request) {
				if tt.header != nil {
					tt.header(w.Header())
				}
				w.WriteHeader(tt.status)
				_, _ = io.WriteString(w, tt.body)
			})
			resp, err := newClient(t, func(c *idempotencyclient.Config) { c.Attempts, c.Statuses = 3, tt.statuses }).Do(post(t.Context(), t, url, "tea"))
			require.NoError(t, err)
			err = idempotencyclient.Check(resp)
			require.Equal(t, tt.body, text(t, resp), "it can still be read")
			require.Equal(t, tt.status, resp.StatusCode)
			if tt.status >= 400 {
				var problem *idempotencyclient.ProblemError
				require.ErrorAs(t, err, &problem)
				require.Equal(t, tt.body, string(problem.Body))
			} else {
				require.NoError(t, err)
			}
			require.Len(t, keys.all(), tt.want)
		})
	}
}

func TestTransport_ABodyThatCannotBeSentAgainIsRefusedBeforeItIsSent(t *testing.T) {
	t.Parallel()
	url, keys := serve(t, func(n int, w http.ResponseWriter, r *http.Request) {
		body, _ := io.ReadAll(r.Body)
		if n == 1 {
			hangUp(w)
			return
		}
		_, _ = w.Write(body)
	})
	client := newClient(t)
	once := &closing{Reader: strings.NewReader("tea")}
	req, err := http.NewRequestWithContext(t.Context(), http.MethodPost, url, once)
	require.NoError(t, err)
	_, err = client.Do(req) //nolint:bodyclose // there is none
	require.ErrorIs(t, err, idempotencyclient.ErrBodyNotReplayable)
	require.ErrorContains(t, err, "set GetBody")
	require.True(t, once.closed)
	require.Empty(t, keys.all())

	// Of unknown length still, and now there is another one.
	var made []*closing
	req.GetBody = func() (io.ReadCloser, error) {
		made = append(made, &closing{Reader: io.MultiReader(strings.NewReader("te"), strings.NewReader("a"))})
		return made[len(made)-1], nil
	}
	resp, err := client.Do(req)
	require.NoError(t, err)
	require.Equal(t, "tea", text(t, resp))
	require.Len(t, keys.all(), 2)
	for _, body := range made {
		require.True(t, body.closed)
	}

	broken := errors.New("the file has gone")
	req.GetBody = func() (io.ReadCloser, error) { return nil, broken }
	_, err = client.Do(req) //nolint:bodyclose // there is none
	require.ErrorIs(t, err, broken)
	require.NotErrorIs(t, err, idempotencyclient.ErrOutcomeUnknown)
	require.Len(t, keys.all(), 2)
}

type closing struct {
	io.Reader
	closed bool
}

func (c *closing) Close() error {
	c.closed = true
	return nil
}

func problem(name string, status int, retryAfter time.Duration) *idempotencyhttp.Problem {
	return &idempotencyhttp.Problem{Type: idempotencyhttp.TypeBase + name, Status: status, RetryAfter: retryAfter}
}

func TestTransport_LongAnswersAreWhole(t *testing.T) {
	t.Parallel()
	long := strings.Repeat("0123456789", 1000)
	url, keys := serve(t, func(n int, w http.ResponseWriter, _ *http.Request) {
		if n == 1 {
			w.WriteHeader(http.StatusBadGateway)
		}
		_, _ = io.WriteString(w, long)
	})
	client := newClient(t, func(c *idempotencyclient.Config) { c.MaxAnswer, c.Statuses = 100, []int{502} })
	resp, err := client.Do(post(t.Context(), t, url, "tea"))
	require.NoError(t, err)
	require.Equal(t, long, text(t, resp))
	require.Len(t, keys.all(), 2)
}

func TestTransport_WhatItLeavesAlone(t *testing.T) {
	t.Parallel()
	url, keys := serve(t, func(_ int, w http.ResponseWriter, _ *http.Request) { hangUp(w) })
	client := newClient(t, func(c *idempotencyclient.Config) {
		c.Attempts, c.Protected = 3, func(r *http.Request) bool { return r.URL.Path == "/orders" }
	})
	for _, tt := range []struct {
		method, path string
		want         int
	}{
		{http.MethodGet, "/orders", 1},
		{http.MethodHead, "/orders", 1},
		{http.MethodOptions, "/orders", 1},
		{http.MethodPost, "/log", 1},
		{http.MethodPut, "/orders", 3},
		{http.MethodDelete, "/orders", 3},
	} {
		before := len(keys.all())
		req, err := http.NewRequestWithContext(t.Context(), tt.method, url+tt.path, http.NoBody)
		require.NoError(t, err)
		_, err = client.Do(req) //nolint:bodyclose // there is none
		require.Error(t, err)
		came := keys.all()[before:]
		require.Len(t, came, tt.want, tt)
		require.Equal(t, tt.want == 1, came[0] == "", tt)
		require.Empty(t, req.Header, "the caller's request is as it was")
	}
}

func TestTransport_ARedirectKeepsTheKey(t *testing.T) {
	t.Parallel()
	url, keys := serve(t, func(n int, w http.ResponseWriter, r *http.Request) {
		if n == 1 {
			http.Redirect(w, r, "/elsewhere", http.StatusTemporaryRedirect)
			return
		}
		body, _ := io.ReadAll(r.Body)
		_, _ = w.Write(body)
	})
	resp, err := newClient(t).Do(post(t.Context(), t, url, "tea"))
	require.NoError(t, err)
	require.Equal(t, "tea", text(t, resp))
	require.Len(t, keys.all(), 2)
	require.Equal(t, keys.all()[0], keys.all()[1])
}

func TestTransport_AKeyThatIsNoneIsNotSent(t *testing.T) {
	t.Parallel()
	url, keys := serve(t, func(_ int, _ http.ResponseWriter, _ *http.Request) {})
	for _, key := range []string{"", "schlüssel", "two\nlines", strings.Repeat("k", 256)} {
		_, err := newClient(t).Do(post(idempotencyclient.WithKey(t.Context(), key), t, url, "tea")) //nolint:bodyclose // there is none
		require.ErrorIs(t, err, idempotencyclient.ErrKeyInvalid)
	}
	req := post(t.Context(), t, url, "tea")
	req.Header[idempotencyclient.HeaderKey] = []string{"a", "b"}
	_, err := newClient(t).Do(req) //nolint:bodyclose // there is none
	require.ErrorIs(t, err, idempotencyclient.ErrKeyInvalid)
	random := errors.New("no randomness")
	_, err = newClient(t, func(c *idempotencyclient.Config) { c.NewKey = func() (string, error) { return "", random } }).Do(post(t.Context(), t, url, "tea")) //nolint:bodyclose // there is none
	require.ErrorIs(t, err, random)
	require.Empty(t, keys.all())
}

func TestNew_RefusesWhatCannotBe(t *testing.T) {
	t.Parallel()
	for field, cfg := range map[string]idempotencyclient.Config{
		"Attempts": {Attempts: -1}, "Pause": {Pause: -1}, "MaxPause": {Pause: 2, MaxPause: 1}, "AttemptTime": {AttemptTime: -2},
		"MaxTime": {MaxTime: -2}, "MaxAnswer": {MaxAnswer: -1}, "Statuses": {Statuses: []int{422}},
	} {
		_, err := idempotencyclient.New(nil, &cfg)
		var config *idempotencyclient.ConfigError
		require.ErrorAs(t, err, &config)
		require.Equal(t, "Config."+field, config.Field)
		require.ErrorContains(t, err, "must ")
	}
	_, err := idempotencyclient.New(nil, nil)
	require.NoError(t, err)
}

// A client brings no database and no part of the server into its program.
func TestPackage_NeedsNoPartOfTheServer(t *testing.T) {
	t.Parallel()
	out, err := exec.CommandContext(t.Context(), "go", "list", "-deps", "-f", "{{if not .Standard}}{{.ImportPath}}{{end}}", ".").Output()
	require.NoError(t, err)
	require.Equal(t, []string{
		"github.com/google/uuid", "github.com/pgonce/pgonce/idempotencyhttp/idempotencyclient", "github.com/sethvargo/go-retry",
	}, slices.Sorted(slices.Values(strings.Fields(string(out)))))
}
