"""A cluster: front-ends that share one log on NATS JetStream."""
