package idempotencygrpc_test

import (
	"context"
	"strconv"
	"sync/atomic"
	"testing"

	"github.com/stretchr/testify/require"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/wrapperspb"

	"github.com/pgonce/pgonce/idempotencygrpc"
	"github.com/pgonce/pgonce/txn"
)

// What a run has set or sent reaches the client if that run counts, and not before COMMIT.
func TestMetadata_IsThatOfTheRunThatCounts(t *testing.T) {
	t.Parallel()
	var runs atomic.Int64
	s := start(t, func(ctx context.Context, text string) (int64, error) {
		run := strconv.FormatInt(runs.Add(1), 10)
		require.NoError(t, grpc.SetHeader(ctx, metadata.Pairs("shop-run", run)))
		require.NoError(t, grpc.SetTrailer(ctx, metadata.Pairs("shop-end", run)))
		if text == "send" {
			require.NoError(t, grpc.SendHeader(ctx, metadata.Pairs("shop-sent-bin", "\x00\xff")))
			require.Error(t, grpc.SetHeader(ctx, metadata.Pairs("shop-run", "late")))
		}
		id, err := place(ctx, text)
		if err != nil {
			return 0, err
		}
		if text == "refuse" {
			return 0, status.Error(codes.NotFound, "no tea")
		}
		tx, _ := txn.FromContext(ctx)
		if run == "1" {
			_, err = tx.Exec(ctx, `DO $$ BEGIN RAISE EXCEPTION 'once more' USING ERRCODE = '40001'; END $$`)
		}
		return id, err
	})
	call := func(key, text string) (header, trailer metadata.MD, err error) {
		err = s.conn.Invoke(idempotencygrpc.WithKey(t.Context(), key), createMethod, wrapperspb.String(text), new(wrapperspb.Int64Value),
			grpc.Header(&header), grpc.Trailer(&trailer))
		return header, trailer, err
	}
	header, trailer, err := call("k", "again")
	require.NoError(t, err)
	require.EqualValues(t, 2, runs.Load())
	require.Equal(t, []string{"2"}, header.Get("shop-run"))
	require.Equal(t, []string{"2"}, trailer.Get("shop-end"))
	header, trailer, err = call("k", "again")
	require.NoError(t, err)
	require.True(t, idempotencygrpc.Replayed(header))
	require.Empty(t, append(header.Get("shop-run"), trailer.Get("shop-end")...))

	header, _, err = call("k2", "send")
	require.NoError(t, err)
	require.Equal(t, []string{"\x00\xff"}, header.Get("shop-sent-bin"))
	require.Equal(t, []string{"3"}, header.Get("shop-run"))

	for _, want := range [][]string{{"4"}, nil} {
		header, trailer, err = call("k3", "refuse")
		require.Equal(t, codes.NotFound, status.Code(err))
		require.Equal(t, want, append(header.Get("shop-run"), []string(nil)...))
		require.Equal(t, want, append(trailer.Get("shop-end"), []string(nil)...))
	}
}
