// Package grpc is what the tests need of it.
package grpc

type CallOption interface{}
