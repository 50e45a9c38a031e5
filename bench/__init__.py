"""Benchmarks: what Penstock costs on this machine (`make bench`), and its peers (`make bench-peers`)."""
