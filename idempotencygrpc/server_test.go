package idempotencygrpc_test

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/protoadapt"
	"google.golang.org/protobuf/types/known/wrapperspb"

	"github.com/pgonce/pgonce/idempotency"
	"github.com/pgonce/pgonce/idempotency/idempotencytest"
	"github.com/pgonce/pgonce/idempotencygrpc"
)

// requireReason checks a status of ours and returns the pause it asks for.
func requireReason(t *testing.T, err error, code codes.Code, reason string) (pause time.Duration) {
	t.Helper()
	s := status.Convert(err)
	require.Equal(t, code, s.Code(), "%v", err)
	found := ""
	for _, detail := range s.Details() {
		switch d := detail.(type) {
		case *errdetails.ErrorInfo:
			require.Equal(t, idempotencygrpc.ErrorDomain, d.Domain)
			found = d.Reason
		case *errdetails.RetryInfo:
			pause = d.RetryDelay.AsDuration()
		}
	}
	require.Equal(t, reason, found, "%v", err)
	return pause
}

func TestUnary_OnceAndReplayed(t *testing.T) {
	t.Parallel()
	s := start(t, place)
	id, replayed, err := s.order(t.Context(), createMethod, "k", "tea")
	require.NoError(t, err)
	require.False(t, replayed)
	for range 3 {
		again, replayed, err := s.order(t.Context(), createMethod, "k", "tea")
		require.NoError(t, err)
		require.True(t, replayed)
		require.Equal(t, id, again)
	}
	other, replayed, err := s.order(t.Context(), createMethod, "k2", "tea")
	require.NoError(t, err)
	require.False(t, replayed)
	require.NotEqual(t, id, other)
	require.Equal(t, 2, s.orders(t))
	_, _, err = s.order(t.Context(), createMethod, "k", "coffee")
	require.Zero(t, requireReason(t, err, codes.InvalidArgument, idempotencygrpc.ReasonMismatch))

	_, err = s.pool.Exec(t.Context(), `UPDATE idempotency.records SET result_expires_at = statement_timestamp() - interval '1 s'`)
	require.NoError(t, err)
	_, _, err = s.order(t.Context(), createMethod, "k", "tea")
	requireReason(t, err, codes.FailedPrecondition, idempotencygrpc.ReasonResultGone)
	require.Equal(t, 2, s.orders(t))
	require.Empty(t, s.log.String(), "nobody has to know")
}

func TestUnary_ManyAtOnce(t *testing.T) {
	t.Parallel()
	s := start(t, func(ctx context.Context, text string) (int64, error) {
		time.Sleep(20 * time.Millisecond)
		return place(ctx, text)
	})
	var group sync.WaitGroup
	var fresh atomic.Int64
	const keys, callers = 10, 8
	for i := range keys * callers {
		group.Go(func() {
			_, replayed, err := s.order(t.Context(), createMethod, fmt.Sprint("k", i%keys), "tea")
			if err != nil {
				t.Error(err)
			}
			if !replayed {
				fresh.Add(1)
			}
		})
	}
	group.Wait()
	require.Equal(t, keys, s.orders(t))
	require.EqualValues(t, keys, fresh.Load())
}

// Which status is replayed, and which is asked for again; what the handler wrote is rolled back in any case.
func TestUnary_Statuses(t *testing.T) {
	t.Parallel()
	recorded := map[codes.Code]bool{
		codes.InvalidArgument: true, codes.NotFound: true, codes.AlreadyExists: true, codes.FailedPrecondition: true, codes.OutOfRange: true,
	}
	var runs atomic.Int64
	s := start(t, func(ctx context.Context, text string) (int64, error) {
		runs.Add(1)
		if _, err := place(ctx, text); err != nil {
			return 0, err
		}
		var code codes.Code
		for c := codes.OK; c <= codes.Unauthenticated; c++ {
			if c.String() == text {
				code = c
			}
		}
		with, err := status.New(code, "said "+text).WithDetails(protoadapt.MessageV1Of(&errdetails.ErrorInfo{Reason: "OUT_OF_STOCK", Domain: "shop"}))
		if err != nil {
			return 0, err
		}
		return 0, with.Err()
	})
	for code := codes.Canceled; code <= codes.Unauthenticated; code++ {
		before := runs.Load()
		for i := range 2 {
			_, replayed, err := s.order(t.Context(), createMethod, code.String(), code.String())
			got := status.Convert(err)
			require.Equal(t, code, got.Code())
			require.Equal(t, "said "+code.String(), got.Message())
			require.Len(t, got.Details(), 1)
			require.Equal(t, "OUT_OF_STOCK", got.Details()[0].(*errdetails.ErrorInfo).Reason)
			require.Equal(t, i == 1 && recorded[code], replayed, code)
		}
		want := int64(2)
		if recorded[code] {
			want = 1
		}
		require.Equal(t, want, runs.Load()-before, code)
	}
	require.Zero(t, s.orders(t))
	var failed int
	require.NoError(t, s.pool.QueryRow(t.Context(), `SELECT count(*) FROM idempotency.records WHERE state = 'FAILED'`).Scan(&failed))
	require.Equal(t, len(recorded), failed)
}

func TestUnary_Keys(t *testing.T) {
	t.Parallel()
	s := start(t, place)
	_, _, err := s.order(t.Context(), createMethod, "", "tea")
	requireReason(t, err, codes.InvalidArgument, idempotencygrpc.ReasonKeyMissing)
	for _, key := range []string{strings.Repeat("x", 256), "   "} {
		_, _, err = s.order(t.Context(), createMethod, key, "tea")
		code := status.Code(err)
		require.Equal(t, codes.InvalidArgument, code, key)
	}
	_, _, err = s.order(idempotencygrpc.WithKey(t.Context(), "a"), createMethod, "b", "tea")
	requireReason(t, err, codes.InvalidArgument, idempotencygrpc.ReasonKeyInvalid)
	require.Zero(t, s.orders(t))

	open := start(t, func(ctx context.Context, _ string) (int64, error) {
		_, err := place(ctx, "tea")
		return 0, err
	}, func(c *idempotencygrpc.Config) { c.Optional = true })
	_, _, err = open.order(t.Context(), createMethod, "", "tea")
	require.ErrorContains(t, err, "no transaction")
	_, _, err = open.order(t.Context(), createMethod, "k", "tea")
	require.NoError(t, err)
}

func TestUnary_InProgressSaysWhenToComeBack(t *testing.T) {
	t.Parallel()
	s := start(t, place)
	i, err := idempotencygrpc.New(s.runner, idempotencygrpc.SingleTenant, map[string]string{createMethod: "order.impatient"}, nil)
	require.NoError(t, err)
	impatient, _ := s.runner.Operation("order.impatient")
	key, err := impatient.Key(idempotency.SingleTenant, "k")
	require.NoError(t, err)
	release := idempotencytest.InProgress(t, s.pool, key)
	call := func() error {
		ctx := metadata.NewIncomingContext(t.Context(), metadata.Pairs(idempotencygrpc.MetadataKey, "k"))
		_, err := i.Unary()(ctx, wrapperspb.String("tea"), &grpc.UnaryServerInfo{FullMethod: createMethod}, func(ctx context.Context, _ any) (any, error) {
			id, err := place(ctx, "tea")
			return wrapperspb.Int64(id), err
		})
		return err
	}
	require.Equal(t, time.Second, requireReason(t, call(), codes.Aborted, idempotencygrpc.ReasonInProgress))
	release()
	require.NoError(t, call())

	// A panic goes on, and leaves nothing.
	ctx := metadata.NewIncomingContext(t.Context(), metadata.Pairs(idempotencygrpc.MetadataKey, "panic"))
	require.PanicsWithValue(t, "fault", func() {
		_, _ = i.Unary()(ctx, wrapperspb.String("tea"), &grpc.UnaryServerInfo{FullMethod: createMethod}, func(ctx context.Context, _ any) (any, error) {
			_, _ = place(ctx, "tea")
			panic("fault")
		})
	})
	require.Equal(t, 1, s.orders(t))
}

func TestUnary_WhatIsNotProtectedIsSaid(t *testing.T) {
	t.Parallel()
	s := start(t, func(context.Context, string) (int64, error) { return 7, nil })
	_, _, err := s.order(t.Context(), createMethod, "k", "tea")
	requireReason(t, err, codes.Internal, idempotencygrpc.ReasonProgramError)
	require.Contains(t, s.log.String(), "set Config.Untransacted")
	id, _, err := s.order(t.Context(), listMethod, "", "tea")
	require.NoError(t, err)
	require.EqualValues(t, 7, id, "methods that are not named pass")

	stream, err := s.conn.NewStream(t.Context(), &grpc.StreamDesc{ServerStreams: true}, watchMethod)
	require.NoError(t, err)
	require.NoError(t, stream.CloseSend())
	require.ErrorContains(t, stream.RecvMsg(new(wrapperspb.Int64Value)), "a stream cannot be protected")

	accepting := start(t, func(context.Context, string) (int64, error) { return 7, nil }, func(c *idempotencygrpc.Config) { c.Untransacted = true })
	for range 2 {
		id, _, err = accepting.order(t.Context(), createMethod, "k", "tea")
		require.NoError(t, err)
		require.EqualValues(t, 7, id)
	}
}

func TestStatusOf_EveryErrorHasItsReason(t *testing.T) {
	t.Parallel()
	key, err := create.Key(idempotency.SingleTenant, "k")
	require.NoError(t, err)
	for _, test := range []struct {
		err    error
		code   codes.Code
		reason string
		again  bool
	}{
		{idempotency.ErrOutcomeUnknown, codes.Unavailable, idempotencygrpc.ReasonOutcomeUnknown, true},
		{errors.Join(idempotency.ErrOutcomeUnknown, &idempotency.InProgressError{Key: key}), codes.Unavailable, idempotencygrpc.ReasonOutcomeUnknown, true},
		{&idempotency.InProgressError{Key: key, RetryAfter: time.Second}, codes.Aborted, idempotencygrpc.ReasonInProgress, true},
		{idempotency.ErrRestart, codes.Unavailable, idempotencygrpc.ReasonUnavailable, true},
		{idempotency.ErrLeaseLost, codes.Unavailable, idempotencygrpc.ReasonUnavailable, true},
		{idempotency.ErrReadOnly, codes.Unavailable, idempotencygrpc.ReasonUnavailable, true},
		{idempotency.ErrManual, codes.Aborted, idempotencygrpc.ReasonNeedsAPerson, false},
		{&idempotency.MismatchError{Key: key}, codes.InvalidArgument, idempotencygrpc.ReasonMismatch, false},
		{idempotency.ErrNotIssued, codes.InvalidArgument, idempotencygrpc.ReasonNotIssued, false},
		{&idempotency.FailedError{Code: "x"}, codes.Internal, idempotencygrpc.ReasonFailed, false},
		{&idempotency.ResultDecodeError{Err: errors.New("x")}, codes.Internal, idempotencygrpc.ReasonUnreadable, false},
		{context.DeadlineExceeded, codes.DeadlineExceeded, idempotencygrpc.ReasonUnavailable, false},
		{context.Canceled, codes.Canceled, idempotencygrpc.ReasonUnavailable, false},
		{&idempotency.ConfigError{Field: "secret", Rule: "secret"}, codes.Internal, idempotencygrpc.ReasonProgramError, false},
		{idempotency.ErrResultTooLarge, codes.Internal, idempotencygrpc.ReasonProgramError, false},
		{idempotency.ErrResultEncode, codes.Internal, idempotencygrpc.ReasonProgramError, false},
		{idempotency.ErrWrongMode, codes.Internal, idempotencygrpc.ReasonProgramError, false},
		{idempotency.ErrNested, codes.Internal, idempotencygrpc.ReasonProgramError, false},
		{errors.New("secret"), codes.Internal, idempotencygrpc.ReasonInternal, false},
	} {
		got := idempotencygrpc.StatusOf(test.err).Err()
		require.Equal(t, test.again, requireReason(t, got, test.code, test.reason) > 0, "%v", test.err)
		require.NotContains(t, got.Error(), "secret")
	}
}

func TestNew_RefusesAWrongConfig(t *testing.T) {
	t.Parallel()
	s := start(t, place)
	methods := map[string]string{createMethod: create.Name}
	var config *idempotency.ConfigError
	for name, try := range map[string]func() (*idempotencygrpc.Interceptor, error){
		"no runner": func() (*idempotencygrpc.Interceptor, error) {
			return idempotencygrpc.New(nil, idempotencygrpc.SingleTenant, methods, nil)
		},
		"no tenant": func() (*idempotencygrpc.Interceptor, error) { return idempotencygrpc.New(s.runner, nil, methods, nil) },
		"no methods": func() (*idempotencygrpc.Interceptor, error) {
			return idempotencygrpc.New(s.runner, idempotencygrpc.SingleTenant, nil, nil)
		},
		"half a name": func() (*idempotencygrpc.Interceptor, error) {
			return idempotencygrpc.New(s.runner, idempotencygrpc.SingleTenant, map[string]string{"Create": create.Name}, nil)
		},
		"no such operation": func() (*idempotencygrpc.Interceptor, error) {
			return idempotencygrpc.New(s.runner, idempotencygrpc.SingleTenant, map[string]string{createMethod: "x"}, nil)
		},
		"OK": func() (*idempotencygrpc.Interceptor, error) {
			return idempotencygrpc.New(s.runner, idempotencygrpc.SingleTenant, methods, &idempotencygrpc.Config{NotRecorded: []codes.Code{codes.OK}})
		},
	} {
		_, err := try()
		require.ErrorAs(t, err, &config, name)
	}
}
