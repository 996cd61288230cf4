package idempotency

import (
	"context"
	"errors"
	"fmt"
	"slices"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgtype"
)

// AcquireMany is Acquire for several keys, none of them twice: one transaction, in one round trip. It does not wait for
// any of them either; each has an Acquisition of its own, in the order of keys.
func (s *Store) AcquireMany(ctx context.Context, conn *pgx.Conn, keys []Key, iso pgx.TxIsoLevel) ([]Acquisition, error) {
	begin := begin[iso]
	if begin == nil {
		return nil, &ConfigError{Field: "isolation level", Rule: fmt.Sprintf("must be read committed, repeatable read or serializable, is %q", iso)}
	}
	prepared, err := s.prepare(ctx, conn, begin, recordsLock, recordsGet, recordInsert, commit)
	if err != nil {
		return nil, translate(err)
	}
	all, err := acquireMany(ctx, conn, prepared, keys, begin)
	if err != nil {
		s.abandon(ctx, conn)
		return nil, fmt.Errorf("idempotency: acquire %d keys: %w", len(keys), translate(err))
	}
	return all, nil
}

func acquireMany(ctx context.Context, conn *pgx.Conn, prepared prepared, keys []Key, begin *statement) (all []Acquisition, err error) {
	var tenants, operations, values []string
	var ordinals []int
	ids := make([]int64, len(keys))
	byID := make(map[int64][]int, len(keys)) // several keys may have one number
	for i, key := range keys {
		tenants, operations, values = append(tenants, key.tenant), append(operations, key.operation), append(values, key.value)
		ordinals, ids[i] = append(ordinals, i), key.LockID()
		byID[ids[i]] = append(byID[ids[i]], i)
	}
	// Sorted: of two callers with the same keys in other orders, one gets them all rather than both a part.
	slices.Sort(ids)
	ids = slices.Compact(ids)

	to := &sender{pipeline: conn.PgConn().StartPipeline(ctx), prepared: prepared}
	defer func() { err = errors.Join(err, to.pipeline.Close()) }()
	to.send(begin)
	to.send(recordsLock, encodeArray(ids, pgtype.Int8OID, encodeInt8))
	to.send(recordsGet, encodeArray(tenants, pgtype.TextOID, encodeText), encodeArray(operations, pgtype.TextOID, encodeText),
		encodeArray(values, pgtype.TextOID, encodeText), encodeArray(ordinals, pgtype.Int4OID, encodeInt4))
	if err := to.pipeline.Sync(); err != nil {
		return nil, err
	}
	if _, _, err := to.next(); err != nil {
		return nil, readOnly(err) // of BEGIN
	}
	all = make([]Acquisition, len(keys))
	err = to.each(func(row [][]byte) error {
		for _, i := range byID[decodeInt8(row[0])] {
			all[i].Started, all[i].Locked = decodeTime(row[2]), row[1] != nil
			if all[i].Locked {
				all[i].Fence = decodeInt8(row[1])
			}
		}
		return nil
	})
	if err != nil {
		return nil, err
	}
	err = to.each(func(row [][]byte) (err error) {
		i := decodeInt4(row[0])
		all[i].Found = true
		all[i].Record, err = decodeRecord(keys[i], row[1:])
		return err
	})
	return all, err
}
