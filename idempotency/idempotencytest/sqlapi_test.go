package idempotencytest_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgonce/pgonce/idempotency"
	"github.com/pgonce/pgonce/idempotency/idempotencytest"
	"github.com/pgonce/pgonce/internal/pgtest"
)

// sqlAPI is a service that knows the functions of the schema and nothing else of ours: one transaction for all of it.
type sqlAPI struct{ pool *pgxpool.Pool }

// finalError is a failure that is recorded.
type finalError struct {
	code string
	error
}

func (s sqlAPI) call(ctx context.Context, req idempotency.Request, fn idempotencytest.Function) (a idempotencytest.Answer, err error) {
	// The service's own waiting: the functions never wait.
	for until := time.Now().Add(20 * time.Second); ; { //nolint:forbidigo // a test's patience
		a, err = s.try(ctx, req, fn)
		patient := req.Key.Operation() != idempotencytest.Impatient.Name
		if !errors.Is(err, idempotency.ErrInProgress) || !patient || time.Now().After(until) { //nolint:forbidigo // the same
			return a, err
		}
		select {
		case <-ctx.Done():
			return a, errors.Join(err, ctx.Err())
		case <-time.After(5 * time.Millisecond):
		}
	}
}

func (s sqlAPI) try(ctx context.Context, req idempotency.Request, fn idempotencytest.Function) (a idempotencytest.Answer, err error) {
	tx, err := s.pool.Begin(ctx)
	if err != nil {
		return a, err
	}
	defer func() { _ = tx.Rollback(context.WithoutCancel(ctx)) }()
	var verdict string
	var fence *int64
	var token []byte
	key := []any{req.Key.Tenant(), req.Key.Operation(), req.Key.Value()}
	err = tx.QueryRow(ctx, `SELECT verdict, fence, attempt_token FROM idempotency.acquire($1, $2, $3, $4)`,
		append(key, req.Fingerprint.Bytes())...).Scan(&verdict, &fence, &token)
	if err != nil {
		return a, err
	}
	switch verdict {
	case "MISMATCH":
		return a, idempotency.ErrMismatch
	case "GONE":
		return a, idempotency.ErrResultExpired
	case "IN_PROGRESS":
		return a, &idempotency.InProgressError{Key: req.Key, RetryAfter: time.Second}
	case "REPLAY":
		a.Replayed = true
		return s.answer(ctx, tx, req, a)
	case "RUN":
	default:
		return a, errors.New(verdict)
	}
	inner, err := tx.Begin(ctx) // so that a recorded failure leaves no business rows
	if err != nil {
		return a, err
	}
	a.Result, err = fn(ctx, inner)
	owner := append(key, fence, token) //nolint:gocritic // another list
	var final *finalError
	switch {
	case errors.As(err, &final):
		if err := inner.Rollback(ctx); err != nil {
			return a, err
		}
		_, err = tx.Exec(ctx, `SELECT idempotency.fail($1, $2, $3, $4, $5, $6, $7, result => $8, result_type => 'bytes/1')`,
			append(owner, final.code, final.Error(), a.Result)...)
	case err != nil:
		return a, err
	default:
		if err := inner.Commit(ctx); err != nil {
			return a, err
		}
		stored := a.Result
		if req.Key.Operation() == idempotencytest.Brief.Name && len(stored) > idempotencytest.Brief.ResultLimit {
			stored = nil
		}
		_, err = tx.Exec(ctx, `SELECT idempotency.complete($1, $2, $3, $4, $5, $6, 'bytes/1')`, append(owner, stored)...)
	}
	if err != nil {
		return a, err
	}
	result := bytes.Clone(a.Result)
	if err := tx.Commit(ctx); err != nil {
		return a, err
	}
	a, err = s.answer(ctx, s.pool, req, a)
	a.Result = result
	return a, err
}

// answer is what the record says.
func (s sqlAPI) answer(ctx context.Context, db idempotency.Querier, req idempotency.Request, a idempotencytest.Answer) (idempotencytest.Answer, error) {
	var state string
	var code, message *string
	r := idempotency.Record{Key: req.Key}
	err := db.QueryRow(ctx, `SELECT state, fence, generation, attempt, error_code, error_message, result
		FROM idempotency.records WHERE tenant = $1 AND operation = $2 AND key = $3`,
		req.Key.Tenant(), req.Key.Operation(), req.Key.Value()).
		Scan(&state, &r.Fence, &r.Generation, &r.Attempt, &code, &message, &r.Result)
	if err != nil {
		return a, err
	}
	r.State = idempotency.State(state)
	a.Record, a.Result = r, bytes.Clone(r.Result)
	if r.Result != nil && a.Result == nil {
		a.Result = []byte{}
	}
	if r.State == idempotency.StateFailed {
		return a, &idempotency.FailedError{Code: *code, Message: *message, Record: r}
	}
	return a, nil
}

// The functions of the schema pass what the library passes.
func TestSQLAPI_Conformance(t *testing.T) {
	t.Parallel()
	pool := pgtest.Pool(t, func(c *pgxpool.Config) { c.MaxConns = 16 })
	_, err := pool.Exec(t.Context(), idempotencytest.Table)
	require.NoError(t, err)
	idempotencytest.Run(t, &idempotencytest.Service{
		Call:    sqlAPI{pool}.call,
		Final:   func(code string, err error) error { return &finalError{code, err} },
		Querier: pool,
	})
}

// place is a Go caller of a mix, through the library.
func (s *service) placeOrder(ctx context.Context, req idempotency.Request) error {
	for {
		_, err := s.order(ctx, req)
		if !errors.Is(err, idempotency.ErrInProgress) {
			return err
		}
		time.Sleep(5 * time.Millisecond)
	}
}

const mixedKeys = 40

// mixed runs Go callers beside another program on the same keys: one order each, by whomever.
func mixed(t *testing.T, other func(ctx context.Context, url string) error) {
	t.Helper()
	s := newService(t)
	_, err := s.pool.Exec(t.Context(), `CREATE TABLE orders (key text NOT NULL, caller text NOT NULL)`)
	require.NoError(t, err)
	done := make(chan error, 3)
	go func() { done <- other(t.Context(), s.pool.Config().ConnString()) }()
	// Once the other one is at work, so that both have keys to win.
	require.Eventually(t, func() bool {
		var n int
		return s.pool.QueryRow(t.Context(), `SELECT count(*) FROM orders`).Scan(&n) == nil && n > 0
	}, time.Minute, time.Millisecond)
	for range 2 {
		go func() {
			var all error
			for i := mixedKeys - 1; i >= 0; i-- {
				all = errors.Join(all, s.placeOrder(t.Context(), request(t, fmt.Sprint("k", i))))
			}
			done <- all
		}()
	}
	for range cap(done) {
		require.NoError(t, <-done)
	}
	rows, err := s.pool.Query(t.Context(), `SELECT caller || ' ' || count(*) FROM orders GROUP BY caller ORDER BY 1`)
	require.NoError(t, err)
	by, err := pgx.CollectRows(rows, pgx.RowTo[string])
	require.NoError(t, err)
	t.Log(strings.Join(by, ", "))
	var orders, keys, records int
	require.NoError(t, s.pool.QueryRow(t.Context(), `SELECT count(*), count(DISTINCT key),
		(SELECT count(*) FROM idempotency.records WHERE state = 'SUCCESS') FROM orders`).Scan(&orders, &keys, &records))
	require.Equal(t, []int{mixedKeys, mixedKeys, mixedKeys}, []int{orders, keys, records}, "orders, keys, records")
}
