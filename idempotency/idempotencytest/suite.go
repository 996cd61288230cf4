package idempotencytest

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/pgonce/pgonce/idempotency"
)

// Answer is what a caller got.
type Answer struct {
	Result   []byte
	Replayed bool
	Record   idempotency.Record
}

// Function is what a caller wants to have done once.
type Function func(ctx context.Context, tx pgx.Tx) ([]byte, error)

// Service is what the suite examines: one way to call, with the operations of Operations declared.
type Service struct {
	// Call runs fn once for the request.
	Call func(ctx context.Context, req idempotency.Request, fn Function) (Answer, error)
	// Final makes an error that Call records as a final failure.
	Final func(code string, err error) error
	// Querier looks into the database, past everything that is examined.
	Querier idempotency.Querier
}

// Orders is the operation of most examinations; Impatient never waits; Brief keeps no large results.
var (
	Orders    = idempotency.Operation{Name: "suite.order", Wait: 20 * time.Second}
	Impatient = idempotency.Operation{Name: "suite.impatient", Wait: idempotency.NoWait}
	Brief     = idempotency.Operation{Name: "suite.brief", ResultLimit: 100, Tombstone: true}
)

// Operations are all that the service must declare.
func Operations() []idempotency.Operation { return []idempotency.Operation{Orders, Impatient, Brief} }

// Table is the suite's business table: no unique key but its own.
const Table = `CREATE TABLE suite_orders (id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, key text NOT NULL)`

// Run examines the service. Every examination uses keys of its own, so that Run may be called again on one database.
func Run(t *testing.T, s *Service) {
	t.Helper()
	run := fmt.Sprintf("%s-%d", t.Name(), runs.Add(1))
	for _, x := range examinations {
		t.Run(x.name, func(t *testing.T) { x.run(&examination{T: t, Service: s, prefix: run + "/" + x.name + "/"}) })
	}
}

var runs atomic.Int64

// examination is one of them, with helpers.
type examination struct {
	*testing.T
	*Service
	prefix string
	made   int
}

var examinations = []struct {
	name string
	run  func(x *examination)
}{
	{"FirstRunsThenReplays", firstRunsThenReplays},
	{"RetryAfterSuccessIsAReplay", retryAfterSuccess},
	{"OtherPayloadIsAMismatch", otherPayload},
	{"ConcurrentCallersRunOnce", concurrentCallers},
	{"ManyKeysManyCallers", manyKeys},
	{"FinalFailureReplays", finalFailure},
	{"ErrorLeavesNothing", errorLeavesNothing},
	{"PanicLeavesNothing", panicLeavesNothing},
	{"RunningIsInProgress", runningIsInProgress},
	{"CancelledOwnerHarmsNobody", cancelledOwner},
	{"KeysAreKeptApart", keysApart},
	{"ResultsComeBackByteForByte", byteForByte},
	{"DroppedResultIsGone", droppedResult},
	{"ResultIsTheCallersOwn", callersOwn},
}

// Patience is how long the suite goes on where a tier's trouble makes a caller wait.
const Patience = 60 * time.Second

// request returns a request of a new key.
func (x *examination) request(op idempotency.Operation) idempotency.Request {
	x.Helper()
	x.made++
	return x.requestOf(op, fmt.Sprintf("%s%d", x.prefix, x.made), "payload")
}

func (x *examination) requestOf(op idempotency.Operation, value, payload string) idempotency.Request {
	x.Helper()
	if len(value) > 200 {
		value = value[len(value)-200:]
	}
	key, err := op.Key(idempotency.SingleTenant, value)
	require.NoError(x, err)
	return idempotency.Request{Key: key, Fingerprint: idempotency.FingerprintBytes([]byte(payload))}
}

// order inserts an order and answers with text.
func order(req idempotency.Request, text string) Function {
	return func(ctx context.Context, tx pgx.Tx) ([]byte, error) {
		_, err := tx.Exec(ctx, `INSERT INTO suite_orders (key) VALUES ($1)`, req.Key.Operation()+"/"+req.Key.Value())
		return []byte(text), err
	}
}

// place places the order of a request; in progress is no answer here.
func (x *examination) place(req idempotency.Request, text string) Answer {
	x.Helper()
	a, err := x.patiently(req, order(req, text))
	require.NoError(x, err)
	return a
}

// patiently calls again while somebody else is running the key.
func (x *examination) patiently(req idempotency.Request, fn Function) (Answer, error) {
	ctx, cancel := context.WithTimeout(x.Context(), Patience)
	defer cancel()
	for {
		a, err := x.Call(ctx, req, fn)
		if !errors.Is(err, idempotency.ErrInProgress) || ctx.Err() != nil {
			return a, err
		}
	}
}

// orders counts the orders of a request.
func (x *examination) orders(req idempotency.Request) (n int) {
	x.Helper()
	err := x.Querier.QueryRow(context.WithoutCancel(x.Context()), `SELECT count(*) FROM suite_orders WHERE key = $1`,
		req.Key.Operation()+"/"+req.Key.Value()).Scan(&n)
	require.NoError(x, err)
	return n
}

func firstRunsThenReplays(x *examination) {
	req := x.request(Orders)
	first := x.place(req, "first")
	require.False(x, first.Replayed)
	require.Equal(x, "first", string(first.Result))
	require.Equal(x, idempotency.StateSuccess, first.Record.State)
	for range 5 {
		again := x.place(req, "second")
		require.True(x, again.Replayed)
		require.Equal(x, "first", string(again.Result))
		require.Equal(x, first.Record, again.Record)
	}
	require.Equal(x, 1, x.orders(req))
}

// A client that has its answer and asks again gets it again, at once and every time.
func retryAfterSuccess(x *examination) {
	for range 50 {
		req := x.request(Impatient)
		_, err := x.Call(x.Context(), req, order(req, "done"))
		require.NoError(x, err)
		again, err := x.Call(x.Context(), req, order(req, "again"))
		require.NoError(x, err, "never in progress")
		require.True(x, again.Replayed)
		require.Equal(x, "done", string(again.Result))
		require.Equal(x, 1, x.orders(req))
	}
}

func otherPayload(x *examination) {
	req := x.request(Orders)
	x.place(req, "first")
	changed := x.requestOf(Orders, req.Key.Value(), "another payload")
	for range 3 {
		_, err := x.patiently(changed, order(changed, "second"))
		require.ErrorIs(x, err, idempotency.ErrMismatch)
	}
	require.Equal(x, "first", string(x.place(req, "third").Result), "the first caller's answer stays")
	require.Equal(x, 1, x.orders(req))
}

func concurrentCallers(x *examination) {
	const callers = 30
	req := x.request(Orders)
	answers, errs := make([]Answer, callers), make([]error, callers)
	var group sync.WaitGroup
	for i := range callers {
		group.Go(func() {
			answers[i], errs[i] = x.patiently(req, func(ctx context.Context, tx pgx.Tx) ([]byte, error) {
				time.Sleep(20 * time.Millisecond)
				return order(req, fmt.Sprintf("by %d", i))(ctx, tx)
			})
		})
	}
	group.Wait()
	own := 0
	for i := range callers {
		require.NoError(x, errs[i])
		require.Equal(x, answers[0].Result, answers[i].Result)
		if !answers[i].Replayed {
			own++
		}
	}
	require.Equal(x, 1, own, "one caller's own")
	require.Equal(x, 1, x.orders(req))
}

func manyKeys(x *examination) {
	const keys, callers = 20, 200
	reqs := make([]idempotency.Request, keys)
	for i := range reqs {
		reqs[i] = x.request(Orders)
	}
	errs := make([]error, callers)
	results := make([]string, callers)
	var group sync.WaitGroup
	for i := range callers {
		group.Go(func() {
			var a Answer
			a, errs[i] = x.patiently(reqs[i%keys], order(reqs[i%keys], fmt.Sprint(i)))
			results[i] = string(a.Result)
		})
	}
	group.Wait()
	for i := range callers {
		require.NoError(x, errs[i])
		require.Equal(x, results[i%keys], results[i])
	}
	for _, req := range reqs {
		require.Equal(x, 1, x.orders(req))
	}
}

func finalFailure(x *examination) {
	req := x.request(Orders)
	refuse := func(ctx context.Context, tx pgx.Tx) ([]byte, error) {
		if _, err := order(req, "")(ctx, tx); err != nil {
			return nil, err
		}
		return []byte("sold out"), x.Final("out_of_stock", errors.New("no more"))
	}
	for range 3 {
		_, err := x.patiently(req, refuse)
		var failed *idempotency.FailedError
		require.ErrorAs(x, err, &failed)
		require.Equal(x, "out_of_stock", failed.Code)
		require.Equal(x, "sold out", string(failed.Record.Result))
	}
	require.Zero(x, x.orders(req))
}

func errorLeavesNothing(x *examination) {
	req, broken := x.request(Orders), errors.New("broken")
	_, err := x.patiently(req, func(ctx context.Context, tx pgx.Tx) ([]byte, error) {
		_, err := order(req, "")(ctx, tx)
		return nil, errors.Join(err, broken)
	})
	require.ErrorIs(x, err, broken)
	require.Zero(x, x.orders(req))
	require.False(x, x.place(req, "second").Replayed)
	require.Equal(x, 1, x.orders(req))
}

func panicLeavesNothing(x *examination) {
	req := x.request(Orders)
	require.PanicsWithValue(x, "broken", func() {
		_, _ = x.patiently(req, func(ctx context.Context, tx pgx.Tx) ([]byte, error) {
			_, _ = order(req, "")(ctx, tx)
			panic("broken")
		})
	})
	require.Zero(x, x.orders(req))
	require.False(x, x.place(req, "second").Replayed)
	require.Equal(x, 1, x.orders(req))
}

func runningIsInProgress(x *examination) {
	req := x.request(Impatient)
	entered, leave, done := make(chan struct{}), make(chan struct{}), make(chan error, 1)
	go func() {
		var once sync.Once
		_, err := x.Call(x.Context(), req, func(ctx context.Context, tx pgx.Tx) ([]byte, error) {
			once.Do(func() { close(entered) })
			<-leave
			return order(req, "done")(ctx, tx)
		})
		done <- err
	}()
	<-entered
	for range 3 {
		_, err := x.Call(x.Context(), req, order(req, "second"))
		require.ErrorIs(x, err, idempotency.ErrInProgress)
		var busy *idempotency.InProgressError
		require.ErrorAs(x, err, &busy)
		require.Positive(x, busy.RetryAfter)
	}
	close(leave)
	require.NoError(x, <-done)
	require.True(x, x.place(req, "third").Replayed)
	require.Equal(x, 1, x.orders(req))
}

func cancelledOwner(x *examination) {
	req := x.request(Orders)
	ctx, cancel := context.WithCancel(x.Context())
	entered, done := make(chan struct{}), make(chan error, 1)
	go func() {
		var once sync.Once
		_, err := x.Call(ctx, req, func(ctx context.Context, _ pgx.Tx) ([]byte, error) {
			once.Do(func() { close(entered) })
			<-ctx.Done()
			return nil, ctx.Err()
		})
		done <- err
	}()
	<-entered
	waiter := make(chan Answer, 1)
	go func() { waiter <- x.place(req, "the waiter's") }()
	time.Sleep(20 * time.Millisecond) // most likely it waits by now
	cancel()
	require.ErrorIs(x, <-done, context.Canceled)
	require.Equal(x, "the waiter's", string((<-waiter).Result))
	require.Equal(x, 1, x.orders(req))
}

func keysApart(x *examination) {
	value := x.request(Orders).Key.Value()
	for i, req := range []idempotency.Request{
		x.requestOf(Orders, value, "p"), x.requestOf(Impatient, value, "p"), x.requestOf(Orders, value+"}", "p"),
		x.requestOf(Orders, "{"+value[1:], "p"), x.requestOf(Orders, strings.ToUpper(value), "p"),
	} {
		a := x.place(req, fmt.Sprint(i))
		require.Equal(x, fmt.Sprint(i), string(a.Result))
		require.False(x, a.Replayed)
	}
	other, err := Orders.Key("another tenant", value)
	require.NoError(x, err)
	req := x.requestOf(Orders, value, "p")
	req.Key = other
	a, err := x.patiently(req, func(context.Context, pgx.Tx) ([]byte, error) { return []byte("tenant"), nil })
	require.NoError(x, err)
	require.Equal(x, "tenant", string(a.Result))
}

func byteForByte(x *examination) {
	every := make([]byte, 256)
	for i := range every {
		every[i] = byte(i)
	}
	for _, result := range [][]byte{{}, {0}, every, []byte(strings.Repeat("x", 200<<10)), []byte("\xff{}\r\n\"")} {
		req := x.request(Orders)
		for i := range 3 {
			a, err := x.patiently(req, func(context.Context, pgx.Tx) ([]byte, error) { return result, nil })
			require.NoError(x, err)
			require.Equal(x, i > 0, a.Replayed)
			require.True(x, string(result) == string(a.Result) && a.Result != nil, "%d bytes", len(result))
		}
	}
}

func droppedResult(x *examination) {
	req := x.request(Brief)
	long := func(ctx context.Context, tx pgx.Tx) ([]byte, error) {
		return order(req, strings.Repeat("x", 101))(ctx, tx)
	}
	a, err := x.patiently(req, long)
	require.NoError(x, err)
	require.Len(x, a.Result, 101, "the first caller has it")
	for range 3 {
		_, err = x.patiently(req, long)
		require.ErrorIs(x, err, idempotency.ErrResultExpired)
	}
	require.Equal(x, 1, x.orders(req))
}

// What a caller does with its bytes is its own affair.
func callersOwn(x *examination) {
	req := x.request(Orders)
	for range 4 {
		a := x.place(req, "untouched")
		require.Equal(x, "untouched", string(a.Result))
		runtime.Gosched()
		copy(a.Result, "spoilt!!!")
		if a.Record.Result != nil {
			copy(a.Record.Result, "spoilt!!!")
		}
	}
}
