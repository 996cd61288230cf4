package main

import (
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

var root = filepath.Join("..", "..")

// A plant rots with the code that it changes. This finds out within the usual tests, without running any.
func TestPlants_AllApplyAndNameTests(t *testing.T) {
	t.Parallel()
	require.GreaterOrEqual(t, len(plants), 10)
	names, blind := map[string]bool{}, 0
	for _, p := range plants {
		require.False(t, names[p.name], "two plants %q", p.name)
		names[p.name] = true
		require.NotEmpty(t, p.why, p.name)
		require.NotEmpty(t, p.edits, p.name)
		_, err := p.overlay(root, t.TempDir())
		require.NoError(t, err, p.name)
		for _, s := range []suite{p.caught, p.missed} {
			if s.pkg != "" {
				require.True(t, matchesTest(t, s), "%s: %v names no test", p.name, s)
			}
		}
		if p.caught.pkg == "./internal/faultsuite" && p.missed.pkg != "" {
			blind++
		}
	}
	require.Positive(t, blind, "a bug that only the fault suite sees: else it would prove nothing of its own")
}

func matchesTest(t *testing.T, s suite) bool {
	t.Helper()
	top, _, _ := strings.Cut(s.run, "/")
	pattern := regexp.MustCompile(top)
	files, err := filepath.Glob(filepath.Join(root, filepath.FromSlash(s.pkg), "*_test.go"))
	require.NoError(t, err)
	for _, file := range files {
		text, err := os.ReadFile(file)
		require.NoError(t, err)
		for _, m := range regexp.MustCompile(`(?m)^func (Test\w+)\(`).FindAllStringSubmatch(string(text), -1) {
			if pattern.MatchString(m[1]) {
				return true
			}
		}
	}
	return false
}

// garden is a module with a function and three tests of it, one of which sees nothing.
func garden(t *testing.T) *field {
	t.Helper()
	dir := t.TempDir()
	for name, text := range map[string]string{
		"go.mod":  "module garden\n\ngo 1.26.0\n",
		"once.go": "package garden\n\nfunc once() int { return 1 }\n",
		"once_test.go": `package garden

import "testing"

func TestOnce(t *testing.T) {
	if once() != 1 {
		t.Error("twice")
	}
}

func TestBlind(t *testing.T) { once() }

func TestSub(t *testing.T) {
	t.Run("one", func(t *testing.T) {
		if once() != 1 {
			t.Error("twice")
		}
	})
}
`,
	} {
		require.NoError(t, os.WriteFile(filepath.Join(dir, name), []byte(text), 0o600))
	}
	f, err := newField(dir)
	require.NoError(t, err)
	t.Cleanup(f.close)
	return f
}

func bug(becomes, run string) plant {
	return plant{
		name: "twice", edits: []edit{{file: "once.go", old: "return 1", new: becomes}}, caught: suite{pkg: ".", run: run},
	}
}

func TestField_EveryEnd(t *testing.T) { //nolint:tparallel // one module's builds, one after the other
	t.Parallel()
	f := garden(t)
	require.NoError(t, f.unplanted(t.Context(), []plant{bug("return 2", "^Test")}))
	before := contents(t, f.root)
	for name, c := range map[string]struct {
		plant  plant
		caught string
		err    string
	}{
		"caught":            {plant: bug("return 2", "^Test(Once|Sub)$/^(|one)$"), caught: "TestOnce, TestSub"},
		"caught by some":    {plant: bug("return 2", "^Test(Once|Blind)$"), err: "not caught by TestBlind"},
		"does not build":    {plant: bug("return", "^TestOnce$"), err: "does not build"},
		"no such test":      {plant: bug("return 2", "^TestNone$"), err: "no test ran"},
		"hangs":             {plant: bug("select {}", "^TestBlind$"), err: "0 ended by themselves"},
		"old text is gone":  {plant: plant{edits: []edit{{file: "once.go", old: "return 3", new: "return 2"}}}, err: "0 times in once.go"},
		"old text is twice": {plant: plant{edits: []edit{{file: "once.go", old: "n", new: "m"}}}, err: "does not apply"},
		"no change":         {plant: bug("return 1", "^TestOnce$"), err: "changes nothing"},
		"no such file":      {plant: plant{edits: []edit{{file: "none.go", old: "a", new: "b"}}}, err: "none.go"},
		"two edits, of which the second depends on the first": {plant: plant{
			edits:  []edit{{file: "once.go", old: "return 1", new: "return 3"}, {file: "once.go", old: "return 3", new: "return 2"}},
			caught: suite{pkg: ".", run: "^TestOnce$"},
		}, caught: "TestOnce"},
	} {
		t.Run(name, func(t *testing.T) {
			f.timeout = testTimeout
			if name == "hangs" {
				f.timeout = 2 * time.Second
			}
			caught, err := f.try(t.Context(), c.plant)
			if c.err != "" {
				require.ErrorContains(t, err, c.err)
				return
			}
			require.NoError(t, err)
			require.Equal(t, c.caught, caught)
		})
	}
	f.timeout = testTimeout
	only := bug("return 2", "^TestOnce$")
	only.missed = suite{pkg: ".", run: "^TestBlind$"}
	caught, err := f.try(t.Context(), only)
	require.NoError(t, err)
	require.Contains(t, caught, "missed by all 1 tests")
	only.missed.run = "^Test"
	_, err = f.try(t.Context(), only)
	require.ErrorContains(t, err, "sees it too: TestOnce, TestSub")

	require.Equal(t, before, contents(t, f.root), "the sources are as they were")
	require.NoError(t, os.WriteFile(filepath.Join(f.root, "once.go"), []byte("package garden\n\nfunc once() int { return 2 }\n"), 0o600))
	require.ErrorContains(t, f.unplanted(t.Context(), []plant{bug("", "^TestBlind$"), bug("", "^TestOnce$")}), "red: TestOnce")
}

func contents(t *testing.T, dir string) map[string]string {
	t.Helper()
	entries, err := os.ReadDir(dir)
	require.NoError(t, err)
	all := map[string]string{}
	for _, e := range entries {
		text, err := os.ReadFile(filepath.Join(dir, e.Name()))
		require.NoError(t, err)
		all[e.Name()] = string(text)
	}
	return all
}
