package idempotencyclient_test

import (
	"context"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgonce/pgonce/idempotency"
	"github.com/pgonce/pgonce/idempotencyhttp"
	"github.com/pgonce/pgonce/idempotencyhttp/idempotencyclient"
)

// The service has committed, and its answer is lost on the way: twice whole, and once in its middle.
func TestTransport_AnswersLostAfterCommitAreReplayed(t *testing.T) {
	t.Parallel()
	s := newService(t, &idempotencyhttp.Config{Strict: true}) // takes the key as the draft writes it, and only so
	url, keys := serve(t, func(n int, w http.ResponseWriter, r *http.Request) {
		switch n {
		case 1, 2:
			lose(w, r, s)
		case 3:
			rec := httptest.NewRecorder()
			s.ServeHTTP(rec, r)
			w.Header().Set("Content-Length", "100")
			w.WriteHeader(rec.Code)
			_, _ = w.Write(rec.Body.Bytes()[:3])
		default:
			s.ServeHTTP(w, r)
		}
	})
	client := newClient(t)
	resp, err := idempotencyclient.Do(client, post(t.Context(), t, url, "tea"))
	require.NoError(t, err)
	require.Equal(t, "order 1", text(t, resp))
	require.Equal(t, http.StatusCreated, resp.StatusCode)
	require.True(t, idempotencyclient.Replayed(resp))
	require.Equal(t, 1, s.orders(t))

	again, err := idempotencyclient.Do(client, post(t.Context(), t, url, "tea"))
	require.NoError(t, err)
	require.Equal(t, "order 2", text(t, again), "another request")
	require.False(t, idempotencyclient.Replayed(again))
	got := keys.all()
	require.Len(t, got, 5)
	for _, key := range got[:4] {
		require.Equal(t, resp.Request.Header.Get(idempotencyclient.HeaderKey), key)
	}
	require.NotEqual(t, got[0], got[4])
	require.Regexp(t, `^"[0-9a-f]{8}-[0-9a-f]{4}-7[0-9a-f]{3}-[0-9a-f-]{17}"$`, got[0])
}

func TestCase_M13_AClientWaitsAsLongAsTheServiceSays(t *testing.T) {
	t.Parallel()
	s := newService(t, nil)
	entered, goOn, answered := make(chan struct{}), make(chan struct{}), make(chan struct{})
	s.enter = func() {
		close(entered)
		<-goOn
	}
	var mu sync.Mutex
	var came []time.Time
	url, keys := serve(t, func(n int, w http.ResponseWriter, r *http.Request) {
		mu.Lock()
		came = append(came, time.Now())
		mu.Unlock()
		if n == 4 { // the second client has been told twice
			close(goOn)
			<-answered
		}
		s.ServeHTTP(w, r)
	})
	ctx := idempotencyclient.WithKey(t.Context(), "mine")
	first, second := newClient(t), newClient(t)
	req := post(ctx, t, url, "tea")
	go func() {
		defer close(answered)
		resp, err := first.Do(req)
		if err != nil {
			t.Error(err)
			return
		}
		_ = resp.Body.Close() // it was read by the transport
		if resp.StatusCode != http.StatusCreated || idempotencyclient.Replayed(resp) {
			t.Error(resp)
		}
	}()
	<-entered
	resp, err := idempotencyclient.Do(second, post(ctx, t, url, "tea"))
	require.NoError(t, err)
	require.Equal(t, "order 1", text(t, resp))
	require.True(t, idempotencyclient.Replayed(resp))
	require.Equal(t, 1, s.orders(t))
	require.Equal(t, []string{`"mine"`, `"mine"`, `"mine"`, `"mine"`}, keys.all())
	require.GreaterOrEqual(t, came[3].Sub(came[1]), 2*time.Second, "two pauses of Retry-After: 1")
}

func TestTransport_AsksAgainWhatNobodyKnows(t *testing.T) {
	t.Parallel()
	s := newService(t, nil)
	url, keys := serve(t, func(n int, w http.ResponseWriter, r *http.Request) {
		if n == 1 { // it was done, and PostgreSQL cannot be asked
			s.ServeHTTP(httptest.NewRecorder(), r)
			idempotencyhttp.ProblemOf(idempotency.ErrOutcomeUnknown).Write(w)
			return
		}
		s.ServeHTTP(w, r)
	})
	began := time.Now()
	resp, err := idempotencyclient.Do(newClient(t), post(t.Context(), t, url, "tea"))
	require.NoError(t, err)
	require.Equal(t, "order 1", text(t, resp))
	require.True(t, idempotencyclient.Replayed(resp))
	require.Equal(t, 1, s.orders(t))
	require.GreaterOrEqual(t, time.Since(began), time.Second, "Retry-After: 1")
	require.Len(t, keys.all(), 2)
}

// The service dies behind a COMMIT, is away for a while, and comes back under the same name.
func TestTransport_SurvivesARestartOfTheService(t *testing.T) {
	t.Parallel()
	s := newService(t, nil)
	var group sync.WaitGroup
	t.Cleanup(group.Wait)
	var address atomic.Value // of the process that serves it: a port that is closed may be another program's at once
	start := func(h func(stop func()) http.Handler) error {
		listener, err := new(net.ListenConfig).Listen(t.Context(), "tcp", "127.0.0.1:0")
		if err != nil {
			return err
		}
		server := &http.Server{ReadHeaderTimeout: time.Minute, Handler: h(func() {
			address.Store(nobody)
			_ = listener.Close()
		})}
		group.Go(func() { _ = server.Serve(listener) })
		t.Cleanup(func() { _ = server.Close() })
		address.Store(listener.Addr().String())
		return nil
	}
	died := make(chan struct{})
	require.NoError(t, start(func(stop func()) http.Handler {
		return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			stop()
			lose(w, r, s)
			close(died)
		})
	}))

	base := &http.Transport{DialContext: func(ctx context.Context, network, _ string) (net.Conn, error) {
		return new(net.Dialer).DialContext(ctx, network, address.Load().(string))
	}}
	t.Cleanup(base.CloseIdleConnections)
	refused := 0
	restarting := roundTripper(func(req *http.Request) (*http.Response, error) {
		resp, err := base.RoundTrip(req)
		if err == nil || strings.Contains(err.Error(), "EOF") || strings.Contains(err.Error(), "reset") {
			return resp, err
		}
		if refused++; refused == 3 {
			<-died
			if err := start(func(func()) http.Handler { return s }); err != nil {
				t.Error(err)
			}
		}
		return resp, err
	})
	transport, err := idempotencyclient.New(restarting, &idempotencyclient.Config{Pause: time.Millisecond})
	require.NoError(t, err)
	resp, err := idempotencyclient.Do(&http.Client{Transport: transport}, post(t.Context(), t, "http://shop.example", "tea"))
	require.NoError(t, err)
	require.Equal(t, "order 1", text(t, resp))
	require.True(t, idempotencyclient.Replayed(resp))
	require.Equal(t, 3, refused)
	require.Equal(t, 1, s.orders(t))
}

type roundTripper func(*http.Request) (*http.Response, error)

func (f roundTripper) RoundTrip(req *http.Request) (*http.Response, error) { return f(req) }

// Every answer of the service itself that is final is one attempt.
func TestTransport_TheServicesRefusalsAreFinal(t *testing.T) {
	t.Parallel()
	s := newService(t, &idempotencyhttp.Config{MaxBody: 10})
	url, keys := serve(t, func(_ int, w http.ResponseWriter, r *http.Request) { s.ServeHTTP(w, r) })
	client := newClient(t)
	ctx := idempotencyclient.WithKey(t.Context(), `a "key" \ with all that is printable`)
	resp, err := idempotencyclient.Do(client, post(ctx, t, url, "tea"))
	require.NoError(t, err)
	require.Equal(t, "order 1", text(t, resp))

	_, err = idempotencyclient.Do(client, post(ctx, t, url, "coffee")) //nolint:bodyclose // there is none
	require.ErrorIs(t, err, idempotencyclient.ErrMismatch)
	var problem *idempotencyclient.ProblemError
	require.ErrorAs(t, err, &problem)
	require.Equal(t, http.StatusUnprocessableEntity, problem.Status)
	require.Equal(t, resp.Request.Header.Get(idempotencyclient.HeaderKey), problem.Key)
	require.False(t, problem.Replayed)
	require.NotEmpty(t, problem.Title)
	require.NotEmpty(t, problem.Detail)

	_, err = idempotencyclient.Do(client, post(t.Context(), t, url, "much too large")) //nolint:bodyclose // there is none
	require.ErrorIs(t, err, idempotencyclient.ErrBodyTooLarge)
	req := post(t.Context(), t, url, "tea")
	req.Header.Set(idempotencyclient.HeaderKey, `"open`)
	_, err = idempotencyclient.Do(client, req) //nolint:bodyclose // there is none
	require.ErrorIs(t, err, idempotencyclient.ErrKeyInvalid)
	require.ErrorAs(t, err, &problem)
	require.Equal(t, idempotencyclient.HeaderKey, problem.Field)
	require.Contains(t, problem.Rule, "quote")
	require.Len(t, keys.all(), 4)
	require.Equal(t, 1, s.orders(t))
}

func TestNames_AreTheServices(t *testing.T) {
	t.Parallel()
	require.Equal(t, idempotencyhttp.HeaderKey, idempotencyclient.HeaderKey)
	require.Equal(t, idempotencyhttp.HeaderReplayed, idempotencyclient.HeaderReplayed)
}

// Whatever may be a key arrives as that key, at a service that takes quoted ones only.
func TestWithKey_IsTheSameKeyAtTheService(t *testing.T) {
	t.Parallel()
	var arrived string
	transport, err := idempotencyclient.New(roundTripper(func(req *http.Request) (*http.Response, error) {
		var err error
		arrived, err = idempotencyhttp.KeyValue(req.Header, true)
		return &http.Response{StatusCode: http.StatusOK, Header: http.Header{}, Body: http.NoBody, Request: req}, err
	}), &idempotencyclient.Config{Attempts: 1})
	require.NoError(t, err)
	all := ""
	for c := ' '; c <= '~'; c++ {
		all += string(c)
	}
	for _, key := range []string{"k", " k ", `"`, `\`, `\"\\"`, `"quoted"`, all, strings.Repeat(`"`, 255)} {
		resp, err := (&http.Client{Transport: transport}).Do(post(idempotencyclient.WithKey(t.Context(), key), t, "http://shop.example", "tea"))
		require.NoError(t, err)
		require.NoError(t, resp.Body.Close())
		require.Equal(t, key, arrived)
	}
}
