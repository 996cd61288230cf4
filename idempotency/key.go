package idempotency

import (
	"fmt"
	"log/slog"
)

// Key names one thing that must happen once: a client's value, for one operation, of one tenant. Equal values of two
// tenants or of two operations are two keys that never see each other. A Key is comparable and may be a map's key; two
// keys are equal when all three parts are equal byte for byte.
//
// The zero Key is no key; see IsZero. Every other Key has passed NewKey's rules.
type Key struct {
	tenant, operation, value string
}

// NewKey returns the key, or an *InvalidError whose Field is "tenant", "operation" or "key". Each part must be valid
// UTF-8 without control characters (C0, DEL, C1), neither empty nor blank (only white space), and at most MaxTenantBytes,
// MaxOperationBytes and MaxKeyBytes long. Nothing is trimmed, folded or normalised: " k" and "k" are two keys.
func NewKey(tenant, operation, value string) (Key, error) {
	if err := validateTenant(tenant); err != nil {
		return Key{}, err
	}
	if err := validateOperation(operation); err != nil {
		return Key{}, err
	}
	if err := validateKeyValue(value); err != nil {
		return Key{}, err
	}
	return Key{tenant: tenant, operation: operation, value: value}, nil
}

// Tenant returns whose key it is.
func (k Key) Tenant() string { return k.tenant }

// Operation returns what the key is for.
func (k Key) Operation() string { return k.operation }

// Value returns the client's value. Keep it out of logs and metrics: whoever knows it can ask for the stored answer.
func (k Key) Value() string { return k.value }

// IsZero reports whether k is no key.
func (k Key) IsZero() bool { return k == Key{} }

// String returns the operation and a short hash, for example "order.create#0f3c5a71be90d244", and never the value. The
// hash is the lock id in hexadecimal, so that a log line leads to the record and to the lock:
//
//	WHERE idempotency.lock_id(tenant, operation, key) = x'0f3c5a71be90d244'::bigint
func (k Key) String() string {
	if k.IsZero() {
		return "(no key)"
	}
	return fmt.Sprintf("%s#%016x", k.operation, uint64(k.LockID()))
}

// GoString is String: %#v would print the value otherwise.
func (k Key) GoString() string { return k.String() }

// LogValue is String as a slog value.
func (k Key) LogValue() slog.Value { return slog.StringValue(k.String()) }
