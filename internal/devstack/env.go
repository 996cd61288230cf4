package devstack

import (
	"context"
	"fmt"
	"net/url"
	"strconv"
	"strings"

	"github.com/jackc/pgx/v5/pgconn"
)

// Names of our own: the common DATABASE_URL often points at something precious.
const (
	envDatabase = "PGONCE_DATABASE_URL"
	envRedis    = "PGONCE_REDIS_URL"
)

// useEnv takes the server somebody named. The database in the URL serves for CREATE DATABASE only.
func (s *Stack) useEnv(ctx context.Context, given string) error {
	s.provider, s.env, s.adminURL = ProviderEnv, true, given
	rows, err := s.admin(ctx, "SHOW server_version_num")
	if err != nil {
		return fmt.Errorf("devstack: use %s: %w", envDatabase, err)
	}
	number, err := strconv.Atoi(rows[0][0])
	if err != nil || number/10000 < wantPostgres.min {
		return fmt.Errorf("devstack: use %s: the server is version %s: %d or newer is needed",
			envDatabase, rows[0][0], wantPostgres.min)
	}
	_, _ = fmt.Fprintf(s.out, "devstack: PostgreSQL: the server of %s (version %d)\n", envDatabase, number/10000)
	s.sweepDatabases(ctx)
	return nil
}

// withDatabase is the connection string with another database.
func withDatabase(conn, name string) (string, error) {
	var changed string
	if strings.HasPrefix(conn, "postgres://") || strings.HasPrefix(conn, "postgresql://") {
		u, err := url.Parse(conn)
		if err != nil {
			// Not the error itself: it would print the password.
			return "", fmt.Errorf("devstack: use %s: it is not a URL", envDatabase)
		}
		q := u.Query()
		q.Del("dbname")
		q.Del("database")
		u.Path, u.RawPath, u.RawQuery = "/"+name, "", q.Encode()
		changed = u.String()
	} else {
		changed = conn + " dbname=" + name // of two, the last one counts
	}
	// The guard's last word: whatever form the string had, it leads to the database we made and nowhere else.
	parsed, err := pgconn.ParseConfig(changed)
	if err != nil {
		return "", fmt.Errorf("devstack: use %s: %w", envDatabase, err)
	}
	if parsed.Database != name {
		return "", fmt.Errorf("%w: the connection string leads to %q instead of %q",
			ErrForeignDatabase, parsed.Database, name)
	}
	return changed, nil
}
