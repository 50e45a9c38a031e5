"""Listing: the files that are a log's whole state at one moment, found by another process while a broker
writes.

Rule that always holds: the list, with the last segment cut at `end`, is what a power cut at that moment could
have left, so that a start makes of it what it makes of any crash. That takes no lock:

  * Names, then the watermark, then the names again: where these have changed meanwhile, all of it is done
    anew. A compacted segment lacks messages that were settled, and it got its name after the record of that
    was synced and told by the watermark: so whoever has seen the name, and then takes the watermark, has the
    record.
  * Bytes before the watermark never change. So the list stays good for as long as its files are there; what
    goes away later is told by its name (`FileNotFoundError`), and a new list has what stands in its place.
"""

import os
from itertools import pairwise
from typing import NamedTuple

from penstock.log.disk import RealDisk, read_watermark
from penstock.log.overlay import TRIES_MAX, LogChanging
from penstock.log.read_view import newest_generations
from penstock.log.segment import segment_name
from penstock.log.snapshot import positions_in, snapshot_name


class Listed(NamedTuple):
    """A file of the log. With when it was written, its name and size tell it from any other of its log."""

    name: str
    bytes: int
    modified_ns: int


class Listing(NamedTuple):
    log: str  # the log's own number, 6 hex digits
    time_us: int  # by the broker's clock
    end: int  # the log position up to which it goes
    files: list[Listed]
    shard: int = 0  # which of a cluster's logs it is
    opening: int = 0  # of the log, in which these files are there


def list_files(path: str) -> tuple[int, list[Listed]]:
    """The log position up to which everything is synced, and the files that have it: snapshots first, they go
    soonest, and segments in order."""
    disk = RealDisk(path, read_only=True)
    for _ in range(TRIES_MAX):
        names = _ours(disk)
        end = max([read_watermark(disk), *positions_in(names)])
        if names != _ours(disk):
            continue
        segments = [(base, it) for base, it in newest_generations(names).items() if base < end]
        files = [(snapshot_name(position), 0) for position in positions_in(names)]
        for (base, generation), (following, _) in pairwise([*segments, (end, 0)]):
            files.append((segment_name(base, generation), 0 if generation else following - base))
        try:
            return end, [_listed(path, *it) for it in files]
        except FileNotFoundError:
            continue
    raise LogChanging(f"data folder {path!r}: its files were replaced {TRIES_MAX} times; try again")


def _ours(disk: RealDisk) -> list[str]:
    return [name for name in disk.names() if name.endswith(".seg") or positions_in([name])]


def _listed(path: str, name: str, bytes_max: int) -> Listed:
    facts = os.stat(os.path.join(path, name))
    return Listed(name, min(bytes_max or facts.st_size, facts.st_size), facts.st_mtime_ns)
