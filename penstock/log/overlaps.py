"""Overlaps: compacted segments that reach into the positions of the next one.

Earlier versions could compact a segment into a longer one (see `retention.py` for how), and remembered the
blocks that they had read by position alone. So where a block of each segment begins at the same position, a
consumer may have been given the payload of the one for a message of the other. The files are right, and
this version keeps the segments apart. What was handed out before nobody can tell any more: the messages of
such pairs are in doubt.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from penstock.log.block import KIND_MESSAGES, Header
from penstock.log.disk import Disk
from penstock.log.scan import find_headers
from penstock.log.segment import Segment, merged

Doubts = dict[int, list[tuple[int, int]]]  # by queue: offsets, in order


class Overlap(NamedTuple):
    """A segment that is longer than it should be, and the messages that this puts in doubt."""

    segment: Segment
    next_base: int
    doubts: Doubts


def find_overlaps(disk: Disk, segments: Sequence[Segment]) -> Iterator[Overlap]:
    """Those among the segments of a log, which are in order."""
    for at, segment in enumerate(segments[:-1]):
        next_base = segments[at + 1].base
        if not segment.generation or segment.end <= next_base:
            continue
        blocks = {header.position: header for header in _messages(disk, segment, next_base, segment.end)}
        doubts: Doubts = {}
        for later in segments[at + 1 :]:
            if later.base >= segment.end:
                break
            for header in _messages(disk, later, later.base, segment.end):
                if header.position in blocks:
                    for either in (blocks[header.position], header):
                        doubts.setdefault(either.queue, []).append((either.first_offset, either.offset_end))
        yield Overlap(segment, next_base, {queue: merged(runs) for queue, runs in doubts.items()})


def _messages(disk: Disk, segment: Segment, start: int, end: int) -> list[Header]:
    """The message blocks of a segment that begin between two log positions."""
    file = disk.open(segment.name)
    try:
        headers = find_headers(file, segment.base, segment.base, segment.base + file.size())
        found = []
        for header in headers:
            if header.position >= end:
                break
            if header.position >= start and header.kind == KIND_MESSAGES:
                found.append(header)
        return found
    finally:
        file.close()
