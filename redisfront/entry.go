package redisfront

import (
	"crypto/subtle"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"time"

	"github.com/pgonce/pgonce/idempotency"
)

// An entry's body is a version byte, the length of the header, the header as JSON, and the result as it is: people can
// read it with redis-cli, and the result costs no encoding. Whatever does not match exactly is a miss.
const (
	entryVersion = 1
	// A sealed one is this byte and what the sealer made of the other.
	sealedVersion = 2
)

// header is a record without its result. Times are microseconds since 1970, as PostgreSQL has them.
type header struct {
	Tenant       string `json:"tenant"`
	Operation    string `json:"operation"`
	Key          string `json:"key"`
	State        string `json:"state"`
	Fence        int64  `json:"fence"`
	Generation   int64  `json:"generation"`
	Attempt      int    `json:"attempt"`
	Fingerprint  []byte `json:"fingerprint"`
	AttemptToken []byte `json:"attempt_token"`
	Takeover     string `json:"takeover,omitempty"`
	Executor     string `json:"executor,omitempty"`
	Client       string `json:"client,omitempty"`
	TraceID      string `json:"trace_id,omitempty"`
	CreatedAt    int64  `json:"created_at"`
	AcquiredAt   int64  `json:"acquired_at"`
	CompletedAt  int64  `json:"completed_at"`
	ResultUntil  int64  `json:"result_expires_at,omitempty"`
	Until        int64  `json:"expires_at,omitempty"`
	ErrorCode    string `json:"error_code,omitempty"`
	ErrorMessage string `json:"error_message,omitempty"`
	ResultType   string `json:"result_type"`
	HasResult    bool   `json:"has_result"`
	// Elsewhere: the result is too large for Redis. The key is done; the answer is in PostgreSQL.
	Elsewhere bool `json:"elsewhere,omitempty"`
}

// encode makes an entry's body; it shares no bytes with the record. limit is the largest result that goes into it; -1: none.
func (f *Front) encode(r *idempotency.Record, n names, limit int) ([]byte, error) {
	body, err := encodeEntry(r, limit)
	if err != nil || f.config.Sealer == nil {
		return body, err
	}
	sealed, err := f.config.Sealer.Seal(body, []byte(n.entry))
	if err != nil {
		return nil, fmt.Errorf("redisfront: seal entry: %w", err)
	}
	return append([]byte{sealedVersion}, sealed...), nil
}

func (f *Front) decode(key idempotency.Key, n names, body []byte) (idempotency.Record, bool, error) {
	plain, err := f.open(n, body)
	if err != nil {
		return idempotency.Record{}, false, err
	}
	return decodeEntry(key, plain)
}

// open returns what the sealer sealed.
func (f *Front) open(n names, body []byte) ([]byte, error) {
	if f.config.Sealer == nil {
		return body, nil
	}
	if len(body) == 0 || body[0] != sealedVersion {
		return nil, fmt.Errorf("%w: it is not sealed", errEntry)
	}
	plain, err := f.config.Sealer.Open(body[1:], []byte(n.entry))
	if err != nil {
		return nil, fmt.Errorf("%w: %w", errEntry, err)
	}
	return plain, nil
}

func encodeEntry(r *idempotency.Record, limit int) ([]byte, error) {
	h := header{
		Tenant: r.Key.Tenant(), Operation: r.Key.Operation(), Key: r.Key.Value(), State: string(r.State), Fence: r.Fence,
		Generation: r.Generation, Attempt: r.Attempt, Fingerprint: r.Fingerprint.Bytes(), AttemptToken: r.AttemptToken[:],
		Takeover: string(r.Takeover), Executor: r.Executor, Client: r.Client, TraceID: r.TraceID, CreatedAt: micro(r.CreatedAt),
		AcquiredAt: micro(r.AcquiredAt), CompletedAt: micro(r.CompletedAt), ResultUntil: micro(r.ResultExpiresAt),
		Until: micro(r.ExpiresAt), ErrorCode: r.ErrorCode, ErrorMessage: r.ErrorMessage, ResultType: r.ResultType,
		HasResult: r.Result != nil,
	}
	result := r.Result
	if limit >= 0 && len(result) > limit {
		h.Elsewhere, result = true, nil
	}
	head, err := json.Marshal(h)
	if err != nil {
		return nil, fmt.Errorf("redisfront: encode entry: %w", err)
	}
	body := make([]byte, 0, 1+4+len(head)+len(result))
	body = append(body, entryVersion)
	body = binary.BigEndian.AppendUint32(body, uint32(len(head))) //nolint:gosec // a record's columns are bounded
	body = append(body, head...)
	return append(body, result...), nil
}

var errEntry = errors.New("entry does not read")

// splitEntry returns an entry's header and its result.
func splitEntry(body []byte) (h header, result []byte, err error) {
	if len(body) < 5 || body[0] != entryVersion {
		return h, nil, errEntry
	}
	size, rest := binary.BigEndian.Uint32(body[1:5]), body[5:]
	if uint64(size) > uint64(len(rest)) {
		return h, nil, errEntry
	}
	if err := json.Unmarshal(rest[:size], &h); err != nil {
		return h, nil, fmt.Errorf("%w: %w", errEntry, err)
	}
	return h, rest[size:], nil
}

// decodeEntry returns the record of an entry. elsewhere: it is final, and its result must be read from PostgreSQL.
func decodeEntry(key idempotency.Key, body []byte) (r idempotency.Record, elsewhere bool, err error) {
	h, result, err := splitEntry(body)
	if err != nil {
		return r, false, err
	}
	if h.Tenant != key.Tenant() || h.Operation != key.Operation() || h.Key != key.Value() {
		return r, false, fmt.Errorf("%w: it is another key's", errEntry)
	}
	fingerprint, err := idempotency.ParseFingerprint(h.Fingerprint)
	if err != nil || len(h.AttemptToken) != len(r.AttemptToken) {
		return r, false, errors.Join(errEntry, err)
	}
	r = idempotency.Record{
		Key: key, State: idempotency.State(h.State), Fence: h.Fence, Generation: h.Generation, Attempt: h.Attempt,
		Fingerprint: fingerprint, Takeover: idempotency.Takeover(h.Takeover), Executor: h.Executor, Client: h.Client,
		TraceID: h.TraceID, CreatedAt: instant(h.CreatedAt), AcquiredAt: instant(h.AcquiredAt),
		CompletedAt: instant(h.CompletedAt), ResultExpiresAt: instant(h.ResultUntil), ExpiresAt: instant(h.Until),
		ErrorCode: h.ErrorCode, ErrorMessage: h.ErrorMessage, ResultType: h.ResultType,
	}
	copy(r.AttemptToken[:], h.AttemptToken)
	if h.HasResult && !h.Elsewhere {
		r.Result = append(make([]byte, 0, len(result)), result...)
	}
	return r, h.Elsewhere, nil
}

func micro(t time.Time) int64 {
	if t.IsZero() {
		return 0
	}
	return t.UnixMicro()
}

func instant(us int64) time.Time {
	if us == 0 {
		return time.Time{}
	}
	return time.UnixMicro(us).UTC()
}

// holder is a mark's value: who runs, and with which payload.
func holder(attempt idempotency.AttemptToken, fp idempotency.Fingerprint) []byte {
	return append(append(make([]byte, 0, 64), attempt[:]...), fp.Bytes()...)
}

// samePayload reports whether a mark's holder runs the same payload. What cannot be read is no proof of the contrary.
func samePayload(held []byte, fp idempotency.Fingerprint) bool {
	const token = len(idempotency.AttemptToken{})
	if len(held) <= token {
		return true
	}
	other, err := idempotency.ParseFingerprint(held[token:])
	return err != nil || !other.Known() || fp.Matches(other) || subtle.ConstantTimeCompare(held[token:], fp.Bytes()) == 1
}
