package db_test

import (
	"fmt"
	"math/rand/v2"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/pgonce/pgonce/idempotency"
	"github.com/pgonce/pgonce/internal/pgtest"
)

// Golden numbers, computed by hand (Python's hashlib): neither side may ever change, not even both at once, since
// releases run side by side.
var goldenLockIDs = []struct {
	tenant, operation, key string
	want                   int64
}{
	{"acme", "order.create", "k-1", 7330616037355085197},
	{"a", "b:c", "d", -502539913209528476},
	{"a:b", "c", "d", -1738452201006551356},
	{"a", "b", "c:d", -6948995822281622741},
	{"-", "payment.capture", "0198c1f2-7b7e-7cc0-8000-000000000001", -3963791465429479542},
	{"mandant-ü", "auftrag.anlegen", "schlüssel-漢字-🙂", 4255129444053196933},
	{"o'brien", "x%y", "back\\slash \"quote\"", -9145645317208215020},
	{strings.Repeat("t", 128), strings.Repeat("o", 128), strings.Repeat("k", 255), 731537344941121149},
}

func TestCase_P22_LockIDsAreGolden(t *testing.T) {
	t.Parallel()
	pool := pgtest.Pool(t)
	for _, g := range goldenLockIDs {
		key, err := idempotency.NewKey(g.tenant, g.operation, g.key)
		require.NoError(t, err)
		require.Equal(t, g.want, key.LockID(), "Go: %q", g)
		require.Equal(t, []int64{g.want},
			column[int64](t, pool, `SELECT idempotency.lock_id($1, $2, $3)`, g.tenant, g.operation, g.key), "SQL: %q", g)
	}
}

func TestCase_P22_LockIDsOfGoAndSQLAgree(t *testing.T) {
	t.Parallel()
	const seed = 22
	random := rand.New(rand.NewPCG(seed, seed)) //nolint:gosec // repeatable on purpose
	alphabet := []rune("ab01:-_./\\'\"%é漢🙂")
	text := func(limit int) string {
		var s strings.Builder
		for n := 1 + random.IntN(limit); s.Len() < n; {
			s.WriteRune(alphabet[random.IntN(len(alphabet))])
		}
		return s.String()
	}
	var tenants, operations, keys []string
	var want []int64
	for range 2000 {
		key, err := idempotency.NewKey(text(100), text(100), text(200))
		require.NoError(t, err)
		tenants, operations, keys = append(tenants, key.Tenant()), append(operations, key.Operation()), append(keys, key.Value())
		want = append(want, key.LockID())
	}
	got := column[int64](t, pgtest.Pool(t), `
		SELECT idempotency.lock_id(k.tenant, k.operation, k.key)
		FROM unnest($1::text[], $2::text[], $3::text[]) WITH ORDINALITY AS k(tenant, operation, key, n) ORDER BY k.n`,
		tenants, operations, keys)
	require.Equal(t, want, got, fmt.Sprintf("seed %d", seed))
}
