package idempotencygrpc_test

import (
	"context"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"

	"github.com/pgonce/pgonce/idempotencygrpc"
)

// One key for all attempts of a call, another one for the next call.
func TestClient_KeepsItsKeyOverRetries(t *testing.T) {
	t.Parallel()
	var mu sync.Mutex
	var keys []string
	failures := 2
	s := start(t, func(ctx context.Context, text string) (int64, error) {
		mu.Lock()
		defer mu.Unlock()
		keys = append(keys, metadata.ValueFromIncomingContext(ctx, idempotencygrpc.MetadataKey)...)
		if failures > 0 {
			failures--
			return 0, status.Error(codes.Unavailable, "come back")
		}
		return place(ctx, text)
	})
	client := idempotencygrpc.UnaryClient([]string{createMethod}, idempotencygrpc.Retry{Pause: time.Millisecond})
	ctx := context.WithValue(t.Context(), clientKey{}, client)
	_, _, err := s.order(ctx, createMethod, "", "tea")
	require.NoError(t, err)
	require.Len(t, keys, 3)
	require.Equal(t, keys[0], keys[1])
	require.Equal(t, keys[0], keys[2])
	_, _, err = s.order(ctx, createMethod, "", "tea")
	require.NoError(t, err)
	require.NotEqual(t, keys[0], keys[3])
	require.Equal(t, 2, s.orders(t))
	_, _, err = s.order(ctx, createMethod, "mine", "tea")
	require.NoError(t, err)
	require.Equal(t, "mine", keys[4])

	failures = 100
	_, _, err = s.order(ctx, createMethod, "", "tea")
	require.Equal(t, codes.Unavailable, status.Code(err))
	require.Equal(t, 96, failures, "four attempts")
	before := failures
	_, _, err = s.order(ctx, listMethod, "", "tea")
	require.Equal(t, codes.Unavailable, status.Code(err))
	require.Equal(t, before-1, failures, "what is not protected is not sent twice")

	ended, end := context.WithCancel(ctx)
	defer end()
	pausing := idempotencygrpc.UnaryClient([]string{createMethod}, idempotencygrpc.Retry{Pause: time.Minute, MaxPause: time.Minute})
	slow := context.WithValue(ended, clientKey{}, grpc.UnaryClientInterceptor(
		func(ctx context.Context, method string, req, reply any, cc *grpc.ClientConn, invoke grpc.UnaryInvoker, opts ...grpc.CallOption) error {
			return pausing(ctx, method, req, reply, cc,
				func(ctx context.Context, method string, req, reply any, cc *grpc.ClientConn, opts ...grpc.CallOption) error {
					defer func() { time.AfterFunc(50*time.Millisecond, end) }() // behind the answer
					return invoke(ctx, method, req, reply, cc, opts...)
				}, opts...)
		}))
	began := time.Now()
	_, _, err = s.order(slow, createMethod, "", "tea")
	require.Equal(t, codes.Unavailable, status.Code(err), "the last answer, not the end of the context")
	require.Less(t, time.Since(began), 10*time.Second)
}
