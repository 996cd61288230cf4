package idempotency

import (
	"bytes"
	"encoding/json"
	"math/big"
	"reflect"
	"strconv"
	"strings"
	"testing"
	"unicode"
	"unicode/utf8"

	"github.com/stretchr/testify/require"
)

func FuzzNewKey(f *testing.F) {
	f.Add("-", "order.create", "8e03978e-40d5-43dd-bc93-6894a57f9324")
	f.Add("", " ", "\x00")
	f.Add("a\xff", "\u2028", strings.Repeat("é", 128))
	f.Fuzz(func(t *testing.T, tenant, operation, value string) {
		k, err := NewKey(tenant, operation, value)
		ok := nameIsFit(tenant, MaxTenantBytes) && nameIsFit(operation, MaxOperationBytes) && nameIsFit(value, MaxKeyBytes)
		require.Equal(t, ok, err == nil, "%v", err)
		if err != nil {
			require.ErrorIs(t, err, ErrInvalid)
			require.True(t, k.IsZero())
			return
		}
		require.Equal(t, [3]string{tenant, operation, value}, [3]string{k.Tenant(), k.Operation(), k.Value()})
		again, err := NewKey(k.Tenant(), k.Operation(), k.Value())
		require.NoError(t, err)
		require.True(t, k == again && k.LockID() == again.LockID())
	})
}

// nameIsFit says the documented rule a second time, in other words.
func nameIsFit(s string, limit int) bool {
	bad := func(r rune) bool { return r < 0x20 || r >= 0x7f && r <= 0x9f }
	visible := func(r rune) bool { return !unicode.IsSpace(r) }
	return len(s) <= limit && utf8.ValidString(s) && !strings.ContainsFunc(s, bad) && strings.ContainsFunc(s, visible)
}

func FuzzParseFingerprint(f *testing.F) {
	f.Add(FingerprintBytes([]byte("x")).Bytes())
	f.Add(NoFingerprint.Bytes())
	f.Add(make([]byte, FingerprintSize))
	f.Add([]byte{})
	f.Fuzz(func(t *testing.T, stored []byte) {
		got, err := ParseFingerprint(stored)
		require.Equal(t, len(stored) == 33 && stored[0] != 0, err == nil)
		if err != nil {
			require.True(t, got.IsZero())
			return
		}
		require.Equal(t, stored, got.Bytes())
		require.True(t, got.Matches(got))
		require.NotEmpty(t, got.String())
		require.Equal(t, stored[0] == 1 || stored[0] == 2 || stored[0] == 3 || stored[0] == 255, got.Known())
	})
}

func FuzzFingerprintFraming(f *testing.F) {
	f.Add([]byte("a:b"), []byte("c"), []byte("a"), []byte("b:c"))
	f.Add([]byte("ab"), []byte(""), []byte(""), []byte("ab"))
	f.Add([]byte("same"), []byte("parts"), []byte("same"), []byte("parts"))
	f.Fuzz(func(t *testing.T, a1, a2, b1, b2 []byte) {
		a, b := FingerprintBytes(a1, a2), FingerprintBytes(b1, b2)
		require.Equal(t, bytes.Equal(a1, b1) && bytes.Equal(a2, b2), a.Matches(b))
		require.False(t, a.Matches(FingerprintBytes(a1, a2, nil)))
		require.False(t, a.Matches(FingerprintBytes(append(bytes.Clone(a1), a2...))))
		if len(a2) > 0 {
			require.False(t, a.Matches(FingerprintBytes(append(bytes.Clone(a1), a2[0]), a2[1:])))
		}
	})
}

func FuzzCanonicalJSON(f *testing.F) {
	for _, doc := range []string{
		`{"b":[1,2.50,-0e9],"a":{"d":null,"c":"\ud83d\ude00\u0000\/"}}`, `[1e400, 1E-400, 100, 0.1]`, `{"a":1,"\u0061":2}`,
		`"\ud800"`, "\"\xff\"", `[[[[]]]]`, `{"b":{"z":{"y":0,"x":[{"q":1,"p":2}]},"w":0},"a":0}`, `1e9999999999999999999`, `0e00088888888888888888888`, ` true `, `{} {}`, ``,
	} {
		f.Add([]byte(doc))
	}
	f.Fuzz(func(t *testing.T, doc []byte) {
		before := bytes.Clone(doc)
		canonical, err := Canonical(doc)
		require.Equal(t, before, doc, "the caller's bytes are left alone")
		if err != nil {
			require.ErrorIs(t, err, ErrInvalid)
			require.True(t, utf8.ValidString(err.Error()))
			checkRefusal(t, doc, err)
			return
		}
		require.True(t, json.Valid(doc))
		require.True(t, utf8.Valid(canonical))
		again, err := Canonical(canonical)
		require.NoError(t, err)
		require.Equal(t, string(canonical), string(again), "idempotent")
		require.True(t, equalValues(decode(t, doc), decode(t, canonical)), "%s", canonical)
		require.False(t, namesTwice(json.NewDecoder(bytes.NewReader(doc))))
	})
}

// checkRefusal finds the reason of a documented refusal by other means.
func checkRefusal(t *testing.T, doc []byte, err error) {
	t.Helper()
	text := err.Error()
	switch {
	case strings.Contains(text, "must be one valid JSON document"):
		require.False(t, json.Valid(doc))
	case strings.Contains(text, "must be valid UTF-8"):
		require.False(t, utf8.Valid(doc))
	case strings.Contains(text, "must not name a member twice"):
		require.True(t, namesTwice(json.NewDecoder(bytes.NewReader(doc))))
	case strings.Contains(text, "must not contain a lone surrogate"):
		require.Regexp(t, `(?i)\\ud[89a-f]`, string(doc))
	case strings.Contains(text, "must not have an exponent of more than 18 digits"):
		require.Regexp(t, `[eE][+-]?[0-9]{19}`, string(doc))
	case strings.Contains(text, "must not be nested deeper than 1000 levels"):
		require.Greater(t, bytes.Count(doc, []byte("["))+bytes.Count(doc, []byte("{")), 1000)
	default:
		require.Fail(t, "refused for a reason that is not documented", text)
	}
}

func decode(t *testing.T, doc []byte) (v any) {
	t.Helper()
	d := json.NewDecoder(bytes.NewReader(doc))
	d.UseNumber()
	require.NoError(t, d.Decode(&v))
	return v
}

// equalValues compares numbers as rational numbers where that is affordable.
func equalValues(a, b any) bool {
	switch a := a.(type) {
	case json.Number:
		b, ok := b.(json.Number)
		return ok && equalNumbers(string(a), string(b))
	case []any:
		b, ok := b.([]any)
		if !ok || len(a) != len(b) {
			return false
		}
		for i := range a {
			if !equalValues(a[i], b[i]) {
				return false
			}
		}
		return true
	case map[string]any:
		b, ok := b.(map[string]any)
		if !ok || len(a) != len(b) {
			return false
		}
		for name := range a {
			other, ok := b[name]
			if !ok || !equalValues(a[name], other) {
				return false
			}
		}
		return true
	}
	return reflect.DeepEqual(a, b)
}

func equalNumbers(a, b string) bool {
	for _, s := range []string{a, b} {
		if i := strings.IndexAny(s, "eE"); i >= 0 {
			if power, err := strconv.ParseInt(s[i+1:], 10, 64); err != nil || power > 2000 || power < -2000 {
				return true // too large to expand
			}
		}
	}
	x, okX := new(big.Rat).SetString(a)
	y, okY := new(big.Rat).SetString(b)
	return okX && okY && x.Cmp(y) == 0
}

// namesTwice reads tokens and reports whether some object names a member twice, as encoding/json decodes names.
func namesTwice(d *json.Decoder) bool {
	d.UseNumber()
	var walk func() (twice bool)
	walk = func() (twice bool) {
		token, err := d.Token()
		if err != nil {
			return false
		}
		switch token {
		case json.Delim('['):
			for d.More() {
				twice = walk() || twice
			}
		case json.Delim('{'):
			names := map[json.Token]bool{}
			for d.More() {
				name, err := d.Token()
				if err != nil {
					return twice
				}
				twice = twice || names[name]
				names[name] = true
				twice = walk() || twice
			}
		default:
			return false
		}
		_, _ = d.Token() // the closing bracket
		return twice
	}
	return walk()
}
