// Package results turns results into the bytes that are recorded, and back: the same for every package that records any.
package results

import (
	"encoding/json"
	"errors"
	"fmt"
	"reflect"
)

// The types of results that no codec touches: []byte and json.RawMessage.
const (
	RawType     = "bytes/1"
	RawJSONType = "json-raw/1"
)

// Codec is that of package txn.
type Codec interface {
	Name() string
	Encode(v any) ([]byte, error)
	Decode(data []byte, v any) error
}

// JSON is encoding/json.
type JSON struct{}

// Name names codec and version.
func (JSON) Name() string { return "json/1" }

// Encode marshals v.
func (JSON) Encode(v any) ([]byte, error) { return json.Marshal(v) }

// Decode unmarshals into v.
func (JSON) Decode(data []byte, v any) error { return json.Unmarshal(data, v) }

// Formed is a result that brings its own form, whatever codec the runner has: the response of an edge. *T implements it, for
// the result T. Over the limit it is dropped, as with Operation.Tombstone: what was answered was answered whole.
type Formed interface {
	EncodeResult() (data []byte, resultType string, err error)
	DecodeResult(resultType string, data []byte) error
}

// Droppable reports whether a result over the limit leaves a record without it, instead of an error.
func Droppable[T any]() bool {
	_, formed := any(new(T)).(Formed)
	return formed
}

// Storable refuses types that no replay could have.
func Storable[T any]() error {
	if t := reflect.TypeFor[T](); t.Kind() == reflect.Interface && t.NumMethod() > 0 {
		return fmt.Errorf("a replay cannot be decoded into an interface (%v): return a concrete type", t)
	}
	return nil
}

// Encode returns the bytes of a result and what names their form.
func Encode[T any](codec Codec, v T) (data []byte, resultType string, err error) {
	// By the static type, as Decode must: it has no value to look at.
	switch p := any(&v).(type) {
	case *[]byte:
		return Clone(*p), RawType, nil
	case *json.RawMessage:
		return Clone(*p), RawJSONType, nil // encoding/json would respell it, and the replay be another text
	case Formed:
		return p.EncodeResult()
	}
	if err := Storable[T](); err != nil {
		return nil, "", fmt.Errorf("encode result: %w", err)
	}
	if data, err = codec.Encode(v); err != nil {
		return nil, "", fmt.Errorf("encode result of type %T: %w", v, err)
	}
	if data == nil {
		data = []byte{}
	}
	return data, codec.Name(), nil
}

// Decode gives back what Encode was given. Its errors are about the bytes, or what kind of bytes they are.
func Decode[T any](codec Codec, resultType string, data []byte) (v T, err error) {
	switch raw := any(&v).(type) {
	case *[]byte:
		if resultType != RawType {
			return v, errors.New("was not stored as bytes")
		}
		*raw = Clone(data)
		return v, nil
	case *json.RawMessage:
		if resultType != RawJSONType && resultType != (JSON{}).Name() {
			return v, errors.New("was not stored as JSON")
		}
		*raw = Clone(data)
		return v, nil
	case Formed:
		err := raw.DecodeResult(resultType, data)
		return v, err
	}
	switch resultType {
	case codec.Name():
	case RawJSONType, JSON{}.Name():
		codec = JSON{} // also for a caller that has another codec now: what an older release wrote stays readable
	default:
		return v, fmt.Errorf("was stored by another codec than %s", codec.Name())
	}
	if err := codec.Decode(data, &v); err != nil {
		var zero T
		return zero, err
	}
	return v, nil
}

// Clone copies, since the caller may go on writing into its bytes. Never nil: a stored NULL means that the result was
// dropped.
func Clone(b []byte) []byte { return append(make([]byte, 0, len(b)), b...) }
