package childtest

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/signal"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/pgonce/pgonce/internal/pgtest"
)

func TestMain(m *testing.M) {
	Main()
	pgtest.Main(m)
}

type args struct {
	N    int
	Text string
}

type fact struct {
	I    int
	Text string
}

// counter tells numbers, the first N of them or, for 0, as fast as it can until it is killed.
var counter = Register("count", func(_ context.Context, a args, tell func(fact)) error {
	for i := 1; a.N == 0 || i <= a.N; i++ {
		tell(fact{I: i, Text: a.Text})
	}
	return nil
})

var failing = Register("fail", func(_ context.Context, a args, _ func(fact)) error {
	fmt.Println("some output")
	return errors.New(a.Text)
})

var crowd = Register("crowd", func(_ context.Context, a args, tell func(fact)) error {
	var all sync.WaitGroup
	for i := range a.N {
		all.Go(func() { tell(fact{I: i, Text: strings.Repeat("x", 10_000)}) })
	}
	all.Wait()
	return nil
})

// environment tells a variable, then stops itself, then tells again.
var environment = Register("environment", func(_ context.Context, a args, tell func(fact)) error {
	tell(fact{Text: os.Getenv(a.Text)})
	continued := make(chan os.Signal, 1)
	signal.Notify(continued, syscall.SIGCONT)
	if err := syscall.Kill(os.Getpid(), syscall.SIGSTOP); err != nil {
		return err
	}
	<-continued // another thread may take the stop, and this one would run on for a moment
	tell(fact{Text: "again"})
	return nil
})

// parent starts a child of its own, tells its process id, and waits to be killed.
var parent = Register("parent", func(ctx context.Context, _ args, tell func(fact)) error {
	p, err := start[fact](ctx, counter.name, args{}, nil)
	if err != nil {
		return err
	}
	tell(fact{I: p.PID()})
	<-p.ended
	return p.err
})

var inserting = Register("insert", func(ctx context.Context, a args, tell func(fact)) error {
	conn, err := pgx.Connect(ctx, a.Text)
	if err != nil {
		return err
	}
	for i := 1; ; i++ {
		if _, err := conn.Exec(ctx, "INSERT INTO numbers VALUES ($1)", i); err != nil {
			return err
		}
		tell(fact{I: i})
	}
})

func TestChild_TellsAndEnds(t *testing.T) {
	t.Parallel()
	child := counter.Start(t, args{N: 3, Text: "text with\nline ends"})
	require.NoError(t, child.Wait(t))
	require.Equal(t, []fact{{1, "text with\nline ends"}, {2, "text with\nline ends"}, {3, "text with\nline ends"}}, child.Facts())
	child.Kill(t) // does nothing
}

func TestChild_ErrorIsWhatWaitReturns(t *testing.T) {
	t.Parallel()
	child := failing.Start(t, args{Text: "broken on purpose"})
	err := child.Wait(t)
	require.ErrorContains(t, err, "broken on purpose")
	require.ErrorContains(t, err, "some output")
	require.NotErrorIs(t, err, ErrKilled)
	require.Empty(t, child.Facts())
}

func TestChild_FactsOutliveAKill(t *testing.T) {
	t.Parallel()
	for range 5 {
		child := counter.Start(t, args{})
		child.Await(t, func(f fact) bool { return f.I == 100 })
		child.Kill(t)
		require.ErrorIs(t, child.Wait(t), ErrKilled)
		facts := child.Facts()
		require.GreaterOrEqual(t, len(facts), 100)
		for i, f := range facts {
			require.Equal(t, i+1, f.I, "no gap, and no torn line")
		}
	}
}

func TestChild_WhatItToldIsInTheDatabase(t *testing.T) {
	t.Parallel()
	pool := pgtest.Pool(t)
	_, err := pool.Exec(t.Context(), "CREATE TABLE numbers (n int)")
	require.NoError(t, err)
	child := inserting.Start(t, args{Text: pool.Config().ConnString()})
	child.Await(t, func(f fact) bool { return f.I == 20 })
	child.Kill(t)
	facts := child.Facts()
	var n int
	require.NoError(t, pool.QueryRow(t.Context(), "SELECT count(*) FROM numbers").Scan(&n))
	require.Contains(t, []int{len(facts), len(facts) + 1}, n, "at most one insert was not told")
}

func TestChild_ConcurrentFactsAreWhole(t *testing.T) {
	t.Parallel()
	child := crowd.Start(t, args{N: 50})
	require.NoError(t, child.Wait(t))
	require.Len(t, child.Facts(), 50)
}

func TestChild_StopAndContinue(t *testing.T) {
	t.Parallel()
	child := counter.Start(t, args{})
	child.Await(t, func(f fact) bool { return f.I == 10 })
	child.Stop(t)
	// What it told before is in the pipe; then nothing comes any more.
	before := -1
	require.Eventually(t, func() bool {
		last := before
		before = len(child.Facts())
		return before == last
	}, 10*time.Second, 50*time.Millisecond)
	child.Continue(t)
	child.Await(t, func(f fact) bool { return f.I > before })
	child.Stop(t)
	child.Kill(t) // also a stopped one
	require.ErrorIs(t, child.Wait(t), ErrKilled)
}

func TestChild_EnvironmentAndStopByItself(t *testing.T) {
	t.Parallel()
	child := environment.Start(t, args{Text: "CHILDTEST_X"}, "CHILDTEST_X=seven")
	require.Equal(t, "seven", child.Await(t, func(fact) bool { return true }).Text)
	child.AwaitStopped(t)
	require.Len(t, child.Facts(), 1)
	child.Continue(t)
	require.NoError(t, child.Wait(t))
	require.Len(t, child.Facts(), 2)
}

func TestChild_DiesWithItsParent(t *testing.T) {
	t.Parallel()
	child := parent.Start(t, args{})
	grandchild := child.Await(t, func(fact) bool { return true }).I
	require.NoError(t, syscall.Kill(grandchild, 0))
	child.Kill(t)
	require.Eventually(t, func() bool { return gone(grandchild) }, 10*time.Second, 5*time.Millisecond)
}

// gone reports whether a process is dead; nobody may have waited for it yet.
func gone(pid int) bool {
	if errors.Is(syscall.Kill(pid, 0), syscall.ESRCH) {
		return true
	}
	stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	return err != nil || strings.Contains(string(stat), ") Z ")
}

func TestEntry_UnknownAndTwice(t *testing.T) {
	t.Parallel()
	require.PanicsWithValue(t, `childtest: an entry needs a name of its own, not "count"`, func() {
		Register("count", func(context.Context, args, func(fact)) error { return nil })
	})
	child := Entry[args, fact]{name: "nobody"}.Start(t, args{})
	require.ErrorContains(t, child.Wait(t), `no entry is called "nobody"`)
}

// failures is a testing.TB that keeps what Fatalf and Errorf are told.
type failures struct {
	testing.TB
	texts []string
}

func (f *failures) Errorf(format string, args ...any) {
	f.texts = append(f.texts, fmt.Sprintf(format, args...))
}

func (f *failures) Fatalf(format string, args ...any) {
	f.Errorf(format, args...)
	panic(f)
}

func TestProcess_FailsTheTestThatAwaitsInVain(t *testing.T) {
	t.Parallel()
	child := counter.Start(t, args{N: 3})
	told := &failures{TB: t}
	require.Panics(t, func() { child.Await(told, func(f fact) bool { return f.I == 4 }) })
	require.Panics(t, func() { child.AwaitStopped(told) })
	require.Len(t, told.texts, 2)
	require.Contains(t, told.texts[0], "count ended without telling it")
}

var racing = Register("race", func(context.Context, args, func(fact)) error {
	fmt.Fprintln(os.Stderr, "WARNING: DATA RACE")
	return nil
})

func TestProcess_ARaceInTheChildFailsTheTest(t *testing.T) {
	t.Parallel()
	child, err := start[fact](t.Context(), racing.name, args{}, nil)
	require.NoError(t, err)
	require.NoError(t, child.Wait(t))
	told := &failures{TB: t}
	child.cleanUp(told)
	require.Equal(t, []string{"childtest: race: a data race"}, told.texts)
}
