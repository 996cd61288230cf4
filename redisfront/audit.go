package redisfront

import (
	"context"
	"crypto/sha256"
	"encoding/base64"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/pgonce/pgonce/idempotency"
)

var _ idempotency.Auditable = (*Front)(nil)

// scanPage is how many names SCAN looks at in one step, and auditBatch how many are read in one round trip: entries may have
// 64 KiB each.
const (
	scanPage   = 500
	auditBatch = 100
)

// Scan goes through the entries of these operations, and through the marks beside them; not through marks on a Quorum.
func (f *Front) Scan(operations []string) idempotency.Scanner {
	s := &scanner{front: f, operations: map[string]bool{}, tags: map[string]bool{}}
	for _, operation := range operations {
		s.operations[operation] = true
		s.tags[operationTag(operation)] = true
	}
	return s
}

// scanner remembers where it is.
type scanner struct {
	front      *Front
	operations map[string]bool
	tags       map[string]bool // of the operations
	nodes      []redis.Cmdable // still to be gone through, the first one from cursor; none: it begins
	cursor     uint64
}

// Next returns what is under a page of names.
func (s *scanner) Next(ctx context.Context) (page []idempotency.Kept, done bool, err error) {
	if len(s.nodes) == 0 {
		if s.nodes, err = s.front.masters(ctx); err != nil {
			return nil, false, err
		}
	}
	var found []string
	err = s.front.guarded(ctx, "scan", func(ctx context.Context) (err error) {
		var next uint64
		if found, next, err = s.nodes[0].Scan(ctx, s.cursor, literally(s.front.config.Prefix)+"*", scanPage).Result(); err == nil {
			s.cursor = next
		}
		return err
	})
	if err != nil {
		s.nodes, s.cursor = nil, 0 // the node may be gone
		return nil, false, err
	}
	if s.cursor == 0 {
		s.nodes = s.nodes[1:]
	}
	found = slices.DeleteFunc(found, func(name string) bool {
		p, ok := s.front.parse(name)
		return !ok || !s.tags[p.operation]
	})
	all, err := s.front.inspect(ctx, found)
	page = slices.DeleteFunc(all, func(k idempotency.Kept) bool {
		// Two operations may have one tag, and Do's outcomes are not PostgreSQL's.
		return k.Name == "" || k.Epoch == cacheEpoch || !k.Mark && !k.Unreadable && !s.operations[k.Record.Key.Operation()]
	})
	return page, len(s.nodes) == 0, err
}

// masters are the servers that hold what the front keeps.
func (f *Front) masters(ctx context.Context) (nodes []redis.Cmdable, err error) {
	cluster, is := f.client.(*redis.ClusterClient)
	if !is {
		return []redis.Cmdable{f.client}, nil
	}
	found := make(chan redis.Cmdable, 1000) // as many as a cluster may have: they are visited at the same time
	if err := cluster.ForEachMaster(ctx, func(_ context.Context, node *redis.Client) error {
		found <- node
		return nil
	}); err != nil {
		return nil, failed("scan", err)
	}
	close(found)
	for node := range found {
		nodes = append(nodes, node)
	}
	if len(nodes) == 0 {
		return nil, &Error{Script: "scan", Code: CodeUnavailable, Err: errors.New("the cluster has no master")}
	}
	return nodes, nil
}

// guarded asks Redis one thing, if it is asked at all now.
func (f *Front) guarded(ctx context.Context, op string, do func(context.Context) error) error {
	done, err := f.breaker.pass()
	if err != nil {
		return &Error{Script: op, Code: CodeUnavailable, Err: err}
	}
	bounded, cancel := context.WithTimeout(ctx, f.config.Timeout)
	defer cancel()
	err = do(bounded)
	var known *Error
	if err != nil && !errors.As(err, &known) {
		err = failed(op, err)
	}
	switch {
	case ctx.Err() != nil:
		done(f.namesOf("probe"), errCallerGone)
		return errors.Join(context.Cause(ctx), err)
	case err != nil && redis.HasErrorPrefix(err, "NOPERM"):
		done(f.namesOf("probe"), nil) // who serves requests may do less
		return fmt.Errorf("%w: let this Redis user use SCAN, EVAL and EVALSHA, with the commands in docs/redis.md", err)
	}
	done(f.namesOf("probe"), err)
	return err
}

// literally makes a pattern that matches the text itself.
func literally(text string) string {
	return strings.NewReplacer(`\`, `\\`, `*`, `\*`, `?`, `\?`, `[`, `\[`, `]`, `\]`).Replace(text)
}

// parsed is what can be told from a name. The key cannot: it is hashed.
type parsed struct {
	base, operation string
	mark            bool
	lockID          int64
}

// parse is the reverse of namesOf. ok is false for what is neither an entry nor a mark.
func (f *Front) parse(name string) (p parsed, ok bool) {
	base, isEntry := strings.CutSuffix(name, ":entry")
	if !isEntry {
		if base, p.mark = strings.CutSuffix(name, ":mark"); !p.mark {
			return p, false
		}
	}
	p.base = base
	rest, ok := strings.CutPrefix(base, f.config.Prefix)
	if !ok {
		return p, false
	}
	operation, tag, ok := strings.Cut(rest, ":{")
	tag, closed := strings.CutSuffix(tag, "}")
	if !ok || !closed || len(operation) != 2*operationTagBytes || len(tag) != tagLength {
		return p, false
	}
	// The tag is a piece of the hash whose first 8 bytes are the number of the key's lock in PostgreSQL.
	hash, err := base64.RawURLEncoding.DecodeString(tag[:tagLength-tagLength%4])
	if err != nil {
		return p, false
	}
	p.operation, p.lockID = operation, int64(binary.BigEndian.Uint64(hash)) //nolint:gosec // signed, as bigint is
	return p, true
}

// operationTag stands for an operation in a name.
func operationTag(operation string) string {
	hash := sha256.Sum256([]byte(operation))
	return hex.EncodeToString(hash[:operationTagBytes])
}

// Inspect returns the entries of these keys.
func (f *Front) Inspect(ctx context.Context, keys []idempotency.Key) ([]idempotency.Kept, error) {
	entries := make([]string, len(keys))
	for i, key := range keys {
		entries[i] = f.names(key).entry
	}
	return f.inspect(ctx, entries)
}

// Reinspect looks again.
func (f *Front) Reinspect(ctx context.Context, kept []idempotency.Kept) ([]idempotency.Kept, error) {
	all := make([]string, len(kept))
	for i, k := range kept {
		all[i] = k.Name
	}
	return f.inspect(ctx, all)
}

func (f *Front) inspect(ctx context.Context, all []string) ([]idempotency.Kept, error) {
	commands := make([]command, len(all))
	for i, name := range all {
		commands[i] = command{script: scriptInspect, keys: []string{name}}
	}
	answers, err := f.auditAll(ctx, commands)
	if err != nil {
		return nil, err
	}
	kept := make([]idempotency.Kept, len(all))
	for i, a := range answers {
		kept[i] = f.kept(all[i], a.reply)
	}
	return kept, nil
}

// kept reads a reply of inspect.
func (f *Front) kept(name string, r reply) (k idempotency.Kept) {
	p, ok := f.parse(name)
	if r.code == CodeMiss || !ok || len(r.rest) < 2 {
		return k
	}
	left, _ := r.rest[0].(int64)
	k = idempotency.Kept{Name: name, Mark: p.mark, LockID: p.lockID, Life: time.Duration(left) * time.Millisecond}
	for i := 2; i <= len(r.rest); i++ {
		k.Content = append(k.Content, string(r.text(i)))
	}
	k.Foreign = p.mark != (r.code == CodeBusy) || !p.mark && r.code != CodeDone
	k.Unreadable = k.Foreign
	if !k.Mark && !k.Foreign {
		if k.Epoch = string(r.text(2)); k.Epoch != cacheEpoch {
			k.Unreadable = !f.readKept(&k, r.text(3), r.text(4))
		}
	}
	return k
}

// readKept reads an entry's record without knowing its key; false: it does not read.
func (f *Front) readKept(k *idempotency.Kept, fence, body []byte) bool {
	n := names{entry: k.Name}
	plain, err := f.open(n, body)
	if err != nil {
		return false
	}
	h, _, err := splitEntry(plain)
	if err != nil {
		return false
	}
	key, err := idempotency.NewKey(h.Tenant, h.Operation, h.Key)
	if err != nil || f.names(key).entry != k.Name || string(fence) != fenceText(h.Fence) {
		return false // a copy under another name
	}
	k.Record, k.Elsewhere, err = decodeEntry(key, plain)
	return err == nil
}

// Discard removes what was found.
func (f *Front) Discard(ctx context.Context, kept []idempotency.Kept) (removed int, err error) {
	commands := make([]command, len(kept))
	for i, k := range kept {
		p, ok := f.parse(k.Name)
		if !ok {
			return 0, fmt.Errorf("redisfront: %q is not a name of ours", k.Name)
		}
		channel := ""
		if p.mark {
			channel = p.base + ":gone"
		}
		args := []any{channel}
		for _, one := range k.Content {
			args = append(args, one)
		}
		commands[i] = command{script: scriptDiscard, keys: []string{k.Name}, args: args}
	}
	answers, err := f.auditAll(ctx, commands)
	for _, a := range answers {
		if a.err == nil && a.reply.code == CodeOK {
			removed++
		}
	}
	return removed, err
}

// auditAll runs scripts, many in one round trip, and returns the first failure.
func (f *Front) auditAll(ctx context.Context, commands []command) ([]answer, error) {
	answers := make([]answer, 0, len(commands))
	for batch := range slices.Chunk(commands, auditBatch) {
		err := f.guarded(ctx, batch[0].script.name, func(ctx context.Context) error {
			for _, a := range f.exchangeAll(ctx, batch) {
				if a.err != nil {
					return a.err
				}
				answers = append(answers, a)
			}
			return nil
		})
		if err != nil {
			return answers, err
		}
	}
	return answers, nil
}
