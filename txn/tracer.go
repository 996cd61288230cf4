package txn

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/multitracer"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgonce/pgonce/idempotency"
)

// ErrOutsideTransaction is what a Tracer that refuses makes of a statement which is not sent on the transaction of the function
// that runs: an *OutsideTransactionError.
var ErrOutsideTransaction = errors.New("txn: outside the function's transaction")

// OutsideTransactionError says which call was refused, and where.
type OutsideTransactionError struct{ idempotency.OutsideTransaction }

func (e *OutsideTransactionError) Error() string {
	return fmt.Sprintf("%v: %s at %s, while the function of %v runs: use the transaction that it was given (txn.FromContext); "+
		"what must not be part of it is done before or after the call, or in the first function of WithLease",
		ErrOutsideTransaction, e.Call, e.Caller, e.Key)
}

// Unwrap returns ErrOutsideTransaction.
func (e *OutsideTransactionError) Unwrap() error { return ErrOutsideTransaction }

// TracerConfig configures a Tracer. A zero field means its default.
type TracerConfig struct {
	// Refuse has what is reported fail with ErrOutsideTransaction, before anything is sent. Through database/sql the program
	// gets driver.ErrBadConn instead, after three tries: there only the reports say why.
	// Default: false, it is only reported.
	Refuse bool
	// Log is told once of every place in the program.
	// Default: slog.Default().
	Log *slog.Logger
}

// Tracer finds SQL that a function sends on another connection than that of its transaction: the record would not protect it,
// and on a pool whose connections are all in use it would wait for one that its own function holds. It is a tracer of pgx and
// of pgxpool and reports before the call waits or sends: to Config.OnEvent of the function's runner
// (idempotency.OutsideTransaction) and to the log. A statement sent through a pool is reported twice: for the connection, and
// with its text.
//
// It goes by the context: a call with the function's context, or one derived from it, while the function runs. One made with a
// context from elsewhere is not seen, nor is another runner that the function calls, whose transaction is its own.
type Tracer struct {
	refuse bool
	log    *slog.Logger
	told   sync.Map // places in the log
}

var (
	_ pgx.QueryTracer       = (*Tracer)(nil)
	_ pgx.BatchTracer       = (*Tracer)(nil)
	_ pgx.CopyFromTracer    = (*Tracer)(nil)
	_ pgx.PrepareTracer     = (*Tracer)(nil)
	_ pgxpool.AcquireTracer = (*Tracer)(nil)
)

// NewTracer returns a tracer for any number of pools and connections.
func NewTracer(cfg *TracerConfig) *Tracer {
	t := &Tracer{log: slog.Default()}
	if cfg != nil {
		t.refuse = cfg.Refuse
		if cfg.Log != nil {
			t.log = cfg.Log
		}
	}
	return t
}

// AddTo sets the tracer in a configuration, beside the one that is there. For a pool that is Config.ConnConfig, before
// pgxpool.NewWithConfig. Add it to every pool and connection that functions can reach, and not only to the runner's.
func (t *Tracer) AddTo(config *pgx.ConnConfig) {
	if config.Tracer == nil {
		config.Tracer = t
		return
	}
	config.Tracer = multitracer.New(config.Tracer, t)
}

// TraceAcquireStart is pgxpool's.
func (t *Tracer) TraceAcquireStart(ctx context.Context, _ *pgxpool.Pool, _ pgxpool.TraceAcquireStartData) context.Context {
	if inside := outside(ctx, nil); inside != nil {
		return t.report(ctx, inside, "acquire", "")
	}
	return ctx
}

// TraceQueryStart is pgx's.
func (t *Tracer) TraceQueryStart(ctx context.Context, conn *pgx.Conn, data pgx.TraceQueryStartData) context.Context {
	if inside := outside(ctx, conn); inside != nil {
		return t.report(ctx, inside, "query", data.SQL)
	}
	return ctx
}

// TraceBatchStart is pgx's.
func (t *Tracer) TraceBatchStart(ctx context.Context, conn *pgx.Conn, data pgx.TraceBatchStartData) context.Context {
	inside := outside(ctx, conn)
	if inside == nil {
		return ctx
	}
	var all []string
	if data.Batch != nil {
		for _, queued := range data.Batch.QueuedQueries {
			all = append(all, queued.SQL)
		}
	}
	return t.report(ctx, inside, "batch", strings.Join(all, ";\n"))
}

// TraceCopyFromStart is pgx's.
func (t *Tracer) TraceCopyFromStart(ctx context.Context, conn *pgx.Conn, data pgx.TraceCopyFromStartData) context.Context {
	inside := outside(ctx, conn)
	if inside == nil {
		return ctx
	}
	return t.report(ctx, inside, "copy", fmt.Sprintf("COPY %s %s FROM STDIN", data.TableName.Sanitize(), columns(data.ColumnNames)))
}

func columns(names []string) string {
	quoted := make([]string, len(names))
	for i, name := range names {
		quoted[i] = pgx.Identifier{name}.Sanitize()
	}
	return "(" + strings.Join(quoted, ", ") + ")"
}

// TracePrepareStart is pgx's.
func (t *Tracer) TracePrepareStart(ctx context.Context, conn *pgx.Conn, data pgx.TracePrepareStartData) context.Context {
	if inside := outside(ctx, conn); inside != nil {
		return t.report(ctx, inside, "prepare", data.SQL)
	}
	return ctx
}

// The ends say nothing that the starts have not said.

// TraceAcquireEnd is pgxpool's.
func (*Tracer) TraceAcquireEnd(context.Context, *pgxpool.Pool, pgxpool.TraceAcquireEndData) {}

// TraceQueryEnd is pgx's.
func (*Tracer) TraceQueryEnd(context.Context, *pgx.Conn, pgx.TraceQueryEndData) {}

// TraceBatchQuery is pgx's.
func (*Tracer) TraceBatchQuery(context.Context, *pgx.Conn, pgx.TraceBatchQueryData) {}

// TraceBatchEnd is pgx's.
func (*Tracer) TraceBatchEnd(context.Context, *pgx.Conn, pgx.TraceBatchEndData) {}

// TraceCopyFromEnd is pgx's.
func (*Tracer) TraceCopyFromEnd(context.Context, *pgx.Conn, pgx.TraceCopyFromEndData) {}

// TracePrepareEnd is pgx's.
func (*Tracer) TracePrepareEnd(context.Context, *pgx.Conn, pgx.TracePrepareEndData) {}

// untracedKey holds the *running in whose function nothing is reported, until another function begins.
type untracedKey struct{}

// ownWork marks the context of what the library itself does when it is called inside a function, of another runner.
func ownWork(ctx context.Context) context.Context {
	inside, _ := ctx.Value(runningKey{}).(*running)
	return untraced(ctx, inside)
}

func untraced(ctx context.Context, inside *running) context.Context {
	if inside == nil {
		return ctx
	}
	return context.WithValue(ctx, untracedKey{}, inside)
}

// outside returns the running function whose context ctx is, where conn is neither its transaction's connection nor that of a
// transaction around it. It takes no lock: a statement of that transaction may be what is running.
func outside(ctx context.Context, conn *pgx.Conn) *running {
	innermost, _ := ctx.Value(runningKey{}).(*running)
	if innermost == nil {
		return nil
	}
	if silent, _ := ctx.Value(untracedKey{}).(*running); silent == innermost {
		return nil
	}
	var inside *running
	for r := innermost; r != nil; r = r.outer {
		switch {
		case r.tx.ended.Load(): // a context may outlive its function
		case r.tx.conn == conn:
			return nil
		case inside == nil:
			inside = r
		}
	}
	return inside
}

// report returns the context for the rest of the call: in it the statement's own preparation, and what a pool sends on a new
// connection, are not reported again. A panic of whoever is told is the call's error: through pgx it would go without giving the
// connection back.
func (t *Tracer) report(ctx context.Context, inside *running, call, sql string) (rest context.Context) {
	defer func() {
		if p := recover(); p != nil {
			rest = refused{ctx, fmt.Errorf("txn: report %s outside the function's transaction: panic: %v", call, p)}
		}
	}()
	event := idempotency.OutsideTransaction{Key: inside.key, Call: call, SQL: sql, Caller: caller(), Refused: t.refuse}
	innermost, _ := ctx.Value(runningKey{}).(*running)
	ctx = untraced(ctx, innermost)
	inside.runner.config.OnEvent(ctx, event)
	if _, known := t.told.LoadOrStore(call+event.Caller, true); !known {
		t.log.WarnContext(ctx, "a function goes outside its transaction", slog.Any("key", event.Key), slog.String("call", call),
			slog.String("caller", event.Caller), slog.String("sql", sql), slog.Bool("refused", t.refuse))
	}
	if t.refuse {
		return refused{ctx, &OutsideTransactionError{event}}
	}
	return ctx
}

// between are the packages between a program's statement and pgx. Only the place before them says whose statement it is.
var between = []string{
	"github.com/jackc/", "database/sql.", "github.com/pgonce/pgonce/txn.", "github.com/pgonce/pgonce/txnsql.",
	"gorm.io/", "github.com/jmoiron/sqlx.", "entgo.io/ent/",
}

// caller is the innermost place that is none of theirs.
func caller() string {
	pcs := make([]uintptr, 64)
	frames := runtime.CallersFrames(pcs[:runtime.Callers(2, pcs)])
	for {
		frame, more := frames.Next()
		if !slices.ContainsFunc(between, func(path string) bool { return strings.HasPrefix(frame.Function, path) }) {
			return frame.File + ":" + strconv.Itoa(frame.Line)
		}
		if !more {
			return "unknown"
		}
	}
}

// refused is a context that has ended with an error of ours: pgx gives its Err to the caller, where the cause of a cancelled
// one would be lost.
type refused struct {
	context.Context //nolint:containedctx // it is one
	err             error
}

var ended = func() <-chan struct{} {
	c := make(chan struct{})
	close(c)
	return c
}()

// Done is context.Context's.
func (refused) Done() <-chan struct{} { return ended }

// Err is context.Context's.
func (r refused) Err() error { return r.err }
