package idempotencygrpc

import (
	"context"
	"time"

	"github.com/google/uuid"
	"google.golang.org/grpc"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"

	"github.com/pgonce/pgonce/idempotencygrpc/internal/unary"
)

// Retry is how a client tries again. A zero field means its default.
type Retry struct {
	// Attempts at most, the first one included.
	// Default: 4.
	Attempts int
	// Pause is that before the second attempt. It doubles, with jitter; the server's RetryInfo is obeyed if it is longer.
	// Default: 100 ms.
	Pause time.Duration
	// MaxPause bounds them.
	// Default: 5 s.
	MaxPause time.Duration
}

// UnaryClient gives a call of one of these methods a key, if it has none, and keeps it over its retries: after UNAVAILABLE, and
// after ABORTED where the server says when to come back. Other methods pass, since a call without protection must not be sent
// twice.
func UnaryClient(methods []string, retry Retry) grpc.UnaryClientInterceptor {
	protected := map[string]bool{}
	for _, method := range methods {
		protected[method] = true
	}
	policy := unary.Retry(retry).WithDefaults()
	return func(ctx context.Context, method string, req, reply any, cc *grpc.ClientConn, invoke grpc.UnaryInvoker, opts ...grpc.CallOption) error {
		if !protected[method] {
			return invoke(ctx, method, req, reply, cc, opts...)
		}
		if sent, _ := metadata.FromOutgoingContext(ctx); len(sent.Get(MetadataKey)) == 0 {
			id, err := uuid.NewV7()
			if err != nil {
				return err
			}
			ctx = metadata.AppendToOutgoingContext(ctx, MetadataKey, id.String())
		}
		return policy.Do(ctx, func() error { return invoke(ctx, method, req, reply, cc, opts...) }, func(err error) (time.Duration, bool) {
			return unary.WorthARetry(status.Convert(err))
		})
	}
}

// WithKey gives the calls made with the context a key of the caller's own: for one that must survive the process, since it is
// stored with what it is for.
func WithKey(ctx context.Context, key string) context.Context {
	return metadata.AppendToOutgoingContext(ctx, MetadataKey, key)
}

// Replayed reads a call's header metadata (grpc.Header): was the answer recorded before?
func Replayed(header metadata.MD) bool { return len(header.Get(MetadataReplayed)) > 0 }
