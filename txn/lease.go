package txn

import (
	"context"
	"errors"
	"fmt"
	"sync"

	"github.com/jackc/pgx/v5"

	"github.com/pgonce/pgonce/idempotency"
	"github.com/pgonce/pgonce/internal/results"
)

// Lease is a key that this process owns while the foreign function runs. It is safe for concurrent use.
type Lease struct {
	record idempotency.Record
	runner *Runner

	mu    sync.Mutex
	over  bool
	steps map[string]idempotency.Step // finished, by this attempt or by one before it; in work: without a type
}

// Record is what is recorded of the key: which attempt this is, under which fence, and until when without a renewal.
func (l *Lease) Record() idempotency.Record { return l.record.Clone() }

// Fence is the number of this attempt: every later one has a higher fence. Write it into rows that foreign changes in
// transactions of its own, and let idempotency.fence_guard refuse those of an attempt that has lost its key.
func (l *Lease) Fence() int64 { return l.record.Fence }

// DownstreamKey is the idempotency key for a call to somebody else: the same in every attempt, so that a call repeated after a
// crash is not done twice there. Calls that are to be different, as for the items of one request, need different names.
func (l *Lease) DownstreamKey(name string) string { return l.record.DownstreamKey(name) }

// WithLease runs an operation that calls somebody else, which no rollback can take back. foreign runs while the key is leased:
// a PROCESSING record is committed before it, renewed while it runs, and no transaction is open. Then commit writes the
// business rows, in one transaction with the record of the outcome. A duplicate gets the first outcome back, Replayed.
//
// A crash leaves the record behind, and the operation's Takeover says what may happen to it when its lease has ended. So
// foreign may run again, after a crash or an error: make its calls with the downstream keys of the Lease, and in Steps, whose
// results it then finds. commit may be entered again after a rollback, as with WithIdempotency.
//
// When the lease is lost (this process was stopped for longer than Operation.Lease, or PostgreSQL was away), foreign's context
// ends with the cause ErrLeaseLost, and nothing that this attempt writes afterwards is recorded.
//
// An error of foreign or commit is recorded as retryable: the next caller may try again. Final records a failure that is
// replayed. Once foreign has succeeded, the end of ctx stops nothing any more. Errors as for WithIdempotency, and
// ErrLeaseLost, ErrManual.
func WithLease[C, T any](ctx context.Context, r *Runner, req idempotency.Request, foreign func(context.Context, *Lease) (C, error),
	commit func(context.Context, pgx.Tx, C) (T, error),
) (Result[T], error) {
	if r.within != nil {
		return Result[T]{}, &idempotency.ConfigError{Field: "Runner.Within", Rule: "must not be used with WithLease, which commits before it calls"}
	}
	ctx = ownWork(ctx)
	op, err := r.check(ctx, r.pool, req)
	if err != nil {
		return Result[T]{}, err
	}
	var called C
	var value T
	c := newCall(ctx, r, op, req, &value, func(ctx context.Context, tx pgx.Tx) (T, error) { return commit(ctx, tx, called) })
	c.enforceLease(ctx)
	c.foreign = func(ctx context.Context, l *Lease) (err error) {
		called, err = foreign(ctx, l)
		return err
	}
	out, err := c.do(ctx)
	c.report(ctx, out, err)
	if err != nil {
		return Result[T]{}, err
	}
	return resultOf(c, out, value)
}

// Step runs one step of a leased operation and records what it came to, so that an attempt that takes over does not run it
// again. Call from it with downstreamKey, which is the step's own: a crash between the call and its record repeats the call.
// Its error is not recorded. Steps of one operation need different names.
func Step[S any](ctx context.Context, l *Lease, name string, fn func(ctx context.Context, downstreamKey string) (S, error)) (S, error) {
	codec := l.runner.config.Codec
	found, done, err := l.begin(name)
	if err != nil {
		var zero S
		return zero, err
	}
	if done {
		v, err := results.Decode[S](codec, found.ResultType, found.Result)
		if err != nil {
			err = &idempotency.ResultDecodeError{ResultType: found.ResultType, Result: found.Result, Err: err}
		}
		return v, err
	}
	recorded := false
	// Also after a panic: an attempt that goes on may run the step again.
	defer func() {
		if !recorded {
			l.forget(name)
		}
	}()
	v, err := fn(ctx, l.DownstreamKey(name))
	if err != nil {
		return v, err
	}
	data, resultType, err := results.Encode(codec, v)
	if err != nil {
		return v, fmt.Errorf("txn: step %q: %w: %w", name, idempotency.ErrResultEncode, err)
	}
	one := idempotency.Step{Name: name, Fence: l.record.Fence, ResultType: resultType, Result: data}
	if err := l.finish(ctx, &one); err != nil {
		return v, err
	}
	recorded = true
	return v, nil
}

const maxStepName = 255

// begin returns a step that is finished, or notes that it runs.
func (l *Lease) begin(name string) (found idempotency.Step, done bool, err error) {
	if name == "" || len(name) > maxStepName {
		return found, false, &idempotency.ConfigError{Field: "Step's name", Rule: fmt.Sprintf("must be 1 to %d bytes, is %.140q", maxStepName, name)}
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.over {
		return found, false, fmt.Errorf("%w: the function it was given to has returned", idempotency.ErrLeaseLost)
	}
	found, known := l.steps[name]
	switch {
	case !known:
		l.steps[name] = found
		return found, false, nil
	case found.ResultType == "":
		return found, false, &idempotency.ConfigError{Field: "Step's name", Rule: fmt.Sprintf("must not be used by two steps at once, %q is", name)}
	}
	return found, true, nil
}

func (l *Lease) forget(name string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	delete(l.steps, name)
}

// finish records a step, also when ctx has ended meanwhile: it was done.
func (l *Lease) finish(ctx context.Context, one *idempotency.Step) error {
	err := l.runner.durably(ctx, func(ctx context.Context, conn *pgx.Conn) error {
		return l.runner.store.RecordStep(ctx, conn, l.record.Owner(), one)
	})
	if err != nil {
		return err
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	l.steps[one.Name] = *one
	return nil
}

func (l *Lease) end() {
	l.mu.Lock()
	l.over = true
	l.mu.Unlock()
}

// durably runs a statement that may be sent again, on a context that the caller cannot cancel: cancelling would make
// PostgreSQL commit without its standby. It is sent again until its answer comes, for at most CommitTimeout.
func (r *Runner) durably(ctx context.Context, do func(context.Context, *pgx.Conn) error) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), r.config.CommitTimeout)
	defer cancel()
	return r.again(ctx, do)
}

// impatiently is durably for what nothing depends on yet: the caller may leave while it waits for a connection.
func (r *Runner) impatiently(ctx context.Context, do func(context.Context, *pgx.Conn) error) error {
	return r.again(ctx, func(_ context.Context, conn *pgx.Conn) error {
		detached, cancel := context.WithTimeout(context.WithoutCancel(ctx), r.config.CommitTimeout)
		defer cancel()
		return do(detached, conn)
	})
}

func (r *Runner) again(ctx context.Context, do func(context.Context, *pgx.Conn) error) error {
	ctx = ownWork(ctx)
	began, backoff := startStopwatch(), pauses{next: restartPause, last: restartPauseMax}
	for {
		err := r.once(ctx, do)
		switch {
		case err == nil, refusedForGood(err), errors.Is(err, idempotency.ErrLeaseLost), errors.Is(err, idempotency.ErrSchema):
			return err
		case !idempotency.Restartable(err) && !errors.Is(err, errConnectionLost), began.elapsed() > r.config.CommitTimeout:
			return err
		}
		if cause := backoff.sleep(ctx); cause != nil {
			return errors.Join(err, cause)
		}
	}
}

func (r *Runner) once(ctx context.Context, do func(context.Context, *pgx.Conn) error) error {
	conn, err := r.pool.Acquire(ctx)
	if err != nil {
		if ctx.Err() != nil {
			return fmt.Errorf("txn: connect: %w", err)
		}
		return fmt.Errorf("%w: connect: %w", idempotency.ErrRestart, err)
	}
	defer conn.Release()
	g, err := guardOf(conn.Conn())
	if err != nil {
		return err
	}
	err = g.Commit(conn.Conn(), func() error { return do(ctx, conn.Conn()) })
	if conn.Conn().IsClosed() {
		return errors.Join(errConnectionLost, err)
	}
	return err
}

var errConnectionLost = errors.New("txn: the connection was lost")
