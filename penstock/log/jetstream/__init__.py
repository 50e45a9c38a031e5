"""NATS JetStream: many brokers, one replicated store."""
