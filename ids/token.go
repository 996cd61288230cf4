package ids

import (
	"crypto/hmac"
	"crypto/rand"
	"crypto/sha256"
	"encoding/base64"
	"encoding/binary"
	"fmt"
	"regexp"
	"strings"
	"time"

	"github.com/pgonce/pgonce/idempotency"
)

// MinSecretBytes is the length of the shortest secret for signatures.
const MinSecretBytes = 32

// TokenKey is a secret for signatures. All processes that make or take tokens have the same ones.
type TokenKey struct {
	// ID names the secret in each token: 1 to 32 letters, digits, - and _. Never use an ID again with another secret.
	ID string
	// Secret is at least 32 random bytes.
	Secret []byte
}

// TokensConfig configures Tokens. A zero field means its default.
type TokensConfig struct {
	// Keys sign tokens with HMAC-SHA256: the first one signs, all are accepted. A token that none of them has signed is refused
	// without asking PostgreSQL. To change the secret, give the new one to all processes as the second; then make it the first;
	// then, Operation.TokenLife and the longest Retention later, take the old one away: replays present their token too.
	// Default: none, tokens have no signature.
	Keys []TokenKey
}

// Tokens makes and checks the values of issued tokens; give it to idempotency.Operation, and issue with txn.Issue. It is safe
// for concurrent use.
//
// A value is 26 characters of Crockford's base 32: 48 bits of Unix milliseconds, by which tokens sort in the order of time,
// and 80 random bits. With a signature, a dot, its key's ID, a dot and 43 characters of base64url follow. Signed are the
// key's ID, tenant, operation and those 26 characters.
type Tokens struct {
	keys []TokenKey
}

var _ idempotency.Tokens = (*Tokens)(nil)

var (
	keyID     = regexp.MustCompile(`^[A-Za-z0-9_-]{1,32}$`)
	tokenBody = regexp.MustCompile(`^[0-9A-HJKMNP-TV-Z]{26}$`)
)

// NewTokens returns Tokens. The error is an *idempotency.ConfigError that never shows a secret.
func NewTokens(cfg *TokensConfig) (*Tokens, error) {
	t := &Tokens{}
	if cfg == nil {
		return t, nil
	}
	seen := map[string]bool{}
	for i, key := range cfg.Keys {
		field := fmt.Sprintf("TokensConfig.Keys[%d].", i)
		switch {
		case !keyID.MatchString(key.ID):
			return nil, invalid(field+"ID", "must be 1 to 32 letters, digits, - or _")
		case seen[key.ID]:
			return nil, invalid(field+"ID", fmt.Sprintf("must be there once, %q is there twice", key.ID))
		case len(key.Secret) < MinSecretBytes:
			return nil, invalid(field+"Secret", fmt.Sprintf("must be at least %d bytes, is %d", MinSecretBytes, len(key.Secret)))
		}
		seen[key.ID] = true
		t.keys = append(t.keys, TokenKey{ID: key.ID, Secret: append([]byte(nil), key.Secret...)})
	}
	return t, nil
}

// Make returns a new value for the tenant and the operation.
func (t *Tokens) Make(tenant, operation string) string {
	var raw [16]byte
	// The time is for the order of keys in an index, and decides nothing.
	binary.BigEndian.PutUint64(raw[:8], uint64(time.Now().UnixMilli())<<16) //nolint:gosec // after 1970
	_, _ = rand.Read(raw[6:])
	body := crockford.EncodeToString(raw[:])
	if len(t.keys) == 0 {
		return body
	}
	return sign(t.keys[0], tenant, operation, body)
}

// Verify refuses what Make cannot have returned for the tenant and the operation: with keys, everything that none of them has
// signed for them; without, what has another form. The error is a *TokenError, and ErrNotIssued. Whether a token was used, or
// its time is over, PostgreSQL knows.
func (t *Tokens) Verify(tenant, operation, value string) error {
	body, signature, signed := strings.Cut(value, ".")
	if !tokenBody.MatchString(body) {
		return &TokenError{Why: "it has not the form of a token"}
	}
	if len(t.keys) == 0 {
		if signed {
			return &TokenError{Why: "it is signed, and this program has no keys"}
		}
		return nil
	}
	id, _, _ := strings.Cut(signature, ".")
	for _, key := range t.keys {
		if key.ID != id {
			continue
		}
		// The whole text, not the decoded bytes: one token has one spelling.
		if !hmac.Equal([]byte(value), []byte(sign(key, tenant, operation, body))) {
			return &TokenError{Why: "its signature does not fit: it is forged, or was issued for another tenant or operation"}
		}
		return nil
	}
	if !signed {
		return &TokenError{Why: "it is not signed"}
	}
	return &TokenError{Why: "it is signed with a key that this program does not have"}
}

// sign returns the whole value.
func sign(key TokenKey, tenant, operation, body string) string {
	mac := hmac.New(sha256.New, key.Secret)
	// Lengths, not a separator; and a name, so that a signature of something else with the same secret is none of a token.
	for _, part := range [...]string{"pgonce token", key.ID, tenant, operation, body} {
		mac.Write(binary.BigEndian.AppendUint64(nil, uint64(len(part))))
		mac.Write([]byte(part))
	}
	return body + "." + key.ID + "." + base64.RawURLEncoding.EncodeToString(mac.Sum(nil))
}

// TokenError says why a value is no token. It unwraps to idempotency.ErrNotIssued. The value is not in it.
type TokenError struct{ Why string }

func (e *TokenError) Error() string { return fmt.Sprintf("%v (%s)", idempotency.ErrNotIssued, e.Why) }

// Unwrap returns idempotency.ErrNotIssued.
func (e *TokenError) Unwrap() error { return idempotency.ErrNotIssued }
