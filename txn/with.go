package txn

import (
	"context"
	"errors"
	"fmt"

	"github.com/jackc/pgx/v5"

	"github.com/pgonce/pgonce/idempotency"
	"github.com/pgonce/pgonce/internal/results"
)

// Result is what an operation came to.
type Result[T any] struct {
	Value T
	// Replayed: the outcome was recorded before by another call and is given again.
	Replayed bool
	Record   idempotency.Record
}

// WithIdempotency runs fn at most once for req.Key: its writes through the transaction it is given and the record of the
// outcome are one commit. A duplicate gets the first outcome back, Replayed.
//
// What fn returns decides: nil commits and records Value; Final rolls back and records a failure; any other error rolls
// back and records nothing, so that a retry runs again. fn may be entered again after a rollback, see the package
// comment, and must not keep or end the transaction.
//
// Errors, all in package idempotency. Recorded, and never run again: ErrFailed (*FailedError, its body in Value),
// ErrTransactionEnded, ErrResultExpired, ErrResultDecode. Another request's record: ErrMismatch. Retry with the same key:
// ErrInProgress, ErrOutcomeUnknown, ErrRestart, ErrNewerRecord, ErrReadOnly. Ask for a new token: ErrNotIssued. Refused before
// any SQL: ErrInvalid. To be mended in the program: ErrConfig, ErrSchema, ErrNested, ErrWrongMode, ErrResultTooLarge,
// ErrResultEncode, ErrAborted. Any other error is fn's own or the database's; then nothing was recorded.
func WithIdempotency[T any](ctx context.Context, r *Runner, req idempotency.Request, fn func(context.Context, pgx.Tx) (T, error)) (Result[T], error) {
	if r.within != nil {
		return callWithin(ctx, r, req, fn)
	}
	ctx = ownWork(ctx)
	op, err := r.check(ctx, r.pool, req)
	if err != nil {
		return Result[T]{}, err
	}
	var value T
	c := newCall(ctx, r, op, req, &value, fn)
	out, err := c.do(ctx)
	c.report(ctx, out, err)
	if err != nil {
		return Result[T]{}, err
	}
	return resultOf(c, out, value)
}

// newCall returns a call whose function leaves its value in value.
func newCall[T any](ctx context.Context, r *Runner, op *operation, req idempotency.Request, value *T, fn func(context.Context, pgx.Tx) (T, error)) *call {
	c := &call{
		runner: r, store: r.store, op: op, req: req, started: startStopwatch(), traceID: r.config.TraceID(ctx),
	}
	c.obey()
	c.body = func(ctx context.Context, tx pgx.Tx) (result payload, err error) {
		*value, err = fn(ctx, tx)
		return encodeOutcome(r.config.Codec, &op.Operation, *value, err)
	}
	return c
}

// encodeOutcome encodes the value where it is going to be recorded.
func encodeOutcome[T any](codec Codec, op *idempotency.Operation, value T, err error) (payload, error) {
	if err != nil {
		var final *finalError
		if !errors.As(err, &final) {
			return payload{}, err
		}
		if wrong := checkFinal(err); wrong != nil {
			return payload{}, errors.Join(wrong, plain(err))
		}
	}
	data, resultType, encodeErr := results.Encode(codec, value)
	if encodeErr != nil {
		return payload{}, errors.Join(fmt.Errorf("%w: %w", idempotency.ErrResultEncode, encodeErr), plain(err))
	}
	if op.ResultLimit >= 0 && len(data) > op.ResultLimit {
		if !op.Tombstone && !results.Droppable[T]() {
			return payload{}, errors.Join(fmt.Errorf("%w: %d bytes, the limit of %s is %d; return less, or raise Operation.ResultLimit",
				idempotency.ErrResultTooLarge, len(data), op.Name, op.ResultLimit), plain(err))
		}
		data = nil
	}
	return payload{data: data, resultType: resultType}, err
}

// plain takes Final's mark away: a failure whose body cannot be stored is not recorded.
func plain(err error) error {
	if err == nil {
		return nil
	}
	return errors.New(err.Error())
}

// resultOf makes the caller's result of a committed record.
func resultOf[T any](c *call, out outcome, value T) (Result[T], error) {
	res := Result[T]{Value: value, Replayed: !out.own, Record: out.record}
	if out.record.AttemptToken != c.inHand {
		var err error
		if res.Value, err = decodeResult[T](c.runner.config.Codec, out.record); err != nil {
			return res, err
		}
	}
	return res, c.outcomeError(out)
}

// outcomeError is nil for SUCCESS, and an *idempotency.FailedError for a recorded failure.
func (c *call) outcomeError(out outcome) error {
	if out.record.State != idempotency.StateFailed {
		return nil
	}
	failed := &idempotency.FailedError{Code: out.record.ErrorCode, Message: out.record.ErrorMessage, Record: out.record}
	if out.own && c.final != nil {
		failed.Cause = c.final.cause
	}
	if out.record.ErrorCode == CodeTransactionEnded {
		return fmt.Errorf("%w: %w", idempotency.ErrTransactionEnded, failed)
	}
	return failed
}

// report emits the event of the call's end and feeds the operation's rate of duplicates.
func (c *call) report(ctx context.Context, out outcome, err error) {
	took := c.started.elapsed()
	c.op.fresh.add(err == nil && !out.own || c.ending == kindAnswered || c.ending == kindBusy)
	key, strategy := c.req.Key, c.strategy
	switch {
	case err == nil && out.bypassed():
		c.reportBypassed(ctx, &out, took)
	case err == nil && out.own:
		c.op.duplicates.add(false)
		if c.fronted && out.fresh {
			c.op.latency.add(c.entered.elapsed())
		}
		c.emit(ctx, idempotency.Executed{Key: key, Strategy: strategy, State: out.record.State, Runs: c.runs, Duration: took})
	case err == nil:
		if c.asked || !c.fronted { // who is answered by a front does not ask PostgreSQL twice
			c.op.duplicates.add(true)
		}
		c.emit(ctx, idempotency.Replayed{Key: key, Strategy: strategy, State: out.record.State, Shared: out.shared, From: frontName(out.from), Duration: took})
	case c.ending == kindUnknown:
		c.emit(ctx, idempotency.Unresolved{Key: key, Strategy: strategy, Err: err, Duration: took})
	case c.ending == kindRefused: // no duplicate of anything
		c.emit(ctx, idempotency.Refused{Key: key, Strategy: strategy, Err: err, Duration: took})
	case c.ending == kindAnswered || c.ending == kindBusy:
		c.op.duplicates.add(true)
		c.emit(ctx, idempotency.Refused{Key: key, Strategy: strategy, Err: err, Duration: took})
	default:
		c.emit(ctx, idempotency.RolledBack{Key: key, Strategy: strategy, Err: err, Duration: took})
	}
}

func frontName(front idempotency.Front) string {
	if front == nil {
		return ""
	}
	return front.Name()
}
