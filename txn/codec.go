package txn

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"reflect"
	"time"

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

// The types of results that no codec touches: []byte and json.RawMessage.
const (
	rawType     = "bytes/1"
	rawJSONType = "json-raw/1"
)

// cloneBytes copies, since the caller may go on writing into its bytes. Never nil: a stored NULL means that the result
// was dropped.
func cloneBytes(b []byte) []byte { return append(make([]byte, 0, len(b)), b...) }

func encodeResult[T any](codec Codec, v T) (data []byte, resultType string, err error) {
	// By the static type, as decodeResult must: it has no value to look at.
	switch p := any(&v).(type) {
	case *[]byte:
		return cloneBytes(*p), rawType, nil
	case *json.RawMessage:
		return cloneBytes(*p), rawJSONType, nil // encoding/json would respell it, and the replay be another text
	}
	if t := reflect.TypeFor[T](); t.Kind() == reflect.Interface && t.NumMethod() > 0 {
		return nil, "", fmt.Errorf("txn: encode result of type %v: a replay cannot be decoded into an interface, return a concrete type", t)
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
	if r.ResultType == "" || r.Result == nil && r.State == idempotency.StateFailed {
		return v, nil // a failure without a body, or whose body was dropped
	}
	if r.Result == nil {
		// A lost COMMIT of a result over the limit: recorded without it.
		return v, fmt.Errorf("%w: completed at %s", idempotency.ErrResultExpired, r.CompletedAt.Format(time.RFC3339))
	}
	fail := func(err error) (T, error) {
		var zero T
		return zero, &idempotency.ResultDecodeError{ResultType: r.ResultType, Result: bytes.Clone(r.Result), Err: err}
	}
	switch raw := any(&v).(type) {
	case *[]byte:
		if r.ResultType != rawType {
			return fail(errors.New("was not stored as bytes"))
		}
		*raw = cloneBytes(r.Result)
		return v, nil
	case *json.RawMessage:
		if r.ResultType != rawJSONType && r.ResultType != (JSON{}).Name() {
			return fail(errors.New("was not stored as JSON"))
		}
		*raw = cloneBytes(r.Result)
		return v, nil
	}
	switch r.ResultType {
	case codec.Name():
	case rawJSONType, JSON{}.Name():
		codec = JSON{} // also of a runner that has another codec now: what an older release wrote stays readable
	default:
		return fail(fmt.Errorf("this runner's codec is %s", codec.Name()))
	}
	if err := codec.Decode(r.Result, &v); err != nil {
		return fail(err)
	}
	return v, nil
}
