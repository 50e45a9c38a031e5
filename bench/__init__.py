"""Benchmarks: what Penstock costs on this machine. `make bench` runs them, with Redis beside where it can."""
