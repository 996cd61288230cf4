package vet_test

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// build makes the command.
func build(t *testing.T) string {
	t.Helper()
	binary := filepath.Join(t.TempDir(), "pgoncevet")
	out, err := command(t, ".", "", "go", "build", "-o", binary, "./cmd/pgoncevet").CombinedOutput()
	require.NoError(t, err, "%s", out)
	return binary
}

func command(t *testing.T, dir, flags, name string, args ...string) *exec.Cmd {
	t.Helper()
	cmd := exec.CommandContext(t.Context(), name, args...)
	cmd.Dir, cmd.Env = dir, append(os.Environ(), "GOWORK=off", "GOFLAGS="+flags)
	return cmd
}

var diagnostic = regexp.MustCompile(`(?m)^(?:\./|vet: )?(\S+\.go:\d+):\d+: (.*)$`)

// run gives the places of the findings, and what is said of them.
func run(t *testing.T, cmd *exec.Cmd) (places, texts []string) {
	t.Helper()
	out, err := cmd.CombinedOutput()
	var exit *exec.ExitError
	if err != nil && !errors.As(err, &exit) {
		require.NoError(t, err)
	}
	for _, m := range diagnostic.FindAllStringSubmatch(string(out), -1) {
		places, texts = append(places, m[1]), append(texts, m[2])
	}
	require.Equal(t, err != nil, len(places) > 0, "%s", out)
	return places, texts
}

// service is testdata's, as a module of its own with the real packages in the versions that the repository has.
func service(t *testing.T) string {
	t.Helper()
	dir := t.TempDir()
	require.NoError(t, os.CopyFS(dir, os.DirFS("testdata/service")))
	root, err := filepath.Abs("..")
	require.NoError(t, err)
	sums, err := os.ReadFile("../go.sum")
	require.NoError(t, err)
	require.NoError(t, os.WriteFile(filepath.Join(dir, "go.sum"), sums, 0o600))
	mod := "module example.com/service\n\ngo 1.26.0\n\nrequire github.com/pgonce/pgonce v0.0.0\n\nreplace github.com/pgonce/pgonce => " + strconv.Quote(root) + "\n"
	require.NoError(t, os.WriteFile(filepath.Join(dir, "go.mod"), []byte(mod), 0o600))
	return dir
}

// A small service with the real packages, the way people run it.
func TestCommand_FindsInARealService(t *testing.T) {
	t.Parallel()
	binary, dir := build(t), service(t)
	source, err := os.ReadFile(filepath.Join(dir, "service.go"))
	require.NoError(t, err)
	var want []string
	for i, line := range bytes.Split(source, []byte("\n")) {
		if bytes.HasSuffix(line, []byte("// found")) {
			want = append(want, fmt.Sprintf("service.go:%d", i+1))
		}
	}
	require.Len(t, want, 8)
	for name, cmd := range map[string]*exec.Cmd{
		"go vet":    command(t, dir, "-mod=mod", "go", "vet", "-vettool="+binary, "./..."),
		"by itself": command(t, dir, "-mod=mod", binary, "./..."),
	} {
		places, texts := run(t, cmd)
		for i := range places {
			places[i] = filepath.Base(places[i])
		}
		require.ElementsMatch(t, want, places, "%s: %q", name, texts)
		require.Contains(t, strings.Join(texts, "\n"), "calls Audit, which calls (*pgxpool.Pool).Exec (store.go:15)", name)
	}
}

// This repository's own program and examples do as they say. Tests misuse on purpose what they test.
func TestCommand_FindsNothingInTheRepository(t *testing.T) {
	t.Parallel()
	binary := build(t)
	for dir, packages := range map[string][]string{
		"..":                                    {"./cmd/demo", "./txn", "./txnsql", "./idempotencyhttp", "./idempotencymsg", "./idempotency/...", "./compensator", "./ids"},
		"../idempotencygrpc":                    {"./..."},
		"../idempotencygrpc/idempotencyconnect": {"./..."},
		"../txnsql/orms":                        {"./..."},
		"../cmd/pgonce":                         {"./..."},
	} {
		places, texts := run(t, command(t, dir, "", "go", append([]string{"vet", "-vettool=" + binary}, packages...)...))
		for i, place := range places {
			file, _, _ := strings.Cut(filepath.Base(place), ":")
			misuse := strings.HasSuffix(file, "_test.go") && !strings.HasPrefix(file, "example") && !strings.Contains(filepath.ToSlash(place), "cmd/demo")
			require.True(t, misuse, "%s: %s", place, texts[i])
		}
	}
}
