package main

import (
	"bytes"
	"io"
	"sync/atomic"
	"testing"
	"testing/iotest"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgproto3"
	"github.com/stretchr/testify/require"

	"github.com/pgonce/pgonce/internal/pgtest"
)

func TestStatements_EveryWayToSendThemIsCounted(t *testing.T) {
	t.Parallel()
	ctx := t.Context()
	config, err := pgx.ParseConfig(pgtest.URL(t))
	require.NoError(t, err)
	var sent atomic.Int64
	countStatements(&config.Config, &sent)
	conn, err := pgx.ConnectConfig(ctx, config)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, conn.Close(ctx)) })
	count := func(want int64, what string, do func() error) {
		t.Helper()
		before := sent.Load()
		require.NoError(t, do(), what)
		require.Equal(t, want, sent.Load()-before, what)
	}
	count(1, "simple protocol", func() error { _, err := conn.Exec(ctx, `SELECT 1`); return err })
	for range 2 {
		count(1, "prepared, and prepared already", func() error { _, err := conn.Exec(ctx, `SELECT $1::int`, 1); return err })
	}
	count(3, "a transaction", func() error {
		return pgx.BeginFunc(ctx, conn, func(tx pgx.Tx) error { _, err := tx.Exec(ctx, `SELECT $1::int`, 1); return err })
	})
	count(3, "a batch", func() error {
		batch := &pgx.Batch{}
		for n := range 3 {
			batch.Queue(`SELECT $1::int`, n)
		}
		return conn.SendBatch(ctx, batch).Close()
	})
	count(2, "a pipeline", func() error {
		pipeline := conn.PgConn().StartPipeline(ctx)
		for range 2 {
			pipeline.SendQueryParams(`SELECT 1`, nil, nil, nil, nil)
		}
		if err := pipeline.Sync(); err != nil {
			return err
		}
		return pipeline.Close()
	})
}

func TestStatements_AreCountedHoweverTheyAreCut(t *testing.T) {
	t.Parallel()
	var message []byte
	var err error
	for _, m := range []pgproto3.FrontendMessage{
		&pgproto3.StartupMessage{ProtocolVersion: pgproto3.ProtocolVersion30, Parameters: map[string]string{"user": "EQ"}},
		&pgproto3.Query{String: "EQEQ"}, &pgproto3.Parse{Query: "QE"}, &pgproto3.Execute{}, &pgproto3.Sync{}, &pgproto3.Terminate{},
	} {
		message, err = m.Encode(message)
		require.NoError(t, err)
	}
	for _, cut := range []func(io.Reader) io.Reader{iotest.OneByteReader, iotest.HalfReader, iotest.DataErrReader} {
		var out bytes.Buffer
		var sent atomic.Int64
		// Without WriterTo and ReaderFrom, which would write all of it at once.
		_, err := io.CopyBuffer(&statementCounter{to: &out, sent: &sent}, cut(bytes.NewReader(message)), make([]byte, 7))
		require.NoError(t, err)
		require.Equal(t, message, out.Bytes())
		require.EqualValues(t, 2, sent.Load())
	}
}
