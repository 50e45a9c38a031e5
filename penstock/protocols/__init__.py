"""Bytes in, events out: the three wire protocols, with no IO, no clock and no task."""
