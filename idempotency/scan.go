package idempotency

import (
	"bytes"
	"errors"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/pgonce/pgonce/internal/dbsqlc"
)

// decodeRecord reads a row of recordGet in PostgreSQL's binary format, and keeps nothing of it.
func decodeRecord(key Key, row [][]byte) (Record, error) {
	r := Record{
		Key: key, State: State(row[0]), Fence: decodeInt8(row[1]), Generation: decodeInt8(row[2]), Attempt: decodeInt4(row[3]),
		Retryable: decodeBool(row[4]), Takeover: Takeover(row[7]), Executor: string(row[8]), Client: string(row[9]),
		TraceID: string(row[10]), CreatedAt: decodeTime(row[11]), AcquiredAt: decodeTime(row[12]),
		CompletedAt: decodeTime(row[13]), LeaseExpiresAt: decodeTime(row[14]), ResultExpiresAt: decodeTime(row[15]),
		ExpiresAt: decodeTime(row[16]), ErrorCode: string(row[17]), ErrorMessage: string(row[18]), ResultType: string(row[19]),
		Result: bytes.Clone(row[20]), Expired: decodeBool(row[21]), TimedOut: decodeBool(row[22]),
	}
	err := r.setIdentity(row[5], row[6])
	return r, err
}

// scanRecord reads the same row through pgx.
func scanRecord(key Key, row pgx.Row) (r Record, found bool, err error) {
	var g dbsqlc.RecordGetRow
	err = row.Scan(&g.State, &g.Fence, &g.Generation, &g.Attempt, &g.Retryable, &g.Fingerprint, &g.AttemptToken, &g.Takeover,
		&g.Executor, &g.Client, &g.TraceID, &g.CreatedAt, &g.AcquiredAt, &g.CompletedAt, &g.LeaseExpiresAt,
		&g.ResultExpiresAt, &g.ExpiresAt, &g.ErrorCode, &g.ErrorMessage, &g.ResultType, &g.Result, &g.Expired, &g.TimedOut)
	if errors.Is(err, pgx.ErrNoRows) {
		return Record{}, false, nil
	}
	if err != nil {
		return Record{}, false, err
	}
	r = Record{
		Key: key, State: State(g.State), Fence: g.Fence, Generation: g.Generation, Attempt: int(g.Attempt),
		Retryable: g.Retryable, Takeover: Takeover(textOf(g.Takeover)), Executor: textOf(g.Executor), Client: textOf(g.Client),
		TraceID: textOf(g.TraceID), CreatedAt: g.CreatedAt.UTC(), AcquiredAt: timeOf(g.AcquiredAt),
		CompletedAt: timeOf(g.CompletedAt), LeaseExpiresAt: timeOf(g.LeaseExpiresAt), ResultExpiresAt: timeOf(g.ResultExpiresAt),
		ExpiresAt: timeOf(g.ExpiresAt), ErrorCode: textOf(g.ErrorCode), ErrorMessage: textOf(g.ErrorMessage),
		ResultType: textOf(g.ResultType), Result: g.Result, Expired: g.Expired, TimedOut: g.TimedOut,
	}
	err = r.setIdentity(g.Fingerprint, g.AttemptToken)
	return r, true, err
}

// setIdentity reads fingerprint and attempt token; both are NULL for an unused token.
func (r *Record) setIdentity(fingerprint, token []byte) (err error) {
	copy(r.AttemptToken[:], token)
	if fingerprint != nil {
		r.Fingerprint, err = ParseFingerprint(fingerprint)
	}
	return err
}

func textOf(s *string) string {
	if s == nil {
		return ""
	}
	return *s
}

func timeOf(t *time.Time) time.Time {
	if t == nil {
		return time.Time{}
	}
	return t.UTC()
}
