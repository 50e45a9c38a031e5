"""Chunks: steps of many queues as a run of bytes that stands for itself.

    header    magic, level, flags, shelf, length and checksum of the body, when it begins, its own checksum
    body      compressed: the step's seconds, the queues (JSON), then a column for every number, the rows in
              the order of queues and times; each column with the narrowest numbers that hold it

A file is chunks, one behind the other. Where its end was torn, or a part of it is not what was written,
`walk` goes on at the next chunk that is whole, and says how many bytes it has left out.
"""

import json
import struct
import zlib
from array import array
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import accumulate
from typing import Final, NamedTuple

from penstock.errors import PenstockError
from penstock.http.history.steps import COUNTED, SPREADS, STANDING, WHOLE, Key, Step

MAGIC: Final = b"PSH1"
BODY_BYTES_MAX: Final = 64 << 20
_HEADER: Final = struct.Struct("<4sBBHIIqI")
HEADER_BYTES: Final = _HEADER.size
_WIDTHS: Final = "BHIQ"
_OLDEST: Final = STANDING.index("oldest")
_SCAN_BYTES: Final = 64 << 10

FRESH: Final = 1
"""A flag: nobody looked just before, so that what was known then does not hold any more."""

CUT: Final = 2
"""A flag: there were more queues than are told of here."""

EVERYTHING: Final = 0xFFFF
"""The shelf of chunks that have all queues."""

SHELVES: Final = 64
"""Queues stand on shelves by their names, so that whoever looks for one reads about so little of a file; the
first has only the whole broker."""

Read = Callable[[int, int], bytes]
"""`length` bytes at a position, fewer at the end."""


class ChunkDamaged(PenstockError):
    """Bytes that are not what was written."""


class Header(NamedTuple):
    level: int
    flags: int
    shelf: int
    length: int  # of the body
    checksum: int
    start: int  # seconds since 1970


class Chunk(NamedTuple):
    """One of a file: where it is, and what its header says."""

    position: int
    header: Header


def shelf_of(key: Key) -> int:
    return 0 if key == WHOLE else 1 + zlib.crc32(key[0].encode()) % (SHELVES - 1)


def encode(
    rows: Mapping[Key, list[Step]], start: int, seconds: int, level: int = 0, flags: int = 0, shelf: int = 0
) -> bytes:
    """A chunk with steps of so many seconds, of each queue in the order of time; one at least."""
    keys = sorted(key for key in rows if rows[key])
    steps = [step for key in keys for step in rows[key]]
    names = json.dumps(keys, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "surrogatepass")
    columns: list[Iterable[int]] = [
        (at for at, key in enumerate(keys) for _ in rows[key]),
        ((step.at - start) // seconds for step in steps),
        *zip(*(step.counted for step in steps), strict=True),
    ]
    for at, column in enumerate(zip(*(step.standing for step in steps), strict=True)):
        if at == _OLDEST:  # As an age, which has fewer digits.
            ends = ((step.at + seconds) * 10 for step in steps)
            column = tuple(
                1 + max(end - oldest, 0) if oldest else 0 for oldest, end in zip(column, ends, strict=True)
            )
        columns.append(column)
    for at in range(len(SPREADS)):
        spreads = [sorted(step.spreads[at].items()) for step in steps]
        columns.append(map(len, spreads))
        columns += [[pair[part] for spread in spreads for pair in spread] for part in (0, 1)]
    parts = [struct.pack("<III", seconds, len(names), len(steps)), names, *map(_narrow, columns)]
    body = zlib.compress(b"".join(parts), 6)
    head = _HEADER.pack(MAGIC, level, flags, shelf, len(body), zlib.crc32(body), start, 0)[:-4]
    return head + struct.pack("<I", zlib.crc32(head)) + body


def _narrow(numbers: Iterable[int]) -> bytes:
    """A column: the kind of its numbers, how many there are, and they."""
    values = list(numbers)
    most = max(values, default=0)
    kind = next(it for it in _WIDTHS if most < 1 << 8 * struct.calcsize(it))
    return struct.pack("<BI", ord(kind), len(values)) + array(kind, values).tobytes()


def decode(body: bytes, header: Header, wanted: Callable[[Key], bool] | None = None) -> dict[Key, list[Step]]:
    """The steps of each queue that is wanted, or of all."""
    try:
        return _decode(body, header, wanted)
    except (ValueError, IndexError, TypeError, struct.error, zlib.error) as error:
        raise ChunkDamaged(f"a chunk that cannot be read: {error}") from error


def _decode(body: bytes, header: Header, wanted: Callable[[Key], bool] | None) -> dict[Key, list[Step]]:
    if zlib.crc32(body) != header.checksum:
        raise ChunkDamaged("its checksum is wrong")
    raw = memoryview(zlib.decompressobj().decompress(body, BODY_BYTES_MAX))
    seconds, names_bytes, count = struct.unpack_from("<III", raw)
    at = struct.calcsize("<III")
    keys: list[Key] = [
        (name, identity)
        for name, identity in json.loads(bytes(raw[at : at + names_bytes]).decode("utf-8", "surrogatepass"))
    ]
    at += names_bytes
    columns: list[array[int]] = []
    for _ in range(2 + len(COUNTED) + len(STANDING) + 3 * len(SPREADS)):
        kind, length = chr(raw[at]), int(struct.unpack_from("<I", raw, at + 1)[0])
        if kind not in _WIDTHS:
            raise ChunkDamaged(f"a column of {kind!r}")
        size = length * struct.calcsize(kind)
        column = array(kind)
        column.frombytes(raw[at + 5 : at + 5 + size])
        if len(column) != length:
            raise ChunkDamaged("a column ends early")
        columns.append(column)
        at += 5 + size
    queues, times, *others = columns
    if len(queues) != count:
        raise ChunkDamaged("its columns are of different lengths")
    counted, others = others[: len(COUNTED)], others[len(COUNTED) :]
    standing, spreads = others[: len(STANDING)], others[len(STANDING) :]
    ends = [[0, *accumulate(spreads[3 * it])] for it in range(len(SPREADS))]

    def spread(it: int, row: int) -> dict[int, int]:
        lo, hi = ends[it][row], ends[it][row + 1]
        if lo == hi:
            return {}
        return dict(zip(spreads[3 * it + 1][lo:hi], spreads[3 * it + 2][lo:hi], strict=True))

    found: dict[Key, list[Step]] = {}
    for number, key in enumerate(keys):
        if wanted is not None and not wanted(key):
            continue
        steps = found.setdefault(key, [])
        for row in range(bisect_left(queues, number), bisect_left(queues, number + 1)):
            began = header.start + times[row] * seconds
            stands = [column[row] for column in standing]
            if stands[_OLDEST]:
                stands[_OLDEST] = (began + seconds) * 10 + 1 - stands[_OLDEST]
            steps.append(
                Step(
                    began,
                    tuple([column[row] for column in counted]),
                    tuple(stands),
                    (spread(0, row), spread(1, row), spread(2, row)),
                )
            )
    return found


def read_header(raw: bytes) -> Header | None:
    """None where these bytes are no header."""
    if len(raw) < HEADER_BYTES or raw[:4] != MAGIC:
        return None
    *fields, checksum = _HEADER.unpack_from(raw)
    if zlib.crc32(raw[: HEADER_BYTES - 4]) != checksum:
        return None
    header = Header(*fields[1:])
    return header if header.length <= BODY_BYTES_MAX else None


def walk(read: Read, size: int, damaged: Callable[[int, int], None]) -> Iterator[Chunk]:
    """Every chunk whose header is whole and whose body is within the file. `damaged` is told where bytes are
    that belong to none, and how many: they may be the torn end."""
    at = 0
    while at < size:
        header = read_header(read(at, HEADER_BYTES))
        if header is not None and at + HEADER_BYTES + header.length <= size:
            yield Chunk(at, header)
            at += HEADER_BYTES + header.length
            continue
        found = _next(read, at + 1, size)
        damaged(at, found - at)
        at = found


def _next(read: Read, at: int, size: int) -> int:
    """Where the next header is; the end of the file where there is none."""
    while at < size:
        part = read(at, _SCAN_BYTES)
        place = part.find(MAGIC)
        while place >= 0:
            header = read_header(read(at + place, HEADER_BYTES))
            if header is not None and at + place + HEADER_BYTES + header.length <= size:
                return at + place
            place = part.find(MAGIC, place + 1)
        if len(part) < _SCAN_BYTES:
            break
        at += len(part) - len(MAGIC) + 1
    return size
