package failpoint

import (
	"bytes"
	"go/ast"
	"go/parser"
	"go/token"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

func TestAll_HasEveryConstantOnce(t *testing.T) {
	t.Parallel()
	file, err := parser.ParseFile(token.NewFileSet(), "points.go", nil, 0)
	require.NoError(t, err)
	var declared []Point
	ast.Inspect(file, func(n ast.Node) bool {
		spec, ok := n.(*ast.ValueSpec)
		if !ok {
			return true
		}
		if kind, ok := spec.Type.(*ast.Ident); ok && kind.Name == "Point" {
			text, err := strconv.Unquote(spec.Values[0].(*ast.BasicLit).Value)
			require.NoError(t, err)
			declared = append(declared, Point(text))
		}
		return true
	})
	require.Equal(t, declared, All())
	seen := map[Point]bool{}
	for _, p := range All() {
		require.False(t, seen[p], p)
		seen[p] = true
	}
}

func TestTrap_TextAndBack(t *testing.T) {
	t.Parallel()
	traps := []Trap{
		{At: CommitSent, Do: Kill, Hit: 3},
		{At: AcquireAfter, Do: Sleep, Hit: 1, For: 200 * time.Millisecond},
		{At: AcquireAfter, Do: Stop, Hit: 2},
		{At: CommitAfter, Do: Panic, Hit: 1},
	}
	require.Equal(t, "PGONCE_FAILPOINTS=commit.sent=kill@3;acquire.after=sleep:200ms@1;acquire.after=stop@2;commit.after=panic@1", Env(traps...))
	got, err := parse(Env(traps...)[len(Variable)+1:])
	require.NoError(t, err)
	require.Equal(t, traps, got)
	got, err = parse("commit.sent=kill")
	require.NoError(t, err)
	require.Equal(t, []Trap{{At: CommitSent, Do: Kill}}, got)
	got, err = parse(" ; ")
	require.NoError(t, err)
	require.Empty(t, got)
}

func TestTrap_WrongTextIsRefused(t *testing.T) {
	t.Parallel()
	for text, want := range map[string]string{
		"commit.snet=kill":      `there is no point "commit.snet"`,
		"commit.sent":           `there is no action ""`,
		"commit.sent=explode":   `there is no action "explode"`,
		"commit.sent=kill@x":    "invalid syntax",
		"commit.sent=kill@-1":   "counted from 1",
		"commit.sent=sleep":     "invalid duration",
		"commit.sent=sleep:-1s": "needs a time",
	} {
		_, err := parse(text)
		require.ErrorContains(t, err, want)
		require.ErrorContains(t, err, Variable)
	}
}

// build makes the program of testdata/hits, which is how a child process meets its traps.
func build(t *testing.T, args ...string) string {
	t.Helper()
	program := filepath.Join(t.TempDir(), "hits")
	args = append(append([]string{"build", "-o", program}, args...), "./testdata/hits")
	out, err := exec.CommandContext(t.Context(), "go", args...).CombinedOutput()
	require.NoError(t, err, "%s", out)
	return program
}

func TestHit_NormalBuildKnowsNothingOfTraps(t *testing.T) {
	t.Parallel()
	program := build(t)
	cmd := exec.CommandContext(t.Context(), program)
	cmd.Env = append(os.Environ(), Env(Trap{At: CommitSent, Do: Kill}))
	out, err := cmd.Output()
	require.NoError(t, err)
	require.Equal(t, "1\n2\n3\nfalse 0\n", string(out))
	code, err := os.ReadFile(program)
	require.NoError(t, err)
	require.NotContains(t, string(code), Variable)
}

func TestHit_ChildSpringsTheTrapsOfItsEnvironment(t *testing.T) {
	t.Parallel()
	program := build(t, "-tags", "failpoints")
	for _, tc := range []struct {
		name, env, out, told string
		signal               syscall.Signal
		code                 int
	}{
		{"none", Env(), "1\n2\n3\ntrue 3\n", "", -1, 0},
		{"kill", Env(Trap{At: CommitSent, Do: Kill, Hit: 3}), "1\n2\n", "", syscall.SIGKILL, -1},
		{"kill at another point", Env(Trap{At: CommitAfter, Do: Kill}), "1\n2\n3\ntrue 3\n", "", -1, 0},
		{"panic", Env(Trap{At: CommitSent, Do: Panic, Hit: 2}), "1\n", "panic: failpoint: commit.sent=panic@2", -1, 2},
		{"wrong", Variable + "=commit.sent=explode", "", "there is no action", -1, 2},
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			var stdout, stderr bytes.Buffer
			cmd := exec.CommandContext(t.Context(), program)
			cmd.Env, cmd.Stdout, cmd.Stderr = append(os.Environ(), tc.env), &stdout, &stderr
			_ = cmd.Run() // its state says more
			status := cmd.ProcessState.Sys().(syscall.WaitStatus)
			require.Equal(t, tc.out, stdout.String())
			require.Contains(t, stderr.String(), tc.told)
			require.Equal(t, tc.code, cmd.ProcessState.ExitCode())
			require.Equal(t, tc.signal >= 0, status.Signaled())
			if status.Signaled() {
				require.Equal(t, tc.signal, status.Signal())
			}
		})
	}
	t.Run("stop and sleep", func(t *testing.T) {
		t.Parallel()
		cmd := exec.CommandContext(t.Context(), program)
		cmd.Env = append(os.Environ(), Env(
			Trap{At: CommitSent, Do: Stop, Hit: 2}, Trap{At: CommitSent, Do: Sleep, Hit: 3, For: 50 * time.Millisecond}))
		var stdout bytes.Buffer
		cmd.Stdout = &stdout
		require.NoError(t, cmd.Start())
		var status syscall.WaitStatus
		_, err := syscall.Wait4(cmd.Process.Pid, &status, syscall.WUNTRACED, nil)
		require.NoError(t, err)
		require.True(t, status.Stopped())
		resumed := time.Now()
		require.NoError(t, cmd.Process.Signal(syscall.SIGCONT))
		require.NoError(t, cmd.Wait())
		require.GreaterOrEqual(t, time.Since(resumed), 50*time.Millisecond)
		require.Equal(t, "1\n2\n3\ntrue 3\n", stdout.String())
	})
}
