package idempotencyhttp

import (
	"crypto/sha256"
	"encoding/base64"
	"fmt"
	"net/http"
	"time"

	"github.com/pgonce/pgonce/idempotency"
	"github.com/pgonce/pgonce/txn"
)

// maxDerived is the longest time in which equal requests may count as one because nobody said that they are two.
const maxDerived = 24 * time.Hour

// derivedOperation is that of Config.Derived.
func derivedOperation(runner *txn.Runner, name string) (*idempotency.Operation, error) {
	if name == "" {
		return nil, nil //nolint:nilnil // keys are not derived
	}
	op, declared := runner.Operation(name)
	switch {
	case !declared:
		return nil, &idempotency.ConfigError{Field: "Config.Derived", Rule: fmt.Sprintf("must be declared in txn.Config.Operations, %q is not", name)}
	case op.Retention == idempotency.Forever || op.Retention > maxDerived:
		return nil, &idempotency.ConfigError{
			Field: "Config.Derived",
			Rule:  fmt.Sprintf("must have a Retention of at most %v: for so long equal requests are one, %s has %v", maxDerived, name, op.Retention),
		}
	case op.RequireIssued:
		return nil, &idempotency.ConfigError{Field: "Config.Derived", Rule: "must not require issued tokens: a derived key is none"}
	}
	return &op, nil
}

// readDerived reads a request without the header. route is the operation it would have had.
func (m *Middleware) readDerived(w http.ResponseWriter, r *http.Request, route idempotency.Operation) (*protected, error) {
	p := &protected{}
	if route.RequireIssued {
		_, err := KeyValue(r.Header, m.config.Strict)
		return p, err
	}
	tenant, err := m.tenantOf(r, *m.derived)
	if err != nil {
		return p, err
	}
	if err := m.readRequest(w, r, p); err != nil {
		return p, err
	}
	// The route's operation has no part in the fingerprint, and its name no NUL.
	sum := sha256.Sum256(append([]byte(route.Name+"\x00"), p.req.Fingerprint.Bytes()...))
	p.req.Key, err = m.derived.Key(tenant, "derived-"+base64.RawURLEncoding.EncodeToString(sum[:]))
	return p, err
}
