package main

import (
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgonce/pgonce/idempotencyhttp"
)

const coffee = `{"customer":"c-7","sku":"coffee","quantity":2}`

func TestPostOrder_RetryIsTheSameBytes(t *testing.T) {
	t.Parallel()
	s := newShop(t, false, noThinking)
	// What JSON, HTML and time zones could change between memory and the record.
	body := `{"customer":"Zoë <&> \u2028 \ud83d\ude00 \"q\"","sku":"coffee","quantity":2,"coupon":"WELCOME"}`
	first := s.post(t, "k1", body)
	require.Equal(t, http.StatusCreated, first.status, first.body)
	require.False(t, first.replayed())
	require.Equal(t, "application/json", first.header.Get("Content-Type"))
	for _, key := range []string{"k1", `"k1"`} {
		again := s.post(t, key, body)
		require.Equal(t, http.StatusCreated, again.status)
		require.True(t, again.replayed())
		require.Equal(t, first.body, again.body)
		require.Equal(t, first.header.Get("Location"), again.header.Get("Location"))
	}
	require.Equal(t, first.body, s.get(t, first.header.Get("Location")).body)
	require.Equal(t, 1, s.orders(t, "k1"))
	require.JSONEq(t, `{"sku":"coffee","quantity":998}`, s.get(t, "/stock/coffee").body)
}

func TestPostOrder_DoubleClickIsOneOrder(t *testing.T) {
	t.Parallel()
	s := newShop(t, false, func(string) time.Duration { return 30 * time.Millisecond })
	const clicks = 12
	answers, errs := make([]answer, clicks), make([]error, clicks)
	var group sync.WaitGroup
	for i := range clicks {
		group.Go(func() {
			answers[i], errs[i] = s.try(t.Context(), http.MethodPost, "/orders", keyHeader("k1"), strings.NewReader(coffee))
		})
	}
	group.Wait()
	fresh := 0
	bodies := map[string]bool{}
	for i, a := range answers {
		require.NoError(t, errs[i])
		if a.status == http.StatusConflict { // a slow machine
			requireProblem(t, a, http.StatusConflict, "in-progress")
			continue
		}
		require.Equal(t, http.StatusCreated, a.status, a.body)
		bodies[a.body] = true
		if !a.replayed() {
			fresh++
		}
	}
	require.Equal(t, 1, fresh)
	require.Len(t, bodies, 1)
	require.Equal(t, 1, s.orders(t, "k1"))
	require.JSONEq(t, `{"sku":"coffee","quantity":998}`, s.get(t, "/stock/coffee").body)
}

func TestPostOrder_SlowFirstRequestIsInProgress(t *testing.T) {
	t.Parallel()
	s := newShop(t, false, func(string) time.Duration { return 2 * time.Second })
	var first answer
	var err error
	var group sync.WaitGroup
	group.Go(func() {
		first, err = s.try(t.Context(), http.MethodPost, "/orders", keyHeader("k1"), strings.NewReader(coffee))
	})
	s.eventually(t, 1, thinking)
	second := s.post(t, "k1", coffee)
	requireProblem(t, second, http.StatusConflict, "in-progress")
	require.Equal(t, "1", second.header.Get("Retry-After"))
	group.Wait()
	require.NoError(t, err)
	require.Equal(t, http.StatusCreated, first.status)
	require.Equal(t, first.body, s.post(t, "k1", coffee).body)
}

func TestPostOrder_OutOfStockIsReplayedAlsoWhenThereIsStockAgain(t *testing.T) {
	t.Parallel()
	s := newShop(t, false, noThinking)
	body := `{"customer":"c-7","sku":"unicorn","quantity":1}`
	first := s.post(t, "k1", body)
	requireProblem(t, first, http.StatusBadRequest, "out-of-stock")
	require.False(t, first.replayed())
	_, err := s.pool.Exec(t.Context(), `UPDATE demo.stock SET quantity = 5 WHERE sku = 'unicorn'`)
	require.NoError(t, err)
	again := s.post(t, "k1", body)
	require.True(t, again.replayed())
	require.Equal(t, first.status, again.status)
	require.Equal(t, first.body, again.body)
	require.Equal(t, first.header.Get("Content-Type"), again.header.Get("Content-Type"))
	require.Zero(t, s.orders(t, "k1"))
	require.Equal(t, http.StatusCreated, s.post(t, "k2", body).status)
}

func TestPostOrder_StockNeverGoesBelowZero(t *testing.T) {
	t.Parallel()
	s := newShop(t, false, noThinking)
	_, err := s.pool.Exec(t.Context(), `UPDATE demo.stock SET quantity = 3 WHERE sku = 'unicorn'`)
	require.NoError(t, err)
	const customers = 8
	answers, errs := make([]answer, customers), make([]error, customers)
	var group sync.WaitGroup
	for i := range customers {
		group.Go(func() {
			answers[i], errs[i] = s.try(t.Context(), http.MethodPost, "/orders", keyHeader(fmt.Sprint("k", i)),
				strings.NewReader(`{"customer":"c-7","sku":"unicorn","quantity":1}`))
		})
	}
	group.Wait()
	created := 0
	for i, a := range answers {
		require.NoError(t, errs[i])
		if a.status == http.StatusCreated {
			created++
			continue
		}
		requireProblem(t, a, http.StatusBadRequest, "out-of-stock")
	}
	require.Equal(t, 3, created)
	require.JSONEq(t, `{"sku":"unicorn","quantity":0}`, s.get(t, "/stock/unicorn").body)
}

func TestPostOrder_CouponWorksOnce(t *testing.T) {
	t.Parallel()
	s := newShop(t, false, noThinking)
	body := `{"customer":"c-7","sku":"tea","quantity":1,"coupon":"WELCOME"}`
	first := s.post(t, "k1", body)
	require.Equal(t, http.StatusCreated, first.status)
	second := s.post(t, "k2", body)
	requireProblem(t, second, http.StatusBadRequest, "coupon-used")
	require.Equal(t, second.body, s.post(t, "k2", body).body)
	require.Equal(t, first.body, s.post(t, "k1", body).body, "a retry of the order that has it is none the worse")
	require.Zero(t, s.orders(t, "k2"))
	require.JSONEq(t, `{"sku":"tea","quantity":999}`, s.get(t, "/stock/tea").body)
	requireProblem(t, s.post(t, "k3", strings.Replace(body, "WELCOME", "NOPE", 1)), http.StatusBadRequest, "unknown-coupon")
	requireProblem(t, s.post(t, "k4", strings.Replace(body, "tea", "gold", 1)), http.StatusBadRequest, "unknown-sku")
}

func TestPostOrder_OtherBodyIsMismatch(t *testing.T) {
	t.Parallel()
	s := newShop(t, false, noThinking)
	first := s.post(t, "k1", coffee)
	requireProblem(t, s.post(t, "k1", coffee+" "), http.StatusUnprocessableEntity, "mismatch")
	require.Equal(t, first.body, s.post(t, "k1", coffee).body)
	require.Equal(t, 1, s.orders(t, "k1"))
}

func TestPostOrder_DroppedResultIsGone(t *testing.T) {
	t.Parallel()
	s := newShop(t, false, noThinking)
	s.post(t, "k1", coffee)
	_, err := s.pool.Exec(t.Context(), `UPDATE idempotency.records SET result = NULL WHERE key = 'k1'`)
	require.NoError(t, err)
	requireProblem(t, s.post(t, "k1", coffee), http.StatusGone, "result-gone")
	require.Equal(t, 1, s.orders(t, "k1"))
}

func TestPostOrder_TooLargeABody(t *testing.T) {
	t.Parallel()
	s := newShop(t, false, noThinking)
	large := `{"customer":"` + strings.Repeat("x", maxBody) + `"}`
	for _, body := range []io.Reader{
		strings.NewReader(large),                 // Content-Length tells
		io.MultiReader(strings.NewReader(large)), // chunked: net/http does not see the length
	} {
		requireProblem(t, s.do(t, http.MethodPost, "/orders", keyHeader("k1"), body), http.StatusRequestEntityTooLarge, "body-too-large")
	}
	require.Equal(t, http.StatusCreated, s.post(t, "k1", coffee).status, "the key is as good as new")
}

func TestPostOrder_InvalidRequestsNameFieldAndRule(t *testing.T) {
	t.Parallel()
	s := newShop(t, false, noThinking)
	for name, tt := range map[string]struct {
		header      http.Header
		body        string
		field, rule string
		kind        string
	}{
		"NoKey":          {http.Header{}, coffee, idempotencyhttp.HeaderKey, "must be set", "key-missing"},
		"TwoKeys":        {http.Header{idempotencyhttp.HeaderKey: {"a", "b"}}, coffee, idempotencyhttp.HeaderKey, "must be set once", "key-invalid"},
		"EmptyKey":       {keyHeader(""), coffee, idempotencyhttp.HeaderKey, "must not be empty", "key-invalid"},
		"EmptyQuotedKey": {keyHeader(`""`), coffee, idempotencyhttp.HeaderKey, "must not be empty", "key-invalid"},
		"BlankQuotedKey": {keyHeader(`"  "`), coffee, idempotencyhttp.HeaderKey, "must not be blank", "key-invalid"},
		"OpenQuote":      {keyHeader(`"k1`), coffee, idempotencyhttp.HeaderKey, "must end with the quote it begins with", "key-invalid"},
		"LongKey":        {keyHeader(strings.Repeat("k", 256)), coffee, idempotencyhttp.HeaderKey, "must be at most 255 bytes", "key-invalid"},
		"KeyNotASCII":    {keyHeader("schlüssel"), coffee, idempotencyhttp.HeaderKey, "must be printable ASCII", "key-invalid"},
		"NoBody":         {keyHeader("NoBody"), ``, "body", "must be a JSON object", "invalid-request"},
		"NoJSON":         {keyHeader("NoJSON"), `order!`, "body", "must be a JSON object", "invalid-request"},
		"Array":          {keyHeader("Array"), `[]`, "body", "must be a JSON object", "invalid-request"},
		"TwoObjects":     {keyHeader("TwoObjects"), coffee + coffee, "body", "nothing behind it", "invalid-request"},
		"UnknownMember":  {keyHeader("UnknownMember"), `{"customer":"c-7","sku":"tea","quantity":1,"price":0}`, "body", "nothing else", "invalid-request"},
		"WrongType":      {keyHeader("WrongType"), `{"customer":1}`, "customer", "must be a string", "invalid-request"},
		"Fraction":       {keyHeader("Fraction"), `{"customer":"c-7","sku":"tea","quantity":1.5}`, "quantity", "must be an integer", "invalid-request"},
		"NoCustomer":     {keyHeader("NoCustomer"), `{"sku":"tea","quantity":1}`, "customer", "must be 1 to 100 bytes", "invalid-request"},
		"NoSKU":          {keyHeader("NoSKU"), `{"customer":"c-7","quantity":1}`, "sku", "must be 1 to 100 bytes", "invalid-request"},
		"NoQuantity":     {keyHeader("NoQuantity"), `{"customer":"c-7","sku":"tea"}`, "quantity", "must be from 1 to 1000", "invalid-request"},
		"Negative":       {keyHeader("Negative"), `{"customer":"c-7","sku":"tea","quantity":-1}`, "quantity", "must be from 1 to 1000", "invalid-request"},
		"NUL":            {keyHeader("NUL"), `{"customer":"a\u0000","sku":"tea","quantity":1}`, "customer", "without control characters", "invalid-request"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			p := requireProblem(t, s.do(t, http.MethodPost, "/orders", tt.header, strings.NewReader(tt.body)),
				http.StatusBadRequest, tt.kind)
			require.Equal(t, tt.field, p.Field)
			require.Contains(t, p.Rule, tt.rule)
		})
	}
}

func TestRoutes_EverythingElseIsAProblemToo(t *testing.T) {
	t.Parallel()
	s := newShop(t, false, noThinking)
	for _, path := range []string{"/", "/nope", "/orders/1", "/orders/x", "/stock/nope", "/stock/%00", "/stock/%ff"} {
		requireProblem(t, s.get(t, path), http.StatusNotFound, "not-found")
	}
	for _, path := range []string{"/orders", "/orders/1", "/stock/tea"} {
		a := s.do(t, http.MethodDelete, path, http.Header{}, nil)
		requireProblem(t, a, http.StatusMethodNotAllowed, "method-not-allowed")
		require.NotEmpty(t, a.header.Get("Allow"))
	}
}

// sendRaw sends a request and returns the connection, for the test to close.
func (s *shop) sendRaw(t *testing.T, key, body string) net.Conn {
	t.Helper()
	conn, err := new(net.Dialer).DialContext(t.Context(), "tcp", s.instances[0].base.Host)
	require.NoError(t, err)
	_, err = fmt.Fprintf(conn, "POST /orders HTTP/1.1\r\nHost: x\r\n%s: %s\r\nContent-Length: %d\r\n\r\n%s", idempotencyhttp.HeaderKey, key, len(body), body)
	require.NoError(t, err)
	return conn
}

func TestPostOrder_ClientHangsUpInTheMiddle(t *testing.T) {
	t.Parallel()
	first := make(chan time.Duration, 1)
	first <- time.Minute
	s := newShop(t, false, func(string) time.Duration {
		select {
		case d := <-first:
			return d
		default:
			return 0
		}
	})
	conn := s.sendRaw(t, "k1", coffee)
	s.eventually(t, 1, thinking)
	require.NoError(t, conn.Close())
	s.eventually(t, 0, thinking)
	require.Zero(t, s.orders(t, "k1"))

	retry := s.post(t, "k1", coffee)
	require.Equal(t, http.StatusCreated, retry.status, retry.body)
	require.False(t, retry.replayed(), "the first was rolled back, record and all")
	again := s.post(t, "k1", coffee)
	require.True(t, again.replayed())
	require.Equal(t, retry.body, again.body)
	require.Equal(t, 1, s.orders(t, "k1"))
	require.JSONEq(t, `{"sku":"coffee","quantity":998}`, s.get(t, "/stock/coffee").body)
	s.close()
	require.Empty(t, s.log.String(), "nobody has to know")
}

func TestPostOrder_ClientHangsUpBeforeItReadsTheAnswer(t *testing.T) {
	t.Parallel()
	s := newShop(t, false, noThinking)
	conn := s.sendRaw(t, "k1", coffee)
	s.eventually(t, 1, `SELECT count(*) FROM demo.orders WHERE idempotency_key = 'k1'`)
	require.NoError(t, conn.Close())

	retry := s.post(t, "k1", coffee)
	require.Equal(t, http.StatusCreated, retry.status, retry.body)
	require.True(t, retry.replayed())
	require.Equal(t, 1, s.orders(t, "k1"))
}

func TestPostOrder_OurOwnFaultsTellNothingOfOurInside(t *testing.T) {
	t.Parallel()
	s := newShop(t, false, noThinking)
	_, err := s.pool.Exec(t.Context(), `ALTER TABLE demo.orders RENAME TO secret_name`)
	require.NoError(t, err)
	a := s.post(t, "k1", coffee)
	requireProblem(t, a, http.StatusInternalServerError, "internal")
	requireProblem(t, s.get(t, "/orders/1"), http.StatusInternalServerError, "internal")
	require.NotContains(t, a.body, "demo.orders")
	_, err = s.pool.Exec(t.Context(), `ALTER TABLE demo.secret_name RENAME TO orders`)
	require.NoError(t, err)
	require.Equal(t, http.StatusCreated, s.post(t, "k1", coffee).status)
	s.close()
	require.Contains(t, s.log.String(), "demo.orders", "but the operator is told")
	require.NotContains(t, s.log.String(), "k1")
}
