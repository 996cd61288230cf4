package idempotency

import (
	"fmt"
	"strings"
	"unicode"
	"unicode/utf8"
)

// Limits of the parts of a key, in bytes of UTF-8, not in characters. The tables have the same limits as CHECKs; together
// the three parts stay far below the 2,704 bytes that an index entry of PostgreSQL holds.
const (
	MaxTenantBytes    = 128
	MaxOperationBytes = 128
	MinKeyBytes       = 1
	MaxKeyBytes       = 255
	MaxClientBytes    = 255
)

// SingleTenant is the tenant of programs that have only one. It is an ordinary value: a program that gets tenants later
// keeps the records it has by giving this one to its first tenant.
const SingleTenant = "-"

// The rules below are the only ones, for Go callers, HTTP headers, message metadata and issued tokens alike: two
// entrances that trim or normalise differently would make two keys of one, or one of two. So values are compared byte
// for byte, and a value that might have meant another one is refused instead of repaired.

func validateTenant(s string) error    { return validateName("tenant", s, MaxTenantBytes) }
func validateOperation(s string) error { return validateName("operation", s, MaxOperationBytes) }
func validateKeyValue(s string) error  { return validateName("key", s, MaxKeyBytes) }

// validateClient allows the empty string: who called is for people who read records, nothing depends on it.
func validateClient(s string) error { return validateText("client", s, MaxClientBytes) }

func validateName(field, s string, limit int) error {
	if s == "" {
		return &InvalidError{Field: field, Rule: "must not be empty"}
	}
	if err := validateText(field, s, limit); err != nil {
		return err
	}
	// A blank name is a missing one that some client filled in; accepted, it would be one name shared by everybody.
	if strings.TrimSpace(s) == "" {
		return &InvalidError{Field: field, Rule: "must not be blank"}
	}
	return nil
}

// validateText names positions, never the text: rules end in logs and in answers to clients.
func validateText(field, s string, limit int) error {
	if len(s) > limit {
		return &InvalidError{Field: field, Rule: fmt.Sprintf("must be at most %d bytes, is %d", limit, len(s))}
	}
	for i, r := range s {
		if r == utf8.RuneError {
			// A real U+FFFD has three bytes; one byte means that the decoder found none.
			if _, size := utf8.DecodeRuneInString(s[i:]); size == 1 {
				return &InvalidError{Field: field, Rule: fmt.Sprintf("must be valid UTF-8, byte %d is not", i)}
			}
		}
		// Category Cc: C0, DEL and C1. PostgreSQL stores no NUL, and the others forge log lines.
		if unicode.IsControl(r) {
			return &InvalidError{Field: field, Rule: fmt.Sprintf("must not contain control characters, byte %d is %U", i, r)}
		}
	}
	return nil
}
