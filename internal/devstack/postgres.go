package devstack

import (
	"cmp"
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"maps"
	"net"
	"net/url"
	"os/exec"
	"path/filepath"
	"regexp"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/jackc/pgx/v5/pgconn"
)

var settingName = regexp.MustCompile(`^[a-z_][a-z0-9_.]*$`)

// ownSettings are decided by us: a caller that changed them would take the server out of its folder.
var ownSettings = []string{
	"port", "listen_addresses", "unix_socket_directories", "data_directory", "hba_file", "config_file",
	"log_destination", "logging_collector",
}

func validateSettings(settings map[string]string) error {
	for name := range settings {
		if !settingName.MatchString(name) || slices.Contains(ownSettings, name) {
			return fmt.Errorf("devstack: Config.Settings: %q is not a setting a caller can give", name)
		}
	}
	return nil
}

// startPostgres fills in the stack's PostgreSQL half.
func (s *Stack) startPostgres(ctx context.Context, cfg Config, m machine, wish wishes) (err error) {
	w := wantPostgres
	w.only = wish.major
	run := func(provider string) func(string) error {
		return func(program string) error { return s.runPostgres(ctx, cfg, m, program, provider) }
	}
	s.provider, err = m.serve(ctx, cfg, w, wish.stack, []source{
		{ProviderEnv, func(ctx context.Context) error {
			given := m.getenv(envDatabase)
			if given == "" {
				return absent("%s is not set", envDatabase)
			}
			if cfg.ClockOffset != 0 {
				return fmt.Errorf("devstack: Config.ClockOffset: the clock of the server of %s is not ours to move", envDatabase)
			}
			return s.useEnv(ctx, w, given)
		}},
		{ProviderLocal, m.startLocal(w, run(ProviderLocal))},
		{ProviderDocker, func(ctx context.Context) error { return s.dockerPostgres(ctx, cfg, m, w, wish.stack != "") }},
		{ProviderApt, m.startApt(cfg, w, run(ProviderApt))},
		{ProviderNpm, func(ctx context.Context) error {
			program, err := m.npmProgram(ctx, cfg, wish.major)
			if err != nil {
				return err
			}
			return run(ProviderNpm)(program)
		}},
	})
	return err
}

// dockerPostgres serves from a container.
func (s *Stack) dockerPostgres(ctx context.Context, cfg Config, m machine, w wanted, forced bool) error {
	image := m.getenv(envPostgresImage)
	if image == "" {
		image = fmt.Sprintf("postgres:%d-alpine", cmp.Or(w.only, dockerDefault))
	}
	server, address, err := s.startContainer(ctx, cfg, m, forced, dockerRequest{
		Server: "postgres", Image: image, Password: rand.Text(), Settings: withDefaultSettings(cfg.Settings),
	})
	if err != nil {
		return err
	}
	s.adminURL = address
	if _, err := s.checkVersion(ctx, w); err != nil {
		return errors.Join(fmt.Errorf("devstack: use image %s: %w", image, err), server.stop())
	}
	s.servers = append(s.servers, server)
	_, _ = fmt.Fprintf(s.out, "devstack: PostgreSQL: a container of %s (%s)\n", image, ProviderDocker)
	return nil
}

// runPostgres serves from a program of this machine.
func (s *Stack) runPostgres(ctx context.Context, cfg Config, m machine, program, provider string) error {
	as, err := m.serverUser("postgres", "nobody")
	if err != nil {
		return err
	}
	folder, err := s.folder(m)
	if err != nil {
		return err
	}
	dir, err := serverFolder(folder, "pg", as)
	if err != nil {
		return err
	}
	password := rand.Text()
	if err := initCluster(ctx, program, dir, password, as); err != nil {
		return err
	}
	clock, err := shiftedClock(ctx, cfg.ClockOffset, dir, as)
	if err != nil {
		return err
	}
	server, err := onFreePort(func(port int) (*process, error) {
		cmd := postgresCommand(ctx, program, dir, port, cfg.Settings)
		cmd.Env = append(cmd.Env, clock...)
		cmd.SysProcAttr = attributes(as, syscall.SIGQUIT)
		p, err := startProcess(cmd, filepath.Join(dir, "log"), syscall.SIGINT)
		if err != nil {
			return nil, err
		}
		s.adminURL = (&url.URL{
			Scheme: "postgres", User: url.UserPassword("postgres", password),
			Host: net.JoinHostPort("127.0.0.1", strconv.Itoa(port)), Path: "/postgres", RawQuery: "sslmode=disable",
		}).String()
		// Logging in with our password also proves that it is our server which answers on this port.
		err = p.awaitReady(ctx, func(ctx context.Context) error {
			_, err := s.admin(ctx, "SELECT 1")
			return err
		})
		return p, err
	})
	if err != nil {
		return err
	}
	s.servers = append(s.servers, server)
	_, _ = fmt.Fprintf(s.out, "devstack: PostgreSQL: %s (%s), in %s\n", program, provider, dir)
	return nil
}

// initCluster makes the data folder. Every connection needs the random password, also on the socket: other users live
// on this machine, and a superuser of the server can run programs as the server's user.
func initCluster(ctx context.Context, program, dir, password string, as *syscall.Credential) error {
	passwordFile := filepath.Join(dir, "password")
	if err := serverFile(passwordFile, password, as); err != nil {
		return err
	}
	// initdb lies beside the server itself, not always beside a link to it.
	real, err := filepath.EvalSymlinks(program)
	if err != nil {
		return fmt.Errorf("devstack: find initdb: %w", err)
	}
	runtime.LockOSThread() // for the parent-death signal, as in startProcess
	defer runtime.UnlockOSThread()
	cmd := exec.CommandContext(ctx, filepath.Join(filepath.Dir(real), "initdb"),
		"--pgdata", filepath.Join(dir, "data"), "--username=postgres", "--auth=scram-sha-256",
		"--pwfile", passwordFile, "--encoding=UTF8", "--locale=C", "--no-sync", "--no-instructions")
	cmd.Dir, cmd.Env = dir, serverEnv()
	cmd.SysProcAttr = attributes(as, syscall.SIGKILL)
	if out, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("devstack: initdb: %w; it said:\n%s", err, out)
	}
	return nil
}

func withDefaultSettings(settings map[string]string) map[string]string {
	all := map[string]string{
		"max_connections": "200",
		"timezone":        "UTC",
		"log_timezone":    "UTC",
	}
	maps.Copy(all, settings)
	return all
}

func postgresCommand(ctx context.Context, program, dir string, port int, settings map[string]string) *exec.Cmd {
	all := withDefaultSettings(settings)
	all["listen_addresses"] = "127.0.0.1"
	all["port"] = strconv.Itoa(port)
	all["unix_socket_directories"] = `"` + dir + `"`
	all["log_destination"] = "stderr"
	args := []string{"-D", filepath.Join(dir, "data")}
	for _, name := range slices.Sorted(maps.Keys(all)) {
		args = append(args, "-c", name+"="+all[name])
	}
	// The server outlives the context of its start.
	cmd := exec.CommandContext(context.WithoutCancel(ctx), program, args...)
	cmd.Dir, cmd.Env = dir, serverEnv()
	return cmd
}

// admin runs statements of ours outside any database we hand out, and returns the last one's rows as text.
func (s *Stack) admin(ctx context.Context, sql string) ([][]string, error) {
	// Unless the caller knows better: a copy of some gigabytes takes its time.
	if _, bounded := ctx.Deadline(); !bounded {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(ctx, time.Minute)
		defer cancel()
	}
	conn, err := pgconn.Connect(ctx, s.adminURL)
	if err != nil {
		return nil, fmt.Errorf("devstack: connect: %w", err)
	}
	defer func() { _ = conn.Close(ctx) }() // the statements are done
	results, err := conn.Exec(ctx, sql).ReadAll()
	if err != nil {
		verb, _, _ := strings.Cut(sql, " ")
		return nil, fmt.Errorf("devstack: %s: %w", strings.ToLower(verb), err)
	}
	var rows [][]string
	for _, row := range results[len(results)-1].Rows {
		var texts []string
		for _, value := range row {
			texts = append(texts, string(value))
		}
		rows = append(rows, texts)
	}
	return rows, nil
}
