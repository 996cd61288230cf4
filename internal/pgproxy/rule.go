package pgproxy

import (
	"sync"
	"sync/atomic"
	"time"
)

// Action is what happens to a COMMIT.
type Action string

// The actions.
const (
	// PassThrough does nothing.
	PassThrough Action = ""
	// CutBefore drops the connection on both sides; the COMMIT is not forwarded.
	CutBefore Action = "cut before"
	// CutAfter forwards the flush, waits until the server has answered the COMMIT, and drops the connection without giving
	// any of the flush's answers to the client.
	CutAfter Action = "cut after"
	// CutInReply is CutAfter, but the client gets the answers to what it sent before the COMMIT, and the first bytes of the
	// COMMIT's.
	CutInReply Action = "cut in reply"
	// DelayReply keeps the answer to the COMMIT for Rule.Delay, then gives it.
	DelayReply Action = "delay reply"
	// HoldBytes drops the client's connection and keeps the COMMIT and everything behind it. Release delivers it, Drop
	// drops the server's connection.
	HoldBytes Action = "hold bytes"
	// HalfFlush is HoldBytes for a flush that breaks anywhere: its first bytes are forwarded, the rest is kept.
	HalfFlush Action = "half flush"
)

// Rule is what happens to one COMMIT.
type Rule struct {
	Do Action

	// WholeFlush extends CutBefore and HoldBytes to all of the flush that the COMMIT is in: nothing of it is forwarded.
	// Default: false, the statements before the COMMIT are.
	WholeFlush bool

	// Bytes is how much of the COMMIT's answer CutInReply gives, and how much of the flush HalfFlush forwards.
	// Default: half of it.
	Bytes int

	// Delay is for DelayReply.
	Delay time.Duration

	// Reset cuts the client's connection with a reset (RST). What it has not read yet may be lost with it.
	// Default: false, the connection is closed (FIN).
	Reset bool
}

// half is Rule.Bytes of so many.
func (r Rule) half(of int) int {
	if r.Bytes == 0 {
		return of / 2
	}
	return min(r.Bytes, of)
}

// Commit is a COMMIT that a client has sent.
type Commit struct {
	Number     int64  // 1 is the first the proxy saw
	Connection int64  // 1 is the first session through the proxy
	Simple     bool   // by the simple protocol
	Statement  string // the prepared statement, empty if unnamed or Simple
}

// rules decide about each COMMIT: first those that wait for one, then the standing one.
type rules struct {
	commits atomic.Int64

	mu       sync.Mutex
	next     []Rule
	standing func(Commit) Rule
}

// Next makes the rules decide about the next commits, one each, in this order, after those that already wait.
func (p *Proxy) Next(rules ...Rule) {
	p.rules.mu.Lock()
	defer p.rules.mu.Unlock()
	p.rules.next = append(p.rules.next, rules...)
}

// Times makes the rule decide about the next n commits.
func (p *Proxy) Times(n int, rule Rule) {
	for range n {
		p.Next(rule)
	}
}

// Always makes the rule decide about every commit for which no rule of Next waits.
func (p *Proxy) Always(rule Rule) { p.Decide(func(Commit) Rule { return rule }) }

// Decide makes a function decide about every commit for which no rule of Next waits. It is called by one connection at a
// time and must not call the proxy's rules. nil: all pass.
func (p *Proxy) Decide(decide func(Commit) Rule) {
	p.rules.mu.Lock()
	defer p.rules.mu.Unlock()
	p.rules.standing = decide
}

// Waiting returns how many rules of Next and Times have not met their commit yet.
func (p *Proxy) Waiting() int {
	p.rules.mu.Lock()
	defer p.rules.mu.Unlock()
	return len(p.rules.next)
}

// about numbers a COMMIT and finds its rule.
func (r *rules) about(c Commit) Rule {
	r.mu.Lock()
	defer r.mu.Unlock()
	c.Number = r.commits.Add(1)
	if len(r.next) > 0 {
		rule := r.next[0]
		r.next = r.next[1:]
		return rule
	}
	if r.standing == nil {
		return Rule{}
	}
	return r.standing(c)
}
