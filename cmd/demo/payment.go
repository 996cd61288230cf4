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
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgonce/pgonce/idempotency"
	"github.com/pgonce/pgonce/idempotencyhttp"
	"github.com/pgonce/pgonce/txn"
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

func (p *payments) pay(ctx context.Context, runner *txn.Runner, req idempotency.Request, id int64, card string) (txn.Result[payment], error) {
	return txn.WithLease(ctx, runner, req, func(ctx context.Context, l *txn.Lease) (charge, error) {
		cents, err := p.due(ctx, id)
		if err != nil {
			return charge{}, err
		}
		done, err := p.gateway.charge(ctx, l.DownstreamKey(chargeStep), charge{Order: id, Cents: cents, Card: card})
		if errors.Is(err, errCardRefused) {
			err = txn.Final(codeCardRefused, err)
		}
		return done, err
	}, func(ctx context.Context, tx pgx.Tx, done charge) (payment, error) {
		return p.book(ctx, tx, done)
	})
}

// due is what is to be paid.
func (p *payments) due(ctx context.Context, id int64) (cents int64, err error) {
	var status string
	err = p.pool.QueryRow(ctx, `SELECT status, quantity * $2::bigint FROM demo.orders WHERE id = $1`, id, pricePerPiece).Scan(&status, &cents)
	switch {
	case errors.Is(err, pgx.ErrNoRows):
		err = txn.Final(codeUnknownOrder, errors.New("there is no such order"))
	case err == nil && status != "created":
		err = txn.Final(codeNotPayable, errors.New("the order is "+status))
	}
	return cents, err
}

// book writes down what was charged.
func (*payments) book(ctx context.Context, tx pgx.Tx, done charge) (payment, error) {
	if _, err := statuses.Move(ctx, tx, "paid", done.Order); err != nil {
		return payment{}, err
	}
	_, err := tx.Exec(ctx, `UPDATE demo.orders SET charge = $2 WHERE id = $1`, done.Order, done.ID)
	return payment{Order: done.Order, Charge: done.ID, Status: "paid"}, err
}

// Ask finds out what became of a payment whose service died.
func (p *payments) Ask(ctx context.Context, r idempotency.Record, _ []idempotency.Step) (found idempotency.Resolution, err error) {
	key := r.DownstreamKey(chargeStep)
	done, err := p.gateway.find(ctx, key)
	if errors.Is(err, errNotCharged) {
		// Not yet, maybe: the request of the one who died may still be on its way. After this it comes too late.
		if err := p.gateway.void(ctx, key); err != nil {
			return found, err
		}
		return idempotency.Resolution{
			Outcome: idempotency.OutcomeFailed, Code: codeNotCharged, Message: "nothing was charged: pay again, with a new key",
		}, nil
	}
	if err != nil {
		return found, err
	}
	found = idempotency.Resolution{Outcome: idempotency.OutcomeSucceeded, ResultType: "json/1"}
	found.Result, err = json.Marshal(payment{Order: done.Order, Charge: done.ID, Status: "paid"})
	return found, err
}

// Commit books what Ask has found.
func (p *payments) Commit(ctx context.Context, tx pgx.Tx, _ idempotency.Record, found idempotency.Resolution) error {
	if found.Outcome != idempotency.OutcomeSucceeded {
		return nil
	}
	var paid payment
	if err := json.Unmarshal(found.Result, &paid); err != nil {
		return err
	}
	_, err := p.book(ctx, tx, charge{Order: paid.Order, ID: paid.Charge})
	return err
}

// postPayment pays an order, once per key.
func (s *service) postPayment(w http.ResponseWriter, r *http.Request) {
	id, err := strconv.ParseInt(r.PathValue("id"), 10, 64)
	if err != nil {
		notFound("Order ids are numbers.").Write(w)
		return
	}
	req, in, err := s.readPayment(w, r)
	if err != nil {
		s.fail(w, r, req.Key, err)
		return
	}
	ctx, answeredBy := withAnswered(r.Context())
	res, err := s.payments.pay(ctx, s.runner, req, id, in.Card)
	if res.Replayed || *answeredBy != "" {
		w.Header().Set(idempotencyhttp.HeaderReplayed, "true")
		w.Header().Set(headerAnsweredBy, *answeredBy)
	}
	if err != nil {
		s.fail(w, r, req.Key, err)
		return
	}
	w.Header().Set("Content-Type", "application/json")
	writeJSON(w, http.StatusOK, res.Value)
}

func (s *service) readPayment(w http.ResponseWriter, r *http.Request) (req idempotency.Request, in paymentRequest, err error) {
	if req.Key, err = s.once.Key(r, s.payments.operation()); err != nil {
		return req, in, err
	}
	body, err := readBody(w, r)
	if err != nil {
		return req, in, err
	}
	decoder := json.NewDecoder(bytes.NewReader(body))
	decoder.DisallowUnknownFields()
	if err := decoder.Decode(&in); err != nil || validText("card", in.Card, 1) != nil {
		return req, in, invalid("body", `must be a JSON object with the card, such as {"card":"4242"}`)
	}
	if _, err := decoder.Token(); !errors.Is(err, io.EOF) {
		return req, in, invalid("body", "must be one JSON object and nothing behind it")
	}
	req.Fingerprint = idempotency.FingerprintBytes([]byte(r.Method+" "+r.URL.Path), body)
	return req, in, nil
}
