package pgproxy

import (
	"errors"
	"io"
	"net"
	"os"
	"sync"
	"time"
)

// link is one client's connection and its connection to the server.
type link struct {
	proxy  *Proxy
	client *net.TCPConn
	number int64 // counts sessions, from 1

	closing, closingClient sync.Once
	done                   chan struct{} // closed by cut
	serverGone             chan struct{} // closed when the server sends no more

	// Of the goroutine that reads from the client.
	unread     []byte // the start of a message, not complete yet
	forwarded  int    // how much of it was forwarded already
	statements statements
	asked      int // answers the server owes or has given, one ends with each ReadyForQuery

	mu       sync.Mutex
	server   net.Conn
	plan     *plan
	detached bool // the client is gone: the server's bytes are thrown away until it closes
	answered int
	awaited  int
	arrived  chan struct{} // closed when answered reaches awaited
}

// plan is what shall happen to the answers first to last, counted over the connection's life.
type plan struct {
	rule        Rule
	first, last int
}

func (l *link) over() bool {
	select {
	case <-l.done:
		return true
	default:
		return false
	}
}

// cut ends both connections.
func (l *link) cut(reset bool) {
	l.closing.Do(func() {
		l.cutClient(reset)
		l.mu.Lock()
		defer l.mu.Unlock()
		close(l.done)
		if l.server != nil {
			_ = l.server.Close() // whatever was on its way is meant to be lost
		}
	})
}

func (l *link) cutClient(reset bool) {
	l.closingClient.Do(func() {
		if reset {
			_ = l.client.SetLinger(0)
		}
		_ = l.client.Close() // as above
	})
}

// serve runs the link to its end.
func (l *link) serve() {
	defer l.proxy.forget(l)
	defer l.cut(false)
	startup, ok := l.begin()
	if !ok {
		return
	}
	l.asked = 1 // the startup is answered with a ReadyForQuery too
	if _, err := l.server.Write(startup); err != nil {
		return
	}
	var reading sync.WaitGroup
	reading.Go(l.forward)
	l.backward()
	l.cut(false) // the server has closed, or nobody listens to it
	reading.Wait()
}

// begin handles what comes before the protocol proper, and connects to the server.
func (l *link) begin() (startup []byte, ok bool) {
	for {
		message, code, err := readStartup(l.client)
		if err != nil || !l.proxy.passable(l) {
			return nil, false
		}
		switch code {
		case codeSSL, codeGSSENC:
			if _, err := l.client.Write([]byte{'N'}); err != nil {
				return nil, false
			}
		case codeCancel:
			l.proxy.cancels.Add(1)
			if !l.proxy.config.SwallowCancels && l.connect() {
				if _, err := l.server.Write(message); err == nil {
					_, _ = io.Copy(io.Discard, l.server) // the server closes when it has passed the request on
				}
			}
			return nil, false
		default:
			l.number = l.proxy.connections.Add(1)
			return message, l.connect()
		}
	}
}

func (l *link) connect() bool {
	network, target := l.proxy.upstream()
	server, err := new(net.Dialer).DialContext(l.proxy.ctx, network, target)
	if err != nil {
		return false
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.over() {
		_ = server.Close() // nothing was sent
		return false
	}
	l.server = server
	return true
}

// flush is what a client sends before it waits.
type flush struct {
	bytes []byte
	ends  []int // where its messages end; bytes behind the last are the start of another
	sent  int   // so many of its bytes were forwarded before
}

// read returns the next flush, or what there is of it when the rest does not come. With an error, too.
func (l *link) read() (flush, error) {
	f := flush{bytes: l.unread, sent: l.forwarded}
	chunk := make([]byte, 64<<10)
	for {
		// Without a deadline between flushes, and a new one after every piece.
		deadline := time.Time{}
		if len(f.bytes) > f.sent {
			deadline = time.Now().Add(l.proxy.config.Patience)
		}
		_ = l.client.SetReadDeadline(deadline) // an error shows in Read
		n, err := l.client.Read(chunk)
		f.bytes = append(f.bytes, chunk[:n]...)
		if malformed := f.measure(); malformed != nil {
			return f, malformed
		}
		switch {
		case errors.Is(err, os.ErrDeadlineExceeded):
			l.unread = append([]byte(nil), f.bytes[f.end():]...)
			l.forwarded = len(l.unread)
			return f, nil
		case err != nil:
			return f, err
		case f.complete():
			l.unread = append([]byte(nil), f.bytes[f.end():]...)
			l.forwarded = 0
			f.bytes = f.bytes[:f.end()]
			return f, nil
		}
	}
}

func (f *flush) end() int {
	if len(f.ends) == 0 {
		return 0
	}
	return f.ends[len(f.ends)-1]
}

func (f *flush) measure() error {
	for {
		n, err := measure(f.bytes[f.end():])
		if n == 0 || err != nil {
			return err
		}
		f.ends = append(f.ends, f.end()+n)
	}
}

// complete reports whether the client waits now. It is not asked to wait for the whole of a COPY.
func (f *flush) complete() bool {
	if len(f.ends) == 0 {
		return false
	}
	last := 0
	if len(f.ends) > 1 {
		last = f.ends[len(f.ends)-2]
	}
	kind := f.bytes[last]
	return endsFlush(kind) && (kind == 'd' || f.end() == len(f.bytes))
}

// forward carries the client's bytes to the server until one of them ends, or a rule ends the link.
func (l *link) forward() {
	for {
		f, err := l.read()
		if !l.proxy.passable(l) || len(f.bytes) > f.sent && !l.carry(f) {
			return
		}
		switch {
		case err == nil:
		case errors.Is(err, errMalformed):
			l.cut(false)
			return
		default:
			// The client will not speak again. What it has said is done all the same, and the server may have an answer to it.
			if half, ok := l.server.(interface{ CloseWrite() error }); !ok || half.CloseWrite() != nil {
				l.cut(false)
			}
			return
		}
	}
}

// carry forwards a flush as the rule of its first COMMIT says that has one. It returns false when nothing may follow.
func (l *link) carry(f flush) bool {
	commits, segments := l.statements.read(f.bytes, f.ends)
	for _, c := range commits {
		c.Connection = l.number
		if rule := l.proxy.rules.about(c.Commit); rule.Do != PassThrough {
			return l.apply(rule, f, c, segments)
		}
	}
	l.asked += segments
	return l.send(f.bytes[f.sent:])
}

func (l *link) send(b []byte) bool {
	if _, err := l.server.Write(b); err != nil {
		// The server is gone. Its last words are still on their way to the client: backward ends the link.
		return false
	}
	return true
}

func (l *link) apply(rule Rule, f flush, c seen, segments int) bool {
	kept := c.start
	if rule.WholeFlush {
		kept = 0
	}
	switch rule.Do {
	case CutBefore:
		if kept > f.sent {
			l.send(f.bytes[f.sent:kept])
		}
		l.proxy.cut.Add(1)
		l.cut(rule.Reset)
		return false
	case HalfFlush:
		kept = rule.half(len(f.bytes))
		fallthrough
	case HoldBytes:
		l.hold(rule, f.bytes[f.sent:max(kept, f.sent)], f.bytes[max(kept, f.sent):], l.asked+segments)
		return false
	}
	l.mu.Lock()
	l.plan = &plan{rule: rule, first: l.asked + c.segment, last: l.asked + c.segment}
	if rule.Do == CutAfter {
		l.plan.first = l.asked + 1
	}
	l.mu.Unlock()
	l.asked += segments
	return l.send(f.bytes[f.sent:])
}
