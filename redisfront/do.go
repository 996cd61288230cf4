package redisfront

import (
	"context"
	"fmt"
	"time"

	"github.com/pgonce/pgonce/idempotency"
	"github.com/pgonce/pgonce/internal/results"
)

// DefaultCacheRetention is Operation.Retention under StrategyCache where it is not set.
const DefaultCacheRetention = 7 * 24 * time.Hour

// Result is what a call of Do came to.
type Result[T any] struct {
	Value T
	// Replayed: another call's outcome is given again.
	Replayed bool
	// Kept: the outcome is in Redis, for the duplicates to come. If not, Redis failed while the function ran, or before and
	// Config.Unprotected is set: the next call with this key runs again.
	Kept   bool
	Record idempotency.Record
}

// Do is for effects that may be lost, or happen twice: it knows of Redis only, and what Redis forgets (a restart, an
// eviction, a failover, a flush) is run again. Nothing is in PostgreSQL. For anything that must happen once, an order or a
// payment, use txn.WithIdempotency.
//
// This is strategy CACHE. Do runs fn for req.Key unless its outcome is known: then the outcome is given again, Replayed.
// While fn runs, a lock with an end (Operation.Lease, renewed) makes duplicates wait for at most Operation.Wait. The
// outcome is kept for Operation.Retention, 7 days by default. The key's operation must be one of Config.Operations.
//
// fn's error is returned as it is and not kept: the lock is released and a retry runs again; so it is after a panic. If
// the lock is lost while fn runs, fn's context ends with the cause ErrLockLost; what fn returns all the same counts only
// if no other call has taken its place.
//
// Errors: ErrUnavailable, ErrLockLost, and of package idempotency: ErrInProgress, ErrMismatch, ErrResultExpired (the
// result was larger than Operation.ResultLimit, only its first caller has it), ErrResultDecode, ErrNewerRecord, ErrConfig,
// ErrInvalid. Any other is fn's own.
func Do[T any](ctx context.Context, f *Front, req idempotency.Request, fn func(context.Context) (T, error)) (Result[T], error) {
	op, err := f.cacheOperation(req)
	if err == nil {
		err = storable[T]()
	}
	if err != nil {
		return Result[T]{}, err
	}
	var value T
	c := &cacheCall{front: f, op: op, req: req, names: f.cacheNames(req.Key), token: idempotency.NewAttemptToken(), began: time.Now()}
	out, err := c.do(ctx, func(ctx context.Context) (p payload, err error) {
		if value, err = fn(ctx); err == nil {
			p.data, p.resultType, p.err = results.Encode(results.JSON{}, value)
		}
		return p, err
	})
	c.report(ctx, out, err)
	res := Result[T]{Replayed: out.replayed, Kept: out.kept, Record: out.record}
	switch {
	case err != nil:
		return res, err
	case out.replayed:
		r := out.record
		if res.Value, err = results.Decode[T](results.JSON{}, r.ResultType, r.Result); err != nil {
			err = &idempotency.ResultDecodeError{ResultType: r.ResultType, Result: results.Clone(r.Result), Err: err}
		}
		return res, err
	}
	res.Value = value
	return res, out.unencoded
}

// cacheOperation returns the declaration of a request's operation.
func (f *Front) cacheOperation(req idempotency.Request) (*idempotency.Operation, error) {
	if err := req.Validate(); err != nil {
		return nil, err
	}
	op := f.operations[req.Key.Operation()]
	if op == nil {
		return nil, &idempotency.ConfigError{
			Field: "redisfront.Config.Operations", Rule: fmt.Sprintf("must declare %q, which Do is asked for", req.Key.Operation()),
		}
	}
	return op, nil
}

// cacheOperations validates the declarations and indexes them by name.
func (c *Config) cacheOperations() (map[string]*idempotency.Operation, error) {
	all := make(map[string]*idempotency.Operation, len(c.Operations))
	for _, op := range c.Operations {
		invalid := func(field, rule string) error {
			return &idempotency.ConfigError{Field: "Operation " + op.Name + ": " + field, Rule: rule}
		}
		switch {
		case op.Strategy != idempotency.StrategyCache:
			return nil, invalid("Strategy", "must be CACHE here: give any other to txn.Config")
		case op.Retention == idempotency.Forever:
			return nil, invalid("Retention", "must not be Forever under CACHE: Redis keeps nothing without an end")
		case op.ResultRetention != 0 && op.ResultRetention != op.Retention:
			return nil, invalid("ResultRetention", "must be left out under CACHE: the result is kept as long as its key")
		}
		if op.Retention == 0 {
			op.Retention = DefaultCacheRetention
		}
		op = op.WithDefaults()
		if err := op.Validate(); err != nil {
			return nil, err
		}
		if all[op.Name] != nil {
			return nil, &idempotency.ConfigError{Field: "redisfront.Config.Operations", Rule: fmt.Sprintf("must be declared once each, %q is there twice", op.Name)}
		}
		all[op.Name] = &op
	}
	return all, nil
}

// storable is asked before the function runs: afterwards it is too late.
func storable[T any]() error {
	if err := results.Storable[T](); err != nil {
		return &idempotency.ConfigError{Field: "redisfront.Do", Rule: err.Error()}
	}
	return nil
}
