package idempotencymsg_test

import (
	"context"
	"encoding/json"
	"fmt"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgonce/pgonce/idempotency"
	"github.com/pgonce/pgonce/idempotencymsg"
	"github.com/pgonce/pgonce/internal/pgtest"
	"github.com/pgonce/pgonce/txn"
)

func TestMain(m *testing.M) { pgtest.Main(m) }

var mail = idempotency.Operation{Name: "mailer", Strategy: idempotency.StrategyEventual}

// post is a database with the effects of messages, and an inbox on it.
type post struct {
	direct *pgxpool.Pool
	runner *txn.Runner
	inbox  *idempotencymsg.Inbox
}

func newPost(t testing.TB, cfg idempotencymsg.Config) *post {
	t.Helper()
	direct := pgtest.Pool(t)
	pool := pgtest.Service(t, direct, func(c *pgxpool.Config) {
		c.MaxConns = max(c.MaxConns, 2) // a test may hold one
		txn.ConfigurePool(c)
	})
	_, err := direct.Exec(t.Context(), `
		CREATE TABLE effects (id text NOT NULL);
		CREATE TABLE dead_letters (id text NOT NULL, reason text NOT NULL)`)
	require.NoError(t, err)
	if cfg.Operation.Name == "" {
		cfg.Operation = mail
	}
	runner, err := txn.New(pool, &txn.Config{Operations: []idempotency.Operation{cfg.Operation}, Isolation: pgtest.Env().Isolation})
	require.NoError(t, err)
	if cfg.Handler == nil {
		cfg.Handler = write
	}
	inbox, err := idempotencymsg.New(runner, &cfg)
	require.NoError(t, err)
	return &post{direct: direct, runner: runner, inbox: inbox}
}

// letter is the payload. Trouble says how its handler ends, behind its write.
type letter struct {
	Text    string `json:"text"`
	Trouble string `json:"trouble,omitempty"`
}

func message(id, trouble string) idempotencymsg.Message {
	payload, _ := json.Marshal(letter{Text: "to " + id, Trouble: trouble})
	return idempotencymsg.Message{Tenant: idempotency.SingleTenant, ID: id, Payload: payload, Deliveries: 1}
}

var errRefused = fmt.Errorf("the post office is closed")

func write(ctx context.Context, tx pgx.Tx, m idempotencymsg.Message) ([]byte, error) {
	var l letter
	if err := json.Unmarshal(m.Payload, &l); err != nil {
		return nil, idempotencymsg.Poison(fmt.Errorf("decode letter: %w", err))
	}
	if _, err := tx.Exec(ctx, `INSERT INTO effects VALUES ($1)`, m.ID); err != nil {
		return nil, err
	}
	switch l.Trouble {
	case "error":
		return nil, errRefused
	case "sql":
		_, err := tx.Exec(ctx, `SELECT 1/0`)
		return nil, err
	case "panic":
		panic("no stamp")
	case "poison":
		return nil, idempotencymsg.Poison(errRefused)
	case "final":
		return nil, txn.Final("unknown_address", errRefused)
	case "commit":
		_, err := tx.Exec(ctx, `COMMIT`)
		return nil, err
	}
	return []byte("sent " + m.ID), nil
}

func bury(ctx context.Context, tx pgx.Tx, m idempotencymsg.Message, reason error) error {
	_, err := tx.Exec(ctx, `INSERT INTO dead_letters VALUES ($1, $2)`, m.ID, reason.Error())
	return err
}

func (p *post) count(t testing.TB, query string, args ...any) (n int) {
	t.Helper()
	require.NoError(t, p.direct.QueryRow(context.WithoutCancel(t.Context()), query, args...).Scan(&n))
	return n
}

func (p *post) effects(t testing.TB, id string) int {
	t.Helper()
	return p.count(t, `SELECT count(*) FROM effects WHERE id = $1`, id)
}
