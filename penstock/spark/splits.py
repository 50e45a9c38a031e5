"""Splits: ranges of offsets divided over the tasks of a query, and a limit shared by queues. Nothing else.

Rules that always hold:
  * Pieces cover the ranges exactly, in order, each offset once.
  * No piece is larger than `PIECE_MAX`. There are at least `min_partitions` tasks, or one for each message.
    By how many bytes they are cut is decided before (`cuts.py`).
  * Small ranges are put together, because a task costs more than reading a few thousand messages does.
"""

import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Final, NamedTuple

PIECE_MAX: Final = 500_000
"""Messages of one task: about a second of reading, so that the cores of a cluster have something to share."""

GROUP_MAX: Final = 50_000
"""Messages up to which ranges of several queues share a task, if these are not too many bytes."""


class Range(NamedTuple):
    """A part of a queue; the end is exclusive."""

    queue: str
    start: int
    end: int
    identity: str = ""  # of the queue; empty: whatever has its name
    bytes: int = 0  # of its payloads, about; 0 where nobody has looked

    @property
    def size(self) -> int:
        return self.end - self.start


def split(
    ranges: Sequence[Range], min_partitions: int | None = None, bytes_max: int = sys.maxsize
) -> list[tuple[Range, ...]]:
    """What each task reads. Empty ranges vanish."""
    total = sum(whole.size for whole in ranges)
    wanted = min(min_partitions or 1, total)
    pieces: list[Range] = []
    for whole in ranges:
        if whole.size > 0:
            pieces += _cut(whole, max(-(-whole.size // PIECE_MAX), -(-wanted * whole.size // total)))
    tasks = _grouped(pieces, min(GROUP_MAX, total // max(wanted, 1)), bytes_max)
    return tasks if len(tasks) >= wanted else [(piece,) for piece in pieces]


def _cut(whole: Range, count: int) -> Iterator[Range]:
    """So many pieces of a range, of sizes that differ by one at most."""
    for number in range(count):
        start = whole.start + whole.size * number // count
        end = whole.start + whole.size * (number + 1) // count
        yield whole._replace(start=start, end=end, bytes=whole.bytes // count)


def _grouped(pieces: Sequence[Range], size_max: int, bytes_max: int) -> list[tuple[Range, ...]]:
    """Neighbours put together while they are not more than that."""
    tasks: list[tuple[Range, ...]] = []
    group: list[Range] = []
    size = payload_bytes = 0
    for piece in pieces:
        if group and (size + piece.size > size_max or payload_bytes + piece.bytes > bytes_max):
            tasks.append(tuple(group))
            group, size, payload_bytes = [], 0, 0
        group.append(piece)
        size += piece.size
        payload_bytes += piece.bytes
    if group:
        tasks.append(tuple(group))
    return tasks


def shares(backlogs: Mapping[str, int], limit: int) -> dict[str, int]:
    """A limit divided over queues in proportion to what waits in each, and at least 1 for each that has some.

    Together they are the limit, unless less is waiting, or there are more queues than that.
    """
    waiting = {queue: backlog for queue, backlog in backlogs.items() if backlog > 0}
    total = sum(waiting.values())
    if total <= limit:
        return waiting
    given = {queue: max(backlog * limit // total, 1) for queue, backlog in waiting.items()}
    # Rounding leaves a few over, or gives a few too many: those with the largest shares settle it.
    over = limit - sum(given.values())
    for queue in sorted(given, key=lambda queue: -given[queue]):
        change = max(min(over, waiting[queue] - given[queue]), 1 - given[queue])
        given[queue] += change
        over -= change
        if not over:
            break
    return given
