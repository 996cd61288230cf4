package idempotencyconnect

import (
	"context"
	"errors"
	"maps"
	"net/http"
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
		metadata := metadataOf(ctx)
		out := i.rules.Do(ctx, &unary.Call{Method: method, Keys: keys, In: req.Any(), Handler: func(ctx context.Context, in any) (any, error) {
			metadata.restore()
			if latest, latestErr = next(ctx, withMessage(req, in)); latestErr != nil {
				return nil, latestErr
			}
			return latest.Any(), nil
		}})
		if !out.Own {
			metadata.restore()
		}
		switch {
		case out.Err != nil:
			return nil, out.Err
		case out.Status != nil:
			err := errorOf(out.Status)
			if out.Replayed {
				err.Meta().Set(HeaderReplayed, "true")
			} else if own, is := errors.AsType[*connect.Error](latestErr); is && out.Own && !connect.IsWireError(latestErr) {
				maps.Copy(err.Meta(), own.Meta())
			}
			return nil, err
		case out.Own:
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

// metadata are the call's own headers and trailers, which handlers without connect.Response set, as they were before any run.
type metadata struct{ header, trailer, headerBefore, trailerBefore http.Header }

func metadataOf(ctx context.Context) *metadata {
	info, is := connect.CallInfoForHandlerContext(ctx)
	if !is {
		return &metadata{}
	}
	m := &metadata{header: info.ResponseHeader(), trailer: info.ResponseTrailer()}
	m.headerBefore, m.trailerBefore = m.header.Clone(), m.trailer.Clone()
	return m
}

// restore forgets what a run that does not count has set.
func (m *metadata) restore() {
	clear(m.header)
	clear(m.trailer)
	maps.Copy(m.header, m.headerBefore.Clone())
	maps.Copy(m.trailer, m.trailerBefore.Clone())
}

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
