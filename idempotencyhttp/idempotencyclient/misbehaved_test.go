package idempotencyclient_test

import (
	"context"
	"errors"
	"io"
	"net/http"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgonce/pgonce/idempotencyhttp/idempotencyclient"
)

// base is a transport below ours that need not be net/http's.
type base func(*http.Request) (*http.Response, error)

func (b base) RoundTrip(r *http.Request) (*http.Response, error) { return b(r) }

func newClientOver(t *testing.T, b base, change ...func(*idempotencyclient.Config)) *http.Client {
	t.Helper()
	cfg := &idempotencyclient.Config{Pause: time.Millisecond}
	for _, c := range change {
		c(cfg)
	}
	transport, err := idempotencyclient.New(b, cfg)
	require.NoError(t, err)
	return &http.Client{Transport: transport}
}

// counted is a body that is counted while it is open.
type counted struct {
	io.Reader
	open *atomic.Int64
}

func newCounted(text string, open *atomic.Int64) *counted {
	open.Add(1)
	return &counted{strings.NewReader(text), open}
}

func (c *counted) Close() error {
	c.open.Add(-1)
	return nil
}

func TestTransport_ABaseThatBreaksTheRules(t *testing.T) {
	t.Parallel()
	t.Run("neither answer nor error", func(t *testing.T) {
		t.Parallel()
		calls := 0
		_, err := newClientOver(t, func(*http.Request) (*http.Response, error) { calls++; return nil, nil }). //nolint:nilnil // the rule it breaks
															Do(post(t.Context(), t, "http://shop.example", "tea")) //nolint:bodyclose // there is none
		require.ErrorContains(t, err, "neither an answer nor an error")
		require.ErrorIs(t, err, idempotencyclient.ErrOutcomeUnknown)
		require.Equal(t, 1, calls)
	})
	t.Run("answer and error", func(t *testing.T) {
		t.Parallel()
		var open atomic.Int64
		both := errors.New("both")
		_, err := newClientOver(t, func(*http.Request) (*http.Response, error) {
			return &http.Response{StatusCode: http.StatusOK, Body: newCounted("done", &open)}, both
		}).Do(post(t.Context(), t, "http://shop.example", "tea")) //nolint:bodyclose // there is none
		require.ErrorIs(t, err, both)
		require.Zero(t, open.Load())
	})
	t.Run("no body", func(t *testing.T) {
		t.Parallel()
		resp, err := newClientOver(t, func(*http.Request) (*http.Response, error) { return &http.Response{StatusCode: http.StatusOK}, nil }).
			Do(post(t.Context(), t, "http://shop.example", "tea"))
		require.NoError(t, err)
		require.Empty(t, text(t, resp))
	})
	t.Run("no request in the answer", func(t *testing.T) {
		t.Parallel()
		key := ""
		_, err := idempotencyclient.Do(newClientOver(t, func(r *http.Request) (*http.Response, error) { //nolint:bodyclose // there is none
			key = r.Header.Get(idempotencyclient.HeaderKey)
			return &http.Response{StatusCode: http.StatusUnprocessableEntity, Body: http.NoBody}, nil
		}), post(t.Context(), t, "http://shop.example", "tea"))
		var problem *idempotencyclient.ProblemError
		require.ErrorAs(t, err, &problem)
		require.NotEmpty(t, key)
		require.Equal(t, key, problem.Key)
	})
}

// An answer that is longer than what is read is closed too when the context ends in the pause behind it.
func TestTransport_ALongAnswerIsClosedWhenThePauseIsCutShort(t *testing.T) {
	t.Parallel()
	var open atomic.Int64
	ctx, cancel := context.WithCancel(t.Context())
	long := strings.Repeat("x", 100<<10)
	_, err := newClientOver(t, func(*http.Request) (*http.Response, error) {
		time.AfterFunc(10*time.Millisecond, cancel)
		return &http.Response{StatusCode: http.StatusServiceUnavailable, Header: http.Header{"Retry-After": {"60"}}, Body: newCounted(long, &open)}, nil
	}, func(c *idempotencyclient.Config) { c.MaxAnswer, c.Statuses = 10, []int{503} }).Do(post(ctx, t, "http://shop.example", "tea")) //nolint:bodyclose // there is none
	require.ErrorIs(t, err, context.Canceled)
	require.Zero(t, open.Load())
}

// Half a problem is none, and would be final.
func TestTransport_AProblemIsReadWholeWhateverMaxAnswerSays(t *testing.T) {
	t.Parallel()
	url, keys := serve(t, func(n int, w http.ResponseWriter, _ *http.Request) {
		if n == 1 {
			problem("in-progress", http.StatusConflict, 0).Write(w)
		}
	})
	resp, err := newClient(t, func(c *idempotencyclient.Config) { c.MaxAnswer = 20 }).Do(post(t.Context(), t, url, "tea"))
	require.NoError(t, err)
	require.Empty(t, text(t, resp))
	require.Equal(t, http.StatusOK, resp.StatusCode)
	require.Len(t, keys.all(), 2)
}

// What cannot be a key in the caller's own header is not sent: net/http refuses some of it, again and again, and a blank one
// protects nothing.
func TestTransport_AHeaderThatIsNoKeyIsNotSent(t *testing.T) {
	t.Parallel()
	url, keys := serve(t, func(_ int, _ http.ResponseWriter, _ *http.Request) {})
	for _, value := range []string{"", "  ", "two\nlines", "schlüssel"} {
		req := post(t.Context(), t, url, "tea")
		req.Header.Set(idempotencyclient.HeaderKey, value)
		_, err := newClient(t).Do(req) //nolint:bodyclose // there is none
		require.ErrorIs(t, err, idempotencyclient.ErrKeyInvalid, value)
		require.NotErrorIs(t, err, idempotencyclient.ErrOutcomeUnknown, value)
	}
	require.Empty(t, keys.all())
}

func TestTransport_JitterStaysBelowMaxPause(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		var at []time.Time
		broken := errors.New("broken")
		_, err := newClientOver(t, func(*http.Request) (*http.Response, error) {
			at = append(at, time.Now())
			return nil, broken
		}, func(c *idempotencyclient.Config) {
			c.Attempts, c.Pause, c.MaxPause, c.MaxTime = 100, time.Second, 2*time.Second, -1
		}).
			Do(post(t.Context(), t, "http://shop.example", "tea")) //nolint:bodyclose // there is none
		require.ErrorIs(t, err, broken)
		require.Len(t, at, 100)
		for i := range at[1:] {
			require.LessOrEqual(t, at[i+1].Sub(at[i]), 2*time.Second)
		}
	})
}
