package idempotency

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgtype"
)

// The request path sends several statements in one flush, through pgconn's pipeline, with every parameter and result in
// PostgreSQL's binary format.

// statement is one of ours: prepared once per connection, or sent unnamed where the pool's query mode asks for it.
type statement struct {
	name, sql string
	oids      []uint32
}

// sender sends statements of one connection: those in prepared by name, the others unnamed.
type sender struct {
	pipeline *pgconn.Pipeline
	prepared prepared
}

// prepared are the statements that a connection knows by name.
type prepared map[*statement]*pgconn.StatementDescription

const preparedKey = "github.com/pgonce/pgonce/idempotency"

// prepare makes sure that the statements exist on the connection; only its first transaction pays for it. The result is
// kept here and not asked of pgx, which would tell its tracer of every look.
func (s *Store) prepare(ctx context.Context, conn *pgx.Conn, statements ...*statement) (prepared, error) {
	if !s.named {
		return nil, nil
	}
	data := conn.PgConn().CustomData()
	known, ok := data[preparedKey].(prepared)
	if !ok {
		known = prepared{}
		data[preparedKey] = known
	}
	for _, st := range statements {
		if known[st] != nil {
			continue
		}
		description, err := conn.Prepare(ctx, st.name, st.sql)
		if err != nil {
			return nil, err
		}
		known[st] = description
	}
	return known, nil
}

var binaryFormat = []int16{pgtype.BinaryFormatCode} // one code stands for all columns

func (s *sender) send(st *statement, values ...[]byte) {
	if description := s.prepared[st]; description != nil {
		s.pipeline.SendQueryStatement(description, values, binaryFormat, binaryFormat)
		return
	}
	s.pipeline.SendQueryParams(st.sql, values, st.oids, binaryFormat, binaryFormat)
}

// next returns the rows (at most one, copied) and the command tag of the next statement, or its error.
func (s *sender) next() (row [][]byte, tag pgconn.CommandTag, err error) {
	results, err := s.pipeline.GetResults()
	if err != nil {
		return nil, tag, err
	}
	reader, ok := results.(*pgconn.ResultReader)
	if !ok {
		return nil, tag, fmt.Errorf("idempotency: expected a result, got %T", results)
	}
	if reader.NextRow() {
		row = cloneRow(reader.Values())
	}
	tag, err = reader.Close()
	return row, tag, err
}

// each shows every row of the next statement to read, which must not keep it.
func (s *sender) each(read func(row [][]byte) error) error {
	results, err := s.pipeline.GetResults()
	if err != nil {
		return err
	}
	reader, ok := results.(*pgconn.ResultReader)
	if !ok {
		return fmt.Errorf("idempotency: expected a result, got %T", results)
	}
	var unreadable error
	for reader.NextRow() {
		if unreadable == nil {
			unreadable = read(reader.Values())
		}
	}
	_, err = reader.Close()
	return errors.Join(err, unreadable)
}

// sync reads the answer to a Sync. A statement's error repeats here for every statement that was skipped behind it.
func (s *sender) sync() error {
	for {
		results, err := s.pipeline.GetResults()
		var server *pgconn.PgError
		switch {
		case errors.As(err, &server):
		case err != nil:
			return err
		case results == nil:
			return errors.New("idempotency: pipeline ended before its sync")
		default:
			if _, ok := results.(*pgconn.PipelineSync); ok {
				return nil
			}
		}
	}
}

// query runs one statement by itself and shows its row, if there is one, to read, which must not keep it.
func query(ctx context.Context, conn *pgx.Conn, prepared prepared, st *statement, read func(row [][]byte) error, values ...[]byte) error {
	var reader *pgconn.ResultReader
	if description := prepared[st]; description != nil {
		reader = conn.PgConn().ExecStatement(ctx, description, values, binaryFormat, binaryFormat)
	} else {
		reader = conn.PgConn().ExecParams(ctx, st.sql, values, st.oids, binaryFormat, binaryFormat)
	}
	var unreadable error
	if reader.NextRow() {
		unreadable = read(reader.Values())
	}
	_, err := reader.Close()
	return errors.Join(err, unreadable)
}

// cloneRow copies a row with one allocation: pgx reuses its read buffer.
func cloneRow(values [][]byte) [][]byte {
	size := 0
	for _, v := range values {
		size += len(v)
	}
	row, buffer := make([][]byte, len(values)), make([]byte, 0, size)
	for i, v := range values {
		if v != nil {
			begin := len(buffer)
			buffer = append(buffer, v...)
			row[i] = buffer[begin:len(buffer):len(buffer)]
		}
	}
	return row
}

func encodeInt8(n int64) []byte { return binary.BigEndian.AppendUint64(make([]byte, 0, 8), uint64(n)) }

// A nil pointer is NULL.
func encodeOptionalInt8(n *int64) []byte {
	if n == nil {
		return nil
	}
	return encodeInt8(*n)
}

func encodeOptionalText(s *string) []byte {
	if s == nil {
		return nil
	}
	return []byte(*s)
}

// encodeArray gives an array of one dimension without NULLs.
func encodeArray[E any](of []E, oid uint32, encode func(E) []byte) []byte {
	const dimensions, noNulls, lowerBound = 1, 0, 1
	b := make([]byte, 0, 20+16*len(of))
	for _, header := range [...]uint32{dimensions, noNulls, oid, uint32(len(of)), lowerBound} { //nolint:gosec // at most some hundreds
		b = binary.BigEndian.AppendUint32(b, header)
	}
	for _, e := range of {
		value := encode(e)
		b = binary.BigEndian.AppendUint32(b, uint32(len(value))) //nolint:gosec // a part of a key, or 8 bytes
		b = append(b, value...)
	}
	return b
}

func encodeText(s string) []byte { return []byte(s) }

func encodeInt4(n int) []byte {
	return binary.BigEndian.AppendUint32(make([]byte, 0, 4), uint32(int32(n))) //nolint:gosec // a small ordinal
}

func encodeBool(b bool) []byte {
	if b {
		return []byte{1}
	}
	return []byte{0}
}

func decodeBool(b []byte) bool { return b[0] == 1 }

func decodeInt4(b []byte) int { return int(int32(binary.BigEndian.Uint32(b))) }

func decodeInt8(b []byte) int64 { return int64(binary.BigEndian.Uint64(b)) }

const postgresEpoch = 946684800 // 2000-01-01 in Unix seconds; PostgreSQL counts microseconds from there

func encodeTime(t time.Time) []byte { return encodeInt8(t.UnixMicro() - postgresEpoch*1e6) }

func decodeTime(b []byte) time.Time {
	if b == nil {
		return time.Time{}
	}
	return time.UnixMicro(decodeInt8(b) + postgresEpoch*1e6).UTC()
}
