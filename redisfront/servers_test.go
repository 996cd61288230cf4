package redisfront_test

import (
	"context"
	"fmt"
	"net"
	"os"
	"regexp"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"github.com/pgonce/pgonce/internal/devstack"
	"github.com/pgonce/pgonce/redisfront"
)

// scaled is how much of a suite one run does, as in internal/faultsuite.
func scaled(usual, full int) int {
	if os.Getenv("PGONCE_FAULTS") == "full" {
		return full
	}
	return usual
}

func startNodes(t *testing.T) *devstack.RedisNodes {
	t.Helper()
	nodes, err := devstack.StartRedisNodes(t.Context(), &devstack.Config{Out: t.Output()})
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, nodes.Stop()) })
	return nodes
}

// direct is a client of one server, whatever its part.
func direct(t *testing.T, node *devstack.RedisNode) *redis.Client {
	t.Helper()
	options, err := redis.ParseURL(node.URL())
	require.NoError(t, err)
	options.ContextTimeoutEnabled = true
	client := redis.NewClient(options)
	t.Cleanup(func() { _ = client.Close() })
	return client
}

// frontOn returns a front on servers of the test's own. Its timeout is also how long what it does behind its callers' backs takes.
func frontOn(t *testing.T, client redis.UniversalClient, change ...func(*redisfront.Config)) *redisfront.Front {
	t.Helper()
	cfg := &redisfront.Config{Timeout: 2 * time.Second, Prefix: newPrefix()}
	for _, c := range change {
		c(cfg)
	}
	f, err := redisfront.New(client, cfg)
	require.NoError(t, err)
	t.Cleanup(func() { _ = f.Close() }) // its servers may be dead
	return f
}

// onCommand is a hook that is put around every command of a client.
type onCommand func(next redis.ProcessHook) redis.ProcessHook

func (onCommand) DialHook(next redis.DialHook) redis.DialHook { return next }

func (h onCommand) ProcessHook(next redis.ProcessHook) redis.ProcessHook { return h(next) }

func (onCommand) ProcessPipelineHook(next redis.ProcessPipelineHook) redis.ProcessPipelineHook {
	return next
}

// hurried is for servers that do not answer at all: a busy one may be as late as that.
func hurried(c *redisfront.Config) { c.Timeout = 300 * time.Millisecond }

// patient is for servers that are well.
func patient(c *redisfront.Config) { c.Timeout = patience }

// shard is a master of a cluster and its replica.
type shard struct {
	master, replica *devstack.RedisNode
	first, last     int // slots
}

type cluster struct {
	shards []shard
	client *redis.ClusterClient // as the user of the guide
	admin  *redis.Client        // of the last master, which stays alive
}

// startCluster starts three masters with a replica each, which takes over where a master is silent for so long.
func startCluster(t *testing.T, silence time.Duration) *cluster {
	t.Helper()
	ctx, nodes, c := t.Context(), startNodes(t), &cluster{}
	bus := map[*devstack.RedisNode]int{}
	add := func() *devstack.RedisNode {
		port := freePort(ctx, t) // by default it is the server's port and 10,000, which may be none
		n, err := nodes.Add(ctx, "cluster-enabled yes", fmt.Sprint("cluster-node-timeout ", silence.Milliseconds()), "masterauth "+nodes.Password(),
			"cluster-port "+strconv.Itoa(port), "repl-diskless-sync-delay 0")
		require.NoError(t, err)
		bus[n] = port
		return n
	}
	const masters, slots = 3, 16384
	var addresses []string
	for i := range masters {
		s := shard{master: add(), replica: add(), first: slots * i / masters, last: slots*(i+1)/masters - 1}
		c.shards = append(c.shards, s)
		addresses = append(addresses, s.master.Address(), s.replica.Address())
		require.NoError(t, direct(t, s.master).ClusterAddSlotsRange(ctx, s.first, s.last).Err())
	}
	first := direct(t, c.shards[0].master)
	for n, port := range bus {
		require.NoError(t, first.Do(ctx, "CLUSTER", "MEET", "127.0.0.1", n.Port(), port).Err())
	}
	for _, s := range c.shards {
		id, err := direct(t, s.master).ClusterMyID(ctx).Result()
		require.NoError(t, err)
		replica := direct(t, s.replica)
		require.Eventually(t, func() bool { return replica.ClusterReplicate(ctx, id).Err() == nil }, 10*time.Second, 20*time.Millisecond)
	}
	for n := range bus {
		client := direct(t, n)
		require.Eventually(t, func() bool {
			info, _ := client.ClusterInfo(ctx).Result()
			replication, _ := client.InfoMap(ctx, "replication").Result()
			linked := replication["Replication"]["role"] == "master" && replication["Replication"]["connected_slaves"] == "1" ||
				replication["Replication"]["master_link_status"] == "up"
			return strings.Contains(info, "cluster_state:ok") && strings.Contains(info, "cluster_known_nodes:6") && linked
		}, 20*time.Second, 50*time.Millisecond)
	}
	c.admin = direct(t, c.shards[masters-1].master)
	for n := range bus {
		setUser(t, direct(t, n))
	}
	c.client = redis.NewClusterClient(&redis.ClusterOptions{
		Addrs: addresses, Username: "pgonce", Password: "secret", ContextTimeoutEnabled: true,
	})
	t.Cleanup(func() { _ = c.client.Close() })
	return c
}

// setUser makes the user of docs/redis.md.
func setUser(t *testing.T, client *redis.Client) {
	t.Helper()
	text, err := os.ReadFile("../docs/redis.md")
	require.NoError(t, err)
	user := regexp.MustCompile("(?m)^user (pgonce .*)$").FindStringSubmatch(string(text))
	require.Len(t, user, 2)
	args := []any{"ACL", "SETUSER"}
	for _, rule := range strings.Fields(user[1]) {
		args = append(args, rule)
	}
	require.NoError(t, client.Do(t.Context(), args...).Err())
}

func freePort(ctx context.Context, t *testing.T) int {
	t.Helper()
	var config net.ListenConfig
	l, err := config.Listen(ctx, "tcp4", "127.0.0.1:0")
	require.NoError(t, err)
	require.NoError(t, l.Close())
	return l.Addr().(*net.TCPAddr).Port
}

// watched is a master and a replica, watched by three sentinels.
type watched struct {
	master, replica *devstack.RedisNode
	client          *redis.Client
}

func startWatched(t *testing.T) *watched {
	t.Helper()
	ctx, nodes, w := t.Context(), startNodes(t), &watched{}
	auth := "masterauth " + nodes.Password()
	var err error
	w.master, err = nodes.Add(ctx, auth, "repl-diskless-sync-delay 0")
	require.NoError(t, err)
	w.replica, err = nodes.Add(ctx, auth, fmt.Sprintf("replicaof 127.0.0.1 %d", w.master.Port()))
	require.NoError(t, err)
	var sentinels []*redis.SentinelClient
	var addresses []string
	for range 3 {
		n, err := nodes.AddSentinel(ctx, fmt.Sprintf("sentinel monitor shop 127.0.0.1 %d 2", w.master.Port()),
			"sentinel auth-pass shop "+nodes.Password(), "sentinel down-after-milliseconds shop 500",
			"sentinel failover-timeout shop 2000")
		require.NoError(t, err)
		addresses = append(addresses, n.Address())
		client := redis.NewSentinelClient(&redis.Options{Addr: n.Address(), Password: nodes.Password()})
		t.Cleanup(func() { _ = client.Close() })
		sentinels = append(sentinels, client)
	}
	for _, s := range sentinels {
		require.Eventually(t, func() bool {
			master, err := s.Master(ctx, "shop").Result()
			return err == nil && master["num-other-sentinels"] == "2" && master["num-slaves"] == "1"
		}, 20*time.Second, 50*time.Millisecond)
	}
	w.client = redis.NewFailoverClient(&redis.FailoverOptions{
		MasterName: "shop", SentinelAddrs: addresses, SentinelPassword: nodes.Password(), Password: nodes.Password(),
		ContextTimeoutEnabled: true,
	})
	t.Cleanup(func() { _ = w.client.Close() })
	return w
}

// isMaster waits until a server is one.
func isMaster(ctx context.Context, client *redis.Client) bool {
	info, err := client.InfoMap(ctx, "replication").Result()
	return err == nil && info["Replication"]["role"] == "master"
}
