package idempotencygrpc

import (
	"context"
	"errors"
	"fmt"
	"log/slog"

	"github.com/jackc/pgx/v5"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	"github.com/pgonce/pgonce/idempotency"
	"github.com/pgonce/pgonce/txn"
)

// Unary is the interceptor for grpc.UnaryInterceptor or grpc.ChainUnaryInterceptor, behind whatever authenticates.
func (i *Interceptor) Unary() grpc.UnaryServerInterceptor { return i.serve }

// Stream refuses streams of protected methods, which no record could hold; all others pass.
func (i *Interceptor) Stream() grpc.StreamServerInterceptor {
	return func(srv any, stream grpc.ServerStream, info *grpc.StreamServerInfo, handler grpc.StreamHandler) error {
		if _, protected := i.methods[info.FullMethod]; protected {
			return statusOf(codes.Internal, ReasonInternal, "a stream cannot be protected by a key: take "+info.FullMethod+" off the methods", 0).Err()
		}
		return handler(srv, stream)
	}
}

func (i *Interceptor) serve(ctx context.Context, in any, info *grpc.UnaryServerInfo, handler grpc.UnaryHandler) (any, error) {
	op, protected := i.methods[info.FullMethod]
	if !protected {
		return handler(ctx, in)
	}
	values := metadata.ValueFromIncomingContext(ctx, MetadataKey)
	if len(values) == 0 && i.config.Optional {
		return handler(ctx, in)
	}
	request, err := i.request(ctx, op, info.FullMethod, values, in)
	if err != nil {
		return nil, i.fail(ctx, info.FullMethod, err)
	}
	res, err := txn.WithIdempotency(ctx, i.runner, request, func(ctx context.Context, tx pgx.Tx) (Reply, error) {
		return i.run(ctx, tx, in, info.FullMethod, handler)
	})
	if res.Replayed {
		_ = grpc.SetHeader(ctx, metadata.Pairs(MetadataReplayed, "true")) // an error: the call is over, and nobody reads it
	}
	var failed *idempotency.FailedError
	var own *rolledBackError
	switch {
	case err == nil:
		return res.Value.Message, nil
	// Before all that may be wrapped in them: what the handler answered is not what happened.
	case errors.Is(err, idempotency.ErrOutcomeUnknown), errors.Is(err, idempotency.ErrTransactionEnded), errors.Is(err, idempotency.ErrRestart):
	case errors.As(err, &failed) && res.Value.Status != nil:
		return nil, res.Value.Status.Err()
	case errors.As(err, &own):
		return nil, own.err
	}
	return nil, i.fail(ctx, info.FullMethod, err)
}

// request makes of a call what the library wants to know.
func (i *Interceptor) request(ctx context.Context, op idempotency.Operation, method string, values []string, in any) (req idempotency.Request, err error) {
	switch len(values) {
	case 0:
		return req, statusOf(codes.InvalidArgument, ReasonKeyMissing, "the metadata "+MetadataKey+" must be set: to a new value for every new request, to the same one for its retries", 0).Err()
	case 1:
	default:
		return req, statusOf(codes.InvalidArgument, ReasonKeyInvalid, "the metadata "+MetadataKey+" must be set once", 0).Err()
	}
	tenant, err := i.tenant(ctx)
	if err != nil {
		return req, err
	}
	// The tenant first, with a value that is right: a wrong one is the program's fault and not the client's.
	if _, err := op.Key(tenant, "k"); err != nil {
		return req, &idempotency.ConfigError{Field: "tenant", Rule: "must be one for every call: " + err.Error()}
	}
	var invalid *idempotency.InvalidError
	if req.Key, err = op.Key(tenant, values[0]); errors.As(err, &invalid) {
		return req, statusOf(codes.InvalidArgument, ReasonKeyInvalid, "the metadata "+MetadataKey+" "+invalid.Rule, 0).Err()
	} else if err != nil {
		return req, err
	}
	message, is := in.(proto.Message)
	if !is {
		return req, &idempotency.ConfigError{Field: method, Rule: fmt.Sprintf("must take a protobuf message, takes %T", in)}
	}
	body, err := proto.MarshalOptions{Deterministic: true}.Marshal(message)
	if err != nil {
		return req, fmt.Errorf("idempotencygrpc: fingerprint: %w", err)
	}
	req.Fingerprint, req.Client = idempotency.FingerprintBytes([]byte(method), body), i.config.Client(ctx)
	return req, nil
}

// rolledBackError is a handler's error that is not recorded. Its caller gets it all the same.
type rolledBackError struct{ err error }

func (e *rolledBackError) Error() string { return e.err.Error() }

func (e *rolledBackError) Unwrap() error { return e.err }

// run runs the handler in the transaction.
func (i *Interceptor) run(ctx context.Context, tx pgx.Tx, in any, method string, handler grpc.UnaryHandler) (Reply, error) {
	if message, is := in.(proto.Message); is {
		in = proto.Clone(message) // what an earlier run did to it is forgotten
	}
	out, err := handler(ctx, in)
	if err != nil {
		s := status.Convert(err)
		if !i.recorded(s.Code()) {
			return Reply{}, &rolledBackError{err}
		}
		return Reply{Status: s}, txn.Final("grpc_"+s.Code().String(), errors.New("the handler answered "+s.Code().String()))
	}
	message, is := out.(proto.Message)
	switch {
	case !is || !message.ProtoReflect().IsValid():
		return Reply{}, &idempotency.ConfigError{Field: method, Rule: fmt.Sprintf("must return a protobuf message, returned %T", out)}
	case !i.config.Untransacted && !txn.Used(tx):
		return Reply{}, &idempotency.ConfigError{
			Field: "handler of " + method,
			Rule:  "must write through txn.FromContext, it succeeded and asked nothing of it: set Config.Untransacted if it has nothing to write",
		}
	}
	return Reply{Message: message}, nil
}

// fail makes a status, and tells the operator of those that are not the client's.
func (i *Interceptor) fail(ctx context.Context, method string, err error) error {
	if _, is := status.FromError(err); is {
		return err
	}
	s := StatusOf(err)
	if (s.Code() == codes.Internal || s.Code() == codes.Unavailable) && ctx.Err() == nil { // else the client has hung up
		i.config.Log.ErrorContext(ctx, "idempotent call failed", slog.String("method", method), slog.Any("error", err))
	}
	return s.Err()
}
