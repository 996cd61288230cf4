package sqlsuite

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgonce/pgonce/idempotency"
	"github.com/pgonce/pgonce/internal/pgtest"
	"github.com/pgonce/pgonce/txn"
)

// place is an operation of programs in two languages.
var place = idempotency.Operation{Name: "order.place", Takeover: idempotency.TakeoverRerun, Wait: time.Minute}

// placed is its result, which both make and both read.
type placed struct {
	ID       int64  `json:"id"`
	PlacedBy string `json:"placed_by"`
}

// answer is what one caller got.
type answer struct {
	Value    string `json:"value"`
	Result   string `json:"result"`
	Replayed bool   `json:"replayed"`
}

// answers collects what all callers got, by key.
type answers struct {
	mu  sync.Mutex
	got map[string][]answer
}

func (a *answers) add(one answer) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.got[one.Value] = append(a.got[one.Value], one)
}

// nodeProgram installs the client beside its packages, which npm fetches as the lock file says, checksums included.
func nodeProgram(t *testing.T) string {
	t.Helper()
	npm := pgtest.Program(t, "npm")
	dir := t.TempDir()
	for _, name := range []string{"client.js", "package.json", "package-lock.json"} {
		text, err := os.ReadFile(filepath.Join("node", name))
		require.NoError(t, err)
		require.NoError(t, os.WriteFile(filepath.Join(dir, name), text, 0o600))
	}
	cmd := exec.CommandContext(t.Context(), npm, "ci", "--ignore-scripts", "--no-audit", "--no-fund", "--prefer-offline")
	cmd.Dir = dir
	said, err := cmd.CombinedOutput()
	require.NoError(t, err, string(said))
	return filepath.Join(dir, "client.js")
}

// node is a running client.
type node struct {
	t   *testing.T
	cmd *exec.Cmd
	in  io.WriteCloser
	out *bufio.Scanner
	err strings.Builder
}

// startNode returns when the client is connected.
func startNode(t *testing.T, client, url string) *node {
	t.Helper()
	n := &node{t: t, cmd: exec.CommandContext(t.Context(), pgtest.Program(t, "node"), client, url, "4")}
	n.cmd.Stderr = &n.err
	var err error
	n.in, err = n.cmd.StdinPipe()
	require.NoError(t, err)
	out, err := n.cmd.StdoutPipe()
	require.NoError(t, err)
	require.NoError(t, n.cmd.Start())
	n.out = bufio.NewScanner(out)
	require.True(t, n.out.Scan(), "it does not start")
	require.Equal(t, "ready", n.out.Text())
	return n
}

// ask sends what is to be placed, all at once. The program ends by itself when it has answered all, unless more may come.
func (n *node) ask(reqs []idempotency.Request, more bool) {
	for _, i := range rand.Perm(len(reqs)) {
		key := reqs[i].Key
		line, err := json.Marshal(map[string]string{"tenant": key.Tenant(), "operation": key.Operation(), "value": key.Value(), "payload": payloadOf(key)})
		if err == nil {
			_, err = n.in.Write(append(line, '\n'))
		}
		if err != nil {
			return // it was killed
		}
	}
	if !more {
		_ = n.in.Close() // as above
	}
}

// read passes on its answers; after kill of them it is killed, 0: never.
func (n *node) read(to *answers, kill int) {
	count := 0
	for ; n.out.Scan(); count++ {
		var one answer
		if err := json.Unmarshal(n.out.Bytes(), &one); err != nil {
			n.t.Error(n.out.Text(), err)
			return
		}
		to.add(one)
		if count+1 == kill {
			_ = n.cmd.Process.Kill()
		}
	}
	if err := n.cmd.Wait(); (err == nil) != (kill == 0) {
		n.t.Error(err, n.err.String())
	}
}

func payloadOf(key idempotency.Key) string {
	return `{"item":"tea – 茶", "key":"` + key.Value() + `"}`
}

// placeInGo is the Go side: acquired and committed, called, completed with the order.
func placeInGo(ctx context.Context, r *txn.Runner, req idempotency.Request) (answer, error) {
	res, err := txn.WithLease(ctx, r, req,
		func(context.Context, *txn.Lease) (string, error) { return "go", nil },
		func(ctx context.Context, tx pgx.Tx, by string) (placed, error) {
			order := placed{PlacedBy: by}
			err := tx.QueryRow(ctx, `INSERT INTO orders (key, placed_by) VALUES ($1, $2) RETURNING id`, req.Key.Value(), by).Scan(&order.ID)
			return order, err
		})
	if err != nil {
		return answer{}, err
	}
	if again, err := json.Marshal(res.Value); err != nil || string(again) != string(res.Record.Result) {
		return answer{}, fmt.Errorf("%s was decoded as %s: %w", res.Record.Result, again, err)
	}
	return answer{Value: req.Key.Value(), Result: string(res.Record.Result), Replayed: res.Replayed}, nil
}

// Programs in Go and in JavaScript are asked for the same orders at once. One of the latter is killed meanwhile, and one goes
// through PgBouncer in transaction mode.
func TestNode_RacesWithGoOnTheSameKeys(t *testing.T) {
	t.Parallel()
	const keys, floor = 300, 30
	client := nodeProgram(t)
	pool := pgtest.Pool(t, txn.ConfigurePool, func(c *pgxpool.Config) { c.MaxConns = 8 })
	_, err := pool.Exec(t.Context(), `CREATE TABLE orders (id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, key text NOT NULL, placed_by text NOT NULL)`)
	require.NoError(t, err)
	runner, err := txn.New(pool, &txn.Config{Operations: []idempotency.Operation{place}})
	require.NoError(t, err)
	t.Cleanup(runner.Close)
	reqs := make([]idempotency.Request, keys)
	for i := range reqs {
		key, err := place.Key(idempotency.SingleTenant, fmt.Sprintf("schlüssel-%d", i))
		require.NoError(t, err)
		reqs[i] = idempotency.Request{Key: key, Fingerprint: idempotency.FingerprintBytes([]byte(payloadOf(key)))}
	}
	nodes := make([]*node, 3)
	for i := range nodes {
		url := pool.Config().ConnString()
		if i == 2 {
			url = pgtest.ThroughPooler(t, url)
		}
		nodes[i] = startNode(t, client, url)
	}

	all := &answers{got: map[string][]answer{}}
	var group sync.WaitGroup
	for i, n := range nodes {
		kill := 0
		if i == 0 {
			kill = keys / 20 // while most keys are open
		}
		group.Go(func() { n.ask(reqs, kill > 0) }) // who is to be killed is still there then
		group.Go(func() { n.read(all, kill) })
	}
	const callers = 4
	for range callers {
		group.Go(func() {
			for _, i := range rand.Perm(keys) {
				one, err := placeInGo(t.Context(), runner, reqs[i])
				if err != nil {
					t.Error(err)
					return
				}
				all.add(one)
			}
		})
	}
	group.Wait()
	require.False(t, t.Failed())

	won, killed := map[string]int{}, 0
	for _, req := range reqs {
		value := req.Key.Value()
		got := all.got[value]
		require.GreaterOrEqual(t, len(got), callers+len(nodes)-1)
		var order placed
		require.NoError(t, json.Unmarshal([]byte(got[0].Result), &order))
		own := 0
		for _, one := range got {
			require.Equal(t, got[0].Result, one.Result, "the same bytes for everybody")
			if !one.Replayed {
				own++
			}
		}
		if own == 0 { // it was killed between its COMMIT and its answer
			require.Equal(t, "node", order.PlacedBy)
			killed++
		}
		require.LessOrEqual(t, own, 1)
		rows, err := pool.Query(t.Context(), `SELECT id, placed_by FROM orders WHERE key = $1`, value)
		require.NoError(t, err)
		stored, err := pgx.CollectRows(rows, pgx.RowToStructByPos[placed])
		require.NoError(t, err)
		require.Equal(t, []placed{order}, stored, "one order, the one that everybody was told of")
		won[order.PlacedBy]++
	}
	require.LessOrEqual(t, killed, 4, "as many as it had connections")
	require.GreaterOrEqual(t, won["go"], floor)
	require.GreaterOrEqual(t, won["node"], floor)
	t.Logf("%d keys, %d answers: Go won %d, Node.js %d", keys, callers*keys+2*keys, won["go"], won["node"])
}
