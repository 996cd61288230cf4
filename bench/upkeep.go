package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgonce/pgonce/compensator"
	"github.com/pgonce/pgonce/idempotency"
	"github.com/pgonce/pgonce/internal/audittest"
	"github.com/pgonce/pgonce/txn"
)

// Upkeep: what the compensator's passes cost, and what they cost others.
const (
	upkeepGroup = "upkeep"
	upkeepStale = "upkeep-stale"
	upkeepPurge = "upkeep-purge"
	upkeepPass  = "upkeep-pass"

	upkeepRecords = 1_000_000
	staleUnfit    = 4_000 // of the rule MANUAL, dead for longest: the first pages
	staleFit      = 6_000
	staleLimit    = 60.0 // seconds

	purgeRate   = 50_000.0 // rows a second, at least
	loadRate    = 1_000    // orders a second
	loadTime    = 10 * time.Second
	loadWarm    = 3 * time.Second // before anything counts
	loadPool    = 16
	loadAllowed = 2.0 // times the p99 without a purge

	passSmall, passBig = 100_000, 3_000_000
	passRows           = 1_000 // that are there to be handled, of each kind
	passAllowed        = 2.0   // times the small table's pass; it has 30 times the rows
)

// upkeepResult is what came of it.
type upkeepResult struct {
	StaleSeconds float64   `json:"stale_seconds"`
	Stale        int       `json:"stale"`
	Rescued      [2]int    `json:"rescued_by_replica"`
	RescuedRows  int       `json:"rescued_audit_rows"`
	PurgeRows    int64     `json:"purged_rows"`
	PurgePerS    float64   `json:"purged_per_second_under_load"`
	LoadP99      [2]ms     `json:"load_p99_ms"` // without and with the purge
	LoadP50      [2]ms     `json:"load_p50_ms"`
	LoadRate     [2]int    `json:"load_orders_per_second"`
	PassMS       [2]ms     `json:"pass_ms"` // of the small and of the big table
	Plans        []planned `json:"plans"`
}

type ms = float64

// planned is how a statement of a pass reads, in the small and in the big table.
type planned struct {
	Name    string   `json:"statement"`
	Carrier string   `json:"carried_by"`
	Pages   [2]int64 `json:"pages"`
}

// What -only knows of it: all, or a part.
var upkeepParts = []string{upkeepGroup, upkeepStale, upkeepPurge, upkeepPass}

// wantsUpkeep reports whether one of these parts was asked for.
func (s settings) wantsUpkeep(parts ...string) bool {
	return slices.ContainsFunc(s.only, func(name string) bool { return name == upkeepGroup || slices.Contains(parts, name) })
}

func measureUpkeep(ctx context.Context, w *world, set settings, progress io.Writer) (*upkeepResult, error) {
	say := func(format string, args ...any) { _, _ = fmt.Fprintf(progress, "bench: upkeep: "+format+"\n", args...) }
	r := &upkeepResult{}
	for _, part := range []struct {
		part    string
		name    string
		records int
		measure func(context.Context, *shop, *upkeepResult) error
	}{
		{upkeepStale, "stale records, two replicas", upkeepRecords, measureStale},
		{upkeepPurge, "purge under load", upkeepRecords, measurePurge},
		{upkeepPass, "a pass over a small table", passSmall, func(ctx context.Context, s *shop, r *upkeepResult) error { return measurePass(ctx, s, r, 0) }},
		{upkeepPass, "the same over a big one", passBig, func(ctx context.Context, s *shop, r *upkeepResult) error { return measurePass(ctx, s, r, 1) }},
	} {
		if !set.wantsUpkeep(part.part) {
			continue
		}
		s := &shop{Name: "upkeep", Records: part.records}
		say("%s: filling", part.name)
		if err := s.fill(ctx, w, say); err != nil {
			return nil, fmt.Errorf("fill: %w", err)
		}
		if _, err := w.control.Exec(ctx, `CHECKPOINT`); err != nil {
			return nil, err
		}
		say("%s: measuring", part.name)
		if err := part.measure(ctx, s, r); err != nil {
			return nil, fmt.Errorf("%s: %w", part.name, err)
		}
		if err := s.database.Drop(ctx); err != nil {
			return nil, err
		}
	}
	return r, nil
}

// compensated are the operations, with a retention that keeps what was filled in.
func compensated() (all []idempotency.Operation) {
	for _, name := range audittest.Operations {
		all = append(all, idempotency.Operation{Name: name, Retention: 29 * 24 * time.Hour, Takeover: idempotency.TakeoverRerun})
	}
	return all
}

// upkeepPool is a pool of the shop's, with a compensator.
func (s *shop) upkeepPool(ctx context.Context, size int) (*pgxpool.Pool, *compensator.Compensator, error) {
	pool, err := openPool(ctx, s.database.URL, size, txn.ConfigurePool)
	if err != nil {
		return nil, nil, err
	}
	c, err := compensator.New(pool, &compensator.Config{Operations: compensated()})
	if err != nil {
		pool.Close()
	}
	return pool, c, err
}

// abandon leaves stale records of a rule, dead for this long, with keys of a kind.
const abandon = `INSERT INTO idempotency.records (tenant, operation, key, state, fence, generation, attempt, created_at, acquired_at,
		lease_expires_at, fingerprint, attempt_token, takeover, executor)
	SELECT 'tenant-' || n %% 1000, 'order.create', '%[1]s-%[3]s-' || n, 'PROCESSING', n, n, 1, t.at - interval '1 min', t.at - interval '1 min',
	       t.at, $2, decode(md5('%[1]s%[3]s' || n), 'hex'), '%[1]s', 'web-1:1:00'
	FROM generate_series(1, $1) AS n, LATERAL (SELECT statement_timestamp() - interval '%[2]s' + n * interval '1 ms' AS at) AS t`

// measureStale has two replicas handle what is stale.
func measureStale(ctx context.Context, s *shop, r *upkeepResult) error {
	err := s.with(ctx, func(conn *pgx.Conn) error {
		_, unfit := conn.Exec(ctx, fmt.Sprintf(abandon, "MANUAL", "2 days", ""), staleUnfit, bigFingerprint().Bytes())
		_, fit := conn.Exec(ctx, fmt.Sprintf(abandon, "RERUN", "1 day", ""), staleFit, bigFingerprint().Bytes())
		return errors.Join(unfit, fit)
	})
	if err != nil {
		return err
	}
	var group sync.WaitGroup
	var errs [2]error
	var reports [2]compensator.Report
	var replicas [2]*compensator.Compensator
	for i := range replicas {
		var pool *pgxpool.Pool
		if pool, replicas[i], err = s.upkeepPool(ctx, 8); err != nil {
			return err
		}
		defer pool.Close() //nolint:gocritic // two of them
	}
	begin := time.Now()
	for i, c := range replicas {
		group.Go(func() { reports[i], errs[i] = c.RunOnce(ctx) })
	}
	group.Wait()
	r.StaleSeconds = time.Since(begin).Seconds()
	if err := errors.Join(errs[:]...); err != nil {
		return err
	}
	r.Stale = reports[0].Manual + reports[0].Rescued + reports[1].Rescued
	r.Rescued = [2]int{reports[0].Rescued, reports[1].Rescued}
	return s.with(ctx, func(conn *pgx.Conn) error {
		return conn.QueryRow(ctx, `SELECT count(DISTINCT (tenant, key)) FROM idempotency.attempts WHERE event = 'RESCUED'`).Scan(&r.RescuedRows)
	})
}

// measurePurge places orders at a steady rate, without and with a purge beside them.
func measurePurge(ctx context.Context, s *shop, r *upkeepResult) error {
	err := s.with(ctx, func(conn *pgx.Conn) error {
		for _, sql := range []string{
			`UPDATE idempotency.records SET expires_at = statement_timestamp() - interval '1 hour', result_expires_at = NULL WHERE state <> 'PROCESSING'`,
			`VACUUM ANALYZE idempotency.records`, `CHECKPOINT`,
		} {
			if _, err := conn.Exec(ctx, sql); err != nil {
				return err
			}
		}
		return nil
	})
	if err != nil {
		return err
	}
	pool, err := openPool(ctx, s.database.URL, loadPool, txn.ConfigurePool)
	if err != nil {
		return err
	}
	defer pool.Close()
	runner, err := txn.New(pool, &txn.Config{Operations: []idempotency.Operation{create}})
	if err != nil {
		return err
	}
	defer runner.Close()
	purging, c, err := s.upkeepPool(ctx, 2)
	if err != nil {
		return err
	}
	defer purging.Close()
	if _, err := steadily(ctx, runner, loadWarm); err != nil {
		return err
	}
	for with := range 2 {
		done := make(chan error, 1)
		began := time.Now()
		bounded, stop := context.WithCancel(ctx)
		if with == 1 {
			go func() {
				report, err := c.RunOnce(bounded)
				r.PurgeRows, r.PurgePerS = report.Purged, float64(report.Purged)/time.Since(began).Seconds()
				if errors.Is(err, context.Canceled) {
					err = nil // there was more than it had time for
				}
				done <- err
			}()
		} else {
			done <- nil
		}
		all, err := steadily(ctx, runner, loadTime)
		stop()
		if err := errors.Join(err, <-done); err != nil {
			return err
		}
		slices.Sort(all)
		inMS := func(d time.Duration) ms { return float64(d.Microseconds()) / 1e3 }
		r.LoadP50[with], r.LoadP99[with] = inMS(percentile(all, 50)), inMS(percentile(all, 99))
		r.LoadRate[with] = int(float64(len(all)) / loadTime.Seconds())
	}
	return nil
}

// steadily places orders at loadRate, whatever becomes of those before, and returns their latencies from the time they were
// due.
func steadily(ctx context.Context, runner *txn.Runner, long time.Duration) (all []time.Duration, err error) {
	var mu sync.Mutex
	var group sync.WaitGroup
	begin := time.Now()
	for i := range int(loadRate * long.Seconds()) {
		due := begin.Add(time.Duration(i) * time.Second / loadRate)
		time.Sleep(time.Until(due))
		group.Go(func() {
			o, one := newOrder()
			if one == nil {
				one = placeOnce(ctx, runner, o)
			}
			took := time.Since(due)
			mu.Lock()
			defer mu.Unlock()
			all, err = append(all, took), errors.Join(err, one)
		})
	}
	group.Wait()
	return all, err
}

// measurePass runs a pass that has the same to do in a table of either size, and explains what it asked.
func measurePass(ctx context.Context, s *shop, r *upkeepResult, size int) error {
	sent := &sent{}
	pool, err := openPool(ctx, s.database.URL, 8, txn.ConfigurePool, func(c *pgxpool.Config) { c.ConnConfig.Tracer = sent })
	if err != nil {
		return err
	}
	defer pool.Close()
	c, err := compensator.New(pool, &compensator.Config{Operations: compensated()})
	if err != nil {
		return err
	}
	if _, err := c.RunOnce(ctx); err != nil { // what the table came with
		return err
	}
	if err := s.with(ctx, func(conn *pgx.Conn) error { return s.plant(ctx, conn, "first") }); err != nil {
		return err
	}
	sent.clear()
	report, err := c.RunOnce(ctx)
	if err == nil && (report.Rescued != passRows || report.Purged < passRows) {
		err = fmt.Errorf("the pass has rescued %d and purged %d of %d", report.Rescued, report.Purged, passRows)
	}
	if err != nil {
		return err
	}
	r.PassMS[size] = float64(report.Duration.Microseconds()) / 1e3
	return s.with(ctx, func(conn *pgx.Conn) error {
		if err := s.plant(ctx, conn, "second"); err != nil {
			return err
		}
		for _, one := range sent.lists() {
			plan, err := audittest.Explain(ctx, conn, one.sql, true, one.args...)
			if err != nil {
				return fmt.Errorf("%s: %w", one.name, err)
			}
			i := slices.IndexFunc(r.Plans, func(p planned) bool { return p.Name == one.name })
			if i < 0 {
				i = len(r.Plans)
				r.Plans = append(r.Plans, planned{Name: one.name})
			}
			r.Plans[i].Pages[size], r.Plans[i].Carrier = plan.Root.Hit+plan.Root.Read, plan.Carrier().String()
		}
		return nil
	})
}

// plant makes what a pass is to handle: stale records, and records past their time.
func (s *shop) plant(ctx context.Context, conn *pgx.Conn, which string) error {
	_, err := conn.Exec(ctx, `UPDATE idempotency.records SET expires_at = statement_timestamp() - interval '1 second'
		WHERE ctid = ANY (ARRAY(SELECT ctid FROM idempotency.records WHERE state = 'SUCCESS' ORDER BY expires_at DESC LIMIT $1))`, passRows)
	if err != nil {
		return err
	}
	_, err = conn.Exec(ctx, fmt.Sprintf(abandon, "RERUN", "1 day", which), passRows, bigFingerprint().Bytes())
	return err
}

// sent notes the statements of a pass, each of them once.
type sent struct {
	mu  sync.Mutex
	all []sentStatement
}

type sentStatement struct {
	name, sql string
	args      []any
}

// TraceQueryStart is called for every statement.
func (s *sent) TraceQueryStart(ctx context.Context, _ *pgx.Conn, data pgx.TraceQueryStartData) context.Context {
	first, _, _ := strings.Cut(data.SQL, "\n")
	name, is := strings.CutPrefix(first, "-- name: ")
	if name, _, _ = strings.Cut(name, " "); !is {
		return ctx
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if !slices.ContainsFunc(s.all, func(one sentStatement) bool { return one.name == name }) {
		s.all = append(s.all, sentStatement{name, data.SQL, data.Args})
	}
	return ctx
}

// TraceQueryEnd does nothing.
func (*sent) TraceQueryEnd(context.Context, *pgx.Conn, pgx.TraceQueryEndData) {}

func (s *sent) clear() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.all = nil
}

// lists are the statements that look for what is to be done: those whose cost could grow with the table.
func (s *sent) lists() (lists []sentStatement) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, one := range s.all {
		if strings.HasSuffix(one.name, "List") {
			lists = append(lists, one)
		}
	}
	return lists
}
