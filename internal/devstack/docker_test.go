package devstack

import (
	"bytes"
	"context"
	"encoding/json"
	"io"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// These tests bring a child of their own; `make test-docker` runs the real one with a real engine.

// fakeDocker is a machine whose Docker child is a shell script. In it $request is the file for the request.
func fakeDocker(t *testing.T, script string) (m machine, request string) {
	t.Helper()
	program, request := fakeChild(t, script)
	m = bare()
	m.engine = func(context.Context) error { return nil }
	m.dockerstack = func(context.Context, io.Writer, string) (string, error) { return program, nil }
	return m, request
}

func fakeChild(t *testing.T, script string) (program, request string) {
	t.Helper()
	program = filepath.Join(t.TempDir(), "dockerstack")
	request = program + ".request"
	writeProgram(t, program, "#!/bin/sh\nrequest="+request+"\n"+script)
	return program, request
}

// served answers the request with a server, and notes when its input ends.
func served(url string) string {
	return `read -r line; echo "$line" > $request; echo '{"url":"` + url + `"}'; cat > /dev/null; touch $request.gone`
}

func TestDocker_ServesUntilStopped(t *testing.T) {
	t.Parallel()
	m, request := fakeDocker(t, served(shared(t).adminURL))
	var told bytes.Buffer
	s, err := start(t.Context(), &Config{Settings: fast, Out: &told}, m)
	require.NoError(t, err)
	require.Equal(t, ProviderDocker, s.Provider())
	require.False(t, s.OwnProcesses(), "a container's process numbers are other processes' out here")
	require.Contains(t, told.String(), "devstack: PostgreSQL: a container of postgres:18-alpine (docker)")
	db, err := s.CreateDatabase(t.Context())
	require.NoError(t, err)
	require.NoError(t, db.Drop(t.Context()))

	text, err := os.ReadFile(request)
	require.NoError(t, err)
	var r dockerRequest
	require.NoError(t, json.Unmarshal(text, &r))
	require.Len(t, r.Password, 26)
	r.Password = ""
	require.Equal(t, dockerRequest{Server: "postgres", Image: "postgres:18-alpine", Settings: map[string]string{
		"fsync": "off", "max_connections": "200", "timezone": "UTC", "log_timezone": "UTC",
	}}, r)
	require.NoFileExists(t, request+".gone")
	require.NoError(t, s.Stop())
	require.FileExists(t, request+".gone")
}

func TestDocker_ImagesAreChosenByTheEnvironment(t *testing.T) {
	t.Parallel()
	m, request := fakeDocker(t, served(shared(t).adminURL))
	for _, tc := range []struct{ variable, value, want string }{
		{envPostgresImage, "mirror/postgres:15", "mirror/postgres:15"},
		{envVersion, "15", "postgres:15-alpine"},
	} {
		s, err := start(t.Context(), nil, m.with(envStack, ProviderDocker, tc.variable, tc.value))
		if err == nil {
			require.NoError(t, s.Stop())
		}
		text, readErr := os.ReadFile(request)
		require.NoError(t, readErr)
		require.Contains(t, string(text), `"image":"`+tc.want+`"`, "%v", err)
	}
	_, err := start(t.Context(), nil, m.with(envStack, ProviderDocker, envVersion, "99"))
	require.ErrorContains(t, err, "use image postgres:99-alpine")
	require.ErrorContains(t, err, "99 is needed", "an image may hold another version than its name says")

	m, request = fakeDocker(t, served("redis://:p@127.0.0.1:1/0"))
	m = m.with(envDatabase, shared(t).adminURL, envRedisImage, "mirror/redis:7")
	s, err := start(t.Context(), &Config{Redis: true}, m)
	require.NoError(t, err)
	require.Equal(t, "redis://:p@127.0.0.1:1/0", s.RedisURL())
	text, err := os.ReadFile(request)
	require.NoError(t, err)
	require.Contains(t, string(text), `{"server":"redis","image":"mirror/redis:7","password":"`)
	require.NoError(t, s.Stop())
	require.FileExists(t, request+".gone")
}

func TestDocker_ChildThatFailsSaysWhy(t *testing.T) {
	t.Parallel()
	for script, want := range map[string]string{
		"read -r line; echo 'no such image' >&2; exit 1": "no such image",
		"echo 'cannot begin' >&2; exit 1":                "cannot begin",
		"read -r line; echo nonsense; cat > /dev/null":   `it answered "nonsense\n"`,
		"read -r line; echo '{}'; cat > /dev/null":       `it answered "{}\n"`,
	} {
		m, _ := fakeDocker(t, script)
		_, err := start(t.Context(), nil, m.with(envStack, ProviderDocker))
		require.ErrorIs(t, err, ErrNoServer)
		require.ErrorContains(t, err, want)
	}
}

func TestDocker_CancelledStartEndsTheChild(t *testing.T) {
	t.Parallel()
	m, request := fakeDocker(t, `read -r line; echo "$line" > $request; cat > /dev/null; touch $request.gone`)
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	stop := make(chan struct{})
	go func() {
		defer close(stop)
		for ctx.Err() == nil {
			if _, err := os.Stat(request); err == nil {
				cancel()
			}
			time.Sleep(startPoll)
		}
	}()
	_, err := start(ctx, nil, m)
	<-stop
	require.ErrorIs(t, err, context.Canceled)
	require.FileExists(t, request+".gone")
}

func TestKilledParent_TakesTheContainerWithIt(t *testing.T) {
	t.Parallel()
	program, request := fakeChild(t, "trap '' TERM\n"+served(shared(t).adminURL))
	cmd, _, _ := startChild(t, "", childDocker+"="+program)
	require.FileExists(t, request)
	require.NoFileExists(t, request+".gone")
	require.NoError(t, cmd.Process.Kill())
	_ = cmd.Wait()
	require.Eventually(t, func() bool { _, err := os.Stat(request + ".gone"); return err == nil },
		20*time.Second, 20*time.Millisecond)
}

func TestDocker_EngineIsAskedWhereItWouldBe(t *testing.T) {
	t.Parallel()
	dir, err := os.MkdirTemp("/tmp", "engine") //nolint:usetesting // a socket's path is short
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, os.RemoveAll(dir)) })
	socket := filepath.Join(dir, "docker.sock")
	listener, err := new(net.ListenConfig).Listen(t.Context(), "unix", socket)
	require.NoError(t, err)
	status := make(chan int, 3)
	engine := &http.Server{ReadHeaderTimeout: time.Second, Handler: http.HandlerFunc(
		func(w http.ResponseWriter, r *http.Request) {
			if r.URL.Path != "/_ping" {
				w.WriteHeader(http.StatusNotFound)
				return
			}
			w.WriteHeader(<-status)
		})}
	ended := make(chan error, 1)
	go func() { ended <- engine.Serve(listener) }()

	env := func(name, value string) func(string) string { return bare().with(name, value).getenv }
	status <- http.StatusOK
	require.NoError(t, engineAnswers(t.Context(), env("DOCKER_HOST", "unix://"+socket)))
	status <- http.StatusOK
	require.NoError(t, engineAnswers(t.Context(), env("XDG_RUNTIME_DIR", dir)))
	status <- http.StatusInternalServerError
	require.Error(t, engineAnswers(t.Context(), env("DOCKER_HOST", "unix://"+socket)))

	require.NoError(t, engine.Close())
	require.ErrorIs(t, <-ended, http.ErrServerClosed)
	require.ErrorContains(t, engineAnswers(t.Context(), env("DOCKER_HOST", "unix://"+socket)), "no Docker engine answers")
	require.Error(t, engineAnswers(t.Context(), env("DOCKER_HOST", "tcp://127.0.0.1:1")))
	require.Error(t, engineAnswers(t.Context(), env("DOCKER_HOST", ":")))
}
