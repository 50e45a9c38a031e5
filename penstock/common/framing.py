"""Framing: whole frames out of the chunks that a socket gives, for links whose frames tell their length.

A frame is a header of a fixed size, which says how long the whole of it is, and what follows. The relay of a
cluster (`cluster/frames.py`) and the link between the two processes of a broker (`control/frames.py`) have
headers of their own, and share this.

Rules that always hold:
  * Frames come out in the order in which they went in, whole, however the socket cut them.
  * A frame that is whole in a chunk is not copied: it is a view that holds until the chunk is reused. One
    that is not is gathered in a buffer of its size, which is allocated once.

How it fails: by what `length_of` raises about a header, of a length that nobody would send.
"""

from collections.abc import Callable, Iterator

Buffer = bytes | bytearray | memoryview


class Framing:
    __slots__ = ("_gathered", "_have", "_head", "_head_bytes", "_length_of")

    def __init__(self, head_bytes: int, length_of: Callable[[Buffer], int]) -> None:
        """`length_of` a header is that of its whole frame. It is asked anew for every frame."""
        self._head_bytes = head_bytes
        self._length_of = length_of
        self._head = b""  # of a header that was cut
        self._gathered: memoryview | None = None  # a frame that is not whole yet
        self._have = 0  # bytes of it

    def feed(self, data: Buffer) -> Iterator[memoryview]:
        """The frames that are whole now. Take all of them before the chunk is reused."""
        view = memoryview(data)
        at, end = 0, len(view)
        while True:
            if self._gathered is not None:
                part = view[at : at + len(self._gathered) - self._have]
                self._gathered[self._have : self._have + len(part)] = part
                self._have += len(part)
                at += len(part)
                if self._have < len(self._gathered):
                    return
                whole, self._gathered = self._gathered, None
                yield whole
                continue
            if self._head or end - at < self._head_bytes:
                part = view[at : at + self._head_bytes - len(self._head)]
                self._head += part
                at += len(part)
                if len(self._head) < self._head_bytes:
                    return
                head, self._head = self._head, b""
                self._gather(self._length_of(head), head)
                continue
            length = self._length_of(view[at : at + self._head_bytes])
            if at + length > end:
                self._gather(length, view[at:])
                return
            yield view[at : at + length]
            at += length

    def _gather(self, length: int, begun: Buffer) -> None:
        self._gathered = memoryview(bytearray(length))
        self._gathered[: len(begun)] = begun
        self._have = len(begun)
