package devstack

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"os"
	"sync"
	"syscall"
	"testing"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"
)

// childVariable makes the test binary a program that starts a stack and waits to be killed.
const childVariable = "PGONCE_DEVSTACK_CHILD"

// childDocker names the Docker child that the program's stack uses, if it is to use Docker.
const childDocker = "PGONCE_DEVSTACK_CHILD_DOCKER"

func TestMain(m *testing.M) {
	if os.Getenv(childVariable) != "" {
		child()
	}
	code := m.Run()
	if sharedStack != nil {
		if err := sharedStack.Stop(); err != nil {
			fmt.Fprintln(os.Stderr, err)
			code = 1
		}
	}
	if err := goleak.Find(); err != nil {
		fmt.Fprintln(os.Stderr, err)
		code = 1
	}
	os.Exit(code)
}

// childOfCluster, in the place of a server's URL, makes the child start a cluster.
const childOfCluster = "cluster"

// child prints where its stack is and ends when its input does, without stopping it.
func child() {
	if os.Getenv(envDatabase) == childOfCluster {
		clusterChild()
	}
	m := thisMachine().with(envStack, "")
	if program := os.Getenv(childDocker); program != "" {
		m = m.with(envStack, ProviderDocker)
		m.dockerstack = func(context.Context, io.Writer, string) (string, error) { return program, nil }
	}
	s, err := start(context.Background(), &Config{Settings: fast}, m)
	if err == nil {
		var db *Database
		if db, err = s.CreateDatabase(context.Background()); err == nil {
			fmt.Printf("%s %s\n", folderName(s), db.Name)
			_, _ = bufio.NewReader(os.Stdin).ReadByte()
			os.Exit(0)
		}
	}
	fmt.Println("failed:", err)
	os.Exit(1)
}

// clusterChild does so with a cluster whose standby has a paused receiver.
func clusterChild() {
	ctx := context.Background()
	c, err := StartCluster(ctx, &Config{Settings: fast})
	if err == nil {
		var standby *Node
		if standby, err = c.Primary().Standby(ctx); err == nil {
			err = standby.PauseReceiver(ctx)
		}
	}
	if err != nil {
		fmt.Println("failed:", err)
		os.Exit(1)
	}
	fmt.Println(c.scratch, "-")
	_, _ = bufio.NewReader(os.Stdin).ReadByte()
	os.Exit(0)
}

func folderName(s *Stack) string {
	if s.scratch == "" {
		return "-"
	}
	return s.scratch
}

var fast = map[string]string{"fsync": "off"}

var (
	sharedOnce  sync.Once
	sharedStack *Stack
	errShared   error
)

// shared is one local stack for the tests that do not stop or break it.
func shared(t *testing.T) *Stack {
	t.Helper()
	sharedOnce.Do(func() {
		sharedStack, errShared = start(context.Background(), &Config{Settings: fast}, local())
	})
	require.NoError(t, errShared)
	return sharedStack
}

// local is this machine without the variables that name servers.
func local() machine {
	m := thisMachine()
	m.getenv = func(string) string { return "" }
	return m
}

// writeProgram writes a script that is run at once, while other tests start processes: see unpackFile.
func writeProgram(t *testing.T, path, script string) {
	t.Helper()
	syscall.ForkLock.RLock()
	defer syscall.ForkLock.RUnlock()
	require.NoError(t, os.WriteFile(path, []byte(script), 0o755))
}
