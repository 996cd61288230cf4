package pgproxy

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"strings"
)

// Codes of the messages that begin a connection; everything later has a type byte.
const (
	codeCancel = 80877102
	codeSSL    = 80877103
	codeGSSENC = 80877104

	maxStartup = 10_000
	maxMessage = 1 << 30
)

var errMalformed = errors.New("pgproxy: malformed message")

// readStartup reads one message without a type byte.
func readStartup(r io.Reader) (message []byte, code uint32, err error) {
	header := make([]byte, 8)
	if _, err := io.ReadFull(r, header); err != nil {
		return nil, 0, err
	}
	size := binary.BigEndian.Uint32(header)
	if size < 8 || size > maxStartup {
		return nil, 0, fmt.Errorf("%w: a startup message of %d bytes", errMalformed, size)
	}
	message = make([]byte, size)
	copy(message, header)
	if _, err := io.ReadFull(r, message[8:]); err != nil {
		return nil, 0, err
	}
	return message, binary.BigEndian.Uint32(header[4:]), nil
}

// measure returns the length of the typed message at the start of b, 0 if it is not complete.
func measure(b []byte) (int, error) {
	if len(b) < 5 {
		return 0, nil
	}
	size := binary.BigEndian.Uint32(b[1:])
	if size < 4 || size > maxMessage {
		return 0, fmt.Errorf("%w: type %q, %d bytes", errMalformed, b[0], size)
	}
	if len(b) < int(size)+1 {
		return 0, nil
	}
	return int(size) + 1, nil
}

// cstring cuts the zero-terminated text off the start of b.
func cstring(b []byte) (text string, rest []byte) {
	before, rest, _ := bytes.Cut(b, []byte{0})
	return string(before), rest
}

// isCommit reports whether a statement is COMMIT and nothing else.
func isCommit(sql string) bool {
	words := strings.Fields(strings.ToUpper(strings.Trim(sql, "; \t\r\n")))
	switch {
	case len(words) == 0 || words[0] != "COMMIT" && words[0] != "END":
		return false
	case len(words) == 1:
		return true
	}
	return len(words) == 2 && (words[1] == "WORK" || words[1] == "TRANSACTION")
}

// statements is what a client has prepared and bound so far, as far as it matters.
type statements struct {
	commits map[string]bool   // statement name -> it is COMMIT
	portals map[string]string // portal name -> statement, of those that are COMMIT
}

// seen is a COMMIT in a flush.
type seen struct {
	Commit
	start   int // its first byte in the flush
	segment int // which of the flush's answers it is in, counted from 1: one ends with each Sync or simple query
}

// read follows the messages of a flush. segments is how many answers the server will end because of them.
func (s *statements) read(flush []byte, ends []int) (commits []seen, segments int) {
	if s.commits == nil {
		s.commits, s.portals = map[string]bool{}, map[string]string{}
	}
	parsed, bound := map[string]int{}, map[string]int{} // where in this flush
	start := 0
	for _, end := range ends {
		body := flush[start+5 : end]
		switch flush[start] {
		case 'Q':
			segments++
			delete(s.commits, "") // a simple query ends the unnamed statement
			if sql, _ := cstring(body); isCommit(sql) {
				commits = append(commits, seen{Commit: Commit{Simple: true}, start: start, segment: segments})
			}
		case 'S', 'F': // Sync, FunctionCall
			segments++
		case 'P': // Parse
			name, rest := cstring(body)
			sql, _ := cstring(rest)
			delete(s.commits, name)
			if isCommit(sql) {
				s.commits[name], parsed[name] = true, start
			}
		case 'B': // Bind
			portal, rest := cstring(body)
			name, _ := cstring(rest)
			delete(s.portals, portal)
			if s.commits[name] {
				s.portals[portal], bound[portal] = name, start
				if at, here := parsed[name]; here {
					bound[portal] = at
				}
			}
		case 'C': // Close
			if name, _ := cstring(body[min(1, len(body)):]); len(body) > 0 && body[0] == 'S' {
				delete(s.commits, name)
			} else {
				delete(s.portals, name)
			}
		case 'E': // Execute
			portal, _ := cstring(body)
			if name, ok := s.portals[portal]; ok {
				at, here := bound[portal]
				if !here {
					at = start
				}
				commits = append(commits, seen{Commit: Commit{Statement: name}, start: at, segment: segments + 1})
			}
		}
		start = end
	}
	return commits, segments
}

// endsFlush reports whether a client that has sent a message of this type may be waiting for an answer.
func endsFlush(kind byte) bool {
	switch kind {
	case 'Q', 'S', 'H', 'F', 'X', 'c', 'f', 'p', 'd': // d: CopyData, which is passed on as it comes
		return true
	}
	return false
}
