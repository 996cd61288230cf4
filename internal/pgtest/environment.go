package pgtest

import (
	"context"
	"fmt"
	"maps"
	"net/url"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgonce/pgonce/internal/devstack"
)

// EnvironmentVariable describes the environment in which a test binary runs its service: words, any of
//
//	pooler=pgbouncer         through PgBouncer in transaction mode
//	mode=exec                the pool's query mode, as pgx spells it in a connection string
//	conns=2                  connections of the pool
//	isolation=serializable   the runner's isolation level, with _ for a space
//	timezone=Asia/Kathmandu  of server and sessions; the process has TZ
//	clock=+1h                the server's clock, from the process's
//
// A test that makes a choice of its own keeps it. Unset: the usual environment.
const EnvironmentVariable = "PGONCE_TEST_ENV"

// Environment is what EnvironmentVariable says.
type Environment struct {
	Pooler      bool
	Mode        string
	Conns       int
	Isolation   pgx.TxIsoLevel
	TimeZone    string
	ClockOffset time.Duration
}

// Env is this test binary's environment. A wrong word panics: a run in the wrong environment must not look green.
var Env = sync.OnceValue(func() Environment {
	env, err := parseEnvironment(os.Getenv(EnvironmentVariable))
	if err != nil {
		panic(err)
	}
	return env
})

func parseEnvironment(text string) (env Environment, err error) {
	for word := range strings.FieldsSeq(text) {
		name, value, _ := strings.Cut(word, "=")
		fits := value != ""
		switch name {
		case "pooler":
			env.Pooler, fits = true, value == "pgbouncer"
		case "mode":
			env.Mode, fits = value, slices.Contains([]string{"cache_statement", "cache_describe", "describe_exec", "exec"}, value)
		case "conns":
			env.Conns, err = strconv.Atoi(value)
			fits = err == nil && env.Conns > 0
		case "isolation":
			env.Isolation = pgx.TxIsoLevel(strings.ReplaceAll(value, "_", " "))
		case "timezone":
			env.TimeZone = value
			_, err = time.LoadLocation(value)
			fits = fits && err == nil
		case "clock":
			env.ClockOffset, err = time.ParseDuration(value)
			fits = err == nil
		default:
			fits = false
		}
		if !fits {
			return Environment{}, fmt.Errorf("pgtest: %s: %q is not understood", EnvironmentVariable, word)
		}
	}
	return env, nil
}

// settings are the throw-away server's.
func (e Environment) settings() map[string]string {
	settings := map[string]string{
		"fsync":                     "off", // a crash of the machine may cost the data: it is a test's
		"max_prepared_transactions": "20",  // for functions that prepare theirs
	}
	if e.TimeZone != "" {
		settings["timezone"], settings["log_timezone"] = e.TimeZone, e.TimeZone
	}
	return settings
}

// pooler is the test binary's PgBouncer. It stops with the server.
var pooler = sync.OnceValues(func() (*devstack.Pooler, error) {
	stack, err := server()
	if err != nil {
		return nil, err
	}
	return stack.StartPooler(context.Background())
})

// Pooler returns the address of the test binary's PgBouncer, in transaction mode, whatever the environment.
func Pooler(t testing.TB) string {
	t.Helper()
	p, err := pooler()
	if err != nil {
		t.Fatal(err)
	}
	return p.Address()
}

// ThroughPooler is the connection string of a database of ours, through the test binary's PgBouncer.
func ThroughPooler(t testing.TB, direct string) string {
	t.Helper()
	return change(t, direct, func(u *url.URL, _ url.Values) { u.Host = Pooler(t) })
}

// ServiceURL is how a service of this environment connects to a database of ours. All of it is in the connection string,
// so that another process can be given it.
func ServiceURL(t testing.TB, direct string) string {
	t.Helper()
	env := Env()
	if env.Pooler {
		direct = ThroughPooler(t, direct)
	}
	return change(t, direct, func(_ *url.URL, q url.Values) {
		if env.Mode != "" {
			q.Set("default_query_exec_mode", env.Mode)
		}
		if env.Conns != 0 {
			q.Set("pool_max_conns", strconv.Itoa(env.Conns))
		}
	})
}

func change(t testing.TB, conn string, to func(*url.URL, url.Values)) string {
	t.Helper()
	u, err := url.Parse(conn)
	if err != nil || u.Host == "" {
		t.Fatalf("pgtest: %s needs a connection string of the form postgres://", EnvironmentVariable)
	}
	q := u.Query()
	to(u, q)
	u.RawQuery = q.Encode()
	return u.String()
}

// Service returns the pool of a service on a database of ours, in this run's environment; configure comes last, so that
// a test's own choice counts. It is closed like Pool's.
func Service(t testing.TB, direct *pgxpool.Pool, configure func(*pgxpool.Config)) *pgxpool.Pool {
	t.Helper()
	cfg, err := pgxpool.ParseConfig(ServiceURL(t, direct.Config().ConnString()))
	if err != nil {
		t.Fatal(err)
	}
	configure(cfg)
	if Env().Pooler {
		settleParameters(t, direct, cfg)
	}
	pool, err := pgxpool.NewWithConfig(t.Context(), cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { closePool(t, pool, closeGrace) })
	return pool
}

// trackedParameters are those that PgBouncer takes from a client and keeps apart for it; all others it refuses.
var trackedParameters = []string{"application_name", "client_encoding", "datestyle", "standard_conforming_strings", "timezone"}

// settleParameters does what a service must do whose pooler refuses its startup parameters: they become the database's.
func settleParameters(t testing.TB, direct *pgxpool.Pool, cfg *pgxpool.Config) {
	t.Helper()
	parameters := cfg.ConnConfig.RuntimeParams
	for _, name := range slices.Sorted(maps.Keys(parameters)) {
		if slices.Contains(trackedParameters, strings.ToLower(name)) {
			continue
		}
		sql := fmt.Sprintf("ALTER DATABASE %s SET %s = '%s'", cfg.ConnConfig.Database, name, parameters[name])
		if _, err := direct.Exec(t.Context(), sql); err != nil {
			t.Fatal(err)
		}
		delete(parameters, name)
	}
}
