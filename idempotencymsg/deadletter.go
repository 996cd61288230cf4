package idempotencymsg

import (
	"context"
	"errors"
	"strings"

	"github.com/jackc/pgx/v5"

	"github.com/pgonce/pgonce/idempotency"
	"github.com/pgonce/pgonce/txn"
)

// maxReason bounds the reason that is stored with the mark of a message that was given up.
const maxReason = 1024

// giveUp dead-letters what has to be. The handler's own transaction is over by then: nothing it wrote is beside the
// message's grave.
func (in *Inbox) giveUp(ctx context.Context, part []Message, results []Result) []Result {
	if in.config.DeadLetter == nil {
		return results
	}
	var reqs []idempotency.Request
	var at []int
	for i, res := range results {
		if !in.hopeless(part[i], res) {
			continue
		}
		if req, err := in.grave(part[i], res); err == nil {
			reqs, at = append(reqs, req), append(at, i)
		}
	}
	if len(reqs) == 0 {
		return results
	}
	outcomes, err := txn.WithIdempotencyMany(ctx, in.runner, reqs, func(ctx context.Context, tx pgx.Tx, i int) (mark, error) {
		reason := results[at[i]].Err
		done, err := run(ctx, tx, part[at[i]], func(ctx context.Context, tx pgx.Tx, m Message) ([]byte, error) {
			return nil, in.config.DeadLetter(ctx, tx, m, reason)
		})
		done.Dead = because(reason)
		return done, err
	})
	for n, i := range at {
		reason := results[i].Err
		if err != nil {
			results[i] = Result{Verdict: Retry, Err: errors.Join(reason, err)}
			continue
		}
		results[i] = judge(outcomes[n].Result, outcomes[n].Err)
		if results[i].Verdict != Duplicate {
			results[i].Err = errors.Join(reason, outcomes[n].Err)
		}
	}
	return results
}

// hopeless: another delivery would not help, or there were enough of them.
func (in *Inbox) hopeless(m Message, res Result) bool {
	return res.Verdict == Poisoned ||
		res.Verdict == Retry && in.config.MaxDeliveries > 0 && m.Deliveries >= in.config.MaxDeliveries
}

// grave is the request whose record says that a message was given up: its own, so that no delivery runs it any more. Where
// its own key is none, or holds what another payload came to, it gets one of its own.
func (in *Inbox) grave(m Message, res Result) (idempotency.Request, error) {
	req, err := in.request(m)
	if err != nil || errors.Is(res.Err, idempotency.ErrMismatch) {
		req.Key, err = in.config.Operation.Key(idempotency.SingleTenant, deadValue(m))
	}
	return req, err
}

// because is never empty: an error may have no text.
func because(reason error) string {
	text := strings.ToValidUTF8(reason.Error(), "\uFFFD")
	if len(text) > maxReason {
		text = strings.ToValidUTF8(text[:maxReason], "")
	}
	if text == "" {
		text = "no reason given"
	}
	return text
}
