// Package localfront keeps final outcomes in the memory of the process, before Redis and PostgreSQL: a duplicate that
// comes back to the same process costs half a microsecond.
//
// It is bounded by records and by bytes, and an entry is believed for a few minutes at most, since an operator may change
// a record, and only within the epoch it was written in. Entries are copied on their way in and out.
package localfront
