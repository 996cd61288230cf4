package brokers

import (
	"context"
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"github.com/pgonce/pgonce/idempotency"
	"github.com/pgonce/pgonce/idempotencymsg"
	"github.com/pgonce/pgonce/internal/devstack"
)

const streamKey = "invoices"

// idle is how long a message stays with a consumer that does not acknowledge it: Redis Streams have no nack.
const idle = time.Second

type redisSource struct {
	client *redis.Client
	name   string
	cursor string
}

func openRedis(_ context.Context, url, consumer string) (source, error) {
	options, err := redis.ParseURL(url)
	if err != nil {
		return nil, err
	}
	return &redisSource{client: redis.NewClient(options), name: consumer, cursor: "0-0"}, nil
}

func (s *redisSource) close() { _ = s.client.Close() }

// fetch takes over what others left behind, and then what is new.
func (s *redisSource) fetch(ctx context.Context, limit int) ([]delivery, error) {
	old, cursor, err := s.client.XAutoClaim(ctx, &redis.XAutoClaimArgs{
		Stream: streamKey, Group: durable, Consumer: s.name, MinIdle: idle, Start: s.cursor, Count: int64(limit),
	}).Result()
	if err != nil {
		return nil, err
	}
	s.cursor = cursor
	if len(old) > 0 {
		return s.deliveries(old, 2) // or more
	}
	streams, err := s.client.XReadGroup(ctx, &redis.XReadGroupArgs{
		Group: durable, Consumer: s.name, Streams: []string{streamKey, ">"}, Count: int64(limit), Block: 200 * time.Millisecond,
	}).Result()
	if errors.Is(err, redis.Nil) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	return s.deliveries(streams[0].Messages, 1)
}

func (s *redisSource) deliveries(messages []redis.XMessage, times int) ([]delivery, error) {
	all := make([]delivery, len(messages))
	for i, m := range messages {
		name, _ := m.Values["name"].(string)
		data, _ := m.Values["data"].(string)
		if name == "" {
			return nil, errNoName
		}
		all[i] = delivery{
			Message: idempotencymsg.Message{Tenant: idempotency.SingleTenant, ID: name, Payload: []byte(data), Deliveries: times},
			ack:     func(ctx context.Context) error { return s.client.XAck(ctx, streamKey, durable, m.ID).Err() },
			nack:    func(context.Context) error { return nil },
		}
	}
	return all, nil
}

type redisBroker struct {
	node   *devstack.RedisNode
	client *redis.Client
}

func startRedis(t *testing.T) broker {
	t.Helper()
	nodes, err := devstack.StartRedisNodes(t.Context(), nil)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, nodes.Stop()) })
	node, err := nodes.Add(t.Context())
	require.NoError(t, err)
	options, err := redis.ParseURL(node.URL())
	require.NoError(t, err)
	client := redis.NewClient(options)
	t.Cleanup(func() { require.NoError(t, client.Close()) })
	require.NoError(t, client.XGroupCreateMkStream(t.Context(), streamKey, durable, "0").Err())
	return &redisBroker{node: node, client: client}
}

func (b *redisBroker) url() string { return b.node.URL() }

func (b *redisBroker) publish(t *testing.T, ids []string) {
	t.Helper()
	for len(ids) > 0 {
		part := ids[:min(1000, len(ids))]
		ids = ids[len(part):]
		_, err := b.client.Pipelined(t.Context(), func(p redis.Pipeliner) error {
			for _, id := range part {
				p.XAdd(t.Context(), &redis.XAddArgs{Stream: streamKey, Values: []string{"name", id, "data", string(payload(id))}})
			}
			return nil
		})
		require.NoError(t, err)
	}
}

func (b *redisBroker) left(ctx context.Context) (int64, error) {
	groups, err := b.client.XInfoGroups(ctx, streamKey).Result()
	if err != nil {
		return 0, err
	}
	for _, g := range groups {
		if strings.EqualFold(g.Name, durable) {
			return g.Lag + g.Pending, nil
		}
	}
	return 0, errors.New("no such group")
}
