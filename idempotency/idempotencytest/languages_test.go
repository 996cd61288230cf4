package idempotencytest_test

import (
	"context"
	"crypto/sha512"
	"encoding/base64"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/pgonce/pgonce/idempotency"
	"github.com/pgonce/pgonce/txn"
)

// order places one order through the library.
func (s *service) order(ctx context.Context, req idempotency.Request) (txn.Result[string], error) {
	return txn.WithIdempotency(ctx, s.runner, req, func(ctx context.Context, tx pgx.Tx) (string, error) {
		_, err := tx.Exec(ctx, `INSERT INTO orders VALUES ($1, 'go')`, req.Key.Value())
		return "go", err
	})
}

func TestSQLAPI_GoAndPsqlOnTheSameKeys(t *testing.T) {
	t.Parallel()
	psql, err := exec.LookPath("psql")
	require.NoError(t, err, "psql comes with PostgreSQL's client programs")
	const place = `CREATE FUNCTION pg_temp.place(k text) RETURNS boolean LANGUAGE plpgsql AS $$
DECLARE
    a idempotency.acquisition := idempotency.acquire('-', 'order.create', k, idempotency.fingerprint_bytes('payload'));
BEGIN
    IF a.verdict = 'RUN' THEN
        INSERT INTO orders VALUES (k, 'psql');
        PERFORM idempotency.complete('-', 'order.create', k, a.fence, a.attempt_token, '"psql"');
    END IF;
    RETURN a.verdict = 'IN_PROGRESS';
END
$$;
CREATE PROCEDURE pg_temp.all_keys() LANGUAGE plpgsql AS $$
BEGIN
    FOR i IN 0..39 LOOP
        WHILE pg_temp.place('k' || i) LOOP COMMIT; PERFORM pg_sleep(0.005); END LOOP;
        COMMIT;
        PERFORM pg_sleep(0.002);
    END LOOP;
END
$$;
CALL pg_temp.all_keys();
`
	mixed(t, func(ctx context.Context, url string) error {
		cmd := exec.CommandContext(ctx, psql, "-X", "-q", "-v", "ON_ERROR_STOP=1", "-d", url)
		cmd.Stdin = strings.NewReader(place)
		return run(cmd)
	})
}

func TestSQLAPI_GoAndNodeOnTheSameKeys(t *testing.T) {
	t.Parallel()
	node, err := exec.LookPath("node")
	if err != nil {
		t.Skip("node is not on the PATH: the mix with psql runs all the same")
	}
	driver := nodeDriver(t)
	mixed(t, func(ctx context.Context, url string) error {
		return run(exec.CommandContext(ctx, node, filepath.Join("testdata", "client.mjs"), driver, url, fmt.Sprint(mixedKeys)))
	})
}

func run(cmd *exec.Cmd) error {
	if out, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("%s: %w: %s", filepath.Base(cmd.Path), err, out)
	}
	return nil
}

// nodeDriver fetches a driver for PostgreSQL that needs no other package, and returns its folder.
func nodeDriver(t *testing.T) string {
	t.Helper()
	const name, version = "postgres", "3.4.9"
	const sum = "GD3qdB0x1z9xgFI6cdRD6xu2Sp2WCOEoe3mtnyB5Ee0XrrL5Pe+e4CCnJrRMnL1zYtRDZmQQVbvOttLnKDLnaw=="
	npm, err := exec.LookPath("npm")
	if err != nil {
		t.Skip("npm is not on the PATH: it fetches node's driver")
	}
	dir := t.TempDir()
	cmd := exec.CommandContext(t.Context(), npm, "pack", "--ignore-scripts", name+"@"+version)
	cmd.Dir = dir
	if err := run(cmd); err != nil {
		t.Skipf("npm's registry does not answer: %v", err)
	}
	pack := filepath.Join(dir, name+"-"+version+".tgz")
	text, err := os.ReadFile(pack)
	require.NoError(t, err)
	got := sha512.Sum512(text)
	require.Equal(t, sum, base64.StdEncoding.EncodeToString(got[:]), "not the package that it was")
	require.NoError(t, run(exec.CommandContext(t.Context(), "tar", "xzf", pack, "-C", dir)))
	return filepath.Join(dir, "package")
}
