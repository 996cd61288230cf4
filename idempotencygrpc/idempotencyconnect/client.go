package idempotencyconnect

import (
	"context"
	"errors"
	"maps"
	"net/http"
	"time"

	"connectrpc.com/connect"
	"github.com/google/uuid"

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

// Client gives a call of one of these methods a key, if it has none, and keeps it over its retries: after unavailable, after aborted
// where the server says when to come back, and where the answer was lost on its way. Other methods pass, since a call without
// protection must not be sent twice. Streams of these methods are refused. A key that must survive the process is stored with
// what it is for, and set in the request's headers.
func Client(methods []string, retry Retry) connect.Interceptor {
	c := &client{methods: map[string]bool{}, retry: unary.Retry(retry).WithDefaults()}
	for _, method := range methods {
		c.methods[method] = true
	}
	return c
}

type client struct {
	methods map[string]bool
	retry   unary.Retry
}

func (c *client) WrapUnary(next connect.UnaryFunc) connect.UnaryFunc {
	return func(ctx context.Context, req connect.AnyRequest) (resp connect.AnyResponse, err error) {
		if !c.methods[req.Spec().Procedure] {
			return next(ctx, req)
		}
		header := req.Header()
		if header.Get(HeaderKey) == "" {
			id, err := uuid.NewV7()
			if err != nil {
				return nil, err
			}
			header.Set(HeaderKey, id.String())
		}
		first := header.Clone() // sending adds to them
		err = c.retry.Do(ctx, func() (err error) {
			clear(header)
			maps.Copy(header, first.Clone())
			resp, err = next(ctx, req)
			return err
		}, func(err error) (time.Duration, bool) {
			pause, again := unary.WorthARetry(statusOfCall(err))
			return pause, again || lost(ctx, err)
		})
		return resp, err
	}
}

// lost reports whether an answer did not arrive, or not whole: the error was made here, and not by the server.
func lost(ctx context.Context, err error) bool {
	switch connect.CodeOf(err) {
	case connect.CodeUnknown, connect.CodeInternal, connect.CodeInvalidArgument:
		return !connect.IsWireError(err) && ctx.Err() == nil
	}
	return false
}

func (c *client) WrapStreamingClient(next connect.StreamingClientFunc) connect.StreamingClientFunc {
	return func(ctx context.Context, spec connect.Spec) connect.StreamingClientConn {
		if c.methods[spec.Procedure] {
			return refusedStream{spec, connect.NewError(connect.CodeInternal, errors.New("a stream cannot be protected by a key: take "+spec.Procedure+" off the methods"))}
		}
		return next(ctx, spec)
	}
}

func (*client) WrapStreamingHandler(next connect.StreamingHandlerFunc) connect.StreamingHandlerFunc {
	return next
}

// Replayed reports whether an answer was recorded before: of a response's headers, or of an error's.
func Replayed(header http.Header) bool { return header.Get(HeaderReplayed) != "" }

// refusedStream is a client's stream that was never begun.
type refusedStream struct {
	spec connect.Spec
	err  error
}

func (s refusedStream) Spec() connect.Spec           { return s.spec }
func (s refusedStream) Peer() connect.Peer           { return connect.Peer{} }
func (s refusedStream) Send(any) error               { return s.err }
func (s refusedStream) RequestHeader() http.Header   { return http.Header{} }
func (s refusedStream) CloseRequest() error          { return s.err }
func (s refusedStream) Receive(any) error            { return s.err }
func (s refusedStream) ResponseHeader() http.Header  { return http.Header{} }
func (s refusedStream) ResponseTrailer() http.Header { return http.Header{} }
func (s refusedStream) CloseResponse() error         { return s.err }
