package redisfront

import (
	"encoding/json"
	"errors"
	"fmt"
	"reflect"

	"github.com/pgonce/pgonce/idempotency"
)

// The types of results, named as in package txn: JSON, and what is stored as it is.
const (
	jsonType    = "json/1"
	rawType     = "bytes/1"
	rawJSONType = "json-raw/1"
)

// encodable refuses types that no replay could have. It is asked before the function runs: afterwards it is too late.
func encodable[T any]() error {
	if t := reflect.TypeFor[T](); t.Kind() == reflect.Interface && t.NumMethod() > 0 {
		return &idempotency.ConfigError{Field: "redisfront.Do", Rule: fmt.Sprintf("must return a concrete type, a replay cannot be decoded into a %v", t)}
	}
	return nil
}

// encodeResult goes by the static type, as decodeResult must: it has no value to look at.
func encodeResult[T any](v T) (data []byte, resultType string, err error) {
	switch p := any(&v).(type) {
	case *[]byte:
		return cloneBytes(*p), rawType, nil
	case *json.RawMessage:
		return cloneBytes(*p), rawJSONType, nil
	}
	if data, err = json.Marshal(v); err != nil {
		return nil, jsonType, fmt.Errorf("redisfront: encode result of type %T: %w", v, err)
	}
	return data, jsonType, nil
}

// decodeResult gives the stored result of an operation that is done: an error is about the bytes, never a reason to run.
func decodeResult[T any](r idempotency.Record) (v T, err error) {
	switch raw := any(&v).(type) {
	case *[]byte:
		if r.ResultType == rawType {
			*raw = cloneBytes(r.Result)
			return v, nil
		}
		err = errors.New("was not stored as bytes")
	case *json.RawMessage:
		if r.ResultType == rawJSONType || r.ResultType == jsonType {
			*raw = cloneBytes(r.Result)
			return v, nil
		}
		err = errors.New("was not stored as JSON")
	default:
		if r.ResultType == rawType {
			err = errors.New("was stored as bytes")
		} else if err = json.Unmarshal(r.Result, &v); err == nil {
			return v, nil
		}
	}
	var zero T
	return zero, &idempotency.ResultDecodeError{ResultType: r.ResultType, Result: cloneBytes(r.Result), Err: err}
}

// cloneBytes copies, since the caller may go on writing into its bytes. Never nil: that means that the result is gone.
func cloneBytes(b []byte) []byte { return append(make([]byte, 0, len(b)), b...) }
