package edgetest

import (
	"context"
	"io"
	"net"
	"net/http"
	"net/url"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"
)

const order1 = `{"customer":"c-7","sku":"coffee","quantity":2}`

// plainly sends one request, and reads its answer.
func plainly(t *testing.T, method, to, key, body string) answer {
	t.Helper()
	base := &http.Transport{DialContext: (&net.Dialer{}).DialContext}
	defer base.CloseIdleConnections()
	req, err := http.NewRequestWithContext(t.Context(), method, to, strings.NewReader(body))
	require.NoError(t, err)
	req.Header.Set("Content-Type", "application/json")
	req.Header.Set("Idempotency-Key", key)
	resp, err := (&http.Client{Transport: base}).Do(req)
	require.NoError(t, err)
	text, err := io.ReadAll(resp.Body)
	require.NoError(t, err)
	require.NoError(t, resp.Body.Close())
	return answer{
		Status: resp.StatusCode, Replayed: resp.Header.Get("Idempotent-Replayed") == "true", RetryAfter: resp.Header.Get("Retry-After"), Text: string(text),
	}
}

// Answers that no client gets every day are as the document has them too.
func TestOpenAPI_HasTheRareAnswers(t *testing.T) {
	t.Parallel()
	d := startDemo(t, "-strict") // no front, which would not know what we do to the records
	p := newProxy(t, d)
	post := func(path, key, body string) answer {
		t.Helper()
		return plainly(t, http.MethodPost, p.url+path, key, body)
	}
	expect := func(a answer, status int, kind string) {
		t.Helper()
		require.Equal(t, status, a.Status, a.Text)
		require.Equal(t, "urn:pgonce:"+kind, a.problem(t))
	}
	require.Equal(t, http.StatusCreated, post("/orders", "first", order1).Status)
	expect(post("/orders", "large", strings.Repeat(" ", 2<<20)), http.StatusRequestEntityTooLarge, "problem:body-too-large")
	expect(post("/orders", "broken", `{`), http.StatusBadRequest, "problem:invalid-request")
	expect(post("/orders", "", order1), http.StatusBadRequest, "problem:key-invalid")
	expect(post("/orders", "unknown", strings.Replace(order1, "coffee", "gold", 1)), http.StatusBadRequest, "demo:unknown-sku")
	expect(post("/orders/1/pay", "refused", `{"card":"refused"}`), http.StatusPaymentRequired, "demo:card-refused")
	require.True(t, post("/orders/1/pay", "refused", `{"card":"refused"}`).Replayed)
	away := post("/orders/1/pay", "away", `{"card":"away"}`)
	expect(away, http.StatusBadGateway, "demo:gateway")
	require.Equal(t, "1", away.RetryAfter)
	expect(post("/orders/4711/pay", "nobody's", `{"card":"4242"}`), http.StatusNotFound, "demo:not-found")
	require.Equal(t, http.StatusOK, post("/orders/1/pay", "paid", `{"card":"4242"}`).Status)
	expect(post("/orders/1/pay", "again", `{"card":"4242"}`), http.StatusConflict, "demo:not-payable")
	expect(plainly(t, http.MethodGet, p.url+"/stock/gold", "-", ""), http.StatusNotFound, "demo:not-found")
	require.Equal(t, http.StatusOK, plainly(t, http.MethodGet, p.url+"/stock/coffee", "-", "").Status)
	require.Equal(t, http.StatusOK, plainly(t, http.MethodGet, p.url+"/orders/1", "-", "").Status)
	require.Equal(t, http.StatusOK, plainly(t, http.MethodGet, p.url+"/openapi.yaml", "-", "").Status)
	expect(plainly(t, http.MethodDelete, p.url+"/orders/1", "-", ""), http.StatusMethodNotAllowed, "demo:method-not-allowed")

	sql(t, d.database, `UPDATE idempotency.records SET result_type = 'bytes/1' WHERE key = 'first'`)
	expect(post("/orders", "first", order1), http.StatusInternalServerError, "problem:result-unreadable")
	sql(t, d.database, `UPDATE idempotency.records SET result = NULL WHERE key = 'first'`)
	expect(post("/orders", "first", order1), http.StatusGone, "problem:result-gone")
	sql(t, d.database, `UPDATE idempotency.records SET state = 'FAILED', result_type = NULL, error_code = 'OPERATOR', error_message = 'by hand' WHERE key = 'first'`)
	expect(post("/orders", "first", order1), http.StatusInternalServerError, "problem:failed")
	sql(t, d.database, `ALTER TABLE demo.orders RENAME TO elsewhere`)
	expect(post("/orders", "lost", order1), http.StatusInternalServerError, "problem:internal")
	sql(t, d.database, `ALTER TABLE demo.elsewhere RENAME TO orders`)

	// PostgreSQL lets nobody in.
	own, err := url.Parse(d.database)
	require.NoError(t, err)
	name := strings.TrimPrefix(own.Path, "/")
	own.Path = "/postgres"
	lock := func(open string) {
		sql(t, own.String(), `ALTER DATABASE `+pgx.Identifier{name}.Sanitize()+` ALLOW_CONNECTIONS `+open)
	}
	lock("false")
	sql(t, own.String(), `SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = '`+name+`'`)
	closed := post("/orders", "away", order1)
	lock("true")
	expect(closed, http.StatusServiceUnavailable, "problem:unavailable")
	require.Equal(t, "1", closed.RetryAfter)
	require.Eventually(t, func() bool { return post("/orders", "away", order1).Status == http.StatusCreated }, time.Minute, 10*time.Millisecond)

	p.requireCompared(t, "createOrder 400", "createOrder 410", "createOrder 413", "createOrder 500", "createOrder 503", "payOrder 200",
		"payOrder 402", "payOrder 404", "payOrder 409", "payOrder 502", "getStock 200", "getStock 404", "getOrder 200", "getDocument 200")
}

// sql runs a statement.
func sql(t *testing.T, database, statement string) {
	t.Helper()
	conn, err := pgx.Connect(t.Context(), database)
	require.NoError(t, err)
	defer func() { require.NoError(t, conn.Close(context.WithoutCancel(t.Context()))) }()
	_, err = conn.Exec(t.Context(), statement)
	require.NoError(t, err)
}
