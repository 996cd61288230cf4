// Package watermill makes the handlers of a Watermill router handle each message once, by an idempotencymsg.Inbox.
//
// It is a module of its own: programs that do not use Watermill do not get its requirements.
package watermill

import (
	"context"
	"encoding/json"
	"fmt"

	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/jackc/pgx/v5"

	"github.com/pgonce/pgonce/idempotency"
	"github.com/pgonce/pgonce/idempotencymsg"
)

// Config configures Middleware.
type Config struct {
	// Tenant is whose message it is; for programs with one tenant a function that returns idempotency.SingleTenant. Required.
	Tenant func(*message.Message) string
	// ID is the producer's name of the message.
	// Default: its UUID.
	ID func(*message.Message) string
	// Deliveries is how often the broker has delivered the message, this time included, for Config.MaxDeliveries of the
	// inbox.
	// Default: not known.
	Deliveries func(*message.Message) int
}

// Middleware returns a middleware for the one handler, or consumer group, that the inbox is for. The handler finds its
// transaction by txn.FromContext(msg.Context()).
//
// The messages that a handler returns are stored with the mark. A message that is delivered again returns the same ones,
// with the same UUIDs, without running the handler: whoever crashed between commit and publishing lost none of them.
// Their consumers may get one twice.
//
// The error is that of the Result for which Ack is false: the router then has the message delivered again. A message that
// was dead-lettered, or whose failure is recorded, is acknowledged and returns no messages.
func Middleware(in *idempotencymsg.Inbox, cfg *Config) (message.HandlerMiddleware, error) {
	switch {
	case in == nil:
		return nil, &idempotency.ConfigError{Field: "inbox", Rule: "must not be nil"}
	case cfg == nil || cfg.Tenant == nil:
		return nil, &idempotency.ConfigError{Field: "Config.Tenant", Rule: "must be set, to a function that returns idempotency.SingleTenant where there is only one"}
	}
	m := middleware{inbox: in, config: *cfg}
	if m.config.ID == nil {
		m.config.ID = func(msg *message.Message) string { return msg.UUID }
	}
	if m.config.Deliveries == nil {
		m.config.Deliveries = func(*message.Message) int { return 0 }
	}
	return m.wrap, nil
}

type middleware struct {
	inbox  *idempotencymsg.Inbox
	config Config
}

// produced is a message that a handler returned, as it is stored.
type produced struct {
	UUID     string           `json:"uuid"`
	Metadata message.Metadata `json:"metadata,omitempty"`
	Payload  []byte           `json:"payload"`
}

func (m middleware) wrap(h message.HandlerFunc) message.HandlerFunc {
	return func(msg *message.Message) ([]*message.Message, error) {
		original := msg.Context()
		defer msg.SetContext(original)
		delivery := idempotencymsg.Message{
			Tenant: m.config.Tenant(msg), ID: m.config.ID(msg), Payload: msg.Payload, Deliveries: m.config.Deliveries(msg),
		}
		res := m.inbox.HandleWith(original, delivery, func(ctx context.Context, _ pgx.Tx, _ idempotencymsg.Message) ([]byte, error) {
			msg.SetContext(ctx)
			out, err := h(msg)
			if err != nil {
				return nil, err
			}
			return encode(out)
		})
		if !res.Ack() {
			return nil, res.Err
		}
		return decode(res.Reply)
	}
}

func encode(out []*message.Message) ([]byte, error) {
	if len(out) == 0 {
		return nil, nil
	}
	all := make([]produced, len(out))
	for i, msg := range out {
		all[i] = produced{UUID: msg.UUID, Metadata: msg.Metadata, Payload: msg.Payload}
	}
	return json.Marshal(all)
}

func decode(reply []byte) ([]*message.Message, error) {
	if len(reply) == 0 {
		return nil, nil
	}
	var all []produced
	if err := json.Unmarshal(reply, &all); err != nil {
		return nil, fmt.Errorf("watermill: decode stored messages: %w", err)
	}
	out := make([]*message.Message, len(all))
	for i, p := range all {
		out[i] = message.NewMessage(p.UUID, p.Payload)
		if p.Metadata != nil {
			out[i].Metadata = p.Metadata
		}
	}
	return out, nil
}
