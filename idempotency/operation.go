package idempotency

import (
	"errors"
	"time"
)

// Strategy says which tiers answer an operation. PostgreSQL decides under all but Cache.
type Strategy string

// The strategies. The zero value means StrategyHybrid where a front is configured, else StrategyStrict.
const (
	StrategyStrict   Strategy = "STRICT"   // PostgreSQL only
	StrategyHybrid   Strategy = "HYBRID"   // fronts, then PostgreSQL
	StrategyCache    Strategy = "CACHE"    // Redis only, for effects that may be lost
	StrategyEventual Strategy = "EVENTUAL" // messages: PostgreSQL only, records kept for ever
)

// Defaults of an Operation. A zero field means its default, -1 turns it off (or means "for ever", for a retention).
const (
	DefaultWait        = 2 * time.Second
	DefaultRetention   = 72 * time.Hour
	DefaultLease       = 30 * time.Second
	DefaultResultLimit = 1 << 20

	// MinRetention keeps a record longer than the wait for COMMIT's answer and the search for what a lost COMMIT did. A
	// shorter one could expire a record before its own caller has found it.
	MinRetention = 10 * time.Minute

	// DefaultTokenLife is how long an issued token waits for its first use.
	DefaultTokenLife = 24 * time.Hour

	// Forever keeps records, or results, without an end.
	Forever time.Duration = -1
	// NoWait answers "in progress" at once.
	NoWait time.Duration = -1
)

// Operation declares once what a key is for. Give the same declarations to every part that asks for them.
type Operation struct {
	// Name is stored with every record, for example "order.create": 1 to 128 bytes.
	Name string
	// Strategy. Default: StrategyHybrid where a front is configured, else StrategyStrict.
	Strategy Strategy
	// Wait is how long a duplicate waits for the running first call before it is told "in progress"; NoWait: at once.
	// Default: 2 s.
	Wait time.Duration
	// Retention is how long an outcome is kept and replayed, at least 10 minutes; Forever: no end.
	// Default: 72 h; 7 days under StrategyCache; Forever under StrategyEventual.
	Retention time.Duration
	// ResultRetention drops the stored result earlier than its record; a late retry then gets ErrResultExpired.
	// Default: as long as the record.
	ResultRetention time.Duration
	// ResultLimit is the largest encoded result in bytes; a larger one rolls back with ErrResultTooLarge; -1: no limit.
	// Default: 1 MiB.
	ResultLimit int
	// Tombstone stores a result over the limit as "done, result gone" instead of rolling back.
	// Default: false.
	Tombstone bool
	// NoLocal keeps its outcomes out of fronts in the process's memory: a program that must see at once what an operator has
	// changed, or whose results are too big.
	// Default: false.
	NoLocal bool
	// Lease is the time of ownership between renewals in the leased mode and under StrategyCache; the transactional mode has
	// none.
	// Default: 30 s.
	Lease time.Duration
	// Takeover is what may happen to a leased record whose owner died; the transactional mode leaves none.
	// Default: TakeoverResolve with a Resolver, else TakeoverManual.
	Takeover Takeover
	// Resolver finds out what a dead owner did, for TakeoverResolve.
	// Default: none.
	Resolver Resolver
	// RequireIssued runs the operation for issued tokens only: a key that was not issued for this tenant and operation, or
	// whose time is over before its first use, is ErrNotIssued. What was done with a token is replayed as ever.
	// Default: false.
	RequireIssued bool
	// Tokens makes the values of issued tokens. Under RequireIssued it also refuses, before any SQL, what it cannot have made:
	// ids.NewTokens, with or without a signature. Without it tokens are made elsewhere, and PostgreSQL is asked about each.
	// Default: none.
	Tokens Tokens
	// TokenLife is how long an issued token waits for its first use, at least 1 s.
	// Default: 24 h.
	TokenLife time.Duration
}

// Key returns the key of one request. tenant is whose key it is (SingleTenant where there is only one), value is the
// client's unique value.
func (o Operation) Key(tenant, value string) (Key, error) { return NewKey(tenant, o.Name, value) }

// WithDefaults returns o with every zero field set to its default.
func (o Operation) WithDefaults() Operation {
	if o.Wait == 0 {
		o.Wait = DefaultWait
	}
	if o.Retention == 0 {
		o.Retention = DefaultRetention
		if o.Strategy == StrategyEventual {
			o.Retention = Forever // a broker may deliver a message again after any time
		}
	}
	if o.ResultRetention == 0 {
		o.ResultRetention = o.Retention
	}
	if o.ResultLimit == 0 {
		o.ResultLimit = DefaultResultLimit
	}
	if o.Lease == 0 {
		o.Lease = DefaultLease
	}
	if o.TokenLife == 0 {
		o.TokenLife = DefaultTokenLife
	}
	if o.Takeover == "" {
		o.Takeover = TakeoverManual
		if o.Resolver != nil {
			o.Takeover = TakeoverResolve
		}
	}
	return o
}

// Validate checks an operation that has its defaults. The error names field and rule.
func (o Operation) Validate() error {
	var name *InvalidError
	if err := validateOperation(o.Name); errors.As(err, &name) {
		return &ConfigError{Field: "Operation.Name", Rule: name.Rule}
	}
	invalid := func(field, rule string) error {
		return &ConfigError{Field: "Operation " + o.Name + ": " + field, Rule: rule}
	}
	switch o.Strategy {
	case "", StrategyStrict, StrategyHybrid, StrategyCache, StrategyEventual:
	default:
		return invalid("Strategy", "must be STRICT, HYBRID, CACHE or EVENTUAL")
	}
	switch o.Takeover {
	case TakeoverRerun, TakeoverResume, TakeoverResolve, TakeoverManual:
	default:
		return invalid("Takeover", "must be RERUN, RESUME, RESOLVE or MANUAL")
	}
	switch {
	case (o.Takeover == TakeoverResolve) != (o.Resolver != nil):
		return invalid("Takeover", "must be RESOLVE with a Resolver, and only then")
	case o.Wait < 0 && o.Wait != NoWait:
		return invalid("Wait", "must be positive, or NoWait (-1) to answer at once")
	case o.Retention != Forever && o.Retention < MinRetention:
		return invalid("Retention", "must be at least 10m, or Forever (-1)")
	case o.Retention != Forever && o.Wait > o.Retention/2:
		return invalid("Wait", "must be at most half of Retention")
	case o.ResultRetention != Forever && o.ResultRetention < MinRetention:
		return invalid("ResultRetention", "must be at least 10m, or Forever (-1)")
	case o.ResultRetention == Forever && o.Retention != Forever, o.Retention != Forever && o.ResultRetention > o.Retention:
		return invalid("ResultRetention", "must not be longer than Retention")
	case o.ResultLimit < -1:
		return invalid("ResultLimit", "must be positive, or -1 for no limit")
	case o.Lease < time.Second:
		return invalid("Lease", "must be at least 1s")
	case o.TokenLife < time.Second:
		return invalid("TokenLife", "must be at least 1s")
	case o.RequireIssued && o.Strategy == StrategyCache:
		return invalid("RequireIssued", "must not be with CACHE: which tokens were issued is in PostgreSQL")
	}
	return nil
}
