package idempotencyclient_test

import (
	"context"
	"io"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgonce/pgonce/idempotencyhttp/idempotencyclient"
)

func TestTransport_EndsWithItsContext(t *testing.T) {
	t.Parallel()
	t.Run("in a pause", func(t *testing.T) {
		t.Parallel()
		ctx, cancel := context.WithCancel(t.Context())
		calls := 0
		_, err := newClientOver(t, func(*http.Request) (*http.Response, error) {
			calls++
			w := httptest.NewRecorder()
			problem("outcome-unknown", 503, time.Minute).Write(w)
			resp := w.Result()
			resp.Body = ends{resp.Body, func() { time.AfterFunc(10*time.Millisecond, cancel) }} // not before it has been read
			return resp, nil
		}).Do(post(ctx, t, "http://shop.example", "tea")) //nolint:bodyclose // there is none
		require.ErrorIs(t, err, context.Canceled)
		require.ErrorIs(t, err, idempotencyclient.ErrOutcomeUnknown)
		var last *idempotencyclient.ProblemError
		require.ErrorAs(t, err, &last, "the last answer says more")
		require.Equal(t, 1, calls)
	})
	t.Run("in an attempt", func(t *testing.T) {
		t.Parallel()
		ctx, cancel := context.WithCancel(t.Context())
		url, keys := serve(t, func(_ int, _ http.ResponseWriter, r *http.Request) {
			_, _ = io.Copy(io.Discard, r.Body) // else net/http does not see the client go
			cancel()
			<-r.Context().Done()
		})
		_, err := newClient(t).Do(post(ctx, t, url, "tea")) //nolint:bodyclose // there is none
		require.ErrorIs(t, err, context.Canceled)
		var gaveUp *idempotencyclient.GaveUpError
		require.ErrorAs(t, err, &gaveUp)
		require.True(t, gaveUp.Unknown)
		require.Equal(t, []string{gaveUp.Key}, keys.all())
	})
	t.Run("before any", func(t *testing.T) {
		t.Parallel()
		ctx, cancel := context.WithCancel(t.Context())
		cancel()
		url, keys := serve(t, func(_ int, _ http.ResponseWriter, _ *http.Request) {})
		_, err := newClient(t).Do(post(ctx, t, url, "tea")) //nolint:bodyclose // there is none
		require.ErrorIs(t, err, context.Canceled)
		require.NotErrorIs(t, err, idempotencyclient.ErrOutcomeUnknown)
		require.Empty(t, keys.all())
	})
}

// ends is a body that does something when it is closed.
type ends struct {
	io.ReadCloser
	do func()
}

func (e ends) Close() error {
	e.do()
	return e.ReadCloser.Close()
}

func TestTransport_APauseBeyondItsTimeIsNotBegun(t *testing.T) {
	t.Parallel()
	url, keys := serve(t, func(_ int, w http.ResponseWriter, _ *http.Request) { problem("in-progress", 409, time.Hour).Write(w) })
	began := time.Now()
	_, err := idempotencyclient.Do(newClient(t), post(t.Context(), t, url, "tea")) //nolint:bodyclose // there is none
	require.ErrorIs(t, err, idempotencyclient.ErrInProgress)
	var last *idempotencyclient.ProblemError
	require.ErrorAs(t, err, &last)
	require.Equal(t, time.Hour, last.RetryAfter, "the caller may come back")
	require.Less(t, time.Since(began), time.Minute)
	require.Len(t, keys.all(), 1)
}

// A service that hangs is asked again, and in the end nobody knows.
func TestTransport_AttemptsAndTimeAreBounded(t *testing.T) {
	t.Parallel()
	for name, change := range map[string]func(*idempotencyclient.Config, time.Duration){
		"attempts": func(c *idempotencyclient.Config, d time.Duration) { c.Attempts, c.AttemptTime, c.MaxTime = 3, d, -1 },
		"time":     func(c *idempotencyclient.Config, d time.Duration) { c.AttemptTime, c.MaxTime = -1, d },
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			url, keys := serve(t, func(_ int, _ http.ResponseWriter, r *http.Request) {
				_, _ = io.Copy(io.Discard, r.Body)
				<-r.Context().Done()
			})
			var err error
			for d := 50 * time.Millisecond; len(keys.all()) == 0; d *= 2 { // a slow machine may not have sent anything by then
				client := newClient(t, func(c *idempotencyclient.Config) { change(c, d) })
				_, err = client.Do(post(t.Context(), t, url, "tea")) //nolint:bodyclose // there is none
				require.ErrorIs(t, err, context.DeadlineExceeded)
			}
			require.ErrorIs(t, err, idempotencyclient.ErrOutcomeUnknown)
			var gaveUp *idempotencyclient.GaveUpError
			require.ErrorAs(t, err, &gaveUp)
			require.ErrorContains(t, err, "send it again with the key "+gaveUp.Key)
			require.Equal(t, map[string]int{"attempts": 3, "time": 1}[name], gaveUp.Attempts)
			require.LessOrEqual(t, len(keys.all()), gaveUp.Attempts)
		})
	}
}

// nobody is an address that no other process is given meanwhile.
const nobody = "127.0.0.1:1"

func TestTransport_NobodyThereIsNoUnknownOutcome(t *testing.T) {
	t.Parallel()
	_, err := newClient(t).Do(post(t.Context(), t, "http://"+nobody, "tea")) //nolint:bodyclose // there is none
	var gaveUp *idempotencyclient.GaveUpError
	require.ErrorAs(t, err, &gaveUp)
	require.Equal(t, idempotencyclient.DefaultAttempts, gaveUp.Attempts)
	require.False(t, gaveUp.Unknown)
	require.NotErrorIs(t, err, idempotencyclient.ErrOutcomeUnknown)

	secure := httptest.NewUnstartedServer(nil)
	secure.Config.ErrorLog = slog.NewLogLogger(slog.DiscardHandler, slog.LevelError)
	secure.StartTLS()
	t.Cleanup(secure.Close)
	_, err = newClient(t).Do(post(t.Context(), t, secure.URL, "tea")) //nolint:bodyclose // there is none
	require.ErrorAs(t, err, &gaveUp)
	require.Equal(t, 1, gaveUp.Attempts, "a stranger's certificate does not get better")
	require.False(t, gaveUp.Unknown)
}
