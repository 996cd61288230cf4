// Package orms shows GORM, sqlx and ent on the *sql.Tx of package txnsql. It holds tests only, in a module of its own: a program
// that imports txnsql inherits none of them.
package orms
