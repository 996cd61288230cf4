package brokers

import (
	"context"
	"errors"
	"testing"
	"time"

	"github.com/nats-io/nats-server/v2/server"
	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
	"github.com/stretchr/testify/require"

	"github.com/pgonce/pgonce/idempotency"
	"github.com/pgonce/pgonce/idempotencymsg"
)

// nameHeader carries the producer's name of a message. Not Nats-Msg-Id: by that the server itself would drop duplicates,
// within its window.
const nameHeader = "Message-Name"

const (
	stream  = "INVOICES"
	subject = "invoices.created"
	durable = "billing"
)

type natsSource struct {
	conn     *nats.Conn
	consumer jetstream.Consumer
}

func openNATS(ctx context.Context, url, _ string) (source, error) {
	conn, err := nats.Connect(url)
	if err != nil {
		return nil, err
	}
	js, err := jetstream.New(conn)
	if err != nil {
		return nil, err
	}
	c, err := js.CreateOrUpdateConsumer(ctx, stream, jetstream.ConsumerConfig{
		Durable: durable, AckPolicy: jetstream.AckExplicitPolicy, AckWait: 2 * time.Second, MaxDeliver: -1,
	})
	return &natsSource{conn: conn, consumer: c}, err
}

func (s *natsSource) close() { s.conn.Close() }

func (s *natsSource) fetch(_ context.Context, limit int) (deliveries []delivery, err error) {
	got, err := s.consumer.Fetch(limit, jetstream.FetchMaxWait(200*time.Millisecond))
	if err != nil {
		return nil, err
	}
	for m := range got.Messages() {
		meta, err := m.Metadata()
		if err != nil {
			return nil, err
		}
		name := m.Headers().Get(nameHeader)
		if name == "" {
			return nil, errNoName
		}
		deliveries = append(deliveries, delivery{
			Message: idempotencymsg.Message{
				Tenant: idempotency.SingleTenant, ID: name, Payload: m.Data(), Deliveries: int(meta.NumDelivered), //nolint:gosec // a few
			},
			ack:  func(context.Context) error { return m.Ack() },
			nack: func(context.Context) error { return m.Nak() },
		})
	}
	if err := got.Error(); err != nil && !errors.Is(err, nats.ErrTimeout) {
		return nil, err
	}
	return deliveries, nil
}

// natsBroker is a server in this process, which outlives its consumers.
type natsBroker struct {
	server *server.Server
	js     jetstream.JetStream
}

func startNATS(t *testing.T) broker {
	t.Helper()
	s, err := server.NewServer(&server.Options{Host: "127.0.0.1", Port: server.RANDOM_PORT, JetStream: true, StoreDir: t.TempDir(), NoSigs: true, NoLog: true})
	require.NoError(t, err)
	s.Start()
	t.Cleanup(func() {
		s.Shutdown()
		s.WaitForShutdown()
	})
	require.True(t, s.ReadyForConnections(30*time.Second))
	conn, err := nats.Connect(s.ClientURL())
	require.NoError(t, err)
	t.Cleanup(conn.Close)
	js, err := jetstream.New(conn)
	require.NoError(t, err)
	_, err = js.CreateStream(t.Context(), jetstream.StreamConfig{Name: stream, Subjects: []string{subject}})
	require.NoError(t, err)
	return &natsBroker{server: s, js: js}
}

func (b *natsBroker) url() string { return b.server.ClientURL() }

func (b *natsBroker) publish(t *testing.T, ids []string) {
	t.Helper()
	for i, id := range ids {
		_, err := b.js.PublishMsgAsync(&nats.Msg{Subject: subject, Header: nats.Header{nameHeader: {id}}, Data: payload(id)})
		require.NoError(t, err)
		if i%1000 == 999 {
			<-b.js.PublishAsyncComplete()
		}
	}
	<-b.js.PublishAsyncComplete()
}

func (b *natsBroker) left(ctx context.Context) (int64, error) {
	c, err := b.js.Consumer(ctx, stream, durable)
	if err != nil {
		return 0, err
	}
	info, err := c.Info(ctx)
	if err != nil {
		return 0, err
	}
	return int64(info.NumPending) + int64(info.NumAckPending), nil //nolint:gosec // a test's messages
}
