package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"io"
	"net/http"
	"strconv"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgonce/pgonce/idempotency"
	"github.com/pgonce/pgonce/idempotencyhttp"
)

// paymentRequest is the body of POST /orders/{id}/pay.
type paymentRequest struct {
	Card string `json:"card"`
}

// payment is the answer.
type payment struct {
	Order  int64  `json:"order"`
	Charge string `json:"charge"`
	Status string `json:"status"`
}

// pricePerPiece is the same for everything we sell.
const pricePerPiece = 1000

// chargeStep names the one call to the gateway: its downstream key belongs to it.
const chargeStep = "charge"

// The codes of payments that were refused.
const (
	codeCardRefused  = "card_refused"
	codeUnknownOrder = "unknown_order"
	codeNotPayable   = "not_payable"
	codeNotCharged   = "not_charged"
)

// payments takes money. Nothing can roll a charge back, so the operation is leased: the record says that it runs before the
// gateway is asked, and when the shop dies in between, the gateway is asked what became of it.
type payments struct {
	gateway *gatewayClient
	pool    *pgxpool.Pool
}

// operation declares what a key of a payment is for.
func (p *payments) operation() idempotency.Operation {
	return idempotency.Operation{Name: "payment.capture", Wait: 5 * time.Second, Lease: 2 * time.Second, Resolver: p}
}

// charge asks the gateway for an order's money, once for each downstream key.
func (p *payments) charge(ctx context.Context, downstreamKey string, id int64, card string) (charge, error) {
	cents, err := p.claim(ctx, id, downstreamKey)
	if err != nil {
		return charge{}, err
	}
	done, err := p.gateway.charge(ctx, downstreamKey, charge{Order: id, Cents: cents, Card: card})
	if errors.Is(err, errCardRefused) || errors.Is(err, errAway) { // any other error may be that of a charge
		err = errors.Join(err, release(context.WithoutCancel(ctx), p.pool, downstreamKey))
	}
	if errors.Is(err, errCardRefused) {
		err = &refusal{codeCardRefused, errCardRefused.Error()}
	}
	return done, err
}

// claim makes the order this payment's, and tells what is to be paid. A key makes one payment be made once, and no more: that
// another key does not pay the same order is the business's own rule, and it must hold before the gateway is asked.
func (p *payments) claim(ctx context.Context, id int64, downstreamKey string) (cents int64, err error) {
	err = p.pool.QueryRow(ctx, `
		UPDATE demo.orders SET paying = $2 WHERE id = $1 AND status = 'created' AND coalesce(paying, $2) = $2
		RETURNING quantity * $3::bigint`, id, downstreamKey, pricePerPiece).Scan(&cents)
	if !errors.Is(err, pgx.ErrNoRows) {
		return cents, err
	}
	var status string
	err = p.pool.QueryRow(ctx, `SELECT status FROM demo.orders WHERE id = $1`, id).Scan(&status)
	switch {
	case errors.Is(err, pgx.ErrNoRows):
		err = &refusal{codeUnknownOrder, "there is no such order"}
	case err == nil && status == "created":
		err = &refusal{codeNotPayable, "the order is being paid with another key"}
	case err == nil:
		err = &refusal{codeNotPayable, "the order is " + status}
	}
	return 0, err
}

// execer is a pool or a transaction.
type execer interface {
	Exec(ctx context.Context, sql string, args ...any) (pgconn.CommandTag, error)
}

// release lets others pay: this payment has charged nothing, and will not.
func release(ctx context.Context, on execer, downstreamKey string) error {
	_, err := on.Exec(ctx, `UPDATE demo.orders SET paying = NULL WHERE paying = $1`, downstreamKey)
	return err
}

// book writes down what was charged.
func (*payments) book(ctx context.Context, tx pgx.Tx, order int64, charge string) error {
	if _, err := statuses.Move(ctx, tx, "paid", order); err != nil {
		return err
	}
	_, err := tx.Exec(ctx, `UPDATE demo.orders SET charge = $2, paying = NULL WHERE id = $1`, order, charge)
	return err
}

// Ask finds out what became of a payment whose service died. What it finds is the answer that the service would have given.
func (p *payments) Ask(ctx context.Context, r idempotency.Record, _ []idempotency.Step) (found idempotency.Resolution, err error) {
	key := r.DownstreamKey(chargeStep)
	done, err := p.gateway.find(ctx, key)
	switch {
	case errors.Is(err, errNotCharged):
		// Not yet, maybe: the request of the one who died may still be on its way. After this it comes too late.
		if err := p.gateway.void(ctx, key); err != nil {
			return found, err
		}
		found = idempotency.Resolution{Outcome: idempotency.OutcomeFailed, Code: codeNotCharged, Message: "nothing was charged: pay again, with a new key"}
		refused := refusalProblem(found.Code, found.Message)
		header := http.Header{"Content-Type": {"application/problem+json"}, "Cache-Control": {"no-store"}}
		found.Result, found.ResultType, err = idempotencyhttp.Response{Status: refused.Status, Header: header, Body: jsonLine(refused)}.Result()
	case err == nil:
		found.Outcome = idempotency.OutcomeSucceeded
		header := http.Header{"Content-Type": {"application/json"}}
		found.Result, found.ResultType, err = idempotencyhttp.Response{Status: http.StatusOK, Header: header, Body: jsonLine(paid(done))}.Result()
	}
	return found, err
}

// Commit books what Ask has found.
func (p *payments) Commit(ctx context.Context, tx pgx.Tx, r idempotency.Record, found idempotency.Resolution) error {
	if found.Outcome != idempotency.OutcomeSucceeded {
		return release(ctx, tx, r.DownstreamKey(chargeStep))
	}
	var response idempotencyhttp.Response
	var paid payment
	err := response.DecodeResult(found.ResultType, found.Result)
	if err == nil {
		err = json.Unmarshal(response.Body, &paid)
	}
	if err != nil {
		return err
	}
	return p.book(ctx, tx, paid.Order, paid.Charge)
}

func paid(done charge) payment { return payment{Order: done.Order, Charge: done.ID, Status: "paid"} }

// postPayment pays an order. The middleware has recorded that it runs, and what it answers is recorded with what it leaves to be
// committed; in between there is no transaction, since nothing could roll back what the gateway does.
func (s *service) postPayment(w http.ResponseWriter, r *http.Request) {
	id, err := strconv.ParseInt(r.PathValue("id"), 10, 64)
	if err != nil {
		notFound("Order ids are numbers.").Write(w)
		return
	}
	lease, leased := idempotencyhttp.LeaseFromContext(r.Context())
	in, err := readPayment(w, r)
	if err == nil && !leased {
		err = errors.New("the route is not leased")
	}
	if err != nil {
		s.fail(w, r, idempotency.Key{}, err)
		return
	}
	done, err := s.payments.charge(r.Context(), lease.DownstreamKey(chargeStep), id, in.Card)
	if err == nil {
		err = idempotencyhttp.OnCommit(r.Context(), func(ctx context.Context, tx pgx.Tx) error {
			err := s.payments.book(ctx, tx, done.Order, done.ID)
			if errors.Is(err, idempotency.ErrTransition) {
				return problemOf(err) // as an answer
			}
			return err
		})
	}
	if err != nil {
		s.fail(w, r, lease.Record().Key, err)
		return
	}
	w.Header().Set("Content-Type", "application/json")
	writeJSON(w, http.StatusOK, paid(done))
}

func readPayment(w http.ResponseWriter, r *http.Request) (in paymentRequest, err error) {
	body, err := readBody(w, r)
	if err != nil {
		return in, err
	}
	decoder := json.NewDecoder(bytes.NewReader(body))
	decoder.DisallowUnknownFields()
	if err := decoder.Decode(&in); err != nil || validText("card", in.Card, 1) != nil {
		return in, invalid("body", `must be a JSON object with the card, such as {"card":"4242"}`)
	}
	if _, err := decoder.Token(); !errors.Is(err, io.EOF) {
		return in, invalid("body", "must be one JSON object and nothing behind it")
	}
	return in, nil
}
