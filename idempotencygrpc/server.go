package idempotencygrpc

import (
	"context"

	"google.golang.org/grpc"
	"google.golang.org/grpc/metadata"

	"github.com/pgonce/pgonce/idempotencygrpc/internal/unary"
)

// Unary is the interceptor for grpc.UnaryInterceptor or grpc.ChainUnaryInterceptor, behind whatever authenticates.
func (i *Interceptor) Unary() grpc.UnaryServerInterceptor { return i.serve }

// Stream refuses streams of protected methods, which no record could hold; all others pass.
func (i *Interceptor) Stream() grpc.StreamServerInterceptor {
	return func(srv any, stream grpc.ServerStream, info *grpc.StreamServerInfo, handler grpc.StreamHandler) error {
		if refused := i.rules.RefuseStream(info.FullMethod); refused != nil {
			return refused.Err()
		}
		return handler(srv, stream)
	}
}

func (i *Interceptor) serve(ctx context.Context, in any, info *grpc.UnaryServerInfo, handler grpc.UnaryHandler) (any, error) {
	keys := metadata.ValueFromIncomingContext(ctx, MetadataKey)
	if !i.rules.Protects(info.FullMethod, keys) {
		return handler(ctx, in)
	}
	var latest *runStream
	out := i.rules.Do(ctx, &unary.Call{Method: info.FullMethod, Keys: keys, In: in, Handler: func(ctx context.Context, in any) (any, error) {
		ctx, latest = streamOfRun(ctx)
		return handler(ctx, in)
	}})
	if out.Own {
		latest.send()
	}
	if out.Replayed {
		_ = grpc.SetHeader(ctx, metadata.Pairs(MetadataReplayed, "true")) // an error: the call is over, and nobody reads it
	}
	switch {
	case out.Err != nil:
		return nil, out.Err
	case out.Status != nil:
		return nil, out.Status.Err()
	}
	return out.Message, nil
}
