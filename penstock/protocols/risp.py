"""RISP: a stream of small commands that a reader can skip without knowing them.

A command is one byte, and its top three bits say what follows:

    command byte   parameter                        bytes before the string
    0-63           none                             1
    64-95          1-byte integer                   2
    96-127         2-byte integer                   3
    128-159        4-byte integer                   5
    160-191        string with a 1-byte length      2
    192-223        string with a 2-byte length      3
    224-255        string with a 4-byte length      5

Integers and lengths are unsigned and big endian. What the commands mean is the business of a
vocabulary above this module (RQ is one); this module owns where a command begins and ends.

Rules that always hold:
  * A `Reader` gives the same commands however the stream is cut into chunks.
  * A command that the vocabulary does not have is skipped by its width and counted; a skipped
    string is never stored.
  * A string that is longer than its limit is refused when its length is read, before anything
    is allocated for it. A string that spans chunks is gathered once, in one buffer, so that it
    costs about its own size and work in proportion to it.
  * Once everything has been read, no chunk is kept: an idle reader holds a cut-off command only.

It fails with `PeerViolation` for a string over its limit, and with nothing else: every other
sequence of bytes is a sequence of commands. `encode` fails with `MisuseError`.
"""

from collections.abc import Collection, Mapping
from functools import cache

from penstock.protocols.errors import MisuseError, PeerViolation
from penstock.protocols.gathering import Gathering

NEED_MORE = -1
"""What `Reader.next` returns where the next command is not complete."""

SKIPPED = -2
"""What it returns after `SKIPS_MAX` unknown commands in a row, for whoever counts what a chunk costs."""

SKIPS_MAX = 64
NUMBER_FIRST = 64
STRING_FIRST = 160

_HEAD_BYTES_BY_CLASS = (1, 1, 2, 3, 5, 2, 3, 5)
"""Bytes of the command and its integer or length, by the top three bits of the command."""

HEAD_BYTES = bytes(_HEAD_BYTES_BY_CLASS[command >> 5] for command in range(256))
"""The same for every command byte."""


def encode(command: int, value: int | bytes | None = None) -> bytes:
    """One command as bytes. `value` is None, an integer or a string, as its number demands."""
    if not 0 <= command <= 255:
        raise MisuseError(f"RISP command {command}: a command is one byte")
    width = HEAD_BYTES[command] - 1
    if command < NUMBER_FIRST:
        if value is not None:
            raise MisuseError(f"RISP command {command} takes no parameter, but {value!r} was given")
        return bytes((command,))
    if command < STRING_FIRST:
        if not isinstance(value, int) or not 0 <= value < 1 << 8 * width:
            raise MisuseError(f"RISP command {command} takes an integer of {width} bytes, not {value!r}")
        return bytes((command,)) + value.to_bytes(width, "big")
    if not isinstance(value, bytes) or len(value) >= 1 << 8 * width:
        what = f"{len(value)} bytes" if isinstance(value, bytes) else repr(value)
        raise MisuseError(f"RISP command {command} takes a string with a length of {width} bytes, not {what}")
    return bytes((command,)) + len(value).to_bytes(width, "big") + value


@cache
def _tables(
    commands: tuple[int, ...], string_bytes_max: int, limits: tuple[tuple[int, int], ...]
) -> tuple[bytes, tuple[int, ...]]:
    """Which commands are known, and how long the string of each may be: 2.4 KB, for all readers together."""
    limit_of = dict(limits)
    return (
        bytes(command in commands for command in range(256)),
        tuple(limit_of.get(command, string_bytes_max) for command in range(256)),
    )


class Reader:
    """Cuts a stream into the commands of one vocabulary.

    Call `feed` with a chunk, then `next` until it returns NEED_MORE, or `cut` off what is left. After
    `next` has returned a command, `number` or `string` holds its parameter. Between two calls of `next`,
    where nothing is `pending`, the caller may look at `data` from `at` on, and may set `at` to a later
    command that it has found by itself.
    """

    __slots__ = (
        "_base",
        "_command",
        "_gathered",
        "_head",
        "_known",
        "_limits",
        "_missing",
        "_protocol",
        "at",
        "data",
        "number",
        "skipped",
        "string",
    )

    def __init__(
        self,
        protocol: str,
        commands: Collection[int],
        *,
        string_bytes_max: int,
        string_bytes_max_of: Mapping[int, int] | None = None,
    ) -> None:
        """`string_bytes_max` bounds every string, known or not, that `string_bytes_max_of` does not name."""
        self._protocol = protocol
        limits = tuple((string_bytes_max_of or {}).items())
        self._known, self._limits = _tables(tuple(commands), string_bytes_max, limits)
        self.data = b""
        self.at = 0
        self.number = 0
        self.string = b""
        self.skipped: dict[int, int] = {}  # how often each unknown command was seen; the caller empties it
        self._base = 0  # the bytes of the stream before data[0]
        self._head = b""  # a command cut off before its parameter or length was complete
        self._command = NEED_MORE  # the command whose string began in an earlier chunk
        self._missing = 0  # bytes of that string still to come
        self._gathered: Gathering | None = None  # what has come of it; None while it is skipped

    @property
    def position(self) -> int:
        """How many bytes of the stream have been read as commands."""
        return self._base + self.at

    @property
    def pending(self) -> bool:
        """Whether a command that began in an earlier chunk comes before what stands at `at`."""
        return self._command != NEED_MORE

    @property
    def gathered_bytes(self) -> int:
        """What has come of a string whose end is in a later chunk."""
        return self._gathered.tell() if self._gathered is not None else 0

    @property
    def unfinished(self) -> bool:
        """Whether a command has begun, and its rest is not there."""
        return bool(self._head) or self._command != NEED_MORE

    def feed(self, data: bytes | bytearray | memoryview) -> None:
        """Give the next chunk. It may be reused by its owner afterwards."""
        if self.at < len(self.data):
            raise MisuseError(
                f"{self._protocol}: {len(self.data) - self.at} bytes of the last chunk are unread; "
                f"call next() until it needs more before feeding again"
            )
        self._base += len(self.data)
        self.at = 0
        if self._missing:
            taken = min(self._missing, len(data))
            view = memoryview(data)
            if self._gathered is not None:
                self._gathered.write(view[:taken])
            self._missing -= taken
            self._base += taken
            self.data = bytes(view[taken:])
        elif self._head:
            self._base -= len(self._head)
            self.data = b"".join((self._head, data))
            self._head = b""
        else:
            self.data = data if type(data) is bytes else bytes(data)

    def cut(self) -> bytes:
        """What is unread of the chunk, where nothing is `pending`: the caller has it, and feeds it next."""
        rest = self.data[self.at :]
        self._base += self.at
        self.data = b""
        self.at = 0
        return rest

    def next(self) -> int:
        """The next command of the vocabulary, NEED_MORE, or SKIPPED."""
        if self._command != NEED_MORE:
            if self._missing:
                return NEED_MORE
            command, self._command = self._command, NEED_MORE
            gathered, self._gathered = self._gathered, None
            if gathered is not None:
                self.string = gathered.getvalue()
                return command
            self._skip(command)
        data, at = self.data, self.at
        size = len(data)
        skips = 0
        while at < size:
            command = data[at]
            body = end = at + HEAD_BYTES[command]
            if body > size:
                self._head = data[at:]
                break
            if command >= STRING_FIRST:
                length = int.from_bytes(data[at + 1 : body], "big")
                if length > self._limits[command]:
                    self.at = at
                    raise PeerViolation(
                        self._protocol,
                        f"command {command} announces {length} bytes, the limit is {self._limits[command]}",
                        position=self.position,
                        offending=data[at : at + PeerViolation.OFFENDING_BYTES_MAX],
                    )
                end = body + length
                if end > size:
                    self._begin(command, body, end - size)
                    break
                if self._known[command]:
                    self.string = data[body:end]
            elif command >= NUMBER_FIRST:
                self.number = int.from_bytes(data[at + 1 : body], "big")
            at = end
            if self._known[command]:
                self.at = at
                return command
            self._skip(command)
            skips += 1
            if skips == SKIPS_MAX:
                self.at = at
                return SKIPPED
        self._base += size
        self.data = b""
        self.at = 0
        return NEED_MORE

    def _begin(self, command: int, body: int, missing: int) -> None:
        """Keep the first part of a string whose end is in a later chunk."""
        self._command = command
        self._missing = missing
        if self._known[command]:
            begun = memoryview(self.data)[body:]
            self._gathered = Gathering(len(begun) + missing, begun)

    def _skip(self, command: int) -> None:
        self.skipped[command] = self.skipped.get(command, 0) + 1
