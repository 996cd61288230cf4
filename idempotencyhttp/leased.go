package idempotencyhttp

import (
	"context"
	"errors"
	"net/http"
	"sync"

	"github.com/jackc/pgx/v5"

	"github.com/pgonce/pgonce/idempotency"
	"github.com/pgonce/pgonce/txn"
)

// Leased protects a route whose handler calls somebody else, or writes where no rollback reaches. It runs in the leased mode
// (txn.WithLease): a PROCESSING record is committed before the handler runs, no transaction is open while it does, and
// LeaseFromContext gives it the lease. What it has to write in PostgreSQL it leaves with OnCommit. After a crash the operation's
// Takeover says what happens.
//
// 2xx, 3xx and a recorded 4xx end the key. Any other status is a failure that the next caller may try again, by the same rule.
func (m *Middleware) Leased(name string) func(http.Handler) http.Handler {
	op := m.declared(name)
	return func(next http.Handler) http.Handler {
		return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) { m.serve(w, r, op, m.leased, next) })
	}
}

// owned is what the handler of a leased route has in its context.
type owned struct {
	lease *txn.Lease

	mu      sync.Mutex
	over    bool
	commits []func(context.Context, pgx.Tx) error
}

type ownedKey struct{}

// LeaseFromContext returns the lease of the request: for its downstream keys, and for txn.Step. false: its route is not Leased.
func LeaseFromContext(ctx context.Context) (*txn.Lease, bool) {
	o, leased := ctx.Value(ownedKey{}).(*owned)
	if !leased {
		return nil, false
	}
	return o.lease, true
}

// OnCommit leaves what is to be written in the transaction that records a success of a leased route. It may run more than once, as a
// function of txn.WithIdempotency; its error is a failure that may be tried again, and answered 500. If the handler answers
// anything else than 2xx or 3xx, it does not run.
func OnCommit(ctx context.Context, write func(context.Context, pgx.Tx) error) error {
	o, leased := ctx.Value(ownedKey{}).(*owned)
	if !leased {
		return &idempotency.ConfigError{Field: "OnCommit", Rule: "must be called by the handler of a Leased route: elsewhere write through txn.FromContext"}
	}
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.over {
		return errors.New("idempotencyhttp: OnCommit was called after the handler had returned")
	}
	o.commits = append(o.commits, write)
	return nil
}

// end gives what was left.
func (o *owned) end() []func(context.Context, pgx.Tx) error {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.over = true
	return o.commits
}

// called is what a leased handler came to.
type called struct {
	response Response
	commits  []func(context.Context, pgx.Tx) error
}

func (m *Middleware) leased(w http.ResponseWriter, r *http.Request, p *protected) (txn.Result[Response], error) {
	return txn.WithLease(r.Context(), m.runner, p.req, func(ctx context.Context, l *txn.Lease) (done called, err error) {
		o := &owned{lease: l}
		done.response, err = m.run(context.WithValue(ctx, ownedKey{}, o), w, r, p)
		done.commits = o.end()
		return done, err
	}, func(ctx context.Context, tx pgx.Tx, done called) (Response, error) {
		if m.fateOf(done.response.Status) == fateFinal {
			return done.response, final(done.response.Status)
		}
		for _, write := range done.commits {
			if err := write(ctx, tx); err != nil {
				return done.response, err
			}
		}
		return done.response, nil
	})
}
