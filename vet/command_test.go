package vet_test

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// build makes the command.
func build(t *testing.T) string {
	t.Helper()
	binary := filepath.Join(t.TempDir(), "pgoncevet")
	out, err := command(t, ".", "go", "build", "-o", binary, "./cmd/pgoncevet").CombinedOutput()
	require.NoError(t, err, "%s", out)
	return binary
}

func command(t *testing.T, dir, name string, args ...string) *exec.Cmd {
	t.Helper()
	cmd := exec.CommandContext(t.Context(), name, args...)
	cmd.Dir, cmd.Env = dir, append(os.Environ(), "GOWORK=off")
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

// A small service with the real packages, the way people run it.
func TestCommand_FindsInARealService(t *testing.T) {
	t.Parallel()
	binary := build(t)
	const dir = "testdata/service"
	source, err := os.ReadFile(filepath.Join(dir, "service.go"))
	require.NoError(t, err)
	var want []string
	for i, line := range bytes.Split(source, []byte("\n")) {
		if bytes.HasSuffix(line, []byte("// found")) {
			want = append(want, fmt.Sprintf("service.go:%d", i+1))
		}
	}
	require.Len(t, want, 6)
	for name, cmd := range map[string]*exec.Cmd{
		"go vet":    command(t, dir, "go", "vet", "-vettool="+binary, "./..."),
		"by itself": command(t, dir, binary, "./..."),
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
		"..":                 {"./cmd/demo", "./txn", "./idempotencyhttp", "./idempotencymsg", "./idempotency/...", "./compensator", "./ids"},
		"../idempotencygrpc": {"./..."},
		"../cmd/pgonce":      {"./..."},
	} {
		places, texts := run(t, command(t, dir, "go", append([]string{"vet", "-vettool=" + binary}, packages...)...))
		for i, place := range places {
			file, _, _ := strings.Cut(filepath.Base(place), ":")
			misuse := strings.HasSuffix(file, "_test.go") && !strings.HasPrefix(file, "example") && !strings.Contains(filepath.ToSlash(place), "cmd/demo")
			require.True(t, misuse, "%s: %s", place, texts[i])
		}
	}
}
