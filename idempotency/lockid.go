package idempotency

import (
	"crypto/sha256"
	"encoding/binary"
)

// maxFramedKey is the longest framed key: three lengths and three parts.
const maxFramedKey = 3*8 + MaxTenantBytes + MaxOperationBytes + MaxKeyBytes

// LockID returns the number of the advisory lock that serialises attempts of this key: the first 8 bytes, big-endian and
// signed, of the SHA-256 of tenant, operation and value, each preceded by its length in bytes as a big-endian 64-bit
// number. Two keys with one number only delay each other; the unique key in PostgreSQL decides.
//
// The database computes the same number. Change both or neither: a service and a SQL caller that disagree would not see
// each other's running attempts.
//
//	h := sha256(int8send(octet_length(tenant)::bigint)    || convert_to(tenant, 'UTF8') ||
//	            int8send(octet_length(operation)::bigint) || convert_to(operation, 'UTF8') ||
//	            int8send(octet_length(key)::bigint)       || convert_to(key, 'UTF8'));
//	lock_id := ('x' || encode(substring(h FROM 1 FOR 8), 'hex'))::bit(64)::bigint;
func (k Key) LockID() int64 {
	// The array keeps the framed key on the stack: this runs once per request.
	var array [maxFramedKey]byte
	framed := array[:0]
	// Lengths, not a separator: "a:b" + "c" and "a" + "b:c" are two keys and must be two byte sequences.
	for _, part := range [...]string{k.tenant, k.operation, k.value} {
		framed = binary.BigEndian.AppendUint64(framed, uint64(len(part)))
		framed = append(framed, part...)
	}
	sum := sha256.Sum256(framed)
	return int64(binary.BigEndian.Uint64(sum[:8])) // signed, as bigint is
}
