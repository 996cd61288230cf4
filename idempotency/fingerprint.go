package idempotency

import (
	"bytes"
	"crypto/sha256"
	"encoding/binary"
	"encoding/json"
	"fmt"
)

// FingerprintSize is the length of a stored fingerprint: the version byte and a SHA-256.
const FingerprintSize = 1 + sha256.Size

// The version byte says how a fingerprint was computed: which kind, and which revision of it. It is stored, so a number
// is never given a new meaning. 0 is "not set".
const (
	versionBytes byte = 1
	versionJSON  byte = 2
	versionValue byte = 3
	versionNone  byte = 0xFF
)

// Fingerprint tells two requests with the same key apart: a retry has the fingerprint of the first request, another
// payload has another one (ErrMismatch). Take everything into it that makes the request what it is, also what is not in
// the body (resource id, query), and nothing that changes between honest retries (a multipart boundary, a fresh
// timestamp, a trace id).
//
// The zero value means "not set" and is refused; NoFingerprint leaves the comparison out on purpose.
//
// Fingerprints are compared with Matches. They are not comparable with == on purpose: while an algorithm is being
// replaced, one request has several sums, and == would see only one of them.
type Fingerprint struct {
	version byte
	sum     [sha256.Size]byte
	also    []Fingerprint // what else a stored fingerprint may equal; never modified, and empty inside
}

// NoFingerprint says that requests of this key are not compared: whoever has the key gets the first answer. It is
// compared like any other value, so a record with a real fingerprint is never replayed to a call that passes
// NoFingerprint, nor the other way round. An operation uses it always or never; Accept helps to change that.
var NoFingerprint = Fingerprint{version: versionNone}

// FingerprintBytes is the fingerprint of raw bytes, the usual choice. The parts are framed by their lengths: moving a
// byte from one part to the next gives another fingerprint, and so does an additional empty part.
func FingerprintBytes(parts ...[]byte) Fingerprint {
	f, _ := computeFingerprint(bytesAlgorithms, parts) // raw bytes are never refused
	return f
}

// FingerprintJSON is the fingerprint of a JSON document in its canonical form (see Canonical) followed by parts as in
// FingerprintBytes. Use it where clients or proxies re-encode JSON between retries; FingerprintBytes is cheaper and
// refuses nothing. The error is an *InvalidError.
func FingerprintJSON(doc []byte, parts ...[]byte) (Fingerprint, error) {
	return computeFingerprint(jsonAlgorithms, append([][]byte{doc}, parts...))
}

// FingerprintValue is the fingerprint of a Go value: the canonical form (see Canonical) of what encoding/json makes of
// it. So exported fields and json tags count, the order of fields and of map entries does not, a nil slice (null) is not
// an empty one ([]), and unexported fields are not seen: a type that has only those needs a MarshalJSON method, or all
// its values have one fingerprint. Strings must be valid UTF-8 and hold no U+FFFD, which is what encoding/json makes of
// bytes that are not (FingerprintBytes takes any). It never equals a FingerprintJSON. The error is an *InvalidError.
func FingerprintValue(v any) (Fingerprint, error) {
	doc, err := json.Marshal(v)
	if err != nil {
		return Fingerprint{}, &InvalidError{Field: fieldValue, Rule: "must be encodable as JSON: " + err.Error()}
	}
	return computeFingerprint(valueAlgorithms, [][]byte{doc})
}

// ParseFingerprint reads what Bytes returned. A version that this release does not know is no error, since a newer
// release may have written it; it matches nothing (see Known).
func ParseFingerprint(stored []byte) (Fingerprint, error) {
	if len(stored) != FingerprintSize {
		return Fingerprint{}, &InvalidError{Field: "fingerprint", Rule: fmt.Sprintf("must be %d bytes, is %d", FingerprintSize, len(stored))}
	}
	if stored[0] == 0 {
		return Fingerprint{}, &InvalidError{Field: "fingerprint", Rule: "must begin with a version from 1 to 255, is 0"}
	}
	f := Fingerprint{version: stored[0]}
	copy(f.sum[:], stored[1:])
	return f, nil
}

// Bytes returns the FingerprintSize bytes to store, nil if f is not set. What was given to Accept is not part of them.
func (f Fingerprint) Bytes() []byte {
	if f.IsZero() {
		return nil
	}
	return append([]byte{f.version}, f.sum[:]...)
}

// Accept returns f with others that a stored fingerprint may equal instead; f is the one that gets stored. It lets an
// operation change what goes into its fingerprint while records of the old kind are still alive. With several instances
// this takes three releases, because old and new ones run side by side: old.Accept(new), then new.Accept(old), and
// after the operation's retention new alone. Fingerprints that are not set are left out.
func (f Fingerprint) Accept(others ...Fingerprint) Fingerprint {
	also := append([]Fingerprint(nil), f.also...) // a copy: f may be shared
	for _, o := range others {
		for _, one := range append([]Fingerprint{o}, o.also...) {
			if !one.IsZero() {
				also = append(also, Fingerprint{version: one.version, sum: one.sum})
			}
		}
	}
	f.also = also
	return f
}

// Matches reports whether the request with fingerprint f is the one whose fingerprint was stored. It compares with the
// version that the record was written with. A fingerprint that is not set matches nothing, not even another such one.
func (f Fingerprint) Matches(stored Fingerprint) bool {
	if f.IsZero() || stored.IsZero() {
		return false
	}
	if f.version == stored.version && f.sum == stored.sum {
		return true
	}
	for _, other := range f.also {
		if other.version == stored.version && other.sum == stored.sum {
			return true
		}
	}
	return false
}

// Known reports whether this release can compute fingerprints of f's version. A stored one that is not known comes from
// a newer release: that it does not match says nothing about the request, so the caller must not be told to use a new
// key.
func (f Fingerprint) Known() bool {
	if f.version == versionNone {
		return true
	}
	for _, kind := range [][]algorithm{bytesAlgorithms, jsonAlgorithms, valueAlgorithms} {
		for _, a := range kind {
			if a.version == f.version {
				return true
			}
		}
	}
	return false
}

// IsZero reports whether f is not set.
func (f Fingerprint) IsZero() bool { return f.version == 0 }

// String returns the version and the first 8 hex digits, for example "v1:0f3c5a71".
func (f Fingerprint) String() string {
	switch f.version {
	case 0:
		return "unset"
	case versionNone:
		return "none"
	}
	return fmt.Sprintf("v%d:%x", f.version, f.sum[:4])
}

// algorithm computes the fingerprints of one version.
type algorithm struct {
	version byte
	sum     func(version byte, parts [][]byte) ([sha256.Size]byte, error)
}

// Per kind of fingerprint: the first algorithm is written, the others are only compared with.
//
// To replace one: ship a release with the new algorithm in second place, and one release later swap them. Swapping at
// once would break a rolling deployment, because instances of the old release cannot compare what the new one writes.
// The old algorithm stays as long as records may be alive that it wrote, which means: it stays. A request then costs
// one more hash. It is computed at once and not when it is needed, because that would have to hold on to the caller's
// buffers, which the caller reuses.
var (
	bytesAlgorithms = []algorithm{{versionBytes, sumFramed}}
	jsonAlgorithms  = []algorithm{{versionJSON, sumJSON}}
	valueAlgorithms = []algorithm{{versionValue, sumValue}}
)

func computeFingerprint(kind []algorithm, parts [][]byte) (Fingerprint, error) {
	var f Fingerprint
	for i, a := range kind {
		sum, err := a.sum(a.version, parts)
		if err != nil {
			return Fingerprint{}, err
		}
		one := Fingerprint{version: a.version, sum: sum}
		if i == 0 {
			f = one
			continue
		}
		f.also = append(f.also, one)
	}
	return f, nil
}

// sumFramed hashes the version byte and then every part behind its length (64 bits, big-endian). Without the lengths,
// different splits of the same bytes would be one request.
func sumFramed(version byte, parts [][]byte) (sum [sha256.Size]byte, err error) {
	h := sha256.New()
	var frame [8]byte
	frame[0] = version
	h.Write(frame[:1])
	for _, part := range parts {
		binary.BigEndian.PutUint64(frame[:], uint64(len(part)))
		h.Write(frame[:])
		h.Write(part)
	}
	h.Sum(sum[:0])
	return sum, nil
}

// sumJSON is sumFramed with the first part in canonical form.
func sumJSON(version byte, parts [][]byte) (sum [sha256.Size]byte, err error) {
	canonical, err := canonicalize(fieldJSON, parts[0])
	if err != nil {
		return sum, err
	}
	return sumFramed(version, append([][]byte{canonical}, parts[1:]...))
}

// sumValue is sumFramed of the canonical form of what json.Marshal returned.
func sumValue(version byte, parts [][]byte) (sum [sha256.Size]byte, err error) {
	canonical, err := canonicalize(fieldValue, parts[0])
	if err != nil {
		return sum, err
	}
	// json.Marshal puts U+FFFD for bytes that are not UTF-8, whatever they are: two different strings would match. How it
	// spells that depends on the Go release, so a U+FFFD that really is in a string cannot be told apart for sure.
	if bytes.Contains(canonical, []byte("\ufffd")) {
		return sum, &InvalidError{Field: fieldValue, Rule: "must have valid UTF-8 without U+FFFD in all strings"}
	}
	return sumFramed(version, [][]byte{canonical})
}
