package redisfront

import (
	"crypto/aes"
	"crypto/cipher"
	"crypto/rand"
	"errors"
	"fmt"

	"github.com/pgonce/pgonce/idempotency"
)

// Sealer encrypts entries. about is what the entry belongs to: what was sealed about one thing must not open about another.
// It is safe for concurrent use.
type Sealer interface {
	Seal(plain, about []byte) ([]byte, error)
	Open(sealed, about []byte) ([]byte, error)
}

// AESGCM is a Sealer with keys that can be changed: a sealed entry names its key.
type AESGCM struct {
	current byte
	keys    map[byte]cipher.AEAD
}

var _ Sealer = (*AESGCM)(nil)

// NewAESGCM returns a sealer that seals with the current one of the keys and opens with any of them. A key has 16, 24 or 32
// bytes. To change the key, add the new one everywhere, then make it current, and take the old one away when the longest
// retention is over.
func NewAESGCM(current byte, keys map[byte][]byte) (*AESGCM, error) {
	s := &AESGCM{current: current, keys: make(map[byte]cipher.AEAD, len(keys))}
	for id, key := range keys {
		block, err := aes.NewCipher(key)
		if err != nil {
			return nil, &idempotency.ConfigError{Field: fmt.Sprintf("redisfront: key %d", id), Rule: "must have 16, 24 or 32 bytes"}
		}
		if s.keys[id], err = cipher.NewGCM(block); err != nil {
			return nil, fmt.Errorf("redisfront: key %d: %w", id, err)
		}
	}
	if s.keys[current] == nil {
		return nil, &idempotency.ConfigError{Field: "redisfront: current key", Rule: fmt.Sprintf("must be one of the keys, is %d", current)}
	}
	return s, nil
}

// Seal returns the key's number, the nonce and the ciphertext. Nonces are random: NIST SP 800-38D allows 2^32 of them for
// one key.
func (s *AESGCM) Seal(plain, about []byte) ([]byte, error) {
	key := s.keys[s.current]
	sealed := make([]byte, 1+key.NonceSize(), 1+key.NonceSize()+len(plain)+key.Overhead())
	sealed[0] = s.current
	_, _ = rand.Read(sealed[1:]) // never fails
	return key.Seal(sealed, sealed[1:], plain, about), nil
}

// Open is the reverse.
func (s *AESGCM) Open(sealed, about []byte) ([]byte, error) {
	if len(sealed) == 0 {
		return nil, errors.New("nothing is sealed")
	}
	key := s.keys[sealed[0]]
	if key == nil {
		return nil, fmt.Errorf("sealed with key %d, which is not here", sealed[0])
	}
	if len(sealed) < 1+key.NonceSize() {
		return nil, errors.New("sealed text is cut off")
	}
	return key.Open(nil, sealed[1:1+key.NonceSize()], sealed[1+key.NonceSize():], about)
}
