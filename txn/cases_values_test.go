package txn_test

import (
	"bytes"
	"context"
	"crypto/hmac"
	"crypto/rand"
	"crypto/sha256"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgonce/pgonce/idempotency"
	"github.com/pgonce/pgonce/txn"
)

// returning runs a call whose function places an order and returns value.
func returning[T any](t testing.TB, s *shop, req idempotency.Request, value T, fail error) (txn.Result[T], error) {
	t.Helper()
	return txn.WithIdempotency(t.Context(), s.runner, req, func(ctx context.Context, tx pgx.Tx) (T, error) {
		if _, err := insertOrder(ctx, tx, req.Key.Value()); err != nil {
			return value, err
		}
		return value, fail
	})
}

// hostile are texts that some part of the way from a client to a table refuses or changes.
var hostile = map[string]string{
	"NUL":            "a\x00b",
	"invalid UTF-8":  "a\xff\xfeb",
	"lone surrogate": "a\xed\xa0\x80b",
	"cut rune":       "a\xf0\x9f\x98",
	"emoji":          "a😀b",
	"escapes":        `{"a":"\u0000\ud800"}`,
	"empty":          "",
}

func TestCase_P14_AnyBytesAreStoredAndReplayed(t *testing.T) {
	t.Parallel()
	s := newShop(t)
	for name, text := range hostile {
		req := request(t, "bytes "+name, "body")
		first, err := returning(t, s, req, []byte(text), nil)
		require.NoError(t, err, name)
		for _, retry := range []bool{false, true} {
			req.Retry = retry
			again, err := returning(t, s, req, []byte("other"), nil)
			require.NoError(t, err, name)
			require.True(t, again.Replayed)
			require.Equal(t, first.Value, again.Value, name)
			require.Equal(t, first.Record, again.Record, name)
		}
	}
	nothing := request(t, "nil", "body")
	_, err := returning[[]byte](t, s, nothing, nil, nil)
	require.NoError(t, err)
	again, err := returning(t, s, nothing, []byte("other"), nil)
	require.NoError(t, err, "no bytes are a result, not a dropped one")
	require.Empty(t, again.Value)
}

func TestCase_P14_AnyStringIsStoredAsJSON(t *testing.T) {
	t.Parallel()
	s := newShop(t)
	for name, text := range hostile {
		req := request(t, name, "body")
		first, err := returning(t, s, req, text, nil)
		require.NoError(t, err, name)
		require.Equal(t, text, first.Value)
		again, err := returning(t, s, req, "other", nil)
		require.NoError(t, err, name)
		encoded, err := json.Marshal(text)
		require.NoError(t, err)
		var decoded string
		require.NoError(t, json.Unmarshal(encoded, &decoded))
		require.Equal(t, decoded, again.Value, name) // JSON has no bytes that are not UTF-8
		require.Equal(t, 1, s.orders(t, name))
	}
	var n int
	require.NoError(t, s.direct.QueryRow(t.Context(), `SELECT count(result) FROM idempotency.audit WHERE result IS NOT NULL`).Scan(&n))
	require.Equal(t, len(hostile), n, "people can look at them all")
}

func TestCase_P14_AnyErrorTextOfAFinalIsStored(t *testing.T) {
	t.Parallel()
	s := newShop(t)
	texts := map[string]string{"long": strings.Repeat("é\x00", idempotency.MaxErrorBytes)}
	for name, text := range hostile {
		texts[name] = text
	}
	for name, text := range texts {
		req := request(t, name, "body")
		var first, again *idempotency.FailedError
		_, err := returning(t, s, req, []byte(text), txn.Final("code "+text[:min(len(text), 100)], errors.New(text)))
		require.ErrorAs(t, err, &first, name)
		res, err := returning(t, s, req, []byte("other"), nil)
		require.ErrorAs(t, err, &again, name)
		require.True(t, res.Replayed)
		require.Equal(t, []byte(text), res.Value)
		require.Equal(t, first.Code, again.Code, name)
		require.Equal(t, first.Message, again.Message, name)
		require.LessOrEqual(t, len(again.Message), idempotency.MaxErrorBytes)
		require.Zero(t, s.orders(t, name))
	}
}

func TestCase_P14_BadNamesAreRefusedBeforeSQL(t *testing.T) {
	t.Parallel()
	s := newShop(t)
	before := s.pool.Stat().AcquireCount()
	for _, bad := range []string{"", " ", "a\x00b", "a\nb", "a\x7fb", "a\xffb", "a\xed\xa0\x80b", "a\xf0\x9f\x98"} {
		for field, make := range map[string]func() error{
			"key":    func() error { _, err := create.Key("t", bad); return err },
			"tenant": func() error { _, err := create.Key(bad, "k"); return err },
			"client": func() error {
				req := request(t, "k", "body")
				req.Client = bad
				if strings.TrimSpace(bad) == "" {
					req.Client = "\x00"
				}
				_, err := returning(t, s, req, "", nil)
				return err
			},
		} {
			var invalid *idempotency.InvalidError
			require.ErrorAs(t, make(), &invalid, "%s %q", field, bad)
			require.Equal(t, field, invalid.Field)
		}
	}
	require.Equal(t, before, s.pool.Stat().AcquireCount(), "no connection was asked for")
	_, err := create.Key("t😀", "k😀")
	require.NoError(t, err)
}

func TestCase_P14_AnyTraceIDDoesNoHarmAfterTheWork(t *testing.T) {
	t.Parallel()
	type traced struct{}
	s := newShop(t, func(c *txn.Config) {
		c.TraceID = func(ctx context.Context) string { id, _ := ctx.Value(traced{}).(string); return id }
	})
	for name, text := range hostile {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			ctx := context.WithValue(t.Context(), traced{}, text)
			first, err := s.place(ctx, request(t, name, "body"))
			require.NoError(t, err)
			again, err := s.place(ctx, request(t, name, "body"))
			require.NoError(t, err)
			require.Equal(t, first.Record, again.Record)
		})
	}
}

const oddJSON = "{\"b\":1, \"a\":1.0,\"a\":2 ,\n\t\"c\" : \"<&>\"}\n"

func TestCase_P15_ReplayIsByteEqual(t *testing.T) {
	t.Parallel()
	s := newShop(t)
	sign := func(body []byte) []byte {
		mac := hmac.New(sha256.New, []byte("secret"))
		mac.Write(body)
		return mac.Sum(nil)
	}
	type signed struct {
		Body, Signature []byte
	}
	body := []byte(oddJSON)
	raw, wrapped := request(t, "raw", "body"), request(t, "wrapped", "body")
	for i := range 3 {
		raw.Retry, wrapped.Retry = i == 2, i == 2
		res, err := returning(t, s, raw, bytes.Clone(body), nil)
		require.NoError(t, err)
		require.Equal(t, oddJSON, string(res.Value))
		both, err := returning(t, s, wrapped, signed{body, sign(body)}, nil)
		require.NoError(t, err)
		require.Equal(t, oddJSON, string(both.Value.Body))
		require.True(t, hmac.Equal(sign(both.Value.Body), both.Value.Signature))
		require.Equal(t, i > 0, res.Replayed && both.Replayed)
	}
}

// A service that passes another service's JSON on has it as json.RawMessage, or as a byte type of its own.
func TestCase_P15_ReplayOfRawJSONIsByteEqual(t *testing.T) {
	t.Parallel()
	type document []byte
	s := newShop(t)
	req := request(t, "k1", "body")
	first, err := returning(t, s, req, json.RawMessage(oddJSON), nil)
	require.NoError(t, err)
	again, err := returning(t, s, req, json.RawMessage(nil), nil)
	require.NoError(t, err)
	require.True(t, again.Replayed)
	require.Equal(t, string(first.Value), string(again.Value))

	req = request(t, "k2", "body")
	_, err = returning(t, s, req, document(oddJSON), nil)
	require.NoError(t, err)
	named, err := returning(t, s, req, document(nil), nil)
	require.NoError(t, err)
	require.Equal(t, oddJSON, string(named.Value))
}

func TestCase_P15_CallersShareNoBytes(t *testing.T) {
	t.Parallel()
	s := newShop(t)
	req := request(t, "k1", "body")
	value := []byte(oddJSON)
	first, err := returning(t, s, req, value, nil)
	require.NoError(t, err)
	clear(value)
	clear(first.Record.Result)
	for range 2 {
		again, err := returning(t, s, req, value, nil)
		require.NoError(t, err)
		require.Equal(t, oddJSON, string(again.Value))
		clear(again.Value)
		require.Equal(t, oddJSON, string(again.Record.Result))
	}
}

func TestCase_P17_TimeZonesDecideNothing(t *testing.T) {
	t.Parallel()
	utc := newShop(t)
	shops := map[string]*shop{"UTC": utc}
	for _, zone := range []string{"Asia/Kolkata", "America/St_Johns", "Pacific/Kiritimati"} {
		cfg := utc.pool.Config()
		cfg.ConnConfig.RuntimeParams["timezone"] = zone
		pool, err := pgxpool.NewWithConfig(t.Context(), cfg)
		require.NoError(t, err)
		t.Cleanup(pool.Close)
		var have string
		require.NoError(t, pool.QueryRow(t.Context(), `SHOW timezone`).Scan(&have))
		require.Equal(t, zone, have)
		shops[zone] = &shop{pool: pool, runner: newRunner(t, pool), direct: utc.direct}
	}
	for writer, w := range shops {
		req := request(t, writer, "body")
		first, err := w.place(t.Context(), req)
		require.NoError(t, err)
		var age float64
		require.NoError(t, utc.direct.QueryRow(t.Context(), `SELECT extract(epoch FROM statement_timestamp() - created_at)::float8
			FROM idempotency.records WHERE key = $1`, writer).Scan(&age))
		require.InDelta(t, 0, age, 60)
		require.Equal(t, idempotency.DefaultRetention, first.Record.ExpiresAt.Sub(first.Record.CompletedAt))
		// Every one sees the same record, alive to its last moment...
		utc.expire(t, req, "1 minute")
		for reader, r := range shops {
			again, err := r.place(t.Context(), req)
			require.NoError(t, err, reader)
			require.True(t, again.Replayed, "%s reads %s", reader, writer)
			stored, _ := r.record(t, req)
			require.Equal(t, stored, again.Record)
			stored.ExpiresAt = first.Record.ExpiresAt
			require.Equal(t, first.Record, stored)
			require.Equal(t, time.UTC, stored.CreatedAt.Location())
		}
		// ... and the same end, by a microsecond.
		for reader, r := range shops {
			utc.expire(t, req, "-1 microsecond")
			again, err := r.place(t.Context(), req)
			require.NoError(t, err, reader)
			require.False(t, again.Replayed, "%s reads %s", reader, writer)
		}
		require.Equal(t, 1+len(shops), utc.orders(t, writer))
	}
}

// expire moves the end of a record's retention to a moment from now.
func (s *shop) expire(t testing.TB, req idempotency.Request, in string) {
	t.Helper()
	tag, err := s.direct.Exec(t.Context(), `UPDATE idempotency.records SET expires_at = statement_timestamp() + $4::interval
		WHERE tenant = $1 AND operation = $2 AND key = $3`, req.Key.Tenant(), req.Key.Operation(), req.Key.Value(), in)
	require.NoError(t, err)
	require.EqualValues(t, 1, tag.RowsAffected())
}

// incompressible returns n printable random bytes.
func incompressible(n int) string {
	random := make([]byte, n)
	_, _ = rand.Read(random)
	return base64.RawURLEncoding.EncodeToString(random)[:n]
}

func TestCase_P18_LongestNamesWorkAndLongerOnesAreRefused(t *testing.T) {
	t.Parallel()
	long := idempotency.Operation{Name: incompressible(idempotency.MaxOperationBytes)}
	s := newShop(t, func(c *txn.Config) { c.Operations = append(c.Operations, long) })
	for _, value := range []string{
		incompressible(255), strings.Repeat("k", 255), strings.Repeat("€", 85), strings.Repeat("😀", 63) + "abc",
	} {
		key, err := long.Key(incompressible(idempotency.MaxTenantBytes), value)
		require.NoError(t, err)
		req := idempotency.Request{Key: key, Fingerprint: idempotency.NoFingerprint, Client: incompressible(255)}
		first, err := s.place(t.Context(), req)
		require.NoError(t, err)
		again, err := s.place(t.Context(), req)
		require.NoError(t, err)
		require.True(t, again.Replayed)
		require.Equal(t, first.Record, again.Record)
	}
	for _, n := range []int{256, 2700, 8192} {
		_, err := create.Key(idempotency.SingleTenant, incompressible(n))
		var invalid *idempotency.InvalidError
		require.ErrorAs(t, err, &invalid)
		require.ErrorIs(t, err, idempotency.ErrInvalid)
		require.Equal(t, "key", invalid.Field)
		require.Contains(t, invalid.Rule, fmt.Sprintf("at most 255 bytes, is %d", n))
	}
	_, err := create.Key(incompressible(129), "k")
	require.ErrorIs(t, err, idempotency.ErrInvalid)
}

func TestCase_H04_LengthIsCountedInBytesAndNothingIsCut(t *testing.T) {
	t.Parallel()
	s := newShop(t)
	for _, n := range []int{1, 36, 255} {
		_, err := s.place(t.Context(), request(t, strings.Repeat("x", n), "body"))
		require.NoError(t, err)
	}
	for _, value := range []string{
		strings.Repeat("k", 256), strings.Repeat("k", 8000), strings.Repeat("é", 128), strings.Repeat("k", 254) + "é",
	} {
		_, err := create.Key(idempotency.SingleTenant, value)
		require.ErrorIs(t, err, idempotency.ErrInvalid)
	}
	// Two that differ in their last byte only stay two, as do two that look alike.
	prefix := strings.Repeat("p", 254)
	alike := []string{prefix + "1", prefix + "2", "e\u0301", "\u00e9", "k", "K", " k", "k "}
	for _, value := range alike {
		res, err := s.place(t.Context(), request(t, value, "body of "+value))
		require.NoError(t, err)
		require.False(t, res.Replayed, "%q", value)
	}
}
