package idempotencymsg

import (
	"context"

	"github.com/jackc/pgx/v5"

	"github.com/pgonce/pgonce/idempotency"
)

// Handler handles a message: it writes through tx, and nothing else of it is undone if it fails. It may be entered again for
// a message whose transaction did not get through. The reply, if there is one, is stored with the mark and given to
// duplicates too.
type Handler func(ctx context.Context, tx pgx.Tx, m Message) (reply []byte, err error)

// DeadLetter takes a message that is given up, with the reason: it writes through tx, whose commit also marks the message as
// handled. Its error leaves the message where it is.
type DeadLetter func(ctx context.Context, tx pgx.Tx, m Message, reason error) error

// Config configures an Inbox.
type Config struct {
	// Operation is what the messages are handled for: one per handler, or per consumer group, since each of them handles a
	// message of its own. The runner must have it too. With StrategyEventual its records are kept for ever; with a
	// Retention a message that is delivered later than that is handled again. Required.
	Operation idempotency.Operation
	// Handler. Required, except where every call brings its own.
	Handler Handler
	// DeadLetter takes what is given up: poison, and what was delivered MaxDeliveries times.
	// Default: none, the message stays with the broker.
	DeadLetter DeadLetter
	// MaxDeliveries is the delivery whose failure gives a message up. It needs Message.Deliveries and DeadLetter.
	// Default: no limit.
	MaxDeliveries int
}

func (c *Config) validate() error {
	invalid := func(field, rule string) error {
		return &idempotency.ConfigError{Field: "Config." + field, Rule: rule}
	}
	switch {
	case c.MaxDeliveries < 0:
		return invalid("MaxDeliveries", "must be positive, or 0 for no limit")
	case c.MaxDeliveries > 0 && c.DeadLetter == nil:
		return invalid("DeadLetter", "must be set with MaxDeliveries: a message that is given up needs a place")
	case c.Operation.Strategy == idempotency.StrategyCache:
		return invalid("Operation", "must not be CACHE: the mark and what the handler writes are one commit in PostgreSQL")
	}
	return c.Operation.WithDefaults().Validate()
}
