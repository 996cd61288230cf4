package idempotencyclient

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"time"

	"github.com/sethvargo/go-retry"
)

// Transport is an http.RoundTripper that keeps a key over the tries of a request. It is safe for concurrent use.
type Transport struct {
	base   http.RoundTripper
	config Config
}

var _ http.RoundTripper = (*Transport)(nil)

// New returns a Transport that sends by base; nil: http.DefaultTransport. The error is a *ConfigError that names field and rule.
func New(base http.RoundTripper, cfg *Config) (*Transport, error) {
	if base == nil {
		base = http.DefaultTransport
	}
	config := cfg.withDefaults()
	if err := config.validate(); err != nil {
		return nil, err
	}
	return &Transport{base: base, config: config}, nil
}

// RoundTrip sends the request until there is an answer that is final, or no more to be tried: then it returns the last answer, or a
// *GaveUpError if the last attempt had none. The answer's Request tells the key.
func (t *Transport) RoundTrip(req *http.Request) (*http.Response, error) {
	if safe(req.Method) || !t.config.Protected(req) {
		return t.base.RoundTrip(req)
	}
	if req.Body != nil {
		defer func() { _ = req.Body.Close() }() // every attempt reads one of its own
	}
	if req.Body != nil && req.Body != http.NoBody && req.GetBody == nil {
		return nil, ErrBodyNotReplayable
	}
	key, err := t.keyFor(req)
	if err != nil {
		return nil, err
	}
	return (&call{t: t, req: req, key: key}).run()
}

func safe(method string) bool {
	switch method {
	case http.MethodGet, http.MethodHead, http.MethodOptions, http.MethodTrace, "":
		return true
	}
	return false
}

// call is one request with all its attempts.
type call struct {
	t   *Transport
	req *http.Request
	key string

	attempts int
	unknown  bool           // an attempt may have done it
	last     *http.Response // that was worth a retry
	problem  *ProblemError  // the same, read
	pause    time.Duration  // that it asked for
}

// errNothing is not retried away: the base is broken, and no other attempt comes to anything else.
var errNothing = errors.New("idempotencyclient: the base transport returned neither an answer nor an error")

// minProblem is how much of an answer that may be a problem is read whatever MaxAnswer says: half a problem tells nothing.
const minProblem = 64 << 10

// errAnswered marks an attempt whose answer is worth a retry.
var errAnswered = errors.New("answered")

func (c *call) run() (*http.Response, error) {
	// The caller reads the rest of a long answer after we have returned: the limit ends attempts and pauses, and only they know it.
	over, cancel := bounded(c.req.Context(), c.t.config.MaxTime)
	defer cancel()
	resp, err := retry.DoValue(over, c.backoff(over), c.attempt)
	switch {
	case err == nil:
		return resp, nil
	case errors.Is(err, errAnswered):
		return c.last, nil
	}
	if c.last != nil {
		_ = c.last.Body.Close() // the limit or the context has ended in a pause
	}
	if c.problem != nil && over.Err() != nil {
		err = fmt.Errorf("%w, after %w", err, c.problem) // which says more than "deadline exceeded"
	}
	return nil, &GaveUpError{Key: c.key, Attempts: c.attempts, Unknown: c.unknown, Err: err}
}

// backoff tells the pause before another attempt, and whether there is one.
func (c *call) backoff(ctx context.Context) retry.Backoff {
	config := c.t.config
	growing := retry.WithCappedDuration(config.MaxPause, retry.WithJitterPercent(25, retry.NewExponential(config.Pause)))
	return retry.WithMaxRetries(uint64(config.Attempts-1), retry.BackoffFunc(func() (time.Duration, bool) { //nolint:gosec // validated
		pause, _ := growing.Next() // it never ends by itself
		pause = max(pause, c.pause)
		deadline, has := ctx.Deadline()
		return pause, has && time.Until(deadline) <= pause
	}))
}

func (c *call) attempt(ctx context.Context) (*http.Response, error) {
	c.attempts++
	if c.last != nil {
		_ = c.last.Body.Close() // nobody is going to read it
		c.last = nil
	}
	resp, text, err := c.send(ctx)
	if err != nil {
		c.unknown = c.unknown || !unsent(err)
		if over := ctx.Err(); over != nil {
			return nil, fmt.Errorf("%w: %w", over, err) // the attempt says no more than that it was cancelled
		}
		if final(err) {
			return nil, err
		}
		c.pause = 0
		return nil, retry.RetryableError(err)
	}
	p := problemOf(resp, text)
	if !c.t.worthARetry(p) {
		return resp, nil
	}
	c.unknown = c.unknown || errors.Is(p, ErrOutcomeUnknown) || errors.Is(p, ErrInProgress)
	c.last, c.problem, c.pause = resp, p, p.RetryAfter
	return nil, retry.RetryableError(errAnswered)
}

// send makes one attempt, and reads its answer. What stands behind MaxAnswer is left to be read in the response's Body, which is
// the whole of it in any case.
func (c *call) send(ctx context.Context) (*http.Response, []byte, error) {
	// The answer's body must not end with the call's limit: only the caller's context reaches as far as that.
	attempt, cancel := bounded(c.req.Context(), c.t.config.AttemptTime)
	stop := context.AfterFunc(ctx, cancel)
	resp, text, err := c.exchange(attempt, cancel) //nolint:contextcheck // see above
	stop()
	if err != nil {
		cancel()
	}
	return resp, text, err
}

func (c *call) exchange(ctx context.Context, cancel context.CancelFunc) (*http.Response, []byte, error) {
	again := c.req.Clone(ctx)
	if c.req.GetBody != nil {
		body, err := c.req.GetBody()
		if err != nil {
			return nil, nil, &bodyError{err}
		}
		again.Body = body
	}
	if again.Header == nil {
		again.Header = http.Header{}
	}
	again.Header[HeaderKey] = []string{c.key}
	resp, err := c.t.base.RoundTrip(again)
	switch {
	case err != nil:
		if resp != nil && resp.Body != nil {
			_ = resp.Body.Close() // of a base that breaks the rules: the error counts
		}
		return nil, nil, err
	case resp == nil:
		return nil, nil, errNothing
	case resp.Body == nil:
		resp.Body = http.NoBody
	}
	if resp.Request == nil || resp.Request.Header.Get(HeaderKey) == "" {
		resp.Request = again // it tells the key, whatever the base is
	}
	limit := c.t.config.MaxAnswer
	if resp.StatusCode >= http.StatusBadRequest {
		limit = max(limit, minProblem)
	}
	text, err := io.ReadAll(io.LimitReader(resp.Body, int64(limit)+1))
	if err != nil {
		_ = resp.Body.Close() // the error of the read is the one that counts
		return nil, nil, fmt.Errorf("idempotencyclient: read the answer: %w", err)
	}
	if len(text) > limit {
		resp.Body = &longBody{io.MultiReader(bytes.NewReader(text), resp.Body), resp.Body, cancel}
		return resp, text, nil
	}
	_ = resp.Body.Close() // it has been read
	cancel()
	resp.Body = io.NopCloser(bytes.NewReader(text))
	return resp, text, nil
}

// longBody is an answer that was not read to its end. Its context ends when it is closed.
type longBody struct {
	io.Reader
	body   io.Closer
	cancel context.CancelFunc
}

func (b *longBody) Close() error {
	defer b.cancel()
	return b.body.Close()
}
