// Package pgproxy is a TCP proxy in front of PostgreSQL that breaks connections at COMMIT.
//
// It understands as much of the protocol (version 3) as it takes to see that a COMMIT is sent, by the simple protocol or
// as a prepared statement, named or not, and which bytes of the server answer it. What then happens is a Rule: the COMMIT
// is lost, or its answer, or half of either, or it arrives late. Between commits it passes bytes on.
//
// It does not see a COMMIT inside a string of several statements, nor through TLS, which it refuses. A Sync that a
// client sends while COPY FROM STDIN runs by the extended protocol would confuse it; pgx sends none.
package pgproxy

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/url"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5/pgconn"
)

// Config changes what a proxy does besides its rules. A nil *Config means all defaults.
type Config struct {
	// SwallowCancels makes cancel requests end at the proxy. They are counted in any case. pgx sends one when a
	// connection breaks, at any time after that: forwarded, it may abort what Release delivers.
	// Default: false, they are forwarded.
	SwallowCancels bool

	// Patience is how long the proxy waits for the rest of a flush before it forwards what it has. A flush is what a
	// client sends before it waits for an answer: normally it ends with a Sync and arrives at once.
	// Default: 100 ms.
	Patience time.Duration
}

func (c *Config) withDefaults() Config {
	var cfg Config
	if c != nil {
		cfg = *c
	}
	if cfg.Patience == 0 {
		cfg.Patience = 100 * time.Millisecond
	}
	return cfg
}

// Stats counts since Start.
type Stats struct {
	Connections int64 // sessions that were begun
	Refused     int64 // connections made while the proxy was Down
	Commits     int64 // seen, whatever became of them
	Cut         int64 // client connections cut by a rule
	Cancels     int64 // cancel requests seen
}

// Proxy is a running proxy. Its methods may be called concurrently.
type Proxy struct {
	config   Config
	listener net.Listener
	ctx      context.Context // ends with Close
	stop     context.CancelFunc
	working  sync.WaitGroup
	rules    rules

	connections, refused, cut, cancels atomic.Int64

	mu              sync.Mutex
	network, target string
	mode            mode
	changed         chan struct{} // closed, and replaced, when mode changes
	links           map[*link]bool
	held            []*held
}

type mode int

const (
	up mode = iota
	down
	blackhole
	closed
)

// Start listens on a free port of this machine and forwards to target, "host:port" or a connection string of a server.
// The proxy outlives ctx, which bounds the start only: Close it.
func Start(ctx context.Context, target string, cfg *Config) (*Proxy, error) {
	p := &Proxy{config: cfg.withDefaults(), changed: make(chan struct{}), links: map[*link]bool{}}
	err := p.Retarget(target)
	if err != nil {
		return nil, err
	}
	if p.listener, err = new(net.ListenConfig).Listen(ctx, "tcp4", "127.0.0.1:0"); err != nil {
		return nil, fmt.Errorf("pgproxy: listen: %w", err)
	}
	p.ctx, p.stop = context.WithCancel(context.WithoutCancel(ctx))
	p.working.Go(p.accept)
	return p, nil
}

// Retarget makes new connections lead to another server, named as for Start. Those that exist keep theirs: Down cuts them.
func (p *Proxy) Retarget(target string) error {
	network := "tcp"
	if strings.Contains(target, "://") || strings.Contains(target, "=") {
		parsed, err := pgconn.ParseConfig(target)
		if err != nil {
			return fmt.Errorf("pgproxy: parse target: %w", err)
		}
		network, target = pgconn.NetworkAddress(parsed.Host, parsed.Port)
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	p.network, p.target = network, target
	return nil
}

func (p *Proxy) upstream() (network, target string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.network, p.target
}

// Addr is where the proxy listens, "127.0.0.1:port".
func (p *Proxy) Addr() string { return p.listener.Addr().String() }

// URL is the connection string with the proxy in the place of its server. It panics if original is not one.
func (p *Proxy) URL(original string) string {
	port := p.listener.Addr().(*net.TCPAddr).Port
	if !strings.Contains(original, "://") {
		return fmt.Sprintf("%s host=127.0.0.1 port=%d", original, port) // of two, the last one counts
	}
	u, err := url.Parse(original)
	if err != nil {
		panic("pgproxy: not a connection URL") // without the error, which would print the password
	}
	q := u.Query()
	q.Del("host")
	q.Del("port")
	u.Host, u.RawQuery = net.JoinHostPort("127.0.0.1", strconv.Itoa(port)), q.Encode()
	return u.String()
}

// Stats returns the counters.
func (p *Proxy) Stats() Stats {
	return Stats{
		Connections: p.connections.Load(), Refused: p.refused.Load(), Commits: p.rules.commits.Load(),
		Cut: p.cut.Load(), Cancels: p.cancels.Load(),
	}
}

// Down makes the server unreachable: every connection is cut, what is held is lost, and a new connection is reset as soon
// as it is made.
func (p *Proxy) Down() { p.enter(down) }

// Blackhole stalls everything without an error: bytes are delivered in neither direction, new connections get no answer.
// Up then delivers what was sent meanwhile, even if its sender has given up.
func (p *Proxy) Blackhole() { p.enter(blackhole) }

// Up ends Down or Blackhole.
func (p *Proxy) Up() { p.enter(up) }

// Close cuts every connection and returns when nothing of the proxy runs any more.
func (p *Proxy) Close() error {
	p.enter(closed)
	p.stop()
	err := p.listener.Close()
	p.working.Wait()
	if err != nil && !errors.Is(err, net.ErrClosed) {
		return fmt.Errorf("pgproxy: close: %w", err)
	}
	return nil
}

func (p *Proxy) enter(next mode) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.mode == closed {
		return
	}
	p.mode = next
	close(p.changed)
	p.changed = make(chan struct{})
	if next == down || next == closed {
		for l := range p.links {
			l.cut(true)
		}
		p.held = nil
	}
}

func (p *Proxy) accept() {
	for {
		conn, err := p.listener.Accept()
		if err != nil {
			if p.ctx.Err() != nil || errors.Is(err, net.ErrClosed) {
				return
			}
			time.Sleep(time.Millisecond) // the client gave up before we took it, or there are no descriptors left
			continue
		}
		l := &link{proxy: p, client: conn.(*net.TCPConn), done: make(chan struct{}), serverGone: make(chan struct{})}
		p.mu.Lock()
		refused := p.mode == down || p.mode == closed
		if !refused {
			p.links[l] = true
			p.working.Go(l.serve)
		}
		p.mu.Unlock()
		if refused {
			p.refused.Add(1)
			l.cut(true)
		}
	}
}

func (p *Proxy) forget(l *link) {
	p.mu.Lock()
	defer p.mu.Unlock()
	delete(p.links, l)
}

// passable returns true when bytes may pass, at once unless Blackhole holds them, and false when the link is over.
func (p *Proxy) passable(l *link) bool {
	for {
		p.mu.Lock()
		mode, changed := p.mode, p.changed
		p.mu.Unlock()
		if mode != blackhole {
			return !l.over()
		}
		select {
		case <-changed:
		case <-l.done:
			return false
		}
	}
}
