package devstack

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"syscall"
)

// RedisNodes is throw-away Redis servers that may be spoilt and die: alone, as a cluster, or watched by sentinels. They are
// always of this machine's programs, whatever PGONCE_REDIS_URL says: somebody else's server is not ours to kill.
type RedisNodes struct {
	program  string
	as       *syscall.Credential
	scratch  string
	password string

	mu    sync.Mutex
	nodes []*RedisNode
}

// RedisNode is one server. It keeps its port through every death, and nothing else, unless it writes files into its folder.
type RedisNode struct {
	nodes *RedisNodes
	dir   string
	port  int
	args  []string
	extra string // lines of its configuration

	mu      sync.Mutex
	process *process
}

// StartRedisNodes makes ready for Add. Config's Settings do not count here.
func StartRedisNodes(ctx context.Context, cfg *Config) (*RedisNodes, error) {
	return startRedisNodes(ctx, cfg, thisMachine())
}

func startRedisNodes(ctx context.Context, given *Config, m machine) (_ *RedisNodes, err error) {
	cfg := given.withDefaults()
	cfg.NoInstall = cfg.NoInstall || m.getenv("PGONCE_NO_INSTALL") != ""
	sweepFolders(cfg.Out, m.tempDirs())
	r := &RedisNodes{password: rand.Text()}
	take := func(program string) error { r.program = program; return nil }
	if _, err = m.serve(ctx, cfg, wantRedis, "", []source{
		{ProviderLocal, m.startLocal(wantRedis, take)},
		{ProviderApt, m.startApt(cfg, wantRedis, take)},
	}); err != nil {
		return nil, err
	}
	if r.as, err = m.serverUser("redis", "nobody"); err != nil {
		return nil, err
	}
	r.scratch, err = newFolder(m)
	return r, err
}

// Password is every server's.
func (r *RedisNodes) Password() string { return r.password }

// Add starts a server with more lines of configuration, for example "maxmemory 3mb".
func (r *RedisNodes) Add(ctx context.Context, lines ...string) (*RedisNode, error) {
	return r.add(ctx, nil, strings.Join(lines, "\n")+"\n")
}

// AddSentinel starts a sentinel with these lines of configuration; the monitored server's password is in them.
func (r *RedisNodes) AddSentinel(ctx context.Context, lines ...string) (*RedisNode, error) {
	return r.add(ctx, []string{"--sentinel"}, strings.Join(lines, "\n")+"\n")
}

func (r *RedisNodes) add(ctx context.Context, args []string, extra string) (*RedisNode, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	dir, err := serverFolder(r.scratch, "redis"+strconv.Itoa(len(r.nodes)+1), r.as)
	if err != nil {
		return nil, err
	}
	n := &RedisNode{nodes: r, dir: dir, args: args, extra: extra}
	n.process, err = onFreePort(func(port int) (*process, error) {
		n.port = port
		_ = os.Remove(n.conf()) // of a port that was lost
		return n.run(ctx)
	})
	if err != nil {
		return nil, err
	}
	r.nodes = append(r.nodes, n)
	return n, nil
}

// Stop kills every server and removes their folders.
func (r *RedisNodes) Stop() error {
	r.mu.Lock()
	nodes := r.nodes
	r.mu.Unlock()
	var errs []error
	for _, n := range nodes {
		errs = append(errs, n.Kill())
	}
	if err := os.RemoveAll(r.scratch); err != nil {
		errs = append(errs, fmt.Errorf("devstack: remove folder: %w", err))
	}
	return errors.Join(errs...)
}

// Port is the server's, on 127.0.0.1.
func (n *RedisNode) Port() int { return n.port }

// Address is host and port.
func (n *RedisNode) Address() string { return net.JoinHostPort("127.0.0.1", strconv.Itoa(n.port)) }

// URL is the connection string.
func (n *RedisNode) URL() string {
	return fmt.Sprintf("redis://:%s@%s/0", n.nodes.password, n.Address())
}

// Start starts a dead server again and returns when it answers.
func (n *RedisNode) Start(ctx context.Context) error {
	n.mu.Lock()
	defer n.mu.Unlock()
	if !n.process.exited() {
		return fmt.Errorf("devstack: start Redis on port %d: it runs already", n.port)
	}
	p, err := onOwnPort(ctx, func() (*process, error) { return n.run(ctx) })
	if p != nil {
		n.process = p
	}
	return err
}

func (n *RedisNode) conf() string { return filepath.Join(n.dir, "redis.conf") }

func (n *RedisNode) run(ctx context.Context) (*process, error) {
	conf := n.conf()
	if _, err := os.Stat(conf); err != nil { // a sentinel writes into its own, which must stay
		text := redisConf(n.dir, n.port, n.nodes.password) + n.extra
		if n.args != nil {
			text = fmt.Sprintf("bind 127.0.0.1\nport %d\nrequirepass %s\ndir %q\n%s", n.port, n.nodes.password, n.dir, n.extra)
		}
		if err := serverFile(conf, text, n.nodes.as); err != nil {
			return nil, err
		}
	}
	cmd := exec.CommandContext(context.WithoutCancel(ctx), n.nodes.program, append([]string{conf}, n.args...)...)
	cmd.Dir, cmd.Env = n.dir, serverEnv()
	cmd.SysProcAttr = attributes(n.nodes.as, syscall.SIGKILL)
	p, err := startProcess(cmd, filepath.Join(n.dir, "log"), syscall.SIGTERM)
	if err != nil {
		return nil, err
	}
	err = p.awaitReady(ctx, func(ctx context.Context) error { return redisAnswers(ctx, n.Address(), n.nodes.password) })
	return p, err
}

// Kill ends the server with SIGKILL and returns when it is gone; a dead one stays dead.
func (n *RedisNode) Kill() error {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.process.exited() {
		return nil
	}
	if err := n.process.cmd.Process.Kill(); err != nil {
		return fmt.Errorf("devstack: kill Redis on port %d: %w", n.port, err)
	}
	<-n.process.done
	return nil
}

// Pause stops the server's process without ending it: connections stay, nothing answers. Resume lets it go on.
func (n *RedisNode) Pause() error { return n.signal(syscall.SIGSTOP) }

// Resume lets a paused server go on.
func (n *RedisNode) Resume() error { return n.signal(syscall.SIGCONT) }

func (n *RedisNode) signal(sig syscall.Signal) error {
	n.mu.Lock()
	defer n.mu.Unlock()
	if err := n.process.cmd.Process.Signal(sig); err != nil {
		return fmt.Errorf("devstack: signal Redis on port %d: %w", n.port, err)
	}
	return nil
}
