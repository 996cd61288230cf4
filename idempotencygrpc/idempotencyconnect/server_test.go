package idempotencyconnect_test

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"connectrpc.com/connect"
	"github.com/stretchr/testify/require"
	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc"
	"google.golang.org/grpc/metadata"
	"google.golang.org/protobuf/types/known/wrapperspb"

	"github.com/pgonce/pgonce/idempotency"
	"github.com/pgonce/pgonce/idempotency/idempotencytest"
	"github.com/pgonce/pgonce/idempotencygrpc"
	"github.com/pgonce/pgonce/idempotencygrpc/idempotencyconnect"
	"github.com/pgonce/pgonce/txn"
)

// requireReason checks an error of ours and returns the pause it asks for.
func requireReason(t *testing.T, err error, code connect.Code, reason string) (pause time.Duration) {
	t.Helper()
	var e *connect.Error
	require.ErrorAs(t, err, &e)
	require.Equal(t, code, e.Code(), "%v", err)
	found := ""
	for _, detail := range e.Details() {
		message, err := detail.Value()
		require.NoError(t, err)
		switch d := message.(type) {
		case *errdetails.ErrorInfo:
			require.Equal(t, idempotencyconnect.ErrorDomain, d.Domain)
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
	for name, w := range wires {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := start(t, func(ctx context.Context, req *request) (*response, error) {
				resp, err := place(ctx, req)
				if err == nil {
					resp.Header().Set("Shop-Stock", "low")
				}
				return resp, err
			}, nil)
			client, sent := s.client(t, w, createMethod)
			first, err := client.CallUnary(t.Context(), order("k", "tea"))
			require.NoError(t, err)
			require.False(t, idempotencyconnect.Replayed(first.Header()))
			require.Equal(t, "low", first.Header().Get("Shop-Stock"), "the handler's own headers")
			for range 3 {
				again, err := client.CallUnary(t.Context(), order("k", "tea"))
				require.NoError(t, err)
				require.True(t, idempotencyconnect.Replayed(again.Header()))
				require.Equal(t, first.Msg.Value, again.Msg.Value)
			}
			for _, body := range sent.bodies[1:] {
				if !strings.HasPrefix(name, "gRPC-Web") { // whose body has the trailers in it
					require.Equal(t, sent.bodies[0].Bytes(), body.Bytes(), "byte for byte")
				}
			}
			require.Equal(t, w.http2, sent.protos[0] == "HTTP/2.0")
			other, err := client.CallUnary(t.Context(), order("k2", "tea"))
			require.NoError(t, err)
			require.NotEqual(t, first.Msg.Value, other.Msg.Value)
			require.Equal(t, 2, s.orders(t))
			_, err = client.CallUnary(t.Context(), order("k", "coffee"))
			require.Zero(t, requireReason(t, err, connect.CodeInvalidArgument, idempotencygrpc.ReasonMismatch))

			_, err = s.pool.Exec(t.Context(), `UPDATE idempotency.records SET result_expires_at = statement_timestamp() - interval '1 s'`)
			require.NoError(t, err)
			_, err = client.CallUnary(t.Context(), order("k", "tea"))
			requireReason(t, err, connect.CodeFailedPrecondition, idempotencygrpc.ReasonResultGone)
			require.Equal(t, 2, s.orders(t))
			require.Empty(t, s.log.String(), "nobody has to know")
		})
	}
}

// Which error is replayed, and which is asked for again; what the handler wrote is rolled back in any case.
func TestUnary_Errors(t *testing.T) {
	t.Parallel()
	recorded := map[connect.Code]bool{
		connect.CodeInvalidArgument: true, connect.CodeNotFound: true, connect.CodeAlreadyExists: true,
		connect.CodeFailedPrecondition: true, connect.CodeOutOfRange: true,
	}
	for name, w := range wires {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			var runs atomic.Int64
			s := start(t, func(ctx context.Context, req *request) (*response, error) {
				text := req.Msg.Value
				runs.Add(1)
				if _, err := place(ctx, req); err != nil {
					return nil, err
				}
				var code connect.Code
				if err := code.UnmarshalText([]byte(text)); err != nil {
					return nil, err
				}
				failure := connect.NewError(code, errors.New("said "+text))
				detail, err := connect.NewErrorDetail(&errdetails.ErrorInfo{Reason: "OUT_OF_STOCK", Domain: "shop"})
				failure.AddDetail(detail)
				failure.Meta().Set("Shop-Stock", "none")
				return nil, errors.Join(failure, err)
			}, nil)
			client, _ := s.client(t, w, createMethod)
			for code := connect.CodeCanceled; code <= connect.CodeUnauthenticated; code++ {
				before := runs.Load()
				for i := range 2 {
					_, err := client.CallUnary(t.Context(), order(code.String(), code.String()))
					var got *connect.Error
					require.ErrorAs(t, err, &got)
					require.Equal(t, code, got.Code())
					require.Equal(t, "said "+code.String(), strings.TrimPrefix(got.Message(), code.String()+": "))
					require.Len(t, got.Details(), 1)
					detail, err := got.Details()[0].Value()
					require.NoError(t, err)
					require.Equal(t, "OUT_OF_STOCK", detail.(*errdetails.ErrorInfo).Reason)
					replayed := i == 1 && recorded[code]
					require.Equal(t, replayed, idempotencyconnect.Replayed(got.Meta()), code)
					require.Equal(t, replayed, got.Meta().Get("Shop-Stock") == "", "headers are the run's own: %v", code)
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
		})
	}
}

func TestUnary_ManyAtOnce(t *testing.T) {
	t.Parallel()
	s := start(t, func(ctx context.Context, req *request) (*response, error) {
		time.Sleep(20 * time.Millisecond)
		return place(ctx, req)
	}, nil)
	client, _ := s.client(t, wires["gRPC, HTTP/2"], createMethod)
	var group sync.WaitGroup
	const keys, callers = 5, 8
	for i := range keys * callers {
		group.Go(func() {
			_, err := client.CallUnary(t.Context(), order(fmt.Sprint("k", i%keys), "tea"))
			if err != nil && connect.CodeOf(err) != connect.CodeAborted { // the operation waits for nobody
				t.Error(err)
			}
		})
	}
	group.Wait()
	require.Equal(t, keys, s.orders(t))
}

func TestUnary_Keys(t *testing.T) {
	t.Parallel()
	s := start(t, place, nil)
	client, _ := s.client(t, wires["connect, HTTP/1.1"], createMethod)
	_, err := client.CallUnary(t.Context(), order("", "tea"))
	requireReason(t, err, connect.CodeInvalidArgument, idempotencygrpc.ReasonKeyMissing)
	_, err = client.CallUnary(t.Context(), order(strings.Repeat("x", 256), "tea"))
	requireReason(t, err, connect.CodeInvalidArgument, idempotencygrpc.ReasonKeyInvalid)
	twice := order("a", "tea")
	twice.Header().Add(idempotencyconnect.HeaderKey, "b")
	_, err = client.CallUnary(t.Context(), twice)
	requireReason(t, err, connect.CodeInvalidArgument, idempotencygrpc.ReasonKeyInvalid)
	require.Zero(t, s.orders(t))

	open := start(t, place, &idempotencyconnect.Config{Optional: true})
	client, _ = open.client(t, wires["connect, HTTP/1.1"], createMethod)
	_, err = client.CallUnary(t.Context(), order("", "tea"))
	require.ErrorContains(t, err, "no transaction")
	_, err = client.CallUnary(t.Context(), order("k", "tea"))
	require.NoError(t, err)
}

func TestUnary_InProgressSaysWhenToComeBack(t *testing.T) {
	t.Parallel()
	for name, w := range wires {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := start(t, place, nil)
			client, _ := s.client(t, w, createMethod)
			impatient, _ := s.runner.Operation("order.impatient")
			key, err := impatient.Key(idempotency.SingleTenant, "k")
			require.NoError(t, err)
			release := idempotencytest.InProgress(t, s.pool, key)
			_, err = client.CallUnary(t.Context(), order("k", "tea"))
			require.Equal(t, time.Second, requireReason(t, err, connect.CodeAborted, idempotencygrpc.ReasonInProgress))
			release()
			_, err = client.CallUnary(t.Context(), order("k", "tea"))
			require.NoError(t, err)
		})
	}
}

func TestUnary_WhatIsNotProtectedIsSaid(t *testing.T) {
	t.Parallel()
	answer := func(context.Context, *request) (*response, error) {
		return connect.NewResponse(wrapperspb.Int64(7)), nil
	}
	s := start(t, answer, nil)
	w := wires["connect, HTTP/2"]
	client, _ := s.client(t, w, createMethod)
	_, err := client.CallUnary(t.Context(), order("k", "tea"))
	requireReason(t, err, connect.CodeInternal, idempotencygrpc.ReasonProgramError)
	require.Contains(t, s.log.String(), "set Config.Untransacted")
	others, _ := s.client(t, w, listMethod)
	resp, err := others.CallUnary(t.Context(), order("", "tea"))
	require.NoError(t, err)
	require.EqualValues(t, 7, resp.Msg.Value, "methods that are not named pass")

	streams, _ := s.client(t, w, watchMethod)
	stream, err := streams.CallServerStream(t.Context(), order("k", "tea"))
	require.NoError(t, err)
	require.False(t, stream.Receive())
	requireReason(t, stream.Err(), connect.CodeInternal, idempotencygrpc.ReasonProgramError)
	require.ErrorContains(t, stream.Err(), "a stream cannot be protected")
	require.NoError(t, stream.Close())

	misled, _ := s.client(t, w, listMethod, connect.WithInterceptors(s.once))
	_, err = misled.CallUnary(t.Context(), order("k", "tea"))
	require.ErrorContains(t, err, "is for handlers")
	_, err = misled.CallServerStream(t.Context(), order("k", "tea"))
	require.ErrorContains(t, err, "is for handlers")

	accepting := start(t, answer, &idempotencyconnect.Config{Untransacted: true})
	client, _ = accepting.client(t, w, createMethod)
	for range 2 {
		resp, err = client.CallUnary(t.Context(), order("k", "tea"))
		require.NoError(t, err)
		require.EqualValues(t, 7, resp.Msg.Value)
	}
}

// A run after a rollback gets the request as it came.
func TestUnary_EveryRunHasTheRequestAsItCame(t *testing.T) {
	t.Parallel()
	var texts []string
	s := start(t, func(ctx context.Context, req *request) (*response, error) {
		texts = append(texts, req.Msg.Value+" "+req.Header().Get("Shop"))
		resp, err := place(ctx, req)
		if len(texts) == 1 {
			tx, _ := txn.FromContext(ctx)
			_, err = tx.Exec(ctx, `DO $$ BEGIN RAISE EXCEPTION 'once more' USING ERRCODE = '40001'; END $$`)
			return nil, err
		}
		return resp, err
	}, nil)
	client, _ := s.client(t, wires["connect, HTTP/1.1"], createMethod)
	req := order("k", "tea")
	req.Header().Set("Shop", "north")
	_, err := client.CallUnary(t.Context(), req)
	require.NoError(t, err)
	require.Equal(t, []string{"tea north", "tea north"}, texts)
	require.Equal(t, 1, s.orders(t))
}

// A key that was used by gRPC is replayed by Connect, and the other way round.
func TestUnary_RecordsAreThoseOfGRPC(t *testing.T) {
	t.Parallel()
	s := start(t, place, nil)
	byGRPC, err := idempotencygrpc.New(s.runner, idempotencygrpc.SingleTenant, map[string]string{createMethod: "order.impatient"}, nil)
	require.NoError(t, err)
	overGRPC := func(key, text string) (int64, error) {
		ctx := metadata.NewIncomingContext(t.Context(), metadata.Pairs(idempotencygrpc.MetadataKey, key))
		out, err := byGRPC.Unary()(ctx, wrapperspb.String(text), &grpc.UnaryServerInfo{FullMethod: createMethod}, func(ctx context.Context, in any) (any, error) {
			resp, err := place(ctx, connect.NewRequest(in.(*wrapperspb.StringValue)))
			if err != nil {
				return nil, err
			}
			return resp.Msg, nil
		})
		if err != nil {
			return 0, err
		}
		return out.(*wrapperspb.Int64Value).Value, nil
	}
	client, _ := s.client(t, wires["gRPC, HTTP/2"], createMethod)
	id, err := overGRPC("k", "tea")
	require.NoError(t, err)
	resp, err := client.CallUnary(t.Context(), order("k", "tea"))
	require.NoError(t, err)
	require.Equal(t, id, resp.Msg.Value)
	require.True(t, idempotencyconnect.Replayed(resp.Header()))
	resp, err = client.CallUnary(t.Context(), order("k2", "tea"))
	require.NoError(t, err)
	id, err = overGRPC("k2", "tea")
	require.NoError(t, err)
	require.Equal(t, resp.Msg.Value, id)
	require.Equal(t, 2, s.orders(t))

	for _, r := range []idempotencyconnect.Reply{
		{Message: wrapperspb.Int64(7)}, {Error: connect.NewError(connect.CodeNotFound, errors.New("no tea"))},
	} {
		data, kind, err := r.Result()
		require.NoError(t, err)
		var over idempotencygrpc.Reply
		require.NoError(t, over.DecodeResult(kind, data))
		var back idempotencyconnect.Reply
		require.NoError(t, back.DecodeResult(kind, data))
		require.Equal(t, r.Error == nil, back.Error == nil)
		require.Equal(t, r.Error == nil, over.Status == nil)
	}
}
