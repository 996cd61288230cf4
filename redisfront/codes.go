package redisfront

import (
	"fmt"
	"strings"
)

// Code is what a script replied, or what became of the call.
type Code int

// The codes. Those below 20 are the scripts' own.
const (
	OK          Code = 0
	Kept        Code = 1
	Busy        Code = 2
	Done        Code = 3
	Miss        Code = 4
	Same        Code = 5
	Refused     Code = 6
	Mismatch    Code = 7
	Invalid     Code = 20
	Timeout     Code = 21
	OutOfMemory Code = 22
	ReadOnly    Code = 23
	Unavailable Code = 24
)

// codes is the one table of codes: the scripts get their names from here, and docs/redis.md is checked against it.
var codes = []struct {
	code    Code
	name    string
	meaning string
}{
	{OK, "OK", "done as asked"},
	{Kept, "KEPT", "nothing changed: what is there is newer, or another attempt's"},
	{Busy, "BUSY", "another attempt's mark is there"},
	{Done, "DONE", "a final record is there"},
	{Miss, "MISS", "nothing is known"},
	{Same, "SAME", "the state is there already"},
	{Refused, "REFUSED", "no transition leads from the state that is there to the one asked for"},
	{Mismatch, "MISMATCH", "the transition's id was used for another state"},
	{Invalid, "INVALID", "the script refused its arguments, or replied what this release does not know"},
	{Timeout, "TIMEOUT", "no reply in time"},
	{OutOfMemory, "OUT_OF_MEMORY", "Redis refuses writes: its memory is full and it may not evict"},
	{ReadOnly, "READ_ONLY", "the server is a replica"},
	{Unavailable, "UNAVAILABLE", "any other error of Redis or of the way to it"},
}

func (c Code) String() string {
	for _, known := range codes {
		if known.code == c {
			return known.name
		}
	}
	return fmt.Sprintf("code %d", int(c))
}

// preamble declares the scripts' codes in Lua.
func preamble() string {
	var names, values []string
	for _, c := range codes {
		if c.code < Invalid {
			names, values = append(names, c.name), append(values, fmt.Sprint(int(c.code)))
		}
	}
	return "local " + strings.Join(names, ", ") + " = " + strings.Join(values, ", ") + "\n"
}

// Error is a call that Redis did not serve. It is never an error of the service's call: PostgreSQL is asked instead.
type Error struct {
	Script string
	Code   Code
	Err    error
}

func (e *Error) Error() string { return fmt.Sprintf("redisfront: %s: %v: %v", e.Script, e.Code, e.Err) }

func (e *Error) Unwrap() error { return e.Err }
