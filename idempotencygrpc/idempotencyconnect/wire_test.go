package idempotencyconnect_test

import (
	"context"
	"errors"
	"net/http"
	"net/http/httptest"
	"strconv"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"connectrpc.com/connect"
	"github.com/stretchr/testify/require"
	"google.golang.org/protobuf/types/known/wrapperspb"

	"github.com/pgonce/pgonce/idempotencygrpc"
	"github.com/pgonce/pgonce/idempotencygrpc/idempotencyconnect"
	"github.com/pgonce/pgonce/txn"
)

func TestWire_KeysAreRefusedAlike(t *testing.T) {
	t.Parallel()
	for name, w := range wires {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := start(t, place, nil)
			client, _ := s.client(t, w, createMethod)
			_, err := client.CallUnary(t.Context(), order("", "tea"))
			requireReason(t, err, connect.CodeInvalidArgument, idempotencygrpc.ReasonKeyMissing)
			for _, wrong := range []string{strings.Repeat("x", 256), "\xff"} {
				_, err = client.CallUnary(t.Context(), order(wrong, "tea"))
				requireReason(t, err, connect.CodeInvalidArgument, idempotencygrpc.ReasonKeyInvalid)
			}
			twice := order("a", "tea")
			twice.Header().Add(idempotencyconnect.HeaderKey, "b")
			_, err = client.CallUnary(t.Context(), twice)
			requireReason(t, err, connect.CodeInvalidArgument, idempotencygrpc.ReasonKeyInvalid)
			require.Zero(t, s.orders(t))
		})
	}
}

// Headers and trailers, binary ones too, are those of the run; and what is compressed is the same message.
func TestWire_HeadersTrailersAndCompression(t *testing.T) {
	t.Parallel()
	binary := connect.EncodeBinaryHeader([]byte{0, 1, 0xff})
	for name, w := range wires {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := start(t, func(ctx context.Context, req *request) (*response, error) {
				refused := len(req.Msg.Value) < 10
				resp, err := place(ctx, req)
				if err != nil {
					return nil, err
				}
				if refused {
					failure := connect.NewError(connect.CodeNotFound, errors.New("no such tea"))
					failure.Meta().Set("Shop-Bin", binary)
					return nil, failure
				}
				resp.Header().Set("Shop-Bin", binary)
				resp.Trailer().Set("Shop-End-Bin", binary)
				return resp, nil
			}, nil)
			client, _ := s.client(t, w, createMethod, connect.WithSendGzip())
			large := strings.Repeat("tea ", 200_000)
			first, err := client.CallUnary(t.Context(), order("k", large))
			require.NoError(t, err)
			require.Equal(t, binary, first.Header().Get("Shop-Bin"))
			require.Equal(t, binary, first.Trailer().Get("Shop-End-Bin"))
			plain, _ := s.client(t, w, createMethod)
			again, err := plain.CallUnary(t.Context(), order("k", large))
			require.NoError(t, err)
			require.True(t, idempotencyconnect.Replayed(again.Header()))
			require.Equal(t, first.Msg.Value, again.Msg.Value)
			require.Empty(t, again.Header().Get("Shop-Bin"))
			for i := range 2 {
				_, err = client.CallUnary(t.Context(), order("k2", "tea"))
				var got *connect.Error
				require.ErrorAs(t, err, &got)
				require.Equal(t, connect.CodeNotFound, got.Code())
				require.Equal(t, i == 0, got.Meta().Get("Shop-Bin") == binary)
				require.Equal(t, i == 1, idempotencyconnect.Replayed(got.Meta()))
			}
			require.Equal(t, 1, s.orders(t))
		})
	}
}

// The deadline is over, or the client has hung up, while the handler runs on: it is done once, and the retry is told so.
func TestWire_TheClientDoesNotWaitForTheAnswer(t *testing.T) {
	t.Parallel()
	for name, w := range wires {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			var runs atomic.Int64
			running := make(chan struct{}, 2)
			clientIsGone := map[string]chan struct{}{"gone": make(chan struct{}), "late": make(chan struct{})}
			s := start(t, func(ctx context.Context, req *request) (*response, error) {
				resp, err := place(ctx, req)
				if err == nil { // the deadline may be over before
					runs.Add(1)
				}
				running <- struct{}{}
				select {
				case <-clientIsGone[req.Header().Get(idempotencyconnect.HeaderKey)]: // a slow machine: this is the retry
				default:
					<-clientIsGone[req.Header().Get(idempotencyconnect.HeaderKey)]
					<-ctx.Done()
				}
				return resp, err
			}, nil)
			client, _ := s.client(t, w, createMethod)
			ctx, hangUp := context.WithCancel(t.Context())
			go func() {
				<-running
				hangUp()
			}()
			_, err := client.CallUnary(ctx, order("gone", "tea"))
			require.Equal(t, connect.CodeCanceled, connect.CodeOf(err))
			close(clientIsGone["gone"])
			ctx, cancel := context.WithTimeout(t.Context(), time.Second)
			defer cancel()
			_, err = client.CallUnary(ctx, order("late", "tea"))
			require.Equal(t, connect.CodeDeadlineExceeded, connect.CodeOf(err))
			close(clientIsGone["late"])
			for key := range clientIsGone {
				var resp *response
				require.Eventually(t, func() bool { // the first may still be running
					resp, err = client.CallUnary(t.Context(), order(key, "tea"))
					return err == nil && idempotencyconnect.Replayed(resp.Header())
				}, 30*time.Second, 10*time.Millisecond)
			}
			require.Equal(t, 2, s.orders(t))
			require.EqualValues(t, 2, runs.Load())
		})
	}
}

// A failure whose text is not UTF-8 is recorded like any other.
func TestWire_TextOfAnErrorMayBeAnything(t *testing.T) {
	t.Parallel()
	for name, w := range wires {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			var runs atomic.Int64
			s := start(t, func(context.Context, *request) (*response, error) {
				runs.Add(1)
				return nil, connect.NewError(connect.CodeNotFound, errors.New("no tea \xff\x00 here"))
			}, nil)
			client, _ := s.client(t, w, createMethod)
			for range 2 {
				_, err := client.CallUnary(t.Context(), order("k", "tea"))
				require.Equal(t, connect.CodeNotFound, connect.CodeOf(err), "%v", err)
				require.ErrorContains(t, err, "no tea \uFFFD\x00 here")
			}
			require.EqualValues(t, 1, runs.Load())
		})
	}
}

// A response without a message is an error, and nothing is recorded.
func TestWire_NoMessageIsAnError(t *testing.T) {
	t.Parallel()
	for name, w := range wires {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := start(t, func(ctx context.Context, req *request) (*response, error) {
				_, err := place(ctx, req)
				return connect.NewResponse[wrapperspb.Int64Value](nil), err
			}, nil)
			client, _ := s.client(t, w, createMethod)
			_, err := client.CallUnary(t.Context(), order("k", "tea"))
			requireReason(t, err, connect.CodeInternal, idempotencygrpc.ReasonProgramError)
			require.Zero(t, s.orders(t))
		})
	}
}

// What a run has set in the call's own headers and trailers, as handlers without connect.Response do, is sent if that run counts.
func TestWire_HeadersOfTheCallAreThoseOfTheRunThatCounts(t *testing.T) {
	t.Parallel()
	for name, w := range wires {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			var runs atomic.Int64
			s := start(t, func(ctx context.Context, req *request) (*response, error) {
				text := req.Msg.Value
				info, is := connect.CallInfoForHandlerContext(ctx)
				require.True(t, is)
				run := strconv.FormatInt(runs.Add(1), 10)
				info.ResponseHeader().Add("Shop-Run", run)
				info.ResponseTrailer().Add("Shop-End", run)
				resp, err := place(ctx, req)
				if err != nil {
					return nil, err
				}
				tx, _ := txn.FromContext(ctx)
				if text == "again" && run == "1" {
					_, err = tx.Exec(ctx, `DO $$ BEGIN RAISE EXCEPTION 'once more' USING ERRCODE = '40001'; END $$`)
				}
				return resp, err
			}, nil)
			client, _ := s.client(t, w, createMethod)
			resp, err := client.CallUnary(t.Context(), order("again", "again"))
			require.NoError(t, err)
			require.EqualValues(t, 2, runs.Load())
			require.Equal(t, []string{"2"}, resp.Header().Values("Shop-Run"))
			require.Equal(t, []string{"2"}, resp.Trailer().Values("Shop-End"))
			resp, err = client.CallUnary(t.Context(), order("again", "again"))
			require.NoError(t, err)
			require.Empty(t, resp.Header().Values("Shop-Run"))
		})
	}
}

// A method without side effects may be asked by GET. It passes, or is protected like any other where it is named.
func TestWire_GET(t *testing.T) {
	t.Parallel()
	for name, codec := range map[string][]connect.ClientOption{"proto": nil, "JSON": {connect.WithProtoJSON()}} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			var asked atomic.Int64
			s := start(t, nil, nil)
			h := func(ctx context.Context, req *request) (*response, error) {
				asked.Add(1)
				require.Equal(t, http.MethodGet, req.HTTPMethod())
				if _, inside := txn.FromContext(ctx); inside {
					return place(ctx, req)
				}
				return connect.NewResponse(wrapperspb.Int64(7)), nil
			}
			mux := http.NewServeMux()
			safe := connect.WithIdempotency(connect.IdempotencyNoSideEffects)
			for _, method := range []string{createMethod, listMethod} {
				mux.Handle(method, connect.NewUnaryHandler(method, h, connect.WithInterceptors(s.once), safe))
			}
			server := httptest.NewServer(mux)
			t.Cleanup(server.Close)
			client := func(method string) *connect.Client[wrapperspb.StringValue, wrapperspb.Int64Value] {
				return connect.NewClient[wrapperspb.StringValue, wrapperspb.Int64Value](server.Client(), server.URL+method,
					append(codec, connect.WithHTTPGet(), safe)...)
			}
			for range 2 {
				resp, err := client(listMethod).CallUnary(t.Context(), order("", "tea"))
				require.NoError(t, err)
				require.EqualValues(t, 7, resp.Msg.Value)
			}
			require.EqualValues(t, 2, asked.Load())

			_, err := client(createMethod).CallUnary(t.Context(), order("", "tea"))
			requireReason(t, err, connect.CodeInvalidArgument, idempotencygrpc.ReasonKeyMissing)
			first, err := client(createMethod).CallUnary(t.Context(), order("k", "tea"))
			require.NoError(t, err)
			again, err := client(createMethod).CallUnary(t.Context(), order("k", "tea"))
			require.NoError(t, err)
			require.True(t, idempotencyconnect.Replayed(again.Header()))
			require.Equal(t, first.Msg.Value, again.Msg.Value)
			require.Equal(t, 1, s.orders(t))
			require.EqualValues(t, 3, asked.Load())
		})
	}
}
