"""The core of a client without receipts: what it owes, and what is in doubt.

SSPQ and PHPMQ never answer a SEND. When a connection breaks, nobody can tell which of the messages sent on
it the broker had read. A core counts them, from the last sign that the broker had read everything before;
when the connection is lost they become doubtful, and the next call of the client that can raise tells so,
once, with `ConnectionLost.in_doubt`. So nothing is lost in silence.

A core does no IO and reads no clock. It lives as long as its client and sees many connections, one after the
other: `generation` tells them apart, so that a verdict on a message of a former one is not sent on the next.
Whoever does the IO calls `opened`, `feed` and `lost`, one at a time.
"""

from collections.abc import Iterable, Iterator

from penstock.client.errors import ConnectionLost, TimedOut

CHUNK_MESSAGES = 1024
CHUNK_BYTES = 256 * 1024


class Core:
    """See the module's docstring. A subclass has the session."""

    protocol = ""

    def __init__(self) -> None:
        self.generation = 0  # of the connection that is open, or was last
        self._unproved = 0  # sent on this connection, and nothing shows that the broker has read it
        self._doubted = 0  # sent on lost connections, and not told yet
        self._why = ""

    def opened(self) -> bytes:
        """There is a new connection: what to write first."""
        raise NotImplementedError

    def feed(self, data: bytes | bytearray | memoryview) -> None:
        """Bytes from the broker. PeerViolation passes through."""
        raise NotImplementedError

    def lost(self, why: str) -> None:
        """The connection is gone."""
        if self._unproved:
            self._doubted += self._unproved
            self._why = why
            self._unproved = 0

    def proved(self) -> None:
        """The broker has read everything that was sent so far."""
        self._unproved = 0

    def take_doubt(self) -> int:
        """How many messages are in doubt; they are not told again."""
        doubted, self._doubted = self._doubted, 0
        return doubted

    def check(self) -> None:
        """Raise ConnectionLost where messages are in doubt."""
        why = self._why
        if doubted := self.take_doubt():
            raise ConnectionLost(
                f"{self.protocol}: the connection was lost ({why}), and with it perhaps some of the last of "
                f"{doubted} messages sent on it: {self.protocol.upper()} has no receipts; "
                "send again what must not be lost, the next call connects again",
                in_doubt=doubted,
            )

    def timed_out(self, text: str) -> TimedOut:
        """An error that tells what is in doubt, too."""
        doubted = self.take_doubt()
        if doubted:
            text += f", and {doubted} messages sent on it are in doubt: send again what must not be lost"
        return TimedOut(text, in_doubt=doubted)


def chunks(bodies: Iterable[bytes]) -> Iterator[list[bytes]]:
    """Messages in lists that are worth a write each, in order."""
    chunk: list[bytes] = []
    size = 0
    for body in bodies:
        chunk.append(body if type(body) is bytes else as_bytes(body))
        size += len(chunk[-1])
        if size >= CHUNK_BYTES or len(chunk) >= CHUNK_MESSAGES:
            yield chunk
            chunk, size = [], 0
    if chunk:
        yield chunk


def as_bytes(body: object) -> bytes:
    """A message, however the caller holds its bytes."""
    if isinstance(body, bytes | bytearray | memoryview):
        return bytes(body)
    raise TypeError(
        f"a message is bytes, not {type(body).__name__}" + "; use text.encode()" * isinstance(body, str)
    )
