// Command planted asks whether the tests bite: it plants known bugs one at a time, runs the tests that should notice, and
// fails unless every one of them goes red.
//
//	go run ./internal/planted            # all plants
//	go run ./internal/planted -run name  # those whose name matches
//
// No file of the working tree is touched: a plant is a changed copy in a temporary folder, which the compiler gets in
// place of the original (go test -overlay).
package main

import (
	"context"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"path/filepath"
	"regexp"
	"strings"
	"syscall"
	"time"
)

func main() {
	only := flag.String("run", "", "plant only the bugs whose name matches this regular expression")
	root := flag.String("root", ".", "folder of the module")
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	err := runAll(ctx, *root, *only)
	stop()
	if err != nil {
		fmt.Fprintln(os.Stderr, "planted:", err)
		os.Exit(1)
	}
}

func runAll(ctx context.Context, root, only string) (err error) {
	pattern, err := regexp.Compile(only)
	if err != nil {
		return err
	}
	var chosen []plant
	for _, p := range plants {
		if pattern.MatchString(p.name) {
			chosen = append(chosen, p)
		}
	}
	if len(chosen) == 0 {
		return fmt.Errorf("no plant is named like %q", only)
	}
	root, err = filepath.Abs(root)
	if err != nil {
		return err
	}
	f, err := newField(root)
	if err != nil {
		return err
	}
	defer f.close()
	say := func(format string, a ...any) { _, _ = fmt.Fprintf(os.Stdout, "planted: "+format+"\n", a...) }
	began := time.Now()
	if err := f.unplanted(ctx, chosen); err != nil {
		return fmt.Errorf("without any plant: %w", err)
	}
	say("%-44s %5.1f s  green, as it must be", "nothing", time.Since(began).Seconds())
	lines, failed := f.tryAll(ctx, chosen), 0
	for _, p := range chosen {
		line := <-lines[p.name]
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
		if line.err != nil {
			failed++
			say("%-44s %5.1f s  ERROR: %v", p.name, line.took.Seconds(), line.err)
			continue
		}
		say("%-44s %5.1f s  caught by %s", p.name, line.took.Seconds(), line.caught)
	}
	say("%d bugs, %d caught, in %.0f s", len(chosen), len(chosen)-failed, time.Since(began).Seconds())
	if failed > 0 {
		return fmt.Errorf("%d of %d plants: see above", failed, len(chosen))
	}
	return nil
}

// line is what became of a plant.
type line struct {
	caught string
	err    error
	took   time.Duration
}

// tryAll tries two plants at a time: one builds while the other's tests wait.
func (f *field) tryAll(ctx context.Context, plants []plant) map[string]chan line {
	lines, two := map[string]chan line{}, make(chan struct{}, 2)
	for _, p := range plants {
		lines[p.name] = make(chan line, 1)
	}
	go func() {
		for _, p := range plants {
			two <- struct{}{}
			go func() {
				began := time.Now()
				caught, err := f.try(ctx, p)
				lines[p.name] <- line{caught, err, time.Since(began)}
				<-two
			}()
		}
	}()
	return lines
}

// short names a package and its tests for people.
func (s suite) String() string {
	text := strings.TrimPrefix(s.pkg, "./") + " -run '" + s.run + "'"
	if s.skip != "" {
		text += " -skip '" + s.skip + "'"
	}
	return text
}
