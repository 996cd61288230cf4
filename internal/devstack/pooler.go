package devstack

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"

	"github.com/jackc/pgx/v5/pgconn"
)

var wantPgBouncer = extra{name: "PgBouncer", pkg: "pgbouncer", find: onPath("pgbouncer")}

// Pooler is a PgBouncer in transaction mode before the stack's PostgreSQL, for all its databases.
type Pooler struct {
	host string
	port int
}

// StartPooler starts one; it stops with the stack. It keeps PgBouncer's defaults: what it refuses there it refuses here.
func (s *Stack) StartPooler(ctx context.Context) (*Pooler, error) {
	m := thisMachine()
	program, err := m.locateExtra(ctx, Config{Out: s.out}, wantPgBouncer)
	if err != nil {
		return nil, err
	}
	server, err := pgconn.ParseConfig(s.adminURL)
	if err != nil {
		return nil, fmt.Errorf("devstack: start PgBouncer: %w", err)
	}
	if strings.ContainsAny(server.User+server.Password, "\"\r\n") {
		return nil, errors.New(`devstack: start PgBouncer: user and password must not have a " in them`)
	}
	as, err := m.serverUser("postgres", "nobody") // it refuses root
	if err != nil {
		return nil, err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.stopped {
		return nil, errors.New("devstack: start PgBouncer: the stack has stopped")
	}
	folder, err := s.folder(m)
	if err != nil {
		return nil, err
	}
	dir, err := serverFolder(folder, "pooler"+strconv.Itoa(len(s.servers)), as)
	if err != nil {
		return nil, err
	}
	users := filepath.Join(dir, "users")
	if err := serverFile(users, `"`+server.User+`" "`+server.Password+"\"\n", as); err != nil {
		return nil, err
	}
	pooler := &Pooler{host: "127.0.0.1"}
	started, err := onFreePort(func(port int) (*process, error) {
		conf := filepath.Join(dir, "pgbouncer.ini")
		if err := serverFile(conf, poolerConf(server, port, users), as); err != nil {
			return nil, err
		}
		// The pooler outlives the context of its start.
		cmd := exec.CommandContext(context.WithoutCancel(ctx), program, conf)
		cmd.Dir, cmd.Env = dir, serverEnv()
		cmd.SysProcAttr = attributes(as, syscall.SIGKILL)
		p, err := startProcess(cmd, filepath.Join(dir, "log"), syscall.SIGINT)
		if err != nil {
			return nil, err
		}
		pooler.port = port
		err = p.awaitReady(ctx, func(ctx context.Context) error {
			through := server.Copy()
			through.Host, through.Port, through.Fallbacks, through.TLSConfig = pooler.host, uint16(port), nil, nil //nolint:gosec // a port
			conn, err := pgconn.ConnectConfig(ctx, through)
			if err != nil {
				return fmt.Errorf("devstack: reach PgBouncer: %w", err)
			}
			return conn.Close(ctx)
		})
		return p, err
	})
	if err != nil {
		return nil, err
	}
	// It stops before the server it stands before.
	s.servers = append([]*process{started}, s.servers...)
	_, _ = fmt.Fprintf(s.out, "devstack: PgBouncer: %s, in %s\n", program, dir)
	return pooler, nil
}

func poolerConf(server *pgconn.Config, port int, users string) string {
	return fmt.Sprintf(`[databases]
* = host=%s port=%d
[pgbouncer]
listen_addr = 127.0.0.1
listen_port = %d
unix_socket_dir =
auth_type = scram-sha-256
auth_file = %s
pool_mode = transaction
max_client_conn = 2000
`, server.Host, server.Port, port, users)
}

// Address is where it listens.
func (p *Pooler) Address() string { return net.JoinHostPort(p.host, strconv.Itoa(p.port)) }
