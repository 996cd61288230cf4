package idempotencymsg

import (
	"context"
	"errors"
	"runtime/debug"
	"slices"

	"github.com/jackc/pgx/v5"

	"github.com/pgonce/pgonce/idempotency"
	"github.com/pgonce/pgonce/txn"
)

// Inbox handles the messages of one operation. It is safe for concurrent use.
type Inbox struct {
	runner *txn.Runner
	config Config
}

// New returns an inbox on a runner. The error is an *idempotency.ConfigError that names field and rule.
func New(runner *txn.Runner, cfg *Config) (*Inbox, error) {
	switch {
	case runner == nil:
		return nil, &idempotency.ConfigError{Field: "runner", Rule: "must not be nil"}
	case cfg == nil:
		return nil, &idempotency.ConfigError{Field: "Config.Operation", Rule: "must be set"}
	}
	if err := cfg.validate(); err != nil {
		return nil, err
	}
	return &Inbox{runner: runner, config: *cfg}, nil
}

// mark is the stored result of a message.
type mark struct {
	Dead  string `json:"dead,omitempty"` // why it was given up
	Reply []byte `json:"reply,omitempty"`
}

var errNoHandler = &idempotency.ConfigError{Field: "Config.Handler", Rule: "must be set"}

// Handle handles one message in a transaction of its own. Acknowledge it as the result says, and not before.
func (in *Inbox) Handle(ctx context.Context, m Message) Result {
	return in.HandleWith(ctx, m, in.config.Handler)
}

// HandleWith is Handle with a handler of the call's own.
func (in *Inbox) HandleWith(ctx context.Context, m Message, handler Handler) Result {
	if handler == nil {
		return Result{Verdict: Retry, Err: errNoHandler}
	}
	req, err := in.request(m)
	if err != nil {
		return in.giveUp(ctx, []Message{m}, []Result{{Verdict: Poisoned, Err: err}})[0]
	}
	res, err := txn.WithIdempotency(ctx, in.runner, req, func(ctx context.Context, tx pgx.Tx) (mark, error) {
		return run(ctx, tx, m, handler)
	})
	return in.giveUp(ctx, []Message{m}, []Result{judge(res, err)})[0]
}

// HandleBatch handles messages together, in transactions of up to txn.MaxMany, and returns a result for each, in their
// order. One that fails does not hold up those behind it: where their order matters, handle them one by one. It does not
// wait for a message that another consumer is handling. A message that is there twice is handled once.
func (in *Inbox) HandleBatch(ctx context.Context, all []Message) []Result {
	results := make([]Result, 0, len(all))
	for part := range slices.Chunk(all, txn.MaxMany) {
		results = append(results, in.giveUp(ctx, part, in.handle(ctx, part))...)
	}
	return results
}

func (in *Inbox) handle(ctx context.Context, part []Message) []Result {
	if in.config.Handler == nil {
		return slices.Repeat([]Result{{Verdict: Retry, Err: errNoHandler}}, len(part))
	}
	results := make([]Result, len(part))
	var reqs []idempotency.Request
	var at []int
	for i, m := range part {
		req, err := in.request(m)
		if err != nil {
			results[i] = Result{Verdict: Poisoned, Err: err}
			continue
		}
		reqs, at = append(reqs, req), append(at, i)
	}
	outcomes, err := txn.WithIdempotencyMany(ctx, in.runner, reqs, func(ctx context.Context, tx pgx.Tx, i int) (mark, error) {
		return run(ctx, tx, part[at[i]], in.config.Handler)
	})
	for i := range reqs {
		if err != nil {
			results[at[i]] = judge(txn.Result[mark]{}, err)
			continue
		}
		results[at[i]] = judge(outcomes[i].Result, outcomes[i].Err)
	}
	return results
}

func (in *Inbox) request(m Message) (idempotency.Request, error) {
	key, err := in.config.Operation.Key(m.Tenant, m.ID)
	return idempotency.Request{Key: key, Fingerprint: idempotency.FingerprintBytes(m.Payload), Retry: m.Deliveries > 1}, err
}

// run calls the handler. A panic is the message's own trouble, and no reason to lose the others.
func run(ctx context.Context, tx pgx.Tx, m Message, handler Handler) (done mark, err error) {
	defer func() {
		if value := recover(); value != nil {
			err = &PanicError{Value: value, Stack: debug.Stack()}
		}
	}()
	done.Reply, err = handler(ctx, tx, m)
	return done, err
}

// judge turns the library's answer into what the broker is to be told.
func judge(res txn.Result[mark], err error) Result {
	var progress *idempotency.InProgressError
	switch {
	case err == nil && res.Value.Dead != "":
		return Result{Verdict: DeadLettered}
	case err == nil && res.Replayed:
		return Result{Verdict: Duplicate, Reply: res.Value.Reply}
	case err == nil:
		return Result{Verdict: Handled, Reply: res.Value.Reply}
	case errors.Is(err, idempotency.ErrOutcomeUnknown): // before the others: it may wrap them
		return Result{Verdict: Retry, Err: err}
	case poisonous(err), errors.Is(err, idempotency.ErrMismatch):
		return Result{Verdict: Poisoned, Err: err}
	case errors.Is(err, idempotency.ErrFailed):
		return Result{Verdict: Failed, Err: err, Reply: res.Value.Reply}
	case errors.Is(err, idempotency.ErrResultExpired), errors.Is(err, idempotency.ErrResultDecode):
		return Result{Verdict: Duplicate} // done, and only its reply is lost
	case errors.As(err, &progress):
		return Result{Verdict: Retry, Err: err, RetryAfter: progress.RetryAfter}
	}
	return Result{Verdict: Retry, Err: err}
}
