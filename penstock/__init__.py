"""Penstock: a durable message broker where a queue and a log are the same thing."""

__version__ = "0.1.0"

__all__ = ["__version__"]
