"""Adoption blocks: messages whose columns were stored before they became messages.

What is staged for a transaction is stored at once, as rows of one queue that nobody sees, the *stage queue*.
Its rows have offsets of their own there. When the transaction is committed, no payload is moved: each queue
gets a message block whose header says what every header of messages says, and whose body says which rows of
the stage queue these messages are.

    orders   offsets 7 to 11     an adoption block: rows 40 to 42, rows 50 to 51
    stages   rows 40 to 60       two stage blocks: rows 40 to 45, rows 46 to 60

The body has four columns, a run of rows each:

    rows      int64[r]   the first row of the run
    counts    int64[r]   how many rows it has
    bytes     int64[r]   of payload
    expires   int64[r]   earliest expiry of its messages, µs since the epoch; 0: none

Rules that always hold:
  * Rows of a run follow upon each other in the stage queue. They may be in several stage blocks, or in the
    middle of one.
  * A message came when it was committed: time, opening and door are those of the adoption block. A stage
    block's expiries count from the time of that block, and are moved by the time between the two.
"""

from array import array
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import NamedTuple

from penstock.log.block import BodyReader, Buffer, Header, Messages

ADOPTED_BYTES_MAX = 1 << 30
"""Payload bytes that one adoption block may name: its header has 32 bits for them."""


class Run(NamedTuple):
    """Rows of the stage queue that follow upon each other."""

    row: int
    length: int
    payload_bytes: int
    expires_us: int  # the earliest; 0: none


class Adoption:
    """An adoption block, decoded."""

    __slots__ = ("ends", "header", "last", "runs")  # `last`: what was asked for last, as it is read

    def __init__(self, header: Header, runs: Sequence[Run]) -> None:
        self.header = header
        self.runs = runs
        self.ends = array("q", accumulate([run.length for run in runs], initial=header.first_offset))
        self.last: Messages | None = None

    def index_at(self, offset: int) -> int:
        """Which run has an offset, of those that the block has."""
        return bisect_right(self.ends, offset) - 1

    def row_at(self, offset: int) -> tuple[int, int]:
        """The row of an offset, and the end of the rows of its run."""
        index = self.index_at(offset)
        run = self.runs[index]
        return run.row + offset - self.ends[index], run.row + run.length

    def within(self, first: int, end: int) -> Iterator[tuple[int, int, int]]:
        """For the offsets from `first` to `end`: runs of (first offset, first row, end of the rows)."""
        for index in range(max(self.index_at(first), 0), len(self.runs)):
            start, run = self.ends[index], self.runs[index]
            if start >= end:
                return
            skip = max(first - start, 0)
            yield start + skip, run.row + skip, run.row + min(run.length, end - start)


def adoption_parts(runs: Sequence[Run]) -> list[Buffer]:
    """The body of an adoption block."""
    return [memoryview(array("q", [run[at] for run in runs])).cast("B") for at in range(4)]


def read_adoption(header: Header, body: memoryview) -> Adoption:
    """The runs of an adoption block whose checksum has been checked. ValueError where they do not fit."""
    reader = BodyReader(body)
    count = header.body_bytes // 32
    columns = [reader.column(count, "q", 8) for _ in range(4)]
    adoption = Adoption(header, [Run(*run) for run in zip(*columns, strict=True)])
    if adoption.ends[-1] != header.offset_end:
        raise ValueError(f"the runs of an adoption block have {adoption.ends[-1] - header.first_offset} rows")
    return adoption


def adopted_header(header: Header, stage: Header, offset: int, row: int) -> Header:
    """The header of a stage block as that of messages: `row` of the stage queue is `offset` of the adopting
    queue, whose block has `header`."""
    found = stage.copy()
    found.queue, found.opening, found.time_us = header.queue, header.opening, header.time_us
    found.first_offset = offset - (row - stage.first_offset)
    found.first_event = header.first_event + found.first_offset - header.first_offset
    if stage.expires_min_us:
        found.expires_min_us += header.time_us - stage.time_us
    return found


def moved(moments: Sequence[int], by_us: int) -> "array[int]":
    """Moments that count from another one."""
    return array("q", [it + by_us if it > 0 else it for it in moments])


def adopted(adoption: Adoption, stage: Messages, offset: int) -> Messages:
    """The messages of a stage block that are of one run, that of `offset`."""
    index, its = adoption.index_at(offset), stage.header
    run, start = adoption.runs[index], adoption.ends[index]
    lo = max(run.row - its.first_offset, 0)
    hi = min(run.row + run.length, its.offset_end) - its.first_offset
    header = adopted_header(adoption.header, its, start, run.row)
    header.first_offset, header.first_event = header.first_offset + lo, header.first_event + lo
    header.count = header.event_count = hi - lo
    header.protocol = adoption.header.protocol
    later_us = header.time_us - its.time_us
    return Messages(
        header,
        stage.bounds[lo : hi + 1],
        stage.payload,
        moved(stage.expires[lo:hi], later_us) if stage.expires is not None else None,
        stage.retries[lo:hi] if stage.retries is not None else None,
        None,
        moved(stage.due[lo:hi], later_us) if stage.due is not None else None,
        stage.headers[lo:hi] if stage.headers is not None else None,
    )
