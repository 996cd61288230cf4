package sqlsuite

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgonce/pgonce/idempotency"
	"github.com/pgonce/pgonce/idempotency/idempotencytest"
	"github.com/pgonce/pgonce/internal/pgtest"
	"github.com/pgonce/pgonce/txn"
)

// caller calls by the SQL functions alone, as a program in another language does: nothing of the library's calls is used, only
// its words for errors and records, which the suite compares.
type caller struct {
	pool *pgxpool.Pool
	// inTwo: the acquisition is committed before the function is called, as for calls to somebody else. Else it is all one
	// transaction.
	inTwo bool
}

// acquired is the row that idempotency.acquire returns.
type acquired struct {
	Verdict         string
	State           *string
	Fence           *int64
	Generation      *int64
	Attempt         *int
	Retryable       *bool
	Fingerprint     []byte
	AttemptToken    []byte
	Takeover        *string
	Executor        *string
	Client          *string
	TraceID         *string
	CreatedAt       *time.Time
	AcquiredAt      *time.Time
	CompletedAt     *time.Time
	LeaseExpiresAt  *time.Time
	ResultExpiresAt *time.Time
	ExpiresAt       *time.Time
	ErrorCode       *string
	ErrorMessage    *string
	ResultType      *string
	Result          []byte
	Expired         *bool
	TimedOut        *bool
}

// failure is what caller records as final.
type failure struct {
	code string
	err  error
}

func (f *failure) Error() string { return f.err.Error() }

func final(code string, err error) error { return &failure{code, err} }

func (c *caller) service() *idempotencytest.Service {
	return &idempotencytest.Service{Call: c.call, Final: final, Querier: c.pool}
}

var operations = func() map[string]idempotency.Operation {
	byName := map[string]idempotency.Operation{}
	for _, op := range idempotencytest.Operations() {
		byName[op.Name] = op.WithDefaults()
	}
	return byName
}()

// call asks for the key until there is an answer, or the operation's Wait is over.
func (c *caller) call(ctx context.Context, req idempotency.Request, fn idempotencytest.Function) (idempotencytest.Answer, error) {
	op := operations[req.Key.Operation()]
	over := time.Now().Add(op.Wait)
	token := idempotency.NewAttemptToken()
	for {
		answer, busy, err := c.once(ctx, op, req, token[:], fn)
		if !busy {
			return answer, err
		}
		if time.Now().After(over) {
			return answer, &idempotency.InProgressError{Key: req.Key, RetryAfter: time.Second}
		}
		select {
		case <-ctx.Done():
			return answer, ctx.Err()
		case <-time.After(5 * time.Millisecond):
		}
	}
}

// once asks once; busy: somebody is running the key.
func (c *caller) once(ctx context.Context, op idempotency.Operation, req idempotency.Request, token []byte, fn idempotencytest.Function) (answer idempotencytest.Answer, busy bool, err error) {
	tx, err := c.pool.Begin(ctx)
	if err != nil {
		return answer, false, err
	}
	// Whatever happens, a panic too. After COMMIT it does nothing.
	defer func() { _ = tx.Rollback(context.WithoutCancel(ctx)) }()
	a, err := ask(ctx, tx, op, req, token)
	if err != nil {
		return answer, false, err
	}
	if a.Verdict != "RUN" {
		answer, busy, err = duplicate(req, a)
		return answer, busy, err
	}
	if !c.inTwo {
		answer, err = c.run(ctx, tx, op, req, a, fn)
		return answer, false, err
	}
	if err := tx.Commit(ctx); err != nil {
		return answer, false, err
	}
	returned := false
	defer func() {
		if !returned || err != nil {
			// Worth another attempt. An error that was recorded as final says ZP003 here, which changes nothing.
			_, _ = c.pool.Exec(context.WithoutCancel(ctx), `SELECT idempotency.fail($1, $2, $3, $4, $5, 'BROKEN', 'broken', retryable => true)`,
				owner(req, a)...)
		}
	}()
	second, err := c.pool.Begin(ctx)
	if err != nil {
		return answer, false, err
	}
	defer func() { _ = second.Rollback(context.WithoutCancel(ctx)) }()
	answer, err = c.run(ctx, second, op, req, a, fn)
	returned = true
	return answer, false, err
}

func ask(ctx context.Context, tx pgx.Tx, op idempotency.Operation, req idempotency.Request, token []byte) (acquired, error) {
	rows, err := tx.Query(ctx, `SELECT * FROM idempotency.acquire($1, $2, $3, $4, attempt_token => $5, takeover => 'RERUN', lease => $6)`,
		req.Key.Tenant(), req.Key.Operation(), req.Key.Value(), req.Fingerprint.Bytes(), token, op.Lease)
	if err != nil {
		return acquired{}, err
	}
	return pgx.CollectExactlyOneRow(rows, pgx.RowToStructByPos[acquired])
}

func owner(req idempotency.Request, a acquired) []any {
	return []any{req.Key.Tenant(), req.Key.Operation(), req.Key.Value(), *a.Fence, a.AttemptToken}
}

// run calls fn and commits its outcome with what it wrote.
func (c *caller) run(ctx context.Context, tx pgx.Tx, op idempotency.Operation, req idempotency.Request, a acquired, fn idempotencytest.Function) (answer idempotencytest.Answer, err error) {
	work, err := tx.Begin(ctx) // a savepoint
	if err != nil {
		return answer, err
	}
	result, err := fn(ctx, work)
	var refused *failure
	switch {
	case errors.As(err, &refused):
		if err := work.Rollback(ctx); err != nil {
			return answer, err
		}
		_, err = tx.Exec(ctx, `SELECT idempotency.fail($1, $2, $3, $4, $5, $6, $7, result => $8, result_type => 'bytes/1')`,
			append(owner(req, a), refused.code, refused.Error(), result)...)
	case err != nil:
		return answer, err
	default:
		if err := work.Commit(ctx); err != nil {
			return answer, err
		}
		stored := result
		if stored == nil {
			stored = []byte{} // NULL would be a tombstone
		}
		if len(stored) > op.ResultLimit {
			stored = nil
		}
		_, err = tx.Exec(ctx, `SELECT idempotency.complete($1, $2, $3, $4, $5, $6, 'bytes/1')`, append(owner(req, a), stored)...)
	}
	if err != nil {
		return answer, err
	}
	// What was recorded, in the words that a later caller gets it in.
	if a, err = ask(ctx, tx, op, req, a.AttemptToken); err != nil {
		return answer, err
	}
	if err := tx.Commit(ctx); err != nil {
		return answer, err
	}
	answer = idempotencytest.Answer{Result: result, Record: record(req, a)}
	if refused != nil {
		return answer, &idempotency.FailedError{Code: refused.code, Message: refused.Error(), Record: answer.Record, Cause: refused.err}
	}
	return answer, nil
}

// duplicate is the answer to a caller who does not get the key.
func duplicate(req idempotency.Request, a acquired) (answer idempotencytest.Answer, busy bool, err error) {
	switch a.Verdict {
	case "IN_PROGRESS":
		return answer, true, nil
	case "MISMATCH":
		return answer, false, &idempotency.MismatchError{Key: req.Key}
	case "GONE":
		return answer, false, idempotency.ErrResultExpired
	case "REPLAY":
		answer = idempotencytest.Answer{Result: a.Result, Replayed: true, Record: record(req, a)}
		if *a.State == string(idempotency.StateFailed) {
			return answer, false, &idempotency.FailedError{Code: *a.ErrorCode, Message: *a.ErrorMessage, Record: answer.Record}
		}
		return answer, false, nil
	}
	return answer, false, fmt.Errorf("verdict %s", a.Verdict)
}

// record is all of the row, so that the suite compares all of it.
func record(req idempotency.Request, a acquired) idempotency.Record {
	r := idempotency.Record{
		Key: req.Key, State: idempotency.State(*a.State), Fence: *a.Fence, Generation: *a.Generation, Attempt: *a.Attempt, Retryable: *a.Retryable,
		Takeover: idempotency.Takeover(value(a.Takeover)), Executor: value(a.Executor), Client: value(a.Client), TraceID: value(a.TraceID),
		CreatedAt: value(a.CreatedAt).UTC(), AcquiredAt: value(a.AcquiredAt).UTC(), CompletedAt: value(a.CompletedAt).UTC(),
		LeaseExpiresAt: value(a.LeaseExpiresAt).UTC(), ResultExpiresAt: value(a.ResultExpiresAt).UTC(), ExpiresAt: value(a.ExpiresAt).UTC(),
		ErrorCode: value(a.ErrorCode), ErrorMessage: value(a.ErrorMessage), ResultType: value(a.ResultType), Result: a.Result,
		Expired: value(a.Expired), TimedOut: value(a.TimedOut),
	}
	copy(r.AttemptToken[:], a.AttemptToken)                        // GONE has none
	r.Fingerprint, _ = idempotency.ParseFingerprint(a.Fingerprint) // none is no fingerprint, which the suite would see
	return r
}

func value[T any](p *T) (v T) {
	if p != nil {
		v = *p
	}
	return v
}

// The library's suite over the SQL functions alone, and with every call made by the one or the other: none of its examinations
// is left out.
func TestConformance_SameAnswersInSQL(t *testing.T) {
	t.Parallel()
	for _, inTwo := range []bool{false, true} {
		name := map[bool]string{false: "in one transaction", true: "acquired before"}[inTwo]
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			idempotencytest.Run(t, newCaller(t, inTwo).service())
		})
		t.Run(name+", beside Go", func(t *testing.T) {
			t.Parallel()
			c := newCaller(t, inTwo)
			idempotencytest.Run(t, c.besideGo(t))
		})
	}
}

func newCaller(t *testing.T, inTwo bool) *caller {
	t.Helper()
	pool := pgtest.Pool(t, txn.ConfigurePool, func(c *pgxpool.Config) { c.MaxConns = 8 })
	_, err := pool.Exec(t.Context(), idempotencytest.Table)
	require.NoError(t, err)
	return &caller{pool: pool, inTwo: inTwo}
}

// besideGo makes each call by SQL or by the library, in the mode that goes with it.
func (c *caller) besideGo(t *testing.T) *idempotencytest.Service {
	t.Helper()
	ops := idempotencytest.Operations()
	for i := range ops {
		ops[i].Takeover = idempotency.TakeoverRerun
	}
	runner, err := txn.New(c.pool, &txn.Config{Operations: ops})
	require.NoError(t, err)
	t.Cleanup(runner.Close)
	s := c.service()
	s.Call = func(ctx context.Context, req idempotency.Request, fn idempotencytest.Function) (idempotencytest.Answer, error) {
		if rand.N(2) == 0 {
			return c.call(ctx, req, fn)
		}
		var res txn.Result[[]byte]
		var err error
		inGo := func(ctx context.Context, tx pgx.Tx) ([]byte, error) { return finalInGo(fn(ctx, tx)) }
		if c.inTwo {
			res, err = txn.WithLease(ctx, runner, req, func(context.Context, *txn.Lease) (struct{}, error) { return struct{}{}, nil },
				// Its caller's context: nothing was called that could not be taken back, so the function may give up with its caller.
				func(_ context.Context, tx pgx.Tx, _ struct{}) ([]byte, error) { return inGo(ctx, tx) })
		} else {
			res, err = txn.WithIdempotency(ctx, runner, req, inGo)
		}
		return idempotencytest.Answer{Result: res.Value, Replayed: res.Replayed, Record: res.Record}, err
	}
	return s
}

// finalInGo says the suite's final failures in the library's words.
func finalInGo(result []byte, err error) ([]byte, error) {
	var refused *failure
	if errors.As(err, &refused) {
		err = txn.Final(refused.code, refused.err)
	}
	return result, err
}
