package devstack

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"regexp"
	"slices"
	"strings"
	"time"
)

// databaseName is what our databases are called: pgonce_ and the 26 letters and digits of rand.Text.
var databaseName = regexp.MustCompile(`^pgonce_[a-z2-7]{26}$`)

// commentPrefix begins the comment that makes a database provably ours; its owner follows.
const commentPrefix = "pgonce throw-away database of "

// Database is a database of its own for one test or one run.
type Database struct {
	URL  string
	Name string

	stack *Stack
}

// CreateDatabase makes an empty database called pgonce_<random>.
func (s *Stack) CreateDatabase(ctx context.Context) (*Database, error) {
	return s.create(ctx, "TEMPLATE template0")
}

// CreateFromTemplate makes a database that is a copy of another one of this stack, in 20 to 40 ms. Nobody may be
// connected to the template.
func (s *Stack) CreateFromTemplate(ctx context.Context, template string) (*Database, error) {
	if err := s.guard(template); err != nil {
		return nil, err
	}
	how := "TEMPLATE " + template
	if !s.env {
		// Copying files is faster but makes the server checkpoint: fine on our own, rude on somebody else's.
		how += " STRATEGY FILE_COPY"
	}
	return s.create(ctx, how)
}

func (s *Stack) create(ctx context.Context, how string) (*Database, error) {
	me, err := thisOwner()
	if err != nil {
		return nil, err
	}
	name := "pgonce_" + strings.ToLower(rand.Text())
	conn, err := withDatabase(s.adminURL, name)
	if err != nil {
		return nil, err
	}
	// Registered first: even if the answer is lost, Stop drops it.
	s.mu.Lock()
	s.created[name] = true
	s.mu.Unlock()
	// CREATE DATABASE refuses to run in the implicit transaction of a multi-statement string.
	if _, err := s.admin(ctx, "CREATE DATABASE "+name+" "+how); err != nil {
		return nil, err
	}
	if s.env {
		comment := strings.ReplaceAll(commentPrefix+me.String(), "'", "''")
		if _, err := s.admin(ctx, "COMMENT ON DATABASE "+name+" IS '"+comment+"'"); err != nil {
			return nil, err
		}
	}
	return &Database{URL: conn, Name: name, stack: s}, nil
}

// Drop drops the database, throwing out whoever is still connected. It returns ErrForeignDatabase for a database this
// stack did not create.
func (d *Database) Drop(ctx context.Context) error {
	if d.stack == nil {
		return fmt.Errorf("%w: %q", ErrForeignDatabase, d.Name)
	}
	return d.stack.drop(ctx, d.Name)
}

func (s *Stack) drop(ctx context.Context, name string) error {
	if err := s.guard(name); err != nil {
		return err
	}
	if _, err := s.admin(ctx, "DROP DATABASE IF EXISTS "+name+" WITH (FORCE)"); err != nil {
		return err
	}
	s.mu.Lock()
	delete(s.created, name)
	s.mu.Unlock()
	return nil
}

// guard lets through only databases this very stack created. The server may be somebody's, with precious databases.
func (s *Stack) guard(name string) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if !databaseName.MatchString(name) || !s.created[name] {
		return fmt.Errorf("%w: %q", ErrForeignDatabase, name)
	}
	return nil
}

// dropAll drops what tests left on a server that is not ours to stop.
func (s *Stack) dropAll() error {
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	s.mu.Lock()
	var names []string
	for name := range s.created {
		names = append(names, name)
	}
	s.mu.Unlock()
	slices.Sort(names)
	var errs []error
	for _, name := range names {
		errs = append(errs, s.drop(ctx, name))
	}
	return errors.Join(errs...)
}
