package main

import (
	"hash/fnv"
	"math/rand/v2"
	"strings"
	"time"
)

// A click is one HTTP request of a client.
type click struct {
	delay    time.Duration // before it
	patience time.Duration // then the client gives up; 0: it waits for the answer
	hangUp   bool          // the client closes the connection as soon as its patience is over, and reads nothing
	half     bool          // it has not even sent the whole body by then
}

// A visit is what one client does: its clicks one after another.
type visit []click

// plan makes exactly n requests for the key with this number: a crowd of clients who come at the same time, and then
// last requests of a client who goes on until it has a definite answer. It is the same in every run.
func plan(number, n int) (crowd []visit, last int) {
	rng := rand.New(rand.NewPCG(1, uint64(number))) //nolint:gosec // a plan, not a secret
	upTo := func(d time.Duration) time.Duration { return time.Duration(rng.Int64N(int64(d))) }
	last = min(max(n/3, 1), 3)
	for i := number; n > last; i++ {
		var visits []visit
		switch kind := i % 4; {
		case kind == 0 && n-last >= 2: // a double click
			visits = []visit{{{}}, {{delay: upTo(5 * time.Millisecond)}}}
		case kind == 1: // hangs up in the middle
			visits = []visit{{{patience: upTo(60 * time.Millisecond), hangUp: true, half: rng.IntN(3) == 0}}}
		case kind == 2 && n-last >= 2: // gives up too early, and tries again
			visits = []visit{{{patience: 10*time.Millisecond + upTo(80*time.Millisecond)}, {delay: upTo(20 * time.Millisecond)}}}
		default: // comes a little later
			visits = []visit{{{delay: upTo(150 * time.Millisecond)}}}
		}
		for _, v := range visits {
			n -= len(v)
		}
		crowd = append(crowd, visits...)
	}
	return crowd, last
}

// stormPrefix begins the storm's keys.
const stormPrefix = "storm-"

// stormThink is how long the shop takes over an order of the storm: mostly a moment, for one key in ten longer than a
// duplicate is willing to wait. Other people's orders are taken at once.
func stormThink(key string) time.Duration {
	if !strings.HasPrefix(key, stormPrefix) {
		return 0
	}
	h := fnv.New64a()
	_, _ = h.Write([]byte(key))
	rng := rand.New(rand.NewPCG(2, h.Sum64())) //nolint:gosec // a play, not a secret
	between := func(from, to int) time.Duration { return time.Duration(from+rng.IntN(to-from)) * time.Millisecond }
	switch p := rng.IntN(100); {
	case p < 70:
		return between(0, 20)
	case p < 90:
		return between(40, 120)
	default:
		return between(350, 500)
	}
}
