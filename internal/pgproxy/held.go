package pgproxy

import (
	"context"
	"errors"
	"fmt"
)

// held is a server connection that waits for the rest of what a client sent before it was cut.
type held struct {
	link *link
	rest []byte
}

var errServerClosed = errors.New("the server has closed the connection")

// hold forwards a part of a flush, cuts the client and keeps the server's connection open. answers is how many the server
// will have given when it has got the rest too.
func (l *link) hold(rule Rule, part, rest []byte, answers int) {
	l.mu.Lock()
	l.detached, l.awaited, l.arrived = true, answers, make(chan struct{})
	l.mu.Unlock()
	if len(part) > 0 && !l.send(part) {
		l.cut(rule.Reset)
		return
	}
	p := l.proxy
	p.mu.Lock()
	if !l.over() {
		p.held = append(p.held, &held{link: l, rest: append([]byte(nil), rest...)})
	}
	p.mu.Unlock()
	p.cut.Add(1)
	l.cutClient(rule.Reset)
}

// Held returns how many server connections wait for Release or Drop.
func (p *Proxy) Held() int {
	p.mu.Lock()
	defer p.mu.Unlock()
	return len(p.held)
}

// Release delivers what HoldBytes and HalfFlush kept, waits until the server has answered it, and then closes the
// connections. The error says which delivery the server did not answer.
func (p *Proxy) Release(ctx context.Context) error {
	var errs []error
	for _, h := range p.takeHeld() {
		if err := h.deliver(ctx); err != nil {
			errs = append(errs, fmt.Errorf("pgproxy: release connection %d: %w", h.link.number, err))
		}
		h.link.cut(false)
	}
	return errors.Join(errs...)
}

// Drop closes the server connections that wait, without delivering anything.
func (p *Proxy) Drop() {
	for _, h := range p.takeHeld() {
		h.link.cut(false)
	}
}

func (p *Proxy) takeHeld() []*held {
	p.mu.Lock()
	defer p.mu.Unlock()
	taken := p.held
	p.held = nil
	return taken
}

func (h *held) deliver(ctx context.Context) error {
	if !h.link.send(h.rest) {
		return errServerClosed
	}
	select {
	case <-h.link.arrived:
		return nil
	case <-h.link.serverGone:
	case <-ctx.Done():
		return ctx.Err()
	}
	select {
	case <-h.link.arrived: // both: it answered before it closed
		return nil
	default:
		return errServerClosed
	}
}
