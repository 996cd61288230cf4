//go:build docker

package devstack

import (
	"net/url"
	"os"
	"os/exec"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// These tests need a Docker engine: `make test-docker`. Without one they fail; a plain run does not build them.

func TestEngine_ServesAndLeavesNoContainer(t *testing.T) {
	before := containers(t)
	s, err := start(t.Context(), &Config{Redis: true, Settings: fast}, thisMachine().with(envStack, ProviderDocker))
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, s.Stop()) })
	require.Equal(t, ProviderDocker, s.Provider())
	require.Len(t, containers(t), len(before)+2)

	db, err := s.CreateDatabase(t.Context())
	require.NoError(t, err)
	query(t, db.URL, "CREATE TABLE t ()")
	copied, err := s.CreateFromTemplate(t.Context(), db.Name)
	require.NoError(t, err)
	require.Equal(t, [][]string{{"off", "UTC", "200", "UTF8", "t"}}, query(t, copied.URL,
		`SELECT current_setting('fsync'), current_setting('timezone'), current_setting('max_connections'),
			current_setting('server_encoding'), to_regclass('t')`))

	u, err := url.Parse(s.RedisURL())
	require.NoError(t, err)
	password, _ := u.User.Password()
	require.NoError(t, redisAnswers(t.Context(), u.Host, password))
	require.ErrorContains(t, redisAnswers(t.Context(), u.Host, "guessed"), "WRONGPASS")

	require.NoError(t, s.Stop())
	require.Equal(t, before, containers(t))
}

func TestEngine_KilledParentTakesTheContainerWithIt(t *testing.T) {
	before := containers(t)
	program, err := thisMachine().buildDockerstack(t.Context(), os.Stderr, t.TempDir())
	require.NoError(t, err)
	cmd, _, _ := startChild(t, "", childDocker+"="+program)
	require.Len(t, containers(t), len(before)+1)
	require.NoError(t, cmd.Process.Kill())
	_ = cmd.Wait()
	require.Eventually(t, func() bool { return len(containers(t)) == len(before) }, 30*time.Second, 100*time.Millisecond)
}

func TestEngine_MissingImageIsAnError(t *testing.T) {
	m := thisMachine().with(envStack, ProviderDocker, envPostgresImage, "localhost:1/no-such-image")
	_, err := start(t.Context(), nil, m)
	require.ErrorIs(t, err, ErrNoServer)
	require.ErrorContains(t, err, "localhost:1/no-such-image")
}

func TestEngine_IsFoundUnasked(t *testing.T) {
	m := bare().with(envPostgresImage, os.Getenv(envPostgresImage)) // else a server on the PATH is found first
	m.engine = thisMachine().engine
	m.lookPath = func(name string) (string, error) {
		if name == "go" {
			return exec.LookPath(name)
		}
		return "", os.ErrNotExist
	}
	s, err := start(t.Context(), nil, m)
	require.NoError(t, err)
	require.Equal(t, ProviderDocker, s.Provider())
	require.NoError(t, s.Stop())
}

// containers are the numbers of those our child's library started.
func containers(t *testing.T) []string {
	t.Helper()
	cmd := exec.CommandContext(t.Context(), "docker", "ps", "-aq", "--filter", "label=org.testcontainers=true")
	out, err := cmd.Output()
	require.NoError(t, err)
	return strings.Fields(string(out))
}
