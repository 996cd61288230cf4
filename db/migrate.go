package db

import (
	"context"
	"errors"
	"fmt"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/jackc/pgx/v5/stdlib"
	"github.com/pressly/goose/v3"
	"github.com/pressly/goose/v3/lock"
)

const (
	// MigrationLockID is the advisory lock that Migrate and install.sql hold while they work ("pgonce" in ASCII). It is
	// not goose's default, which a program that migrates its own tables may hold while it calls Migrate.
	MigrationLockID = 0x70676f6e6365

	// MinServerVersion is the oldest server version, as server_version_num counts it.
	MinServerVersion = 150000
)

const (
	lockPoll     = 1   // seconds between tries: the shortest period goose has
	lockAttempts = 300 // then give up, if the context has not ended before
)

// Migrate brings the schema idempotency up to SchemaVersion. If it is there already, or newer, Migrate only reads.
//
// Many processes may call it at once: one migrates, the others ask for its lock once a second (for five minutes at
// most) and then find nothing to do. Each migration is one transaction; a process that is killed leaves no lock and no
// half migration. It uses one connection of the pool at a time and closes nothing.
//
// It needs a session of its own, so behind a pooler it refuses to migrate: connect directly, or run install.sql. It
// also refuses a standby, a server older than PostgreSQL 15 and a database whose encoding is not UTF8.
func Migrate(ctx context.Context, pool *pgxpool.Pool) error {
	found, err := inspect(ctx, pool)
	if err != nil {
		return fmt.Errorf("db: migrate: %w", err)
	}
	if err := found.fits(); err != nil {
		return fmt.Errorf("db: migrate: %w", err)
	}
	if found.schemaVersion >= SchemaVersion {
		return nil
	}
	if found.pooled {
		return errors.New("db: migrate: a pooler stands between this program and PostgreSQL, and the lock of a session does " +
			"not hold through one: give Migrate a direct connection, or run db/install.sql, which is one atomic statement " +
			"and works through a pooler")
	}
	if err := up(ctx, pool); err != nil {
		return fmt.Errorf("db: migrate: %w", err)
	}

	// goose believes its own list, whatever became of the schema.
	found, err = inspect(ctx, pool)
	if err != nil {
		return fmt.Errorf("db: migrate: %w", err)
	}
	if found.schemaVersion < SchemaVersion {
		return fmt.Errorf("db: migrate: %s says that version %d is applied, but the schema idempotency has version %d: "+
			"it was dropped or restored by hand; run db/install.sql, which goes by the schema and applies what is missing",
			VersionTable, SchemaVersion, found.schemaVersion)
	}
	return nil
}

// Down undoes the migrations above version to, newest first, each in a transaction of its own. What they had created is
// dropped with what is in it: down to 0 every record of what was done is gone, and the next retry of an old key runs again. It
// refuses what Migrate refuses, and waits for Migrate's lock.
func Down(ctx context.Context, pool *pgxpool.Pool, to int) error {
	found, err := inspect(ctx, pool)
	if err != nil {
		return fmt.Errorf("db: down: %w", err)
	}
	if err := found.fits(); err != nil {
		return fmt.Errorf("db: down: %w", err)
	}
	switch {
	case to < 0 || to > found.schemaVersion:
		return fmt.Errorf("db: down: the version must be from 0 to %d, which the schema has, is %d", found.schemaVersion, to)
	case found.schemaVersion > SchemaVersion:
		return fmt.Errorf("db: down: the schema has version %d, and this program knows how to undo %d and older: "+
			"use the release that migrated it", found.schemaVersion, SchemaVersion)
	case found.pooled:
		return errors.New("db: down: a pooler stands between this program and PostgreSQL, and the lock of a session does " +
			"not hold through one: give Down a direct connection")
	}
	if err := withGoose(pool, func(p *goose.Provider) error {
		_, err := p.DownTo(ctx, int64(to))
		return err
	}); err != nil {
		return fmt.Errorf("db: down: %w", err)
	}
	return nil
}

func up(ctx context.Context, pool *pgxpool.Pool) error {
	return withGoose(pool, func(p *goose.Provider) error {
		_, err := p.Up(ctx)
		return err
	})
}

func withGoose(pool *pgxpool.Pool, run func(*goose.Provider) error) (err error) {
	// It polls with pg_try_advisory_lock. A blocking lock would hold a snapshot while it waits.
	locker, err := lock.NewPostgresSessionLocker(
		lock.WithLockID(MigrationLockID),
		lock.WithLockTimeout(lockPoll, lockAttempts),
		lock.WithUnlockTimeout(lockPoll, 1),
	)
	if err != nil {
		return fmt.Errorf("make locker: %w", err)
	}
	// Closing it closes neither the pool nor a connection: it has none of its own.
	sqlDB := stdlib.OpenDBFromPool(pool)
	defer func() { err = errors.Join(err, sqlDB.Close()) }()

	provider, err := goose.NewProvider(goose.DialectPostgres, sqlDB, Migrations(),
		goose.WithTableName(VersionTable),
		goose.WithSessionLocker(locker),
		// Go migrations that the program registered for its own tables are none of ours.
		goose.WithDisableGlobalRegistry(true),
		goose.WithLogger(goose.NopLogger()),
	)
	if err != nil {
		return fmt.Errorf("make goose provider: %w", err)
	}
	return run(provider)
}

// server is what Migrate must know before it changes anything.
type server struct {
	inRecovery    bool
	pooled        bool
	encoding      string
	version       int
	schemaVersion int // 0 = no schema
}

func inspect(ctx context.Context, pool *pgxpool.Pool) (server, error) {
	conn, err := pool.Acquire(ctx)
	if err != nil {
		return server{}, fmt.Errorf("connect: %w", err)
	}
	defer conn.Release()

	var s server
	var backend uint32
	var hasSchema bool
	err = conn.QueryRow(ctx, `
		SELECT pg_is_in_recovery(), pg_backend_pid()::bigint, current_setting('server_encoding'),
		       current_setting('server_version_num')::integer, to_regprocedure('idempotency.schema_version()') IS NOT NULL`,
		// Not prepared by name: behind a pooler another client may have that name, and the error would not say why.
		pgx.QueryExecModeExec,
	).Scan(&s.inRecovery, &backend, &s.encoding, &s.version, &hasSchema)
	if err != nil {
		return server{}, fmt.Errorf("inspect server: %w", err)
	}
	// A pooler gives its clients a process id of its own making. In session mode it would do no harm, but nothing tells
	// the modes apart.
	s.pooled = conn.Conn().PgConn().PID() != backend
	if !hasSchema {
		return s, nil
	}
	// Not prepared: a plan that outlives the migration would go on giving the old number.
	err = conn.QueryRow(ctx, `SELECT idempotency.schema_version()`, pgx.QueryExecModeExec).Scan(&s.schemaVersion)
	if err != nil {
		return server{}, fmt.Errorf("read schema version: %w", err)
	}
	return s, nil
}

func (s server) fits() error {
	switch {
	case s.version < MinServerVersion:
		return fmt.Errorf("the server is PostgreSQL %d, pgonce needs %d or newer", s.version/10000, MinServerVersion/10000)
	case s.encoding != "UTF8":
		return fmt.Errorf("the database's encoding is %s, pgonce needs UTF8: "+
			"CREATE DATABASE ... ENCODING 'UTF8' TEMPLATE template0", s.encoding)
	case s.inRecovery:
		return errors.New("the server is in recovery (a standby): connect to the primary")
	}
	return nil
}
