package ids

import (
	"crypto/sha256"
	"encoding/base32"
	"encoding/binary"
	"time"
)

// crockford is Crockford's base 32: digits and capital letters without I, L, O and U, in ASCII's order.
var crockford = base32.NewEncoding("0123456789ABCDEFGHJKMNPQRSTVWXYZ").WithPadding(base32.NoPadding)

// OrderID returns an id that is a checksum of what was ordered: the first 64 bits of SHA-256 over customer, sku and the
// Unix milliseconds of at, in Crockford's base 32, which is 13 characters. Whoever knows the three can tell with Verify that
// the id is theirs, without asking anybody.
//
// The same customer, sku and millisecond give the same id. It is no secret and no signature: anybody can compute it. Of
// different orders two may have the same id, with a chance of one in a million for 6 million orders, so keep a unique key on
// it. It is not in the order of time; an ID is.
func OrderID(customer, sku string, at time.Time) string {
	var framed []byte
	// Lengths, not a separator: "ab" with "c" and "a" with "bc" are two orders.
	for _, part := range [...]string{customer, sku} {
		framed = binary.BigEndian.AppendUint64(framed, uint64(len(part)))
		framed = append(framed, part...)
	}
	framed = binary.BigEndian.AppendUint64(framed, uint64(at.UnixMilli()))
	sum := sha256.Sum256(framed)
	return crockford.EncodeToString(sum[:8])
}

// Verify reports whether id is the OrderID of the three, spelt as OrderID spells it.
func Verify(id, customer, sku string, at time.Time) bool {
	return id == OrderID(customer, sku, at)
}
