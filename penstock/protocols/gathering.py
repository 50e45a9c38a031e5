"""Gathering: bytes that come in pieces, until they are whole; how many there will be is known.

A `BytesIO` hands its buffer over without a copy, but to grow, it may have to move all that it has: 30 ms for
as many megabytes, again and again. So as soon as much has come there is room for all of it: memory of its
own, which the system gives page by page, as it is written to. Who only announces much costs nothing.
"""

from io import BytesIO
from typing import Final

MUCH_BYTES: Final = 4 << 20
ROOM_BYTES: Final = 64 << 20
"""At least so much is asked for: the C library has memory of its own for what is over 32 MiB, whatever it is
told. What is not used of it is given back."""


class Gathering:
    __slots__ = ("_buffer", "_has_room", "_total_bytes")

    def __init__(self, total_bytes: int, data: bytes | memoryview = b"") -> None:
        self._total_bytes = total_bytes
        self._has_room = False
        self._buffer = BytesIO()
        self.write(data)

    def write(self, data: bytes | memoryview) -> None:
        if not self._has_room and self._buffer.tell() + len(data) > MUCH_BYTES:
            self._has_room = True
            room = BytesIO(bytes(max(self._total_bytes, ROOM_BYTES)))
            room.write(self._buffer.getbuffer())
            self._buffer = room
        self._buffer.write(data)

    def tell(self) -> int:
        """How many bytes have come."""
        return self._buffer.tell()

    def getvalue(self) -> bytes:
        self._buffer.truncate()
        return self._buffer.getvalue()
