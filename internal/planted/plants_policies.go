package main

// policyPlants are the bugs of policies.
var policyPlants = []plant{
	{
		name: "enforce does not ask what off let through",
		why:  "a late retry does again what was done while the kill switch was on",
		edits: []edit{{
			file: "txn/policy.go",
			old:  `if v == idempotency.VerdictRun && c.endedFence == 0 && c.guarded() {`,
			new:  `if false {`,
		}},
		caught: suite{pkg: "./txn", run: "^(TestPolicy_EnforceKnowsWhatOffLetThrough|TestPolicy_EnforceKnowsOfThoseThatAreLate|TestPolicy_RaceOfSwitchesAndCalls)$"},
	},
	{
		name:   "lost COMMIT without a record is not looked for",
		why:    "what was executed while the kill switch was on is executed again by the same call",
		edits:  []edit{{file: "txn/tries.go", old: `if err == nil && !found && c.without {`, new: `if false {`}},
		caught: suite{pkg: "./txn", run: "^(TestPolicy_LostCommitWithoutARecord|TestPolicy_LostCommitOfManyWithoutRecords)$"},
	},
	{
		name: "a policy of a newer release switches off",
		why:  "an older process leaves an operation without protection because it cannot read its row",
		edits: []edit{{
			file: "idempotency/policy.go",
			old:  `p.Enforcement, p.Percentage = EnforcementEnforce, 100`,
			new:  `p.Enforcement, p.Percentage = EnforcementOff, 100`,
		}},
		caught: suite{pkg: "./idempotency", run: "^TestPolicies_WhatIsNotKnownIsEnforced$"},
	},
	{
		name:   "the kill switch switches leases off",
		why:    "a payment is asked for twice, and no rollback takes that back",
		edits:  []edit{{file: "txn/lease.go", old: "\tc.enforceLease(ctx)\n", new: ""}},
		caught: suite{pkg: "./txn", run: "^TestPolicy_LeasedCallsAreAlwaysEnforced$"},
	},
}

func init() { plants = append(plants, policyPlants...) }
