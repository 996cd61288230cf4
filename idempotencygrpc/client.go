package idempotencygrpc

import (
	"context"
	"math/rand/v2"
	"time"

	"github.com/google/uuid"
	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
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

func (r Retry) withDefaults() Retry {
	if r.Attempts <= 0 {
		r.Attempts = 4
	}
	if r.Pause <= 0 {
		r.Pause = 100 * time.Millisecond
	}
	if r.MaxPause <= 0 {
		r.MaxPause = 5 * time.Second
	}
	return r
}

// UnaryClient gives a call of one of these methods a key, if it has none, and keeps it over its retries: after UNAVAILABLE, and
// after ABORTED where the server says when to come back. Other methods pass, since a call without protection must not be sent
// twice.
func UnaryClient(methods []string, retry Retry) grpc.UnaryClientInterceptor {
	protected := map[string]bool{}
	for _, method := range methods {
		protected[method] = true
	}
	retry = retry.withDefaults()
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
		pause := retry.Pause
		for attempt := 1; ; attempt++ {
			err := invoke(ctx, method, req, reply, cc, opts...)
			wait, again := worthARetry(err)
			if !again || attempt == retry.Attempts {
				return err
			}
			wait = min(max(wait, pause/2+rand.N(pause)), retry.MaxPause)
			pause = min(2*pause, retry.MaxPause)
			timer := time.NewTimer(wait)
			select {
			case <-timer.C:
			case <-ctx.Done():
				timer.Stop()
				return err // the last one says more than "deadline exceeded"
			}
		}
	}
}

// worthARetry: with the same key the same call may end otherwise.
func worthARetry(err error) (pause time.Duration, again bool) {
	s := status.Convert(err)
	for _, detail := range s.Details() {
		if info, is := detail.(*errdetails.RetryInfo); is {
			pause = info.GetRetryDelay().AsDuration()
		}
	}
	return pause, s.Code() == codes.Unavailable || s.Code() == codes.Aborted && pause > 0
}

// WithKey gives the calls made with the context a key of the caller's own: for one that must survive the process, since it is
// stored with what it is for.
func WithKey(ctx context.Context, key string) context.Context {
	return metadata.AppendToOutgoingContext(ctx, MetadataKey, key)
}

// Replayed reads a call's header metadata (grpc.Header): was the answer recorded before?
func Replayed(header metadata.MD) bool { return len(header.Get(MetadataReplayed)) > 0 }
