package redisfront

import (
	"context"
	"fmt"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/pgonce/pgonce/idempotency"
)

// Defaults of a Config.
const (
	DefaultPrefix      = "pgonce:"
	DefaultTimeout     = 500 * time.Millisecond
	DefaultResultLimit = 64 << 10
	DefaultMargin      = time.Second
)

// Config configures a Front. A zero field means its default.
type Config struct {
	// Prefix begins every name of ours in Redis.
	// Default: "pgonce:".
	Prefix string
	// Timeout bounds every call of Redis.
	// Default: 500 ms.
	Timeout time.Duration
	// ResultLimit is the largest result kept in Redis, in bytes; larger ones stay in PostgreSQL alone, and Redis only
	// knows that the key is done. -1: no limit.
	// Default: 64 KiB.
	ResultLimit int
	// Margin is taken from an entry's time to live: Redis' clock is not PostgreSQL's, and an entry that ends early is only
	// a miss. -1: nothing is taken.
	// Default: 1 s.
	Margin time.Duration
	// Sealer encrypts entries, so that Redis and its dumps hold no plain personal data; see NewAESGCM. Entries that it did
	// not seal are misses then.
	// Default: none.
	Sealer Sealer
	// Quorum holds the marks on a majority of these 3, 5 or 7 servers, which must know nothing of each other: 1, 2 or 3 of
	// them may die. Entries, and the locks of Do, stay with the front's own client. It saves work, and proves nothing: a
	// stopped process, a clock that jumps or a server that forgets can give two callers one mark, and then the unique key in
	// PostgreSQL decides, as it does without any mark.
	// Default: none, marks are beside the entries.
	Quorum []redis.UniversalClient
	// Operations are those of Do, each with StrategyCache. Retention is 7 days there if it is not set.
	// Default: none, Do refuses every key.
	Operations []idempotency.Operation
	// Unprotected runs Do's functions also while Redis cannot be asked, and then maybe several times for one key.
	// Default: false, they are not run and Do returns ErrUnavailable.
	Unprotected bool
	// OnEvent is told of every call that Redis did not serve (idempotency.FrontFailed), when Redis is not asked any more and
	// when it is again (idempotency.FrontDegraded), and how calls of Do end. It must be quick.
	// Default: none.
	OnEvent idempotency.OnEvent
}

func (c *Config) withDefaults() Config {
	var d Config
	if c != nil {
		d = *c
	}
	if d.Prefix == "" {
		d.Prefix = DefaultPrefix
	}
	if d.Timeout == 0 {
		d.Timeout = DefaultTimeout
	}
	if d.ResultLimit == 0 {
		d.ResultLimit = DefaultResultLimit
	}
	switch d.Margin {
	case 0:
		d.Margin = DefaultMargin
	case -1:
		d.Margin = 0
	}
	if d.OnEvent == nil {
		d.OnEvent = func(context.Context, idempotency.Event) {}
	}
	return d
}

func (c *Config) validate() error {
	invalid := func(field, rule string) error {
		return &idempotency.ConfigError{Field: "redisfront.Config." + field, Rule: rule}
	}
	switch {
	case hasBraces(c.Prefix):
		return invalid("Prefix", "must not hold braces: they choose a cluster's slot")
	case c.Timeout < time.Millisecond || c.Timeout > time.Minute:
		return invalid("Timeout", "must be from 1ms to 1m")
	case c.ResultLimit < -1:
		return invalid("ResultLimit", "must be positive, or -1 for none")
	case c.Margin < 0:
		return invalid("Margin", "must be positive, or -1 for none")
	case len(c.Quorum) > 0 && (len(c.Quorum) < 3 || len(c.Quorum)%2 == 0 || len(c.Quorum) > 7):
		return invalid("Quorum", fmt.Sprintf("must be 3, 5 or 7 servers, or none, is %d", len(c.Quorum)))
	}
	for _, node := range c.Quorum {
		if node == nil || !contextTimeouts(node) {
			return invalid("Quorum", "must be clients made with ContextTimeoutEnabled: Config.Timeout would not be kept otherwise")
		}
	}
	return nil
}
