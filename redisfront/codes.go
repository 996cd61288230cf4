package redisfront

import (
	"fmt"
	"strings"
)

// Code is what a script replied, or what became of the call.
type Code int

// The codes. Those below 20 are the scripts' own.
const (
	CodeOK          Code = 0
	CodeKept        Code = 1
	CodeBusy        Code = 2
	CodeDone        Code = 3
	CodeMiss        Code = 4
	CodeSame        Code = 5
	CodeRefused     Code = 6
	CodeMismatch    Code = 7
	CodeForeign     Code = 8
	CodeInvalid     Code = 20
	CodeTimeout     Code = 21
	CodeOutOfMemory Code = 22
	CodeReadOnly    Code = 23
	CodeUnavailable Code = 24
)

// codes is the one table of codes: the scripts get their names from here, and docs/redis.md is checked against it.
var codes = []struct {
	code    Code
	name    string
	meaning string
}{
	{CodeOK, "OK", "done as asked"},
	{CodeKept, "KEPT", "nothing changed: what is there is newer, or another attempt's"},
	{CodeBusy, "BUSY", "another attempt's mark is there"},
	{CodeDone, "DONE", "a final record is there"},
	{CodeMiss, "MISS", "nothing is known"},
	{CodeSame, "SAME", "the state is there already"},
	{CodeRefused, "REFUSED", "no transition leads from the state that is there to the one asked for"},
	{CodeMismatch, "MISMATCH", "the transition's id was used for another state"},
	{CodeForeign, "FOREIGN", "something that is not ours has our name"},
	{CodeInvalid, "INVALID", "the script refused its arguments, or replied what this release does not know"},
	{CodeTimeout, "TIMEOUT", "no reply in time"},
	{CodeOutOfMemory, "OUT_OF_MEMORY", "Redis refuses writes: its memory is full and it may not evict"},
	{CodeReadOnly, "READ_ONLY", "the server is a replica"},
	{CodeUnavailable, "UNAVAILABLE", "any other error of Redis or of the way to it"},
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
		if c.code < CodeInvalid {
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
