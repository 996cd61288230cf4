package idempotency

import (
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"math"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

func mustJSON(t require.TestingT, doc string, parts ...[]byte) Fingerprint {
	f, err := FingerprintJSON([]byte(doc), parts...)
	require.NoError(t, err, doc)
	return f
}

func mustValue(t require.TestingT, v any) Fingerprint {
	f, err := FingerprintValue(v)
	require.NoError(t, err)
	return f
}

// The sums were computed by another program. They never change: stored records depend on them.
func TestFingerprint_GoldenVectors(t *testing.T) {
	t.Parallel()
	for _, v := range []struct {
		name string
		f    Fingerprint
		want string
	}{
		{"no part", FingerprintBytes(), "014bf5122f344554c53bde2ebb8cd2b7e3d1600ad631c385a5d7cce23c7785459a"},
		{"empty part", FingerprintBytes(nil), "01a536aa3cede6ea3c1f3e0357c3c60e0f216a8c89b853df13b29daa8f85065dfb"},
		{
			"request", FingerprintBytes([]byte("POST"), []byte("/orders"), []byte(`{"amount":100}`)),
			"01461b3fa91bc39b414c557b647269e7451e4ed9c5824a43798e67293867764cf7",
		},
		{
			"json", mustJSON(t, `{ "items": [1.0, 2], "amount": 100 }`),
			"026622f809fccb0838b222beca2ef55380cb07eaa6eb0a50616e32cbb430f6bad6",
		},
		{
			"json and path", mustJSON(t, `{"amount":1e2,"items":[1,2]}`, []byte("/orders/7")),
			"029481cad87b9278ef520a9ae29af5e14e6697206b1e9af19b9db8f8e8a91df606",
		},
		{
			"value", mustValue(t, struct {
				Note   string
				Amount int
			}{"<é>", 100}),
			"0361affd4646c167f265cadfe30ddea52f949051deae254463ffeea49724f6c435",
		},
		{"none", NoFingerprint, "ff" + strings.Repeat("00", 32)},
	} {
		require.Equal(t, v.want, hex.EncodeToString(v.f.Bytes()), v.name)
	}
}

func TestFingerprint_KindsNeverMatchEachOther(t *testing.T) {
	t.Parallel()
	// The document is canonical already, so all three hash the same bytes.
	all := []Fingerprint{
		FingerprintBytes([]byte(`[1,2]`)), mustJSON(t, `[1,2]`), mustValue(t, []int{1, 2}), NoFingerprint, {},
	}
	for i, a := range all {
		for j, b := range all {
			require.Equal(t, i == j && !a.IsZero(), a.Matches(b), "%v, %v", a, b)
		}
		for j, b := range all[:3] {
			require.Equal(t, i == j, a.sum == b.sum, "sums alone must differ, too")
		}
	}
}

func TestFingerprint_ZeroIsNotSet(t *testing.T) {
	t.Parallel()
	var zero Fingerprint
	require.True(t, zero.IsZero())
	require.Nil(t, zero.Bytes())
	require.True(t, zero.Accept(NoFingerprint).IsZero())
	require.False(t, zero.Accept(NoFingerprint).Matches(NoFingerprint))
	require.False(t, NoFingerprint.IsZero())
	require.True(t, NoFingerprint.Known())
	require.False(t, zero.Known())
}

func TestFingerprint_StringIsShort(t *testing.T) {
	t.Parallel()
	require.Equal(t, "v1:4bf5122f", FingerprintBytes().String())
	require.Equal(t, "unset", Fingerprint{}.String())
	require.Equal(t, "none", NoFingerprint.String())
}

func TestParseFingerprint_RefusesOtherLengths(t *testing.T) {
	t.Parallel()
	for _, n := range []int{0, 1, 32, 34, 66} {
		_, err := ParseFingerprint(make([]byte, n))
		requireInvalid(t, err, "fingerprint", fmt.Sprintf("must be 33 bytes, is %d", n))
	}
	_, err := ParseFingerprint(make([]byte, 33))
	requireInvalid(t, err, "fingerprint", "must begin with a version from 1 to 255, is 0")
}

func TestParseFingerprint_ANewerVersionIsReadableAndMatchesNothing(t *testing.T) {
	t.Parallel()
	newer := FingerprintBytes([]byte("x")).Bytes()
	newer[0] = 200
	f, err := ParseFingerprint(newer)
	require.NoError(t, err)
	require.False(t, f.Known())
	require.Equal(t, newer, f.Bytes())
	require.False(t, FingerprintBytes([]byte("x")).Matches(f))
	require.False(t, NoFingerprint.Matches(f))
}

func TestFingerprintValue_SeesWhatJSONSees(t *testing.T) {
	t.Parallel()
	type a struct {
		X int64
		Y string
	}
	type b struct {
		Y      string
		X      int64
		hidden int
	}
	require.True(t, mustValue(t, a{1, "y"}).Matches(mustValue(t, b{Y: "y", X: 1, hidden: 7})))
	require.True(t, mustValue(t, a{1, "y"}).Matches(mustValue(t, map[string]any{"Y": "y", "X": 1.0})))
	require.False(t, mustValue(t, a{1 << 53, ""}).Matches(mustValue(t, a{1<<53 + 1, ""})))
	require.False(t, mustValue(t, []int(nil)).Matches(mustValue(t, []int{})))

	for _, v := range []any{func() {}, make(chan int), math.NaN()} {
		_, err := FingerprintValue(v)
		requireInvalid(t, err, "fingerprint value", "must be encodable as JSON")
	}
	// encoding/json writes one and the same character for the first three.
	for _, v := range []any{"a\xff", map[string]int{"\xfe": 1}, []string{"ok", "\xed\xa0\x80"}, "a real \ufffd"} {
		_, err := FingerprintValue(v)
		requireInvalid(t, err, "fingerprint value", "must have valid UTF-8 without U+FFFD in all strings")
	}
	mustValue(t, "an escape \\ufffd and a \u2028")
}

func TestCase_F05_PartsAreFramed(t *testing.T) {
	t.Parallel()
	split := func(s, separator string) Fingerprint {
		var parts [][]byte
		for part := range strings.SplitSeq(s, separator) {
			parts = append(parts, []byte(part))
		}
		return FingerprintBytes(parts...)
	}
	all := []Fingerprint{
		FingerprintBytes([]byte("x="), []byte("x=y"), []byte("z=")), FingerprintBytes([]byte("x="), []byte("y=z"), []byte("y=")),
		FingerprintBytes([]byte("a:b"), []byte("c")), FingerprintBytes([]byte("a"), []byte("b:c")), FingerprintBytes([]byte("a:b:c")),
		split("a:b:c", ":"),
		FingerprintBytes([]byte("/orders/1"), []byte("2")), FingerprintBytes([]byte("/orders/12"), nil), FingerprintBytes([]byte("/orders/12")),
		FingerprintBytes(nil, []byte("/orders/12")),
		FingerprintBytes([]byte("a\x00\x00\x00\x00\x00\x00\x00\x01b")), FingerprintBytes([]byte("a"), []byte("b")),
		mustJSON(t, `1`, []byte("2")), mustJSON(t, `12`), mustJSON(t, `12`, nil), mustJSON(t, `1`, []byte("2"), nil),
	}
	seen := map[string]bool{}
	for _, f := range all {
		seen[string(f.Bytes())] = true
	}
	require.Len(t, seen, len(all))
}

// released computes what an instance of some release computes, given its algorithms.
func released(t *testing.T, kind []algorithm, body string) Fingerprint {
	t.Helper()
	f, err := computeFingerprint(kind, [][]byte{[]byte(body)})
	require.NoError(t, err)
	return f
}

func TestCase_F07_RecordsAreComparedWithTheVersionTheyWereWrittenWith(t *testing.T) {
	t.Parallel()
	next := algorithm{version: 42, sum: func(version byte, parts [][]byte) ([sha256.Size]byte, error) {
		return sumFramed(version, append([][]byte{[]byte("another rule")}, parts...))
	}}
	current := bytesAlgorithms[0]
	releases := map[string][]algorithm{
		"old":      {current},
		"readable": {current, next},
		"writable": {next, current},
	}
	stored := func(release, body string) Fingerprint {
		f, err := ParseFingerprint(released(t, releases[release], body).Bytes())
		require.NoError(t, err)
		return f
	}
	require.Equal(t, FingerprintBytes([]byte("body")), released(t, releases["old"], "body"))
	require.Equal(t, next.version, stored("writable", "body").version)

	// A rolling deployment mixes neighbours, and every release meets the rows of all earlier ones.
	for writer, readers := range map[string][]string{
		"old": {"old", "readable", "writable"}, "readable": {"old", "readable", "writable"}, "writable": {"readable", "writable"},
	} {
		for _, reader := range readers {
			honest, changed := released(t, releases[reader], "body"), released(t, releases[reader], "changed")
			require.True(t, honest.Matches(stored(writer, "body")), "%s reads %s: honest retry", reader, writer)
			require.False(t, changed.Matches(stored(writer, "body")), "%s reads %s: changed payload", reader, writer)
		}
	}
	// Skipping the step in between: the old release says that it cannot tell, instead of matching.
	require.False(t, released(t, releases["old"], "body").Matches(stored("writable", "body")))
	require.False(t, stored("writable", "body").Known())
	require.True(t, stored("old", "body").Known())
}

func TestCase_F07_AnOperationCanChangeWhatItsFingerprintCovers(t *testing.T) {
	t.Parallel()
	old := func(amount string) Fingerprint { return FingerprintBytes([]byte(amount)) }
	fresh := func(amount string) Fingerprint { return FingerprintBytes([]byte("/orders"), []byte(amount)) }

	require.True(t, old("1").Accept(fresh("1")).Matches(fresh("1")))
	require.True(t, fresh("1").Accept(old("1")).Matches(old("1")))
	require.False(t, fresh("2").Accept(old("2")).Matches(old("1")))
	require.False(t, fresh("1").Matches(old("1")))
	require.Equal(t, fresh("1").Bytes(), fresh("1").Accept(old("1")).Bytes(), "the receiver is stored")
	require.True(t, fresh("1").Accept(NoFingerprint).Matches(NoFingerprint))
	require.True(t, fresh("1").Accept(old("1").Accept(NoFingerprint)).Matches(NoFingerprint))
	require.False(t, fresh("1").Accept(Fingerprint{}).Matches(Fingerprint{}))

	// Three, so that a shared slice would have room for a fourth.
	base := fresh("1").Accept(old("1"), old("2"), old("3"))
	four, five := base.Accept(old("4")), base.Accept(old("5"))
	require.True(t, four.Matches(old("4")) && five.Matches(old("5")))
	require.False(t, base.Matches(old("4")) || four.Matches(old("5")), "Accept must not change its receiver")
}

func TestCase_F11_TheCallerChoosesWhatCounts(t *testing.T) {
	t.Parallel()
	// sent_at is left out; the file and its name are in.
	request := func(name, file string, _ time.Time) Fingerprint { return FingerprintBytes([]byte(name), []byte(file)) }
	now := time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)
	require.True(t, request("a.pdf", "…", now).Matches(request("a.pdf", "…", now.Add(time.Second))))
	require.False(t, request("a.pdf", "…", now).Matches(request("a.pdf", "other", now)))
}

func TestCase_P24_StoredFingerprintsAre33RawBytes(t *testing.T) {
	t.Parallel()
	for _, f := range []Fingerprint{FingerprintBytes([]byte("x")), mustJSON(t, `{}`), mustValue(t, 1), NoFingerprint} {
		stored := f.Bytes()
		require.Len(t, stored, FingerprintSize)
		require.Len(t, stored, 33)
		back, err := ParseFingerprint(stored)
		require.NoError(t, err)
		require.True(t, f.Matches(back))
		require.Equal(t, stored, back.Bytes())
		stored[0], stored[5] = 77, stored[5]+1
		require.Equal(t, back.Bytes(), f.Bytes(), "Bytes hands out a copy, ParseFingerprint takes one")

		_, err = ParseFingerprint([]byte(hex.EncodeToString(stored)))
		requireInvalid(t, err, "fingerprint", "must be 33 bytes, is 66")
	}
}

func BenchmarkFingerprintBytes(b *testing.B) {
	path, body := []byte("/orders"), make([]byte, 1024)
	b.ReportAllocs()
	for b.Loop() {
		FingerprintBytes(path, body)
	}
}
