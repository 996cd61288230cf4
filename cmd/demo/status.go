package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"io"
	"net/http"
	"strconv"

	"github.com/jackc/pgx/v5"

	"github.com/pgonce/pgonce/idempotency"
	"github.com/pgonce/pgonce/txn"
)

// statuses are what an order goes through. The table's CHECK names them too, for those who come by SQL.
var statuses = func() *idempotency.Guard {
	machine, err := idempotency.NewMachine("demo.order", []string{"created"},
		[]string{"created", "paid", "shipped", "delivered"},
		[]string{"paid", "refunded"},
	)
	if err != nil {
		panic(err) // a declaration is right or wrong for ever
	}
	guard, err := machine.Guard(idempotency.Column{Table: pgx.Identifier{"demo", "orders"}, Key: []string{"id"}, State: "status"})
	if err != nil {
		panic(err) // the same
	}
	return guard
}()

// orderStatus is the body of PUT /orders/{id}/status, and its answer.
type orderStatus struct {
	ID     int64  `json:"id,omitempty"`
	Status string `json:"status"`
}

// putStatus moves an order on. PUT names where it shall be: who asks again finds it there, without any key. With one, who asks
// again is told what became of the first, wherever the order is by now.
func (s *service) putStatus(w http.ResponseWriter, r *http.Request) {
	id, err := strconv.ParseInt(r.PathValue("id"), 10, 64)
	if err != nil {
		notFound("Order ids are numbers.").Write(w)
		return
	}
	wanted, err := parseStatus(http.MaxBytesReader(w, r.Body, maxBody))
	if err == nil {
		err = s.move(r.Context(), id, wanted)
	}
	if errors.Is(err, idempotency.ErrNotFound) {
		notFound("There is no such order.").Write(w)
		return
	}
	if err != nil {
		s.fail(w, r, idempotency.Key{}, err)
		return
	}
	w.Header().Set("Content-Type", "application/json")
	writeJSON(w, http.StatusOK, orderStatus{ID: id, Status: wanted})
}

func (s *service) move(ctx context.Context, id int64, status string) error {
	if tx, protected := txn.FromContext(ctx); protected {
		_, err := statuses.Move(ctx, tx, status, id)
		return err
	}
	return pgx.BeginFunc(ctx, s.pool, func(tx pgx.Tx) error {
		_, err := statuses.Move(ctx, tx, status, id)
		return err
	})
}

var errStatus = invalid("body", `must be a JSON object with the status to come to, such as {"status":"paid"}, and nothing behind it`)

func parseStatus(body io.Reader) (string, error) {
	text, err := io.ReadAll(body)
	if err != nil {
		return "", err
	}
	var in orderStatus
	decoder := json.NewDecoder(bytes.NewReader(text))
	decoder.DisallowUnknownFields()
	if err := decoder.Decode(&in); err != nil || in.Status == "" || in.ID != 0 {
		return "", errStatus
	}
	if _, err := decoder.Token(); !errors.Is(err, io.EOF) { // More would let "}" and "]" pass
		return "", errStatus
	}
	return in.Status, nil
}
