package txn

import (
	"bytes"
	"encoding/json"
	"fmt"

	"github.com/pgonce/pgonce/idempotency"
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

// rawType is the type of a []byte result, which no codec touches.
const rawType = "bytes/1"

func encodeResult[T any](codec Codec, v T) (data []byte, resultType string, err error) {
	if raw, ok := any(v).([]byte); ok {
		// Never nil: a stored NULL means that the result was dropped. Copied, since the caller may go on writing into it.
		return append(make([]byte, 0, len(raw)), raw...), rawType, nil
	}
	data, err = codec.Encode(v)
	if err != nil {
		return nil, "", fmt.Errorf("txn: encode result of type %T: %w", v, err)
	}
	if data == nil {
		data = []byte{}
	}
	return data, codec.Name(), nil
}

// decodeResult gives the stored result of an operation that is done: an error is about the bytes, never a reason to run.
func decodeResult[T any](codec Codec, r idempotency.Record) (v T, err error) {
	if r.ResultType == "" {
		return v, nil // a failure without a body
	}
	fail := func(err error) (T, error) {
		var zero T
		return zero, &idempotency.ResultDecodeError{ResultType: r.ResultType, Result: bytes.Clone(r.Result), Err: err}
	}
	if raw, ok := any(&v).(*[]byte); ok {
		if r.ResultType != rawType {
			return fail(fmt.Errorf("was not stored as bytes"))
		}
		*raw = append(make([]byte, 0, len(r.Result)), r.Result...)
		return v, nil
	}
	if r.ResultType != codec.Name() {
		return fail(fmt.Errorf("this runner's codec is %s", codec.Name()))
	}
	if err := codec.Decode(r.Result, &v); err != nil {
		return fail(err)
	}
	return v, nil
}
