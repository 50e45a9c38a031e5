"""Frames of the private link: a JSON object, and bytes beside it.

    uint32  length of the object   little endian, as everything in the log is
    uint32  length of the bytes
    object  JSON, UTF-8
    bytes   columns of messages, usually none

A call is `{"n": 7, "call": NAME, …}`, its answer `{"n": 7, …}` or `{"n": 7, "error": {"kind", "detail"}}`.
A frame with the number 0 wants no answer.

Rule that always holds: frames come out whole and in order (`common/framing.py`), and own their bytes.

How it fails: `FrameError`. Both ends are ours: it means a fault of ours, and ends the link.
"""

import json
import struct
from typing import Any, Final, NamedTuple

from penstock.common.framing import Buffer as Buffer
from penstock.common.framing import Framing
from penstock.errors import PenstockError

Fields = dict[str, Any]  # what JSON can say; each call checks its own

_LENGTHS: Final = struct.Struct("<II")
# Made once: `json.dumps` and `loads` look at their options at every call, which is half of what they take.
_to_json: Final = json.JSONEncoder(separators=(",", ":")).encode
_from_json: Final = json.JSONDecoder().decode
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
    header = _to_json(fields).encode()
    body_bytes = sum([memoryview(buffer).nbytes for buffer in buffers]) if buffers else 0
    if len(header) > HEADER_BYTES_MAX or body_bytes > BODY_BYTES_MAX:
        raise FrameError(f"a frame of {len(header)} and {body_bytes} bytes is too large for the link")
    return [_LENGTHS.pack(len(header), body_bytes) + header, *buffers]


class FrameDecoder:
    """Received chunks to frames."""

    def __init__(self) -> None:
        self._framing = Framing(_LENGTHS.size, _frame_bytes)

    def receive(self, data: Buffer) -> list[Frame]:
        """The frames that are whole now."""
        return [_frame_of(view) for view in self._framing.feed(data)]


def _frame_bytes(head: Buffer) -> int:
    header_bytes, body_bytes = _LENGTHS.unpack(head)
    if header_bytes > HEADER_BYTES_MAX or body_bytes > BODY_BYTES_MAX:
        raise FrameError(f"a frame of {header_bytes} and {body_bytes} bytes is none of ours")
    return int(_LENGTHS.size + header_bytes + body_bytes)


def _frame_of(view: memoryview) -> Frame:
    body_at = _LENGTHS.size + _LENGTHS.unpack_from(view)[0]
    return Frame(_fields_of(view[_LENGTHS.size : body_at]), memoryview(bytes(view[body_at:])))


def _fields_of(header: memoryview) -> Fields:
    try:
        fields = _from_json(str(header, "utf-8"))
    except ValueError as error:
        raise FrameError(f"the object of a frame is not JSON: {error}") from None
    if not isinstance(fields, dict):
        raise FrameError(f"the object of a frame is a {type(fields).__name__}")
    return fields
