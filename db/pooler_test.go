package db_test

import (
	"encoding/binary"
	"io"
	"net"
	"sync"
	"testing"

	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgonce/pgonce/db"
	"github.com/pgonce/pgonce/internal/pgtest"
)

// startPooler relays connections to the server and, as every pooler does, gives its clients process ids of its own
// making.
func startPooler(t *testing.T, server *pgconn.Config) (port uint16) {
	t.Helper()
	listener, err := new(net.ListenConfig).Listen(t.Context(), "tcp", "127.0.0.1:0")
	require.NoError(t, err)
	var group sync.WaitGroup
	t.Cleanup(func() {
		_ = listener.Close()
		group.Wait()
	})
	network, address := pgconn.NetworkAddress(server.Host, server.Port)
	group.Go(func() {
		for {
			client, err := listener.Accept()
			if err != nil {
				return
			}
			upstream, err := new(net.Dialer).DialContext(t.Context(), network, address)
			if err != nil {
				_ = client.Close()
				continue
			}
			group.Go(func() { _, _ = io.Copy(upstream, client); _ = upstream.Close() })
			group.Go(func() { relay(client, upstream); _ = client.Close() })
		}
	})
	tcp, ok := listener.Addr().(*net.TCPAddr)
	require.True(t, ok)
	return uint16(tcp.Port) //nolint:gosec // a port
}

// relay copies the server's messages: a type, a length that counts itself, a body.
func relay(client io.Writer, upstream io.Reader) {
	for {
		header := make([]byte, 5)
		if _, err := io.ReadFull(upstream, header); err != nil {
			return
		}
		body := make([]byte, binary.BigEndian.Uint32(header[1:])-4)
		if _, err := io.ReadFull(upstream, body); err != nil {
			return
		}
		if header[0] == 'K' {
			binary.BigEndian.PutUint32(body, binary.BigEndian.Uint32(body)+1)
		}
		if _, err := client.Write(append(header, body...)); err != nil {
			return
		}
	}
}

func TestCase_D03_ThroughAPoolerMigrateSaysWhatToDo(t *testing.T) {
	t.Parallel()
	url := pgtest.EmptyURL(t)
	pooled := newPool(t, url, func(cfg *pgxpool.Config) {
		port := startPooler(t, &cfg.ConnConfig.Config)
		cfg.ConnConfig.Host, cfg.ConnConfig.Port, cfg.ConnConfig.Fallbacks = "127.0.0.1", port, nil
		cfg.ConnConfig.TLSConfig = nil
	})

	err := db.Migrate(t.Context(), pooled)
	require.ErrorContains(t, err, "a pooler stands between")
	require.ErrorContains(t, err, "run db/install.sql")
	observer := connect(t, url)
	require.Equal(t, []bool{true}, column[bool](t, observer,
		`SELECT to_regnamespace('idempotency') IS NULL AND to_regclass('public.pgonce_goose_version') IS NULL`))

	_, err = pooled.Exec(t.Context(), db.InstallSQL())
	require.NoError(t, err)
	require.NoError(t, db.Migrate(t.Context(), pooled), "nothing to do: the pooler is no obstacle")
	requireMigratedOnce(t, observer)
}
