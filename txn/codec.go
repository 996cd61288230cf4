package txn

import (
	"bytes"
	"encoding/json"
	"fmt"
	"time"

	"github.com/pgonce/pgonce/idempotency"
	"github.com/pgonce/pgonce/internal/results"
)

// Codec turns a result into bytes and back. Its name is stored with every result: change it when the bytes change.
type Codec interface {
	// Name names codec and version, for example "json/1".
	Name() string
	Encode(v any) ([]byte, error)
	// Decode decodes into the pointer v. It must not keep data.
	Decode(data []byte, v any) error
}

// JSON is the default codec, encoding/json.
type JSON struct{}

var _ Codec = JSON{}

// Name returns "json/1".
func (JSON) Name() string { return "json/1" }

// Encode marshals v.
func (JSON) Encode(v any) ([]byte, error) { return json.Marshal(v) }

// Decode unmarshals into v.
func (JSON) Decode(data []byte, v any) error { return json.Unmarshal(data, v) }

// decodeResult gives the stored result of an operation that is done: an error is about the bytes, never a reason to run.
func decodeResult[T any](codec Codec, r idempotency.Record) (v T, err error) {
	if r.ResultType == "" || r.Result == nil && r.State == idempotency.StateFailed {
		return v, nil // a failure without a body, or whose body was dropped
	}
	if r.Result == nil {
		// A lost COMMIT of a result over the limit: recorded without it.
		return v, fmt.Errorf("%w: completed at %s", idempotency.ErrResultExpired, r.CompletedAt.Format(time.RFC3339))
	}
	if v, err = results.Decode[T](codec, r.ResultType, r.Result); err != nil {
		err = &idempotency.ResultDecodeError{ResultType: r.ResultType, Result: bytes.Clone(r.Result), Err: err}
	}
	return v, err
}
