package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync/atomic"
	"time"
)

// testTimeout ends a test binary that a plant makes hang. That is an error: a bug is caught by a test that says what is
// wrong.
const testTimeout = 4 * time.Minute

// field builds and runs tests, in a temporary folder.
type field struct {
	root, dir string
	timeout   time.Duration
	made      atomic.Int64
}

func newField(root string) (*field, error) {
	dir, err := os.MkdirTemp("", "planted")
	if err != nil {
		return nil, err
	}
	return &field{root: root, dir: dir, timeout: testTimeout}, nil
}

func (f *field) close() { _ = os.RemoveAll(f.dir) }

// folder makes a new one.
func (f *field) folder() (string, error) {
	dir := filepath.Join(f.dir, fmt.Sprint(f.made.Add(1)))
	return dir, os.Mkdir(dir, 0o700)
}

// unplanted requires that all tests the plants name are green without them: what is red already catches nothing.
func (f *field) unplanted(ctx context.Context, plants []plant) error {
	binaries, done := map[string]string{}, map[suite]bool{{}: true}
	dir, err := f.folder()
	if err != nil {
		return err
	}
	whole := map[string]bool{}
	for _, p := range plants {
		whole[p.missed.pkg] = whole[p.missed.pkg] || p.missed.run == everyTest
	}
	for _, p := range plants {
		for _, s := range []suite{p.missed, p.caught} {
			if done[s] || whole[s.pkg] && s.run != everyTest {
				continue
			}
			done[s] = true
			if binaries[s.pkg] == "" {
				if binaries[s.pkg], err = f.build(ctx, s.pkg, "", dir); err != nil {
					return err
				}
			}
			v, err := f.test(ctx, binaries[s.pkg], s)
			if err != nil {
				return fmt.Errorf("%v: %w", s, err)
			}
			if len(v.red) > 0 {
				return fmt.Errorf("%v: red: %s\n%s", s, strings.Join(v.red, ", "), v.tail())
			}
		}
	}
	return nil
}

// try plants one bug and returns the tests that caught it.
func (f *field) try(ctx context.Context, p plant) (caught string, err error) {
	dir, err := f.folder()
	if err != nil {
		return "", err
	}
	defer func() { err = errors.Join(err, os.RemoveAll(dir)) }() // a test binary has 20 MB
	overlay, err := p.overlay(f.root, dir)
	if err != nil {
		return "", err
	}
	v, err := f.buildAndTest(ctx, p.caught, overlay, dir)
	switch {
	case err != nil:
		return "", err
	case len(v.green) > 0:
		return "", fmt.Errorf("not caught by %s\n%s", strings.Join(v.green, ", "), v.tail())
	}
	caught = strings.Join(v.red, ", ")
	if p.missed.pkg == "" {
		return caught, nil
	}
	missed, err := f.buildAndTest(ctx, p.missed, overlay, dir)
	switch {
	case err != nil:
		return "", err
	case len(missed.red) > 0:
		return "", fmt.Errorf("said to be seen by %s only, but %s sees it too: %s", p.caught.pkg, p.missed.pkg, strings.Join(missed.red, ", "))
	}
	return fmt.Sprintf("%s, missed by all %d tests of %v", caught, len(missed.green), p.missed), nil
}

func (f *field) buildAndTest(ctx context.Context, s suite, overlay, dir string) (verdict, error) {
	binary, err := f.build(ctx, s.pkg, overlay, dir)
	if err != nil {
		return verdict{}, err
	}
	v, err := f.test(ctx, binary, s)
	if err != nil {
		return verdict{}, fmt.Errorf("%v: %w", s, err)
	}
	return v, nil
}

// build makes a package's test binary. Apart from running it, so that a plant that does not compile is an error and not
// taken for one that was caught.
func (f *field) build(ctx context.Context, pkg, overlay, dir string) (string, error) {
	binary := filepath.Join(dir, filepath.Base(pkg)+".test")
	args := []string{"test", "-c", "-o", binary}
	if overlay != "" {
		args = append(args, "-overlay", overlay)
	}
	cmd := exec.CommandContext(ctx, "go", append(args, pkg)...)
	cmd.Dir = f.root
	if out, err := cmd.CombinedOutput(); err != nil {
		return "", fmt.Errorf("does not build: %w\n%s", err, out)
	}
	return binary, nil
}

// verdict is what top-level tests came to.
type verdict struct {
	red, green []string
	output     string
}

// tail is the end of the output, for an error.
func (v verdict) tail() string {
	lines := strings.Split(strings.TrimSpace(v.output), "\n")
	return strings.Join(lines[max(0, len(lines)-30):], "\n")
}

var (
	began = regexp.MustCompile(`(?m)^=== RUN   (Test\w+)$`)
	ended = regexp.MustCompile(`(?m)^--- (PASS|FAIL): (Test\w+) `)
)

// test runs a test binary. An error means that its tests have not all said PASS or FAIL.
func (f *field) test(ctx context.Context, binary string, s suite) (verdict, error) {
	// Not in the package's folder: a failing test may write beside its source.
	cmd := exec.CommandContext(ctx, binary, "-test.v", "-test.run", s.run, "-test.skip", s.skip, "-test.timeout", f.timeout.String())
	cmd.Dir = filepath.Dir(binary)
	out, err := cmd.CombinedOutput()
	v := verdict{output: string(out)}
	var all []string
	for _, m := range began.FindAllStringSubmatch(v.output, -1) {
		all = append(all, m[1])
	}
	for _, m := range ended.FindAllStringSubmatch(v.output, -1) {
		if m[1] == "FAIL" {
			v.red = append(v.red, m[2])
		} else {
			v.green = append(v.green, m[2])
		}
	}
	slices.Sort(v.red)
	slices.Sort(v.green)
	exit := &exec.ExitError{}
	switch {
	case ctx.Err() != nil:
		return v, context.Cause(ctx)
	case err != nil && !errors.As(err, &exit):
		return v, err
	case len(all) == 0:
		return v, fmt.Errorf("no test ran\n%s", v.tail())
	case len(v.red)+len(v.green) != len(all):
		return v, fmt.Errorf("%d tests began, %d ended by themselves\n%s", len(all), len(v.red)+len(v.green), v.tail())
	case err == nil && len(v.red) > 0:
		return v, fmt.Errorf("tests are red and the binary is not\n%s", v.tail())
	case err != nil && len(v.red) == 0: // a leaked goroutine, for example
		return v, fmt.Errorf("no test is red and the binary is: %w\n%s", err, v.tail())
	}
	return v, nil
}
