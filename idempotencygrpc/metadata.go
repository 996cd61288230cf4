package idempotencygrpc

import (
	"context"
	"errors"
	"sync"

	"google.golang.org/grpc"
	"google.golang.org/grpc/metadata"
)

// runStream keeps the metadata that one run of a handler sends, until it is known that the run counts.
type runStream struct {
	grpc.ServerTransportStream

	mu              sync.Mutex
	header, trailer metadata.MD
	sent            bool
}

// streamOfRun returns the context of one run, with a stream of its own in it; nil where there is no call.
func streamOfRun(ctx context.Context) (context.Context, *runStream) {
	stream := grpc.ServerTransportStreamFromContext(ctx)
	if stream == nil {
		return ctx, nil
	}
	s := &runStream{ServerTransportStream: stream}
	return grpc.NewContextWithServerTransportStream(ctx, s), s
}

var errHeaderSent = errors.New("idempotencygrpc: SendHeader was called before")

// SetHeader is grpc.ServerTransportStream's.
func (s *runStream) SetHeader(md metadata.MD) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.sent {
		return errHeaderSent
	}
	s.header = metadata.Join(s.header, md)
	return nil
}

// SendHeader too: as everything else, the header waits for COMMIT.
func (s *runStream) SendHeader(md metadata.MD) error {
	if err := s.SetHeader(md); err != nil {
		return err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.sent = true
	return nil
}

// SetTrailer is grpc.ServerTransportStream's.
func (s *runStream) SetTrailer(md metadata.MD) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.trailer = metadata.Join(s.trailer, md)
	return nil
}

// send gives the call what the run has set.
func (s *runStream) send() {
	if s == nil {
		return
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	_ = s.ServerTransportStream.SetHeader(s.header) // an error: the call is over, and nobody reads it
	_ = s.ServerTransportStream.SetTrailer(s.trailer)
}
