package devstack

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"maps"
	"os"
	"strconv"
	"sync"
	"syscall"
)

// Cluster is throw-away PostgreSQL servers that may die: a primary, and the standbys made of it. They are always of this
// machine's programs, whatever PGONCE_DATABASE_URL says: somebody else's server is not ours to kill. Like a Stack's they
// end with Stop, and on Linux when this process dies in any other way.
type Cluster struct {
	program  string
	as       *syscall.Credential
	scratch  string
	password string
	settings map[string]string

	mu    sync.Mutex
	nodes []*Node
}

// StartCluster starts a cluster of one server, its primary. Config.Redis does not count here.
func StartCluster(ctx context.Context, cfg *Config) (*Cluster, error) {
	return startCluster(ctx, cfg, thisMachine())
}

func startCluster(ctx context.Context, given *Config, m machine) (_ *Cluster, err error) {
	cfg := given.withDefaults()
	if err := validateSettings(cfg.Settings); err != nil {
		return nil, err
	}
	cfg.NoInstall = cfg.NoInstall || m.getenv("PGONCE_NO_INSTALL") != ""
	sweepFolders(cfg.Out, m.tempDirs())
	c := &Cluster{password: rand.Text(), settings: map[string]string{
		"wal_keep_size":               "1GB",   // a standby that was away finds all it has missed
		"wal_retrieve_retry_interval": "100ms", // and comes back soon
	}}
	maps.Copy(c.settings, cfg.Settings)
	// Not from npm, whose binaries have no pg_basebackup, and not in a container, whose processes are not ours to kill.
	take := func(program string) error { c.program = program; return nil }
	if _, err = m.serve(ctx, cfg, wantPostgres, "", []source{
		{ProviderLocal, m.startLocal(wantPostgres, take)},
		{ProviderApt, m.startApt(cfg, wantPostgres, take)},
	}); err != nil {
		return nil, err
	}
	if c.as, err = m.serverUser("postgres", "nobody"); err != nil {
		return nil, err
	}
	if c.scratch, err = newFolder(m); err != nil {
		return nil, err
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, c.Stop())
		}
	}()
	n, err := c.add()
	if err != nil {
		return nil, err
	}
	if err := initCluster(ctx, c.program, n.dir, c.password, c.as); err != nil {
		return nil, err
	}
	if err := n.firstStart(ctx); err != nil {
		return nil, err
	}
	_, _ = fmt.Fprintf(cfg.Out, "devstack: PostgreSQL cluster: %s, in %s\n", c.program, c.scratch)
	return c, nil
}

// Primary is the server the cluster began with.
func (c *Cluster) Primary() *Node { return c.nodes[0] }

// Stop kills every server and removes the data. Later calls do nothing.
func (c *Cluster) Stop() error {
	c.mu.Lock()
	nodes := c.nodes
	c.mu.Unlock()
	var errs []error
	for _, n := range nodes {
		errs = append(errs, n.Kill()) // a paused receiver would not hear of a shutdown
	}
	if err := os.RemoveAll(c.scratch); err != nil {
		errs = append(errs, fmt.Errorf("devstack: remove folder: %w", err))
	}
	return errors.Join(errs...)
}

// add makes the folder of another server. The sweep knows them by how their names begin.
func (c *Cluster) add() (*Node, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	name := "pg" + strconv.Itoa(len(c.nodes)+1)
	dir, err := serverFolder(c.scratch, name, c.as)
	if err != nil {
		return nil, err
	}
	n := &Node{cluster: c, name: name, dir: dir}
	c.nodes = append(c.nodes, n)
	return n, nil
}
