package main

import "strings"

// print writes the tables of what is no cell.
func (b *bigResult) print(text, line func(string, ...any)) {
	const mb = 1 << 20
	text("\nbig: databases (the log took %d MB more; shared_buffers %s)", b.WALBytes/mb, b.Buffers)
	line("database\trecords\tfilled in s\ttable MB\tprimary key MB\tall indexes MB\tdatabase MB\t")
	for _, s := range b.Shops {
		line("%s\t%d\t%.0f\t%d\t%d\t%d\t%d\t", s.Name, s.Records, s.Seconds, s.Table/mb, s.Primary/mb, s.Indexes/mb, s.Disk/mb)
	}
	if len(b.Checkpoints) > 0 {
		text("\nbig: the first %d orders after a checkpoint, %d callers", checkpointOrders, checkpointCallers)
		line("database\tops/s\tx 100k\tWAL B/op\t")
		for _, c := range b.Checkpoints {
			line("%s\t%.0f\t%.2f\t%.0f\t", c.Name, c.OpsPerSec, c.ToSmall.Median, c.WALBytes)
		}
	}
	for _, guide := range []string{auditGuide, remedyGuide} {
		if len(b.Questions) == 0 {
			break
		}
		text("\nbig: questions of %s", strings.TrimPrefix(guide, "../"))
		text("| question | first ms | again ms | pages | carried by |")
		text("|---|---|---|---|---|")
		for _, q := range b.Questions {
			if q.Guide != guide {
				continue
			}
			title := strings.ReplaceAll(q.Title, "|", "\\|")
			if q.SetupS >= 1 {
				text("| %s | %.1f | %.1f | %d | %s, built in %.0f s |", title, q.FirstMS, q.AgainMS, q.Pages, q.Carrier, q.SetupS)
				continue
			}
			text("| %s | %.1f | %.1f | %d | %s |", title, q.FirstMS, q.AgainMS, q.Pages, q.Carrier)
		}
	}
}
