package localfront

import (
	"container/list"
	"encoding/binary"
	"hash/maphash"
	"sync"
	"time"

	gocache "github.com/patrickmn/go-cache"

	"github.com/pgonce/pgonce/idempotency"
)

// sweepInterval is how often what has ended makes room. Nobody gets it anyhow.
const sweepInterval = 10 * time.Second

// goCache is go-cache with bounds, and with a sweep that ends: go-cache's own goes on for ever in a program that keeps the
// cache.
type goCache struct {
	config Config
	items  *gocache.Cache
	ended  chan struct{}
	group  sync.WaitGroup
	once   sync.Once

	mu    sync.Mutex // guards what follows, and every write to items
	order *list.List // of *held, the oldest first
	bytes int64
}

// held is what go-cache holds.
type held struct {
	*entry
	place *list.Element
}

func newGoCache(config Config) *goCache {
	c := &goCache{
		config: config, items: gocache.New(gocache.NoExpiration, 0), ended: make(chan struct{}), order: list.New(),
	}
	// Called by Delete and DeleteExpired, which only run while we hold mu.
	c.items.OnEvicted(func(_ string, item any) { c.leave(item.(*held)) })
	c.group.Go(c.sweep)
	return c
}

// name is short enough for the caller's stack: a look-up allocates nothing. Two keys with one name are told apart by the
// entry's own key, and only push each other out.
func name(key idempotency.Key) (n [8]byte) {
	binary.NativeEndian.PutUint64(n[:], maphash.Comparable(seed, key))
	return n
}

var seed = maphash.MakeSeed()

func (c *goCache) get(key idempotency.Key) *entry {
	n := name(key)
	item, found := c.items.Get(string(n[:]))
	if !found {
		return nil
	}
	return item.(*held).entry
}

func (c *goCache) put(e *entry, life time.Duration) {
	n := name(e.Record.Key)
	c.mu.Lock()
	defer c.mu.Unlock()
	if there, found := c.items.Get(string(n[:])); found && !e.newer(there.(*held).entry) {
		return
	}
	c.items.Delete(string(n[:])) // also one that has ended: it is in the books until then
	h := &held{entry: e}
	h.place = c.order.PushBack(h)
	c.bytes += e.size
	c.items.Set(string(n[:]), h, life)
	for c.order.Len() > c.config.MaxRecords || c.bytes > c.config.MaxBytes {
		oldest := name(c.order.Front().Value.(*held).Record.Key)
		c.items.Delete(string(oldest[:]))
	}
}

// leave takes an item out of the books.
func (c *goCache) leave(h *held) {
	c.order.Remove(h.place)
	c.bytes -= h.size
}

func (c *goCache) remove(key idempotency.Key) {
	n := name(key)
	c.mu.Lock()
	defer c.mu.Unlock()
	c.items.Delete(string(n[:]))
}

func (c *goCache) stats() Stats {
	c.mu.Lock()
	defer c.mu.Unlock()
	return Stats{Records: c.order.Len(), Bytes: c.bytes}
}

func (c *goCache) sweep() {
	ticker := time.NewTicker(sweepInterval)
	defer ticker.Stop()
	for {
		select {
		case <-c.ended:
			return
		case <-ticker.C:
			c.mu.Lock()
			c.items.DeleteExpired()
			c.mu.Unlock()
		}
	}
}

func (c *goCache) close() {
	c.once.Do(func() { close(c.ended) })
	c.group.Wait()
}
