package brokers

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"hash/fnv"
	"os"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgonce/pgonce/idempotency"
	"github.com/pgonce/pgonce/idempotencymsg"
	"github.com/pgonce/pgonce/internal/childtest"
	"github.com/pgonce/pgonce/internal/pgtest"
	"github.com/pgonce/pgonce/txn"
)

func TestMain(m *testing.M) {
	childtest.Main()
	pgtest.Main(m)
}

// scaled is how much of a suite one run does.
func scaled(usual, full int) int {
	if os.Getenv("PGONCE_FAULTS") == "full" {
		return full
	}
	return usual
}

var billing = idempotency.Operation{Name: "billing", Strategy: idempotency.StrategyEventual}

type invoice struct {
	Number string `json:"number"`
}

// bill is the handler: no unique key of the table stands between a duplicate and a second row.
func bill(ctx context.Context, tx pgx.Tx, m idempotencymsg.Message) ([]byte, error) {
	var i invoice
	if err := json.Unmarshal(m.Payload, &i); err != nil {
		return nil, idempotencymsg.Poison(fmt.Errorf("decode invoice: %w", err))
	}
	_, err := tx.Exec(ctx, `INSERT INTO effects VALUES ($1)`, m.ID)
	return nil, err
}

func bury(ctx context.Context, tx pgx.Tx, m idempotencymsg.Message, reason error) error {
	_, err := tx.Exec(ctx, `INSERT INTO dead_letters VALUES ($1, $2)`, m.ID, reason.Error())
	return err
}

// delivery is a message as a broker delivered it.
type delivery struct {
	idempotencymsg.Message
	ack  func(context.Context) error
	nack func(context.Context) error
}

// source delivers messages, none when there are none for a moment.
type source interface {
	fetch(ctx context.Context, limit int) ([]delivery, error)
	close()
}

// kinds are the brokers.
var kinds = map[string]func(ctx context.Context, url, consumer string) (source, error){"nats": openNATS, "redis": openRedis}

type consumerArgs struct{ Broker, BrokerURL, DatabaseURL, Name string }

// batch is what a consumer tells of one batch, before it acknowledges it.
type batch struct{ Deliveries, Handled, Duplicates, Dead, Retries int }

var consumer = childtest.Register("consumer", consume)

const batchSize = 100

// consume handles until it is killed.
func consume(ctx context.Context, a consumerArgs, tell func(batch)) error {
	config, err := pgxpool.ParseConfig(a.DatabaseURL)
	if err != nil {
		return err
	}
	config.MaxConns = 2
	txn.ConfigurePool(config)
	pool, err := pgxpool.NewWithConfig(ctx, config)
	if err != nil {
		return err
	}
	runner, err := txn.New(pool, &txn.Config{Operations: []idempotency.Operation{billing}})
	if err != nil {
		return err
	}
	inbox, err := idempotencymsg.New(runner, &idempotencymsg.Config{Operation: billing, Handler: bill, DeadLetter: bury})
	if err != nil {
		return err
	}
	from, err := kinds[a.Broker](ctx, a.BrokerURL, a.Name)
	if err != nil {
		return err
	}
	defer from.close()
	for {
		deliveries, err := from.fetch(ctx, batchSize)
		if err != nil {
			return err
		}
		if err := handle(ctx, inbox, deliveries, tell); err != nil {
			return err
		}
	}
}

func handle(ctx context.Context, inbox *idempotencymsg.Inbox, deliveries []delivery, tell func(batch)) error {
	if len(deliveries) == 0 {
		return nil
	}
	messages := make([]idempotencymsg.Message, len(deliveries))
	for i, d := range deliveries {
		messages[i] = d.Message
	}
	results := inbox.HandleBatch(ctx, messages)
	told := batch{Deliveries: len(deliveries)}
	for _, r := range results {
		switch r.Verdict {
		case idempotencymsg.Handled:
			told.Handled++
		case idempotencymsg.Duplicate:
			told.Duplicates++
		case idempotencymsg.DeadLettered:
			told.Dead++
		case idempotencymsg.Retry:
			told.Retries++
		default:
			return fmt.Errorf("unexpected verdict %s: %w", r.Verdict, r.Err)
		}
	}
	tell(told)
	for i, d := range deliveries {
		end := d.ack
		if !results[i].Ack() || forgetful(d.Message) {
			end = d.nack
		}
		if err := end(ctx); err != nil {
			return err
		}
	}
	return nil
}

// forgetful: of a fifth of the messages the first acknowledgement gets lost.
func forgetful(m idempotencymsg.Message) bool {
	h := fnv.New32a()
	_, _ = h.Write([]byte(m.ID))
	return h.Sum32()%5 == 0 && m.Deliveries == 1
}

var errNoName = errors.New("a message without its name")

// payload is a message's; every thousandth or so does not decode.
func payload(id string) []byte {
	if strings.HasPrefix(id, "poison") {
		return []byte(`{"number":`)
	}
	p, _ := json.Marshal(invoice{Number: id})
	return p
}
