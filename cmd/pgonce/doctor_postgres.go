package main

import (
	"context"
	"fmt"
	"strconv"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgonce/pgonce/db"
)

func lookAtServer(ctx context.Context, pool *pgxpool.Pool, f *findings) error {
	s, err := db.ReadStatus(ctx, pool)
	if err != nil {
		return err
	}
	if s.ServerVersion < db.MinServerVersion {
		f.bad("server version", "upgrade PostgreSQL", "PostgreSQL %d, pgonce needs %d or newer", s.ServerVersion/10000, db.MinServerVersion/10000)
	} else {
		f.ok("server version", "PostgreSQL %d.%d", s.ServerVersion/10000, s.ServerVersion%10000)
	}
	if s.Encoding != "UTF8" {
		f.bad("encoding", "CREATE DATABASE ... ENCODING 'UTF8' TEMPLATE template0, and move", "%s, pgonce needs UTF8", s.Encoding)
	}
	if s.InRecovery {
		f.bad("recovery", "connect to the primary: target_session_attrs=read-write in the service's connection string",
			"the server is a standby: only a primary can say whether a key was used")
	} else {
		f.ok("recovery", "a primary")
	}
	return nil
}

// maxClockOffset is what logs of two machines may differ by before people are misled.
const maxClockOffset = time.Second

func lookAtClock(ctx context.Context, pool *pgxpool.Pool, f *findings) error {
	var best, offset time.Duration
	for try := range 3 {
		var server time.Time
		before := time.Now()
		if err := pool.QueryRow(ctx, `SELECT clock_timestamp()`).Scan(&server); err != nil {
			return err
		}
		if took := time.Since(before); try == 0 || took < best {
			best, offset = took, server.Sub(before.Add(took/2))
		}
	}
	if offset.Abs() > maxClockOffset+best {
		f.warn("clock", "run NTP on both: ownership goes by PostgreSQL's clock alone, but logs and Redis' times are not comparable",
			"PostgreSQL's clock is %s from this machine's", span(offset))
		return nil
	}
	f.ok("clock", "%s from this machine's", span(offset))
	return nil
}

func lookAtPooler(ctx context.Context, pool *pgxpool.Pool, f *findings) error {
	conn, err := pool.Acquire(ctx)
	if err != nil {
		return err
	}
	defer conn.Release()
	var backend uint32
	if err := conn.QueryRow(ctx, `SELECT pg_backend_pid()::bigint`).Scan(&backend); err != nil {
		return err
	}
	if conn.Conn().PgConn().PID() == backend {
		f.ok("pooler", "none")
		return nil
	}
	const fix = "transaction mode is supported: default_query_exec_mode=exec (or cache_describe) in the service's connection string; " +
		"migrate over a direct connection, or with pgonce migrate sql; timeouts belong to the role or the database"
	shared, err := sharesBackends(ctx, pool.Config(), backend)
	if err != nil {
		f.warn("pooler", fix, "a pooler, and its mode could not be found out: %v", err)
		return nil
	}
	if shared {
		f.warn("pooler", fix, "a pooler in transaction mode (PgBouncer or alike): sessions share backends")
		return nil
	}
	f.note("pooler", fix, "a pooler, in session mode or with many idle backends")
	return nil
}

// sharesBackends asks whether a backend that served one session serves another one while the first is still connected. Each
// of the others holds what it got until the end, so that the next one gets another.
func sharesBackends(ctx context.Context, cfg *pgxpool.Config, backend uint32) (bool, error) {
	ctx, cancel := context.WithTimeout(ctx, 5*time.Second)
	defer cancel()
	var others []*pgx.Conn
	defer func() {
		for _, conn := range others {
			_ = conn.Close(context.WithoutCancel(ctx))
		}
	}()
	for range 8 {
		conn, err := pgx.ConnectConfig(ctx, cfg.ConnConfig)
		if err != nil {
			return false, err
		}
		others = append(others, conn)
		tx, err := conn.Begin(ctx)
		if err != nil {
			return false, err
		}
		var pid uint32
		if err := tx.QueryRow(ctx, `SELECT pg_backend_pid()::bigint`).Scan(&pid); err != nil {
			return false, err
		}
		if pid == backend {
			return true, nil
		}
	}
	return false, nil
}

// settings are the session's, durations in milliseconds where they have a unit.
type settings map[string]string

func readSettings(ctx context.Context, pool *pgxpool.Pool, names ...string) (settings, error) {
	rows, err := pool.Query(ctx, `
		SELECT name, CASE WHEN unit = 's' THEN (setting::bigint * 1000)::text ELSE setting END
		FROM pg_settings WHERE name = ANY ($1)`, names)
	if err != nil {
		return nil, err
	}
	s := settings{}
	var name, value string
	_, err = pgx.ForEachRow(rows, []any{&name, &value}, func() error { s[name] = value; return nil })
	return s, err
}

func (s settings) duration(name string) time.Duration {
	ms, _ := strconv.ParseInt(s[name], 10, 64)
	return time.Duration(ms) * time.Millisecond
}

// Limits of what is taken for a mistake.
const (
	minTimeout   = time.Second      // shorter ones end healthy calls
	maxKeepalive = 10 * time.Minute // a dead client's backend keeps its key for so long
)

func lookAtSettings(ctx context.Context, pool *pgxpool.Pool, f *findings) error {
	s, err := readSettings(ctx, pool, "default_transaction_isolation", "default_transaction_read_only", "statement_timeout",
		"idle_in_transaction_session_timeout", "lock_timeout", "transaction_timeout", "tcp_keepalives_idle", "tcp_user_timeout",
		"client_connection_check_interval")
	if err != nil {
		return err
	}
	set := func(name, value string) string {
		return fmt.Sprintf("ALTER ROLE <service> SET %s = '%s'", name, value)
	}
	if level := s["default_transaction_isolation"]; level != "read committed" {
		f.warn("isolation", set("default_transaction_isolation", "read committed")+
			"; pgonce names its level itself (txn.Config), but WithIdempotencyTx takes the caller's and then needs retries", "the default is %s", level)
	} else {
		f.ok("isolation", "%s", level)
	}
	if s["default_transaction_read_only"] == "on" {
		f.bad("read only", set("default_transaction_read_only", "off"), "transactions are read only by default")
	}
	longest := s.duration("statement_timeout")
	switch whole := s.duration("transaction_timeout"); {
	case longest > 0 && longest < minTimeout:
		f.warn("statement_timeout", set("statement_timeout", "30s"), "%v: shorter than healthy calls may need under load", longest)
	case longest == 0 && whole == 0:
		f.warn("statement_timeout", set("statement_timeout", "30s"), "none: a statement that waits for a lock keeps its key in progress for ever")
	default:
		f.ok("statement_timeout", "%v", longest)
	}
	switch idle := s.duration("idle_in_transaction_session_timeout"); {
	case idle > 0 && idle < minTimeout:
		f.warn("idle_in_transaction_session_timeout", set("idle_in_transaction_session_timeout", "60s"), "%v: ends functions that think for a moment", idle)
	case idle == 0:
		f.warn("idle_in_transaction_session_timeout", set("idle_in_transaction_session_timeout", "60s")+
			"; pgonce sets 60 s in its own transactions, not in those of WithIdempotencyTx", "none")
	default:
		f.ok("idle_in_transaction_session_timeout", "%v", idle)
	}
	switch lock := s.duration("lock_timeout"); {
	case lock == 0 && longest == 0:
		f.warn("lock_timeout", set("lock_timeout", "10s"), "none: business rows that somebody has locked are waited for without an end")
	case lock > 0 && lock < 100*time.Millisecond:
		f.warn("lock_timeout", set("lock_timeout", "10s"), "%v: fails where waiting a moment would do", lock)
	default:
		f.ok("lock_timeout", "%v", lock)
	}
	lookAtTCP(pool, s, f)
	return nil
}

// lookAtTCP asks how soon the server notices that a client is gone without a word: its backend keeps the key's lock until then.
func lookAtTCP(pool *pgxpool.Pool, s settings, f *findings) {
	if host := pool.Config().ConnConfig.Host; host != "" && host[0] == '/' {
		f.note("tcp", "", "a Unix socket: keepalive is not seen from here")
		return
	}
	const fix = "ALTER SYSTEM SET tcp_keepalives_idle = 60; ALTER SYSTEM SET tcp_keepalives_interval = 10; ALTER SYSTEM SET tcp_keepalives_count = 3"
	switch idle := s.duration("tcp_keepalives_idle"); {
	case idle == 0 || idle > maxKeepalive:
		text := "the system's default, usually 2 h"
		if idle > 0 {
			text = idle.String()
		}
		f.warn("tcp_keepalives_idle", fix, "%s: the key of a client whose machine died is in progress for so long", text)
	default:
		f.ok("tcp_keepalives_idle", "%v", idle)
	}
	if user := s.duration("tcp_user_timeout"); user == 0 {
		f.warn("tcp_user_timeout", "ALTER SYSTEM SET tcp_user_timeout = '30s'", "none: an answer to a client that is gone is sent again for 15 minutes")
	} else {
		f.ok("tcp_user_timeout", "%v", user)
	}
}

func lookAtDurability(ctx context.Context, pool *pgxpool.Pool, f *findings) error {
	s, err := readSettings(ctx, pool, "synchronous_commit", "synchronous_standby_names", "fsync", "full_page_writes")
	if err != nil {
		return err
	}
	for _, name := range []string{"fsync", "full_page_writes"} {
		if s[name] == "off" {
			f.bad(name, "ALTER SYSTEM SET "+name+" = on", "off: a crash of the machine loses commits, records and orders alike, or the database")
		} else {
			f.ok(name, "on")
		}
	}
	switch level := s["synchronous_commit"]; level {
	case "off", "local", "remote_write":
		f.warn("synchronous_commit", "ALTER ROLE <service> SET synchronous_commit = on; pgonce raises it for its own commits, not for those of WithIdempotencyTx",
			"%s: an acknowledged commit can be lost", level)
	default:
		f.ok("synchronous_commit", "%s", level)
	}
	var standbys, synchronous int
	err = pool.QueryRow(ctx, `SELECT count(*), count(*) FILTER (WHERE sync_state IN ('sync', 'quorum')) FROM pg_stat_replication`).Scan(&standbys, &synchronous)
	if err != nil {
		return err
	}
	switch names := s["synchronous_standby_names"]; {
	case names != "" && synchronous == 0:
		f.bad("replication", "start the standby that synchronous_standby_names names, or take it out; where one is running, let the role see it: GRANT pg_monitor",
			"synchronous_standby_names is %q and no such standby is seen: every commit waits", names)
	case names != "":
		f.ok("replication", "synchronous, %d of %d standbys", synchronous, standbys)
	case standbys > 0:
		f.warn("replication", "name a standby in synchronous_standby_names, or accept it: fences and fronts are safe after a failover, lost orders run again",
			"asynchronous, %d standbys: a failover may lose the youngest commits", standbys)
	default:
		f.note("replication", "", "no standby is seen")
	}
	return nil
}

func lookAtSchema(ctx context.Context, pool *pgxpool.Pool, f *findings) error {
	problems, notes, err := validate(ctx, pool)
	if err != nil {
		return err
	}
	for _, problem := range problems {
		f.bad("schema", "pgonce migrate up where the version is old; otherwise put it back as pgonce migrate sql has it", "%s", problem)
	}
	for _, note := range notes {
		f.note("schema", "", "%s", note)
	}
	if len(problems) == 0 {
		f.ok("schema", "version %d", db.SchemaVersion)
	}
	return nil
}
