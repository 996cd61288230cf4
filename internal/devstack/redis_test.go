package devstack

import (
	"net/url"
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"
)

func TestStart_RedisServesToo(t *testing.T) {
	t.Parallel()
	s, err := start(t.Context(), &Config{Redis: true, Settings: fast}, local())
	require.NoError(t, err)
	u, err := url.Parse(s.RedisURL())
	require.NoError(t, err)
	require.Equal(t, "127.0.0.1", u.Hostname())
	password, _ := u.User.Password()
	require.NoError(t, redisAnswers(t.Context(), u.Host, password))
	require.ErrorContains(t, redisAnswers(t.Context(), u.Host, "guessed"), "WRONGPASS")

	info, err := os.Stat(filepath.Join(s.scratch, "redis", "redis.conf"))
	require.NoError(t, err)
	require.Equal(t, os.FileMode(0o600), info.Mode().Perm(), "the password is in it")
	require.FileExists(t, filepath.Join(s.scratch, "redis", "redis.pid"), "the sweep needs it")

	require.NoError(t, s.Stop())
	require.Error(t, redisAnswers(t.Context(), u.Host, password))
}

func TestStart_RedisFromTheEnvironment(t *testing.T) {
	t.Parallel()
	m := named(shared(t).adminURL)
	database := m.getenv
	m.getenv = func(name string) string {
		if name == envRedis {
			return "redis://somewhere:6379/3"
		}
		return database(name)
	}
	s, err := start(t.Context(), &Config{Redis: true}, m)
	require.NoError(t, err)
	require.Equal(t, "redis://somewhere:6379/3", s.RedisURL())
	require.NoError(t, s.Stop())
}

func TestStart_WithoutRedisSaysWhatToType(t *testing.T) {
	t.Parallel()
	_, err := start(t.Context(), &Config{Redis: true}, named(shared(t).adminURL))
	require.ErrorIs(t, err, ErrNoRedis)
	require.ErrorContains(t, err, "no Redis 7 or newer found")
	require.ErrorContains(t, err, "PGONCE_REDIS_URL")
}
