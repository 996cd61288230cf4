package txnsql

import (
	"context"
	"database/sql"
	"database/sql/driver"
	"fmt"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgonce/pgonce/internal/pgsource"
)

// source lends a runner the connections of a sql.DB.
type source struct {
	db     *sql.DB
	config *pgxpool.Config
}

var _ pgsource.Source = (*source)(nil)

func (s *source) Config() *pgxpool.Config { return s.config }

// Acquire takes a connection as database/sql's users do: it counts within the sql.DB's limits.
func (s *source) Acquire(ctx context.Context) (pgsource.Lent, error) {
	on, err := s.db.Conn(ctx)
	if err != nil {
		return nil, err
	}
	l := &lent{on: on}
	// What Raw shows is ours until on is closed: nobody else has the sql.Conn.
	err = on.Raw(func(shown any) (err error) {
		var ours bool
		if l.conn, ours = shown.(*conn); !ours {
			err = fmt.Errorf("txnsql: the sql.DB's driver made a %T", shown)
		}
		return err
	})
	if err != nil {
		_ = on.Close()
		return nil, err
	}
	l.conn.hands.Lock()
	l.conn.on = on
	l.conn.hands.Unlock()
	return l, nil
}

// lent is a connection in a runner's hands.
type lent struct {
	on   *sql.Conn
	conn *conn
}

func (l *lent) Conn() *pgx.Conn { return l.conn.Conn.Conn() }

// Release gives it back, or has database/sql drop it.
func (l *lent) Release() {
	l.conn.hands.Lock()
	l.conn.on = nil
	l.conn.hands.Unlock()
	if len(l.conn.stuck) > 0 {
		l.abandon()
		return
	}
	if pc := l.Conn(); pc.IsClosed() || pc.PgConn().IsBusy() || pc.PgConn().TxStatus() != 'I' {
		_ = l.on.Raw(func(any) error { return driver.ErrBadConn })
	}
	_ = l.on.Close()
}

// abandon ends the session, and its transaction with it, below rows that nobody has closed. database/sql counts the connection
// as used until somebody does.
func (l *lent) abandon() {
	_ = l.on.Raw(func(any) error { return l.Conn().Close(canceled) }) // under database/sql's lock: nothing runs on it
	go func() {
		for _, ended := range l.conn.stuck {
			<-ended
		}
		_ = l.on.Raw(func(any) error { return driver.ErrBadConn })
		_ = l.on.Close()
	}()
}

// canceled makes Close skip the polite goodbye.
var canceled = func() context.Context {
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	return ctx
}()

func (s *source) Exec(ctx context.Context, query string, args ...any) (pgconn.CommandTag, error) {
	l, err := s.Acquire(ctx)
	if err != nil {
		return pgconn.CommandTag{}, err
	}
	defer l.Release()
	return l.Conn().Exec(ctx, query, args...)
}

func (s *source) Query(ctx context.Context, query string, args ...any) (pgx.Rows, error) {
	l, err := s.Acquire(ctx)
	if err != nil {
		return nil, err
	}
	rows, err := l.Conn().Query(ctx, query, args...)
	if err != nil {
		l.Release()
		return nil, err
	}
	return &lentRows{Rows: rows, lent: l}, nil
}

func (s *source) QueryRow(ctx context.Context, query string, args ...any) pgx.Row {
	l, err := s.Acquire(ctx)
	if err != nil {
		return failedRow{err}
	}
	return &lentRow{l.Conn().QueryRow(ctx, query, args...), l}
}

// lentRows releases its connection when it is closed, or at its end.
type lentRows struct {
	pgx.Rows
	lent pgsource.Lent
}

func (r *lentRows) Close() {
	r.Rows.Close()
	if r.lent != nil {
		r.lent.Release()
		r.lent = nil
	}
}

func (r *lentRows) Next() bool {
	more := r.Rows.Next()
	if !more {
		r.Close()
	}
	return more
}

type lentRow struct {
	row  pgx.Row
	lent pgsource.Lent
}

func (r *lentRow) Scan(dest ...any) error {
	defer r.lent.Release()
	return r.row.Scan(dest...)
}

type failedRow struct{ err error }

func (r failedRow) Scan(...any) error { return r.err }
