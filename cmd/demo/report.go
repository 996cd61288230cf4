package main

import (
	"encoding/json"
	"fmt"
	"io"
	"math"
	"strconv"
	"time"
)

// report is what came of a storm.
type report struct {
	Requests     int64   `json:"requests"` // the sum of the next five
	Executed     int64   `json:"executed"`
	Replayed     int64   `json:"replayed"`
	InProgress   int64   `json:"in_progress"`
	Disconnected int64   `json:"disconnected"`
	Errors       int64   `json:"errors"`
	Orders       int64   `json:"orders"`
	Duplicates   int64   `json:"duplicates"` // keys with more than one order
	Lost         int64   `json:"lost"`       // clients who were not told the truth
	P50          float64 `json:"p50_ms"`
	P99          float64 `json:"p99_ms"`

	// Who gave the replays; the sum of these three is Replayed.
	ByLocal      int64 `json:"replayed_by_local"`
	ByRedis      int64 `json:"replayed_by_redis"`
	ByPostgreSQL int64 `json:"replayed_by_postgresql"`
	Merged       int64 `json:"replayed_merged"` // of ByLocal: those that waited for a concurrent call of their key

	Statements int64   `json:"statements"` // sent to PostgreSQL by the service, see countStatements
	PerRequest float64 `json:"statements_per_request"`

	keys, unsettled int64
	firstError      string
	latencies       histogram
}

// add counts one request.
func (r *report) add(t *told) {
	r.Requests++
	*[outcomes]*int64{
		executed: &r.Executed, replayed: &r.Replayed, inProgress: &r.InProgress,
		disconnected: &r.Disconnected, failed: &r.Errors,
	}[t.outcome]++
	if t.outcome == failed && r.firstError == "" {
		r.firstError = t.detail
	}
	if t.outcome != disconnected {
		r.latencies.add(t.took)
	}
	if t.outcome != replayed {
		return
	}
	switch t.by {
	case byMerged:
		r.Merged++
		r.ByLocal++
	case byLocal:
		r.ByLocal++
	case byRedis:
		r.ByRedis++
	default:
		r.ByPostgreSQL++
	}
}

// setStatements is called when all requests have been counted.
func (r *report) setStatements(n int64) {
	r.Statements = n
	r.PerRequest = math.Round(float64(n)/float64(max(r.Requests, 1))*100) / 100
}

// good reports whether every order was made once and every client told the truth.
func (r *report) good() bool {
	return r.Duplicates == 0 && r.Lost == 0 && r.Errors == 0 && r.unsettled == 0
}

// print prints the table for people.
func (r *report) print(out io.Writer, took time.Duration) {
	column := func(value string, width int) string { return fmt.Sprintf("%*s", width, value) }
	line := func(parts ...string) {
		for _, p := range parts {
			_, _ = io.WriteString(out, p)
		}
		_, _ = io.WriteString(out, "\n")
	}
	line("What the clients were told:")
	line("  requests = executed + replayed + in progress + disconnected + errors")
	line(column(thousands(r.Requests), 10), column(thousands(r.Executed), 11), column(thousands(r.Replayed), 11),
		column(thousands(r.InProgress), 14), column(thousands(r.Disconnected), 15), column(thousands(r.Errors), 9))
	line()
	line("Who gave the replays, and what all of it cost:")
	line("  replayed = by local + by Redis + by PostgreSQL     statements   per request")
	line(column(thousands(r.Replayed), 10), column(thousands(r.ByLocal), 11), column(thousands(r.ByRedis), 11),
		column(thousands(r.ByPostgreSQL), 16), column(thousands(r.Statements), 15),
		column(strconv.FormatFloat(r.PerRequest, 'f', 2, 64), 14))
	line()
	line("What the database says:")
	line("      keys     orders   duplicates   lost        p50        p99")
	line(column(thousands(r.keys), 10), column(thousands(r.Orders), 11), column(thousands(r.Duplicates), 13),
		column(thousands(r.Lost), 7), column(milliseconds(r.P50), 11), column(milliseconds(r.P99), 11))
	line()
	line(fmt.Sprintf("  by local: from the instance's memory, %s of them merged with a concurrent request for the same key.", thousands(r.Merged)))
	line("  statements: what the service sent to PostgreSQL, also BEGIN and COMMIT, and what it asks in the background.")
	line("  duplicates: keys with more than one order. lost: clients whose answer is not what the database says.")
	line(fmt.Sprintf("  The storm took %s. p50 and p99 are of the answers; a client that hung up got none.", took.Round(100*time.Millisecond)))
	line()
	if r.firstError != "" {
		line("  The first error was: ", r.firstError)
	}
	if r.unsettled > 0 {
		line(fmt.Sprintf("  %s keys had no definite answer before their requests were used up.", thousands(r.unsettled)))
	}
	if r.good() {
		line(fmt.Sprintf("Every one of the %s keys has one order, and every client was told the truth.", thousands(r.keys)))
	} else {
		line("NOT GOOD: not every key has one order and a client that knows of it.")
	}
}

func (r *report) printJSON(out io.Writer) error { return json.NewEncoder(out).Encode(r) }

// explainUnsafe says what a storm without the library shows.
func (r *report) explainUnsafe(out io.Writer) {
	_, _ = fmt.Fprintf(out, `This was -unsafe: the same clients, the same transaction, and nobody looks at the key. %s keys wanted %s
orders and got %s: each retry, each second click and many of those who hung up bought again. A status of 1
is the point of it. Run the demo without -unsafe to see the same storm with the library.
`, thousands(r.keys), thousands(r.keys), thousands(r.Orders))
}

func milliseconds(ms float64) string { return strconv.FormatFloat(ms, 'f', 1, 64) + " ms" }

// thousands writes 1234567 as 1,234,567.
func thousands(n int64) string {
	s := strconv.FormatInt(n, 10)
	for i := len(s) - 3; i > 0; i -= 3 {
		s = s[:i] + "," + s[i:]
	}
	return s
}
