package idempotency

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"unicode/utf16"
	"unicode/utf8"
)

const (
	fieldJSON  = "fingerprint json"
	fieldValue = "fingerprint value"

	maxJSONDepth      = 1000
	maxExponentDigits = 18  // so that exponents fit an int64 with room for the digits of the mantissa
	maxPathBytes      = 200 // of an error's text
)

// Canonical returns the one spelling of a JSON document: two documents have the same canonical form if and only if they
// have the same value. RFC 8785 is the model, except that numbers are exact.
//
//   - White space between tokens is dropped. The order of array elements counts, the order of members does not: members
//     are sorted by the bytes of their names as spelled here.
//   - Strings have one spelling: UTF-8, with \", \\, \b, \t, \n, \f, \r and \u00xx (lower case) for control characters
//     below U+0020 and no other escape. There is no Unicode normalisation.
//   - Numbers with the same mathematical value have one spelling: digits without leading or trailing zeros, then the
//     power of ten if it is not 0. So 100, 100.0 and 1E+2 are 1e2; 0.50 is 5e-1; 0, -0 and 0.0e9 are 0. They never pass
//     through floating point: 9007199254740992 and 9007199254740993 differ.
//
// It refuses, with an *InvalidError that says where but not what: anything that is not one JSON document; invalid UTF-8;
// lone surrogates such as \ud800 (decoders put U+FFFD there, which would make two strings one); a member named twice,
// also in two spellings (which one counts differs between decoders); nesting deeper than 1000; an exponent of more than
// 18 digits.
func Canonical(doc []byte) ([]byte, error) {
	return canonicalize(fieldJSON, doc)
}

// canonicalize is Canonical with the field that errors name.
func canonicalize(field string, doc []byte) ([]byte, error) {
	if !utf8.Valid(doc) {
		return nil, &InvalidError{Field: field, Rule: "must be valid UTF-8"}
	}
	if !json.Valid(doc) {
		return nil, &InvalidError{Field: field, Rule: "must be one valid JSON document" + syntaxError(doc)}
	}
	c := canonicalizer{doc: doc, out: make([]byte, 0, len(doc))}
	if rule := c.value(0); rule != "" {
		return nil, &InvalidError{Field: field, Rule: rule + ", " + c.where()}
	}
	if len(c.unsorted) == 0 {
		return c.out, nil
	}
	// Members are moved once, at the end. Moving them when their object is complete would copy the innermost value once
	// per level, which a hostile document can make expensive.
	slices.SortFunc(c.unsorted, func(a, b jsonObject) int { return a.start - b.start })
	return c.sorted(make([]byte, 0, len(c.out)), 0, len(c.out)), nil
}

// canonicalizer walks a document that encoding/json found valid, so it checks only what that package lets pass.
type canonicalizer struct {
	doc []byte
	pos int

	out      []byte       // the canonical tokens, members still in the order of the document
	members  []jsonMember // of the objects that are open, a stack
	unsorted []jsonObject // those whose members have to change places
	path     []string     // from what was refused up to the root
}

// jsonMember is a place in out: name literal from start to colon, value from there to end.
type jsonMember struct{ start, colon, end int }

// jsonObject is a place in out, from brace to brace, with its members in the right order.
type jsonObject struct {
	start, end int
	members    []jsonMember
}

// value appends the value at pos and returns the rule it breaks, or "".
func (c *canonicalizer) value(depth int) (rule string) {
	c.space()
	switch c.doc[c.pos] {
	case '{', '[':
		if depth == maxJSONDepth {
			return fmt.Sprintf("must not be nested deeper than %d levels", maxJSONDepth)
		}
		if c.doc[c.pos] == '{' {
			return c.object(depth + 1)
		}
		return c.array(depth + 1)
	case '"':
		return c.text()
	case 't', 'f', 'n':
		for c.pos < len(c.doc) && 'a' <= c.doc[c.pos] && c.doc[c.pos] <= 'z' {
			c.take()
		}
		return ""
	default:
		return c.number()
	}
}

func (c *canonicalizer) object(depth int) (rule string) {
	start, base := len(c.out), len(c.members)
	c.take()
	for c.space(); c.doc[c.pos] != '}'; c.space() {
		if c.doc[c.pos] == ',' {
			c.take()
			c.space()
		}
		m := jsonMember{start: len(c.out)}
		if rule := c.text(); rule != "" {
			return rule
		}
		m.colon = len(c.out)
		c.space()
		c.take()
		if rule := c.value(depth); rule != "" {
			c.path = append(c.path, string(c.name(m)))
			return rule
		}
		m.end = len(c.out)
		c.members = append(c.members, m)
	}
	c.take()

	members := c.members[base:]
	byName := func(a, b jsonMember) int { return bytes.Compare(c.name(a), c.name(b)) }
	if !slices.IsSortedFunc(members, byName) {
		members = slices.Clone(members)
		slices.SortFunc(members, byName)
		c.unsorted = append(c.unsorted, jsonObject{start: start, end: len(c.out), members: members})
	}
	// Names have one spelling by now, so "a" and "\u0061" are neighbours that are equal.
	for i := 1; i < len(members); i++ {
		if byName(members[i-1], members[i]) == 0 {
			c.path = append(c.path, string(c.name(members[i])))
			return "must not name a member twice"
		}
	}
	c.members = c.members[:base]
	return ""
}

// name is what stands between the quotes.
func (c *canonicalizer) name(m jsonMember) []byte { return c.out[m.start+1 : m.colon-1] }

func (c *canonicalizer) array(depth int) (rule string) {
	c.take()
	i := 0
	for c.space(); c.doc[c.pos] != ']'; c.space() {
		if c.doc[c.pos] == ',' {
			c.take()
		}
		if rule := c.value(depth); rule != "" {
			c.path = append(c.path, strconv.Itoa(i))
			return rule
		}
		i++
	}
	c.take()
	return ""
}

func (c *canonicalizer) text() (rule string) {
	c.take()
	for {
		switch c.doc[c.pos] {
		case '"':
			c.take()
			return ""
		case '\\':
			r, ok := c.escape()
			if !ok {
				return "must not contain a lone surrogate"
			}
			c.escaped(r)
		default:
			c.take()
		}
	}
}

// escape reads an escape sequence; of a surrogate pair both halves.
func (c *canonicalizer) escape() (r rune, ok bool) {
	letter := c.doc[c.pos+1]
	if letter != 'u' {
		c.pos += 2
		if i := strings.IndexByte("btnfr", letter); i >= 0 {
			return rune("\b\t\n\f\r"[i]), true
		}
		return rune(letter), true
	}
	r = c.hex()
	if !utf16.IsSurrogate(r) {
		return r, true
	}
	if !bytes.HasPrefix(c.doc[c.pos:], []byte(`\u`)) {
		return 0, false
	}
	r = utf16.DecodeRune(r, c.hex())
	return r, r != utf8.RuneError
}

// hex reads \uXXXX.
func (c *canonicalizer) hex() rune {
	n, _ := strconv.ParseUint(string(c.doc[c.pos+2:c.pos+6]), 16, 16) // four hex digits: json.Valid has seen them
	c.pos += 6
	return rune(n)
}

// escaped appends a character that was escaped, in its one spelling.
func (c *canonicalizer) escaped(r rune) {
	switch {
	case r == '"' || r == '\\':
		c.out = append(c.out, '\\', byte(r))
	case r >= ' ':
		c.out = utf8.AppendRune(c.out, r)
	default:
		if i := strings.IndexRune("\b\t\n\f\r", r); i >= 0 {
			c.out = append(c.out, '\\', "btnfr"[i])
			return
		}
		c.out = fmt.Appendf(c.out, `\u%04x`, r)
	}
}

// number appends the digits without zeros at either end and the power of ten that goes with them. It works on text, so
// that neither many digits nor a huge exponent costs more than reading them.
func (c *canonicalizer) number() (rule string) {
	end := c.pos
	for end < len(c.doc) && strings.IndexByte("+-.eE0123456789", c.doc[end]) >= 0 {
		end++
	}
	literal := string(c.doc[c.pos:end])
	c.pos = end

	literal, negative := strings.CutPrefix(literal, "-")
	mantissa, power := literal, ""
	if i := strings.IndexAny(literal, "eE"); i >= 0 {
		mantissa, power = literal[:i], literal[i+1:]
	}
	whole, fraction, _ := strings.Cut(mantissa, ".")
	digits := strings.TrimLeft(whole+fraction, "0")
	if digits == "" {
		c.out = append(c.out, '0') // whatever the sign and the exponent
		return ""
	}
	exponent, ok := parseExponent(power)
	if !ok {
		return fmt.Sprintf("must not have an exponent of more than %d digits", maxExponentDigits)
	}
	significant := strings.TrimRight(digits, "0")
	exponent += int64(len(digits)-len(significant)) - int64(len(fraction))

	if negative {
		c.out = append(c.out, '-')
	}
	c.out = append(c.out, significant...)
	if exponent != 0 {
		c.out = append(c.out, 'e')
		c.out = strconv.AppendInt(c.out, exponent, 10)
	}
	return ""
}

// parseExponent reads what follows the e: an optional sign and digits, or nothing.
func parseExponent(s string) (n int64, ok bool) {
	s, negative := strings.CutPrefix(s, "-")
	s = strings.TrimLeft(strings.TrimPrefix(s, "+"), "0")
	if len(s) > maxExponentDigits {
		return 0, false
	}
	if s != "" {
		n, _ = strconv.ParseInt(s, 10, 64) // digits only, and they fit
	}
	if negative {
		n = -n
	}
	return n, true
}

// sorted appends out[from:to] with the members of the unsorted objects in their right places.
func (c *canonicalizer) sorted(dst []byte, from, to int) []byte {
	for {
		i, _ := slices.BinarySearchFunc(c.unsorted, from, func(o jsonObject, at int) int { return o.start - at })
		if i == len(c.unsorted) || c.unsorted[i].start >= to {
			return append(dst, c.out[from:to]...)
		}
		o := c.unsorted[i]
		dst = append(dst, c.out[from:o.start+1]...)
		for j, m := range o.members {
			if j > 0 {
				dst = append(dst, ',')
			}
			dst = c.sorted(dst, m.start, m.end)
		}
		dst = append(dst, '}')
		from = o.end
	}
}

// take copies one byte.
func (c *canonicalizer) take() {
	c.out = append(c.out, c.doc[c.pos])
	c.pos++
}

func (c *canonicalizer) space() {
	for c.pos < len(c.doc) && strings.IndexByte(" \t\r\n", c.doc[c.pos]) >= 0 {
		c.pos++
	}
}

// where says at which JSON pointer (RFC 6901) the document was refused. It is quoted and cut: names come from clients.
func (c *canonicalizer) where() string {
	if len(c.path) == 0 {
		return "at the root"
	}
	var b strings.Builder
	escaper := strings.NewReplacer("~", "~0", "/", "~1")
	for _, name := range slices.Backward(c.path) {
		b.WriteString("/" + escaper.Replace(name))
		if b.Len() > maxPathBytes {
			return "at " + strconv.Quote(strings.ToValidUTF8(b.String()[:maxPathBytes], "")+"...")
		}
	}
	return "at " + strconv.Quote(b.String())
}

// syntaxError says where the syntax ends, nothing if that is not known.
func syntaxError(doc []byte) string {
	var raw json.RawMessage
	err := json.Unmarshal(doc, &raw)
	if err == nil {
		return ""
	}
	if syntax := (*json.SyntaxError)(nil); errors.As(err, &syntax) {
		return fmt.Sprintf(": %v at byte %d", err, syntax.Offset)
	}
	return ": " + err.Error()
}
