package devstack

import (
	"bufio"
	"cmp"
	"context"
	"crypto/rand"
	"fmt"
	"net"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"time"
)

// startRedis fills in the stack's Redis half. The throw-away server keeps nothing on disk.
func (s *Stack) startRedis(ctx context.Context, cfg Config, m machine, wish wishes) error {
	forced := wish.stack
	if forced == ProviderNpm {
		forced = "" // it has no Redis
	}
	run := func(provider string) func(string) error {
		return func(program string) error { return s.runRedis(ctx, m, program, provider) }
	}
	_, err := m.serve(ctx, cfg, wantRedis, forced, []source{
		{ProviderEnv, func(context.Context) error {
			if s.redisURL = m.getenv(envRedis); s.redisURL == "" {
				return absent("%s is not set", envRedis)
			}
			_, _ = fmt.Fprintf(s.out, "devstack: Redis: the server of %s\n", envRedis)
			return nil
		}},
		{ProviderLocal, m.startLocal(wantRedis, run(ProviderLocal))},
		{ProviderDocker, func(ctx context.Context) error { return s.dockerRedis(ctx, cfg, m, forced != "") }},
		{ProviderApt, m.startApt(cfg, wantRedis, run(ProviderApt))},
	})
	return err
}

// dockerRedis serves from a container.
func (s *Stack) dockerRedis(ctx context.Context, cfg Config, m machine, forced bool) error {
	image := cmp.Or(m.getenv(envRedisImage), "redis:7-alpine")
	server, address, err := s.startContainer(ctx, cfg, m, forced,
		dockerRequest{Server: "redis", Image: image, Password: rand.Text()})
	if err != nil {
		return err
	}
	s.redisURL, s.servers = address, append(s.servers, server)
	_, _ = fmt.Fprintf(s.out, "devstack: Redis: a container of %s (%s)\n", image, ProviderDocker)
	return nil
}

// runRedis serves from a program of this machine.
func (s *Stack) runRedis(ctx context.Context, m machine, program, provider string) error {
	as, err := m.serverUser("redis", "nobody")
	if err != nil {
		return err
	}
	folder, err := s.folder(m)
	if err != nil {
		return err
	}
	dir, err := serverFolder(folder, "redis", as)
	if err != nil {
		return err
	}
	password := rand.Text()
	server, err := onFreePort(func(port int) (*process, error) {
		// In a file, not on the command line, where everybody would see the password.
		conf := filepath.Join(dir, "redis.conf")
		if err := serverFile(conf, redisConf(dir, port, password), as); err != nil {
			return nil, err
		}
		// The server outlives the context of its start.
		cmd := exec.CommandContext(context.WithoutCancel(ctx), program, conf)
		cmd.Dir, cmd.Env = dir, serverEnv()
		cmd.SysProcAttr = attributes(as, syscall.SIGKILL)
		p, err := startProcess(cmd, filepath.Join(dir, "log"), syscall.SIGTERM)
		if err != nil {
			return nil, err
		}
		address := fmt.Sprintf("127.0.0.1:%d", port)
		s.redisURL = fmt.Sprintf("redis://:%s@%s/0", password, address)
		err = p.awaitReady(ctx, func(ctx context.Context) error { return redisAnswers(ctx, address, password) })
		return p, err
	})
	if err != nil {
		return err
	}
	s.servers = append(s.servers, server)
	_, _ = fmt.Fprintf(s.out, "devstack: Redis: %s (%s), in %s\n", program, provider, dir)
	return nil
}

func redisConf(dir string, port int, password string) string {
	return fmt.Sprintf(`bind 127.0.0.1
port %d
requirepass %s
save ""
appendonly no
dir %q
pidfile %q
`, port, password, dir, filepath.Join(dir, "redis.pid"))
}

// redisAnswers speaks the two lines of Redis it needs itself: no client library for the sake of one PING. Logging in
// with our password also proves that it is our server which answers.
func redisAnswers(ctx context.Context, address, password string) error {
	dialer := net.Dialer{Timeout: time.Second}
	conn, err := dialer.DialContext(ctx, "tcp", address)
	if err != nil {
		return fmt.Errorf("devstack: reach redis: %w", err)
	}
	defer func() { _ = conn.Close() }() // nothing was written that matters
	if err := conn.SetDeadline(time.Now().Add(time.Second)); err != nil {
		return fmt.Errorf("devstack: reach redis: %w", err)
	}
	if _, err := fmt.Fprintf(conn, "AUTH %s\r\nPING\r\n", password); err != nil {
		return fmt.Errorf("devstack: reach redis: %w", err)
	}
	answers := bufio.NewReader(conn)
	for _, want := range []string{"+OK", "+PONG"} {
		line, err := answers.ReadString('\n')
		if err != nil {
			return fmt.Errorf("devstack: reach redis: %w", err)
		}
		if strings.TrimSpace(line) != want {
			return fmt.Errorf("devstack: reach redis: it says %q", strings.TrimSpace(line))
		}
	}
	return nil
}
