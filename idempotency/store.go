package idempotency

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"os"
	"strconv"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/pgonce/pgonce/internal/dbsqlc"
)

// SchemaVersion is the oldest idempotency.schema_version() this code works with.
const SchemaVersion = 6

// Store owns every SQL statement on our tables, for the packages of pgonce. It runs on connections and transactions that
// its caller owns, and is safe for concurrent use.
type Store struct {
	executor string
	named    bool
}

// Querier is what a plain read needs: a pool, a connection or a transaction of pgx.
type Querier interface {
	QueryRow(ctx context.Context, sql string, args ...any) pgx.Row
}

// NewStore returns a store whose own transactions send their statements as mode says: prepared by name, or unnamed for
// the modes that are used behind a transaction pooler. In a transaction of the caller they follow that one's mode.
func NewStore(mode pgx.QueryExecMode) *Store {
	return &Store{executor: newExecutor(), named: mode == pgx.QueryExecModeCacheStatement}
}

// Unnamed returns the same store without named statements, for a connection that loses them.
func (s *Store) Unnamed() *Store { return &Store{executor: s.executor} }

// newExecutor names this process for people who look into a record: host:pid:random.
func newExecutor() string {
	var random [4]byte
	_, _ = rand.Read(random[:])
	host, err := os.Hostname()
	if err != nil || host == "" {
		host = "unknown"
	}
	return fmt.Sprintf("%.64s:%d:%s", host, os.Getpid(), hex.EncodeToString(random[:]))
}

// Check asks whether this database can be worked on: the schema is there and new enough (*SchemaError), and the server
// is not a standby (ErrReadOnly).
func (s *Store) Check(ctx context.Context, q Querier) error {
	var have int32
	var inRecovery bool
	if err := q.QueryRow(ctx, dbsqlc.SchemaState).Scan(&have, &inRecovery); err != nil {
		return fmt.Errorf("idempotency: check schema: %w", translate(err))
	}
	switch {
	case inRecovery:
		return ErrReadOnly
	case have < SchemaVersion:
		return &SchemaError{Have: int(have), Want: SchemaVersion}
	}
	return nil
}

// Acquire opens a transaction and asks for the key, in one round trip: BEGIN, the key's advisory lock, the record. It
// never waits inside PostgreSQL and locks no row. On an error the connection is unusable or has no transaction open.
func (s *Store) Acquire(ctx context.Context, conn *pgx.Conn, key Key, iso pgx.TxIsoLevel) (Acquisition, error) {
	begin := begin[iso]
	if begin == nil {
		return Acquisition{}, &ConfigError{Field: "isolation level", Rule: fmt.Sprintf("must be read committed, repeatable read or serializable, is %q", iso)}
	}
	// All at once, and before BEGIN: later ones would cost a round trip inside the transaction.
	prepared, err := s.prepare(ctx, conn, begin, recordLock, recordGet, recordInsert, commit)
	if err != nil {
		return Acquisition{}, translate(err)
	}
	a, err := acquire(ctx, conn, prepared, key, begin)
	if err != nil {
		s.abandon(ctx, conn)
		return Acquisition{}, fmt.Errorf("idempotency: acquire %v: %w", key, translate(err))
	}
	return a, nil
}

func acquire(ctx context.Context, conn *pgx.Conn, prepared prepared, key Key, begin *statement) (a Acquisition, err error) {
	to := &sender{pipeline: conn.PgConn().StartPipeline(ctx), prepared: prepared}
	defer func() { err = errors.Join(err, to.pipeline.Close()) }()
	to.send(begin)
	to.send(recordLock, encodeInt8(key.LockID()))
	// A statement of its own: its snapshot must be younger than the lock, or it would miss what the last holder wrote.
	to.send(recordGet, []byte(key.tenant), []byte(key.operation), []byte(key.value))
	if err := to.pipeline.Sync(); err != nil {
		return Acquisition{}, err
	}
	if _, _, err := to.next(); err != nil {
		return Acquisition{}, readOnly(err) // of BEGIN
	}
	lock, _, err := to.next()
	if err != nil {
		return Acquisition{}, err
	}
	row, _, err := to.next()
	if err != nil {
		return Acquisition{}, err
	}
	a = Acquisition{Locked: lock[0] != nil, Started: decodeTime(lock[1])}
	if a.Locked {
		a.Fence = decodeInt8(lock[0])
	}
	if row != nil {
		a.Found = true
		a.Record, err = decodeRecord(key, row)
	}
	return a, err
}

// abandon leaves the connection without a transaction, or closed.
func (s *Store) abandon(ctx context.Context, conn *pgx.Conn) {
	if !conn.IsClosed() {
		_ = s.Rollback(ctx, conn)
	}
}

// rollbackTimeout is short: a connection that cannot answer ROLLBACK is closed instead, which ends its transaction too.
const rollbackTimeout = 5 * time.Second

// Rollback ends the transaction that Acquire opened, also when ctx is cancelled. The connection is closed if that fails.
func (s *Store) Rollback(ctx context.Context, conn *pgx.Conn) error {
	if conn.IsClosed() || conn.PgConn().TxStatus() == 'I' {
		return nil
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), rollbackTimeout)
	defer cancel()
	if _, err := conn.Exec(ctx, "ROLLBACK"); err != nil {
		return errors.Join(fmt.Errorf("idempotency: roll back: %w", err), conn.Close(ctx))
	}
	return nil
}

// RollbackOf rolls back like Rollback, and reports whether the transaction that ended was still the one that acquired:
// false means that the function has sent COMMIT or ROLLBACK itself and begun another one. One round trip.
func (s *Store) RollbackOf(ctx context.Context, conn *pgx.Conn, a Acquisition) (same bool, err error) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), rollbackTimeout)
	defer cancel()
	results, err := conn.PgConn().Exec(ctx, "SELECT (extract(epoch FROM pg_catalog.now()) * 1000000)::bigint; ROLLBACK").ReadAll()
	if err != nil {
		return false, errors.Join(fmt.Errorf("idempotency: roll back: %w", err), conn.Close(ctx))
	}
	return string(results[0].Rows[0][0]) == strconv.FormatInt(a.Started.UnixMicro(), 10), nil
}

// AcquireTx asks for the key in a transaction of the caller, whose settings and isolation level stay. Call it outside
// any savepoint: a lock taken inside one ends with it.
func (s *Store) AcquireTx(ctx context.Context, tx pgx.Tx, key Key) (Acquisition, error) {
	batch := &pgx.Batch{}
	batch.Queue(dbsqlc.RecordLockTx, key.LockID())
	batch.Queue(dbsqlc.RecordGet, key.tenant, key.operation, key.value)
	results := tx.SendBatch(ctx, batch)
	var a Acquisition
	var fence *int64
	err := results.QueryRow().Scan(&fence, &a.Started)
	if fence != nil {
		a.Locked, a.Fence = true, *fence
	}
	if err == nil {
		a.Record, a.Found, err = scanRecord(key, results.QueryRow())
	}
	if err := errors.Join(err, results.Close()); err != nil {
		return Acquisition{}, fmt.Errorf("idempotency: acquire %v: %w", key, translate(err))
	}
	return a, nil
}

// Lookup reads the record of a key: one statement, no transaction, no lock, no write. On a standby it is ErrReadOnly.
func (s *Store) Lookup(ctx context.Context, conn *pgx.Conn, key Key) (r Record, found bool, err error) {
	// Reported by the server when the session begins, and again when it is promoted. A standby may show a commit that the
	// primary has not acknowledged, or lack the end of a record's life.
	if conn.PgConn().ParameterStatus("in_hot_standby") == "on" {
		return Record{}, false, fmt.Errorf("idempotency: look up %v: %w", key, ErrReadOnly)
	}
	prepared, err := s.prepare(ctx, conn, recordGet)
	if err != nil {
		return Record{}, false, translate(err)
	}
	err = query(ctx, conn, prepared, recordGet, func(row [][]byte) (err error) {
		found = true
		r, err = decodeRecord(key, row)
		return err
	}, []byte(key.tenant), []byte(key.operation), []byte(key.value))
	if err != nil {
		return Record{}, false, fmt.Errorf("idempotency: look up %v: %w", key, translate(err))
	}
	return r, found, nil
}

// LookupAttempt looks for a committed record of one of these attempts, expired or not. Where a synchronous standby is
// configured its answer is proven to be replicated.
func (s *Store) LookupAttempt(ctx context.Context, conn *pgx.Conn, key Key, attempts []AttemptToken) (r Record, found bool, err error) {
	err = pgx.BeginTxFunc(ctx, conn, pgx.TxOptions{IsoLevel: pgx.ReadCommitted, AccessMode: pgx.ReadWrite}, func(tx pgx.Tx) error {
		tokens := make([][]byte, len(attempts))
		for i := range attempts {
			tokens[i] = attempts[i][:]
		}
		r, found, err = scanRecord(key, tx.QueryRow(ctx, dbsqlc.RecordGetAttempt, key.tenant, key.operation, key.value, tokens))
		if err != nil {
			return err
		}
		_, err := tx.Exec(ctx, dbsqlc.ProveReplicated)
		return err
	})
	if err != nil {
		return Record{}, false, fmt.Errorf("idempotency: look for attempts of %v: %w", key, translate(err))
	}
	return r, found, nil
}
