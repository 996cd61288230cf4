package main

import (
	"fmt"
	"slices"
	"strings"
	"time"
)

// target is a promise and what became of it.
type target struct {
	Name   string  `json:"name"`
	Want   float64 `json:"want"`
	Got    float64 `json:"got"`
	Spread string  `json:"spread,omitempty"` // smallest and largest round
	Passed bool    `json:"passed"`
	// Note says why the comparison does not count.
	Note string `json:"note,omitempty"`
}

func (t target) missed() bool { return !t.Passed && t.Note == "" }

// The naive way is itself between these shares of the bare order where the targets were set. On a machine where it is
// not, the ratio to it says something else.
const naiveLow, naiveHigh = 0.5, 0.65

var (
	freshTargets  = map[int]float64{1: 1.35, 8: 1.28, 32: 1.28}
	replayTargets = map[string]float64{"replay-retry": 0.90, "replay": 0.40}
)

const (
	hybridTarget      = 0.85 // at 8 callers
	redisReplayTarget = 1.2  // at 32 callers
	lookupNS          = 500
	lookupAllocs      = 1

	middlewareTarget = 0.95 // at 8 callers
	middlewareAllocs = 40

	othersTarget = 0.9
	bigTarget    = 0.9
	findLimit    = 3 * time.Second
)

// bigBaselines are the variants on big tables that a target is about: replays of any record, and of the youngest, since a
// duplicate comes soon after its first.
var bigBaselines = map[string]string{
	"fresh-big": "fresh-100k", "retry-big": "retry-100k", "replay-big": "replay-100k",
	"retry-big-recent": "retry-100k", "replay-big-recent": "replay-100k",
}

// stormTrips are what a storm may cost, by the number of runners.
var stormTrips = map[int]float64{1: 500, 3: 1200}

// findTarget is about the slowest look-up of a key's value alone.
func (b *bigResult) findTarget() target {
	slowest := 0.0
	for _, q := range b.Questions {
		if strings.HasPrefix(q.Title, "11.") && q.Guide == auditGuide {
			slowest = max(slowest, q.FirstMS, q.AgainMS)
		}
	}
	t := target{Name: "a key's value alone: 3 s / its time", Want: 1}
	if slowest > 0 {
		t.Got = milliseconds(findLimit) / slowest
	}
	t.Passed = t.Got >= t.Want
	return t
}

// targets holds the report against what was promised, as far as it was measured.
func targets(r *report) []target {
	var all []target
	add := func(name string, want float64, got ratio, note string) {
		all = append(all, target{
			Name: name, Want: want, Got: got.Median, Spread: fmt.Sprintf("%.2f to %.2f", got.Min, got.Max),
			Passed: got.Median >= want, Note: note,
		})
	}
	for _, c := range r.Cells {
		toNaive, naiveRan := c.ToBase["naive"]
		if want := freshTargets[c.Callers]; c.Variant == "pgonce" && naiveRan && want > 0 {
			add(fmt.Sprintf("fresh order, c=%d: pgonce / naive", c.Callers), want, toNaive, r.naiveNote(c.Callers))
		}
		toSelect, selectRan := c.ToBase["select"]
		if want := replayTargets[c.Variant]; want > 0 && selectRan {
			add(fmt.Sprintf("replay, c=%d: %s / select", c.Callers, c.Variant), want, toSelect, "")
		}
	}
	for _, c := range r.Cells {
		if q, ok := c.ToBase["strict"]; ok && c.Variant == "hybrid" && c.Callers == 8 {
			add("fresh order, c=8: hybrid / strict", hybridTarget, q, "")
		}
		if q, ok := c.ToBase["replay-pg"]; ok && c.Variant == "replay-redis" && c.Callers == 32 {
			add("replay, c=32: Redis / PostgreSQL", redisReplayTarget, q, "")
		}
	}
	for _, c := range r.Cells {
		if q, ok := c.ToBase["http-by-hand"]; ok && c.Variant == "http-middleware" && c.Callers == 8 {
			add("fresh order, c=8: middleware / WithIdempotency by hand", middlewareTarget, q, "")
		}
	}
	// The rest are limits: the share of them that is not used up.
	limit := func(name string, allowed, got float64) {
		t := target{Name: fmt.Sprintf("%s: %.0f / %.0f", name, allowed, got), Want: 1, Got: allowed / max(got, 1e-9)}
		t.Passed = got <= allowed
		all = append(all, t)
	}
	if byHand, ok := r.allocs("http-by-hand"); ok {
		if got, ok := r.allocs("http-middleware"); ok {
			limit("middleware, allocations above WithIdempotency by hand", middlewareAllocs, got-byHand)
		}
	}
	for _, s := range r.Storms {
		limit(fmt.Sprintf("storm, %d processes, round trips", s.Runners), stormTrips[s.Runners], s.Trips)
		limit(fmt.Sprintf("storm, %d processes, executions", s.Runners), stormKeys, s.Executions)
	}
	for _, l := range r.Lookups {
		limit("look-up, "+l.Name+", ns", lookupNS, l.NS)
		limit("look-up, "+l.Name+", allocations", lookupAllocs, float64(l.Allocs))
	}
	if r.Upkeep != nil {
		all = append(all, r.Upkeep.targets()...)
	}
	if r.Big != nil {
		for _, c := range r.Cells {
			if base := bigBaselines[c.Variant]; base != "" {
				add(fmt.Sprintf("c=%d: %s / %s", c.Callers, c.Variant, base), bigTarget, c.ToBase[base], "")
			}
		}
		if len(r.Big.Questions) > 0 {
			all = append(all, r.Big.findTarget())
		}
	}
	for _, w := range r.Waiting {
		if w.Name != "waiting" {
			continue // the other one is for information
		}
		all = append(all, target{
			Name: "waiting: replays", Want: float64(w.Waiters), Got: float64(w.Replays), Passed: w.Replays == w.Waiters,
		})
		add("waiting: other orders with / without waiters", othersTarget, w.Others, "")
	}
	return all
}

// allocs of a variant's operation.
func (r *report) allocs(variant string) (n float64, ran bool) {
	i := slices.IndexFunc(r.Cells, func(c cell) bool { return c.Variant == variant })
	if i < 0 {
		return 0, false
	}
	return r.Cells[i].Allocs, true
}

// naiveNote is empty where the comparison with naive counts.
func (r *report) naiveNote(callers int) string {
	i := slices.IndexFunc(r.Cells, func(c cell) bool { return c.Variant == "naive" && c.Callers == callers })
	toBare, ok := r.Cells[i].ToBase["bare"]
	switch {
	case !ok:
		return "bare was not run, so nobody knows whether naive is what it should be"
	case toBare.Median < naiveLow-0.005 || toBare.Median > naiveHigh+0.005: // as printed, with two digits
		return fmt.Sprintf("naive is %.2f of bare here; the target was set where it is %.2f to %.2f", toBare.Median, naiveLow, naiveHigh)
	}
	return ""
}
