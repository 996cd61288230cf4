package watermill_test

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill"
	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/ThreeDotsLabs/watermill/pubsub/gochannel"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgonce/pgonce/idempotency"
	"github.com/pgonce/pgonce/idempotencymsg"
	oncemill "github.com/pgonce/pgonce/idempotencymsg/watermill"
	"github.com/pgonce/pgonce/internal/pgtest"
	"github.com/pgonce/pgonce/txn"
)

func TestMain(m *testing.M) { pgtest.Main(m) }

var mail = idempotency.Operation{Name: "mailer", Strategy: idempotency.StrategyEventual}

func newMiddleware(t *testing.T) (message.HandlerMiddleware, *pgxpool.Pool) {
	t.Helper()
	pool := pgtest.Pool(t, txn.ConfigurePool)
	_, err := pool.Exec(t.Context(), `CREATE TABLE effects (id text NOT NULL)`)
	require.NoError(t, err)
	runner, err := txn.New(pool, &txn.Config{Operations: []idempotency.Operation{mail}})
	require.NoError(t, err)
	inbox, err := idempotencymsg.New(runner, &idempotencymsg.Config{Operation: mail})
	require.NoError(t, err)
	once, err := oncemill.Middleware(inbox, &oncemill.Config{
		Tenant: func(*message.Message) string { return idempotency.SingleTenant },
	})
	require.NoError(t, err)
	return once, pool
}

func count(t *testing.T, pool *pgxpool.Pool, id string) (n int) {
	t.Helper()
	require.NoError(t, pool.QueryRow(context.WithoutCancel(t.Context()), `SELECT count(*) FROM effects WHERE id = $1`, id).Scan(&n))
	return n
}

// handle writes in the message's transaction and answers with a message.
func handle(msg *message.Message) ([]*message.Message, error) {
	tx, ok := txn.FromContext(msg.Context())
	if !ok {
		return nil, errors.New("no transaction")
	}
	if _, err := tx.Exec(msg.Context(), `INSERT INTO effects VALUES ($1)`, msg.UUID); err != nil {
		return nil, err
	}
	answer := message.NewMessage(watermill.NewUUID(), []byte("answer to "+msg.UUID))
	answer.Metadata.Set("to", msg.UUID)
	return []*message.Message{answer}, nil
}

func TestMiddleware_ADuplicateReturnsTheSameMessages(t *testing.T) {
	t.Parallel()
	once, pool := newMiddleware(t)
	first, err := once(handle)(message.NewMessage("m", []byte("p")))
	require.NoError(t, err)
	msg := message.NewMessage("m", []byte("p"))
	before := msg.Context()
	again, err := once(func(*message.Message) ([]*message.Message, error) { panic("must not run") })(msg)
	require.NoError(t, err)
	require.Equal(t, before, msg.Context(), "the transaction's context does not stay with the message")
	require.Len(t, again, 1)
	require.Equal(t, first[0].UUID, again[0].UUID)
	require.Equal(t, first[0].Metadata, again[0].Metadata)
	require.Equal(t, first[0].Payload, again[0].Payload)
	require.Equal(t, 1, count(t, pool, "m"))

	_, err = once(handle)(message.NewMessage("m", []byte("another")))
	require.ErrorIs(t, err, idempotency.ErrMismatch)
	_, err = once(handle)(message.NewMessage("", []byte("p")))
	require.ErrorIs(t, err, idempotency.ErrInvalid)
}

func TestMiddleware_ErrorsAndPanicsAreDeliveredAgain(t *testing.T) {
	t.Parallel()
	once, pool := newMiddleware(t)
	refused := errors.New("refused")
	for _, trouble := range []func(){nil, func() { panic(refused) }} {
		_, err := once(func(msg *message.Message) ([]*message.Message, error) {
			_, _ = handle(msg)
			if trouble != nil {
				trouble()
			}
			return nil, refused
		})(message.NewMessage("m", nil))
		require.Error(t, err)
		require.Zero(t, count(t, pool, "m"))
	}
	out, err := once(handle)(message.NewMessage("m", nil))
	require.NoError(t, err)
	require.Len(t, out, 1)
	require.Equal(t, 1, count(t, pool, "m"))
}

func TestMiddleware_NamesFieldAndRule(t *testing.T) {
	t.Parallel()
	_, err := oncemill.Middleware(nil, nil)
	require.ErrorIs(t, err, idempotency.ErrConfig)
	_, err = oncemill.Middleware(&idempotencymsg.Inbox{}, nil)
	require.ErrorContains(t, err, "Config.Tenant")
}

// In a router: every message twice, and every third fails once.
func TestMiddleware_InARouter(t *testing.T) {
	t.Parallel()
	once, pool := newMiddleware(t)
	channel := gochannel.NewGoChannel(gochannel.Config{OutputChannelBuffer: 100}, watermill.NopLogger{})
	router, err := message.NewRouter(message.RouterConfig{CloseTimeout: 10 * time.Second}, watermill.NopLogger{})
	require.NoError(t, err)
	var mu sync.Mutex
	failed := map[string]bool{}
	router.AddHandler("mailer", "letters", channel, "answers", channel, once(func(msg *message.Message) ([]*message.Message, error) {
		out, err := handle(msg)
		mu.Lock()
		defer mu.Unlock()
		if msg.Payload[0]%3 == 0 && !failed[msg.UUID] {
			failed[msg.UUID] = true
			return nil, errors.New("not yet")
		}
		return out, err
	}))
	answers, err := channel.Subscribe(t.Context(), "answers")
	require.NoError(t, err)
	var group sync.WaitGroup
	group.Go(func() {
		if err := router.Run(context.WithoutCancel(t.Context())); err != nil {
			t.Error(err)
		}
	})
	<-router.Running()
	const n = 30
	for range 2 {
		for i := range n {
			require.NoError(t, channel.Publish("letters", message.NewMessage(fmt.Sprintf("m%d", i), []byte{byte(i)})))
		}
	}
	uuids := map[string]string{}
	for range 2 * n {
		answer := <-answers
		to := answer.Metadata.Get("to")
		if known, seen := uuids[to]; seen {
			require.Equal(t, known, answer.UUID, "one answer, told twice")
		}
		uuids[to] = answer.UUID
		answer.Ack()
	}
	require.Len(t, uuids, n)
	require.Len(t, failed, n/3)
	for i := range n {
		require.Equal(t, 1, count(t, pool, fmt.Sprintf("m%d", i)))
	}
	require.NoError(t, router.Close())
	require.NoError(t, channel.Close())
	group.Wait()
}
