package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/pgonce/pgonce/db"
	"github.com/pgonce/pgonce/idempotency"
	"github.com/pgonce/pgonce/internal/audittest"
	"github.com/pgonce/pgonce/internal/devstack"
)

// Big tables: what an order, a replay and a question cost with 5 million records, beside the same with 100,000.
const (
	bigGroup     = "big"
	smallRecords = 100_000
)

// shop is one of the databases that are compared.
type shop struct {
	Name    string  `json:"name"`
	Records int     `json:"records"`
	Seconds float64 `json:"fill_seconds"`
	Table   int64   `json:"table_bytes"`
	Primary int64   `json:"primary_key_bytes"`
	Indexes int64   `json:"all_indexes_bytes"`
	Disk    int64   `json:"database_bytes"`

	random     bool
	database   *devstack.Database
	operations []idempotency.Operation
	keys       []placed // for replays: a sample of all records
	recent     []placed // the youngest ones
}

// bigResult is what came of the big tables beside the cells.
type bigResult struct {
	Shops       []*shop           `json:"databases"`
	Buffers     string            `json:"shared_buffers"`
	WALBytes    int64             `json:"wal_on_disk_bytes"`
	Checkpoints []afterCheckpoint `json:"after_a_checkpoint"`
	Questions   []answered        `json:"questions"`
}

// What -only knows of it: all, or a part.
var bigParts = []string{
	bigGroup, "big-fresh", "big-fresh-random", "big-retry", "big-retry-recent", "big-replay", "big-replay-recent",
	"big-checkpoint", "big-questions",
}

// wantsBig reports whether one of these parts was asked for: minutes and gigabytes, only who asks gets them.
func (s settings) wantsBig(parts ...string) bool {
	return slices.ContainsFunc(s.only, func(name string) bool { return name == bigGroup || slices.Contains(parts, name) })
}

func (r *report) measureBig(ctx context.Context, w *world, s settings, progress io.Writer) error {
	say := func(format string, args ...any) { _, _ = fmt.Fprintf(progress, "bench: big: "+format+"\n", args...) }
	say("filling takes some minutes and, with the log, up to %d GB of disk", 9+3*s.records/1_000_000)
	small, random := &shop{Name: "100k", Records: smallRecords}, &shop{Name: "100k-random", Records: smallRecords, random: true}
	big, bigRandom := &shop{Name: "big", Records: s.records}, &shop{Name: "big-random", Records: s.records, random: true}
	shops := []*shop{small, big}
	if s.wantsBig("big-fresh-random", "big-checkpoint") {
		shops = append(shops, random, bigRandom)
	}
	for _, one := range shops {
		if err := one.fill(ctx, w, say); err != nil {
			return fmt.Errorf("fill %s: %w", one.Name, err)
		}
	}
	// Now, and not while something is measured.
	if _, err := w.control.Exec(ctx, `CHECKPOINT`); err != nil {
		return err
	}
	for _, one := range shops {
		if err := one.settle(ctx); err != nil {
			return fmt.Errorf("look at %s: %w", one.Name, err)
		}
	}
	r.Big = &bigResult{Shops: shops, Buffers: s.buffers}
	if err := w.control.QueryRow(ctx, `SELECT sum(size)::bigint FROM pg_ls_waldir()`).Scan(&r.Big.WALBytes); err != nil {
		return err
	}

	every := s
	every.only = nil
	for _, g := range bigGroups(small, big, random, bigRandom) {
		if !s.wantsBig(g.name) {
			continue
		}
		if g.reads {
			// A read that has to make room for its page would write somebody else's order first.
			if _, err := w.control.Exec(ctx, `CHECKPOINT`); err != nil {
				return err
			}
		}
		if err := r.measureGroup(ctx, w, every, g, progress); err != nil {
			return fmt.Errorf("%s: %w", g.name, err)
		}
		r.groups = append(r.groups, g)
	}
	var err error
	if s.wantsBig("big-checkpoint") {
		say("after a checkpoint")
		if r.Big.Checkpoints, err = measureCheckpoints(ctx, w, s.rounds, small, big, random, bigRandom); err != nil {
			return fmt.Errorf("after a checkpoint: %w", err)
		}
	}
	for _, one := range shops {
		if one == big {
			continue
		}
		if err := one.database.Drop(ctx); err != nil { // its disk
			return err
		}
	}
	if s.wantsBig("big-questions") {
		if r.Big.Questions, err = askQuestions(ctx, big, say); err != nil {
			return fmt.Errorf("questions: %w", err)
		}
	}
	return big.database.Drop(ctx)
}

// with runs f on a connection of its own: a database that somebody is connected to cannot be copied.
func (s *shop) with(ctx context.Context, f func(*pgx.Conn) error) error {
	conn, err := pgx.Connect(ctx, s.database.URL)
	if err != nil {
		return err
	}
	return errors.Join(f(conn), conn.Close(context.WithoutCancel(ctx)))
}

func (s *shop) fill(ctx context.Context, w *world, say func(string, ...any)) (err error) {
	if s.database, err = w.stack.CreateDatabase(ctx); err != nil {
		return err
	}
	begin := time.Now()
	err = s.with(ctx, func(conn *pgx.Conn) error {
		for _, sql := range []string{db.InstallSQL(), schemaSQL} {
			if _, err := conn.PgConn().Exec(ctx, sql).ReadAll(); err != nil {
				return err
			}
		}
		return audittest.Fill{
			Records: s.Records, RandomKeys: s.random, Fingerprint: bigFingerprint().Bytes(),
			Progress: func(done int) {
				if done%500_000 == 0 || done == s.Records {
					say("%s: %d of %d records, %.0f s", s.Name, done, s.Records, time.Since(begin).Seconds())
				}
			},
		}.Run(ctx, conn)
	})
	s.Seconds = time.Since(begin).Seconds()
	return err
}

// settle makes the state in which a service spends its time, a while after a checkpoint: the pages where orders go have
// been written to the log once. It also picks the records to replay.
func (s *shop) settle(ctx context.Context) error {
	return s.with(ctx, func(conn *pgx.Conn) error {
		err := conn.QueryRow(ctx, `
			SELECT pg_table_size('idempotency.records'), pg_relation_size('idempotency.records_pkey'),
			       pg_indexes_size('idempotency.records'), pg_database_size(current_database())`,
		).Scan(&s.Table, &s.Primary, &s.Indexes, &s.Disk)
		if err != nil {
			return err
		}
		// Records that a replay gets its answer from, and their answers are of one size.
		const usable = ` WHERE state = 'SUCCESS' AND result IS NOT NULL AND result_expires_at IS NULL
			AND expires_at > statement_timestamp() + interval '6 hours'`
		const columns = `SELECT tenant, operation, key FROM idempotency.records`
		const sample = smallRecords // of both as many: this program's own memory costs something too
		if s.keys, err = selectPlaced(ctx, conn, fmt.Sprintf(`%s TABLESAMPLE BERNOULLI (%g)`, columns,
			min(100, 100*float64(sample)/float64(s.Records)))+usable); err != nil {
			return err
		}
		if s.recent, err = selectPlaced(ctx, conn, columns+usable+` ORDER BY expires_at DESC LIMIT 90000`); err != nil {
			return err
		}
		for _, name := range audittest.Operations {
			s.operations = append(s.operations, idempotency.Operation{Name: name})
		}
		more := audittest.Fill{
			From: s.Records, Records: audittest.Tenants * len(audittest.Operations), RandomKeys: s.random,
			Fingerprint: bigFingerprint().Bytes(),
		}
		return more.Run(ctx, conn)
	})
}

// bigPayload is the body of every order that was filled in: one fingerprint for all.
var bigPayload = order{item: 1, quantity: 1}

func bigFingerprint() idempotency.Fingerprint {
	return idempotency.FingerprintBytes(bigPayload.payload())
}
