// Package sqlsuite examines the SQL API, for programs in other languages: alone, from psql, and from Node.js beside Go callers
// on the same keys.
package sqlsuite
