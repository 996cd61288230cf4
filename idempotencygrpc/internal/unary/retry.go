package unary

import (
	"context"
	"math/rand/v2"
	"time"

	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

// Retry is how a client tries again. The fields are documented in the edges.
type Retry struct {
	Attempts int
	Pause    time.Duration
	MaxPause time.Duration
}

// WithDefaults fills in what is not set.
func (r Retry) WithDefaults() Retry {
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

// Do sends a call until it ends for good, at most Attempts times. judge says whether another attempt is worth it, and how long
// the server asks to wait.
func (r Retry) Do(ctx context.Context, send func() error, judge func(error) (pause time.Duration, again bool)) error {
	pause := r.Pause
	for attempt := 1; ; attempt++ {
		err := send()
		if err == nil {
			return nil
		}
		wait, again := judge(err)
		if !again || attempt == r.Attempts {
			return err
		}
		wait = min(max(wait, pause/2+rand.N(pause)), r.MaxPause)
		pause = min(2*pause, r.MaxPause)
		timer := time.NewTimer(wait)
		select {
		case <-timer.C:
		case <-ctx.Done():
			timer.Stop()
			return err // the last one says more than "deadline exceeded"
		}
	}
}

// WorthARetry reports whether the same call with the same key may end otherwise.
func WorthARetry(s *status.Status) (pause time.Duration, again bool) {
	for _, detail := range s.Details() {
		if info, is := detail.(*errdetails.RetryInfo); is {
			pause = info.GetRetryDelay().AsDuration()
		}
	}
	return pause, s.Code() == codes.Unavailable || s.Code() == codes.Aborted && pause > 0
}
