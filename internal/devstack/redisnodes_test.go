package devstack

import (
	"fmt"
	"net"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

func TestRedisNodes_DieAndComeBack(t *testing.T) {
	t.Parallel()
	ctx := t.Context()
	nodes, err := StartRedisNodes(ctx, &Config{Out: t.Output()})
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, nodes.Stop()) })
	n, err := nodes.Add(ctx, "maxmemory 3mb")
	require.NoError(t, err)
	second, err := nodes.Add(ctx)
	require.NoError(t, err)
	require.NotEqual(t, n.Port(), second.Port())
	require.Error(t, n.Start(ctx), "it runs")
	require.NoError(t, n.Kill())
	require.NoError(t, n.Kill())
	_, err = (&net.Dialer{}).DialContext(ctx, "tcp", n.Address())
	require.Error(t, err)
	taken, err := new(net.ListenConfig).Listen(ctx, "tcp", n.Address())
	require.NoError(t, err)
	missed := make(chan error, 1)
	go func() {
		for !strings.Contains(tail(filepath.Join(n.dir, "log")), "Address already in use") && ctx.Err() == nil {
			time.Sleep(time.Millisecond)
		}
		missed <- taken.Close()
	}()
	require.NoError(t, n.Start(ctx), "somebody had its port for a moment")
	require.NoError(t, <-missed)
	require.NoError(t, n.Pause())
	require.NoError(t, n.Resume())

	sentinel, err := nodes.AddSentinel(ctx, fmt.Sprintf("sentinel monitor shop 127.0.0.1 %d 1", n.Port()),
		"sentinel auth-pass shop "+nodes.Password())
	require.NoError(t, err)
	require.NoError(t, sentinel.Kill())
	require.NoError(t, sentinel.Start(ctx), "with what it has written into its own configuration")
}
