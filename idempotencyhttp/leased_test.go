package idempotencyhttp_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/pgonce/pgonce/idempotency"
	"github.com/pgonce/pgonce/idempotencyhttp"
	"github.com/pgonce/pgonce/txn"
)

// newLeasedSite serves a handler on a leased route whose operation is taken over by this rule.
func newLeasedSite(t testing.TB, op idempotency.Operation, h http.HandlerFunc) *site {
	t.Helper()
	op.Name, op.Lease = create.Name, time.Second
	s := newSite(t, func(c *txn.Config) { c.Operations = []idempotency.Operation{op} })
	s.open(t, s.middleware(t).Leased(op.Name)(h))
	return s
}

func TestLeased_BusinessRowsAndAnswerAreOneCommit(t *testing.T) {
	t.Parallel()
	var s *site
	s = newLeasedSite(t, idempotency.Operation{}, func(w http.ResponseWriter, r *http.Request) {
		if _, inside := txn.FromContext(r.Context()); inside {
			panic("a transaction is open while somebody else is called")
		}
		if state, err := s.state(r.Context(), "k"); err != nil || state != "PROCESSING" {
			panic(fmt.Sprint(state, err))
		}
		l, leased := idempotencyhttp.LeaseFromContext(r.Context())
		if !leased || l.DownstreamKey("charge") == "" {
			panic("no lease")
		}
		err := idempotencyhttp.OnCommit(r.Context(), func(ctx context.Context, tx pgx.Tx) error {
			_, err := tx.Exec(ctx, `INSERT INTO orders (key) VALUES ('k')`)
			return err
		})
		if err != nil {
			panic(err)
		}
		w.WriteHeader(http.StatusCreated)
		_, _ = io.WriteString(w, "charged")
	})
	first, again := s.post(t, "k", ""), s.post(t, "k", "")
	require.Equal(t, http.StatusCreated, first.status)
	require.False(t, first.replayed())
	require.True(t, again.replayed())
	require.Equal(t, first.body, again.body)
	require.Equal(t, 1, s.orders(t, "k"))
}

func TestLeased_EveryStatus(t *testing.T) {
	t.Parallel()
	var runs count
	s := newLeasedSite(t, idempotency.Operation{Takeover: idempotency.TakeoverRerun}, func(w http.ResponseWriter, r *http.Request) {
		_ = idempotencyhttp.OnCommit(r.Context(), func(ctx context.Context, tx pgx.Tx) error {
			_, err := tx.Exec(ctx, `INSERT INTO orders (key) VALUES ($1)`, r.Header.Get(idempotencyhttp.HeaderKey))
			return err
		})
		var status int
		_, _ = fmt.Fscan(r.Body, &status)
		w.WriteHeader(status)
		_, _ = fmt.Fprint(w, "run ", runs.add())
	})
	for status, again := range map[int]bool{200: false, 303: false, 402: false, 429: true, 502: true} {
		key := fmt.Sprint("k-", status)
		s.client.CheckRedirect = func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse }
		first, retry := s.post(t, key, fmt.Sprint(status)), s.post(t, key, fmt.Sprint(status))
		require.Equal(t, status, first.status)
		require.Equal(t, status, retry.status)
		require.Equal(t, again, first.body != retry.body, "%d: %q, %q", status, first.body, retry.body)
		require.Equal(t, !again, retry.replayed())
		want := 0
		if status < 400 {
			want = 1
		}
		require.Equal(t, want, s.orders(t, key))
	}
}

func TestLeased_FailingCommitIsTriedAgain(t *testing.T) {
	t.Parallel()
	var runs count
	s := newLeasedSite(t, idempotency.Operation{Takeover: idempotency.TakeoverRerun}, func(_ http.ResponseWriter, r *http.Request) {
		_ = idempotencyhttp.OnCommit(r.Context(), func(context.Context, pgx.Tx) error {
			if runs.add() == 1 {
				return errors.New("on purpose")
			}
			return nil
		})
	})
	requireProblem(t, s.post(t, "k", ""), http.StatusInternalServerError, "internal")
	require.Equal(t, http.StatusOK, s.post(t, "k", "").status)
}

func TestLeased_PanicIsAFailureAndGoesOn(t *testing.T) {
	t.Parallel()
	var runs count
	s := newLeasedSite(t, idempotency.Operation{Takeover: idempotency.TakeoverRerun}, func(http.ResponseWriter, *http.Request) {
		if runs.add() == 1 {
			panic(http.ErrAbortHandler)
		}
	})
	_, err := s.try(t.Context(), http.MethodPost, "/orders", http.Header{idempotencyhttp.HeaderKey: {"k"}}, nil)
	require.Error(t, err)
	require.Equal(t, http.StatusOK, s.post(t, "k", "").status)
}

// asked answers for owners that died.
type asked struct{ response idempotencyhttp.Response }

func (a asked) Ask(context.Context, idempotency.Record, []idempotency.Step) (found idempotency.Resolution, err error) {
	found.Outcome = idempotency.OutcomeSucceeded
	found.Result, found.ResultType, err = a.response.Result()
	return found, err
}

func (a asked) Commit(context.Context, pgx.Tx, idempotency.Record, idempotency.Resolution) error {
	return nil
}

func TestLeased_AResolverAnswersForADeadOwner(t *testing.T) {
	t.Parallel()
	answer := idempotencyhttp.Response{Status: http.StatusCreated, Header: http.Header{"Location": {"/charges/7"}}, Body: []byte("charged")}
	dead := make(chan struct{})
	s := newLeasedSite(t, idempotency.Operation{Wait: 5 * time.Second, Resolver: asked{answer}}, func(_ http.ResponseWriter, r *http.Request) {
		close(dead)
		<-r.Context().Done()
	})
	ctx, cancel := context.WithCancel(t.Context())
	gone := make(chan struct{})
	go func() {
		defer close(gone)
		_, _ = s.try(ctx, http.MethodPost, "/orders", http.Header{idempotencyhttp.HeaderKey: {"k"}}, nil)
	}()
	<-dead
	// As if the process had died: its lease ends, and nobody renews it.
	_, err := s.pool.Exec(t.Context(), `UPDATE idempotency.records SET lease_expires_at = statement_timestamp() - interval '1 second', fence = fence + 1,
		attempt_token = substring(sha256('dead') for 16)`)
	require.NoError(t, err)
	a := s.post(t, "k", "")
	cancel()
	<-gone
	require.Equal(t, http.StatusCreated, a.status, a.body)
	require.Equal(t, "/charges/7", a.header.Get("Location"))
	require.Equal(t, "charged", a.body)
	require.True(t, s.post(t, "k", "").replayed())
}

func TestOnCommit_IsForLeasedRoutes(t *testing.T) {
	t.Parallel()
	require.ErrorIs(t, idempotencyhttp.OnCommit(t.Context(), nil), idempotency.ErrConfig)
	_, leased := idempotencyhttp.LeaseFromContext(t.Context())
	require.False(t, leased)
}
