package redisfront

import (
	"context"
	"embed"
	"errors"
	"fmt"

	"github.com/redis/go-redis/v9"

	"github.com/pgonce/pgonce/idempotency"
)

//go:embed lua/*.lua
var sources embed.FS

// script is one of ours. It is sent by its hash; a server that has lost it (restart, failover, SCRIPT FLUSH) gets its text.
type script struct {
	name string
	*redis.Script
}

var (
	scriptBegin      = load("begin")
	scriptLookup     = load("lookup")
	scriptRenew      = load("renew")
	scriptEnd        = load("end")
	scriptPublish    = load("publish")
	scriptEvict      = load("evict")
	scriptHeld       = load("held")
	scriptTransition = load("transition")
	scriptMirror     = load("mirror")
	scriptKeep       = load("keep")
	scriptInspect    = load("inspect")
	scriptDiscard    = load("discard")
)

func load(name string) script {
	source, err := sources.ReadFile("lua/" + name + ".lua")
	if err != nil {
		panic(err) // the name is a constant
	}
	return script{name: name, Script: redis.NewScript(preamble() + string(source))}
}

// reply is what a script returned: a code and what belongs to it.
type reply struct {
	script string
	code   Code
	rest   []any
}

// text returns value i, counted from 1; nil if it is not there.
func (r reply) text(i int) []byte {
	if i > len(r.rest) {
		return nil
	}
	s, _ := r.rest[i-1].(string)
	return []byte(s)
}

// run runs a script for a caller, if Redis is asked at all now.
func (f *Front) run(ctx context.Context, s script, n names, keys []string, args ...any) (reply, error) {
	done, err := f.breaker.pass()
	if err != nil {
		return reply{}, &Error{Script: s.name, Code: CodeUnavailable, Err: err}
	}
	r, err := f.calls.run(ctx, command{script: s, keys: keys, args: args})
	if err != nil && ctx.Err() != nil {
		done(n, errCallerGone)
		return reply{}, err
	}
	done(n, err)
	if err != nil {
		f.emit(ctx, idempotency.FrontFailed{Front: Name, Op: s.name, Err: err})
	}
	return r, err
}

// command is a script with what it is given.
type command struct {
	script script
	keys   []string
	args   []any
}

// answer is what became of a command.
type answer struct {
	reply reply
	err   error
}

// exchange runs a script in a round trip of its own.
func (f *Front) exchange(ctx context.Context, s script, keys []string, args ...any) (reply, error) {
	ctx, cancel := context.WithTimeout(ctx, f.config.Timeout)
	defer cancel()
	values, err := s.Run(ctx, f.client, keys, args...).Slice()
	if err != nil {
		return reply{}, failed(s.name, err)
	}
	return read(s, values)
}

// exchangeAll runs scripts in their order, in one round trip. One without a script is left out.
func (f *Front) exchangeAll(ctx context.Context, commands []command) []answer {
	ctx, cancel := context.WithTimeout(ctx, f.config.Timeout)
	defer cancel()
	replies := make([]*redis.Cmd, len(commands))
	pipe := f.client.Pipeline()
	for i, c := range commands {
		if c.script.Script != nil {
			replies[i] = c.script.EvalSha(ctx, pipe, c.keys, c.args...)
		}
	}
	_, _ = pipe.Exec(ctx) // every reply has its own error
	// A server that has lost its scripts gets their text. All from the first one on, or their order would change: what ran
	// a first time runs a second time to the same end.
	var again redis.Pipeliner
	for i, c := range commands {
		if replies[i] == nil {
			continue
		}
		if again == nil && redis.HasErrorPrefix(replies[i].Err(), "NOSCRIPT") {
			again = f.client.Pipeline()
		}
		if again != nil {
			replies[i] = c.script.Eval(ctx, again, c.keys, c.args...)
		}
	}
	if again != nil {
		_, _ = again.Exec(ctx)
	}
	answers := make([]answer, len(commands))
	for i, c := range commands {
		if replies[i] == nil {
			continue
		}
		values, err := replies[i].Slice()
		if err != nil {
			answers[i].err = failed(c.script.name, err)
			continue
		}
		answers[i].reply, answers[i].err = read(c.script, values)
	}
	return answers
}

func read(s script, values []any) (reply, error) {
	if len(values) > 0 {
		if code, ok := values[0].(int64); ok && Code(code) < CodeInvalid {
			return reply{script: s.name, code: Code(code), rest: values[1:]}, nil
		}
	}
	return reply{}, &Error{Script: s.name, Code: CodeInvalid, Err: fmt.Errorf("replied %.100v", values)}
}

// failed makes an *Error of what go-redis returned.
func failed(script string, err error) error {
	code := CodeUnavailable
	switch {
	case errors.Is(err, context.DeadlineExceeded) || isTimeout(err):
		code = CodeTimeout
	case redis.IsOOMError(err):
		code = CodeOutOfMemory
	case redis.IsReadOnlyError(err):
		code = CodeReadOnly
	case redis.HasErrorPrefix(err, "ERR max number of clients"):
	case redis.HasErrorPrefix(err, "ERR") || redis.HasErrorPrefix(err, "WRONGTYPE"):
		code = CodeInvalid
	}
	return &Error{Script: script, Code: code, Err: err}
}

func isTimeout(err error) bool {
	var timeout interface{ Timeout() bool }
	return errors.As(err, &timeout) && timeout.Timeout()
}
