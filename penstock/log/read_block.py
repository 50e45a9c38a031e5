"""Blocks as readers of a log's files get them: windows on a mapped file, with what was asked for of each."""

from typing import NamedTuple

from penstock.log.adoption import moved
from penstock.log.block import (
    FLAG_DELAYED,
    FLAG_EXPIRES,
    FLAG_HEADERS,
    FLAG_RETRIES,
    KIND_MESSAGES,
    PROTOCOLS,
    BodyReader,
    Header,
)


class Texts(NamedTuple):
    """A column of texts: number i is data[bounds[i]:bounds[i + 1]]."""

    bounds: memoryview
    data: memoryview

    def at(self, number: int) -> bytes:
        return bytes(self.data[self.bounds[number] : self.bounds[number + 1]])


class Columns(NamedTuple):
    """The columns of a message block, as windows on the mapped file; see `block.py`."""

    bounds: memoryview
    payload: memoryview
    expires: memoryview | None
    retries: memoryview | None
    due: memoryview | None = None
    headers: Texts | None = None


class Block:
    """A block of one queue, of which the messages (or events) from `lo` to `hi` were asked for."""

    __slots__ = ("_moved", "body", "header", "hi", "lo", "offset_end", "origin", "stored")

    def __init__(
        self,
        header: Header,
        body: memoryview,
        origin: bytes,
        lo: int,
        hi: int,
        stored: Header | None = None,
        offset_end: int | None = None,
    ) -> None:
        self.header = header
        self.body = body
        self.origin = origin  # the first digits of the ids of a message block, see ids.py
        self.lo = lo
        self.hi = hi
        # Expiries and delays of one that was adopted, when somebody has asked.
        self._moved: list[memoryview | None] = []
        self.stored = stored or header  # as it is in the file: a stage block's own, where it was adopted
        self.offset_end = header.offset_end if offset_end is None else offset_end  # of what can be read here

    @property
    def protocol(self) -> str:
        return PROTOCOLS[self.header.protocol]

    def columns(self) -> Columns:
        """The columns of a message block, from its first message to its last."""
        reader = BodyReader(self.body)
        count, flags = self.header.count, self.header.flags
        ends = reader.raw(4 * count + 4).cast("i")
        payload = reader.raw(ends[count])
        expires = reader.raw(8 * count).cast("q") if flags & FLAG_EXPIRES else None
        retries = reader.raw(2 * count).cast("h") if flags & FLAG_RETRIES else None
        due = reader.raw(8 * count).cast("q") if flags & FLAG_DELAYED else None
        headers: Texts | None = None
        if flags & FLAG_HEADERS:
            bounds = reader.raw(4 * count + 4).cast("i")
            headers = Texts(bounds, reader.raw(bounds[count]))
        if self.stored is not self.header and flags & (FLAG_EXPIRES | FLAG_DELAYED):
            # Once: whoever goes through a block by its runs asks for each of them.
            if not self._moved:
                by_us = self.header.time_us - self.stored.time_us
                self._moved = [
                    memoryview(moved(column, by_us)) if column is not None else None
                    for column in (expires, due)
                ]
            expires, due = self._moved
        return Columns(ends, payload, expires, retries, due, headers)

    def messages(self) -> list[bytes]:
        """The payloads that were asked for, one by one. For tests and tools."""
        ends, payload, *_ = self.columns()
        return [bytes(payload[ends[i] : ends[i + 1]]) for i in range(self.lo, self.hi)]


def is_about(header: Header, offsets: tuple[int, int]) -> bool:
    """Whether a block may say something about messages of that range, as far as its header tells."""
    first, end = offsets
    return header.first_offset < end and (header.kind != KIND_MESSAGES or header.offset_end > first)
