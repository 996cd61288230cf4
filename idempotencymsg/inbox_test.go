package idempotencymsg_test

import (
	"errors"
	"fmt"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/pgonce/pgonce/idempotency"
	"github.com/pgonce/pgonce/idempotencymsg"
)

func verdicts(results []idempotencymsg.Result) (all []idempotencymsg.Verdict) {
	for _, r := range results {
		all = append(all, r.Verdict)
	}
	return all
}

func TestInbox_DuplicatesAreAcknowledgedWithoutRunning(t *testing.T) {
	t.Parallel()
	p := newPost(t, idempotencymsg.Config{})
	first := p.inbox.Handle(t.Context(), message("m1", ""))
	require.NoError(t, first.Err)
	require.Equal(t, idempotencymsg.Handled, first.Verdict)
	require.True(t, first.Ack())
	again := p.inbox.Handle(t.Context(), message("m1", ""))
	require.Equal(t, idempotencymsg.Result{Verdict: idempotencymsg.Duplicate, Reply: []byte("sent m1")}, again)
	batch := p.inbox.HandleBatch(t.Context(), []idempotencymsg.Message{message("m1", ""), message("m2", ""), message("m2", "")})
	require.Equal(t, []idempotencymsg.Verdict{idempotencymsg.Duplicate, idempotencymsg.Handled, idempotencymsg.Duplicate}, verdicts(batch))
	require.Equal(t, []byte("sent m2"), batch[2].Reply)
	require.Equal(t, 2, p.count(t, `SELECT count(*) FROM effects`))
	require.Equal(t, 2, p.count(t, `SELECT count(*) FROM idempotency.records WHERE expires_at IS NULL`), "kept for ever")
}

// One tenant's message is not another's, and neither is another handler's.
func TestInbox_TenantAndOperationArePartOfTheKey(t *testing.T) {
	t.Parallel()
	p := newPost(t, idempotencymsg.Config{})
	other := message("m1", "")
	other.Tenant = "other"
	results := p.inbox.HandleBatch(t.Context(), []idempotencymsg.Message{message("m1", ""), other})
	require.Equal(t, []idempotencymsg.Verdict{idempotencymsg.Handled, idempotencymsg.Handled}, verdicts(results))
	require.Equal(t, 2, p.effects(t, "m1"))
}

func TestInbox_APoisonMessageDoesNotBlockTheOthers(t *testing.T) {
	t.Parallel()
	for _, buried := range []bool{false, true} {
		t.Run(fmt.Sprintf("dead letters %v", buried), func(t *testing.T) {
			t.Parallel()
			cfg := idempotencymsg.Config{}
			poisoned := idempotencymsg.Poisoned
			if buried {
				cfg.DeadLetter, poisoned = bury, idempotencymsg.DeadLettered
			}
			p := newPost(t, cfg)
			broken := message("broken", "")
			broken.Payload = []byte(`{"text":`)
			nameless := message(strings.Repeat("x", 300), "")
			batch := []idempotencymsg.Message{
				message("a", ""), message("error", "error"), message("sql", "sql"), message("panic", "panic"), broken,
				message("poison", "poison"), message("final", "final"), nameless, message("b", ""),
			}
			results := p.inbox.HandleBatch(t.Context(), batch)
			require.Equal(t, []idempotencymsg.Verdict{
				idempotencymsg.Handled, idempotencymsg.Retry, idempotencymsg.Retry, idempotencymsg.Retry, poisoned,
				poisoned, idempotencymsg.Failed, poisoned, idempotencymsg.Handled,
			}, verdicts(results))
			require.ErrorIs(t, results[1].Err, errRefused)
			var panicked *idempotencymsg.PanicError
			require.ErrorAs(t, results[3].Err, &panicked)
			require.Equal(t, "no stamp", panicked.Value)
			require.Contains(t, string(panicked.Stack), "idempotencymsg_test.write")
			require.ErrorContains(t, results[4].Err, "decode letter")
			require.ErrorIs(t, results[6].Err, idempotency.ErrFailed)
			require.ErrorIs(t, results[7].Err, idempotency.ErrInvalid)
			require.Equal(t, 2, p.count(t, `SELECT count(*) FROM effects`), "only of those that were handled")

			again := p.inbox.HandleBatch(t.Context(), batch)
			require.Equal(t, []idempotencymsg.Verdict{
				idempotencymsg.Duplicate, idempotencymsg.Retry, idempotencymsg.Retry, idempotencymsg.Retry, poisoned,
				poisoned, idempotencymsg.Failed, poisoned, idempotencymsg.Duplicate,
			}, verdicts(again))
			require.Equal(t, map[bool]int{true: 3}[buried], p.count(t, `SELECT count(*) FROM dead_letters`), "once each")

			// Alone each comes to the same.
			for i, m := range batch {
				require.Equal(t, again[i].Verdict, p.inbox.Handle(t.Context(), m).Verdict, m.ID)
			}
			require.Equal(t, 2, p.count(t, `SELECT count(*) FROM effects`))
		})
	}
}

func TestInbox_GivesUpAfterMaxDeliveries(t *testing.T) {
	t.Parallel()
	p := newPost(t, idempotencymsg.Config{DeadLetter: bury, MaxDeliveries: 3})
	for delivery := 1; delivery <= 4; delivery++ {
		m := message("m", "error")
		m.Deliveries = delivery
		res := p.inbox.HandleBatch(t.Context(), []idempotencymsg.Message{m, message(fmt.Sprint(delivery), "")})
		want := idempotencymsg.DeadLettered
		if delivery < 3 {
			want = idempotencymsg.Retry
		}
		require.Equal(t, []idempotencymsg.Verdict{want, idempotencymsg.Handled}, verdicts(res), "delivery %d", delivery)
		if delivery <= 3 {
			require.ErrorIs(t, res[0].Err, errRefused)
		}
	}
	require.Equal(t, 1, p.count(t, `SELECT count(*) FROM dead_letters WHERE id = 'm'`))
	require.Zero(t, p.effects(t, "m"))
}

func TestInbox_ADeadLetterThatFailsLeavesTheMessage(t *testing.T) {
	t.Parallel()
	full := errors.New("no more graves")
	p := newPost(t, idempotencymsg.Config{DeadLetter: failing(full)})
	res := p.inbox.Handle(t.Context(), message("m", "poison"))
	require.Equal(t, idempotencymsg.Retry, res.Verdict)
	require.ErrorIs(t, res.Err, full)
	require.ErrorIs(t, res.Err, errRefused)
	require.Zero(t, p.count(t, `SELECT count(*) FROM idempotency.records`))
}

func TestInbox_AnotherPayloadUnderTheSameNameIsToldClearly(t *testing.T) {
	t.Parallel()
	p := newPost(t, idempotencymsg.Config{})
	require.True(t, p.inbox.Handle(t.Context(), message("m", "")).Ack())
	other := message("m", "")
	other.Payload = []byte(`{"text":"another"}`)
	res := p.inbox.Handle(t.Context(), other)
	require.Equal(t, idempotencymsg.Poisoned, res.Verdict)
	require.False(t, res.Ack())
	require.ErrorIs(t, res.Err, idempotency.ErrMismatch)
	require.Equal(t, 1, p.effects(t, "m"))

	buries := newPost(t, idempotencymsg.Config{DeadLetter: bury})
	require.True(t, buries.inbox.Handle(t.Context(), message("m", "")).Ack())
	for range 2 {
		require.Equal(t, idempotencymsg.DeadLettered, buries.inbox.Handle(t.Context(), other).Verdict)
	}
	require.Equal(t, 1, buries.count(t, `SELECT count(*) FROM dead_letters`))
	require.Equal(t, idempotencymsg.Duplicate, buries.inbox.Handle(t.Context(), message("m", "")).Verdict, "the first keeps its name")
}

func TestInbox_MoreThanOneTransactionTakes(t *testing.T) {
	t.Parallel()
	p := newPost(t, idempotencymsg.Config{})
	all := make([]idempotencymsg.Message, 1100)
	for i := range all {
		all[i] = message(fmt.Sprintf("m%d", i%1050), "")
	}
	results := p.inbox.HandleBatch(t.Context(), all)
	require.Len(t, results, len(all))
	for i, r := range results {
		require.True(t, r.Ack())
		require.Equal(t, fmt.Sprintf("sent m%d", i%1050), string(r.Reply))
	}
	require.Equal(t, 1050, p.count(t, `SELECT count(*) FROM effects`))
	require.Empty(t, p.inbox.HandleBatch(t.Context(), nil))
}

func TestNew_NamesFieldAndRule(t *testing.T) {
	t.Parallel()
	p := newPost(t, idempotencymsg.Config{})
	for want, cfg := range map[string]*idempotencymsg.Config{
		"Config.Operation must be set":       nil,
		"Operation.Name":                     {},
		"Config.MaxDeliveries":               {Operation: mail, MaxDeliveries: -1},
		"Config.DeadLetter must be set with": {Operation: mail, MaxDeliveries: 3},
		"Config.Operation must not be CACHE": {Operation: idempotency.Operation{Name: "o", Strategy: idempotency.StrategyCache}},
	} {
		_, err := idempotencymsg.New(p.runner, cfg)
		require.ErrorIs(t, err, idempotency.ErrConfig, want)
		require.ErrorContains(t, err, want)
	}
	_, err := idempotencymsg.New(nil, &idempotencymsg.Config{Operation: mail})
	require.ErrorIs(t, err, idempotency.ErrConfig)
	bare, err := idempotencymsg.New(p.runner, &idempotencymsg.Config{Operation: mail})
	require.NoError(t, err)
	require.ErrorIs(t, bare.Handle(t.Context(), message("m", "")).Err, idempotency.ErrConfig)
	require.ErrorIs(t, bare.HandleBatch(t.Context(), []idempotencymsg.Message{message("m", "")})[0].Err, idempotency.ErrConfig)
}
