package vet

import (
	"fmt"
	"go/token"
	"slices"
)

// kind is what a finding is about, and what a comment accepts.
type kind string

const (
	kindPool kind = "pool" // SQL past the transaction
	kindHTTP kind = "http" // a call to somebody else
	kindTx   kind = "tx"   // the transaction itself is ended, given away, or not the one that was given
)

var advice = map[kind]string{
	kindPool: "what it writes there stays if the function fails, and on a full pool it waits for its own function's connection: use " +
		"the transaction, or do it before or after the call",
	kindHTTP: "no rollback takes that back, and the transaction stays open while it waits: do it in the first function of txn.WithLease",
	kindTx:   "it is the runner's to end, by what the function returns, and the one that the function was given is the only one it may use",
}

// effect is what a function does, said so that it can be read where the function is called.
type effect struct {
	Kind kind
	What string // "calls (*pgxpool.Pool).Exec"
	At   string // file:line; empty where the finding itself is there
}

// effects are what is known of a function: a fact, for the packages that call it.
type effects struct {
	Always []effect
	Params []paramEffect
	Runs   []int // the parameters that it has run in a transaction
}

// What is no parameter's index.
const (
	always     = -1 // the effect depends on nothing
	ofReceiver = -2 // it depends on what the method's receiver was made with
)

// paramEffect is an effect on what the function is given.
type paramEffect struct {
	Index  int
	Effect effect
}

// AFact marks it as one.
func (*effects) AFact() {}

func (e *effects) String() string { return fmt.Sprintf("%d effects", e.size()) }

func (e *effects) empty() bool { return e.size() == 0 && len(e.Runs) == 0 }
func (e *effects) size() int   { return len(e.Always) + len(e.Params) }

// add takes the first effect of a kind: one is enough to say why.
func (e *effects) add(f finding, at string) {
	one := f.effect
	if one.At == "" {
		one.At = at
	}
	if f.param != always {
		if !slices.ContainsFunc(e.Params, func(p paramEffect) bool { return p.Index == f.param && p.Effect.Kind == f.Kind }) {
			e.Params = append(e.Params, paramEffect{f.param, one})
		}
		return
	}
	if !slices.ContainsFunc(e.Always, func(known effect) bool { return known.Kind == f.Kind }) {
		e.Always = append(e.Always, one)
	}
}

// finding is an effect at a place in the function that is looked at. param is what it depends on there.
type finding struct {
	pos token.Pos
	effect
	via   string
	param int
}

func (f finding) String() string {
	text := "the function " + f.What
	if f.via != "" {
		text = fmt.Sprintf("the function calls %s, which %s (%s)", f.via, f.What, f.At)
	}
	return text + ": " + advice[f.Kind]
}
