// Package ids makes ids and tokens: 63-bit ids in the order of time, whose worker numbers are leased from PostgreSQL; order
// ids that are a checksum of what was ordered; and the values of issued tokens, signed or not.
package ids
