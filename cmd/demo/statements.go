package main

import (
	"encoding/binary"
	"io"
	"sync/atomic"

	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgproto3"
)

// countStatements has connections of this configuration add every statement they send to sent, whichever way it goes: BEGIN
// and COMMIT too, and each one of a batch or a pipeline. Preparing a statement is not counted, only running it; several
// statements in one message of the simple protocol are counted as one.
func countStatements(config *pgconn.Config, sent *atomic.Int64) {
	build := config.BuildFrontend
	config.BuildFrontend = func(r io.Reader, w io.Writer) *pgproto3.Frontend {
		return build(r, &statementCounter{to: w, sent: sent})
	}
}

// statementCounter reads along what goes to the server. A connection writes from one goroutine at a time.
type statementCounter struct {
	to   io.Writer
	sent *atomic.Int64

	typed  bool   // false before the first message, which has a length and no type
	header []byte // of the message that is on its way
	body   int    // bytes of it still to come
}

func (c *statementCounter) Write(p []byte) (int, error) {
	c.read(p)
	return c.to.Write(p)
}

func (c *statementCounter) read(p []byte) {
	for len(p) > 0 {
		if c.body > 0 {
			n := min(c.body, len(p))
			c.body -= n
			p = p[n:]
			continue
		}
		c.header = append(c.header, p[0])
		p = p[1:]
		const length = 4
		switch {
		case !c.typed && len(c.header) == length:
			c.typed = true
		case c.typed && len(c.header) == 1+length:
			if c.header[0] == 'E' || c.header[0] == 'Q' { // Execute, Query
				c.sent.Add(1)
			}
		default:
			continue
		}
		c.body = int(binary.BigEndian.Uint32(c.header[len(c.header)-length:])) - length // it counts itself
		c.header = c.header[:0]
	}
}
