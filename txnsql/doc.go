// Package txnsql is package txn for programs on database/sql: a function gets a *sql.Tx, and what it writes through it is one
// commit with the record of its key. GORM, sqlx and ent work on that *sql.Tx.
//
// The sql.DB is one of pgx, opened by OpenDB or OpenDBFromPool. The runner is txn's: it takes a connection of the sql.DB,
// begins, records and commits on it, and lends it to the function as a *sql.Tx in between. So every promise and every error is
// txn's too, and a call uses one connection, within the sql.DB's own limits.
//
// The function must not call Commit or Rollback: it returns nil, or an error.
package txnsql
