package redisfront

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/pgonce/pgonce/idempotency"
)

// cacheEpoch is every outcome's of Do: PostgreSQL has no say in them.
const cacheEpoch = "cache"

// How long a call tries to keep an outcome that it has: its effect is there, and only this makes it count.
const (
	keepTimeout = 2 * time.Second
	keepPause   = 100 * time.Millisecond
)

// cacheNames are other names than those of the same key under another strategy.
func (f *Front) cacheNames(key idempotency.Key) names {
	n := f.namesOf(key.Tenant(), key.Operation(), key.Value(), cacheEpoch)
	n.entry, n.mark = n.entry+":cache", n.mark+":cache"
	return n
}

// cacheCall is one call of Do.
type cacheCall struct {
	front  *Front
	op     *idempotency.Operation
	req    idempotency.Request
	names  names
	token  idempotency.AttemptToken
	began  time.Time
	asked  time.Time // when the lock was last asked for: it ends Lease after that at the earliest
	ending ending
}

// payload is an encoded result. err: it could not be encoded.
type payload struct {
	data       []byte
	resultType string
	err        error
}

// outcome is what the key came to.
type outcome struct {
	record         idempotency.Record
	replayed, kept bool
	unencoded      error
}

// ending is decided where things happen, not by looking into an error: what the function returns may wrap our sentinels.
type ending int

const (
	endDone    ending = iota
	endRefused        // an answer about the key, or none
	endFailed         // the function's error
)

func (c *cacheCall) do(ctx context.Context, body func(context.Context) (payload, error)) (outcome, error) {
	record, replayed, err := c.acquire(ctx)
	unprotected := errors.Is(err, ErrUnavailable) && c.front.config.Unprotected && ctx.Err() == nil
	switch {
	case replayed:
		return outcome{record: record, replayed: true, kept: true}, nil
	case err != nil && !unprotected:
		c.ending = endRefused
		return outcome{}, err
	}
	return c.run(ctx, body, unprotected)
}

// acquire takes the lock, or returns the outcome that is there, or waits for whoever has the lock.
func (c *cacheCall) acquire(ctx context.Context) (idempotency.Record, bool, error) {
	for {
		c.asked = time.Now()
		reply, err := c.lock(ctx)
		switch {
		case err != nil:
			// It may have been taken all the same.
			c.front.add(ctx, c.releasing())
			if ctx.Err() != nil {
				return idempotency.Record{}, false, context.Cause(ctx)
			}
			return idempotency.Record{}, false, fmt.Errorf("%w: %w", ErrUnavailable, err)
		case reply.code == CodeOK:
			return idempotency.Record{}, false, nil
		case reply.code == CodeDone:
			return c.known(ctx, reply)
		case !samePayload(reply.text(1), c.req.Fingerprint):
			return idempotency.Record{}, false, &idempotency.MismatchError{Key: c.req.Key}
		}
		if err := c.wait(ctx); err != nil {
			return idempotency.Record{}, false, err
		}
	}
}

// wait returns when the lock may be free.
func (c *cacheCall) wait(ctx context.Context) error {
	busy := &idempotency.InProgressError{Key: c.req.Key, RetryAfter: time.Second}
	left := c.op.Wait - time.Since(c.began)
	if c.op.Wait == idempotency.NoWait || left <= 0 {
		return busy
	}
	bounded, cancel := context.WithTimeout(ctx, left)
	defer cancel()
	switch err := c.front.wait(bounded, c.names, c.front.held); {
	case err == nil:
		return nil
	case ctx.Err() != nil:
		return errors.Join(busy, context.Cause(ctx))
	case bounded.Err() != nil:
		return busy
	default:
		return fmt.Errorf("%w: %w", ErrUnavailable, err)
	}
}

// lock takes the lock, or keeps it: also one that Redis has lost and nobody else has taken.
func (c *cacheCall) lock(ctx context.Context) (reply, error) {
	n := c.names
	return c.front.run(ctx, scriptBegin, n, []string{n.entry, n.mark}, cacheEpoch, holder(c.token, c.req.Fingerprint), len(c.token),
		milliseconds(c.op.Lease))
}

// known reads the outcome that is there. Whatever it is, the key is done: no error here is a reason to run.
func (c *cacheCall) known(ctx context.Context, reply reply) (idempotency.Record, bool, error) {
	body := reply.text(1)
	r, _, err := c.front.decode(c.req.Key, c.names, body)
	if err != nil {
		c.front.emit(ctx, idempotency.FrontFailed{Front: Name, Op: reply.script, Err: &Error{Script: reply.script, Code: CodeInvalid, Err: err}})
		return r, false, &idempotency.ResultDecodeError{ResultType: "entry", Result: body, Err: err}
	}
	switch v, _ := r.Verdict(c.req.Fingerprint); v {
	case idempotency.VerdictReplay:
		return r, true, nil
	case idempotency.VerdictMismatch:
		return r, false, &idempotency.MismatchError{Key: c.req.Key, CreatedAt: r.CreatedAt}
	case idempotency.VerdictGone:
		return r, false, fmt.Errorf("%w: completed at %s", idempotency.ErrResultExpired, r.CompletedAt.Format(time.RFC3339))
	case idempotency.VerdictNewer:
		return r, false, idempotency.ErrNewerRecord
	default:
		return r, false, &idempotency.ResultDecodeError{ResultType: r.ResultType, Result: r.Result, Err: fmt.Errorf("%w: state %s", errEntry, r.State)}
	}
}

// run runs the function under the lock and keeps its outcome.
func (c *cacheCall) run(ctx context.Context, body func(context.Context) (payload, error), unprotected bool) (out outcome, err error) {
	acquired := time.Now()
	running, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	stop := func() {}
	if !unprotected {
		stop = c.keepLock(running, cancel)
	}
	succeeded := false
	defer func() { // also after a panic or Goexit of the function
		stop()
		if !succeeded && !unprotected {
			c.release(ctx)
		}
	}()
	p, err := body(running)
	stop()
	if err != nil {
		c.ending = endFailed
		if errors.Is(context.Cause(running), ErrLockLost) {
			err = errors.Join(err, ErrLockLost)
		}
		return outcome{}, err
	}
	succeeded = true
	if c.op.ResultLimit >= 0 && len(p.data) > c.op.ResultLimit {
		p.data = nil // the effect is there, and cannot be taken back: the key is done, without a result
	}
	return c.keep(ctx, c.record(acquired, p), p.err, unprotected)
}

func (c *cacheCall) record(acquired time.Time, p payload) idempotency.Record {
	now := time.Now().UTC().Truncate(time.Microsecond)
	acquired = acquired.UTC().Truncate(time.Microsecond)
	return idempotency.Record{
		Key: c.req.Key, State: idempotency.StateSuccess, Attempt: 1, Fingerprint: c.req.Fingerprint, AttemptToken: c.token,
		Client: c.req.Client, CreatedAt: acquired, AcquiredAt: acquired, CompletedAt: now, ExpiresAt: now.Add(c.op.Retention),
		ResultType: p.resultType, Result: p.data,
	}
}

// keep stores the outcome, on a context that the request cannot cancel.
func (c *cacheCall) keep(ctx context.Context, r idempotency.Record, unencoded error, unprotected bool) (outcome, error) {
	own := outcome{record: r, unencoded: unencoded}
	body, err := c.front.encode(&r, c.names, -1)
	if err != nil {
		c.front.emit(ctx, idempotency.FrontFailed{Front: Name, Op: scriptKeep.name, Err: err})
		c.release(ctx)
		return own, nil
	}
	detached, cancel := context.WithTimeout(context.WithoutCancel(ctx), keepTimeout)
	defer cancel()
	n := c.names
	for {
		reply, err := c.front.run(detached, scriptKeep, n, []string{n.entry, n.mark}, cacheEpoch, bytesOf(c.token), body,
			milliseconds(c.op.Retention), n.channel)
		switch {
		case err == nil && reply.code == CodeOK:
			own.kept = true
			return own, nil
		case err == nil && reply.code == CodeDone:
			record, replayed, err := c.known(ctx, reply)
			if err != nil {
				c.ending = endRefused
			}
			return outcome{record: record, replayed: replayed, kept: replayed}, err
		case err == nil:
			c.ending = endRefused
			return outcome{}, fmt.Errorf("%w: another call runs now, its outcome will be the key's", ErrLockLost)
		}
		if unprotected || !pause(detached, keepPause) {
			return own, nil
		}
	}
}

// pause returns false when ctx ends before.
func pause(ctx context.Context, d time.Duration) bool {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
		return true
	case <-ctx.Done():
		return false
	}
}

// release removes the call's own lock at once, so that a retry need not wait. If it cannot, the lock ends by itself.
func (c *cacheCall) release(ctx context.Context) {
	n := c.names
	_, _ = c.front.run(context.WithoutCancel(ctx), scriptEnd, n, []string{n.mark}, bytesOf(c.token), n.channel)
}

// releasing is release, behind the caller's back.
func (c *cacheCall) releasing() job {
	return job{names: c.names, command: endOf(c.names, c.token)}
}

// keepLock renews the lock until stop is called, and ends the function's context if the lock is another call's or may be.
func (c *cacheCall) keepLock(ctx context.Context, lost context.CancelCauseFunc) (stop func()) {
	quit, ended := make(chan struct{}), make(chan struct{})
	// Not cancelled with the function's context: a renewal on its way would otherwise arrive after the release.
	detached := context.WithoutCancel(ctx)
	sure := c.asked
	go func() {
		defer close(ended)
		next := c.op.Lease / 3 // so that two may fail
		for {
			left := c.op.Lease - time.Since(sure)
			timer := time.NewTimer(min(next, max(left, 0)))
			select {
			case <-quit:
				timer.Stop()
				return
			case <-timer.C:
			}
			asked := time.Now()
			reply, err := c.lock(detached)
			switch {
			case err == nil && reply.code == CodeOK:
				sure, next = asked, c.op.Lease/3
			case err == nil, left <= 0:
				lost(ErrLockLost)
				return
			default:
				next = min(c.op.Lease/3, probeInterval)
			}
		}
	}()
	stopped := false
	return func() {
		if !stopped {
			stopped = true
			close(quit)
		}
		<-ended
	}
}

func (c *cacheCall) report(ctx context.Context, out outcome, err error) {
	took, emit := time.Since(c.began), c.front.config.OnEvent
	key, strategy := c.req.Key, idempotency.StrategyCache
	switch {
	case err == nil && out.replayed:
		emit(ctx, idempotency.Replayed{Key: key, Strategy: strategy, State: out.record.State, From: Name, Duration: took})
	case err == nil:
		emit(ctx, idempotency.Executed{Key: key, Strategy: strategy, State: out.record.State, Runs: 1, Duration: took})
	case c.ending == endRefused:
		emit(ctx, idempotency.Refused{Key: key, Strategy: strategy, Err: err, Duration: took})
	default:
		emit(ctx, idempotency.RolledBack{Key: key, Strategy: strategy, Err: err, Duration: took})
	}
}
