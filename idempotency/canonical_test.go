package idempotency

import (
	"encoding/json"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"
	"unicode/utf16"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"
)

func TestCanonical_GoldenVectors(t *testing.T) {
	t.Parallel()
	for doc, want := range map[string]string{
		" { \"b\" : [ 3 , { \"z\":1,\"y\":null } ] ,\n\t\"a\":true } ":   `{"a":true,"b":[3,{"y":null,"z":1}]}`,
		`{"b":{"d":{"f":1,"e":2},"c":[{"h":1,"g":2},[]]},"a":{}}`:        `{"a":{},"b":{"c":[{"g":2,"h":1},[]],"d":{"e":2,"f":1}}}`,
		`{"a!":1,"a":2,"":3,"é":4,"😀":5,"￿":6}`:                          `{"":3,"a":2,"a!":1,"é":4,"￿":6,"😀":5}`,
		`"\u00e9\u0041\/\ud83d\ude00\u2028\u007f"`:                       "\"éA/😀\u2028\u007f\"",
		`"\u0000\u0008\u0009\u000a\u000b\u000C\u000D\u001F\u0022\u005C"`: `"\u0000\b\t\n\u000b\f\r\u001f\"\\"`,
		`"\ufffd"`:           "\"\ufffd\"",
		` false `:            `false`,
		`[]`:                 `[]`,
		`[ ]`:                `[]`,
		`{ }`:                `{}`,
		`[-1, 10, -0.050]`:   `[-1,1e1,-5e-2]`,
		`{"n":1,"b":2}`:      `{"b":2,"n":1}`,
		`{"\n":1,"b":2}`:     `{"\n":1,"b":2}`,
		`{"b":2,"\u000A":1}`: `{"\n":1,"b":2}`,
	} {
		got, err := Canonical([]byte(doc))
		require.NoError(t, err, doc)
		require.Equal(t, want, string(got), doc)
	}
}

func TestCanonical_RefusesAndSaysWhere(t *testing.T) {
	t.Parallel()
	nested := func(n int) string { return strings.Repeat("[", n) + strings.Repeat("]", n) }
	for doc, rule := range map[string]string{
		``:                            "must be one valid JSON document: unexpected end of JSON input",
		`{"a":1} {}`:                  "must be one valid JSON document: invalid character '{' after top-level value at byte",
		`[01]`:                        "must be one valid JSON document",
		"\ufeff{}":                    "must be one valid JSON document",
		"\"a\xff\"":                   "must be valid UTF-8",
		"\"\xed\xa0\x80\"":            "must be valid UTF-8",
		`"\ud800"`:                    "must not contain a lone surrogate, at the root",
		`{"a":["\udc00"]}`:            `must not contain a lone surrogate, at "/a/0"`,
		`["\ud800x"]`:                 "must not contain a lone surrogate",
		`["\ud800\n"]`:                "must not contain a lone surrogate",
		`["\ud800\ud800"]`:            "must not contain a lone surrogate",
		`["\udc00\ud800"]`:            "must not contain a lone surrogate",
		`["\ud800\ufffd"]`:            "must not contain a lone surrogate",
		`{"\ud800":1}`:                "must not contain a lone surrogate",
		`{"a":1,"a":1}`:               `must not name a member twice, at "/a"`,
		`{"a":1,"\u0061":2}`:          `must not name a member twice, at "/a"`,
		`{"z":[0,{"b/~":1,"b/~":2}]}`: `must not name a member twice, at "/z/1/b~1~0"`,
		`{"b":{"x":1,"x":2},"a":0}`:   `must not name a member twice, at "/b/x"`,
		`{"b":1,"c":0,"a":2,"b":3}`:   `must not name a member twice, at "/b"`,
		`[1e1000000000000000000]`:     `must not have an exponent of more than 18 digits, at "/0"`,
		`[1e-1000000000000000000]`:    `must not have an exponent of more than 18 digits`,
		nested(1001):                  "must not be nested deeper than 1000 levels",
		nested(20000):                 "must be one valid JSON document",
	} {
		got, err := Canonical([]byte(doc))
		requireInvalid(t, err, "fingerprint json", rule)
		require.Nil(t, got)
		f, err := FingerprintJSON([]byte(doc))
		requireInvalid(t, err, "fingerprint json", rule)
		require.True(t, f.IsZero(), "a refused fingerprint must not be usable")
	}
	_, err := Canonical([]byte(nested(1000)))
	require.NoError(t, err)
}

func TestCanonical_ErrorsDoNotCarryValues(t *testing.T) {
	t.Parallel()
	long := strings.Repeat("n", 5000)
	_, err := Canonical([]byte(`{"card":"secret-1","` + long + `":{"x\u0085":"secret-2","x\u0085":"secret-3"}}`))
	require.Error(t, err)
	require.NotContains(t, err.Error(), "secret")
	require.Less(t, len(err.Error()), 400)

	_, err = Canonical([]byte(`{"x\u0085\n":1,"x\u0085\n":2}`))
	require.NotContains(t, err.Error(), "\u0085", "names come from clients and end in logs")
}

func TestCase_F01_MemberOrderAndSpaceDoNotCount(t *testing.T) {
	t.Parallel()
	base := mustJSON(t, `{"a":1,"b":{"c":{"d":{"e":{"x":1,"y":2}}}},"l":[{"p":1,"q":2},{"p":3,"q":4}]}`)
	for _, same := range []string{
		`{"l":[{"p":1,"q":2},{"p":3,"q":4}],"b":{"c":{"d":{"e":{"x":1,"y":2}}}},"a":1}`,
		`{"a":1,"b":{"c":{"d":{"e":{"y":2,"x":1}}}},"l":[{"q":2,"p":1},{"q":4,"p":3}]}`,
		"{\r\n\t\"a\" : 1 , \"b\":{\"c\":{\"d\":{\"e\":{\"x\":1,\"y\":2}}}},\"l\":[ {\"p\":1,\"q\":2} , {\"p\":3,\"q\":4} ] }\n",
	} {
		require.True(t, base.Matches(mustJSON(t, same)), same)
	}
	for _, other := range []string{
		`{"a":1,"b":{"c":{"d":{"e":{"x":1,"y":2}}}},"l":[{"p":3,"q":4},{"p":1,"q":2}]}`, // elements swapped
		`{"a":1,"b":{"c":{"d":{"e":{"x":2,"y":1}}}},"l":[{"p":1,"q":2},{"p":3,"q":4}]}`, // values swapped
		`{"a":1,"b":{"c":{"d":{"e":{"x":1,"y":2}}}},"l":[{"p":1,"q":2},{"p":3},{"q":4}]}`,
	} {
		require.False(t, base.Matches(mustJSON(t, other)), other)
	}
	require.False(t, mustJSON(t, `[1,2]`).Matches(mustJSON(t, `[2,1]`)))
}

func TestCase_F02_NumbersAreExact(t *testing.T) {
	t.Parallel()
	seen := map[string]string{}
	for _, n := range []string{
		"9007199254740992", "9007199254740993", "9223372036854775808", "9223372036854775809", "18446744073709551616",
		"0.1", "0.10000000000000001", "0.1000000000000000055511151231257827", "1e400", "1e401", "-1e400", "1e-400", "0",
		"1e999999999999", "1e-999999999999", "1e999999999999999999", "123456789012345678901234567890.5",
	} {
		got, err := Canonical([]byte(n))
		require.NoError(t, err, n)
		require.LessOrEqual(t, len(got), len(n)+24)
		require.NotContains(t, seen, string(got), n)
		seen[string(got)] = n
	}
}

func TestCase_F03_EqualNumbersHaveOneSpelling(t *testing.T) {
	t.Parallel()
	for want, spellings := range map[string][]string{
		"0":            {"0", "-0", "0.0", "-0.000", "0e5", "0E-5", "0e99999999999999999999999", "-0.0e+1"},
		"1":            {"1", "1.0", "1e0", "1E+0", "1e-0", "10e-1", "0.1e1", "0.001e3", "1000e-3", "1e00000000000000000000000"},
		"-1":           {"-1", "-1.0", "-10E-1"},
		"12345":        {"12345", "12345.0", "1.2345e4", "12345e+0", "1234500e-2"},
		"1e2":          {"100", "100.0", "1e2", "1E+2", "10e1", "0.1e3", "1e0000000000000000000000002"},
		"5e-1":         {"0.5", "0.50", "5e-1", "50E-2", "0.00000000005e10"},
		"1e400":        {"1e400", "10E399", "0.1e+401"},
		"101e-2":       {"1.01", "1.010", "101e-2"},
		"1e1000000000": {"1e1000000000", "0.01e1000000002"},
	} {
		for _, s := range spellings {
			got, err := Canonical([]byte(s))
			require.NoError(t, err, s)
			require.Equal(t, want, string(got), s)
		}
	}
}

func TestCase_P14_ReplacementCharactersDoNotHideOtherStrings(t *testing.T) {
	t.Parallel()
	replacement := mustJSON(t, `"\ufffd"`)
	require.True(t, replacement.Matches(mustJSON(t, "\"\ufffd\"")))
	for _, doc := range []string{`"\ud800"`, `"\udfff"`, "\"\xff\"", "\"\xc3\""} {
		_, err := FingerprintJSON([]byte(doc))
		require.ErrorIs(t, err, ErrInvalid, "%q", doc)
	}
	require.False(t, mustJSON(t, `"\u0000"`).Matches(mustJSON(t, `"\\u0000"`)))
	require.False(t, mustJSON(t, `"a\u0000"`).Matches(mustJSON(t, `"a"`)))
	require.True(t, mustJSON(t, `"\ud83d\ude00"`).Matches(mustJSON(t, `"😀"`)))
}

func TestCanonical_HostileDocumentsStayCheap(t *testing.T) {
	t.Parallel()
	// Every level has its members in the wrong order around one big value.
	deep := strings.Repeat(`{"b":`, 999) + `"` + strings.Repeat("x", 1<<20) + `"` + strings.Repeat(`,"a":0}`, 999)
	var wide strings.Builder
	for i := range 100_000 {
		fmt.Fprintf(&wide, `,"%d":{"b":1,"a":2}`, 100_000-i)
	}
	for _, doc := range []string{
		deep, "{" + wide.String()[1:] + "}", strings.Repeat("9", 1<<20), "1e" + strings.Repeat("0", 1<<20) + "1",
		"0." + strings.Repeat("0", 1<<20) + "1", "[" + strings.Repeat("[],", 300_000) + "0]",
	} {
		start := time.Now()
		got, err := Canonical([]byte(doc))
		require.NoError(t, err)
		require.LessOrEqual(t, len(got), len(doc))
		require.Less(t, time.Since(start), 10*time.Second) // far above what it takes, far below what quadratic work would
	}
}

// jsonString draws what FingerprintValue takes: it refuses U+FFFD. A function: one generator of rapid in two parallel tests is a
// data race.
func jsonString() *rapid.Generator[string] {
	return rapid.String().Filter(func(s string) bool { return !strings.Contains(s, "\ufffd") })
}

// jsonValue draws what a decoder with UseNumber could return.
func jsonValue(depth int) *rapid.Generator[any] {
	return rapid.Custom(func(t *rapid.T) any {
		kind := 3
		if depth > 0 {
			kind = 5
		}
		switch rapid.IntRange(0, kind).Draw(t, "kind") {
		case 0:
			return rapid.SampledFrom([]any{nil, true, false}).Draw(t, "literal")
		case 1, 2:
			mantissa := rapid.Int64().Draw(t, "mantissa")
			return json.Number(fmt.Sprintf("%de%d", mantissa, rapid.IntRange(-40, 40).Draw(t, "power")))
		case 3:
			return jsonString().Draw(t, "string")
		case 4:
			return rapid.SliceOfN(jsonValue(depth-1), 0, 4).Draw(t, "array")
		default:
			return rapid.MapOfN(jsonString(), jsonValue(depth-1), 0, 4).Draw(t, "object")
		}
	})
}

// spell writes v in one of its many spellings.
func spell(t *rapid.T, b *strings.Builder, v any) {
	space := func() { b.WriteString(rapid.SampledFrom([]string{"", "", " ", "\n\t"}).Draw(t, "space")) }
	space()
	defer space()
	switch v := v.(type) {
	case string:
		spellString(t, b, v)
	case json.Number:
		mantissa, power, _ := strings.Cut(string(v), "e")
		exponent, err := strconv.Atoi(power)
		require.NoError(t, err)
		zeros := rapid.IntRange(0, 3).Draw(t, "zeros")
		if mantissa == "0" {
			zeros = 0 // 00 is no number
		}
		fmt.Fprintf(b, "%s%s%s%s%+d", mantissa, strings.Repeat("0", zeros), rapid.SampledFrom([]string{"", ".0", ".000"}).Draw(t, "fraction"),
			rapid.SampledFrom([]string{"e", "E"}).Draw(t, "e"), exponent-zeros)
	case []any:
		b.WriteByte('[')
		for i, element := range v {
			if i > 0 {
				b.WriteByte(',')
			}
			spell(t, b, element)
		}
		b.WriteByte(']')
	case map[string]any:
		b.WriteByte('{')
		for i, name := range rapid.Permutation(slices.Sorted(maps.Keys(v))).Draw(t, "order") {
			if i > 0 {
				b.WriteByte(',')
			}
			space()
			spellString(t, b, name)
			space()
			b.WriteByte(':')
			spell(t, b, v[name])
		}
		b.WriteByte('}')
	default:
		fmt.Fprint(b, map[any]string{nil: "null", true: "true", false: "false"}[v])
	}
}

func spellString(t *rapid.T, b *strings.Builder, s string) {
	b.WriteByte('"')
	for _, r := range s {
		if r >= ' ' && r != '"' && r != '\\' && rapid.Bool().Draw(t, "plain") {
			b.WriteRune(r)
			continue
		}
		for _, unit := range utf16.Encode([]rune{r}) {
			fmt.Fprintf(b, rapid.SampledFrom([]string{`\u%04x`, `\u%04X`}).Draw(t, "hex"), unit)
		}
	}
	b.WriteByte('"')
}

func TestCanonical_EverySpellingOfAValueIsOne(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		v := jsonValue(3).Draw(t, "value")
		var a, b strings.Builder
		spell(t, &a, v)
		spell(t, &b, v)
		canonical, err := Canonical([]byte(a.String()))
		require.NoError(t, err)
		again, err := Canonical(canonical)
		require.NoError(t, err)
		require.Equal(t, string(canonical), string(again), "idempotent")
		require.True(t, mustJSON(t, a.String()).Matches(mustJSON(t, b.String())))
		require.True(t, mustValue(t, v).Matches(mustValue(t, json.RawMessage(canonical))))
	})
}

func TestCanonical_EveryChangeOfAScalarCounts(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		v := jsonValue(3).Draw(t, "value")
		before := mustValue(t, v)
		n := 0
		changeScalar(v, func(any) any { n++; return nil }, -1)
		if n == 0 {
			t.Skip("no scalar")
		}
		changed := changeScalar(v, func(old any) any {
			switch old := old.(type) {
			case string:
				return old + "x"
			case json.Number:
				mantissa, power, _ := strings.Cut(string(old), "e")
				return json.Number(mantissa + ".0000000000000000000001e" + power)
			case bool:
				return !old
			}
			return ""
		}, rapid.IntRange(0, n-1).Draw(t, "which"))
		require.False(t, before.Matches(mustValue(t, changed)))
	})
}

// changeScalar returns a copy of v with its scalar number which changed; -1 visits all and keeps them.
func changeScalar(v any, change func(any) any, which int) any {
	i := 0
	var walk func(any) any
	walk = func(v any) any {
		switch v := v.(type) {
		case []any:
			out := make([]any, len(v))
			for j, element := range v {
				out[j] = walk(element)
			}
			return out
		case map[string]any:
			out := make(map[string]any, len(v))
			for _, name := range slices.Sorted(maps.Keys(v)) {
				out[name] = walk(v[name])
			}
			return out
		}
		i++
		if which == -1 {
			change(v)
		} else if i-1 == which {
			return change(v)
		}
		return v
	}
	return walk(v)
}

func BenchmarkCanonical(b *testing.B) {
	doc := []byte(`{"items":[{"sku":"a-1","quantity":2,"price":19.90},{"sku":"b-2","quantity":1,"price":5}],` +
		`"customer":{"name":"Zoë","id":9007199254740993},"note":"line\none"}`)
	b.ReportAllocs()
	b.SetBytes(int64(len(doc)))
	for b.Loop() {
		_, _ = Canonical(doc)
	}
}
