package main

import (
	"errors"
	"flag"
	"fmt"
	"io"
	"net/url"
	"os"
	"time"
)

// options are the command line.
type options struct {
	addr      string
	once      bool
	json      bool
	unsafe    bool
	strict    bool
	killRedis bool
	chaos     bool
	serve     bool
	origin    string
	instances int
	storm     stormOptions
}

// defaultAddr is where the service listens. If it is taken and nobody asked for it, any free port will do.
const defaultAddr = "127.0.0.1:8080"

const usage = `demo is an order service that takes every order once, and a storm of bad clients that tries to make it fail.

Without arguments it starts a PostgreSQL and a Redis of its own, serves on %s (or a free port), prints
commands to try, plays the storm against itself over HTTP, prints what came of it, and stays up until Ctrl-C.

PostgreSQL alone decides whether an order is made. Before it stand a cache in the memory of each instance of the service,
and Redis, which knows what other instances have done: try -instances 3. They answer most retries, and may be lost at any
time: -strict does without them, -kill-redis loses Redis.

The storm: every key is one order that somebody wants. Its clients click twice, give up too early and try again, or hang
up in the middle; one of them goes on until it has a definite answer. Which client does what is the same in every run.
At the end the database is asked whether any key got two orders, and whether all clients were told the truth.

A round is -keys fresh keys and -requests requests. Without -duration the storm is one round. With it, rounds follow one
another until the time is over; then no new key is begun, and those begun are finished.

PGONCE_DATABASE_URL names a server to use instead, where databases pgonce_* may be created; the demo drops its own at
the end. PGONCE_REDIS_URL names a Redis; the demo removes its keys at the end. PGONCE_NO_INSTALL (any value) forbids
installing packages.

Exit status: 0 if every order was made once; 1 if one was duplicated or lost, a request ended in an error, or the demo
could not start; 2 for a wrong command line; 130 if it was interrupted before the end.

`

// parseOptions reads the command line. It has told out what is wrong with it before it returns an error.
func parseOptions(args []string, out io.Writer) (options, error) {
	var o options
	flags := flag.NewFlagSet("demo", flag.ContinueOnError)
	flags.SetOutput(out)
	flags.Usage = func() {
		_, _ = fmt.Fprintf(out, usage, defaultAddr)
		flags.PrintDefaults()
	}
	flags.StringVar(&o.addr, "addr", "", "`host:port` to listen on (default "+defaultAddr+", or a free port if that is taken)")
	flags.BoolVar(&o.once, "once", false, "exit after the table instead of staying up")
	flags.BoolVar(&o.json, "json", false, "print the table as one JSON object, the last line of standard output; all else goes to standard error")
	flags.BoolVar(&o.unsafe, "unsafe", false, "play the same storm without the library, to see what it is for")
	flags.BoolVar(&o.strict, "strict", false, "PostgreSQL alone: no Redis and no cache")
	flags.BoolVar(&o.killRedis, "kill-redis", false, "kill Redis in the middle of the storm, and start it again a little later")
	flags.BoolVar(&o.chaos, "chaos", false, "afterwards let payments die and make Redis differ from PostgreSQL, and show the compensator's repair")
	flags.BoolVar(&o.serve, "serve", false, "only serve: no storm, and nothing is killed")
	flags.StringVar(&o.origin, "allow-origin", "", "`origin` whose pages may use the service too, such as http://localhost:3000 (CORS)")
	flags.IntVar(&o.instances, "instances", 1, "instances of the service on one database and one Redis; the storm goes to all of them")
	flags.IntVar(&o.storm.users, "users", 100, "clients at work at the same time, at most")
	flags.IntVar(&o.storm.keys, "keys", 100, "keys in a round")
	flags.IntVar(&o.storm.requests, "requests", 0, "requests in a round (default 10 per key, and at least one per user)")
	flags.DurationVar(&o.storm.duration, "duration", 0, "go on with round after round for this `time`, for example 5m")
	if err := flags.Parse(args); err != nil {
		return options{}, err
	}
	if o.storm.requests == 0 {
		o.storm.requests = max(10*o.storm.keys, o.storm.users)
	}
	if err := o.validate(flags.NArg()); err != nil {
		_, _ = fmt.Fprintf(out, "demo: %v (demo -help tells more)\n", err)
		return options{}, err
	}
	return o, nil
}

// hybrid reports whether there are fronts, and so a Redis.
func (o options) hybrid() bool { return !o.strict && !o.unsafe }

func (o options) validate(arguments int) error {
	s := o.storm
	switch {
	case arguments > 0:
		return errors.New("there are flags only, no arguments")
	case o.instances < 1 || o.instances > 10:
		return errors.New("-instances must be from 1 to 10")
	case o.killRedis && !o.hybrid():
		return errors.New("-kill-redis needs a Redis: leave out -strict and -unsafe, which have none")
	case o.killRedis && os.Getenv(envRedis) != "":
		return errors.New("-kill-redis kills the demo's own Redis only: unset " + envRedis + ", which names somebody else's")
	case o.chaos && !o.hybrid():
		return errors.New("-chaos needs a Redis: leave out -strict and -unsafe, which have none")
	case o.chaos && s.keys < 3:
		return errors.New("-chaos needs at least 3 -keys: it breaks three kinds of what the storm has left")
	case o.serve && (o.once || o.json || o.killRedis || o.chaos || s.duration > 0):
		return errors.New("-serve plays no storm: leave out -once, -json, -kill-redis, -chaos and -duration, which are about it")
	case !validOrigin(o.origin):
		return errors.New("-allow-origin must be an origin as browsers write it, such as http://localhost:3000")
	case s.users < 1 || s.users > 10_000:
		return errors.New("-users must be from 1 to 10000")
	case s.keys < 1 || s.keys > 100_000:
		return errors.New("-keys must be from 1 to 100000")
	case s.requests < s.keys || s.requests > 1_000_000:
		return errors.New("-requests must be from -keys to 1000000: every key needs one")
	case s.duration < 0 || s.duration > 24*time.Hour:
		return errors.New("-duration must be from 0 to 24h")
	}
	return nil
}

// validOrigin also takes none.
func validOrigin(origin string) bool {
	u, err := url.Parse(origin)
	return err == nil && (origin == "" || u.Host != "" && (&url.URL{Scheme: u.Scheme, Host: u.Host}).String() == origin)
}
