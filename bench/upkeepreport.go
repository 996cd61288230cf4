package main

import "fmt"

// print writes the tables.
func (r *upkeepResult) print(text, line func(string, ...any)) {
	if r.Stale > 0 {
		text("\nupkeep: %d stale records among a million, the %d oldest of them for a person, two replicas: %.1f s (rescued %d and %d, audit rows %d)",
			r.Stale, staleUnfit, r.StaleSeconds, r.Rescued[0], r.Rescued[1], r.RescuedRows)
	}
	if r.PurgeRows > 0 {
		r.printPurge(text, line)
	}
	if len(r.Plans) > 0 {
		r.printPass(text, line)
	}
}

func (r *upkeepResult) printPurge(text, line func(string, ...any)) {
	text("\nupkeep: %d orders a second, without and with a purge of %d records at %.0f a second", loadRate, r.PurgeRows, r.PurgePerS)
	line("\torders/s\tp50 ms\tp99 ms\t")
	for i, name := range []string{"without", "with"} {
		line("%s\t%d\t%.2f\t%.2f\t", name, r.LoadRate[i], r.LoadP50[i], r.LoadP99[i])
	}
}

func (r *upkeepResult) printPass(text, line func(string, ...any)) {
	text("\nupkeep: a pass with %d stale and %d expired records, in a table of %d and of %d: %.0f and %.0f ms",
		passRows, passRows, passSmall, passBig, r.PassMS[0], r.PassMS[1])
	line("statement\tcarried by\tpages small\tpages big\t")
	for _, p := range r.Plans {
		line("%s\t%s\t%d\t%d\t", p.Name, p.Carrier, p.Pages[0], p.Pages[1])
	}
}

// targets are what was promised of it.
func (r *upkeepResult) targets() (all []target) {
	add := func(name string, want, got float64, note string) {
		all = append(all, target{Name: name, Want: want, Got: got, Passed: got >= want, Spread: note})
	}
	if r.Stale > 0 {
		add("stale records: 60 s / their time", 1, staleLimit/max(r.StaleSeconds, 1e-9), "")
		add("stale records: rescued once each", staleFit, float64(r.RescuedRows), "")
		if r.Rescued[0]+r.Rescued[1] != r.RescuedRows {
			all[len(all)-1].Passed = false
		}
	}
	if r.PurgeRows > 0 {
		add("purge: rows a second under load", purgeRate, r.PurgePerS, "")
		add(fmt.Sprintf("purge: %.0f times the p99 without / with", loadAllowed), 1, loadAllowed*r.LoadP99[0]/max(r.LoadP99[1], 1e-9), "")
	}
	if len(r.Plans) > 0 {
		add("a pass: twice the small table's / the big one's", 1, passAllowed*r.PassMS[0]/max(r.PassMS[1], 1e-9), "")
	}
	return all
}
