"""Spans: how long things took, counted by buckets on a log scale, so that any two counts can be added up.

A bucket is a number from 0 to `BUCKETS` - 1. Below 256 µs they are 64 µs wide; above, every doubling has
four of them, so that nothing is told with an error of more than a fifth; the last one has no end (it begins
at five days).

    waiting   from when a message was accepted, or was due, until it is handed out for the first time
    working   from then until its consumer says what becomes of it, whatever that is

`Times` is where the log notes both while somebody wants them, a number for each slice of a block and never
for a message: whoever asks takes them away. What nobody has asked for when the process ends is not known to
anybody.
"""

from collections.abc import Mapping
from typing import Final

UNIT_BITS: Final = 6  # 64 µs
BUCKETS: Final = 128


def bucket_of(us: int) -> int:
    """The bucket of a time; of one that is below 0, by a clock that was set, the first."""
    units = us >> UNIT_BITS
    if units < 4:
        return units if units > 0 else 0
    bits = units.bit_length()
    bucket = (bits - 2) * 4 + ((units >> (bits - 3)) & 3)
    return bucket if bucket < BUCKETS else BUCKETS - 1


def start_us(bucket: int) -> int:
    """The shortest time of a bucket; of the one behind the last, where the last would end."""
    if bucket < 4:
        return bucket << UNIT_BITS
    return (4 + bucket % 4) << (bucket // 4 - 1 + UNIT_BITS)


def quantile_us(counts: Mapping[int, int], part: float) -> float | None:
    """About the time within which that part of all was done; None where there is nothing.

    Within a bucket they are taken to be spread evenly.
    """
    total = sum(counts.values())
    if not total:
        return None
    rank = part * total
    for bucket in sorted(counts):
        count = counts[bucket]
        if rank <= count:
            low = start_us(bucket)
            return low + (start_us(bucket + 1) - low) * rank / count
        rank -= count
    return float(start_us(max(counts) + 1))


def add_up(into: dict[int, int], counts: Mapping[int, int]) -> None:
    """Counts by bucket, added to others."""
    for bucket, count in counts.items():
        into[bucket] = into.get(bucket, 0) + count


Noted = int | dict[int, int]
"""Counts by bucket; of one bucket alone, as it is for most of many queues, as one number: two dicts for each
of ten thousand new queues took 0.4 KB a queue."""


def _note(noted: dict[int, Noted], queue: int, bucket: int, count: int) -> None:
    """So many more in a bucket of a queue."""
    counts = noted.get(queue)
    if counts is None:
        noted[queue] = count * BUCKETS + bucket
    elif not isinstance(counts, int):
        counts[bucket] = counts.get(bucket, 0) + count
    elif counts % BUCKETS == bucket:
        noted[queue] = counts + count * BUCKETS
    else:
        noted[queue] = {counts % BUCKETS: counts // BUCKETS, bucket: count}


def _take(noted: dict[int, Noted], queue: int) -> dict[int, int]:
    counts = noted.pop(queue, None)
    if isinstance(counts, int):
        return {counts % BUCKETS: counts // BUCKETS}
    return counts if counts is not None else {}


class Times:
    """Waiting and working times of queues, by their numbers, since somebody last took them."""

    __slots__ = ("waits", "wanted", "works")

    def __init__(self) -> None:
        self.wanted = False  # somebody will come for them
        self.waits: dict[int, Noted] = {}
        self.works: dict[int, Noted] = {}

    def want(self, wanted: bool) -> None:
        """Begin, or cease, to note them."""
        self.wanted = wanted
        self.waits.clear()
        self.works.clear()

    def wait(self, queue: int, us: int, count: int) -> None:
        """So many messages of a queue have waited so long."""
        _note(self.waits, queue, bucket_of(us), count)

    def work(self, queue: int, us: int, count: int) -> None:
        """So many were with their consumer for so long."""
        _note(self.works, queue, bucket_of(us), count)

    def take(self, queue: int) -> tuple[dict[int, int], dict[int, int]]:
        """What was noted of a queue, which is forgotten here."""
        return _take(self.waits, queue), _take(self.works, queue)
