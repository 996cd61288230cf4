package idempotencyhttp_test

import (
	"errors"
	"fmt"
	"io"
	"net/http"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgonce/pgonce/idempotency"
	"github.com/pgonce/pgonce/idempotency/idempotencytest"
	"github.com/pgonce/pgonce/idempotencyhttp"
	"github.com/pgonce/pgonce/txn"
)

var modified = time.Date(2024, 2, 29, 12, 0, 0, 0, time.UTC)

func TestOperation_RetryIsTheFirstAnswer(t *testing.T) {
	t.Parallel()
	s := newSite(t).serve(t, place)
	first := s.post(t, "k", "body")
	require.Equal(t, http.StatusCreated, first.status)
	require.False(t, first.replayed())
	again := s.post(t, "k", "body")
	require.True(t, again.replayed())
	require.Equal(t, first.status, again.status)
	require.Equal(t, first.body, again.body)
	require.Equal(t, plain(first.header), plain(again.header))
	require.Equal(t, 1, s.orders(t, "k"))
	require.NotEqual(t, first.body, s.post(t, "k2", "body").body)
}

func TestOperation_DoubleClickIsOneOrder(t *testing.T) {
	t.Parallel()
	s := newSite(t, func(c *txn.Config) { // which waits for longer than a slow machine takes
		c.Operations = []idempotency.Operation{{Name: create.Name, Wait: 30 * time.Second}}
	})
	s.serve(t, func(w http.ResponseWriter, r *http.Request) {
		tx, _ := txn.FromContext(r.Context())
		_, _ = tx.Exec(r.Context(), `SELECT pg_sleep(0.05)`)
		place(w, r)
	})
	const clicks = 12
	answers, errs := make([]answer, clicks), make([]error, clicks)
	var group sync.WaitGroup
	for i := range clicks {
		group.Go(func() {
			answers[i], errs[i] = s.try(t.Context(), http.MethodPost, "/orders", http.Header{idempotencyhttp.HeaderKey: {"k"}}, strings.NewReader("body"))
		})
	}
	group.Wait()
	fresh, bodies := 0, map[string]bool{}
	for i, a := range answers {
		require.NoError(t, errs[i])
		require.Equal(t, http.StatusCreated, a.status, a.body)
		bodies[a.body] = true
		if !a.replayed() {
			fresh++
		}
	}
	require.Equal(t, 1, fresh)
	require.Len(t, bodies, 1)
	require.Equal(t, 1, s.orders(t, "k"))
}

func TestOperation_NothingReachesTheClientBeforeCommit(t *testing.T) {
	t.Parallel()
	s := newSite(t)
	// A row that only COMMIT refuses.
	_, err := s.pool.Exec(t.Context(), `
		ALTER TABLE orders ADD CONSTRAINT late UNIQUE (note) DEFERRABLE INITIALLY DEFERRED;
		INSERT INTO orders (key, note) VALUES ('other', 'taken')`)
	require.NoError(t, err)
	s.serve(t, func(w http.ResponseWriter, r *http.Request) {
		tx, _ := txn.FromContext(r.Context())
		if _, err := tx.Exec(r.Context(), `INSERT INTO orders (key, note) VALUES ('k', 'taken')`); err != nil {
			panic(err)
		}
		w.WriteHeader(http.StatusCreated)
		_, _ = io.WriteString(w, strings.Repeat("done ", 100_000))
	})
	a := s.post(t, "k", "")
	requireProblem(t, a, http.StatusInternalServerError, "internal")
	require.NotContains(t, a.body, "taken")
	require.Contains(t, s.log.String(), "late", "the operator is told")
	s.requireState(t, "k", "")
}

func TestOperation_RecorderIsResetForAnotherRun(t *testing.T) {
	t.Parallel()
	s := newSite(t)
	var runs count
	s.serve(t, func(w http.ResponseWriter, r *http.Request) {
		n := runs.add()
		body, err := io.ReadAll(r.Body)
		if err != nil || string(body) != "body" || r.Header.Get("X-Mine") != "" || r.ContentLength != 4 {
			panic(fmt.Sprintf("run %d got %q, %v", n, body, r.Header))
		}
		r.Header.Set("X-Mine", "changed")
		w.Header().Set("Etag", fmt.Sprintf(`"%d"`, n))
		if n < 3 {
			w.Header().Set("Link", "<first>")
			w.WriteHeader(http.StatusAccepted)
			_, _ = io.WriteString(w, "first try")
			_ = sqlError(r, "40001")
			return
		}
		place(w, r)
	})
	a := s.post(t, "k", "body")
	require.Equal(t, http.StatusCreated, a.status)
	require.Equal(t, `"3"`, a.header.Get("Etag"))
	require.Empty(t, a.header.Get("Link"))
	require.NotContains(t, a.body, "first")
	require.Equal(t, 3, runs.get())
	require.Equal(t, 1, s.orders(t, "k"))
}

// Handlers answer 500 to any SQL error: that must not keep one that a new run cures from being run again.
func TestOperation_ASerializationFailureAnswered500RunsAgain(t *testing.T) {
	t.Parallel()
	s := newSite(t)
	var runs count
	s.serve(t, func(w http.ResponseWriter, r *http.Request) {
		if runs.add() == 1 {
			http.Error(w, sqlError(r, "40001").Error(), http.StatusInternalServerError)
			return
		}
		place(w, r)
	})
	require.Equal(t, http.StatusCreated, s.post(t, "k", "").status)
	require.Equal(t, 2, runs.get())
}

func TestOperation_GivenUpAfterTooManyRuns(t *testing.T) {
	t.Parallel()
	s := newSite(t, func(c *txn.Config) { c.MaxRetries = 1 })
	s.serve(t, func(w http.ResponseWriter, r *http.Request) {
		http.Error(w, sqlError(r, "40001").Error(), http.StatusInternalServerError)
	})
	a := s.post(t, "k", "")
	requireProblem(t, a, http.StatusServiceUnavailable, "unavailable")
	require.Equal(t, "1", a.header.Get("Retry-After"))
}

func TestOperation_SuccessBehindAnSQLErrorIsNone(t *testing.T) {
	t.Parallel()
	s := newSite(t).serve(t, func(w http.ResponseWriter, r *http.Request) {
		_ = sqlError(r, "22012") // ignored
		w.WriteHeader(http.StatusCreated)
	})
	requireProblem(t, s.post(t, "k", ""), http.StatusInternalServerError, "internal")
	s.requireState(t, "k", "")
}

func TestOperation_SafeMethodsPass(t *testing.T) {
	t.Parallel()
	s := newSite(t)
	s.serve(t, func(w http.ResponseWriter, r *http.Request) {
		_, inside := txn.FromContext(r.Context())
		w.Header().Set("X-Inside", fmt.Sprint(inside))
		_ = http.NewResponseController(w).Flush()
	})
	for _, method := range []string{http.MethodGet, http.MethodHead, http.MethodOptions, http.MethodTrace} {
		for _, h := range []http.Header{nil, {idempotencyhttp.HeaderKey: {"k"}}, {idempotencyhttp.HeaderKey: {"", "broken"}}} {
			a := s.send(t, method, "/", h, nil)
			require.Equal(t, http.StatusOK, a.status)
			require.Equal(t, "false", a.header.Get("X-Inside"))
		}
	}
	s.requireState(t, "k", "")
}

func TestOperation_InProgress(t *testing.T) {
	t.Parallel()
	s := newSite(t, func(c *txn.Config) {
		c.Operations = []idempotency.Operation{{Name: create.Name, Wait: idempotency.NoWait}}
	}).serve(t, place)
	key, err := create.Key(idempotency.SingleTenant, "k")
	require.NoError(t, err)
	release := idempotencytest.InProgress(t, s.pool, key)
	a := s.post(t, "k", "")
	requireProblem(t, a, http.StatusConflict, "in-progress")
	require.Equal(t, "1", a.header.Get("Retry-After"))
	require.Empty(t, s.log.String(), "nobody has to know")
	release()
	s.postUntilThereIsTime(t, "k")
}

func TestOperation_Mismatch(t *testing.T) {
	t.Parallel()
	s := newSite(t).serve(t, place)
	key := http.Header{idempotencyhttp.HeaderKey: {"k"}}
	first := s.post(t, "k", "body")
	for _, a := range []answer{
		s.post(t, "k", "other"),
		s.send(t, http.MethodPost, "/orders/7", key, strings.NewReader("body")),
		s.send(t, http.MethodPost, "/orders?a=b", key, strings.NewReader("body")),
		s.send(t, http.MethodPut, "/orders", key, strings.NewReader("body")),
		s.send(t, http.MethodPost, "/orders",
			http.Header{idempotencyhttp.HeaderKey: {"k"}, "Content-Type": {"text/csv"}}, strings.NewReader("body")),
	} {
		requireProblem(t, a, http.StatusUnprocessableEntity, "mismatch")
	}
	require.Equal(t, first.body, s.post(t, "k", "body").body)
}

func TestOperation_OutcomeUnknown(t *testing.T) {
	t.Parallel()
	var plug *idempotencytest.Plug
	s := newSiteWith(t, func(c *pgxpool.Config) { plug = idempotencytest.NewPlug(c) }, func(c *txn.Config) { c.CommitTimeout = time.Second })
	s.serve(t, place)
	require.Equal(t, http.StatusCreated, s.post(t, "warm", "").status)
	plug.OutAtCommit()
	a := s.post(t, "k", "")
	requireProblem(t, a, http.StatusServiceUnavailable, "outcome-unknown")
	require.Equal(t, "1", a.header.Get("Retry-After"))
	plug.In()
	again := s.post(t, "k", "")
	require.Equal(t, http.StatusCreated, again.status)
	require.True(t, again.replayed(), "it was done")
	require.Equal(t, 1, s.orders(t, "k"))
}

func TestOperation_HandlerThatLeavesItsTransactionAloneIsNotProtected(t *testing.T) {
	t.Parallel()
	s := newSite(t)
	elsewhere := func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(http.StatusCreated) }
	s.serve(t, elsewhere)
	requireProblem(t, s.post(t, "k", ""), http.StatusInternalServerError, "program-error")
	require.Contains(t, s.log.String(), "Config.Untransacted")
	require.NotContains(t, s.log.String(), "key=k")
	s.requireState(t, "k", "")
	s.serve(t, elsewhere, func(c *idempotencyhttp.Config) { c.Untransacted = true })
	require.Equal(t, http.StatusCreated, s.post(t, "k", "").status)
	require.True(t, s.post(t, "k", "").replayed())
}

func TestOperation_FlushAndHijackAreRefused(t *testing.T) {
	t.Parallel()
	s := newSite(t).serve(t, func(w http.ResponseWriter, r *http.Request) {
		rc := http.NewResponseController(w)
		_, flusher := w.(http.Flusher)
		_, hijacker := w.(http.Hijacker)
		_, _, err := rc.Hijack()
		if flusher || hijacker || !errors.Is(err, http.ErrNotSupported) || !errors.Is(rc.Flush(), http.ErrNotSupported) {
			panic("past the record")
		}
		deadline := time.Now().Add(time.Minute)
		if err := errors.Join(rc.SetReadDeadline(deadline), rc.SetWriteDeadline(deadline), rc.EnableFullDuplex()); err != nil {
			panic(err)
		}
		place(w, r)
	})
	require.Equal(t, http.StatusCreated, s.post(t, "k", "").status)
}

func TestOperation_SwitchingProtocolsIsRefused(t *testing.T) {
	t.Parallel()
	s := newSite(t).serve(t, func(w http.ResponseWriter, r *http.Request) {
		if _, err := insert(r); err != nil {
			panic(err)
		}
		w.WriteHeader(http.StatusSwitchingProtocols)
	})
	requireProblem(t, s.post(t, "k", ""), http.StatusInternalServerError, "program-error")
	require.Zero(t, s.orders(t, "k"))
}

func TestOperationOf_EmptyNameLetsAStreamPass(t *testing.T) {
	t.Parallel()
	s := newSite(t)
	s.open(t, s.middleware(t).OperationOf(func(r *http.Request) string {
		switch r.URL.Path {
		case "/stream":
			return ""
		case "/typo":
			return "nobody.knows"
		}
		return create.Name
	})(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path == "/orders" {
			place(w, r)
			return
		}
		conn, buffer, err := http.NewResponseController(w).Hijack()
		if err != nil {
			panic(err)
		}
		_, _ = io.WriteString(buffer, "HTTP/1.1 299 Mine\r\nConnection: close\r\n\r\n")
		_ = errors.Join(buffer.Flush(), conn.Close())
	})))
	require.Equal(t, http.StatusCreated, s.post(t, "k", "").status)
	a, err := s.try(t.Context(), http.MethodPost, "/stream", nil, nil)
	require.NoError(t, err)
	require.Equal(t, 299, a.status)
	requireProblem(t, s.send(t, http.MethodPost, "/typo", http.Header{idempotencyhttp.HeaderKey: {"k"}}, nil), http.StatusInternalServerError, "program-error")
}

func TestOperation_LateGoroutineWritesNothing(t *testing.T) {
	t.Parallel()
	s := newSite(t)
	late := make(chan error, 1)
	done := make(chan struct{})
	s.serve(t, func(w http.ResponseWriter, r *http.Request) {
		place(w, r)
		go func() {
			<-done
			_, err := io.WriteString(w, "late")
			late <- err
		}()
	})
	a := s.post(t, "k", "")
	close(done)
	require.Error(t, <-late)
	require.Equal(t, a.body, s.post(t, "k", "").body)
}

func TestOperation_TwiceOnOneRouteIsRefused(t *testing.T) {
	t.Parallel()
	s := newSite(t)
	once := s.middleware(t).Operation(create.Name)
	s.open(t, once(once(http.HandlerFunc(place))))
	requireProblem(t, s.post(t, "k", ""), http.StatusInternalServerError, "program-error")
	s.requireState(t, "k", "")
}

func TestOperation_RecordOfAnotherKindIsNeverRunAgain(t *testing.T) {
	t.Parallel()
	s := newSite(t)
	var req idempotency.Request
	s.serve(t, place, func(c *idempotencyhttp.Config) {
		c.Fingerprint = func(*http.Request, []byte) (idempotency.Fingerprint, error) {
			return idempotency.FingerprintBytes(), nil
		}
	})
	var err error
	req.Fingerprint = idempotency.FingerprintBytes()
	req.Key, err = create.Key(idempotency.SingleTenant, "json")
	require.NoError(t, err)
	idempotencytest.Succeeded(t, s.runner, req, map[string]int{"id": 7})
	requireProblem(t, s.send(t, http.MethodPut, "/", http.Header{idempotencyhttp.HeaderKey: {"json"}}, nil), http.StatusInternalServerError, "result-unreadable")
	req.Key, err = create.Key(idempotency.SingleTenant, "failed")
	require.NoError(t, err)
	idempotencytest.Failed(t, s.runner, req, "by_hand", "by a person", idempotencyhttp.Response{})
	_, err = s.pool.Exec(t.Context(), `UPDATE idempotency.records SET result = NULL, result_type = NULL WHERE key = 'failed'`)
	require.NoError(t, err)
	requireProblem(t, s.post(t, "failed", ""), http.StatusInternalServerError, "failed")
	req.Key, err = create.Key(idempotency.SingleTenant, "ours")
	require.NoError(t, err)
	idempotencytest.Succeeded(t, s.runner, req, idempotencyhttp.Response{Status: 202, Body: []byte("by a test")})
	a := s.post(t, "ours", "")
	require.Equal(t, 202, a.status)
	require.Equal(t, "by a test", a.body)
	require.True(t, a.replayed())
}

func TestOperation_TransactionEndedByTheHandler(t *testing.T) {
	t.Parallel()
	s := newSite(t).serve(t, func(w http.ResponseWriter, r *http.Request) {
		place(w, r)
		tx, _ := txn.FromContext(r.Context())
		_, _ = tx.Exec(r.Context(), "COMMIT")
	})
	requireProblem(t, s.post(t, "k", ""), http.StatusInternalServerError, "failed")
	requireProblem(t, s.post(t, "k", ""), http.StatusInternalServerError, "failed")
	require.Equal(t, 1, s.orders(t, "k"), "never again")
}
