package audittest

import (
	"regexp"
	"strings"
)

// Question is a heading of a guide with the SQL below it.
type Question struct {
	Title string
	Setup []string // what the SQL before its last statement does, for example CREATE INDEX
	SQL   string
}

var (
	heading = regexp.MustCompile(`^#{2,3} (\d+\..*)$`)
	ends    = regexp.MustCompile(`;\s*(?:\n|$)`)
)

// Questions reads the numbered headings of a guide and the first SQL below each.
func Questions(markdown string) []Question {
	var all []Question
	var sql *strings.Builder
	title := ""
	for line := range strings.Lines(markdown) {
		text := strings.TrimRight(line, "\r\n")
		match := heading.FindStringSubmatch(text)
		switch {
		case sql != nil && text == "```":
			statements := split(sql.String())
			last := len(statements) - 1
			all = append(all, Question{Title: title, Setup: statements[:last], SQL: statements[last]})
			sql, title = nil, ""
		case sql != nil:
			sql.WriteString(line)
		case match != nil:
			title = match[1]
		case text == "```sql" && title != "":
			sql = &strings.Builder{}
		}
	}
	return all
}

// split takes statements apart: each ends with a semicolon at the end of a line.
func split(sql string) []string {
	var statements []string
	for _, s := range ends.Split(strings.TrimSpace(sql), -1) {
		if s = strings.TrimSpace(s); s != "" {
			statements = append(statements, s)
		}
	}
	return statements
}

// Number is the number the title begins with.
func (q Question) Number() string {
	number, _, _ := strings.Cut(q.Title, ".")
	return number
}
