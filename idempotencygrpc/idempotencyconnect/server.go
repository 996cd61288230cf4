package idempotencyconnect

import (
	"context"
	"errors"
	"maps"
	"reflect"

	"connectrpc.com/connect"
	"google.golang.org/protobuf/proto"

	"github.com/pgonce/pgonce/idempotencygrpc/internal/unary"
)

// WrapUnary is connect.Interceptor's.
func (i *Interceptor) WrapUnary(next connect.UnaryFunc) connect.UnaryFunc {
	return func(ctx context.Context, req connect.AnyRequest) (connect.AnyResponse, error) {
		if req.Spec().IsClient {
			return nil, errForHandlers
		}
		method, keys := req.Spec().Procedure, req.Header().Values(HeaderKey)
		if !i.rules.Protects(method, keys) {
			return next(ctx, req)
		}
		// What this call's own handler came to, with its headers.
		var latest connect.AnyResponse
		var latestErr error
		out := i.rules.Do(ctx, &unary.Call{Method: method, Keys: keys, In: req.Any(), Handler: func(ctx context.Context, in any) (any, error) {
			if latest, latestErr = next(ctx, withMessage(req, in)); latestErr != nil {
				return nil, latestErr
			}
			return latest.Any(), nil
		}})
		switch {
		case out.Err != nil:
			return nil, out.Err
		case out.Status != nil:
			err := errorOf(out.Status)
			if out.Replayed {
				err.Meta().Set(HeaderReplayed, "true")
			} else if own, is := errors.AsType[*connect.Error](latestErr); is && out.Recorded && !connect.IsWireError(latestErr) {
				maps.Copy(err.Meta(), own.Meta())
			}
			return nil, err
		case latest != nil && latest.Any() == any(out.Message):
			return latest, nil
		}
		answer := reply{connect.NewResponse(&struct{}{}), out.Message}
		if out.Replayed {
			answer.Header().Set(HeaderReplayed, "true")
		}
		return answer, nil
	}
}

var errForHandlers = connect.NewError(connect.CodeInternal, errors.New("this interceptor is for handlers: give clients that of idempotencyconnect.Client"))

// reply is a response whose message's type nobody here knows.
type reply struct {
	connect.AnyResponse
	message proto.Message
}

// Any is connect.AnyResponse's.
func (r reply) Any() any { return r.message }

// withMessage is the request with another message of its type. A request cannot be made without knowing that type, which only
// the handler does.
func withMessage(req connect.AnyRequest, message any) connect.AnyRequest {
	again := reflect.New(reflect.TypeOf(req).Elem())
	again.Elem().Set(reflect.ValueOf(req).Elem())
	again.Elem().FieldByName("Msg").Set(reflect.ValueOf(message))
	return again.Interface().(connect.AnyRequest)
}

// WrapStreamingHandler is connect.Interceptor's. It refuses streams of protected methods, which no record could hold; all others
// pass.
func (i *Interceptor) WrapStreamingHandler(next connect.StreamingHandlerFunc) connect.StreamingHandlerFunc {
	return func(ctx context.Context, conn connect.StreamingHandlerConn) error {
		if refused := i.rules.RefuseStream(conn.Spec().Procedure); refused != nil {
			return errorOf(refused)
		}
		return next(ctx, conn)
	}
}

// WrapStreamingClient is connect.Interceptor's. It refuses: the interceptor is for handlers.
func (*Interceptor) WrapStreamingClient(connect.StreamingClientFunc) connect.StreamingClientFunc {
	return func(_ context.Context, spec connect.Spec) connect.StreamingClientConn {
		return refusedStream{spec, errForHandlers}
	}
}
