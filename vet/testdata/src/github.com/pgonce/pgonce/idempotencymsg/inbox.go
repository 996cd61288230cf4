// Package idempotencymsg is what the tests need of it.
package idempotencymsg

import (
	"context"

	"github.com/jackc/pgx/v5"
)

type Message struct{}

type (
	Handler    func(ctx context.Context, tx pgx.Tx, m Message) (reply []byte, err error)
	DeadLetter func(ctx context.Context, tx pgx.Tx, m Message, reason error) error
)

type Config struct {
	Handler    Handler
	DeadLetter DeadLetter
}

type Inbox struct{}

func (*Inbox) HandleWith(ctx context.Context, m Message, handler Handler) {}
