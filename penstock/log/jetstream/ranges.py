"""Ranges: messages of a queue, read from the stream by anybody who is told where they are.

A reader that is no broker, such as a task of Spark, has no copy of the log's files. What it needs is a
`Part`: which bytes of which file, and from which record of the stream on they are found. It reads these
records and nothing else, puts the bytes together again, and walks over the blocks in them as every reader of
the log does.

    Part        bytes of one file, which begin and end with a block of the queue, or with one of the stage
                queue, whose rows became messages of it (`log/adoption.py`)
    windows     these bytes, as they come
    blocks      the blocks of one queue in several parts

Rules that always hold:
  * A byte is used only if the checksum of its record holds, a message only if that of its block does, too.
  * A record that is damaged, or that the node which answers does not have, is looked for at the stream's
    leader, and then at any node: one may have it whole.
  * At most about `READ_BYTES`, or one record where that is larger, are held while as much again is on its
    way; and a block that is larger than this, whole.

How it fails: `BytesMissing` where nobody has what was asked for (a file that retention has taken since, or a
damaged record); with `step_over` that is a warning, and what is there behind it follows. `LogDamaged` for a
block that is not what was written, likewise. `JetStreamTrouble` when the cluster does not answer: what came
before is good, and whoever asks goes on behind it.
"""

import logging
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Final, NamedTuple

from penstock.errors import PenstockError
from penstock.log.block import FLAG_ELSEWHERE, HEADER_BYTES, KIND_MESSAGES, MAGIC, Header, read_header
from penstock.log.checksum import crc32
from penstock.log.errors import LogDamaged
from penstock.log.jetstream.api import JetStream
from penstock.log.jetstream.link_thread import LinkThread
from penstock.log.jetstream.records import Kind, Record, RecordDamaged, read_record
from penstock.log.read_block import Block
from penstock.model.ids import origin_of

READ_BYTES: Final = 4 << 20
READ_RECORDS: Final = 500
LOOKS_MAX: Final = 12
"""How often a record that one node does not have whole is looked for at others."""

log = logging.getLogger("penstock.nats")


class BytesMissing(PenstockError):
    """Bytes of a file that were there are not in the stream, or not as they were written."""


class Adopted(NamedTuple):
    """Rows of the stage queue that are messages of the queue, one after the other."""

    offset: int  # of the first
    row: int
    length: int
    opening: int  # of their commit
    time_us: int


class Part(NamedTuple):
    """Bytes of one file that hold messages of a queue; ends are exclusive."""

    file: str
    subject: str
    base: int  # the log position of the file's first byte
    position_start: int  # in the file
    position_end: int
    seq_first: int  # the record that has these bytes is this one or a later one
    offset_start: int  # of the messages
    offset_end: int
    number: int = 0  # of the stage queue, where these are blocks of that
    runs: "Sequence[Adopted]" = ()  # which of its rows are meant, in order


class Source(NamedTuple):
    """Whose messages they are: with it, blocks are told from others and ids are made."""

    stream: str
    log: int
    number: int  # of the queue in that log


# --- bytes -----------------------------------------------------------------------------------------


class _Fetching:
    """Reads the records of one part, in order. Everything here runs on the loop of the link."""

    def __init__(self, api: JetStream, stream: str, part: Part, step_over: bool) -> None:
        self._api = api
        self._stream = stream
        self._part = part
        self._step_over = step_over
        self._seq = part.seq_first  # the next to ask for
        self.at = part.position_start  # the next byte that should come

    def is_done(self) -> bool:
        return self.at >= self._part.position_end

    async def next(self) -> list[tuple[int, memoryview]]:
        """Some more bytes, with their positions."""
        pieces: list[tuple[int, memoryview]] = []
        found = await self._read(READ_RECORDS, min(READ_BYTES, self._part.position_end - self.at))
        if not found and not await self._elsewhere(pieces):
            self._missing(self._part.position_end, f"there is no record {self._seq} or later of this file")
        for seq, payload in found:
            if seq < self._seq:
                continue  # it has been found elsewhere
            record = None
            try:
                record = self._record(payload)
            except RecordDamaged as damage:
                while self._seq <= seq and await self._elsewhere(pieces):
                    log.warning("record %d of %s: one node's copy %s", seq, self._stream, damage)
                if self._seq <= seq:
                    self._damaged(seq, damage)
            if record is not None:
                while record.position > self.at and await self._elsewhere(pieces):
                    pass
                if record.position > self.at:
                    self._missing(record.position, f"the next record that there is of this file is {seq}")
                self._take(pieces, record)
            self._seq = max(self._seq, seq + 1)
            if self.is_done():
                break
        return pieces

    async def _read(self, count: int, bytes_max: int) -> list[tuple[int, bytes]]:
        """The next records, with their numbers, as one of the nodes has them."""
        found = await self._api.read(
            self._stream, self._seq, count, bytes_max=bytes_max, only=self._part.subject
        )
        return [(stored.seq, stored.payload) for stored in found]

    def _record(self, payload: bytes) -> Record | None:
        """A record that says which bytes the file has somewhere; None where it says something else."""
        record = read_record(payload)
        if record.name != self._part.file:
            raise RecordDamaged(f"is one of {record.name}")
        return record if record.kind is not Kind.TRUNCATE else None

    def _take(self, pieces: list[tuple[int, memoryview]], record: Record) -> None:
        end = min(record.end, self._part.position_end)
        if record.position <= self.at < end:
            data = memoryview(record.data)
            pieces.append((self.at, data[self.at - record.position : end - record.position]))
            self.at = end

    async def _elsewhere(self, pieces: list[tuple[int, memoryview]]) -> bool:
        """The next record is damaged or missing at one node. Whether another one has it, and it is taken."""
        stored = await self._api.next_message(self._stream, self._seq, self._part.subject)
        found = [(stored.seq, stored.payload)] if stored is not None else []
        for _ in range(LOOKS_MAX):
            for seq, payload in found:
                with suppress(RecordDamaged):
                    record = self._record(payload)
                    if record is None or record.position <= self.at:
                        if record is not None:
                            self._take(pieces, record)
                        self._seq = seq + 1
                        return True
            # The leader's copy may be the bad one. Which node answers to this is chance.
            found = await self._read(1, 1)
        return False

    def _damaged(self, seq: int, damage: RecordDamaged) -> None:
        text = self._text(f"record {seq} {damage}")
        if not self._step_over:
            raise BytesMissing(text)
        log.warning("%s", text)  # which bytes these were, the next record tells

    def _missing(self, position: int, why: str) -> None:
        text = self._text(f"bytes {self.at} to {position - 1} are missing: {why}")
        if not self._step_over:
            raise BytesMissing(text)
        log.warning("%s", text)
        self.at = position

    def _text(self, what: str) -> str:
        part = self._part
        return (
            f"stream {self._stream}, {part.file}, offsets {part.offset_start} to {part.offset_end - 1} of "
            f"the queue and what is between them: {what}"
        )


def windows(
    nats: LinkThread, stream: str, part: Part, *, step_over: bool = False
) -> Iterator[tuple[int, memoryview]]:
    """The bytes of a part, with their positions in the file."""
    fetching = _Fetching(nats.api, stream, part, step_over)
    coming = nats.start(fetching.next())
    try:
        while True:
            pieces = nats.wait(coming)
            is_done = fetching.is_done()
            if not is_done:
                coming = nats.start(fetching.next())
            yield from pieces
            if is_done:
                return
    finally:
        coming.cancel()


# --- blocks ----------------------------------------------------------------------------------------


def blocks(
    nats: LinkThread,
    source: Source,
    parts: Sequence[Part],
    start: int,
    end: int,
    *,
    step_over: bool = False,
) -> Iterator[Block]:
    """The blocks with the messages from offset `start` to `end`, as far as these parts have them."""
    walker = _Walker(source, start, end, step_over)
    for part in parts:
        if part.offset_end <= start or part.offset_start >= end:
            continue
        walker.begin(part)
        for position, piece in windows(nats, source.stream, part, step_over=step_over):
            yield from walker.walk(position, piece)


class _Walker:
    """Finds blocks in bytes that come piece by piece."""

    def __init__(self, source: Source, start: int, end: int, step_over: bool) -> None:
        self._source = source
        self._start = start
        self._end = end
        self._step_over = step_over
        self._part: Part
        self._runs: list[Adopted] = []  # of that
        self._kept: list[memoryview] = []  # bytes of a block that is not whole yet
        self._kept_bytes = 0
        self._at = 0  # the position of the first of them
        self._needed_bytes = 0

    def begin(self, part: Part) -> None:
        self._part = part
        self._runs = [Adopted(*run) for run in part.runs]
        self._forget(part.position_start)

    def _forget(self, position: int) -> None:
        self._kept = []
        self._kept_bytes = 0
        self._at = position
        self._needed_bytes = HEADER_BYTES

    def walk(self, position: int, piece: memoryview) -> Iterator[Block]:
        """The blocks that are whole with these bytes."""
        if position != self._at + self._kept_bytes:
            self._forget(position)  # there is a hole, and what was before it has no end
        self._kept.append(piece)
        self._kept_bytes += len(piece)
        if self._kept_bytes < self._needed_bytes:
            return
        # A copy, but its columns begin at multiples of 8 again: Arrow wants them there.
        view = memoryview(b"".join(self._kept))
        begin, at = self._at, 0
        self._needed_bytes = HEADER_BYTES
        while at + HEADER_BYTES <= len(view):
            header = read_header(view, at, self._part.base + begin + at)
            if header is None:
                at = self._next_header(view, at + 8, begin)
                continue
            block_end = at + HEADER_BYTES + header.body_bytes
            if block_end > len(view):
                self._needed_bytes = block_end - at
                break
            if header.kind == KIND_MESSAGES and header.queue == (self._part.number or self._source.number):
                yield from self._blocks(header, view[at + HEADER_BYTES : block_end])
            at = block_end
        self._kept = [view[at:]]
        self._kept_bytes = len(view) - at
        self._at = begin + at

    def _next_header(self, view: memoryview, at: int, begin: int) -> int:
        """The next place where there is a valid header; if there is none, the first where one may begin that
        ends in what is still to come."""
        data = view.obj
        assert isinstance(data, bytes)
        behind_last = len(data) - HEADER_BYTES + 1
        at = data.find(MAGIC, at)
        while 0 <= at < behind_last:
            if read_header(view, at, self._part.base + begin + at) is not None:
                return at
            at = data.find(MAGIC, at + 1)
        return behind_last + -(begin + behind_last) % 8

    def _wanted(self, header: Header) -> Iterator[tuple[Header, int, int]]:
        """What was asked for of a block: the header of these messages, the first offset and their end."""
        if not self._part.number:
            first, end = max(self._start, header.first_offset), min(self._end, header.offset_end)
            # A block that only names rows may stand between those of a part: where its rows are lost.
            if first < end and not header.flags & FLAG_ELSEWHERE:
                yield header, first, end
            return
        runs = self._runs
        for at in range(bisect_right(runs, header.first_offset, key=_row_end), len(runs)):
            run = runs[at]
            if run.row >= header.offset_end:
                return
            distance = run.offset - run.row
            first = max(self._start, run.offset, header.first_offset + distance)
            end = min(self._end, run.offset + run.length, header.offset_end + distance)
            if first < end:
                its = header.copy()
                its.queue, its.opening, its.time_us = self._source.number, run.opening, run.time_us
                its.first_offset += distance
                yield its, first, end

    def _blocks(self, header: Header, body: memoryview) -> Iterator[Block]:
        wanted = list(self._wanted(header))
        if wanted and crc32(body) != header.body_checksum:
            text = (
                f"stream {self._source.stream}, {self._part.file}: the block at position "
                f"{header.position - self._part.base} does not have its checksum: offsets "
                f"{wanted[0][1]} to {wanted[-1][2] - 1}"
            )
            if not self._step_over:
                raise LogDamaged(text)
            log.warning("%s", text)
            return
        for its, first, end in wanted:
            origin = origin_of(self._source.log, self._source.number, its.opening)
            base = its.first_offset
            yield Block(its, body, origin, first - base, end - base, header, end)


def _row_end(run: Adopted) -> int:
    return run.row + run.length
