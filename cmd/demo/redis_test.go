package main

import (
	"fmt"
	"testing"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"
)

func TestRedisServer_ForgetsItsOwnNamesAndNoOthers(t *testing.T) {
	t.Parallel()
	ctx := t.Context()
	server, _ := startRedis(t)
	client := redis.NewClient(server.clientOptions())
	t.Cleanup(func() { require.NoError(t, client.Close()) })
	for n := range 2500 {
		require.NoError(t, client.Set(ctx, fmt.Sprint(server.prefix, n), "x", 0).Err())
	}
	require.NoError(t, client.Set(ctx, "pgonce-demo:other:1", "x", 0).Err())

	server.foreign = false
	require.NoError(t, server.forget(ctx))
	require.EqualValues(t, 2501, client.DBSize(ctx).Val(), "a throw-away server is thrown away")
	server.foreign = true
	require.NoError(t, server.forget(ctx))
	require.Equal(t, []string{"pgonce-demo:other:1"}, client.Keys(ctx, "*").Val())
}

func TestNewRedisServer_DoesNotPrintThePassword(t *testing.T) {
	t.Parallel()
	for _, url := range []string{"redis://u:secret@host:port/0", "http://u:secret@host", "secret"} {
		_, err := newRedisServer(url, "db")
		require.ErrorContains(t, err, "redis://user:password@host:port/number")
		require.NotContains(t, err.Error(), "secret")
	}
}

func TestRedisArgument_HasTheUserThatRedisCLIWants(t *testing.T) {
	t.Parallel()
	require.Equal(t, "redis://default:pw@127.0.0.1:1/0", redisArgument("redis://:pw@127.0.0.1:1/0"))
	require.Equal(t, "redis://me:pw@127.0.0.1:1/0", redisArgument("redis://me:pw@127.0.0.1:1/0"))
	require.Equal(t, "redis://127.0.0.1:1/0", redisArgument("redis://127.0.0.1:1/0"))
}
