package txn

import (
	"context"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/pgonce/pgonce/idempotency"
	"github.com/pgonce/pgonce/internal/results"
)

// Defaults of a Config.
const (
	DefaultMaxRetries    = 5
	DefaultMaxWaiters    = 1000
	DefaultCommitTimeout = 30 * time.Second
)

// Config configures a Runner. A zero field means its default.
type Config struct {
	// Operations are all operations this runner serves, each declared once. Required.
	Operations []idempotency.Operation
	// Fronts stand before PostgreSQL for the operations with StrategyHybrid, the nearest first: a local front, then Redis.
	// Close the runner when you use any, and the fronts after it.
	// Default: none.
	Fronts []idempotency.Front
	// Codec stores results. A []byte or json.RawMessage is always stored as it is.
	// Default: JSON.
	Codec Codec
	// Isolation of the transactions. Above READ COMMITTED a race between duplicates may end in a serialization failure
	// and a second run of the function; under SERIALIZABLE also calls of different keys may conflict, since PostgreSQL
	// watches pages: raise MaxRetries there.
	// Default: pgx.ReadCommitted.
	Isolation pgx.TxIsoLevel
	// MaxRetries is how often the transaction is run again after a serialization failure, a deadlock, or a connection that
	// was lost or could not be made; -1: never.
	// Default: 5.
	MaxRetries int
	// MaxWaiters bounds the calls of this runner that wait for another attempt of their key; more are told "in progress"
	// at once; -1: nobody waits.
	// Default: 1,000.
	MaxWaiters int
	// CommitTimeout bounds the wait for COMMIT's answer, and then, counted anew from its loss, the time to find out what it did.
	// So ErrOutcomeUnknown comes up to twice as long after COMMIT was sent. If meanwhile the key gets free and the function runs
	// again, its time is added, and for its own COMMIT once more CommitTimeout. A new connection is waited for as long as the
	// call's context and the pool's ConnectTimeout let it.
	// Default: 30 s.
	CommitTimeout time.Duration
	// OnEvent receives what happens, for traces and metrics.
	// Default: none.
	OnEvent idempotency.OnEvent
	// Policies are changed while the program runs: gradual release, shadow, the kill switch. Its caller runs them.
	// Default: none, everything is enforced as declared.
	Policies *idempotency.Policies
	// TraceID names the trace a call belongs to; it is stored with the record.
	// Default: none.
	TraceID func(context.Context) string
}

func (c *Config) withDefaults() Config {
	var d Config
	if c != nil {
		d = *c
	}
	if d.Codec == nil {
		d.Codec = JSON{}
	}
	if d.Isolation == "" {
		d.Isolation = pgx.ReadCommitted
	}
	if d.MaxRetries == 0 {
		d.MaxRetries = DefaultMaxRetries
	}
	if d.MaxWaiters == 0 {
		d.MaxWaiters = DefaultMaxWaiters
	}
	if d.CommitTimeout == 0 {
		d.CommitTimeout = DefaultCommitTimeout
	}
	if d.OnEvent == nil {
		d.OnEvent = func(context.Context, idempotency.Event) {}
	}
	if d.TraceID == nil {
		d.TraceID = func(context.Context) string { return "" }
	}
	return d
}

func (c *Config) validate() error {
	invalid := func(field, rule string) error {
		return &idempotency.ConfigError{Field: "Config." + field, Rule: rule}
	}
	switch c.Isolation {
	case pgx.ReadCommitted, pgx.RepeatableRead, pgx.Serializable:
	default:
		return invalid("Isolation", fmt.Sprintf("must be read committed, repeatable read or serializable, is %q", c.Isolation))
	}
	switch {
	case len(c.Operations) == 0:
		return invalid("Operations", "must declare at least one operation")
	case c.MaxRetries < -1 || c.MaxRetries > 100:
		return invalid("MaxRetries", "must be from 1 to 100, or -1 for none")
	case c.MaxWaiters < -1:
		return invalid("MaxWaiters", "must be positive, or -1 for none")
	case c.CommitTimeout < time.Second || c.CommitTimeout > idempotency.MinRetention/4:
		// A record must outlive the search for it.
		return invalid("CommitTimeout", "must be from 1s to 2m30s")
	case c.Codec.Name() == "" || c.Codec.Name() == results.RawType || c.Codec.Name() == results.RawJSONType:
		return invalid("Codec", "must have a name of its own, such as \"msgpack/1\"")
	}
	return nil
}

// operations validates the declarations and indexes them by name.
func (c *Config) operations() (map[string]*operation, error) {
	ops := make(map[string]*operation, len(c.Operations))
	for _, declared := range c.Operations {
		op := declared.WithDefaults()
		if err := op.Validate(); err != nil {
			return nil, err
		}
		if ops[op.Name] != nil {
			return nil, &idempotency.ConfigError{Field: "Config.Operations", Rule: fmt.Sprintf("must be declared once each, %q is there twice", op.Name)}
		}
		if op.Strategy == "" {
			op.Strategy = idempotency.StrategyStrict
			if len(c.Fronts) > 0 {
				op.Strategy = idempotency.StrategyHybrid
			}
		}
		invalid := func(rule string) error {
			return &idempotency.ConfigError{Field: "Operation " + op.Name + ": Strategy", Rule: rule}
		}
		switch {
		case op.Strategy == idempotency.StrategyCache:
			return nil, invalid("must not be CACHE here: nothing of it is in PostgreSQL, use redisfront.Do")
		case op.Strategy == idempotency.StrategyHybrid && len(c.Fronts) == 0:
			return nil, invalid("must be STRICT (or left out) in a runner without fronts, is HYBRID")
		}
		ops[op.Name] = &operation{Operation: op}
	}
	return ops, nil
}
