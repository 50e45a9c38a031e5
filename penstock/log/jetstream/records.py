"""Records: what one message of the log's stream says. Bytes only; no IO.

The log that a cluster shares is the embedded log (`log`), and its disk is a stream. A record is one
thing that has happened to one file of it:

    write      bytes at a position of a file, which is made where there is none
    piece      a piece of a whole file, which is there when its last piece is (snapshots, compacted segments)
    truncate   a file ends at a position from now on

Each carries a checksum over everything else in it, so that a flipped bit is found before a byte is used;
and who wrote it, with that writer's running number, so that a record can be told from any other, and a gap
is seen. `more` says that the next record of the same writer belongs to the same write: what is only half
there when a writer has died was never confirmed, and is passed over.

Nothing in a record is in the machine's own byte order: little endian throughout.
"""

import re
import struct
from enum import IntEnum
from typing import Final, NamedTuple

from penstock.errors import PenstockError
from penstock.log.checksum import crc32

MAGIC: Final = b"PnR1"
_HEAD: Final = struct.Struct("<4sIBBHQQQQ")
_CHECKED_FROM: Final = 8
HEAD_BYTES_MAX: Final = _HEAD.size + 255
"""What a record is longer than its bytes, at most: file names of the log are short."""

_MORE: Final = 1
_NAME: Final = re.compile(rb"[A-Za-z0-9][A-Za-z0-9._-]{0,254}")
"""What a file of the log may be called: none of another folder, whoever wrote the record."""


class Kind(IntEnum):
    WRITE = 1
    PIECE = 2
    TRUNCATE = 3


_KINDS: Final = frozenset(Kind)


class RecordDamaged(PenstockError):
    """These bytes are no record, or not the one that was written."""


class Record(NamedTuple):
    kind: Kind
    name: str
    position: int
    writer: int
    number: int
    more: bool
    data: bytes | memoryview = b""

    @property
    def end(self) -> int:
        return self.position + len(self.data)

    def pack(self) -> bytes:
        name = self.name.encode()
        head = _HEAD.pack(
            MAGIC,
            0,
            self.kind,
            _MORE if self.more else 0,
            len(name),
            self.writer,
            self.number,
            self.position,
            len(self.data),
        )
        checksum = crc32(self.data, crc32(name, crc32(head[_CHECKED_FROM:])))
        return b"".join((MAGIC, checksum.to_bytes(4, "little"), head[_CHECKED_FROM:], name, self.data))


def is_name(name: str) -> bool:
    return _NAME.fullmatch(name.encode()) is not None


def read_record(payload: bytes) -> Record:
    """The record of a message. `RecordDamaged` where it is not whole."""
    if len(payload) < _HEAD.size:
        raise RecordDamaged(f"{len(payload)} bytes are no record")
    magic, checksum, kind, flags, name_bytes, writer, number, position, size = _HEAD.unpack_from(payload)
    if magic != MAGIC:
        raise RecordDamaged(f"begins with {magic!r}, not with {MAGIC!r}")
    if crc32(memoryview(payload)[_CHECKED_FROM:]) != checksum:
        raise RecordDamaged("does not have its checksum")
    start = _HEAD.size + name_bytes
    if len(payload) != start + size:
        raise RecordDamaged(f"has {len(payload)} bytes and says {start + size}")
    name = payload[_HEAD.size : start]
    if kind not in _KINDS or flags & ~_MORE or not _NAME.fullmatch(name):
        raise RecordDamaged(f"says kind {kind}, flags {flags}, file {name!r}: this version knows none such")
    return Record(
        Kind(kind),
        name.decode(),
        position,
        writer,
        number,
        bool(flags & _MORE),
        memoryview(payload)[start:],
    )
