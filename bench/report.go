package main

import (
	"fmt"
	"io"
	"slices"
	"text/tabwriter"
)

// report is everything a run has found out.
type report struct {
	Machine machine         `json:"machine"`
	Cells   []cell          `json:"cells"`
	Waiting []waitingResult `json:"waiting,omitempty"`
	Storms  []stormResult   `json:"storms,omitempty"`
	Lookups []lookupResult  `json:"lookups,omitempty"`
	Upkeep  *upkeepResult   `json:"upkeep,omitempty"`
	Big     *bigResult      `json:"big,omitempty"`
	Targets []target        `json:"targets"`

	groups []group // those of the big tables, which are made when they run
}

// meanings say what each variant is.
var meanings = map[string]string{
	"bare":            "BEGIN, INSERT order, UPDATE stock, COMMIT",
	"naive":           "BEGIN, SELECT key, INSERT PROCESSING, INSERT order, UPDATE stock, UPDATE record, COMMIT; a copy of our table",
	"naive-lean":      "the same without the table's two partial indexes, so that its UPDATE is HOT",
	"floor":           "bare, with one INSERT of key and result in the flush of COMMIT: what any record must cost, and proves nothing",
	"pgonce":          "txn.WithIdempotency around the same two statements",
	"select":          "primary-key SELECT of all columns of a record, scanned by pgx",
	"replay-retry":    "WithIdempotency with Request.Retry: a lookup",
	"replay":          "WithIdempotency without Retry: acquires first; measured before the runner learns of the duplicates",
	"replay-adaptive": "the same once it has learned: it looks up first, as with Retry",
	"waiting":         "100 waiters on one order of 1.5 s, a pool of 10, 8 others placing orders: one process",
	"waiting-apart":   "the same with a runner for every waiter, as in 100 processes, all on the one pool of 10",

	"strict":       "txn.WithIdempotency without fronts",
	"hybrid":       "the same with a local front and Redis: both are told, Redis is not asked while there are no duplicates",
	"replay-pg":    "replay with Request.Retry, without fronts",
	"replay-redis": "the same with Redis alone",
	"replay-local": "the same with a local front alone",

	"http-bare":       "an HTTP handler around the bare order",
	"http-by-hand":    "the same handler calling txn.WithIdempotency itself, with the request's key and fingerprint",
	"http-middleware": "the same handler by idempotencyhttp's middleware, which records its whole response",

	"fresh-100k":        "a fresh order of one of 10,000 pairs of tenant and operation, UUIDv7 keys, 100,000 records",
	"fresh-big":         "the same with the many records",
	"fresh-100k-random": "as fresh-100k with UUIDv4 keys, old and new",
	"fresh-big-random":  "the same with the many records",
	"retry-100k":        "replay of a record by chance, with Request.Retry",
	"retry-big":         "the same of the many records",
	"retry-big-recent":  "the same of the 90,000 youngest of them",
	"replay-100k":       "replay of a record by chance, without Retry, before the runner learns",
	"replay-big":        "the same of the many records",
	"replay-big-recent": "the same of the 90,000 youngest of them",
}

func (r *report) print(out io.Writer) error {
	t := tabwriter.NewWriter(out, 0, 0, 2, ' ', tabwriter.AlignRight)
	line := func(format string, args ...any) { _, _ = fmt.Fprintf(t, format+"\n", args...) } // Flush returns the error
	text := func(format string, args ...any) {
		_ = t.Flush() // the last Flush returns it again
		_, _ = fmt.Fprintf(out, format+"\n", args...)
	}
	m := r.Machine
	text("PostgreSQL %s, %s, %s, %d CPUs, fsync of 8 KiB %.0f us", m.Postgres, m.Go, m.Platform, m.CPUs, m.SyncUS)
	for _, g := range slices.Concat(groups, r.groups) {
		first := true
		for _, c := range r.Cells {
			if c.Group != g.name {
				continue
			}
			if first {
				text("\n%s", g.name)
				header := "c\tvariant\tops/s\t"
				for _, base := range g.baselines {
					header += "x " + base + "\t"
				}
				line("%s", header+"p50 ms\tp99 ms\tWAL B/op\tround trips\tallocs\t")
				first = false
			}
			row := fmt.Sprintf("%d\t%s\t%.0f\t", c.Callers, c.Variant, c.OpsPerSec)
			for _, base := range g.baselines {
				if q, ok := c.ToBase[base]; ok {
					row += fmt.Sprintf("%.2f", q.Median)
				}
				row += "\t"
			}
			line("%s%.3f\t%.3f\t%.0f\t%.2f\t%.0f\t", row, c.P50, c.P99, c.WALBytes, c.RoundTrips, c.Allocs)
		}
	}
	if len(r.Waiting) > 0 {
		text("\nwaiting")
		line("variant\treplays\tothers/s with\twithout\tratio\tlast answer ms after the end\t")
		for _, w := range r.Waiting {
			line("%s\t%d of %d\t%.0f\t%.0f\t%.2f\t%.0f\t", w.Name, w.Replays, w.Waiters, w.With, w.Without, w.Others.Median, w.WaiterMS)
		}
	}
	if len(r.Storms) > 0 {
		text("\nstorm of %d callers and %d keys", stormCallers, stormKeys)
		line("processes\texecutions\tround trips to PostgreSQL\tms\t")
		for _, s := range r.Storms {
			line("%d\t%.0f\t%.0f\t%.0f\t", s.Runners, s.Executions, s.Trips, s.MS)
		}
	}
	if len(r.Lookups) > 0 {
		text("\nlocal front, one hit with its check of key, epoch and fingerprint")
		line("cache\tns\tallocations\t")
		for _, l := range r.Lookups {
			line("%s\t%.0f\t%d\t", l.Name, l.NS, l.Allocs)
		}
	}
	if r.Upkeep != nil {
		r.Upkeep.print(text, line)
	}
	if r.Big != nil {
		r.Big.print(text, line)
	}
	text("\ntargets (median of the rounds, smallest and largest round)")
	for _, target := range r.Targets {
		text("  %s", target)
	}
	text("\nvariants")
	for _, name := range r.variants() {
		text("  %-17s %s", name, meanings[name])
	}
	return t.Flush()
}

func (t target) String() string {
	verdict := "pass"
	switch {
	case t.Note != "":
		verdict = "n/a "
	case !t.Passed:
		verdict = "MISS"
	}
	s := fmt.Sprintf("%s  %s: %.2f, wanted %.2f", verdict, t.Name, t.Got, t.Want)
	if t.Spread != "" {
		s += " (" + t.Spread + ")"
	}
	if t.Note != "" {
		s += "; " + t.Note
	}
	return s
}

// variants are the names that were run, in the order of the tables.
func (r *report) variants() []string {
	var names []string
	seen := map[string]bool{}
	add := func(name string) {
		if !seen[name] {
			seen[name] = true
			names = append(names, name)
		}
	}
	for _, c := range r.Cells {
		add(c.Variant)
	}
	for _, w := range r.Waiting {
		add(w.Name)
	}
	return names
}
