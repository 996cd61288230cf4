package localfront

import (
	"context"
	"sync"

	"github.com/pgonce/pgonce/idempotency"
)

// memo keeps the outcomes of one request.
type memo struct {
	mu      sync.Mutex
	entries map[idempotency.Key]*entry
}

type memoKey struct{}

// maxMemo is more keys than a request has; a context that lives longer than a request forgets.
const maxMemo = 100

// WithMemo returns a context in which a front remembers the outcomes of this one request, whatever else it has to forget:
// a request that asks for the same key several times gets the same answer. Use it in the middleware of a server.
func WithMemo(ctx context.Context) context.Context {
	return context.WithValue(ctx, memoKey{}, &memo{entries: map[idempotency.Key]*entry{}})
}

// memoOf returns nil where there is none.
func memoOf(ctx context.Context) *memo {
	m, _ := ctx.Value(memoKey{}).(*memo)
	return m
}

func (m *memo) lookup(ask idempotency.Ask) (idempotency.Record, bool) {
	if m == nil {
		return idempotency.Record{}, false
	}
	m.mu.Lock()
	e := m.entries[ask.Key]
	m.mu.Unlock()
	return e.answer(ask)
}

func (m *memo) keep(e *entry) {
	if m != nil {
		m.mu.Lock()
		defer m.mu.Unlock()
		if !e.newer(m.entries[e.Record.Key]) {
			return
		}
		if len(m.entries) >= maxMemo {
			clear(m.entries)
		}
		m.entries[e.Record.Key] = e
	}
}

func (m *memo) forget(key idempotency.Key) {
	if m != nil {
		m.mu.Lock()
		defer m.mu.Unlock()
		delete(m.entries, key)
	}
}
