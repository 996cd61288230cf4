package idempotencyhttp

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/http"

	"github.com/jackc/pgx/v5"

	"github.com/pgonce/pgonce/idempotency"
	"github.com/pgonce/pgonce/txn"
)

// Middleware protects routes. Make one per runner and kind of caller, and from it a func(http.Handler) http.Handler per
// route. It is safe for concurrent use.
type Middleware struct {
	runner  *txn.Runner
	tenant  Tenant
	config  Config
	allowed map[string]bool
	derived *idempotency.Operation // nil: keys are not derived
}

// New returns a Middleware. tenant says whose key a request brings; it has no default, since one that everybody shares must be
// a choice: SingleTenant. The error is an *idempotency.ConfigError that names field and rule.
func New(runner *txn.Runner, tenant Tenant, cfg *Config) (*Middleware, error) {
	switch {
	case runner == nil:
		return nil, &idempotency.ConfigError{Field: "runner", Rule: "must not be nil"}
	case tenant == nil:
		return nil, &idempotency.ConfigError{Field: "tenant", Rule: "must not be nil: use SingleTenant if there is only one"}
	}
	config := cfg.withDefaults()
	if err := config.validate(); err != nil {
		return nil, err
	}
	derived, err := derivedOperation(runner, config.Derived)
	if err != nil {
		return nil, err
	}
	return &Middleware{runner: runner, tenant: tenant, config: config, allowed: allowList(config.Headers), derived: derived}, nil
}

// Operation protects a route: its handler runs in a transaction, once per key of the operation. Safe methods (GET, HEAD,
// OPTIONS, TRACE) pass. It panics with an *idempotency.ConfigError if the runner does not declare the operation, as
// http.ServeMux does for a pattern that is wrong: both come to light when the program starts.
func (m *Middleware) Operation(name string) func(http.Handler) http.Handler {
	op := m.declared(name)
	return func(next http.Handler) http.Handler {
		return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) { m.serve(w, r, op, m.transactional, next) })
	}
}

// OperationOf is Operation for a router that has many routes behind it: of names the operation of a request. An empty name
// lets the request pass unprotected; so do routes that stream, upgrade or hijack, which no record could hold.
func (m *Middleware) OperationOf(of func(*http.Request) string) func(http.Handler) http.Handler {
	return func(next http.Handler) http.Handler {
		return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			name := of(r)
			if name == "" {
				next.ServeHTTP(w, r)
				return
			}
			op, declared := m.runner.Operation(name)
			if !declared {
				m.fail(w, r, idempotency.Key{}, undeclared(name))
				return
			}
			m.serve(w, r, op, m.transactional, next)
		})
	}
}

func (m *Middleware) declared(name string) idempotency.Operation {
	op, declared := m.runner.Operation(name)
	if !declared {
		panic(undeclared(name))
	}
	return op
}

func undeclared(name string) error {
	return &idempotency.ConfigError{Field: "operation", Rule: fmt.Sprintf("must be declared in txn.Config.Operations, %q is not", name)}
}

// mode runs a handler and gives its outcome.
type mode func(http.ResponseWriter, *http.Request, *protected) (txn.Result[Response], error)

// protected is one request on a protected route.
type protected struct {
	req  idempotency.Request
	body []byte
	next http.Handler
}

func safe(method string) bool {
	switch method {
	case http.MethodGet, http.MethodHead, http.MethodOptions, http.MethodTrace, "":
		return true
	}
	return false
}

func (m *Middleware) serve(w http.ResponseWriter, r *http.Request, op idempotency.Operation, run mode, next http.Handler) {
	if safe(r.Method) {
		next.ServeHTTP(w, r)
		return
	}
	read := m.read
	if len(r.Header.Values(HeaderKey)) == 0 {
		switch {
		case m.derived != nil:
			read = m.readDerived
		case m.config.Optional:
			m.config.OnUnprotected(r)
			next.ServeHTTP(w, r)
			return
		}
	}
	p, err := read(w, r, op)
	if err == nil {
		err = p.valid()
	}
	if err != nil {
		m.fail(w, r, p.req.Key, err)
		return
	}
	p.next = next
	res, err := run(w, r, p)
	m.answer(w, r, p.req.Key, &res, err)
}

// read makes of an HTTP request what the library wants to know.
func (m *Middleware) read(w http.ResponseWriter, r *http.Request, op idempotency.Operation) (*protected, error) {
	p := &protected{}
	var err error
	if p.req.Key, err = m.Key(r, op); err != nil {
		return p, err
	}
	return p, m.readRequest(w, r, p)
}

// readRequest reads what a request is, beside its key.
func (m *Middleware) readRequest(w http.ResponseWriter, r *http.Request, p *protected) (err error) {
	if p.body, err = m.readBody(w, r); err != nil {
		return err
	}
	if p.req.Fingerprint, err = m.config.Fingerprint(r, p.body); err != nil {
		return err
	}
	p.req.Client = m.config.Client(r, p.body)
	return nil
}

// valid finds what only the program can have done wrong.
func (p *protected) valid() error {
	if rule, wrong := ruleOf(p.req.Validate()); wrong {
		return &idempotency.ConfigError{Field: "Config.Client", Rule: rule}
	}
	return nil
}

func (m *Middleware) readBody(w http.ResponseWriter, r *http.Request) ([]byte, error) {
	if r.Body == nil {
		return nil, nil
	}
	reader := r.Body
	if m.config.MaxBody >= 0 {
		if r.ContentLength > m.config.MaxBody { // before anybody sends it
			return nil, &http.MaxBytesError{Limit: m.config.MaxBody}
		}
		reader = http.MaxBytesReader(w, r.Body, m.config.MaxBody)
	}
	body, err := io.ReadAll(reader)
	if err == nil {
		return body, nil
	}
	if tooLarge := (*http.MaxBytesError)(nil); !errors.As(err, &tooLarge) {
		err = problem(invalidRequest, "body", "must arrive whole")
	}
	return nil, err
}

// again is the request as it came, for one run of the handler: what an earlier run did to it is forgotten.
func again(ctx context.Context, r *http.Request, body []byte) *http.Request {
	r = r.Clone(ctx)
	r.Body, r.ContentLength, r.TransferEncoding = http.NoBody, int64(len(body)), nil
	if len(body) > 0 {
		r.Body = io.NopCloser(bytes.NewReader(body))
	}
	return r
}

// rolledBackError is a handler's response that is not recorded. Its caller gets it all the same.
type rolledBackError struct{ response Response }

func (e *rolledBackError) Error() string {
	return "idempotencyhttp: the handler answered " + statusText(e.response.Status)
}

func statusText(status int) string { return fmt.Sprintf("%d %s", status, http.StatusText(status)) }

// transactional runs the handler in a transaction.
func (m *Middleware) transactional(w http.ResponseWriter, r *http.Request, p *protected) (txn.Result[Response], error) {
	ctx, giveUp := context.WithCancelCause(r.Context())
	defer giveUp(nil)
	return txn.WithIdempotency(ctx, m.runner, p.req, func(ctx context.Context, tx pgx.Tx) (Response, error) {
		response, err := m.run(ctx, w, r, p)
		used := txn.Used(tx)
		if response.Status == http.StatusServiceUnavailable {
			// http.TimeoutHandler inside ends a running statement, and with it the connection. To run such a handler again
			// would take as long again, for the same answer.
			if conn := tx.Conn(); conn == nil || conn.IsClosed() {
				giveUp(err)
			}
		}
		if err == nil && !used && !m.config.Untransacted && m.fateOf(response.Status) == fateCommit {
			err = &idempotency.ConfigError{
				Field: "handler of " + p.req.Key.Operation(),
				Rule:  "must write through txn.FromContext, it answered " + statusText(response.Status) + " and asked nothing of it: set Config.Untransacted if it has nothing to write, or use Leased",
			}
		}
		if err == nil && m.fateOf(response.Status) == fateFinal {
			err = final(response.Status)
		}
		return response, err
	})
}

// final is the mark of a recorded 4xx.
func final(status int) error {
	return txn.Final(fmt.Sprintf("http_%d", status), errors.New("the handler answered "+statusText(status)))
}

// run runs the handler. The error says why its response is not recorded.
func (m *Middleware) run(ctx context.Context, w http.ResponseWriter, r *http.Request, p *protected) (Response, error) {
	rec := newRecorder(w, m.config.MaxResponse)
	p.next.ServeHTTP(rec, again(ctx, r, p.body))
	if rec.silent() && ctx.Err() != nil {
		// A handler that sees its client gone, and returns with half its work done and nobody to write to. For net/http that is a
		// 200, and it must not be one here.
		rec.end()
		return Response{}, context.Cause(ctx)
	}
	response, err := rec.finish()
	if err != nil {
		return Response{}, err
	}
	response.Header = m.recorded(response.all, rec.before)
	response.Trailer = m.recorded(response.allTrailers, nil)
	if m.fateOf(response.Status) == fateRollBack {
		return response, &rolledBackError{response}
	}
	return response, nil
}

// answer sends the outcome.
func (m *Middleware) answer(w http.ResponseWriter, r *http.Request, key idempotency.Key, res *txn.Result[Response], err error) {
	if err == nil {
		res.Value.write(w, res.Replayed)
		return
	}
	var failed *idempotency.FailedError
	var own *rolledBackError
	switch {
	// Before all that may be wrapped in them: what the handler answered is not what happened.
	case errors.Is(err, idempotency.ErrOutcomeUnknown), errors.Is(err, idempotency.ErrTransactionEnded), errors.Is(err, idempotency.ErrRestart):
		m.fail(w, r, key, err)
	case errors.As(err, &failed) && res.Value.Status != 0:
		res.Value.write(w, res.Replayed)
	case errors.As(err, &failed) && failed.Record.ResultType != "":
		resultGone.problem().Write(w)
	case errors.As(err, &own):
		own.response.write(w, false)
	default:
		m.fail(w, r, key, err)
	}
}

// fail answers with a problem, and tells the operator of those that are not the client's.
func (m *Middleware) fail(w http.ResponseWriter, r *http.Request, key idempotency.Key, err error) {
	p := ProblemOf(err)
	if p.Status >= http.StatusInternalServerError && r.Context().Err() == nil { // else the client has hung up
		m.config.Log.ErrorContext(r.Context(), "idempotent request failed", slog.String("problem", p.Type), slog.Any("key", key), slog.Any("error", err))
	}
	p.Write(w)
}
