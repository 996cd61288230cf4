package idempotencyconnect_test

import (
	"context"
	"errors"
	"net/http"
	"net/http/httptest"
	"sync/atomic"
	"testing"
	"time"

	"connectrpc.com/connect"
	"github.com/stretchr/testify/require"

	"github.com/pgonce/pgonce/idempotency"
	"github.com/pgonce/pgonce/idempotency/idempotencytest"
	"github.com/pgonce/pgonce/idempotencygrpc"
	"github.com/pgonce/pgonce/idempotencygrpc/idempotencyconnect"
	"github.com/pgonce/pgonce/txn"
)

func retrying(retry idempotencyconnect.Retry) connect.ClientOption {
	return connect.WithInterceptors(idempotencyconnect.Client([]string{createMethod, watchMethod}, retry))
}

// One key for all attempts of a call, another one for the next call.
func TestClient_KeepsItsKeyOverRetries(t *testing.T) {
	t.Parallel()
	for name, w := range wires {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			var failures atomic.Int64
			failures.Store(2)
			s := start(t, func(ctx context.Context, req *request) (*response, error) {
				if failures.Add(-1) >= 0 {
					return nil, connect.NewError(connect.CodeUnavailable, errors.New("come back"))
				}
				return place(ctx, req)
			}, nil)
			client, sent := s.client(t, w, createMethod, retrying(idempotencyconnect.Retry{Pause: time.Millisecond}))
			_, err := client.CallUnary(t.Context(), order("", "tea"))
			require.NoError(t, err)
			_, err = client.CallUnary(t.Context(), order("", "tea"))
			require.NoError(t, err)
			_, err = client.CallUnary(t.Context(), order("mine", "tea"))
			require.NoError(t, err)
			keys := sent.keys
			require.Len(t, keys, 5)
			require.Equal(t, []string{keys[0], keys[0]}, keys[1:3])
			require.NotEqual(t, keys[0], keys[3])
			require.Equal(t, "mine", keys[4])
			require.Equal(t, 3, s.orders(t))

			failures.Store(100)
			_, err = client.CallUnary(t.Context(), order("", "tea"))
			require.Equal(t, connect.CodeUnavailable, connect.CodeOf(err))
			require.EqualValues(t, 96, failures.Load(), "four attempts")
			others, _ := s.client(t, w, listMethod, retrying(idempotencyconnect.Retry{Pause: time.Millisecond}))
			_, err = others.CallUnary(t.Context(), order("", "tea"))
			require.Equal(t, connect.CodeUnavailable, connect.CodeOf(err))
			require.EqualValues(t, 95, failures.Load(), "what is not protected is not sent twice")
		})
	}
}

func TestClient_StopsWhereARetryChangesNothing(t *testing.T) {
	t.Parallel()
	s := start(t, func(context.Context, *request) (*response, error) {
		return nil, connect.NewError(connect.CodeInternal, errors.New("broken"))
	}, nil)
	w := wires["connect, HTTP/1.1"]
	client, sent := s.client(t, w, createMethod, retrying(idempotencyconnect.Retry{Pause: time.Millisecond}))
	_, err := client.CallUnary(t.Context(), order("", "tea"))
	require.Equal(t, connect.CodeInternal, connect.CodeOf(err))
	require.Len(t, sent.keys, 1)

	streams, _ := s.client(t, w, watchMethod, retrying(idempotencyconnect.Retry{}))
	_, err = streams.CallServerStream(t.Context(), order("", "tea"))
	require.ErrorContains(t, err, "a stream cannot be protected")

	down := start(t, func(context.Context, *request) (*response, error) {
		return nil, connect.NewError(connect.CodeUnavailable, errors.New("come back"))
	}, nil)
	ctx, end := context.WithCancel(t.Context())
	defer end()
	behindTheAnswer := connect.UnaryInterceptorFunc(func(next connect.UnaryFunc) connect.UnaryFunc {
		return func(ctx context.Context, req connect.AnyRequest) (connect.AnyResponse, error) {
			defer func() { time.AfterFunc(50*time.Millisecond, end) }()
			return next(ctx, req)
		}
	})
	client, _ = down.client(t, w, createMethod, retrying(idempotencyconnect.Retry{Pause: time.Minute, MaxPause: time.Minute}),
		connect.WithInterceptors(behindTheAnswer))
	began := time.Now()
	_, err = client.CallUnary(ctx, order("", "tea"))
	require.Equal(t, connect.CodeUnavailable, connect.CodeOf(err), "the last answer, not the end of the context")
	require.Less(t, time.Since(began), 30*time.Second)
}

// The order is taken and the answer is lost, all of it or its second half: the retry gets the same one.
func TestClient_ALostAnswerIsAskedForAgain(t *testing.T) {
	t.Parallel()
	for name, w := range wires {
		for half, keep := range map[string]bool{"nothing arrives": false, "half of it arrives": true} {
			t.Run(name+"/"+half, func(t *testing.T) {
				t.Parallel()
				var cut atomic.Int64
				var runs atomic.Int64
				s := start(t, func(ctx context.Context, req *request) (*response, error) {
					runs.Add(1)
					return place(ctx, req)
				}, nil, func(next http.Handler) http.Handler {
					return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
						if cut.Add(1) > 1 {
							next.ServeHTTP(w, r)
							return
						}
						answer := httptest.NewRecorder()
						next.ServeHTTP(answer, r)
						if keep {
							for key, values := range answer.Header() {
								w.Header()[key] = values
							}
							_, _ = w.Write(answer.Body.Bytes()[:answer.Body.Len()/2])
							_ = http.NewResponseController(w).Flush()
						}
						panic(http.ErrAbortHandler)
					})
				})
				client, _ := s.client(t, w, createMethod, retrying(idempotencyconnect.Retry{Pause: time.Millisecond}))
				resp, err := client.CallUnary(t.Context(), order("", "tea"))
				require.NoError(t, err)
				require.True(t, idempotencyconnect.Replayed(resp.Header()))
				require.EqualValues(t, 2, cut.Load())
				require.EqualValues(t, 1, runs.Load())
				require.Equal(t, 1, s.orders(t))
			})
		}
	}
}

// In progress, the client comes back when the server says.
func TestClient_WaitsAsLongAsTheServerSays(t *testing.T) {
	t.Parallel()
	s := start(t, place, nil)
	impatient, _ := s.runner.Operation("order.impatient")
	key, err := impatient.Key(idempotency.SingleTenant, "k")
	require.NoError(t, err)
	release := idempotencytest.InProgress(t, s.pool, key)
	client, sent := s.client(t, wires["gRPC, HTTP/2"], createMethod, retrying(idempotencyconnect.Retry{Attempts: 100, Pause: time.Millisecond}))
	began, done := time.Now(), make(chan error, 1)
	go func() {
		_, err := client.CallUnary(t.Context(), order("k", "tea"))
		done <- err
	}()
	require.Eventually(t, func() bool {
		sent.mu.Lock()
		defer sent.mu.Unlock()
		return len(sent.bodies) > 0
	}, 30*time.Second, time.Millisecond)
	release()
	require.NoError(t, <-done)
	require.GreaterOrEqual(t, time.Since(began), time.Second)
}

func TestErrorOf_EveryErrorHasItsReason(t *testing.T) {
	t.Parallel()
	for _, test := range []struct {
		err    error
		code   connect.Code
		reason string
		again  bool
	}{
		{idempotency.ErrOutcomeUnknown, connect.CodeUnavailable, idempotencygrpc.ReasonOutcomeUnknown, true},
		{&idempotency.InProgressError{RetryAfter: time.Second}, connect.CodeAborted, idempotencygrpc.ReasonInProgress, true},
		{idempotency.ErrRestart, connect.CodeUnavailable, idempotencygrpc.ReasonUnavailable, true},
		{&idempotency.MismatchError{}, connect.CodeInvalidArgument, idempotencygrpc.ReasonMismatch, false},
		{context.DeadlineExceeded, connect.CodeDeadlineExceeded, idempotencygrpc.ReasonUnavailable, false},
		{&idempotency.ConfigError{Field: "secret", Rule: "secret"}, connect.CodeInternal, idempotencygrpc.ReasonProgramError, false},
		{errors.New("secret"), connect.CodeInternal, idempotencygrpc.ReasonInternal, false},
	} {
		got := idempotencyconnect.ErrorOf(test.err)
		require.Equal(t, test.again, requireReason(t, got, test.code, test.reason) > 0, "%v", test.err)
		require.NotContains(t, got.Error(), "secret")
	}
}

func TestNew_RefusesAWrongConfig(t *testing.T) {
	t.Parallel()
	s := start(t, place, nil)
	methods := map[string]string{createMethod: create.Name}
	var config *idempotency.ConfigError
	for name, try := range map[string]struct {
		runner  *txn.Runner
		tenant  idempotencyconnect.Tenant
		methods map[string]string
		codes   []connect.Code
	}{
		"no runner":         {nil, idempotencyconnect.SingleTenant, methods, nil},
		"no tenant":         {s.runner, nil, methods, nil},
		"no methods":        {s.runner, idempotencyconnect.SingleTenant, nil, nil},
		"half a name":       {s.runner, idempotencyconnect.SingleTenant, map[string]string{"Create": create.Name}, nil},
		"no such operation": {s.runner, idempotencyconnect.SingleTenant, map[string]string{createMethod: "x"}, nil},
		"no code":           {s.runner, idempotencyconnect.SingleTenant, methods, []connect.Code{0}},
	} {
		_, err := idempotencyconnect.New(try.runner, try.tenant, try.methods, &idempotencyconnect.Config{NotRecorded: try.codes})
		require.ErrorAs(t, err, &config, name)
	}
}
