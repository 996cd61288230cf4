package main

import (
	"context"
	"crypto/rand"
	"errors"
	"strconv"
	"strings"

	"github.com/redis/go-redis/v9"
)

// neededCommands are those of docs/redis.md's user, each on a name that nobody else has.
var neededCommands = []struct {
	name string
	args func(key, channel string) []any
}{
	{"eval", func(key, _ string) []any { return []any{"return 1", 1, key} }},
	// Of a script that is not there: the answer NOSCRIPT is a yes.
	{"evalsha", func(key, _ string) []any { return []any{strings.Repeat("0", 40), 1, key} }},
	{"set", func(key, _ string) []any { return []any{key, "1", "PX", 1000} }},
	{"get", func(key, _ string) []any { return []any{key} }},
	{"exists", func(key, _ string) []any { return []any{key} }},
	{"pexpire", func(key, _ string) []any { return []any{key, 1000} }},
	{"pttl", func(key, _ string) []any { return []any{key} }},
	{"del", func(key, _ string) []any { return []any{key} }},
	{"hset", func(key, _ string) []any { return []any{key, "a", "1"} }},
	{"hmget", func(key, _ string) []any { return []any{key, "a"} }},
	{"publish", func(_, channel string) []any { return []any{channel, ""} }},
}

// minRedisMajor is the oldest version that is tested.
const minRedisMajor = 7

func (a *app) lookAtRedis(ctx context.Context, cache bool, f *findings) error {
	client, err := a.redisClient()
	if err != nil {
		return err
	}
	defer func() { _ = client.Close() }()
	const lost = "fronts only cost speed when they are away, PostgreSQL answers: mend the URL, the network or the user"
	if err := client.Ping(ctx).Err(); err != nil {
		f.bad("redis", lost, "does not answer: %s", redacted(err, a.redisURL()))
		return nil
	}
	f.ok("redis", "answers")
	a.lookAtCommands(ctx, client, f)
	info, err := redisInfo(ctx, client)
	if err != nil {
		f.note("redis server", "look with a user that may: redis-cli INFO", "this user may not see version, memory and persistence: %v", err)
		return nil
	}
	lookAtRedisServer(info, f)
	lookAtRedisMemory(info, cache, f)
	lookAtRedisPersistence(info, cache, f)
	return nil
}

// lookAtCommands asks for each command, so that all that are missing are told at once.
func (a *app) lookAtCommands(ctx context.Context, client redis.UniversalClient, f *findings) {
	base := a.redis.prefix + "doctor:{" + rand.Text()[:16] + "}"
	var missing []string
	refuse := func(name string, err error) {
		switch {
		case err == nil || errors.Is(err, redis.Nil) || strings.HasPrefix(err.Error(), "NOSCRIPT"):
		case strings.HasPrefix(err.Error(), "NOPERM"):
			missing = append(missing, name)
		case strings.HasPrefix(err.Error(), "READONLY"): // told by the role
		default:
			f.bad("redis command "+name, "see Redis' log", "%v", err)
		}
	}
	for _, command := range neededCommands {
		args := append([]any{command.name}, command.args(base, base+":gone")...)
		refuse(command.name, client.Do(ctx, args...).Err())
		if command.name == "hmget" {
			refuse("del", client.Del(ctx, base).Err())
		}
	}
	subscription := client.Subscribe(ctx, base+":gone")
	_, err := subscription.ReceiveTimeout(ctx, readTimeout)
	refuse("subscribe", err)
	_ = subscription.Close()
	if len(missing) == 0 {
		f.ok("redis access", "every command that a front needs, on names that begin with %s", a.redis.prefix)
		return
	}
	f.bad("redis access", "ACL SETUSER <service> ~"+a.redis.prefix+"* &"+a.redis.prefix+"* +eval +evalsha +hmget +hset +get +set +del +exists "+
		"+pexpire +pttl +publish +subscribe +unsubscribe +ping +hello", "not allowed, or not on these names: %s", strings.Join(missing, ", "))
}

func redisInfo(ctx context.Context, client redis.UniversalClient) (map[string]string, error) {
	text, err := client.Info(ctx, "server", "memory", "persistence", "replication").Result()
	if err != nil {
		return nil, err
	}
	info := map[string]string{}
	for line := range strings.Lines(text) {
		if name, value, ok := strings.Cut(strings.TrimSpace(line), ":"); ok {
			info[name] = value
		}
	}
	return info, nil
}

func lookAtRedisServer(info map[string]string, f *findings) {
	version := info["redis_version"]
	major, _, _ := strings.Cut(version, ".")
	if n, err := strconv.Atoi(major); err != nil || n < minRedisMajor {
		f.warn("redis version", "upgrade Redis", "%s, pgonce is tested with %d and newer", version, minRedisMajor)
	} else {
		f.ok("redis version", "%s", version)
	}
	if info["role"] == "slave" {
		f.bad("redis role", "connect to the master, by its sentinels (?master_name=) or as a cluster", "a replica: nothing can be written")
	} else {
		f.ok("redis role", "%s", info["role"])
	}
}

func lookAtRedisMemory(info map[string]string, cache bool, f *findings) {
	policy := info["maxmemory_policy"]
	limit, _ := strconv.ParseInt(info["maxmemory"], 10, 64)
	used, _ := strconv.ParseInt(info["used_memory"], 10, 64)
	full := limit > 0 && used > limit/10*9
	switch {
	case policy != "noeviction" && cache:
		f.bad("redis eviction", "CONFIG SET maxmemory-policy noeviction", "%s: an evicted outcome of redisfront.Do is a second run", policy)
	case policy != "noeviction":
		f.note("redis eviction", "CONFIG SET maxmemory-policy noeviction, if redisfront.Do uses this Redis", "%s: fronts only lose speed by it", policy)
	case full:
		f.warn("redis eviction", "CONFIG SET maxmemory higher; or volatile-ttl as the policy, where redisfront.Do is not used",
			"noeviction, and %d of %d bytes are used: when it is full every write is refused and fronts do not ask Redis any more", used, limit)
	default:
		f.ok("redis eviction", "%s", policy)
	}
	if limit == 0 {
		f.warn("redis memory", "CONFIG SET maxmemory <three quarters of the machine's>", "no limit: the kernel ends Redis when the machine's memory is full")
	} else {
		f.ok("redis memory", "%d of %d bytes are used", used, limit)
	}
}

func lookAtRedisPersistence(info map[string]string, cache bool, f *findings) {
	appended, saved := info["aof_enabled"] == "1", info["rdb_last_bgsave_status"]
	switch {
	case saved == "err" || appended && info["aof_last_write_status"] == "err":
		f.bad("redis persistence", "free the disk and see Redis' log: with stop-writes-on-bgsave-error Redis refuses every write", "the last save failed")
	case !appended && cache:
		f.warn("redis persistence", "CONFIG SET appendonly yes", "no append-only file: what a crash forgets, redisfront.Do runs again")
	case !appended:
		f.note("redis persistence", "", "no append-only file: after a restart fronts begin empty, which costs speed only")
	default:
		f.ok("redis persistence", "append-only file")
	}
}
