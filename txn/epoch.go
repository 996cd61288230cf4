package txn

import (
	"context"
	"sync"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgonce/pgonce/idempotency"
)

// What fronts keep is believed only while the epoch was read within epochLife.
const (
	epochLife     = time.Second
	epochInterval = epochLife / 4
	doubtPause    = 10 * time.Millisecond
)

// epochWatch knows the epoch that entries must be of, and PostgreSQL's clock. It asks on a connection of its own: one of
// the pool may be minutes away when every call waits for one, which is when fronts are needed most.
type epochWatch struct {
	store *idempotency.Store
	pool  *pgxpool.Config
	known atomic.Pointer[knownEpoch]

	begin   sync.Once
	doubts  chan struct{}
	doubted atomic.Int64    // how often
	ctx     context.Context //nolint:containedctx // the life of the watch, ended by close
	cancel  context.CancelFunc
	group   sync.WaitGroup

	onEvent idempotency.OnEvent
	failing bool // the last read failed; the watch's own
}

// knownEpoch is what was read: PostgreSQL's time is that of the read, which began at this process's asked.
type knownEpoch struct {
	epoch string
	now   time.Time
	asked stopwatch
}

func newEpochWatch(store *idempotency.Store, pool *pgxpool.Config, onEvent idempotency.OnEvent) *epochWatch {
	w := &epochWatch{store: store, pool: pool, onEvent: onEvent, doubts: make(chan struct{}, 1)}
	w.ctx, w.cancel = context.WithCancel(context.Background())
	return w
}

// current returns the epoch, and PostgreSQL's time, which it puts a little later rather than earlier. known is false where
// the last read is too old.
func (w *epochWatch) current() (epoch string, now time.Time, known bool) {
	w.begin.Do(func() { w.group.Go(w.run) })
	k := w.known.Load()
	if k == nil {
		return "", time.Time{}, false
	}
	age := k.asked.elapsed()
	return k.epoch, k.now.Add(age), age <= epochLife
}

// doubt forgets the epoch and has it read anew: a connection was lost, and the next one may reach another server.
func (w *epochWatch) doubt() {
	w.doubted.Add(1)
	w.known.Store(nil)
	select {
	case w.doubts <- struct{}{}:
	default:
	}
}

func (w *epochWatch) close() {
	w.begin.Do(func() {}) // never begins any more
	w.cancel()
	w.group.Wait()
}

func (w *epochWatch) run() {
	var conn *pgx.Conn
	defer func() { w.drop(conn) }()
	// While PostgreSQL is away every call doubts.
	breath := pauses{next: doubtPause, last: epochInterval}
	for {
		if conn = w.read(conn); conn != nil {
			breath.next = doubtPause
		}
		timer := time.NewTimer(epochInterval)
		select {
		case <-w.ctx.Done():
			timer.Stop()
			return
		case <-w.doubts:
			timer.Stop()
			// The same session would answer what it answered before.
			w.drop(conn)
			conn = nil
			_ = breath.sleep(w.ctx)
		case <-timer.C:
		}
	}
}

// read returns the connection to go on with, nil if there is none.
func (w *epochWatch) read(conn *pgx.Conn) *pgx.Conn {
	ctx, cancel := context.WithTimeout(w.ctx, epochLife)
	defer cancel()
	var err error
	if conn == nil {
		if conn, err = w.connect(ctx); err != nil {
			w.tell(err)
			return nil
		}
	}
	doubted, asked := w.doubted.Load(), startStopwatch()
	epoch, now, err := w.store.Epoch(ctx, conn)
	if err != nil {
		w.known.Store(nil)
		w.tell(err)
		w.drop(conn)
		return nil
	}
	w.tell(nil)
	known := &knownEpoch{epoch: epoch, now: now, asked: asked}
	w.known.Store(known)
	if w.doubted.Load() != doubted { // it may be what was doubted
		w.known.CompareAndSwap(known, nil)
	}
	return conn
}

// tell says when fronts are not asked any more because nobody knows the epoch, and when they are again.
func (w *epochWatch) tell(err error) {
	if w.ctx.Err() == nil && (err != nil) != w.failing {
		w.failing = err != nil
		w.onEvent(w.ctx, idempotency.FrontDegraded{Front: "epoch", Degraded: w.failing, Err: err})
	}
}

func (w *epochWatch) connect(ctx context.Context) (*pgx.Conn, error) {
	config := w.pool.ConnConfig.Copy()
	if w.pool.BeforeConnect != nil {
		if err := w.pool.BeforeConnect(ctx, config); err != nil {
			return nil, err
		}
	}
	return pgx.ConnectConfig(ctx, config)
}

func (*epochWatch) drop(conn *pgx.Conn) {
	if conn != nil {
		_ = conn.Close(canceled)
	}
}

// learnEpoch notes the epoch of a session that is in no transaction: what it reads or commits next is of this epoch or of
// a later one. The server is asked only when the watch has seen another epoch than this session.
func (c *call) learnEpoch(ctx context.Context, conn *pgx.Conn) error {
	c.epoch = ""
	if !c.fronted || !c.runner.direct {
		return nil
	}
	current, _, known := c.runner.fronts.epochs.current()
	if !known {
		return nil
	}
	g, err := guardOf(conn)
	if err != nil {
		return err
	}
	if g.Epoch != current {
		if g.Epoch, _, err = c.store.Epoch(ctx, conn); err != nil {
			return nil //nolint:nilerr // no call fails for the fronts' sake; a connection that is lost is met again at once
		}
	}
	c.epoch = g.Epoch
	return nil
}

// learnEpochInside is for a pool behind a transaction pooler: there only one transaction is sure to stay with one server, so
// that only what a call itself commits has a known epoch.
func (c *call) learnEpochInside(ctx context.Context, conn *pgx.Conn) error {
	if !c.fronted || c.runner.direct {
		return nil
	}
	// Where it cannot be read the watch knows it, and no call may fail for the fronts' sake.
	if _, _, known := c.runner.fronts.epochs.current(); !known {
		return nil
	}
	var err error
	c.epoch, _, err = c.store.Epoch(ctx, conn)
	return err
}

func (c *call) doubtEpoch() {
	if c.fronted {
		c.runner.fronts.epochs.doubt()
	}
}
