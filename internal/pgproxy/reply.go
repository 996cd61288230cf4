package pgproxy

import (
	"time"
)

// backward carries the server's bytes to the client, message by message.
func (l *link) backward() {
	defer close(l.serverGone)
	var unread, kept []byte // kept: answers that a plan is about
	chunk := make([]byte, 64<<10)
	for {
		n, err := l.server.Read(chunk)
		unread = append(unread, chunk[:n]...)
		var give []byte
		for {
			size, malformed := measure(unread)
			if malformed != nil {
				return
			}
			if size == 0 {
				break
			}
			message := unread[:size]
			unread = unread[size:]
			about := l.planned()
			if about == nil {
				give = append(give, message...)
			} else {
				kept = append(kept, message...)
			}
			if message[0] != 'Z' { // ReadyForQuery ends an answer
				continue
			}
			if ends := l.count(); about != nil && ends == about.last {
				if !l.give(give) || !l.carryOut(about.rule, kept) {
					return
				}
				give, kept = nil, nil
			}
		}
		if !l.give(give) {
			return
		}
		if err != nil {
			l.lost()
			return
		}
	}
}

// planned returns the plan about the answer that is arriving, if there is one.
func (l *link) planned() *plan {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.plan != nil && l.plan.first <= l.answered+1 && l.answered+1 <= l.plan.last {
		return l.plan
	}
	return nil
}

// count counts an answer that is complete.
func (l *link) count() int {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.answered++
	if l.arrived != nil && l.answered == l.awaited {
		close(l.arrived)
	}
	return l.answered
}

// give hands bytes to the client. It returns false when the link is over.
func (l *link) give(b []byte) bool {
	l.mu.Lock()
	detached := l.detached
	l.mu.Unlock()
	if len(b) == 0 || detached {
		return true
	}
	if !l.proxy.passable(l) {
		return false
	}
	if _, err := l.client.Write(b); err != nil {
		// Not the end of the link: to close it now could make the server drop what the client has sent before it went.
		l.mu.Lock()
		defer l.mu.Unlock()
		l.detached = true
		return !l.over()
	}
	return true
}

// carryOut does to the answer of a COMMIT what its rule says.
func (l *link) carryOut(rule Rule, reply []byte) bool {
	switch rule.Do {
	case DelayReply:
		timer := time.NewTimer(rule.Delay)
		defer timer.Stop()
		select {
		case <-timer.C:
		case <-l.done:
			return false
		}
		return l.give(reply)
	case CutInReply:
		l.give(reply[:rule.half(len(reply))])
	}
	l.proxy.cut.Add(1)
	l.cut(rule.Reset)
	return false
}

// lost: the server has closed the connection. If that was its answer to a COMMIT, the rule is carried out all the same.
func (l *link) lost() {
	if about := l.planned(); about != nil && about.rule.Do != DelayReply && !l.over() {
		l.proxy.cut.Add(1)
		l.cut(about.rule.Reset)
	}
}
