"""Idempotency: a request that is repeated with its key stores nothing again.

A body with an Idempotency-Key is one transaction of the log, whose key is made of the queue and the
caller's. The log takes a key once; to a repetition it says what it stored then. Here that is compared
with what the repetition brings, in the log itself, so that nothing more than a key must be remembered.

Rules that always hold:
  * Of two requests with the same key, also at the same moment, one stores; both are answered after its sync.
  * The same key for another queue is another key, and no name and no key can be written so that they pass
    for others: the length of the name stands before it.
  * What retention has removed, or the disk has damaged, cannot be compared, and counts as the same.

The log remembers the last 10,000 of these keys, of all queues together, across restarts.

How it fails: the problem `key-reused`, where the messages, or what they have beside their values, are others.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import Final, TypeVar

from penstock.http.kinds import Text
from penstock.http.problems import Problem
from penstock.http.reading.pool import ReaderPool
from penstock.http.route import Param
from penstock.log.errors import LogDamaged
from penstock.log.read_block import Block
from penstock.log.reader import LogReader, OffsetsMissing
from penstock.model.batch import RETRIES_NONE, Batch
from penstock.model.timers import SECOND_US

HEADER: Final = "Idempotency-Key"
KEY: Final = Param(
    HEADER,
    Text("1 to 200 printable ASCII characters", 200, "[!-~]([ -~]*[!-~])?"),
    "makes a repetition safe: the same key again stores nothing, and is answered as the first time",
    "header",
)

T = TypeVar("T")


def transaction_key(queue: str, key: str) -> str:
    """The log's key for a caller's; for none, the one that is not remembered."""
    return f"http/{len(queue)}/{queue}/{key}" if key else ""


async def check_same(readers: ReaderPool, queue: str, first: int, end: int, batch: Batch) -> None:
    """Whether these offsets hold the messages of a batch; a Problem where they are others."""
    if end - first != len(batch) or not await readers.run(_is_same, queue, first, end, batch):
        raise Problem(
            "key-reused",
            f"queue {queue!r}: this {HEADER} was used for other messages (offsets {first} to {end - 1}); "
            f"use a new key for what is new",
        )


def _is_same(reader: LogReader, queue: str, first: int, end: int, batch: Batch) -> bool:
    try:
        return all(
            _is_same_block(block, batch, block.header.first_offset + block.lo - first)
            for block in reader.messages(queue, first, end)
        )
    except (OffsetsMissing, LogDamaged):
        return True  # as far as it is still there


def _is_same_block(block: Block, batch: Batch, at: int) -> bool:
    """Whether the messages of a block are those of the batch from number `at` on."""
    lo, hi = block.lo, block.hi
    stored, end = block.columns(), at + block.hi - block.lo
    ours = memoryview(batch.payload)[batch.bounds[at] : batch.bounds[end]]
    if stored.payload[stored.bounds[lo] : stored.bounds[hi]] != ours:
        return False
    if _lengths(stored.bounds[lo : hi + 1]) != _lengths(batch.bounds[at : end + 1]):
        return False
    headers = [*map(stored.headers.at, range(lo, hi))] if stored.headers is not None else [b""] * (hi - lo)
    time_us = block.header.time_us
    return (
        _rows(stored.retries, lo, hi, RETRIES_NONE) == _rows(batch.retries, at, end, RETRIES_NONE)
        and headers == _rows(batch.headers, at, end, b"")
        and _rows(stored.expires, lo, hi, 0)
        == [time_us + ttl * SECOND_US if ttl else 0 for ttl in _rows(batch.ttl_seconds, at, end, 0)]
        and _rows(stored.due, lo, hi, 0)
        == [time_us + delay_us if delay_us else 0 for delay_us in _rows(batch.delay_us, at, end, 0)]
    )


def _rows(column: Sequence[T] | None, lo: int, hi: int, absent: T) -> list[T]:
    return [*column[lo:hi]] if column is not None else [absent] * (hi - lo)


def _lengths(bounds: Sequence[int]) -> list[int]:
    return [end - start for start, end in pairwise(bounds)]
