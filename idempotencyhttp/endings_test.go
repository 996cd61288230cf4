package idempotencyhttp_test

import (
	"bufio"
	"context"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgonce/pgonce/idempotencyhttp"
	"github.com/pgonce/pgonce/txn"
)

func TestOperation_PanicRollsBackAndGoesOn(t *testing.T) {
	t.Parallel()
	s := newSite(t)
	var runs count
	s.serve(t, func(w http.ResponseWriter, r *http.Request) {
		place(w, r)
		switch runs.add() {
		case 1:
			panic("on purpose")
		case 2:
			panic(http.ErrAbortHandler)
		}
	})
	for range 2 {
		_, err := s.try(t.Context(), http.MethodPost, "/orders", http.Header{idempotencyhttp.HeaderKey: {"k"}}, nil)
		require.Error(t, err, "the server cut the connection")
		require.Zero(t, s.orders(t, "k"))
		s.requireState(t, "k", "")
	}
	require.Equal(t, http.StatusCreated, s.post(t, "k", "").status)

	value := func() (v any) {
		defer func() { v = recover() }()
		h := s.middleware(t).Operation(create.Name)(http.HandlerFunc(func(http.ResponseWriter, *http.Request) { panic(http.ErrAbortHandler) }))
		r := httptest.NewRequestWithContext(t.Context(), http.MethodPost, "/", nil)
		r.Header.Set(idempotencyhttp.HeaderKey, "other")
		h.ServeHTTP(httptest.NewRecorder(), r)
		return nil
	}()
	require.Equal(t, http.ErrAbortHandler, value, "the very value")
}

func TestOperation_TimeoutInside(t *testing.T) {
	t.Parallel()
	s := newSite(t)
	var runs count
	slow := http.TimeoutHandler(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if runs.add() == 1 {
			tx, _ := txn.FromContext(r.Context())
			_, _ = insert(r)
			_, _ = tx.Exec(r.Context(), `SELECT pg_sleep(60)`)
		}
		place(w, r)
	}), 200*time.Millisecond, "too slow")
	s.serve(t, slow.ServeHTTP)
	a := s.post(t, "k", "")
	require.Equal(t, http.StatusServiceUnavailable, a.status)
	require.Equal(t, "too slow", a.body)
	require.Equal(t, 1, runs.get(), "no second run, which would take as long")
	require.Zero(t, s.orders(t, "k"))
	s.requireState(t, "k", "")
	s.postUntilThereIsTime(t, "k")
	require.Equal(t, 1, s.orders(t, "k"))
}

// postUntilThereIsTime retries as a client would: a slow machine may need more than one try.
func (s *site) postUntilThereIsTime(t *testing.T, key string) {
	t.Helper()
	require.Eventually(t, func() bool {
		a, err := s.try(t.Context(), http.MethodPost, "/orders", http.Header{idempotencyhttp.HeaderKey: {key}}, strings.NewReader(""))
		return err == nil && a.status == http.StatusCreated
	}, 30*time.Second, 5*time.Millisecond)
}

func TestOperation_TimeoutOutside(t *testing.T) {
	t.Parallel()
	s := newSite(t)
	var runs count
	inner := s.middleware(t).Operation(create.Name)(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if runs.add() == 1 {
			tx, _ := txn.FromContext(r.Context())
			_, _ = insert(r)
			_, _ = tx.Exec(r.Context(), `SELECT pg_sleep(60)`)
		}
		place(w, r)
	}))
	s.open(t, http.TimeoutHandler(inner, 200*time.Millisecond, "too slow"))
	a := s.post(t, "k", "")
	require.Equal(t, http.StatusServiceUnavailable, a.status)
	require.Equal(t, "too slow", a.body)
	require.Eventually(t, func() bool { return s.pool.Stat().AcquiredConns() == 0 }, 30*time.Second, 5*time.Millisecond)
	require.Zero(t, s.orders(t, "k"))
	s.postUntilThereIsTime(t, "k")
	require.Equal(t, 1, s.orders(t, "k"))
}

func TestOperation_DeadlineOfTheContextIsAnswered(t *testing.T) {
	t.Parallel()
	s := newSite(t)
	inner := s.middleware(t).Operation(create.Name)(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		tx, _ := txn.FromContext(r.Context())
		_, _ = tx.Exec(r.Context(), `SELECT pg_sleep(60)`)
		place(w, r)
	}))
	s.open(t, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		ctx, cancel := context.WithTimeout(r.Context(), 100*time.Millisecond)
		defer cancel()
		inner.ServeHTTP(w, r.WithContext(ctx))
	}))
	a := s.post(t, "k", "")
	require.GreaterOrEqual(t, a.status, 500, "the handler's own 500, or our 503")
	s.requireState(t, "k", "")
}

func TestOperation_ClientHangsUp(t *testing.T) {
	t.Parallel()
	s := newSite(t)
	var runs count
	entered := make(chan struct{})
	s.serve(t, func(w http.ResponseWriter, r *http.Request) {
		if runs.add() == 1 {
			_, _ = insert(r)
			close(entered)
			tx, _ := txn.FromContext(r.Context())
			_, _ = tx.Exec(r.Context(), `SELECT pg_sleep(60)`)
		}
		place(w, r)
	})
	conn, err := new(net.Dialer).DialContext(t.Context(), "tcp", strings.TrimPrefix(s.url, "http://"))
	require.NoError(t, err)
	_, err = io.WriteString(conn, "POST /orders HTTP/1.1\r\nHost: x\r\nIdempotency-Key: k\r\nContent-Length: 4\r\n\r\nbody")
	require.NoError(t, err)
	<-entered
	// A cancel request that comes before the statement cancels nothing, and pgx then waits for 15 s.
	require.Eventually(t, func() bool {
		var sleeping int
		err := s.pool.QueryRow(t.Context(), `SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND wait_event = 'PgSleep'`).Scan(&sleeping)
		return err == nil && sleeping == 1
	}, 10*time.Second, 5*time.Millisecond)
	require.NoError(t, conn.Close())
	require.Eventually(t, func() bool { return s.pool.Stat().AcquiredConns() == 0 }, 30*time.Second, 5*time.Millisecond)
	require.Zero(t, s.orders(t, "k"))
	retry := s.post(t, "k", "body")
	require.Equal(t, http.StatusCreated, retry.status)
	require.False(t, retry.replayed())
	require.Empty(t, s.log.String(), "nobody has to know")
}

func TestOperation_HandlerThatGivesUpSilentlyIsRolledBack(t *testing.T) {
	t.Parallel()
	s := newSite(t)
	var silent bool
	h := s.middleware(t).Operation(create.Name)(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if _, err := insert(r); err != nil {
			panic(err)
		}
		hangUp, _ := r.Context().Value(hangUpKey{}).(context.CancelFunc)
		hangUp()
		if silent {
			return // between two statements: the transaction is as good as ever
		}
		w.WriteHeader(http.StatusCreated)
	}))
	for _, silent = range []bool{true, false} {
		ctx, cancel := context.WithCancel(t.Context())
		r := httptest.NewRequestWithContext(context.WithValue(ctx, hangUpKey{}, cancel), http.MethodPost, "/", nil)
		r.Header.Set(idempotencyhttp.HeaderKey, "k")
		w := httptest.NewRecorder()
		h.ServeHTTP(w, r)
		if silent {
			require.Equal(t, http.StatusServiceUnavailable, w.Code)
			require.Zero(t, s.orders(t, "k"))
			s.requireState(t, "k", "")
			continue
		}
		require.Equal(t, http.StatusCreated, w.Code)
		require.Equal(t, 1, s.orders(t, "k"), "a handler that has ended its work is committed")
	}
}

type hangUpKey struct{}

func TestOperation_ClientThatSendsHalfABody(t *testing.T) {
	t.Parallel()
	s := newSite(t).serve(t, place)
	conn, err := new(net.Dialer).DialContext(t.Context(), "tcp", strings.TrimPrefix(s.url, "http://"))
	require.NoError(t, err)
	_, err = io.WriteString(conn, "POST /orders HTTP/1.1\r\nHost: x\r\nIdempotency-Key: k\r\nContent-Length: 100\r\n\r\nhalf")
	require.NoError(t, err)
	require.NoError(t, conn.(*net.TCPConn).CloseWrite())
	resp, err := http.ReadResponse(bufio.NewReader(conn), nil)
	require.NoError(t, err)
	require.Equal(t, http.StatusBadRequest, resp.StatusCode)
	require.NoError(t, resp.Body.Close())
	require.NoError(t, conn.Close())
	s.requireState(t, "k", "")
}
