"""NATS headers: the block before a message's payload, from names and values to bytes and back.

    NATS/1.0 CR LF
    Name: value CR LF        any number of them, names may repeat
    CR LF

Names and values are bytes here: NATS knows no encoding. What is written reads as it was written. A value
that could not (blank space at its ends, which readers take off, or a line's end in it) is misuse.

How it fails: `MisuseError` in writing; `PeerViolation` in reading a block that is none. Reading is for the
few messages where several headers matter; `value_of` finds one without taking the block apart.
"""

from collections.abc import Iterable

from penstock.protocols.errors import MisuseError, PeerViolation
from penstock.protocols.nats import END, HEADERS_START, PROTOCOL

OPENING = HEADERS_START + END
_BLANKS = b" \t"


def header_lines(headers: Iterable[tuple[bytes, bytes]]) -> bytes:
    """The lines of a block without its opening and its end, so that lines of several makers can be joined."""
    return b"".join(_line(name, value) for name, value in headers)


def _line(name: bytes, value: bytes) -> bytes:
    if not name or b":" in name or any(byte <= 32 or byte == 127 for byte in name):
        raise MisuseError(f"nats: {name!r} cannot be a header's name; leave out blanks, colons and controls")
    if b"\r" in value or b"\n" in value or value != value.strip(_BLANKS):
        raise MisuseError(f"nats: header {name!r} cannot have the value {value!r}; readers would change it")
    return name + b": " + value + END


def header_block(headers: Iterable[tuple[bytes, bytes]]) -> bytes:
    """A whole block."""
    return OPENING + header_lines(headers) + END


def read_headers(block: bytes) -> list[tuple[bytes, bytes]]:
    """Names and values of a block, in order; nothing for b"". The code of a status is not among them."""
    if not block:
        return []
    opening, *lines = block.split(END)
    if not opening.startswith(HEADERS_START) or lines[-2:] != [b"", b""]:
        raise _wrong("headers do not begin or end as headers do", block)
    headers = []
    for line in lines[:-2]:
        name, colon, value = line.partition(b":")
        if not colon or not name:
            raise _wrong("a header has no name", block)
        headers.append((name, value.strip(_BLANKS)))
    return headers


def value_of(block: bytes, name: bytes) -> bytes | None:
    """The first value of a name, or None. Names count as they are written."""
    mark = END + name + b":"
    at = block.find(mark)
    if at < 0:
        return None
    start = at + len(mark)
    return block[start : block.find(END, start)].strip(_BLANKS)


def _wrong(message: str, block: bytes) -> PeerViolation:
    return PeerViolation(PROTOCOL, message, position=0, offending=block)
