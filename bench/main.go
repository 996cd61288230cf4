// Command bench measures what an order costs with pgonce, beside the same order without it and beside the usual
// hand-written way, and what a replay and a crowd of waiters cost. The variants of a group take turns in short slices of
// one run, so that their ratios hold where their absolute numbers do not.
package main

import (
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/signal"
	"runtime/pprof"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"
)

// settings are what the command line says.
type settings struct {
	levels   []int         // numbers of concurrent callers
	duration time.Duration // measured per variant and level
	rounds   int
	only     []string // groups and variants; empty: all
	json     bool
	check    bool
	profile  string
	buffers  string
	records  int // of the big tables
}

// errMissed ends a run with -check that missed a target.
var errMissed = errors.New("a target was missed")

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	err := run(ctx, os.Args[1:], os.Stdout, os.Stderr)
	stop()
	if errors.Is(err, flag.ErrHelp) {
		return
	}
	if err != nil {
		_, _ = fmt.Fprintln(os.Stderr, "bench:", err)
		os.Exit(1)
	}
}

func parse(args []string, out io.Writer) (settings, error) {
	var s settings
	var levels, only string
	flags := flag.NewFlagSet("bench", flag.ContinueOnError)
	flags.SetOutput(out)
	flags.StringVar(&levels, "c", "1,8,32", "numbers of concurrent callers")
	flags.DurationVar(&s.duration, "duration", 3*time.Second, "measured time of every variant at every number of callers")
	flags.IntVar(&s.rounds, "rounds", 5, "rounds the duration is divided into; results are medians over them")
	flags.StringVar(&only, "only", "", "groups (fresh, replay, fronted, fronted-replay, http, waiting, storm, lookup, upkeep, big) or variants to run, separated by commas (default all but upkeep and big)")
	flags.BoolVar(&s.json, "json", false, "write JSON instead of tables")
	flags.BoolVar(&s.check, "check", false, "exit with 1 if a target is missed")
	flags.StringVar(&s.buffers, "buffers", "", "shared_buffers of the server (default 256MB; for -only big 1 GB for each million records)")
	flags.IntVar(&s.records, "records", 5_000_000, "records of the big tables, for -only big")
	flags.StringVar(&s.profile, "profile", "", "write a CPU profile of this program (not of the server) to this `file`")
	if err := flags.Parse(args); err != nil {
		return s, err
	}
	for _, text := range strings.Split(levels, ",") {
		c, err := strconv.Atoi(text)
		if err != nil || c < 1 || c > 64 {
			return s, fmt.Errorf("-c: must be numbers from 1 to 64, separated by commas, is %q", levels)
		}
		s.levels = append(s.levels, c)
	}
	if only != "" {
		s.only = strings.Split(only, ",")
	}
	if s.records < 2*smallRecords {
		return s, fmt.Errorf("-records: must be at least %d", 2*smallRecords)
	}
	known := names()
	for _, name := range s.only {
		if !slices.Contains(known, name) {
			return s, fmt.Errorf("-only: must be some of %s, is %q", strings.Join(known, ", "), name)
		}
	}
	switch {
	case s.buffers != "":
	case s.wantsUpkeep(upkeepParts...):
		s.buffers = "4GB"
	case s.wantsBig(bigParts...):
		s.buffers = fmt.Sprintf("%dGB", max(1, s.records/1_000_000))
	default:
		s.buffers = "256MB"
	}
	if s.rounds < 1 || s.duration < time.Duration(s.rounds)*10*time.Millisecond {
		return s, errors.New("-duration: must be at least 10ms per round")
	}
	return s, nil
}

// names are what -only knows: groups and variants.
func names() []string {
	var all []string
	for _, g := range groups {
		all = append(append(all, g.name), g.names...)
	}
	for _, kind := range waitings {
		all = append(all, kind.name) // the first one is called like its group
	}
	return slices.Concat(all, []string{"storm", "lookup"}, upkeepParts, bigParts)
}

// What needs a Redis.
var redisParts = slices.Concat([]string{fronted.name, frontedReplay.name, "storm"}, fronted.names, frontedReplay.names)

// wants reports whether -only names one of these.
func (s settings) wants(names ...string) bool {
	return s.only == nil || slices.ContainsFunc(names, func(name string) bool { return slices.Contains(s.only, name) })
}

func run(ctx context.Context, args []string, stdout, stderr io.Writer) (err error) {
	s, err := parse(args, stderr)
	if err != nil {
		return err
	}
	w, err := newWorld(ctx, s.buffers, s.wants(redisParts...), stderr)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, w.close()) }()
	if s.profile != "" {
		file, err := os.Create(s.profile)
		if err != nil {
			return err
		}
		defer file.Close() //nolint:errcheck // StopCPUProfile has written everything it could
		if err := pprof.StartCPUProfile(file); err != nil {
			return err
		}
		defer pprof.StopCPUProfile()
	}
	r := report{Machine: w.machine}
	for _, g := range groups {
		if err := r.measureGroup(ctx, w, s, g, stderr); err != nil {
			return fmt.Errorf("%s: %w", g.name, err)
		}
	}
	for _, kind := range waitings {
		if s.wants(waitings[0].name, kind.name) {
			_, _ = fmt.Fprintf(stderr, "bench: waiting: %s\n", kind.name)
			result, err := measureWaiting(ctx, w, kind, s.rounds)
			if err != nil {
				return fmt.Errorf("%s: %w", kind.name, err)
			}
			r.Waiting = append(r.Waiting, result)
		}
	}
	if s.wants("storm") {
		for _, runners := range []int{1, 3} {
			_, _ = fmt.Fprintf(stderr, "bench: storm: %d runners\n", runners)
			result, err := measureStorm(ctx, w, runners, s.rounds)
			if err != nil {
				return fmt.Errorf("storm: %w", err)
			}
			r.Storms = append(r.Storms, result)
		}
	}
	if s.wants("lookup") {
		_, _ = fmt.Fprintln(stderr, "bench: lookup")
		if r.Lookups, err = measureLookups(ctx); err != nil {
			return fmt.Errorf("lookup: %w", err)
		}
	}
	if s.wantsBig(bigParts...) {
		if err := r.measureBig(ctx, w, s, stderr); err != nil {
			return fmt.Errorf("%s: %w", bigGroup, err)
		}
	}
	if s.wantsUpkeep(upkeepParts...) {
		if r.Upkeep, err = measureUpkeep(ctx, w, s, stderr); err != nil {
			return fmt.Errorf("%s: %w", upkeepGroup, err)
		}
	}
	r.Targets = targets(&r)
	if s.json {
		encoder := json.NewEncoder(stdout)
		encoder.SetIndent("", "  ")
		err = encoder.Encode(r)
	} else {
		err = r.print(stdout)
	}
	if err == nil && s.check && slices.ContainsFunc(r.Targets, func(t target) bool { return t.missed() }) {
		return errMissed
	}
	return err
}

// measureGroup adds the cells of one group to the report.
func (r *report) measureGroup(ctx context.Context, w *world, s settings, g group, progress io.Writer) error {
	wanted := func(v variant) bool { return s.wants(g.name, v.name) }
	if !s.wants(append(g.names, g.name)...) {
		return nil
	}
	counts, err := countApart(ctx, w, g, wanted)
	if err != nil {
		return err
	}
	for _, c := range s.levels {
		_, _ = fmt.Fprintf(progress, "bench: %s: %d callers\n", g.name, c)
		cells, err := measureLevel(ctx, w, g, wanted, c, s)
		if err != nil {
			return err
		}
		for i := range cells {
			n := counts[cells[i].Variant]
			cells[i].RoundTrips, cells[i].Allocs = n.trips, n.allocs
		}
		compare(cells, g.baselines)
		r.Cells = append(r.Cells, cells...)
	}
	return nil
}
