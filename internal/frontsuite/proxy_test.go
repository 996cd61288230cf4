package frontsuite

import (
	"bytes"
	"context"
	"net"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// proxy stands between go-redis and Redis: it makes answers late, or loses them.
type proxy struct {
	listener net.Listener
	delay    atomic.Int64 // of every answer, in ns
	losing   atomic.Bool  // every second answer to a script is lost with its connection
	scripts  atomic.Int64
	lost     atomic.Int64

	mu    sync.Mutex
	conns map[net.Conn]bool
	group sync.WaitGroup
}

func newProxy(t *testing.T, target string) *proxy {
	t.Helper()
	l, err := (&net.ListenConfig{}).Listen(t.Context(), "tcp", "127.0.0.1:0")
	require.NoError(t, err)
	p := &proxy{listener: l, conns: map[net.Conn]bool{}}
	dial := func() (net.Conn, error) {
		return (&net.Dialer{}).DialContext(context.WithoutCancel(t.Context()), "tcp", target)
	}
	p.group.Go(func() { p.accept(dial) })
	t.Cleanup(func() {
		_ = l.Close()
		p.mu.Lock()
		for conn := range p.conns {
			_ = conn.Close()
		}
		p.conns = nil
		p.mu.Unlock()
		p.group.Wait()
	})
	return p
}

func (p *proxy) address() string { return p.listener.Addr().String() }

func (p *proxy) accept(dial func() (net.Conn, error)) {
	for {
		client, err := p.listener.Accept()
		if err != nil {
			return
		}
		server, err := dial()
		if err != nil {
			_ = client.Close()
			continue
		}
		if !p.keep(client, server) {
			return
		}
		lose := &atomic.Bool{} // the answer that comes next
		p.group.Go(func() { p.forward(client, server, lose) })
		p.group.Go(func() { p.answer(client, server, lose) })
	}
}

func (p *proxy) keep(conns ...net.Conn) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, conn := range conns {
		if p.conns == nil {
			_ = conn.Close()
		} else {
			p.conns[conn] = true
		}
	}
	return p.conns != nil
}

func (p *proxy) drop(conns ...net.Conn) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, conn := range conns {
		_ = conn.Close()
		delete(p.conns, conn)
	}
}

func (p *proxy) forward(client, server net.Conn, lose *atomic.Bool) {
	defer p.drop(client, server)
	buffer := make([]byte, 64<<10)
	for {
		n, err := client.Read(buffer)
		if err != nil {
			return
		}
		if p.losing.Load() && bytes.Contains(bytes.ToLower(buffer[:n]), []byte("eval")) && p.scripts.Add(1)%2 == 1 {
			lose.Store(true)
		}
		if _, err := server.Write(buffer[:n]); err != nil {
			return
		}
	}
}

func (p *proxy) answer(client, server net.Conn, lose *atomic.Bool) {
	defer p.drop(client, server)
	buffer := make([]byte, 64<<10)
	for {
		n, err := server.Read(buffer)
		if err != nil {
			return
		}
		time.Sleep(time.Duration(p.delay.Load()))
		if lose.Load() {
			p.lost.Add(1)
			return
		}
		if _, err := client.Write(buffer[:n]); err != nil {
			return
		}
	}
}
