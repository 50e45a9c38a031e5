"""Repairs: dead letters that go back into their queue with another payload.

A message keeps its offset, id, attributes and history; what a consumer gets is another payload. Blocks
never change. So the new payloads are stored as the messages of a second queue, the *repair queue* of the
first, which has its name behind a character that no other queue's name can have. It has no consumers and is
in no list of queues. Everything that keeps messages safe keeps these: checksums, recovery, snapshots,
compacting.

    orders      offset 7, dead ── repaired ──► offset 7, ready, behind the tail
                                                 │ repairs: 7 is at -4
    \\0orders    offset 3, the new payload ◄────────┘

Which message has its payload where is a `RangeMap` from offset to distance. It is written down with the rows
that redrive the letters, in the same transaction as the payloads: their block has FLAG_REPAIRED, and says
where the payload of its first message is; the others follow in the order of its rows.

Rules that always hold:
  * A payload in a repair queue lives as long as its message. It is let go of in a block behind the one that
    ends the message, so that no crash leaves a message without its payload. What a crash leaves over is let
    go of at the next opening.
  * The log shows what was sent: reading an offset gives the first payload, for ever. Deliveries, and views of
    how messages stand now, have the last one.

How it fails: a payload that cannot be read makes its message one that cannot be read.
"""

from array import array
from collections.abc import Iterator, Sequence
from typing import Final

from penstock.log.block import Messages, with_header
from penstock.model.batch import Batch
from penstock.model.policy import QueuePolicy
from penstock.model.ranges import RangeMap

MARK: Final = "\0"
STAGE_QUEUE: Final = MARK
"""Where the rows of stages are, see `stages.py`."""

LAST_NAME: Final = MARK * 3
"""Of an empty queue in the place of one that was deleted, so that the highest number is not given again."""

REPAIR_QUEUE_POLICY: Final = QueuePolicy(retention_seconds=0)
"""A payload that was let go of is of no use to anybody."""


def repair_queue_of(queue: str) -> str:
    """The name of the queue that has the repaired payloads of a queue."""
    return MARK + queue


def is_repair_queue(name: str) -> bool:
    return name.startswith(MARK)


def shown(names: Sequence[str]) -> list[str]:
    """Without the repair queues."""
    return [name for name in names if not name.startswith(MARK)]


def runs_of(offsets: "array[int]") -> Iterator[tuple[int, int, int]]:
    """Neighbours that follow each other, as (row of the first, first offset, end)."""
    row, count = 0, len(offsets)
    while row < count:
        first = offsets[row]
        stop = row + 1
        while stop < count and offsets[stop] == first + stop - row:
            stop += 1
        yield row, first, first + stop - row
        row = stop


def cut_batch(batch: Batch, rows: Sequence[tuple[int, int]]) -> Batch:
    """Some rows of a batch, as messages."""
    if sum(end - first for first, end in rows) == len(batch):
        return Batch(batch.payload, batch.bounds, protocol=batch.protocol)
    bounds = array("i", [0])
    pieces = []
    for first, end in rows:
        start = batch.bounds[first]
        pieces.append(batch.payload[start : batch.bounds[end]])
        moved = bounds[-1] - start
        bounds.extend([bound + moved for bound in batch.bounds[first + 1 : end + 1]])
    return Batch(b"".join(pieces), bounds, protocol=batch.protocol)


def with_payload(block: Messages, payloads: Messages, first: int, end: int, distance: int) -> Messages:
    """The messages from `first` to `end` of a block, with payloads out of one block of the repair queue."""
    header = block.header.copy()
    lo, hi = first - header.first_offset, end - header.first_offset
    header.first_offset, header.count = first, end - first
    start = first + distance - payloads.header.first_offset
    return Messages(
        header,
        payloads.bounds[start : start + end - first + 1],
        payloads.payload,
        block.expires[lo:hi] if block.expires is not None else None,
        block.retries[lo:hi] if block.retries is not None else None,
        block.reply[lo:hi] if block.reply is not None else None,
        block.due[lo:hi] if block.due is not None else None,
        block.headers[lo:hi] if block.headers is not None else None,
    )


def up_to(block: Messages, end: int) -> Messages:
    """The messages of a block before an offset."""
    header = block.header.copy()
    header.count = end - header.first_offset
    return with_header(header, block)


def left_over(repairs: RangeMap[int], living: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """What lives in a repair queue and belongs to no message; `living` is in order."""
    used = sorted((a + distance, b + distance) for a, b, distance in repairs)
    found: list[tuple[int, int]] = []
    at = 0
    for first, end in living:
        while at < len(used) and used[at][1] <= first:
            at += 1
        row = at
        while row < len(used) and used[row][0] < end:
            if first < used[row][0]:
                found.append((first, used[row][0]))
            first = max(first, used[row][1])
            row += 1
        if first < end:
            found.append((first, end))
    return found
