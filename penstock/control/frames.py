"""Frames of the private link: a JSON object, and bytes beside it.

    uint32  length of the object   little endian, as everything in the log is
    uint32  length of the bytes
    object  JSON, UTF-8
    bytes   columns of messages, usually none

A call is `{"n": 7, "call": NAME, …}`, its answer `{"n": 7, …}` or `{"n": 7, "error": {"kind", "detail"}}`.
A frame with the number 0 wants no answer.

Rules that always hold:
  * Frames come out in the order in which they went in, whole, however the socket cut them.
  * A body that is larger than what was received so far is gathered in one buffer of its size, so
    that a large one is copied once.

How it fails: `FrameError`. Both ends are ours: it means a fault of ours, and ends the link.
"""

import json
import struct
from typing import Any, Final, NamedTuple

from penstock.errors import PenstockError

Fields = dict[str, Any]  # what JSON can say; each call checks its own
Buffer = bytes | bytearray | memoryview

_LENGTHS: Final = struct.Struct("<II")
HEADER_BYTES_MAX: Final = 64 << 20
BODY_BYTES_MAX: Final = 1 << 31


class FrameError(PenstockError):
    """Bytes that are no frame."""


class Frame(NamedTuple):
    """One frame, whole."""

    fields: Fields
    body: memoryview


def encode_frame(fields: Fields, *buffers: Buffer) -> list[Buffer]:
    """The pieces of a frame, to be written one after the other."""
    header = json.dumps(fields, separators=(",", ":")).encode()
    body_bytes = sum(memoryview(buffer).nbytes for buffer in buffers)
    if len(header) > HEADER_BYTES_MAX or body_bytes > BODY_BYTES_MAX:
        raise FrameError(f"a frame of {len(header)} and {body_bytes} bytes is too large for the link")
    return [_LENGTHS.pack(len(header), body_bytes) + header, *buffers]


class FrameDecoder:
    """Received chunks to frames."""

    def __init__(self) -> None:
        self._gathered = bytearray()
        self._wanted = _LENGTHS.size  # how many bytes are needed before there is something to do

    def receive(self, data: Buffer) -> list[Frame]:
        """The frames that are whole now."""
        gathered = self._gathered
        gathered += data
        if len(gathered) < self._wanted:
            return []
        frames: list[Frame] = []
        at = 0
        while True:
            self._wanted = _LENGTHS.size
            if len(gathered) - at < self._wanted:
                break
            header_bytes, body_bytes = _LENGTHS.unpack_from(gathered, at)
            if header_bytes > HEADER_BYTES_MAX or body_bytes > BODY_BYTES_MAX:
                raise FrameError(f"a frame of {header_bytes} and {body_bytes} bytes is none of ours")
            self._wanted += header_bytes + body_bytes
            if len(gathered) - at < self._wanted:
                break
            body_at = at + _LENGTHS.size + header_bytes
            frames.append(
                Frame(
                    _fields_of(bytes(gathered[at + _LENGTHS.size : body_at])),
                    memoryview(bytes(gathered[body_at : body_at + body_bytes])),
                )
            )
            at = body_at + body_bytes
        del gathered[:at]
        return frames


def _fields_of(header: bytes) -> Fields:
    try:
        fields = json.loads(header)
    except ValueError as error:
        raise FrameError(f"the object of a frame is not JSON: {error}") from None
    if not isinstance(fields, dict):
        raise FrameError(f"the object of a frame is a {type(fields).__name__}")
    return fields
