"""Scanning: walking over the blocks of a segment, header by header.

The walk ends at the first place where there is no valid block: the end of what was written, a
torn tail, or damage. Which of these it is, is not decided here.
"""

from collections.abc import Iterator
from typing import NamedTuple

from penstock.log.block import HEADER_BYTES, MAGIC, Header, read_header
from penstock.log.checksum import crc32
from penstock.log.disk import File
from penstock.log.errors import LogDamaged

CHUNK_BYTES = 256 * 1024


def walk_headers(file: File, base: int, start: int, end: int) -> Iterator[Header]:
    """The headers from log position `start` to `end`, in a file that begins at `base`.

    Bodies are stepped over: with large blocks this reads almost nothing.
    """
    at = start
    chunk = b""
    chunk_start = at
    while at + HEADER_BYTES <= end:
        in_chunk = at - chunk_start
        if in_chunk + HEADER_BYTES > len(chunk):
            # Far jumps read only a header; near ones make the next headers come for free.
            length = HEADER_BYTES if in_chunk > 2 * CHUNK_BYTES else CHUNK_BYTES
            chunk = file.read(at - base, min(length, end - at))
            chunk_start, in_chunk = at, 0
        header = read_header(chunk, in_chunk, at)
        if header is None or header.end > end:
            return
        yield header
        at = header.end


def walk_blocks(file: File, base: int, start: int, end: int) -> Iterator[tuple[Header, memoryview]]:
    """The blocks from `start` to `end`, each with a body whose checksum is right."""
    at = start
    chunk = b""
    chunk_start = at
    while at + HEADER_BYTES <= end:
        in_chunk = at - chunk_start
        if in_chunk + HEADER_BYTES > len(chunk):
            chunk = file.read(at - base, min(CHUNK_BYTES, end - at))
            chunk_start, in_chunk = at, 0
        header = read_header(chunk, in_chunk, at)
        if header is None or header.end > end:
            return
        body_end = in_chunk + HEADER_BYTES + header.body_bytes
        if body_end > len(chunk):
            chunk = file.read(at - base, min(max(header.end - at, CHUNK_BYTES), end - at))
            chunk_start, in_chunk = at, 0
            body_end = HEADER_BYTES + header.body_bytes
        body = memoryview(chunk)[in_chunk + HEADER_BYTES : body_end]
        if len(body) != header.body_bytes or crc32(body) != header.body_checksum:
            return
        yield header, body
        at = header.end


def find_block(file: File, base: int, start: int, end: int) -> Header | None:
    """The next valid header at or after `start`, or None. Looks at every aligned place."""
    at = start + -start % 8
    while at + HEADER_BYTES <= end:
        data = file.read(at - base, min(CHUNK_BYTES + HEADER_BYTES, end - at))
        if len(data) < HEADER_BYTES:
            return None
        # Room that was never written is zeros, and a whole segment of them may have to be looked at before
        # a broker can start: one byte is found eight times as fast as four.
        place = data.find(MAGIC) if MAGIC[0] in data else -1
        while place >= 0:
            if (at + place) % 8 == 0 and place + HEADER_BYTES <= len(data):
                header = read_header(data, place, at + place)
                if header is not None and header.end <= end:
                    return header
            place = data.find(MAGIC, place + 1)
        at += min(CHUNK_BYTES, len(data) - HEADER_BYTES + 8)
        at += -at % 8
    return None


def find_headers(file: File, base: int, start: int, end: int) -> Iterator[Header]:
    """Every valid header from `start` to `end`; what is none is stepped over."""
    at = start
    while at < end:
        for header in walk_headers(file, base, at, end):
            yield header
            at = header.end
        found = find_block(file, base, at + 8, end)
        if found is None:
            return
        at = found.position


class Hole(NamedTuple):
    """Bytes that are no valid block; with a header where that much is valid."""

    start: int  # log positions
    end: int
    header: Header | None


def walk(file: File, base: int, start: int, end: int) -> Iterator[tuple[Header, memoryview] | Hole]:
    """Everything from log position `start` to `end` of a segment that begins at `base`."""
    at = start
    while at < end:
        for header, body in walk_blocks(file, base, at, end):
            yield header, body
            at = header.end
        if at >= end:
            return
        bad = read_header(file.read(at - base, HEADER_BYTES), 0, at)
        if bad is not None and bad.end <= end:
            hole = Hole(at, bad.end, bad)
        else:
            found = find_block(file, base, at + 8, end)
            hole = Hole(at, found.position if found is not None else end, None)
        yield hole
        at = hole.end


def is_blank(file: File, base: int, hole: Hole) -> bool:
    """Whether there is nothing but zeros: a segment's file has room that is not used yet."""
    for at in range(hole.start, hole.end, CHUNK_BYTES):
        data = file.read(at - base, min(CHUNK_BYTES, hole.end - at))
        if data.count(0) != len(data):
            return False
    return True


def read_body(file: File, base: int, header: Header, name: str) -> memoryview:
    """The body of a block that is known to be there; LogDamaged where its checksum is wrong."""
    body = file.read(header.position - base + HEADER_BYTES, header.body_bytes)
    if len(body) != header.body_bytes or crc32(body) != header.body_checksum:
        raise LogDamaged(
            f"{name}: the block at position {header.position - base} (queue number {header.queue}, "
            f"offsets {header.first_offset} to {header.offset_end - 1}) does not have its checksum"
        )
    return memoryview(body)
