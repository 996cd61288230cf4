package idempotency

import (
	"bytes"
	"fmt"
	"log/slog"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

func requireInvalid(t *testing.T, err error, field, rule string) {
	t.Helper()
	var invalid *InvalidError
	require.ErrorAs(t, err, &invalid)
	require.ErrorIs(t, err, ErrInvalid)
	require.Equal(t, field, invalid.Field)
	require.Contains(t, invalid.Rule, rule)
}

func mustKey(t *testing.T, tenant, operation, value string) Key {
	t.Helper()
	k, err := NewKey(tenant, operation, value)
	require.NoError(t, err)
	return k
}

func TestNewKey_KeepsItsPartsByteForByte(t *testing.T) {
	t.Parallel()
	for _, value := range []string{"k", " k ", "K", "ключ", "🧾", "e\u0301", "\u00e9", "a\u2028b", "\ufffd", "{a}:b/c"} {
		k := mustKey(t, SingleTenant, "order.create", value)
		require.Equal(t, SingleTenant, k.Tenant())
		require.Equal(t, "order.create", k.Operation())
		require.Equal(t, value, k.Value())
		require.False(t, k.IsZero())
	}
	require.True(t, Key{}.IsZero())
	require.NotEqual(t, mustKey(t, "t", "o", " k"), mustKey(t, "t", "o", "k"))
	require.NotEqual(t, mustKey(t, "t", "o", "e\u0301"), mustKey(t, "t", "o", "\u00e9"))
}

func TestNewKey_OneRuleForEveryPart(t *testing.T) {
	t.Parallel()
	parts := []struct {
		field  string
		limit  int
		create func(string) (Key, error)
	}{
		{"tenant", MaxTenantBytes, func(s string) (Key, error) { return NewKey(s, "o", "k") }},
		{"operation", MaxOperationBytes, func(s string) (Key, error) { return NewKey("t", s, "k") }},
		{"key", MaxKeyBytes, func(s string) (Key, error) { return NewKey("t", "o", s) }},
	}
	for _, part := range parts {
		t.Run(part.field, func(t *testing.T) {
			t.Parallel()
			blank := " \u00a0\u3000"
			for value, rule := range map[string]string{
				"":                                "must not be empty",
				blank:                             "must not be blank",
				"a\x00b":                          "must not contain control characters, byte 1 is U+0000",
				"a\nb":                            "byte 1 is U+000A",
				"a\x7f":                           "byte 1 is U+007F",
				"a\u0085":                         "byte 1 is U+0085",
				"a\xff":                           "must be valid UTF-8, byte 1 is not",
				"a\xed\xa0\x80":                   "must be valid UTF-8, byte 1 is not", // U+D800 as three bytes
				strings.Repeat("x", part.limit+1): fmt.Sprintf("must be at most %d bytes, is %d", part.limit, part.limit+1),
			} {
				k, err := part.create(value)
				requireInvalid(t, err, part.field, rule)
				require.True(t, k.IsZero(), "a refused key must not be usable")
			}
			_, err := part.create(strings.Repeat("x", part.limit))
			require.NoError(t, err)
		})
	}
}

func TestValidateClient_MayBeEmpty(t *testing.T) {
	t.Parallel()
	require.NoError(t, validateClient(""))
	require.NoError(t, validateClient(strings.Repeat("c", MaxClientBytes)))
	requireInvalid(t, validateClient(strings.Repeat("c", MaxClientBytes+1)), "client", "must be at most 255 bytes, is 256")
	requireInvalid(t, validateClient("a\x00"), "client", "must not contain control characters")
}

func TestCase_H03_BlankKeysAreRefusedAndNothingIsTrimmed(t *testing.T) {
	t.Parallel()
	for value, rule := range map[string]string{
		"": "must not be empty", " ": "must not be blank", "   ": "must not be blank", "\t": "must not contain control characters",
	} {
		_, err := NewKey("t", "o", value)
		requireInvalid(t, err, "key", rule)
	}
	require.Equal(t, " k ", mustKey(t, "t", "o", " k ").Value())
	require.Equal(t, `""`, mustKey(t, "t", "o", `""`).Value(), "quotes belong to HTTP, not to the key")
}

func TestCase_H04_TheLimitIsInBytesAndNothingIsCut(t *testing.T) {
	t.Parallel()
	for _, n := range []int{1, 36, 255} {
		require.Len(t, mustKey(t, "t", "o", strings.Repeat("x", n)).Value(), n)
	}
	for _, n := range []int{256, 8000} {
		_, err := NewKey("t", "o", strings.Repeat("x", n))
		requireInvalid(t, err, "key", fmt.Sprintf("must be at most 255 bytes, is %d", n))
	}
	// 127 characters of two bytes and one byte fit; one more byte does not, in the middle of a character or not.
	mustKey(t, "t", "o", strings.Repeat("é", 127)+"x")
	_, err := NewKey("t", "o", strings.Repeat("é", 128))
	requireInvalid(t, err, "key", "must be at most 255 bytes, is 256")

	prefix := strings.Repeat("x", 254)
	a, b := mustKey(t, "t", "o", prefix+"a"), mustKey(t, "t", "o", prefix+"b")
	require.NotEqual(t, a, b)
	require.NotEqual(t, a.LockID(), b.LockID())
}

func TestCase_H06_TenantsAndOperationsSeparateKeys(t *testing.T) {
	t.Parallel()
	keys := []Key{
		mustKey(t, "A", "orders", "1"), mustKey(t, "B", "orders", "1"), // H06
		mustKey(t, "A", "refunds", "1"),                          // F08
		mustKey(t, "a:b", "o", "c"), mustKey(t, "a", "o", "b:c"), // F05
		mustKey(t, "t", "ab", "c"), mustKey(t, "t", "a", "bc"), mustKey(t, "ta", "b", "c"),
	}
	byKey, byLock := map[Key]bool{}, map[int64]bool{}
	for _, k := range keys {
		byKey[k], byLock[k.LockID()] = true, true
	}
	require.Len(t, byKey, len(keys))
	require.Len(t, byLock, len(keys))
}

func TestCase_P14_BadBytesAreRefusedBeforeSQL(t *testing.T) {
	t.Parallel()
	for _, bad := range []string{"\x00", "k\x00", "\xff", "k\xc3", "\xed\xa0\x80", "\xc0\x80"} {
		_, err := NewKey(bad, "o", "k")
		requireInvalid(t, err, "tenant", "must")
		_, err = NewKey("t", bad, "k")
		requireInvalid(t, err, "operation", "must")
		_, err = NewKey("t", "o", bad)
		requireInvalid(t, err, "key", "must")
	}
	require.Equal(t, "😀", mustKey(t, "😀", "😀", "😀").Value())
}

func TestCase_P18_LongKeysAreRefusedUpFront(t *testing.T) {
	t.Parallel()
	for _, n := range []int{256, 2700, 8192} {
		_, err := NewKey("t", "o", strings.Repeat("k", n))
		requireInvalid(t, err, "key", "must be at most 255 bytes")
	}
	// A btree entry of PostgreSQL holds 2,704 bytes; uncompressed, the longest key needs this much of it.
	require.Less(t, MaxTenantBytes+MaxOperationBytes+MaxKeyBytes, 600)
}

// The numbers come from PostgreSQL 15, by the SQL in LockID's comment. They never change.
func TestKey_LockID_EqualsTheDatabaseFunction(t *testing.T) {
	t.Parallel()
	for _, v := range []struct {
		tenant, operation, value string
		want                     int64
	}{
		{"-", "order.create", "k", 7717548321772610408},
		{"-", "order.create", "8e03978e-40d5-43dd-bc93-6894a57f9324", -9026757825532782277},
		{"a:b", "op", "c", 2872967596222104962},
		{"a", "op", "b:c", -2830853463623900505},
		{"Köln", "zahlung.🧾", "schlüssel", -5816766818806038735},
		{strings.Repeat("t", 128), strings.Repeat("o", 128), strings.Repeat("k", 255), 731537344941121149},
	} {
		require.Equal(t, v.want, mustKey(t, v.tenant, v.operation, v.value).LockID())
	}
	require.Equal(t, int64(-7093012390334015778), Key{}.LockID())
}

func TestKey_LockID_AllocatesNothing(t *testing.T) {
	k := mustKey(t, strings.Repeat("t", 128), strings.Repeat("o", 128), strings.Repeat("k", 255))
	var id int64
	require.Zero(t, testing.AllocsPerRun(100, func() { id = k.LockID() }))
	require.NotZero(t, id)
}

func TestCase_P22_LockIDsHave64BitsAndAMillionKeysDoNotCollide(t *testing.T) {
	t.Parallel()
	const n = 1_000_000 // with 32 bits about 116 pairs would collide
	seen := make(map[int64]struct{}, n)
	var high, low int64
	for i := range n {
		id := Key{tenant: "-", operation: "order.create", value: fmt.Sprintf("order-%d", i)}.LockID()
		seen[id] = struct{}{}
		high |= id >> 32
		low |= id & 0xffffffff
	}
	require.Len(t, seen, n)
	require.Equal(t, int64(-1), high)
	require.Equal(t, int64(0xffffffff), low)
}

func TestKey_StringNeverShowsTheValue(t *testing.T) {
	t.Parallel()
	k := mustKey(t, "secret-tenant", "order.create", "secret-value")
	const want = "order.create#"
	require.Regexp(t, `^order\.create#[0-9a-f]{16}$`, k.String())
	require.Equal(t, "order.create#6b1a3d4f302b2368", mustKey(t, "-", "order.create", "k").String())
	require.Equal(t, "(no key)", Key{}.String())

	var buf bytes.Buffer
	slog.New(slog.NewTextHandler(&buf, nil)).Info("x", "key", k, "err", &InProgressError{Key: k})
	slog.New(slog.NewJSONHandler(&buf, nil)).Info("x", "key", k, "request", struct{ Key Key }{k})
	for _, format := range []string{"%v", "%+v", "%#v", "%s", "%q"} {
		fmt.Fprintf(&buf, format+format+"\n", k, struct{ Key Key }{k})
	}
	require.Contains(t, buf.String(), want)
	require.NotContains(t, buf.String(), "secret")
}

func BenchmarkKey_LockID(b *testing.B) {
	k := Key{tenant: "-", operation: "order.create", value: "8e03978e-40d5-43dd-bc93-6894a57f9324"}
	b.ReportAllocs()
	for b.Loop() {
		k.LockID()
	}
}
