package txn_test

import (
	"context"
	"errors"
	"net"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgonce/pgonce/idempotency"
	"github.com/pgonce/pgonce/txn"
)

// lingering is a connection that this side can lose while PostgreSQL's session lives on for a while, as behind a broken
// network.
type lingering struct {
	net.Conn
	lose *atomic.Bool // the next one to read is lost
	lost atomic.Bool
}

const lingers = time.Second

func (c *lingering) Read(b []byte) (int, error) {
	n, err := c.Conn.Read(b)
	if c.lose.CompareAndSwap(true, false) {
		c.lost.Store(true)
		time.AfterFunc(lingers, func() { _ = c.Conn.Close() })
	}
	if c.lost.Load() {
		return 0, errors.New("lost")
	}
	return n, err
}

// Write does not reach the session any more either.
func (c *lingering) Write(b []byte) (int, error) {
	if c.lost.Load() {
		return 0, errors.New("lost")
	}
	return c.Conn.Write(b)
}

func (c *lingering) Close() error {
	if !c.lost.Load() {
		return c.Conn.Close()
	}
	return nil // later
}

// A call whose connection was lost waits for what its own session still holds, also where it would wait for nobody else.
func TestRestart_WaitsForItsOwnGhost(t *testing.T) {
	t.Parallel()
	lose := &atomic.Bool{}
	s := newShopWith(t, func(c *pgxpool.Config) {
		dial := c.ConnConfig.DialFunc
		c.ConnConfig.DialFunc = func(ctx context.Context, network, address string) (net.Conn, error) {
			conn, err := dial(ctx, network, address)
			return &lingering{Conn: conn, lose: lose}, err
		}
		c.MaxConns = max(c.MaxConns, 2)
	}, func(c *txn.Config) {
		c.Operations = []idempotency.Operation{{Name: create.Name, Wait: idempotency.NoWait}}
	})
	req := request(t, "k", "body")
	began, runs := time.Now(), 0
	res, err := txn.WithIdempotency(t.Context(), s.runner, req, func(ctx context.Context, tx pgx.Tx) (order, error) {
		if runs++; runs == 1 {
			lose.Store(true)
			_, err := tx.Exec(ctx, `SELECT 1`)
			return order{}, err
		}
		return insertOrder(ctx, tx, "k")
	})
	require.NoError(t, err)
	require.Equal(t, 2, runs)
	require.False(t, res.Replayed)
	require.GreaterOrEqual(t, time.Since(began), lingers/2, "the session was there, and held the key")
	require.Equal(t, 1, s.orders(t, "k"))
}
