package idempotency

import (
	"crypto/rand"
	"log/slog"
	"time"
)

// Record is one row of idempotency.records: what is known of a key.
type Record struct {
	Key         Key
	State       State
	Fence       int64 // of the last acquisition; a later one has a higher fence
	Generation  int64 // the fence that began this life of the key
	Attempt     int   // 1 for the first of a generation, 0 for an unused token
	Retryable   bool  // FAILED in the leased mode, worth another attempt
	Fingerprint Fingerprint
	// AttemptToken is the identity of the attempt that acquired last.
	AttemptToken AttemptToken
	Takeover     Takeover
	Executor     string // host:pid:random, for diagnosis only
	Client       string // who called, if Request.Client said so
	TraceID      string

	// Times are PostgreSQL's. A zero time means NULL; a zero ExpiresAt: kept for ever.
	CreatedAt, AcquiredAt, CompletedAt         time.Time
	LeaseExpiresAt, ResultExpiresAt, ExpiresAt time.Time

	ErrorCode, ErrorMessage string
	// ResultType names codec and version, for example "json/1". Result is nil while ResultType is not empty when the
	// result was dropped early (a tombstone).
	ResultType string
	Result     []byte

	// Expired and TimedOut are derived by PostgreSQL's clock at the time of the read.
	Expired, TimedOut bool
}

// LogValue shows what a log may know: never the key's value, the result, or who called.
func (r Record) LogValue() slog.Value {
	return slog.GroupValue(slog.Any("key", r.Key), slog.String("state", string(r.State)), slog.Int64("fence", r.Fence),
		slog.Int("attempt", r.Attempt), slog.String("executor", r.Executor))
}

// Clone returns a copy that shares no bytes with r.
func (r Record) Clone() Record {
	if r.Result != nil {
		r.Result = append(make([]byte, 0, len(r.Result)), r.Result...)
	}
	return r
}

// AttemptToken is the only identity of an attempt: fences can be handed out again after a failover, tokens cannot.
type AttemptToken [16]byte

// NewAttemptToken returns 16 random bytes.
func NewAttemptToken() AttemptToken {
	var t AttemptToken
	_, _ = rand.Read(t[:]) // never fails: crypto/rand ends the program rather than return an error
	return t
}

// Takeover says what may happen to a leased record whose owner died. It is stored with the record.
type Takeover string

// The takeover rules.
const (
	TakeoverRerun   Takeover = "RERUN"   // run the function again from its start
	TakeoverResume  Takeover = "RESUME"  // run it again, finished steps are replayed
	TakeoverResolve Takeover = "RESOLVE" // ask the operation's resolver what happened
	TakeoverManual  Takeover = "MANUAL"  // leave it to a person
)

// Request is one caller's wish to have an operation done once.
type Request struct {
	Key         Key
	Fingerprint Fingerprint // of the payload; NoFingerprint says on purpose that there is none
	// Retry says that the caller knows this to be a retry: the answer is looked up before anything is locked.
	Retry  bool
	Client string // who called, at most 255 bytes; optional, for audit
}

// Validate checks everything that can be checked without a database.
func (r Request) Validate() error {
	if r.Key.IsZero() {
		return &ConfigError{Field: "Request.Key", Rule: "must be set: make it with Operation.Key(tenant, value)"}
	}
	if r.Fingerprint.IsZero() {
		return &ConfigError{
			Field: "Request.Fingerprint",
			Rule:  "must be set: use FingerprintBytes(payload), or NoFingerprint if the key alone decides",
		}
	}
	return validateClient(r.Client)
}
