package redisfront

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/pgonce/pgonce/idempotency"
)

// Name is the front's, in events and metrics.
const Name = "redis"

// Front is Redis before PostgreSQL.
type Front struct {
	client    redis.UniversalClient
	config    Config
	waiters   *waiters
	breaker   *breaker
	calls     *calls
	publisher *publisher
	quorum    *quorum // nil: marks are beside the entries

	operations map[string]*idempotency.Operation // of Do
}

var _ idempotency.Front = (*Front)(nil)

// New returns a front on the client, which stays its caller's. It does not connect. The client must be made with
// ContextTimeoutEnabled: without it go-redis waits for its own timeouts, however short Config.Timeout is. Close the front.
func New(client redis.UniversalClient, cfg *Config) (*Front, error) {
	if client == nil {
		return nil, &idempotency.ConfigError{Field: "redisfront: client", Rule: "must not be nil"}
	}
	config := cfg.withDefaults()
	if err := config.validate(); err != nil {
		return nil, err
	}
	if !contextTimeouts(client) {
		return nil, &idempotency.ConfigError{
			Field: "redisfront: client", Rule: "must be made with ContextTimeoutEnabled: Config.Timeout would not be kept otherwise",
		}
	}
	operations, err := config.cacheOperations()
	if err != nil {
		return nil, err
	}
	f := &Front{client: client, config: config, waiters: newWaiters(client), operations: operations}
	f.breaker = newBreaker(Name, f.namesOf("probe"), f.emit, f.tryMark)
	f.calls = newCalls(f)
	f.publisher = newPublisher(f)
	f.quorum = newQuorum(f)
	return f, nil
}

// contextTimeouts is true also for clients whose options cannot be seen.
func contextTimeouts(client redis.UniversalClient) bool {
	switch c := client.(type) {
	case *redis.Client:
		return c.Options().ContextTimeoutEnabled
	case *redis.ClusterClient:
		return c.Options().ContextTimeoutEnabled
	}
	return true
}

// Close sends what is still to be published, and ends what the front does beside its calls. Its client stays open.
func (f *Front) Close() error {
	err := f.publisher.close()
	f.calls.close()
	f.breaker.close()
	if f.quorum != nil {
		f.quorum.close()
	}
	return errors.Join(err, f.waiters.close())
}

// Name is Name.
func (*Front) Name() string { return Name }

// Near is false: it is another machine.
func (*Front) Near() bool { return false }

// Degraded reports whether Redis is not asked at the moment.
func (f *Front) Degraded() bool { return f.breaker.degraded() }

// Lookup returns the final record of a key, if it is of this epoch and its result is here.
func (f *Front) Lookup(ctx context.Context, ask idempotency.Ask) (idempotency.Record, bool, error) {
	n := f.names(ask.Key)
	reply, err := f.run(ctx, scriptLookup, n, []string{n.entry, n.mark}, ask.Epoch)
	if err != nil {
		return idempotency.Record{}, false, err
	}
	return f.known(ctx, ask, n, reply, nil)
}

// Begin marks the key as running, unless its final record or another call's mark is there.
func (f *Front) Begin(ctx context.Context, ask idempotency.Ask, mark idempotency.AttemptToken, ttl time.Duration) (idempotency.Record, bool, error) {
	n := f.names(ask.Key)
	if f.quorum != nil {
		return f.beginOnQuorum(ctx, ask, n, mark, ttl)
	}
	reply, err := f.run(ctx, scriptBegin, n, []string{n.entry, n.mark}, ask.Epoch, holder(mark, ask.Fingerprint), len(mark), milliseconds(ttl))
	if err != nil {
		return idempotency.Record{}, false, err
	}
	return f.known(ctx, ask, n, reply, &idempotency.InProgressError{Key: ask.Key, RetryAfter: time.Second})
}

// known reads what Redis knows of a key. What does not read, or is another key's, is a miss.
func (f *Front) known(ctx context.Context, ask idempotency.Ask, n names, reply reply, busy error) (idempotency.Record, bool, error) {
	miss := idempotency.Record{}
	switch reply.code {
	case CodeBusy:
		if !samePayload(reply.text(1), ask.Fingerprint) {
			return miss, false, &idempotency.MismatchError{Key: ask.Key}
		}
		return miss, false, busy
	case CodeDone:
		r, elsewhere, err := f.decode(ask.Key, n, reply.text(1))
		if err != nil {
			f.emit(ctx, idempotency.FrontFailed{Front: Name, Op: reply.script, Err: &Error{Script: reply.script, Code: CodeInvalid, Err: err}})
			return miss, false, nil //nolint:nilerr // told, and a miss
		}
		switch v, _ := r.Verdict(ask.Fingerprint); {
		case v == idempotency.VerdictMismatch:
			return miss, false, &idempotency.MismatchError{Key: ask.Key, CreatedAt: r.CreatedAt}
		case v == idempotency.VerdictReplay && !elsewhere, v == idempotency.VerdictGone && !elsewhere:
			return r, true, nil
		}
	}
	return miss, false, nil
}

// Renew keeps the call's own mark alive.
func (f *Front) Renew(ctx context.Context, key idempotency.Key, mark idempotency.AttemptToken, ttl time.Duration) error {
	n := f.names(key)
	if f.quorum != nil {
		return f.quorum.renew(ctx, n, mark, ttl)
	}
	_, err := f.run(ctx, scriptRenew, n, []string{n.mark}, mark[:], milliseconds(ttl))
	return err
}

// Publish stores a final record. One without an epoch, or whose life is over, is not stored; its call's mark goes all the
// same.
func (f *Front) Publish(ctx context.Context, e idempotency.Entry) {
	life := e.Life - f.config.Margin
	if e.Epoch == "" || life < time.Millisecond || !e.Record.Keepable() {
		f.End(ctx, e.Record.Key, e.Mark)
		return
	}
	n := f.names(e.Record.Key)
	body, err := f.encode(&e.Record, n, f.config.ResultLimit)
	if err != nil {
		f.emit(ctx, idempotency.FrontFailed{Front: Name, Op: scriptPublish.name, Err: err})
		f.End(ctx, e.Record.Key, e.Mark)
		return
	}
	j := job{
		names: n, size: int64(len(body)),
		command: command{
			script: scriptPublish, keys: []string{n.entry, n.mark},
			args: []any{e.Epoch, fenceText(e.Record.Fence), body, milliseconds(life), bytesOf(e.Mark), n.channel},
		},
	}
	if f.quorum != nil && e.Mark != (idempotency.AttemptToken{}) {
		j.then = func(ctx context.Context) { f.quorum.release(ctx, n, e.Mark, nil) }
	}
	f.add(ctx, j)
}

// fenceText has one length for all fences: they are compared as texts.
func fenceText(fence int64) string { return fmt.Sprintf("%019d", fence) }

// End removes the call's own mark.
func (f *Front) End(ctx context.Context, key idempotency.Key, mark idempotency.AttemptToken) {
	if mark == (idempotency.AttemptToken{}) {
		return
	}
	n := f.names(key)
	if f.quorum != nil {
		f.quorum.release(ctx, n, mark, func(ctx context.Context) { f.announce(ctx, n) })
		return
	}
	f.add(ctx, job{names: n, command: endOf(n, mark)})
}

// endOf removes a call's own mark.
func endOf(n names, mark idempotency.AttemptToken) command {
	return command{script: scriptEnd, keys: []string{n.mark}, args: []any{bytesOf(mark), n.channel}}
}

func (f *Front) add(ctx context.Context, j job) {
	if err := f.publisher.add(j); err != nil {
		f.emit(ctx, idempotency.FrontFailed{Front: Name, Op: j.script.name, Err: err})
		if j.then != nil {
			j.then(ctx)
		}
	}
}

// Evict forgets what is known of a key, also what is still on its way to Redis.
func (f *Front) Evict(ctx context.Context, key idempotency.Key) error {
	n := f.names(key)
	return f.evict(ctx, n, n.entry)
}

func (f *Front) evict(ctx context.Context, n names, name string) error {
	done := make(chan error, 1)
	if err := f.publisher.add(job{names: n, command: command{script: scriptEvict, keys: []string{name}}, done: done}); err != nil {
		return &Error{Script: scriptEvict.name, Code: CodeUnavailable, Err: err}
	}
	select {
	case err := <-done:
		if errors.Is(err, errDegraded) {
			err = &Error{Script: scriptEvict.name, Code: CodeUnavailable, Err: err}
		}
		return err
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

// Flush returns when everything that was published so far has been sent, or dropped.
func (f *Front) Flush(ctx context.Context) error {
	done := make(chan error, 1)
	if err := f.publisher.add(job{done: done}); err != nil {
		return err
	}
	select {
	case err := <-done:
		return err
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

// Wait returns when the key's mark goes.
func (f *Front) Wait(ctx context.Context, key idempotency.Key) error {
	held := f.held
	if f.quorum != nil {
		held = f.quorum.held
	}
	return f.wait(ctx, f.names(key), held)
}

func (f *Front) wait(ctx context.Context, n names, held func(context.Context, names) (bool, error)) error {
	gone, leave := f.waiters.join(n.channel) //nolint:contextcheck // the subscription is the front's, not this caller's
	defer leave()
	// Redis' messages may be lost, and a mark that ends by itself sends none: so the mark is looked at too.
	for pause := 20 * time.Millisecond; ; pause = min(pause*2, 500*time.Millisecond) {
		if there, err := held(ctx, n); err != nil || !there {
			return err
		}
		timer := time.NewTimer(pause)
		select {
		case <-gone:
			timer.Stop()
			return nil
		case <-timer.C:
		case <-ctx.Done():
			timer.Stop()
			return context.Cause(ctx)
		}
	}
}

func (f *Front) held(ctx context.Context, n names) (bool, error) {
	reply, err := f.run(ctx, scriptHeld, n, []string{n.mark})
	return reply.code == CodeBusy, err
}

// tryMark does what every call needs, on a name of its own in the slot of n.
func (f *Front) tryMark(ctx context.Context, n names) error {
	token := idempotency.NewAttemptToken()
	keys := []string{n.entry + ":probe", n.mark + ":probe"}
	_, err := f.exchange(ctx, scriptBegin, keys, "", bytesOf(token), len(token), milliseconds(time.Second))
	if err == nil {
		_, err = f.exchange(ctx, scriptEnd, keys[1:], bytesOf(token), n.channel+":probe")
	}
	if c, is := f.client.(*redis.ClusterClient); is && err != nil {
		// Where a master does not answer at all, the client asks for its successor only every
		// ClusterOptions.ClusterStateReloadInterval, 10 s.
		c.ReloadState(ctx)
	}
	return err
}

func (f *Front) emit(ctx context.Context, e idempotency.Event) { f.config.OnEvent(ctx, e) }

// milliseconds is Redis' unit. Nothing lives for 0: that would be an error, or for ever.
func milliseconds(d time.Duration) int64 { return max(1, d.Milliseconds()) }

// bytesOf copies a token, since jobs outlive their callers; none is no bytes.
func bytesOf(token idempotency.AttemptToken) []byte {
	if token == (idempotency.AttemptToken{}) {
		return nil
	}
	return token[:]
}

// braces choose a cluster's slot.
func hasBraces(s string) bool { return strings.ContainsAny(s, "{}") }
