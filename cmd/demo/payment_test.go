package main

import (
	"bytes"
	"context"
	"net/http"
	"net/http/httptest"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/pgonce/pgonce/idempotency"
	"github.com/pgonce/pgonce/idempotencyhttp"
)

func (s *shop) pay(t *testing.T, key, order, card string) answer {
	t.Helper()
	began := time.Now()
	a, err := s.payOnce(t.Context(), key, order, card)
	require.NoError(t, err)
	if !a.settled() {
		require.Greater(t, time.Since(began), s.instances[0].service.payments.operation().Lease, "no lease was lost: %s", a.body)
		a, err = s.payUntilSettled(t.Context(), key, order, card)
		require.NoError(t, err)
	}
	return a
}

func (s *shop) payOnce(ctx context.Context, key, order, card string) (answer, error) {
	return s.try(ctx, http.MethodPost, order+"/pay", keyHeader(key), strings.NewReader(`{"card":"`+card+`"}`))
}

// settled reports whether a payment's answer says how it ended.
func (a answer) settled() bool {
	return a.status != 0 && a.status != http.StatusServiceUnavailable && !strings.Contains(a.body, typeOf("in-progress"))
}

// payUntilSettled pays as a client does: with the same key until it is told how the payment ended. A slow machine loses leases.
func (s *shop) payUntilSettled(ctx context.Context, key, order, card string) (a answer, err error) {
	for err == nil && !a.settled() {
		a, err = s.payOnce(ctx, key, order, card)
	}
	return a, err
}

func orderID(t *testing.T, location string) int64 {
	t.Helper()
	id, err := strconv.ParseInt(strings.TrimPrefix(location, "/orders/"), 10, 64)
	require.NoError(t, err)
	return id
}

func TestPay_ChargesOnce(t *testing.T) {
	t.Parallel()
	s := newShop(t, false, noThinking)
	order := s.post(t, "k", coffee).header.Get("Location")
	id := orderID(t, order)
	var group sync.WaitGroup
	for range 10 {
		group.Go(func() {
			a, err := s.payUntilSettled(t.Context(), "p1", order, "4242")
			if err != nil || a.status != http.StatusOK {
				t.Errorf("%v %d %s", err, a.status, a.body)
			}
		})
	}
	group.Wait()
	again := s.pay(t, "p1", order, "4242")
	require.Equal(t, http.StatusOK, again.status, again.body)
	require.True(t, again.replayed())
	require.JSONEq(t, `{"order":`+strconv.FormatInt(id, 10)+`,"charge":"ch_1","status":"paid"}`, again.body)
	require.Contains(t, s.get(t, order).body, `"status":"paid"`)
	require.Equal(t, 1, s.gateway.of(id))

	requireProblem(t, s.pay(t, "p1", order, "other"), http.StatusUnprocessableEntity, "mismatch")
	requireProblem(t, s.pay(t, "p2", order, "4242"), http.StatusConflict, "not-payable")
	requireProblem(t, s.pay(t, "p3", "/orders/4711", "4242"), http.StatusNotFound, "not-found")
	requireProblem(t, s.pay(t, "p4", order, ""), http.StatusBadRequest, "invalid-request")
	requireProblem(t, s.do(t, http.MethodPost, order+"/pay", http.Header{}, strings.NewReader(`{}`)), http.StatusBadRequest, "key-missing")
	require.Equal(t, 1, s.gateway.of(id))
}

func TestPay_RefusedIsReplayedAndAwayIsTriedAgain(t *testing.T) {
	t.Parallel()
	s := newShop(t, false, noThinking)
	order := s.post(t, "k", coffee).header.Get("Location")
	for range 2 {
		requireProblem(t, s.pay(t, "refused", order, cardRefused), http.StatusPaymentRequired, "card-refused")
		requireProblem(t, s.pay(t, "away", order, cardAway), http.StatusBadGateway, "gateway")
	}
	require.Equal(t, http.StatusOK, s.pay(t, "works", order, "4242").status)
	require.Equal(t, 1, s.gateway.of(orderID(t, order)))
}

// Two keys are two payments, but not of one order.
func TestPay_TwoKeysDoNotPayOneOrderTwice(t *testing.T) {
	t.Parallel()
	s := newShop(t, false, noThinking)
	order := s.post(t, "k", coffee).header.Get("Location")
	const keys = 6
	answers := make([]answer, keys)
	var group sync.WaitGroup
	for i := range keys {
		group.Go(func() {
			var err error
			answers[i], err = s.payUntilSettled(t.Context(), "p"+strconv.Itoa(i), order, "slow")
			if err != nil {
				t.Error(err)
			}
		})
	}
	group.Wait()
	paid := 0
	for _, a := range answers {
		if a.status == http.StatusOK {
			paid++
			continue
		}
		requireProblem(t, a, http.StatusConflict, "not-payable")
	}
	require.Equal(t, 1, paid)
	require.Equal(t, 1, s.gateway.of(orderID(t, order)))
	require.Equal(t, 1, s.number(t, `SELECT count(*) FROM demo.orders WHERE status = 'paid' AND charge = 'ch_1' AND paying IS NULL`))
}

// The service dies behind the charge. The next request finds out, and pays nothing twice.
func TestPay_AfterACrash(t *testing.T) {
	t.Parallel()
	for name, test := range map[string]struct {
		charged bool
		status  int
		charges int
	}{
		"behind the charge":      {true, http.StatusOK, 1},
		"in front of the charge": {false, http.StatusPaymentRequired, 0},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := newShop(t, false, noThinking)
			order := s.post(t, "k", coffee).header.Get("Location")
			id := orderID(t, order)
			op := s.instances[0].service.payments.operation().WithDefaults()
			key, err := op.Key(idempotency.SingleTenant, "p")
			require.NoError(t, err)
			body := []byte(`{"card":"4242"}`)
			fingerprint, err := idempotencyhttp.FingerprintRequest(httptest.NewRequestWithContext(t.Context(), http.MethodPost, order+"/pay", bytes.NewReader(body)), body)
			require.NoError(t, err)
			// What a dead service leaves behind.
			a, err := idempotency.NewStore(pgx.QueryExecModeCacheStatement).AcquireLease(t.Context(), s.pool, &idempotency.LeaseRequest{
				Request: idempotency.Request{
					Key: key, Fingerprint: fingerprint,
				},
				AttemptToken: idempotency.NewAttemptToken(), Lease: op.Lease, Takeover: op.Takeover,
			})
			require.NoError(t, err)
			_, err = s.instances[0].service.payments.claim(t.Context(), id, a.Record.DownstreamKey(chargeStep))
			require.NoError(t, err)
			requireProblem(t, s.pay(t, "another", order, "4242"), http.StatusConflict, "not-payable")
			if test.charged {
				s.gateway.charge(a.Record.DownstreamKey(chargeStep), charge{Order: id, Cents: 2000, Card: "4242"})
			}
			for range 2 {
				got := s.pay(t, "p", order, "4242") // waits for the lease's end
				require.Equal(t, test.status, got.status, got.body)
			}
			require.Equal(t, test.charges, s.gateway.of(id))
			require.Zero(t, s.number(t, `SELECT count(*) FROM demo.orders WHERE paying IS NOT NULL`))
			if !test.charged {
				require.Equal(t, http.StatusOK, s.pay(t, "anew", order, "4242").status)
				require.Equal(t, 1, s.gateway.of(id))
			}
			_, voided := s.gateway.charge(a.Record.DownstreamKey(chargeStep), charge{Order: id})
			require.Equal(t, !test.charged, voided, "the dead service's request comes late")
		})
	}
}
