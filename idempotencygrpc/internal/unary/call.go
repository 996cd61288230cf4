package unary

import (
	"context"
	"errors"
	"fmt"
	"log/slog"

	"github.com/jackc/pgx/v5"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	"github.com/pgonce/pgonce/idempotency"
	"github.com/pgonce/pgonce/txn"
)

// Call is a call of a method that Rules protect.
type Call struct {
	Method string
	Keys   []string // as they came
	In     any      // the request's message
	// Handler is given a message of its own in every run.
	Handler func(ctx context.Context, in any) (any, error)
}

// Outcome is what the caller is told: a message, a status, or an error that the transport knows.
type Outcome struct {
	Message  proto.Message
	Status   *status.Status
	Err      error
	Recorded bool // the status is the handler's, and recorded
	Replayed bool
	// Own: it is what the latest run of this call's own handler came to. What that set besides, headers for example, goes with it;
	// nothing else that a run has set does.
	Own bool
}

// Do makes a call once per key.
func (r *Rules) Do(ctx context.Context, call *Call) Outcome {
	request, err := r.request(ctx, call)
	if err != nil {
		return r.fail(ctx, call, err)
	}
	var latest Reply
	res, err := txn.WithIdempotency(ctx, r.Runner, request, func(ctx context.Context, tx pgx.Tx) (reply Reply, err error) {
		latest = Reply{}
		latest, err = r.run(ctx, tx, call)
		return latest, err
	})
	out := Outcome{}
	var failed *idempotency.FailedError
	var own *rolledBackError
	switch {
	case err == nil:
		out = Outcome{Message: res.Value.Message, Own: latest.Message != nil && latest.Message == res.Value.Message}
	// Before all that may be wrapped in them: what the handler answered is not what happened.
	case errors.Is(err, idempotency.ErrOutcomeUnknown), errors.Is(err, idempotency.ErrTransactionEnded), errors.Is(err, idempotency.ErrRestart):
		out = r.fail(ctx, call, err)
	case errors.As(err, &failed) && res.Value.Status != nil:
		out = Outcome{Status: res.Value.Status, Recorded: true, Own: latest.Status == res.Value.Status}
	case errors.As(err, &own):
		out = Outcome{Err: own.err, Own: true}
	default:
		out = r.fail(ctx, call, err)
	}
	out.Replayed = res.Replayed
	return out
}

// request makes of a call what the library wants to know.
func (r *Rules) request(ctx context.Context, call *Call) (req idempotency.Request, err error) {
	op := r.methods[call.Method]
	switch len(call.Keys) {
	case 0:
		return req, refuse(ReasonKeyMissing, "must be set: to a new value for every new request, to the same one for its retries")
	case 1:
	default:
		return req, refuse(ReasonKeyInvalid, "must be set once")
	}
	tenant, err := r.Tenant(ctx)
	if err != nil {
		return req, err
	}
	// The tenant first, with a value that is right: a wrong one is the program's fault and not the client's.
	if _, err := op.Key(tenant, "k"); err != nil {
		return req, &idempotency.ConfigError{Field: "tenant", Rule: "must be one for every call: " + err.Error()}
	}
	var invalid *idempotency.InvalidError
	if req.Key, err = op.Key(tenant, call.Keys[0]); errors.As(err, &invalid) {
		return req, refuse(ReasonKeyInvalid, invalid.Rule)
	} else if err != nil {
		return req, err
	}
	message, is := call.In.(proto.Message)
	if !is {
		return req, &idempotency.ConfigError{Field: call.Method, Rule: fmt.Sprintf("must take a protobuf message, takes %T", call.In)}
	}
	body, err := proto.MarshalOptions{Deterministic: true}.Marshal(message)
	if err != nil {
		return req, fmt.Errorf("idempotencygrpc: fingerprint: %w", err)
	}
	req.Fingerprint, req.Client = idempotency.FingerprintBytes([]byte(call.Method), body), r.Client(ctx)
	return req, nil
}

// refusedError is an answer of ours about the key, as it was sent.
type refusedError struct{ status *status.Status }

func (e *refusedError) Error() string { return e.status.Message() }

func refuse(reason, rule string) error {
	return &refusedError{statusOf(codes.InvalidArgument, reason, "the metadata "+MetadataKey+" "+rule, 0)}
}

// rolledBackError is a handler's error that is not recorded. Its caller gets it all the same.
type rolledBackError struct{ err error }

func (e *rolledBackError) Error() string { return e.err.Error() }

func (e *rolledBackError) Unwrap() error { return e.err }

// run runs the handler in the transaction.
func (r *Rules) run(ctx context.Context, tx pgx.Tx, call *Call) (Reply, error) {
	in := call.In
	if message, is := in.(proto.Message); is {
		in = proto.Clone(message) // what an earlier run did to it is forgotten
	}
	out, err := call.Handler(ctx, in)
	if err != nil {
		s, is := r.Status(err)
		if !is || !r.recorded(s.Code()) {
			return Reply{}, &rolledBackError{err}
		}
		return Reply{Status: storable(s)}, txn.Final("grpc_"+s.Code().String(), errors.New("the handler answered "+s.Code().String()))
	}
	message, is := out.(proto.Message)
	switch {
	case !is || !message.ProtoReflect().IsValid():
		return Reply{}, &idempotency.ConfigError{Field: call.Method, Rule: fmt.Sprintf("must return a protobuf message, returned %T", out)}
	case !r.Untransacted && !txn.Used(tx):
		return Reply{}, &idempotency.ConfigError{
			Field: "handler of " + call.Method,
			Rule:  "must write through txn.FromContext, it succeeded and asked nothing of it: set Config.Untransacted if it has nothing to write",
		}
	}
	return Reply{Message: message}, nil
}

// fail makes an answer of an error, and tells the operator of those that are not the client's.
func (r *Rules) fail(ctx context.Context, call *Call, err error) Outcome {
	if refused, is := errors.AsType[*refusedError](err); is {
		return Outcome{Status: refused.status}
	}
	if _, is := r.Status(err); is {
		return Outcome{Err: err}
	}
	s := StatusOf(err)
	if (s.Code() == codes.Internal || s.Code() == codes.Unavailable) && ctx.Err() == nil { // else the client has hung up
		r.Log.ErrorContext(ctx, "idempotent call failed", slog.String("method", call.Method), slog.Any("error", err))
	}
	return Outcome{Status: s}
}
