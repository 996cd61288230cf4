package pgproxy

import (
	"bytes"
	"encoding/binary"
	"errors"
	"io"
	"net"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgproto3"
	"github.com/stretchr/testify/require"
)

func TestIsCommit(t *testing.T) {
	t.Parallel()
	for _, sql := range []string{"COMMIT", "commit", " Commit ; ", "END", "end transaction", "COMMIT WORK"} {
		require.True(t, isCommit(sql), sql)
	}
	for _, sql := range []string{
		"", ";", "SELECT 'COMMIT'", "COMMIT PREPARED 'x'", "COMMIT AND CHAIN", "commits", "ROLLBACK", "BEGIN; COMMIT",
	} {
		require.False(t, isCommit(sql), sql)
	}
}

// encode makes a flush.
func encode(t testing.TB, messages ...pgproto3.FrontendMessage) flush {
	t.Helper()
	var f flush
	for _, m := range messages {
		var err error
		f.bytes, err = m.Encode(f.bytes)
		require.NoError(t, err)
	}
	require.NoError(t, f.measure())
	require.Len(t, f.ends, len(messages))
	return f
}

func TestStatements_FollowNames(t *testing.T) {
	t.Parallel()
	var s statements
	read := func(messages ...pgproto3.FrontendMessage) (commits []seen, segments int) {
		f := encode(t, messages...)
		return s.read(f.bytes, f.ends)
	}
	parse := func(name, sql string) *pgproto3.Parse { return &pgproto3.Parse{Name: name, Query: sql} }
	bind := func(portal, name string) *pgproto3.Bind {
		return &pgproto3.Bind{DestinationPortal: portal, PreparedStatement: name}
	}
	execute := func(portal string) *pgproto3.Execute { return &pgproto3.Execute{Portal: portal} }
	sync := &pgproto3.Sync{}

	commits, segments := read(parse("c", "COMMIT"), parse("x", "SELECT 1"), sync)
	require.Empty(t, commits)
	require.Equal(t, 1, segments)

	// As this module commits.
	before := encode(t, bind("", "x"), execute(""), sync)
	commits, segments = read(bind("", "x"), execute(""), sync, bind("", "c"), execute(""), sync)
	require.Equal(t, []seen{{Commit: Commit{Statement: "c"}, start: len(before.bytes), segment: 2}}, commits)
	require.Equal(t, 2, segments)

	// A COMMIT begins with its Parse where that is in the same flush.
	commits, segments = read(parse("", "commit"), bind("p", ""), execute("p"), sync, &pgproto3.Query{String: "END"})
	require.Equal(t, []seen{{segment: 1}, {Commit: Commit{Simple: true}, start: commits[1].start, segment: 2}}, commits)
	require.Equal(t, 2, segments)

	// The portal lives on in the next flush; a new Bind or Parse ends what the name meant.
	commits, _ = read(execute("p"), sync)
	require.Equal(t, []seen{{segment: 1}}, commits)
	commits, _ = read(bind("p", "x"), execute("p"), sync)
	require.Empty(t, commits)
	commits, _ = read(parse("c", "SELECT 1"), bind("", "c"), execute(""), sync)
	require.Empty(t, commits)

	// So does Close; and a simple query ends the unnamed statement.
	_, _ = read(parse("c", "COMMIT"), parse("", "COMMIT"), bind("p", "c"), sync)
	_, _ = read(&pgproto3.Close{ObjectType: 'P', Name: "p"}, &pgproto3.Close{ObjectType: 'S', Name: "c"}, &pgproto3.Query{String: "SELECT 1"})
	commits, _ = read(execute("p"), bind("", "c"), execute(""), bind("", ""), execute(""), sync)
	require.Empty(t, commits)
}

func TestMeasure_RefusesNonsense(t *testing.T) {
	t.Parallel()
	for _, b := range []string{"Q\x00\x00\x00\x03", "Q\xff\xff\xff\xff"} {
		_, err := measure([]byte(b))
		require.ErrorIs(t, err, errMalformed)
	}
	for _, b := range []string{"", "Q\x00\x00\x00", "Q\x00\x00\x00\x05"} {
		n, err := measure([]byte(b))
		require.NoError(t, err)
		require.Zero(t, n)
	}
	_, _, err := readStartup(strings.NewReader("\x00\x00\x00\x07\x00\x00\x00\x00"))
	require.ErrorIs(t, err, errMalformed)
}

func FuzzStatements(f *testing.F) {
	f.Add([]byte("Q\x00\x00\x00\x0bCOMMIT\x00S\x00\x00\x00\x04C\x00\x00\x00\x04"))
	f.Add([]byte("P\x00\x00\x00\x04B\x00\x00\x00\x04E\x00\x00\x00\x05x"))
	f.Fuzz(func(t *testing.T, b []byte) {
		fl := flush{bytes: b}
		if fl.measure() != nil {
			return
		}
		var s statements
		commits, segments := s.read(fl.bytes, fl.ends)
		for _, c := range commits {
			require.Less(t, c.start, len(b))
			require.LessOrEqual(t, c.segment, segments+1)
		}
		_ = fl.complete()
	})
}

// A COMMIT is recognised however its bytes arrive.
func TestProxy_ACommitInPieces(t *testing.T) {
	t.Parallel()
	b := newBed(t, &Config{Patience: time.Millisecond})
	for _, tc := range []struct {
		rule   Rule
		orders int
	}{{Rule{Do: CutBefore}, 0}, {Rule{Do: CutAfter}, 1}, {Rule{Do: HoldBytes}, 0}, {Rule{}, 1}} {
		c := b.connect(t)
		_, err := c.Exec(t.Context(), "BEGIN; INSERT INTO orders VALUES ('k')").ReadAll()
		require.NoError(t, err)
		hijacked, err := c.Hijack()
		require.NoError(t, err)
		b.proxy.Next(tc.rule)
		f := encode(t, &pgproto3.Parse{Query: "COMMIT"}, &pgproto3.Bind{}, &pgproto3.Execute{}, &pgproto3.Sync{})
		for i := range f.bytes {
			if _, err = hijacked.Conn.Write(f.bytes[i : i+1]); err != nil {
				break // cut already
			}
			if i%5 == 0 {
				time.Sleep(5 * time.Millisecond) // longer than the proxy's patience
			}
		}
		_ = hijacked.Conn.(*recorder).Conn.(*net.TCPConn).CloseWrite() // fails where it was cut
		answer, _ := io.ReadAll(hijacked.Conn)
		require.Equal(t, tc.rule.Do == PassThrough, bytes.Contains(answer, []byte("COMMIT")), "%q", answer)
		require.Equal(t, tc.orders, b.orders(t, "k"), tc.rule.Do)
		_ = hijacked.Conn.Close()
		b.proxy.Drop()
		b.requireBackend(t, &client{PgConn: c.PgConn}, "")
		_, err = b.pool.Exec(t.Context(), "TRUNCATE orders")
		require.NoError(t, err)
	}
}

func TestProxy_LargeFlushAndCopyPass(t *testing.T) {
	t.Parallel()
	b := newBed(t, nil)
	c := b.connect(t)
	b.proxy.Next(Rule{Do: CutAfter})
	_, err := c.Exec(t.Context(), "BEGIN").ReadAll()
	require.NoError(t, err)
	tag, err := c.CopyFrom(t.Context(), strings.NewReader(strings.Repeat("copied\n", 100_000)), "COPY orders FROM STDIN")
	require.NoError(t, err)
	require.EqualValues(t, 100_000, tag.RowsAffected())
	large := strings.Repeat("x", 4<<20)
	a := protocols[2].send(t.Context(), c, large)
	require.Error(t, a.commit)
	require.Equal(t, 1, b.orders(t, large))
	require.Equal(t, 100_000, b.orders(t, "copied"))
}

func TestProxy_TLSIsDeclined(t *testing.T) {
	t.Parallel()
	b := newBed(t, nil)
	url := b.proxy.URL(b.pool.Config().ConnString())
	c, err := b.dial(t.Context(), strings.Replace(url, "sslmode=disable", "sslmode=prefer", 1))
	require.NoError(t, err)
	require.NoError(t, c.Close(t.Context()))
	_, err = b.dial(t.Context(), strings.Replace(url, "sslmode=disable", "sslmode=require", 1))
	require.ErrorContains(t, err, "refused TLS")

	// GSSENCRequest too; nonsense ends the connection.
	for request, want := range map[uint32]string{codeGSSENC: "N", 1: ""} {
		conn, err := new(net.Dialer).DialContext(t.Context(), "tcp", b.proxy.Addr())
		require.NoError(t, err)
		_, err = conn.Write(binary.BigEndian.AppendUint32([]byte{0, 0, 0, 8}, request))
		require.NoError(t, err)
		got := make([]byte, 1)
		if _, err = io.ReadFull(conn, got); want != "" {
			require.NoError(t, err)
			require.Equal(t, want, string(got))
		}
		require.NoError(t, conn.Close())
	}
}

func TestStart_TargetsAndURLs(t *testing.T) {
	t.Parallel()
	for target, want := range map[string][2]string{
		"db.example:5433":                          {"tcp", "db.example:5433"},
		"postgres://u:p@db.example:5433/x":         {"tcp", "db.example:5433"},
		"host=/run/postgresql port=5433 user=u":    {"unix", "/run/postgresql/.s.PGSQL.5433"},
		"postgres://u@/x?host=/tmp&port=1&user=u2": {"unix", "/tmp/.s.PGSQL.1"},
	} {
		p, err := Start(t.Context(), target, nil)
		require.NoError(t, err)
		require.Equal(t, want, [2]string{p.network, p.target})
		if strings.ContainsAny(target, "=@") {
			cfg, err := pgconn.ParseConfig(p.URL(target))
			require.NoError(t, err)
			_, address := pgconn.NetworkAddress(cfg.Host, cfg.Port)
			require.Equal(t, p.Addr(), address)
		}
		require.NoError(t, p.Close())
	}
	_, err := Start(t.Context(), "postgres://:::", nil)
	require.Error(t, err)
	var parse *pgconn.ParseConfigError
	require.True(t, errors.As(err, &parse))
}
