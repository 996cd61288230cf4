package txnsql

import (
	"context"
	"database/sql"
	"database/sql/driver"
	"fmt"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/jackc/pgx/v5/stdlib"

	"github.com/pgonce/pgonce/txn"
)

// OpenDB returns a sql.DB for a Runner, as stdlib.OpenDB does. config is from pgx.ParseConfig. It connects when it is used.
// Where connections need hooks of the program, make a pool of them: OpenDBFromPool.
func OpenDB(config *pgx.ConnConfig) *sql.DB {
	made := &pgxpool.Config{ConnConfig: config.Copy()}
	txn.ConfigurePool(made)
	return sql.OpenDB(&connector{
		Connector: stdlib.GetConnector(*made.ConnConfig, stdlib.OptionBeforeConnect(made.BeforeConnect)),
		driver:    &pgxDriver{stdlib.GetDefaultDriver(), made},
	})
}

// OpenDBFromPool returns a sql.DB whose connections are pool's, as stdlib.OpenDBFromPool does; the configuration of pool went
// through txn.ConfigurePool. Its limits are the pool's: it keeps no idle connection of its own. Closing it leaves the pool open.
func OpenDBFromPool(pool *pgxpool.Pool) *sql.DB {
	db := sql.OpenDB(&connector{
		Connector: stdlib.GetPoolConnector(pool),
		driver:    &pgxDriver{stdlib.GetDefaultDriver(), pool.Config()},
	})
	db.SetMaxIdleConns(0)
	return db
}

// connector is stdlib's, with connections of ours around its own.
type connector struct {
	driver.Connector
	driver *pgxDriver
}

func (c *connector) Driver() driver.Driver { return c.driver }

func (c *connector) Connect(ctx context.Context) (driver.Conn, error) {
	made, err := c.Connector.Connect(ctx)
	if err != nil {
		return nil, err
	}
	std, ok := made.(*stdlib.Conn)
	if !ok {
		return nil, fmt.Errorf("txnsql: pgx's stdlib made a %T", made)
	}
	wrapped := &conn{Conn: std}
	std.Conn().PgConn().CustomData()[connKey] = wrapped
	return wrapped, nil
}

// pgxDriver is what a sql.DB of OpenDB shows as its driver, so that New knows how its connections are made.
type pgxDriver struct {
	driver.Driver
	config *pgxpool.Config
}
