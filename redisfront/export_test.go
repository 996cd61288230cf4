package redisfront

import "github.com/pgonce/pgonce/idempotency"

// EntryName is what Redis knows a key's entry by.
func (f *Front) EntryName(key idempotency.Key) string { return f.names(key).entry }

// Source is a script's text as it is sent.
func Source(name string) (string, error) {
	source, err := sources.ReadFile("lua/" + name + ".lua")
	return preamble() + string(source), err
}
