package idempotency

import (
	"errors"
	"fmt"
	"strings"
	"time"
)

// The outcomes a caller branches on. Typed errors below carry the facts and unwrap to one of these.
var (
	// ErrInvalid means that what a caller sent breaks a rule (key, tenant, document); see InvalidError. Nothing was sent to
	// PostgreSQL.
	ErrInvalid = errors.New("idempotency: invalid argument")
	// ErrConfig means that the program is put together wrongly (configuration, undeclared operation, missing fingerprint);
	// see ConfigError. No caller can mend it.
	ErrConfig = errors.New("idempotency: wrong configuration")
	// ErrInProgress means that another attempt of this key is still running; see InProgressError. Retry with the same key.
	ErrInProgress = errors.New("idempotency: key is in progress")
	// ErrMismatch means that the key was used before with another payload; see MismatchError. Use a new key.
	ErrMismatch = errors.New("idempotency: key was used with another payload")
	// ErrNotIssued means that the operation runs for issued tokens only, and the key is none: it was never issued for this tenant
	// and operation, or its time was over before its first use, or it is forged. Nothing was done: ask for a new token.
	ErrNotIssued = errors.New("idempotency: key is no issued token, or its time is over: ask for a new one")
	// ErrFailed means that the recorded outcome of this key is a failure; see FailedError. A retry replays it.
	ErrFailed = errors.New("idempotency: operation failed")
	// ErrResultExpired means that the operation was done, but its stored result was dropped already. It is never run again.
	ErrResultExpired = errors.New("idempotency: operation is done, its result has expired")
	// ErrResultDecode means that the stored result does not decode into the type asked for; see ResultDecodeError. The
	// operation is done and never run again.
	ErrResultDecode = errors.New("idempotency: stored result does not decode")
	// ErrResultTooLarge means that the result exceeds the operation's limit; everything was rolled back.
	ErrResultTooLarge = errors.New("idempotency: result is too large")
	// ErrResultEncode means that the result, of a call or of a Step, has no stored form: its type or value is one that the Codec
	// refuses. The transaction was rolled back, and a retry comes to the same.
	ErrResultEncode = errors.New("idempotency: result cannot be encoded")
	// ErrOutcomeUnknown means that PostgreSQL could not be asked whether COMMIT happened. Retry with the same key: it
	// replays the outcome if there is one.
	ErrOutcomeUnknown = errors.New("idempotency: outcome of the commit is unknown, retry with the same key")
	// ErrTransactionEnded means that the function ended the transaction by SQL of its own (COMMIT, ROLLBACK). The key is
	// recorded as failed, so that nothing runs twice; what the function committed by itself stays.
	ErrTransactionEnded = errors.New("idempotency: the function ended the transaction it was given")
	// ErrWrongMode means that the key belongs to a leased record and was used in the transactional mode.
	ErrWrongMode = errors.New("idempotency: key belongs to a leased operation, use the leased mode")
	// ErrLeaseLost means that the attempt does not own its key any more: its lease ended and another attempt took over, or
	// somebody recorded an outcome. It is also the cause of the context's end that a leased function sees then. Retry with
	// the same key: it gives the outcome of whoever owns it.
	ErrLeaseLost = errors.New("idempotency: the lease is lost, another attempt may own the key")
	// ErrManual means that the owner of a leased key died and its rule lets nobody else go on: a person must find out what
	// happened, and record it.
	ErrManual = errors.New("idempotency: the owner of the key died, a person must find out what it did")
	// ErrNested means that a function called its own runner again, or used its own key again in its transaction. Call the other operation's code directly, with the
	// transaction the function was given.
	ErrNested = errors.New("idempotency: a running function called its own runner: call the other operation's code with the transaction it was given")
	// ErrRestartOuter means that the caller's transaction is older than the record of this key (REPEATABLE READ or
	// SERIALIZABLE). Roll it back and begin again: the record is visible then.
	ErrRestartOuter = errors.New("idempotency: the caller's snapshot is older than the record, restart the outer transaction")
	// ErrNotRecorded means that the caller's transaction has not committed the record: it was rolled back, or it has not
	// committed yet.
	ErrNotRecorded = errors.New("idempotency: no record of this attempt, the outer transaction has not committed")
	// ErrRecordExists means that another attempt has recorded an outcome of this key meanwhile: look at the key again. The
	// runner does so by itself.
	ErrRecordExists = errors.New("idempotency: another attempt has recorded an outcome of this key")
	// ErrRestart means that the transaction failed in a way that a new run from its start may cure: a serialization
	// failure, a deadlock, a lost connection. The runner runs it again by itself, a bounded number of times; from the
	// runner this error says that it gave up. Nothing was recorded: retry later with the same key.
	ErrRestart = errors.New("idempotency: the transaction did not get through, retry later with the same key")
	// ErrAborted means that an SQL error had aborted the transaction although the function returned none: PostgreSQL
	// rolled everything back. Return SQL errors, or handle them in a savepoint (tx.Begin).
	ErrAborted = errors.New("idempotency: the transaction was aborted by an SQL error that the function did not return")
	// ErrTransition means that a Machine allows no transition from the state that is there; see TransitionError. Nothing was
	// changed.
	ErrTransition = errors.New("idempotency: transition is not allowed")
	// ErrNotFound means that there is nothing that a Machine could move: no such row, or nothing known of it in Redis.
	ErrNotFound = errors.New("idempotency: there is nothing to move")
	// ErrSchema means that the tables are missing or older than this code; see SchemaError.
	ErrSchema = errors.New("idempotency: database schema does not fit")
	// ErrNewerRecord means that a newer release wrote this key's record with a fingerprint that this release cannot compare.
	// Do not use a new key: retry once this program is updated.
	ErrNewerRecord = errors.New("idempotency: record was written by a newer release, update this program and retry with the same key")
	// ErrNewerPolicy means that a policy says something that this release does not know: it is taken for enforce.
	ErrNewerPolicy = errors.New("idempotency: policy was written for a newer release")
	// ErrRefused means that a record may not be changed by hand, or not now; see RefusedError. Nothing was changed.
	ErrRefused = errors.New("idempotency: the record is not changed")
	// ErrNoWorker means that there is no worker number for ids at this time: all are leased, or PostgreSQL could not be asked in
	// time to keep the one that was. Nothing was made; later there may be one.
	ErrNoWorker = errors.New("idempotency: there is no worker number at this time")
	// ErrReadOnly means that the server is a standby. Only a primary can say whether a key was used.
	ErrReadOnly = errors.New("idempotency: server is in recovery (a standby), connect to the primary")
)

// InvalidError names the field and the rule it breaks. It unwraps to ErrInvalid.
type InvalidError struct {
	Field string // "tenant", "operation", "key", "client", "state", "transition id" or a part of a fingerprint
	Rule  string // what the field must be, as a sentence's end: "must be at most 255 bytes"
}

func (e *InvalidError) Error() string { return "idempotency: " + e.Field + " " + e.Rule }

// Unwrap returns ErrInvalid.
func (e *InvalidError) Unwrap() error { return ErrInvalid }

// ConfigError names the field and the rule it breaks. It unwraps to ErrConfig.
type ConfigError struct {
	Field string // for example "Config.MaxRetries" or "Operation order.create: Retention"
	Rule  string
}

func (e *ConfigError) Error() string { return "idempotency: " + e.Field + " " + e.Rule }

// Unwrap returns ErrConfig.
func (e *ConfigError) Unwrap() error { return ErrConfig }

// InProgressError says when to try again. It unwraps to ErrInProgress.
type InProgressError struct {
	Key        Key
	RetryAfter time.Duration // a hint, at least 1 s: the unit of HTTP's Retry-After
}

func (e *InProgressError) Error() string {
	return fmt.Sprintf("%v: retry with the same key in %v", ErrInProgress, e.RetryAfter)
}

// Unwrap returns ErrInProgress.
func (e *InProgressError) Unwrap() error { return ErrInProgress }

// MismatchError unwraps to ErrMismatch.
type MismatchError struct {
	Key       Key
	CreatedAt time.Time // when the first payload came; zero: the call with it still runs
}

func (e *MismatchError) Error() string {
	if e.CreatedAt.IsZero() {
		return ErrMismatch.Error() + " (a call with another payload runs right now): use a new key for a new request"
	}
	return fmt.Sprintf("%v (first used %s): use a new key for a new request", ErrMismatch, e.CreatedAt.UTC().Format(time.RFC3339))
}

// Unwrap returns ErrMismatch.
func (e *MismatchError) Unwrap() error { return ErrMismatch }

// FailedError is a recorded failure, fresh or replayed. It unwraps to ErrFailed and, for the first caller, to the
// error the function returned.
type FailedError struct {
	Code    string // the code given to Final
	Message string // the first error's text
	Record  Record
	Cause   error // nil on a replay: an error's text is stored, not its type
}

func (e *FailedError) Error() string { return fmt.Sprintf("%s: %s", e.Code, e.Message) }

// Unwrap returns ErrFailed and the cause.
func (e *FailedError) Unwrap() []error {
	if e.Cause == nil {
		return []error{ErrFailed}
	}
	return []error{ErrFailed, e.Cause}
}

// ResultDecodeError means that a stored result does not decode into the type asked for. The operation is done: it is
// never run again, and the bytes are here.
type ResultDecodeError struct {
	ResultType string
	Result     []byte
	Err        error
}

func (e *ResultDecodeError) Error() string {
	return fmt.Sprintf("idempotency: decode stored result (%s, %d bytes): %v", e.ResultType, len(e.Result), e.Err)
}

// Unwrap returns ErrResultDecode and the decoder's error.
func (e *ResultDecodeError) Unwrap() []error { return []error{ErrResultDecode, e.Err} }

// TransitionError names what was asked and what is allowed instead. It unwraps to ErrTransition.
type TransitionError struct {
	Machine string
	From    string // the state that was found, maybe one the machine does not know; empty: none
	To      string
	Allowed []string // from there; none after a final state
}

func (e *TransitionError) Error() string {
	allowed := "none"
	if len(e.Allowed) > 0 {
		allowed = strings.Join(e.Allowed, ", ")
	}
	// From is what a table holds: quoted and bounded, since it may be anything.
	return fmt.Sprintf("%v: %s from %.63q to %s (allowed from there: %s)", ErrTransition, e.Machine, e.From, e.To, allowed)
}

// Unwrap returns ErrTransition.
func (e *TransitionError) Unwrap() error { return ErrTransition }

// SchemaError unwraps to ErrSchema and names what to run.
type SchemaError struct {
	Have, Want int // versions; Have is 0 where there is no schema, or one too old to tell
}

func (e *SchemaError) Error() string {
	have := fmt.Sprintf("version %d", e.Have)
	if e.Have == 0 {
		have = "missing"
	}
	return fmt.Sprintf("%v: schema idempotency is %s, this program needs version %d or newer; "+
		"call db.Migrate, or run: goose -dir db/migrations -table public.pgonce_goose_version postgres \"$DATABASE_URL\" up, "+
		"or: psql \"$DATABASE_URL\" -v ON_ERROR_STOP=1 -f db/install.sql",
		ErrSchema, have, e.Want)
}

// Unwrap returns ErrSchema.
func (e *SchemaError) Unwrap() error { return ErrSchema }
