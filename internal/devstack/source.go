package devstack

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
)

const (
	// envStack forces one provider.
	envStack = "PGONCE_STACK"
	// envVersion asks for a major version of PostgreSQL, whichever provider serves it.
	envVersion = "PGONCE_POSTGRES_VERSION"
)

// source is one place a server can come from. start returns an *absentError if it cannot be had from there.
type source struct {
	provider string
	start    func(ctx context.Context) error
}

// absentError says why a provider does not serve here, so that the next one is asked.
type absentError struct{ why string }

func (e *absentError) Error() string { return "devstack: " + e.why }

func absent(format string, args ...any) error { return &absentError{why: fmt.Sprintf(format, args...)} }

// absentFor makes a failure a reason to ask the next provider.
func absentFor(err error) error {
	if _, already := errors.AsType[*absentError](err); already {
		return err
	}
	return absent("%s", strings.TrimPrefix(err.Error(), "devstack: "))
}

// wishes are what the environment says about where servers come from.
type wishes struct {
	stack string // the only provider to ask, empty for all
	major int    // the only version of PostgreSQL to take, 0 for any that is new enough
}

func (m machine) wishes() (w wishes, err error) {
	w.stack = m.getenv(envStack)
	if known := providers(); w.stack != "" && !slices.Contains(known, w.stack) {
		return w, fmt.Errorf("devstack: %s is %q: set it to one of %s, or unset it",
			envStack, w.stack, strings.Join(known, ", "))
	}
	if given := m.getenv(envVersion); given != "" {
		if w.major, err = strconv.Atoi(given); err != nil || w.major < wantPostgres.min {
			return w, fmt.Errorf("devstack: %s is %q: set it to a major version, %d or newer, or unset it",
				envVersion, given, wantPostgres.min)
		}
	}
	return w, nil
}

// providers are all of them, in the order in which they are asked: what somebody named, what is here, then what has to
// be fetched, a container before a change to this machine.
func providers() []string {
	return []string{ProviderEnv, ProviderLocal, ProviderDocker, ProviderApt, ProviderNpm}
}

// serve asks the sources in turn, or only the forced one, and returns which one serves.
func (m machine) serve(ctx context.Context, cfg Config, w wanted, forced string, sources []source) (string, error) {
	var reasons []string
	for _, s := range sources {
		if forced != "" && s.provider != forced {
			continue
		}
		err := s.start(ctx)
		if err == nil {
			return s.provider, nil
		}
		why, next := errors.AsType[*absentError](err)
		if ctx.Err() != nil {
			return "", fmt.Errorf("devstack: find %s: %w", w.name, errors.Join(ctx.Err(), err))
		}
		switch {
		case !next:
			return "", err
		case forced != "":
			return "", fmt.Errorf("%w: %s=%s: %s: change that, or unset %s", w.missing, envStack, forced, why.why, envStack)
		case why.why != "":
			reasons = append(reasons, s.provider+": "+why.why)
			if s.provider == ProviderDocker || s.provider == ProviderApt {
				_, _ = fmt.Fprintf(cfg.Out, "devstack: %s: not from %s: %s\n", w.name, s.provider, why.why)
			}
		}
	}
	return "", m.notFound(w, reasons)
}

// startLocal starts a program that is here.
func (m machine) startLocal(w wanted, run func(program string) error) func(context.Context) error {
	return func(ctx context.Context) error {
		program, found, skipped := m.find(ctx, w)
		if !found && len(skipped) == 0 {
			skipped = []string{"no program " + strings.Join(w.programs, " or ")}
		}
		if !found {
			return absent("%s", strings.Join(skipped, "; "))
		}
		return run(program)
	}
}

// startApt starts a program after installing it.
func (m machine) startApt(cfg Config, w wanted, run func(program string) error) func(context.Context) error {
	return func(ctx context.Context) error {
		if m.install == nil {
			return absent("installing a package takes root and apt-get")
		}
		if cfg.NoInstall {
			return absent("installing packages is forbidden")
		}
		if err := m.install(ctx, cfg.Out, w); err != nil {
			return absentFor(err)
		}
		program, found, skipped := m.find(ctx, w)
		if !found {
			return absent("the installed package brought no program: %s", strings.Join(skipped, "; "))
		}
		return run(program)
	}
}
