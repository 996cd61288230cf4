// Package connect is what the tests need of it.
package connect

import "context"

type (
	Request[T any]               struct{ Msg *T }
	Response[T any]              struct{ Msg *T }
	Client[Req, Res any]         struct{}
	ServerStreamForClient[T any] struct{}
)

func (*Client[Req, Res]) CallUnary(ctx context.Context, request *Request[Req]) (*Response[Res], error) {
	return nil, nil
}

func (*Client[Req, Res]) CallServerStream(ctx context.Context, request *Request[Req]) (*ServerStreamForClient[Res], error) {
	return nil, nil
}
