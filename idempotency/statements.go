package idempotency

import (
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgtype"

	"github.com/pgonce/pgonce/internal/dbsqlc"
)

var (
	keyOIDs    = []uint32{pgtype.TextOID, pgtype.TextOID, pgtype.TextOID}
	insertOIDs = []uint32{
		pgtype.TextOID, pgtype.TextOID, pgtype.TextOID, pgtype.TimestamptzOID, pgtype.TextOID, pgtype.Int8OID,
		pgtype.Int8OID, pgtype.Int8OID, pgtype.ByteaOID, pgtype.ByteaOID, pgtype.TextOID, pgtype.TextOID, pgtype.TextOID,
		pgtype.TextOID, pgtype.TextOID, pgtype.TextOID, pgtype.ByteaOID, pgtype.BoolOID,
	}

	recordLock    = &statement{"pgonce_lock", dbsqlc.RecordLock, []uint32{pgtype.Int8OID}}
	recordGet     = &statement{"pgonce_get", dbsqlc.RecordGet, keyOIDs}
	recordsLock   = &statement{"pgonce_locks", dbsqlc.RecordsLock, []uint32{pgtype.Int8ArrayOID}}
	recordsGet    = &statement{"pgonce_gets", dbsqlc.RecordsGet, []uint32{pgtype.TextArrayOID, pgtype.TextArrayOID, pgtype.TextArrayOID, pgtype.Int4ArrayOID}}
	recordInsert  = &statement{"pgonce_insert", dbsqlc.RecordInsert, insertOIDs}
	recordReplace = &statement{"pgonce_replace", dbsqlc.RecordReplace, insertOIDs}
	attemptFailed = &statement{"pgonce_attempt_failed", dbsqlc.AttemptInsertFailed, append(keyOIDs[:3:3], pgtype.ByteaOID)}
	bypassInsert  = &statement{"pgonce_bypass", dbsqlc.BypassInsert, []uint32{
		pgtype.TextOID, pgtype.TextOID, pgtype.TextOID, pgtype.ByteaOID, pgtype.ByteaOID, pgtype.TextOID, pgtype.TextOID,
		pgtype.TimestamptzOID, pgtype.TextOID, pgtype.TextOID, pgtype.TextOID, pgtype.TextOID, pgtype.TextOID, pgtype.Int8OID, pgtype.Int8OID, pgtype.BoolOID,
	}}
	commit = &statement{"pgonce_commit", "COMMIT", nil}

	// BEGIN names its isolation level and access mode: the server's defaults could be others.
	begin = map[pgx.TxIsoLevel]*statement{
		pgx.ReadCommitted:  {"pgonce_begin_rc", "BEGIN ISOLATION LEVEL READ COMMITTED READ WRITE", nil},
		pgx.RepeatableRead: {"pgonce_begin_rr", "BEGIN ISOLATION LEVEL REPEATABLE READ READ WRITE", nil},
		pgx.Serializable:   {"pgonce_begin_s", "BEGIN ISOLATION LEVEL SERIALIZABLE READ WRITE", nil},
	}
)
