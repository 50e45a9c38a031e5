"""Scrubbing: sealed segments are read again now and then, so that rot is found before somebody needs them.

They are never changed: retention removes them, or puts a compacted one in their place under another name. So
what is read is whole, and a name that has gone meanwhile is nothing to look at. The checks are those of
`inspect.py` that a segment alone can fail. What is not valid is read once more, from the disk and not from
memory, before it is told: a cable that errs once is no rot.
"""

from collections.abc import Iterator
from itertools import pairwise
from typing import NamedTuple

from penstock.log.disk import RealDisk
from penstock.log.read_view import newest_generations
from penstock.log.scan import CHUNK_BYTES, Hole, is_blank, walk
from penstock.log.segment import segment_name


class Sealed(NamedTuple):
    name: str
    base: int
    next_base: int | None  # None: it is compacted, and ends where its file ends


def sealed_segments(disk: RealDisk) -> list[Sealed]:
    """All but the last, which is being written."""
    found = sorted(newest_generations(disk.names()).items())
    return [
        Sealed(segment_name(base, generation), base, None if generation else next_base)
        for (base, generation), (next_base, _) in pairwise(found)
    ]


def scrub(disk: RealDisk, segment: Sealed) -> Iterator[int | Hole]:
    """Read a segment: how many bytes it were since the last time, and whatever is rotten."""
    base = segment.base
    try:
        file = disk.open(segment.name)
    except FileNotFoundError:
        return
    try:
        file.forget_cached()
        end = base + file.size()
        end = min(end, segment.next_base or end)
        told = base
        for found in walk(file, base, base, end):
            at = found.end if isinstance(found, Hole) else found[0].end
            # Room that was never used is at the end.
            if isinstance(found, Hole) and not (at == end and is_blank(file, base, found)):
                file.forget_cached()
                again = next(walk(file, base, found.start, end), None)
                if isinstance(again, Hole) and again[:2] == found[:2]:
                    yield found
            if at - told >= CHUNK_BYTES or at == end:
                yield at - told
                told = at
        file.forget_cached()
    finally:
        file.close()
