// Package brokers shows the inbox of idempotencymsg on real brokers, NATS JetStream and Redis Streams, with duplicates,
// redeliveries and consumers that are killed. It has tests only, and is a module of its own for the brokers' requirements.
package brokers
