package main

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"reflect"
	"strings"
	"time"
	"unicode"
	"unicode/utf8"

	"github.com/jackc/pgx/v5"

	"github.com/pgonce/pgonce/idempotency"
)

// orderRequest is the body of POST /orders.
type orderRequest struct {
	Customer string `json:"customer"`
	SKU      string `json:"sku"`
	Quantity int    `json:"quantity"`
	Coupon   string `json:"coupon,omitempty"`
}

// order is the answer.
type order struct {
	ID int64 `json:"id"`
	orderRequest
	Status    string    `json:"status"`
	CreatedAt time.Time `json:"created_at"`
}

// refusal is a business outcome that trying again will not change. Its message is written for the customer.
type refusal struct{ code, message string }

func (r *refusal) Error() string { return r.message }

// The codes of refusals.
const (
	codeOutOfStock    = "out_of_stock"
	codeUnknownSKU    = "unknown_sku"
	codeCouponUsed    = "coupon_used"
	codeUnknownCoupon = "unknown_coupon"
)

// What is handmade takes its time, for whoever wants to see a request that is still running.
const (
	handmade     = "handmade"
	handmadeTime = 5 * time.Second
)

// placeOrder is what the service is for, and all of it happens in tx: it knows nothing of idempotency. think is how long
// the shop takes to make up its mind, in the middle of the transaction.
func placeOrder(ctx context.Context, tx pgx.Tx, key string, in orderRequest, think time.Duration) (*order, error) {
	placed := &order{orderRequest: in}
	err := tx.QueryRow(ctx, `
		INSERT INTO demo.orders (idempotency_key, customer, sku, quantity, coupon)
		SELECT $1, $2, sku, $4, nullif($5, '') FROM demo.stock WHERE sku = $3
		RETURNING id, status, created_at`, key, in.Customer, in.SKU, in.Quantity, in.Coupon).
		Scan(&placed.ID, &placed.Status, &placed.CreatedAt)
	if errors.Is(err, pgx.ErrNoRows) {
		return nil, &refusal{codeUnknownSKU, fmt.Sprintf("We do not sell %q.", in.SKU)}
	}
	if err != nil {
		return nil, fmt.Errorf("insert order: %w", err)
	}
	placed.CreatedAt = placed.CreatedAt.UTC() // the same text on every machine
	if in.SKU == handmade {
		think = max(think, handmadeTime)
	}
	if think > 0 {
		if _, err := tx.Exec(ctx, `SELECT pg_sleep($1)`, think.Seconds()); err != nil {
			return nil, fmt.Errorf("think: %w", err)
		}
	}
	if in.Coupon != "" {
		if err := useCoupon(ctx, tx, in.Coupon, placed.ID); err != nil {
			return nil, err
		}
	}
	// Last, because everybody wants this row: it is locked from here to COMMIT.
	tag, err := tx.Exec(ctx, `UPDATE demo.stock SET quantity = quantity - $1 WHERE sku = $2 AND quantity >= $1`, in.Quantity, in.SKU)
	if err != nil {
		return nil, fmt.Errorf("take from stock: %w", err)
	}
	if tag.RowsAffected() == 0 {
		return nil, &refusal{codeOutOfStock, fmt.Sprintf("There is not enough %q left for an order of %d.", in.SKU, in.Quantity)}
	}
	return placed, nil
}

// useCoupon gives a coupon to an order. Of two orders that want it, one waits for the other's row lock and then finds it
// used.
func useCoupon(ctx context.Context, tx pgx.Tx, code string, orderID int64) error {
	tag, err := tx.Exec(ctx, `UPDATE demo.coupons SET order_id = $2 WHERE code = $1 AND order_id IS NULL`, code, orderID)
	if err != nil {
		return fmt.Errorf("use coupon: %w", err)
	}
	if tag.RowsAffected() == 1 {
		return nil
	}
	var exists bool
	if err := tx.QueryRow(ctx, `SELECT EXISTS (SELECT FROM demo.coupons WHERE code = $1)`, code).Scan(&exists); err != nil {
		return fmt.Errorf("look for coupon: %w", err)
	}
	if !exists {
		return &refusal{codeUnknownCoupon, fmt.Sprintf("There is no coupon %q.", code)}
	}
	return &refusal{codeCouponUsed, fmt.Sprintf("Coupon %q was used for another order.", code)}
}

// parseOrder reads and validates a body. The error is an *idempotency.InvalidError that names field and rule.
func parseOrder(body []byte) (orderRequest, error) {
	var in orderRequest
	decoder := json.NewDecoder(bytes.NewReader(body))
	decoder.DisallowUnknownFields()
	err := decoder.Decode(&in)
	if wrong := (*json.UnmarshalTypeError)(nil); errors.As(err, &wrong) && wrong.Field != "" {
		want := "a string"
		if wrong.Type.Kind() == reflect.Int {
			want = "an integer"
		}
		return orderRequest{}, invalid(wrong.Field, "must be "+want+", not a JSON "+wrong.Value)
	}
	if err != nil {
		return orderRequest{}, invalid("body", "must be a JSON object with customer, sku, quantity and, if there is one, coupon, and nothing else")
	}
	if _, err := decoder.Token(); !errors.Is(err, io.EOF) {
		return orderRequest{}, invalid("body", "must be one JSON object and nothing behind it")
	}
	return in, in.validate()
}

func (in orderRequest) validate() error {
	if in.Quantity < 1 || in.Quantity > 1000 {
		return invalid("quantity", "must be from 1 to 1000")
	}
	return cmp.Or(validText("customer", in.Customer, 1), validText("sku", in.SKU, 1), validText("coupon", in.Coupon, 0))
}

// validText refuses what PostgreSQL cannot store (NUL, broken UTF-8) or people cannot read.
func validText(field, value string, minimum int) error {
	switch {
	case len(value) < minimum || len(value) > 100:
		return invalid(field, fmt.Sprintf("must be %d to 100 bytes", minimum))
	case !utf8.ValidString(value) || strings.ContainsFunc(value, unicode.IsControl):
		return invalid(field, "must be UTF-8 without control characters")
	}
	return nil
}

func invalid(field, rule string) error { return &idempotency.InvalidError{Field: field, Rule: rule} }
