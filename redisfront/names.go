package redisfront

import (
	"crypto/sha256"
	"encoding/base64"
	"encoding/binary"

	"github.com/pgonce/pgonce/idempotency"
)

// names are what Redis knows one key by. This is the only place where they are made.
type names struct {
	base, entry, mark, channel string
}

// state is where a Machine's state is kept that lives in Redis alone.
func (n names) state() string { return n.base + ":state" }

// mirror is where a Machine's state is kept that PostgreSQL has.
func (n names) mirror() string { return n.base + ":mirror" }

// moved is where the reply to one transition is kept, in the slot of its state.
func (n names) moved(id string) string {
	hash := sha256.Sum256([]byte(id))
	return n.base + ":moved:" + base64.RawURLEncoding.EncodeToString(hash[:])[:22]
}

// names hashes every part that comes from outside: braces in a key would choose its slot, and a value would be readable by
// whoever may list keys. The operation stands alone at the front, so that one operation's keys can be counted. There is no
// time in a name: two duplicates would take two marks.
func (f *Front) names(key idempotency.Key) names {
	return f.namesOf(key.Tenant(), key.Operation(), key.Value())
}

const (
	// 132 bits: keys that met would only miss, since an entry carries its whole identity. They are of the hash whose first 64
	// bits are Key.LockID: the audit finds the lock of a mark by it.
	tagLength         = 22
	operationTagBytes = 4
)

// namesOf makes the names of tenant, operation and value, or of something else that has as many parts as it likes.
func (f *Front) namesOf(parts ...string) names {
	hash := sha256.New()
	for _, part := range parts {
		hash.Write(binary.BigEndian.AppendUint64(nil, uint64(len(part))))
		hash.Write([]byte(part))
	}
	tag := base64.RawURLEncoding.EncodeToString(hash.Sum(nil))[:tagLength]
	base := f.config.Prefix + operationTag(parts[min(1, len(parts)-1)]) + ":{" + tag + "}"
	return names{base: base, entry: base + ":entry", mark: base + ":mark", channel: base + ":gone"}
}
