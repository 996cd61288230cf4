package redisfront

import (
	"context"
	"fmt"
	"time"

	"github.com/pgonce/pgonce/idempotency"
)

// EntryName is what Redis knows a key's entry by.
func (f *Front) EntryName(key idempotency.Key) string { return f.names(key).entry }

// MarkName is what Redis knows a key's mark by.
func (f *Front) MarkName(key idempotency.Key) string { return f.names(key).mark }

// TakeOnQuorum takes a mark and returns for how long it is certain.
func (f *Front) TakeOnQuorum(ctx context.Context, key idempotency.Key, mark idempotency.AttemptToken, ttl time.Duration) (time.Duration, error) {
	return f.quorum.take(ctx, f.names(key), mark, ttl)
}

// Source is a script's text as it is sent.
func Source(name string) (string, error) {
	source, err := sources.ReadFile("lua/" + name + ".lua")
	return preamble() + string(source), err
}

// CodeRows is the table of codes as docs/redis.md has it.
func CodeRows() (rows []string) {
	for _, c := range codes {
		rows = append(rows, fmt.Sprintf("| %d | %s | %s |", int(c.code), c.name, c.meaning))
	}
	return rows
}
