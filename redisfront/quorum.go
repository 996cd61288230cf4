package redisfront

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"sync"
	"time"

	"github.com/go-redsync/redsync/v4"
	pool "github.com/go-redsync/redsync/v4/redis"
	"github.com/go-redsync/redsync/v4/redis/goredis/v9"
	"github.com/redis/go-redis/v9"

	"github.com/pgonce/pgonce/idempotency"
)

// quorumName is the quorum's, in events and errors: it fails for itself.
const quorumName = Name + "-quorum"

// A mark is tried for so often, after pauses that double, with jitter: two callers who have half of the nodes each let go
// and come back at different times.
const (
	quorumTries = 3
	quorumPause = 100 * time.Millisecond
)

var (
	errTaken      = errors.New("another attempt has the mark on a majority of the nodes")
	errNoMajority = errors.New("no majority of the nodes")
)

// quorum holds marks on a majority of nodes that know nothing of each other. It only saves work: see docs/redis.md.
type quorum struct {
	nodes   []redis.UniversalClient
	locks   *redsync.Redsync
	timeout time.Duration
	breaker *breaker

	mu       sync.Mutex
	closed   bool
	releases sync.WaitGroup
}

// newQuorum returns nil without nodes.
func newQuorum(f *Front) *quorum {
	if len(f.config.Quorum) == 0 {
		return nil
	}
	q := &quorum{nodes: f.config.Quorum, timeout: f.config.Timeout}
	pools := make([]pool.Pool, len(q.nodes))
	for i, node := range q.nodes {
		pools[i] = goredis.NewPool(node)
	}
	q.locks = redsync.New(pools...)
	q.breaker = newBreaker(quorumName, f.namesOf("probe"), f.emit, q.probe)
	return q
}

func (q *quorum) majority() int { return len(q.nodes)/2 + 1 }

// mutex is a mark. Its requests are bounded by the timeout and by a quarter of its life: what is left after that, and
// after the drift of clocks (1 %), reaches to its renewal at half of its life.
func (q *quorum) mutex(n names, token idempotency.AttemptToken, life time.Duration, more ...redsync.Option) *redsync.Mutex {
	value := string(token[:])
	return q.locks.NewMutex(n.mark, append(more, redsync.WithExpiry(life), redsync.WithValue(value),
		redsync.WithGenValueFunc(func() (string, error) { return value, nil }),
		redsync.WithTimeoutFactor(float64(q.bound(life))/float64(life)))...)
}

func (q *quorum) bound(life time.Duration) time.Duration { return min(q.timeout, life/4) }

// take takes a mark and returns for how long it is certain. errTaken: somebody has it.
func (q *quorum) take(ctx context.Context, n names, token idempotency.AttemptToken, life time.Duration) (time.Duration, error) {
	done, err := q.breaker.pass()
	if err != nil {
		return 0, err
	}
	left, err := q.try(ctx, n, token, life)
	switch {
	case ctx.Err() != nil:
		q.release(ctx, n, token, nil) // maybe on some nodes: its caller is gone, and nobody would renew or end it
		done(n, errCallerGone)
		return 0, context.Cause(ctx)
	case errors.Is(err, errTaken):
		done(n, nil)
	default:
		done(n, err)
	}
	return left, err
}

func (q *quorum) try(ctx context.Context, n names, token idempotency.AttemptToken, life time.Duration) (time.Duration, error) {
	m := q.mutex(n, token, life, fast)
	// Detached: redsync lets go of what it has got with the same context, which must not have ended then.
	detached := context.WithoutCancel(ctx)
	var err error
	for i := range quorumTries {
		if i > 0 && !pause(ctx, jittered(quorumPause<<(i-1))) {
			return 0, context.Cause(ctx)
		}
		err = m.TryLockContext(detached)
		left := time.Until(m.Until())
		var taken *redsync.ErrTaken
		switch {
		case err == nil && left > life/2:
			return left, nil
		case err == nil: // this process was stopped meanwhile: it would be over before its renewal
			q.unlock(detached, n, token)
			err = fmt.Errorf("only %v are left of it", left)
		case errors.As(err, &taken):
			// What a slow node has given meanwhile would keep others away: redsync has not waited for it.
			q.unlock(detached, n, token)
			q.later(func() { q.unlockAgain(detached, n, token) })
			return 0, errTaken
		case unreachable(err) > len(q.nodes)-q.majority():
			return 0, fmt.Errorf("%w: %w", errNoMajority, err)
		}
	}
	return 0, fmt.Errorf("%w: %w", errNoMajority, err)
}

// fast does not wait for the nodes that do not matter any more.
var fast = redsync.WithFailFast(true)

// unreachable counts the nodes that did not answer.
func unreachable(err error) (n int) {
	var node *redsync.RedisError
	if all, is := err.(interface{ Unwrap() []error }); is {
		for _, one := range all.Unwrap() {
			n += unreachable(one)
		}
	} else if errors.As(err, &node) {
		n = 1
	}
	return n
}

// jittered is from half of a pause to one and a half.
func jittered(d time.Duration) time.Duration { return d/2 + rand.N(d) }

// renew keeps a mark that is held.
func (q *quorum) renew(ctx context.Context, n names, token idempotency.AttemptToken, life time.Duration) error {
	done, err := q.breaker.pass()
	if err != nil {
		return err
	}
	bounded, cancel := context.WithTimeout(ctx, q.bound(life))
	defer cancel()
	held, err := q.mutex(n, token, life, fast).ExtendContext(bounded)
	if held || answered(err) { // gone, or another attempt's: that is an answer
		err = nil
	}
	if ctx.Err() != nil {
		err = errCallerGone
	}
	done(n, err)
	return err
}

// answered reports whether a majority has answered, although not as hoped.
func answered(err error) bool {
	var taken *redsync.ErrTaken
	return errors.As(err, &taken)
}

// release lets go of a mark behind its caller's back, then calls after.
func (q *quorum) release(ctx context.Context, n names, token idempotency.AttemptToken, after func(context.Context)) {
	detached := context.WithoutCancel(ctx)
	q.later(func() {
		q.unlock(detached, n, token)
		if after != nil {
			after(detached)
		}
		q.unlockAgain(detached, n, token)
	})
}

// later does something behind its caller's back. After close nothing is done: marks end by themselves.
func (q *quorum) later(do func()) {
	q.mu.Lock()
	defer q.mu.Unlock()
	if !q.closed {
		q.releases.Go(do)
	}
}

// unlockAgain is for a slow node, on which the release has overtaken the mark: a majority had it, and its request to that node
// came by another connection, with nobody waiting for it. It would stay there for its whole life.
func (q *quorum) unlockAgain(ctx context.Context, n names, token idempotency.AttemptToken) {
	if pause(ctx, q.timeout) {
		q.unlock(ctx, n, token)
	}
}

// unlock lets go of a mark on all nodes. One that does not answer in time ends it by itself.
func (q *quorum) unlock(ctx context.Context, n names, token idempotency.AttemptToken) {
	bounded, cancel := context.WithTimeout(ctx, q.timeout)
	defer cancel()
	_, _ = q.mutex(n, token, time.Minute).UnlockContext(bounded)
}

// held reports whether a majority has a mark.
func (q *quorum) held(ctx context.Context, n names) (bool, error) {
	done, err := q.breaker.pass()
	if err != nil {
		return false, err
	}
	bounded, cancel := context.WithTimeout(ctx, q.timeout)
	defer cancel()
	type answer struct {
		there bool
		err   error
	}
	answers := make(chan answer, len(q.nodes)) // those that come late are not waited for
	for _, node := range q.nodes {
		go func() {
			n, err := node.Exists(bounded, n.mark).Result()
			answers <- answer{n > 0, err}
		}()
	}
	var there, gone int
	for range q.nodes {
		a := <-answers
		switch {
		case a.err != nil:
			err = errors.Join(err, a.err)
		case a.there:
			there++
		default:
			gone++
		}
		if there >= q.majority() || gone > len(q.nodes)-q.majority() {
			done(n, nil)
			return there >= q.majority(), nil
		}
	}
	if there+gone >= q.majority() { // of those who answer it is too few
		done(n, nil)
		return false, nil
	}
	if ctx.Err() != nil {
		err = errCallerGone
	}
	done(n, err)
	return false, fmt.Errorf("%w: %w", errNoMajority, err)
}

// probe takes a mark of its own and lets go of it.
func (q *quorum) probe(ctx context.Context, n names) error {
	n.mark += ":probe"
	m := q.mutex(n, idempotency.NewAttemptToken(), time.Second, fast)
	if err := m.TryLockContext(ctx); err != nil {
		return err
	}
	_, err := m.UnlockContext(ctx)
	return err
}

func (q *quorum) close() {
	q.breaker.close()
	q.mu.Lock()
	q.closed = true
	q.mu.Unlock()
	q.releases.Wait()
}

// beginOnQuorum is Begin where the marks are on a quorum: that may work while the entries cannot be asked, and then still
// keeps duplicates apart.
func (f *Front) beginOnQuorum(ctx context.Context, ask idempotency.Ask, n names, mark idempotency.AttemptToken, ttl time.Duration) (idempotency.Record, bool, error) {
	miss := idempotency.Record{}
	reply, err := f.run(ctx, scriptLookup, n, []string{n.entry, n.mark}, ask.Epoch)
	switch {
	case err != nil && ctx.Err() != nil:
		return miss, false, err
	case err == nil && reply.code == CodeDone: // a mark beside the entry is a front's without the quorum
		if r, found, err := f.known(ctx, ask, n, reply, nil); found || err != nil {
			return r, found, err
		}
	}
	_, err = f.quorum.take(ctx, n, mark, ttl)
	switch {
	case err == nil:
		return miss, false, nil
	case errors.Is(err, errTaken):
		return miss, false, &idempotency.InProgressError{Key: ask.Key, RetryAfter: time.Second}
	}
	err = &Error{Script: scriptBegin.name, Code: CodeUnavailable, Err: err}
	if ctx.Err() == nil && !errors.Is(err, errDegraded) {
		f.emit(ctx, idempotency.FrontFailed{Front: quorumName, Op: scriptBegin.name, Err: err})
	}
	return miss, false, err
}

// announce wakes those who wait for a mark that was on the quorum.
func (f *Front) announce(ctx context.Context, n names) {
	if f.Degraded() {
		return // they look by themselves
	}
	bounded, cancel := context.WithTimeout(ctx, f.config.Timeout)
	defer cancel()
	_ = f.client.Publish(bounded, n.channel, "").Err()
}
