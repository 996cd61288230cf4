package redisfront

import (
	"context"
	"sync"

	"github.com/redis/go-redis/v9"
)

// maxFlights are the round trips that callers' commands are in at a time. What comes while they are on their way goes with
// the next, together: for both sides a command in company is much cheaper than one alone.
const maxFlights = 2

// calls sends what callers ask, those who ask at the same time in one round trip.
type calls struct {
	front  *Front
	queue  chan *asked // nil: everybody goes alone
	quit   <-chan struct{}
	stop   context.CancelFunc
	flying sync.WaitGroup
}

// asked is a command whose caller waits.
type asked struct {
	command
	ctx  context.Context //nolint:containedctx // the caller's, to leave out what nobody waits for any more
	done chan answer
}

func newCalls(f *Front) *calls {
	ctx, cancel := context.WithCancel(context.Background())
	c := &calls{front: f, quit: ctx.Done(), stop: cancel}
	if _, is := f.client.(*redis.ClusterClient); is {
		return c // in company with those for a slow node all would be as slow
	}
	c.queue = make(chan *asked, maxBatch)
	for range maxFlights {
		c.flying.Go(c.fly)
	}
	return c
}

// run runs a command for at most the front's timeout.
func (c *calls) run(ctx context.Context, what command) (reply, error) {
	if c.queue == nil {
		return c.front.exchange(ctx, what.script, what.keys, what.args...)
	}
	ctx, cancel := context.WithTimeout(ctx, c.front.config.Timeout)
	defer cancel()
	a := &asked{command: what, ctx: ctx, done: make(chan answer, 1)}
	select {
	case c.queue <- a:
	case <-ctx.Done():
		return reply{}, failed(what.script.name, context.Cause(ctx))
	case <-c.quit:
		return reply{}, &Error{Script: what.script.name, Code: CodeUnavailable, Err: errClosed}
	}
	select {
	case got := <-a.done:
		return got.reply, got.err
	case <-ctx.Done():
		return reply{}, failed(what.script.name, context.Cause(ctx))
	case <-c.quit:
		return reply{}, &Error{Script: what.script.name, Code: CodeUnavailable, Err: errClosed}
	}
}

func (c *calls) fly() {
	batch, commands := make([]*asked, 0, maxBatch), make([]command, 0, maxBatch)
	for {
		select {
		case <-c.quit:
			return
		case first := <-c.queue:
			batch = c.gather(append(batch[:0], first))
		}
		commands = commands[:0]
		for _, a := range batch {
			commands = append(commands, a.command)
		}
		for i, got := range c.front.exchangeAll(context.Background(), commands) {
			batch[i].done <- got
		}
		clear(batch) // the bytes may go
		clear(commands)
	}
}

// gather adds who else waits by now. A mark that is taken for a caller who has left would only be in the way.
func (c *calls) gather(batch []*asked) []*asked {
	if batch[0].ctx.Err() != nil {
		batch = batch[:0]
	}
	for len(batch) < maxBatch {
		select {
		case next := <-c.queue:
			if next.ctx.Err() == nil {
				batch = append(batch, next)
			}
		default:
			return batch
		}
	}
	return batch
}

// close ends the flights; who still waits is told that the front is closed.
func (c *calls) close() {
	c.stop()
	c.flying.Wait()
}
