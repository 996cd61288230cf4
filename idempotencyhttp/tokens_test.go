package idempotencyhttp_test

import (
	"bytes"
	"encoding/json"
	"fmt"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgonce/pgonce/idempotency"
	"github.com/pgonce/pgonce/idempotencyhttp"
	"github.com/pgonce/pgonce/ids"
	"github.com/pgonce/pgonce/txn"
)

// Whoever has a token may use it once, for what it was issued for.
func TestTokens_IssueAndUse(t *testing.T) {
	t.Parallel()
	made, err := ids.NewTokens(&ids.TokensConfig{Keys: []ids.TokenKey{{ID: "a", Secret: bytes.Repeat([]byte("s"), 32)}}})
	require.NoError(t, err)
	s := newSite(t, func(c *txn.Config) {
		c.Operations = []idempotency.Operation{{Name: "order.create", RequireIssued: true, Tokens: made}, {Name: "order.other"}}
	})
	who := func(r *http.Request) (string, error) { return r.Header.Get("X-Customer"), nil }
	once, err := idempotencyhttp.New(s.runner, who, &idempotencyhttp.Config{Log: logTo(s.log)})
	require.NoError(t, err)
	mux := http.NewServeMux()
	mux.Handle("/orders/tokens", once.Tokens("order.create"))
	mux.Handle("POST /orders", once.Operation("order.create")(http.HandlerFunc(place)))
	s.open(t, mux)
	issue := func(customer string) (issued idempotencyhttp.IssuedToken) {
		t.Helper()
		a := s.send(t, http.MethodPost, "/orders/tokens", http.Header{"X-Customer": {customer}}, nil)
		require.Equal(t, http.StatusCreated, a.status, a.body)
		require.Equal(t, "no-store", a.header.Get("Cache-Control"))
		require.NoError(t, json.Unmarshal([]byte(a.body), &issued))
		require.Equal(t, "order.create", issued.Operation)
		require.WithinDuration(t, time.Now().Add(24*time.Hour), issued.ExpiresAt, time.Hour)
		return issued
	}
	use := func(customer, token string) answer {
		t.Helper()
		return s.send(t, http.MethodPost, "/orders", http.Header{"X-Customer": {customer}, idempotencyhttp.HeaderKey: {token}}, strings.NewReader("{}"))
	}
	token := issue("c-1").Token
	require.NotEqual(t, token, issue("c-1").Token)
	first := use("c-1", token)
	require.Equal(t, http.StatusCreated, first.status, first.body)
	again := use("c-1", token)
	require.True(t, again.replayed())
	require.Equal(t, first.body, again.body)
	requireProblem(t, use("c-2", token), http.StatusBadRequest, "not-issued")
	requireProblem(t, use("c-1", "made-up"), http.StatusBadRequest, "not-issued")
	forged := token[:len(token)-1] + string("AB"[strings.Count(token[len(token)-1:], "A")])
	requireProblem(t, use("c-1", forged), http.StatusBadRequest, "not-issued")
	late := issue("c-1").Token
	_, err = s.pool.Exec(t.Context(), `UPDATE idempotency.records SET expires_at = statement_timestamp() - interval '1 s' WHERE key = $1`, late)
	require.NoError(t, err)
	requireProblem(t, use("c-1", late), http.StatusBadRequest, "not-issued")

	require.Equal(t, http.StatusMethodNotAllowed, s.send(t, http.MethodGet, "/orders/tokens", http.Header{"X-Customer": {"c-1"}}, nil).status)
	requireProblem(t, s.send(t, http.MethodPost, "/orders/tokens", nil, nil), http.StatusInternalServerError, "program-error") // nobody
	require.Panics(t, func() { once.Tokens("order.other") })
	require.Panics(t, func() { once.Tokens("nobody.knows") })
}

// Equal requests without a key are one for a time, and everything else is two.
func TestDerived_EqualRequestsAreOneForATime(t *testing.T) {
	t.Parallel()
	made, err := ids.NewTokens(nil)
	require.NoError(t, err)
	s := newSite(t, func(c *txn.Config) {
		c.Operations = []idempotency.Operation{
			{Name: "order.create"},
			{Name: "order.other"},
			{Name: "order.issued", RequireIssued: true, Tokens: made},
			{Name: "request.equal", Retention: 10 * time.Minute},
		}
	})
	who := func(r *http.Request) (string, error) { return r.Header.Get("X-Customer"), nil }
	once, err := idempotencyhttp.New(s.runner, who, &idempotencyhttp.Config{Derived: "request.equal", Log: logTo(s.log)})
	require.NoError(t, err)
	keyless := http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		tx, inside := txn.FromContext(r.Context())
		if !inside {
			t.Error("it is not protected")
			return
		}
		var id int64
		if err := tx.QueryRow(r.Context(), `INSERT INTO orders (key) VALUES ('none') RETURNING id`).Scan(&id); err != nil {
			t.Error(err)
		}
		w.WriteHeader(http.StatusCreated)
		_, _ = fmt.Fprint(w, id)
	})
	mux := http.NewServeMux()
	for _, route := range []string{"create", "other", "issued"} {
		mux.Handle("POST /"+route, once.Operation("order."+route)(keyless))
	}
	both := once.OperationOf(func(r *http.Request) string { return r.URL.Query().Get("as") })
	mux.Handle("POST /as", both(keyless))
	s.open(t, mux)
	post := func(customer, path, body string, key ...string) answer {
		t.Helper()
		h := http.Header{"X-Customer": {customer}}
		if len(key) > 0 {
			h[idempotencyhttp.HeaderKey] = key
		}
		return s.send(t, http.MethodPost, path, h, strings.NewReader(body))
	}
	first := post("c-1", "/create", `{"item":1}`)
	require.Equal(t, http.StatusCreated, first.status, first.body)
	require.False(t, first.replayed())
	again := post("c-1", "/create", `{"item":1}`)
	require.True(t, again.replayed())
	require.Equal(t, first.body, again.body)
	for _, a := range []answer{
		post("c-1", "/create", `{"item":2}`), post("c-2", "/create", `{"item":1}`), post("c-1", "/other", `{"item":1}`),
		post("c-1", "/create?x=1", `{"item":1}`), post("c-1", "/create", `{"item":1}`, "a key of its own"),
	} {
		require.Equal(t, http.StatusCreated, a.status, a.body)
		require.False(t, a.replayed())
	}
	requireProblem(t, post("c-1", "/issued", `{}`), http.StatusBadRequest, "key-missing")
	requireProblem(t, post("c-1", "/create", `{}`, ""), http.StatusBadRequest, "key-invalid")
	_, err = s.pool.Exec(t.Context(), `UPDATE idempotency.records SET expires_at = statement_timestamp() - interval '1 s' WHERE operation = 'request.equal'`)
	require.NoError(t, err)
	late := post("c-1", "/create", `{"item":1}`)
	require.False(t, late.replayed(), "counted from the first, not from the last")
	require.Equal(t, http.StatusCreated, late.status)

	// One path, two operations.
	require.False(t, post("c-1", "/as?as=order.create", `{}`).replayed())
	require.True(t, post("c-1", "/as?as=order.create", `{}`).replayed())

	var config *idempotency.ConfigError
	for _, name := range []string{"nobody.knows", "order.create", "order.issued"} {
		_, err := idempotencyhttp.New(s.runner, who, &idempotencyhttp.Config{Derived: name})
		require.ErrorAs(t, err, &config, name)
		require.Equal(t, "Config.Derived", config.Field)
	}
}
