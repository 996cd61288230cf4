package main

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"time"
)

// limit bounds one row.
const limit = 4 * time.Minute

// suites are the test binaries, built on first use.
type suites struct {
	dir   string
	built map[string]*suite
}

type suite struct {
	pkg, binary string
	tests       []string // tests and examples that run with output
}

func (s *suites) of(ctx context.Context, pkg, tags string) (*suite, error) {
	if b := s.built[pkg+tags]; b != nil {
		return b, nil
	}
	b := &suite{pkg: pkg, binary: filepath.Join(s.dir, filepath.Base(pkg)+tags+".test")}
	if out, err := exec.CommandContext(ctx, "go", "test", "-c", "-tags", tags, "-o", b.binary, pkg).CombinedOutput(); err != nil {
		return nil, fmt.Errorf("build %s: %w\n%s", pkg, err, out)
	}
	list := exec.CommandContext(ctx, b.binary, "-test.list", ".")
	list.Dir = pkg
	out, err := list.Output()
	if err != nil {
		return nil, fmt.Errorf("list %s: %w", pkg, err)
	}
	for name := range strings.FieldsSeq(string(out)) {
		if strings.HasPrefix(name, "Test") || strings.HasPrefix(name, "Example") {
			b.tests = append(b.tests, name)
		}
	}
	s.built[pkg+tags] = b
	return b, nil
}

// run runs one row and says how it went.
func (s *suites) run(ctx context.Context, e environment) (line string, err error) {
	began := time.Now()
	b, err := s.of(ctx, e.pkg, e.tags)
	if err != nil {
		return e.name, err
	}
	var expected, skip []string
	only := regexp.MustCompile(e.only)
	for _, name := range b.tests {
		if only.MatchString(name) && !slices.ContainsFunc(e.notRun, func(x exclusion) bool { return x.test == name }) {
			expected = append(expected, name)
		}
	}
	for _, x := range e.notRun {
		skip = append(skip, pattern(x.test))
		if err := b.existsAndPasses(ctx, x.test); err != nil {
			return e.name, err
		}
	}
	r, err := b.exec(ctx, e, "-test.skip", strings.Join(skip, "|"), "-test.run", e.only)
	var missing []string
	for _, name := range expected {
		if !r.passed[name] {
			missing = append(missing, name)
		}
	}
	if len(missing) > 0 {
		err = errors.Join(err, fmt.Errorf("did not pass: %s", strings.Join(missing, ", ")))
	}
	if len(r.skipped) > 0 {
		err = errors.Join(err, fmt.Errorf("skipped themselves: %s", strings.Join(r.skipped, ", ")))
	}
	if err != nil {
		err = errors.Join(err, errors.New(r.failures()))
	}
	ran := 0
	for name := range r.passed {
		if !strings.Contains(name, "/") {
			ran++
		}
	}
	setting := strings.TrimSpace(e.env + " " + map[bool]string{true: "TZ=" + e.tz}[e.tz != ""])
	return fmt.Sprintf("%-22s %-6s passed %3d of %3d tests (%3d with subtests), not run %d, %4.0f s  %s",
		e.name, e.pkg, ran, len(expected)+topLevel(e.notRun), len(r.passed), len(e.notRun), time.Since(began).Seconds(), setting), err
}

func topLevel(all []exclusion) (n int) {
	for _, x := range all {
		if !strings.Contains(x.test, "/") {
			n++
		}
	}
	return n
}

// pattern is what -run and -skip want for one exclusion.
func pattern(test string) string {
	name, sub, found := strings.Cut(test, "/")
	if !found {
		return "^" + name + "$"
	}
	return "^" + name + "$/^" + sub
}

// existsAndPasses runs one exclusion in the usual environment: a list of what is not run must not outlive its tests.
func (b *suite) existsAndPasses(ctx context.Context, test string) error {
	r, err := b.exec(ctx, environment{}, "-test.run", pattern(test))
	if err != nil {
		return errors.Join(fmt.Errorf("%s does not pass in the usual environment: %w", test, err), errors.New(r.failures()))
	}
	for name := range r.passed {
		if regexp.MustCompile("^" + test).MatchString(name) {
			return nil
		}
	}
	return fmt.Errorf("%s is on the list of what is not run, and there is no such test", test)
}

type result struct {
	passed  map[string]bool
	skipped []string
	failed  []string
	output  map[string]*strings.Builder // "" is the binary's own
}

func (b *suite) exec(ctx context.Context, e environment, args ...string) (result, error) {
	r := result{passed: map[string]bool{}, output: map[string]*strings.Builder{}}
	args = append([]string{
		"tool", "test2json", b.binary, "-test.v=test2json", "-test.short", "-rapid.checks=10",
		"-test.timeout", limit.String(), "-test.parallel", "4",
	}, args...)
	if b.pkg != "./txn" {
		args = slices.DeleteFunc(args, func(arg string) bool { return strings.HasPrefix(arg, "-rapid.") })
	}
	cmd := exec.CommandContext(ctx, "go", args...)
	cmd.Dir = b.pkg
	cmd.Env = append(os.Environ(), "PGONCE_TEST_ENV="+e.env)
	if e.tz != "" {
		cmd.Env = append(cmd.Env, "TZ="+e.tz)
	}
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	stdout, err := cmd.StdoutPipe()
	if err != nil {
		return r, err
	}
	if err := cmd.Start(); err != nil {
		return r, err
	}
	lines := bufio.NewScanner(stdout)
	lines.Buffer(nil, 16<<20)
	for lines.Scan() {
		r.add(lines.Bytes())
	}
	err = errors.Join(lines.Err(), cmd.Wait())
	if err != nil {
		r.text("").Write(stderr.Bytes())
	}
	return r, err
}

// add takes one event of test2json.
func (r *result) add(line []byte) {
	var event struct{ Action, Test, Output string }
	if json.Unmarshal(line, &event) != nil {
		r.text("").Write(append(line, '\n'))
		return
	}
	switch {
	case event.Action == "output":
		r.text(event.Test).WriteString(event.Output)
	case event.Test == "":
	case event.Action == "pass":
		r.passed[event.Test] = true
	case event.Action == "skip":
		r.skipped = append(r.skipped, event.Test)
	case event.Action == "fail":
		r.failed = append(r.failed, event.Test)
	}
}

func (r *result) text(test string) *strings.Builder {
	if r.output[test] == nil {
		r.output[test] = &strings.Builder{}
	}
	return r.output[test]
}

// failures is what the failed tests have said, cut to what a person reads.
func (r *result) failures() string {
	const most = 4000
	var all strings.Builder
	for _, test := range append(slices.Sorted(slices.Values(r.failed)), "") {
		if said := strings.TrimSpace(r.text(test).String()); said != "" {
			fmt.Fprintf(&all, "%s\n%s\n", test, said[max(0, len(said)-most):])
		}
	}
	return all.String()
}
