package devstack

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"syscall"
	"time"
)

const (
	envPostgresImage = "PGONCE_POSTGRES_IMAGE"
	envRedisImage    = "PGONCE_REDIS_IMAGE"

	dockerDefault = 18 // version of PostgreSQL

	// dockerGrace is long: an image may have to be pulled.
	dockerGrace = 10 * time.Minute
	pingGrace   = 2 * time.Second
)

// dockerRequest and dockerAnswer are what we and our child, the program dockerstack, tell each other: one line of JSON
// each way. That program is a module of its own, because testcontainers would be 48 requirements of everybody who
// imports ours; so it cannot share these types.
type dockerRequest struct {
	Server   string            `json:"server"` // postgres or redis
	Image    string            `json:"image"`
	Password string            `json:"password"`
	Settings map[string]string `json:"settings,omitempty"`
}

type dockerAnswer struct {
	URL string `json:"url"`
}

// startContainer has a child run a server in a container. The container goes when the child's input ends, which it does
// with us, however we die.
// A failure means that the next provider is asked, unless this one was asked for.
func (s *Stack) startContainer(
	ctx context.Context, cfg Config, m machine, forced bool, r dockerRequest,
) (*process, string, error) {
	if !forced { // else testcontainers looks for the engine, in more places than we do
		if err := m.engine(ctx); err != nil {
			return nil, "", err
		}
	}
	p, address, err := s.runContainer(ctx, cfg, m, r)
	if err != nil {
		return nil, "", absentFor(err)
	}
	return p, address, nil
}

func (s *Stack) runContainer(ctx context.Context, cfg Config, m machine, r dockerRequest) (*process, string, error) {
	folder, err := s.folder(m)
	if err != nil {
		return nil, "", err
	}
	program, err := m.dockerstack(ctx, cfg.Out, folder)
	if err != nil {
		return nil, "", err
	}
	request, err := json.Marshal(r)
	if err != nil {
		return nil, "", fmt.Errorf("devstack: write request: %w", err)
	}
	childIn, toChild, err := os.Pipe()
	if err != nil {
		return nil, "", fmt.Errorf("devstack: make pipe: %w", err)
	}
	defer func() { _ = childIn.Close() }() // the child has its own
	fromChild, childOut, err := os.Pipe()
	if err != nil {
		return nil, "", errors.Join(fmt.Errorf("devstack: make pipe: %w", err), toChild.Close())
	}
	defer func() { _ = fromChild.Close() }() // it says one line

	// The container outlives the context of its start.
	cmd := exec.CommandContext(context.WithoutCancel(ctx), program)
	cmd.Stdin, cmd.Stdout = childIn, childOut
	cmd.SysProcAttr = attributes(nil, syscall.SIGTERM)
	p, err := startProcess(cmd, filepath.Join(folder, r.Server+".log"), syscall.SIGTERM)
	_ = childOut.Close() // the child has its own
	if err != nil {
		return nil, "", errors.Join(err, toChild.Close())
	}
	p.input = toChild
	address, err := converse(ctx, p, fromChild, request)
	if err != nil {
		return nil, "", errors.Join(err, p.stop())
	}
	return p, address, nil
}

// converse sends the request and awaits the answer.
func converse(ctx context.Context, p *process, fromChild *os.File, request []byte) (string, error) {
	ctx, cancel := context.WithTimeout(ctx, dockerGrace)
	defer cancel()
	stopWaiting := context.AfterFunc(ctx, func() { _ = fromChild.SetReadDeadline(time.Unix(1, 0)) })
	defer stopWaiting()
	if _, err := p.input.Write(append(request, '\n')); err != nil {
		return "", p.failed(err)
	}
	line, err := bufio.NewReader(fromChild).ReadBytes('\n')
	if ctx.Err() != nil {
		return "", p.failed(ctx.Err())
	}
	if err != nil {
		<-p.done // it has closed its output: it is about to end, and its log is then whole
		return "", p.failed(errors.New("it exited"))
	}
	var answer dockerAnswer
	if err := json.Unmarshal(line, &answer); err != nil || answer.URL == "" {
		return "", p.failed(fmt.Errorf("it answered %q", line))
	}
	return answer.URL, nil
}

// buildDockerstack builds the child from the source beside this file.
func (m machine) buildDockerstack(ctx context.Context, out io.Writer, folder string) (string, error) {
	program := filepath.Join(folder, "dockerstack")
	if _, err := os.Stat(program); err == nil {
		return program, nil // for the first of our servers
	}
	_, file, _, _ := runtime.Caller(0)
	source := filepath.Join(filepath.Dir(file), "dockerstack")
	if _, err := os.Stat(filepath.Join(source, "go.mod")); err != nil {
		return "", absent("the source of the program dockerstack is not here (%v)", err)
	}
	compiler, err := m.lookPath("go")
	if err != nil {
		return "", absent("the go command is not on the PATH: it builds the program that runs containers")
	}
	_, _ = fmt.Fprintln(out, "devstack: building the program that runs containers (the first time it takes minutes) ...")
	cmd := exec.CommandContext(ctx, compiler, "build", "-o", program, ".")
	cmd.Dir, cmd.Env = source, append(os.Environ(), "GOWORK=off")
	if said, err := cmd.CombinedOutput(); err != nil {
		return "", absent("building the program that runs containers: %v; go said:\n%s", err, said)
	}
	return program, nil
}

// engineAnswers asks for a Docker engine where DOCKER_HOST says, else at the usual sockets.
func engineAnswers(ctx context.Context, getenv func(string) string) error {
	hosts := []string{getenv("DOCKER_HOST")}
	if hosts[0] == "" {
		hosts = []string{"unix:///var/run/docker.sock"}
		if dir := getenv("XDG_RUNTIME_DIR"); dir != "" {
			hosts = append(hosts, "unix://"+dir+"/docker.sock")
		}
		if home := getenv("HOME"); home != "" {
			hosts = append(hosts, "unix://"+home+"/.docker/run/docker.sock")
		}
	}
	for _, host := range hosts {
		if ping(ctx, host) == nil {
			return nil
		}
	}
	return absent("no Docker engine answers")
}

func ping(ctx context.Context, host string) error {
	u, err := url.Parse(host)
	if err != nil {
		return fmt.Errorf("devstack: read DOCKER_HOST: %w", err)
	}
	network, address := "tcp", u.Host
	if u.Scheme == "unix" {
		network, address = "unix", u.Path
	}
	ctx, cancel := context.WithTimeout(ctx, pingGrace)
	defer cancel()
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://docker/_ping", http.NoBody)
	if err != nil {
		return fmt.Errorf("devstack: ask for a Docker engine: %w", err)
	}
	transport := &http.Transport{
		DisableKeepAlives: true,
		DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
			return new(net.Dialer).DialContext(ctx, network, address)
		},
	}
	response, err := transport.RoundTrip(request)
	if err != nil {
		return fmt.Errorf("devstack: ask for a Docker engine: %w", err)
	}
	_ = response.Body.Close() // the status says it all
	if response.StatusCode != http.StatusOK {
		return fmt.Errorf("devstack: ask for a Docker engine: it says %s", response.Status)
	}
	return nil
}
