package main

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"os/user"
	"strings"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/spf13/cobra"

	"github.com/pgonce/pgonce/idempotency"
	"github.com/pgonce/pgonce/localfront"
)

// changeFlags are those of the commands that change a record.
type changeFlags struct {
	keyFlags
	idempotency.Blame
	yes bool
}

func (c *changeFlags) add(cmd *cobra.Command) {
	c.keyFlags.add(cmd)
	flags := cmd.Flags()
	flags.StringVar(&c.Reason, "reason", "", "why, for those who look at it later; callers never see it (required)")
	flags.StringVar(&c.Actor, "actor", "", "who (default: the user of this machine)")
	flags.BoolVarP(&c.yes, "yes", "y", false, "do not ask")
	_ = cmd.MarkFlagRequired("reason")
}

// complete fills in who does it.
func (c *changeFlags) complete() error {
	if strings.TrimSpace(c.Reason) == "" {
		return usagef("--reason must say why")
	}
	if c.Actor != "" {
		return nil
	}
	who, err := user.Current()
	if err != nil {
		return usagef("--actor must say who: this machine does not know (%w)", err)
	}
	c.Actor = who.Username
	return nil
}

// errNotConfirmed is an answer other than yes.
var errNotConfirmed = errors.New("not confirmed: nothing was changed")

// confirm asks a person. Whoever cannot be asked has not said yes.
func (a *app) confirm(yes bool, question string) error {
	if yes {
		return nil
	}
	a.notef("%s\nType yes to go on: ", question)
	answer, err := bufio.NewReader(a.in).ReadString('\n')
	if err != nil && !errors.Is(err, io.EOF) {
		return fmt.Errorf("read the answer: %w", err)
	}
	if strings.TrimSpace(answer) != "yes" {
		a.notef("\n")
		return errNotConfirmed
	}
	return nil
}

// changed is what a command did to a record.
type changed struct {
	Tenant    string `json:"tenant"`
	Operation string `json:"operation"`
	Key       string `json:"key"`
	Did       string `json:"did"` // "failed", "failed, retryable", "expired", "nothing: it was EXPIRED already"
	Fence     int64  `json:"fence"`
	Actor     string `json:"actor"`
	Reason    string `json:"reason"`
	Redis     string `json:"redis"` // "evicted", "not asked", or the error
}

// finish evicts, tells, and ends with status 1 where PostgreSQL is changed and Redis is not.
func (a *app) finish(ctx context.Context, key idempotency.Key, did changed) error {
	did.Tenant, did.Operation, did.Key = key.Tenant(), key.Operation(), key.Value()
	did.Redis = "not asked"
	var failure error
	if a.redisGiven() {
		did.Redis = "evicted"
		if failure = a.evict(ctx, key); failure != nil {
			did.Redis = failure.Error()
		}
	}
	if a.json {
		if err := a.printJSON(did); err != nil {
			return err
		}
	} else {
		a.printf("%s: %s (fence %d)\n", printable(key.String()), did.Did, did.Fence)
		if failure == nil && a.redisGiven() {
			a.printf("Redis: evicted\n")
		}
	}
	if failure != nil {
		a.notef("PostgreSQL has the change, Redis has NOT been told: %s\n"+
			"It may give the old answer until its entry ends. When it answers again:\n  %s\n",
			printable(failure.Error()), evictCommand(key))
		return errSaid
	}
	return nil
}

func evictCommand(key idempotency.Key) string {
	return fmt.Sprintf("pgonce evict --tenant %s --operation %s --redis ... %s", quoted(key.Tenant()), quoted(key.Operation()), quoted(key.Value()))
}

// quoted is a word that a shell takes as it is.
func quoted(s string) string {
	plain := func(r rune) bool {
		return r >= 'a' && r <= 'z' || r >= 'A' && r <= 'Z' || r >= '0' && r <= '9' || strings.ContainsRune("-_./:@", r)
	}
	if strings.IndexFunc(s, func(r rune) bool { return !plain(r) }) < 0 && s != "" && s != "-" {
		return s
	}
	return "'" + strings.ReplaceAll(s, "'", `'\''`) + "'"
}

func (a *app) newFail() *cobra.Command {
	var c changeFlags
	var f idempotency.OperatorFailure
	var retention string
	cmd := &cobra.Command{
		Use:   "fail KEY --reason WHY",
		Short: "End a running record whose owner is gone: callers get a failure, or may try again",
		Long: "End a PROCESSING record as FAILED. Its owner must be gone: the lease is over (TIMEOUT), or --force says so.\n\n" +
			"Find out first what the owner did: without --retryable every caller gets the failure, and with it the next one runs the\n" +
			"operation again, whatever the record's rule says. SUCCESS, FAILED and INIT are refused: callers may have seen the outcome.",
		Example: "  pgonce fail k-2001 --reason 'provider says: never charged, ticket 4711' --retryable",
		Args:    cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			if err := c.complete(); err != nil {
				return err
			}
			var err error
			if f.Retention, err = readRetention(retention); err != nil {
				return err
			}
			f.Blame = c.Blame
			if err := errors.Join(f.Validate(), a.checkRedis()); err != nil {
				return err
			}
			return a.withStore(cmd.Context(), func(ctx context.Context, pool *pgxpool.Pool, s *idempotency.Store) error {
				return a.fail(ctx, pool, s, &c, &f, args[0])
			})
		},
	}
	c.add(cmd)
	a.addRedis(cmd)
	flags := cmd.Flags()
	flags.BoolVar(&f.Retryable, "retryable", false, "the next caller runs the operation again")
	flags.BoolVar(&f.Force, "force", false, "also while the lease runs: the owner may be alive, and loses the key")
	flags.StringVar(&f.Code, "code", "OPERATOR", "error code that callers get")
	flags.StringVar(&f.Message, "message", "ended by an operator", "error text that callers get")
	flags.StringVar(&retention, "retention", idempotency.DefaultRetention.String(), "how long the failure is kept, or forever")
	return cmd
}

func readRetention(text string) (time.Duration, error) {
	if text == "forever" {
		return idempotency.Forever, nil
	}
	d, err := time.ParseDuration(text)
	if err != nil || d < idempotency.MinRetention {
		return 0, usagef("--retention must be at least %v, or forever", idempotency.MinRetention)
	}
	return d, nil
}

func (a *app) fail(
	ctx context.Context, pool *pgxpool.Pool, s *idempotency.Store, c *changeFlags, f *idempotency.OperatorFailure, value string,
) error {
	key, err := c.one(ctx, pool, s, value)
	if err != nil {
		return err
	}
	if !c.yes {
		if err := a.show(ctx, pool, s, key); err != nil {
			return err
		}
	}
	question, did := "Every caller of this key will get the failure "+f.Code+".", "failed"
	if f.Retryable {
		question, did = "The next caller will run the operation again. If the owner has called somebody else, that may happen twice.", "failed, retryable"
	}
	if f.Force {
		question += "\n--force: its owner may be alive. It loses the key, but what it has already asked of others is not taken back."
	}
	if err := a.confirm(c.yes, question); err != nil {
		return err
	}
	fence, err := s.FailByHand(ctx, pool, key, f)
	if err != nil {
		return explained(err, key)
	}
	return a.finish(ctx, key, changed{Did: did, Fence: fence, Actor: c.Actor, Reason: c.Reason})
}

// show is what a person should see before saying yes.
func (a *app) show(ctx context.Context, pool *pgxpool.Pool, s *idempotency.Store, key idempotency.Key) error {
	lines, _, err := s.Find(ctx, pool, filterOf(key), 1)
	if err != nil || len(lines) == 0 {
		return err
	}
	view, err := viewOf(ctx, pool, s, &lines[0])
	if err == nil {
		aside := *a
		world := *a.world
		world.out = a.err // the document on standard output is one
		aside.world = &world
		aside.printKey(&view)
	}
	return err
}

// explained says what to do where nobody knows whether the change was committed.
func explained(err error, key idempotency.Key) error {
	if errors.Is(err, idempotency.ErrOutcomeUnknown) {
		return fmt.Errorf("%w\nThe change may be recorded or not. Look: pgonce trace --tenant %s --operation %s %s",
			err, quoted(key.Tenant()), quoted(key.Operation()), quoted(key.Value()))
	}
	return err
}

func (a *app) newExpire() *cobra.Command {
	var c changeFlags
	cmd := &cobra.Command{
		Use:   "expire KEY --reason WHY",
		Short: "Make a record count as absent: the operation MAY RUN A SECOND TIME",
		Long: "Make a final record, or an unused token, count as absent from now on: the next caller with this key runs the operation.\n\n" +
			"WARNING: the operation was done. After this it may be done a second time. PROCESSING is refused: fail it.\n" +
			fmt.Sprintf("A process with a local front may give the old answer for up to %v.", localfront.DefaultMaxAge),
		Example: "  pgonce expire k-1002 --reason 'order was cancelled by hand, ticket 4712' --redis redis://cache:6379/0",
		Args:    cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			if err := c.complete(); err != nil {
				return err
			}
			if err := errors.Join(c.Validate(), a.checkRedis()); err != nil {
				return err
			}
			return a.withStore(cmd.Context(), func(ctx context.Context, pool *pgxpool.Pool, s *idempotency.Store) error {
				return a.expire(ctx, pool, s, &c, args[0])
			})
		},
	}
	c.add(cmd)
	a.addRedis(cmd)
	return cmd
}

func (a *app) expire(ctx context.Context, pool *pgxpool.Pool, s *idempotency.Store, c *changeFlags, value string) error {
	key, err := c.one(ctx, pool, s, value)
	if err != nil {
		return err
	}
	warning := "WARNING: the next caller with this key runs the operation. It MAY RUN A SECOND TIME, and so may a call whose COMMIT is\n" +
		"being looked for at this moment."
	if !c.yes {
		if err := a.show(ctx, pool, s, key); err != nil {
			return err
		}
	} else {
		a.notef("%s\n", warning)
	}
	if !a.redisGiven() {
		a.notef("No --redis: if there is a Redis front, it gives the old answer until its entry ends.\n")
	}
	if err := a.confirm(c.yes, warning); err != nil {
		return err
	}
	fence, done, err := s.ExpireByHand(ctx, pool, key, c.Blame)
	if err != nil {
		return explained(err, key)
	}
	did := "expired"
	if !done {
		did = "nothing, it was EXPIRED already"
	}
	return a.finish(ctx, key, changed{Did: did, Fence: fence, Actor: c.Actor, Reason: c.Reason})
}
