"""The core of a client without receipts: what it owes, what is proved, and what is in doubt.

SSPQ and PHPMQ never answer a SEND or a verdict. That a connection ended proves nothing: a broker that stops,
or is killed, ends it as well. So a core can ask: the broker answers when everything before the question is
stored (`sspq.SYNC`, `phpmq.SYNC_QUEUE`). What was sent since the last answer is *unproved*; when the
connection is lost it becomes doubtful, and the next call of the client that can raise tells so, once, with
`ConnectionLost.in_doubt`. So nothing is lost in silence.

Verdicts in doubt are told by `flush` and `close` alone, and only where no new connection was made: over that
one the messages come again.

A server that is no Penstock does not know the question. For those there is `receipts=False`: nothing is
asked, and that the server has closed after us is taken as proof, because such a server says nothing else.

A core does no IO and reads no clock. It lives as long as its client and sees many connections, one after the
other: `generation` tells them apart, so that a verdict on a message of a former one is not sent on the next.
Whoever does the IO calls `opened`, `feed` and `lost`, one at a time.
"""

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from penstock.client.errors import ConnectionLost, TimedOut, Undelivered

CHUNK_MESSAGES = 1024
CHUNK_BYTES = 256 * 1024


CLOSED_BY_BROKER = "the broker has closed it"
WRONG_PORT = (
    "whoever is there does not speak this protocol; is this the right port? "
    "(for a server that is no Penstock: receipts=False)"
)


class Said(NamedTuple):
    """How much a client has said."""

    messages: int = 0
    verdicts: int = 0

    def beyond(self, other: "Said") -> "Said":
        return Said(self.messages - other.messages, self.verdicts - other.verdicts)

    def __str__(self) -> str:
        counts = ((self.messages, "message"), (self.verdicts, "acknowledgement"))
        return " and ".join(f"{count} {what}{'s' * (count != 1)}" for count, what in counts if count)


NOTHING = Said()


class Core:
    """A subclass has the session."""

    protocol = ""

    def __init__(self, *, receipts: bool) -> None:
        self.generation = 0  # of the connection that is open, or was last
        self.is_known = not receipts  # the broker has answered once, so that it is one
        self._receipts = receipts
        self._said = NOTHING  # on this connection
        self._proved = NOTHING  # of that: it is stored
        self._asked: Said | None = None  # what had been said when the broker was asked
        self._doubted = NOTHING  # said on lost connections, and not told yet
        self._refused = ""  # what the broker has said of messages that it did not store
        self._refused_in_doubt = 0
        self._why = ""

    # --- the connection ----------------------------------------------------------------------------

    def opened(self) -> bytes:
        """There is a new connection: what to write first."""
        self.generation += 1
        self._said = self._proved = NOTHING
        self._asked = None
        self._doubted = Said(self._doubted.messages)
        return self._begin()

    def _begin(self) -> bytes:
        raise NotImplementedError

    def feed(self, data: bytes | bytearray | memoryview) -> None:
        """Bytes from the broker. PeerViolation passes through."""
        raise NotImplementedError

    def lost(self, why: str) -> str:
        """The connection is gone. What to log of it."""
        unproved = self._said.beyond(self._proved)
        if unproved != NOTHING:
            self._doubted = Said(*map(sum, zip(self._doubted, unproved, strict=True)))
            self._why = why or "this client has closed it"
        self._said = self._proved = NOTHING
        self._asked = None
        return f"{why}; {unproved} in doubt" if unproved != NOTHING else why

    def forked(self) -> None:
        """This is a child process: what was said is its parent's business."""
        self.lost("")
        self.take_doubt()
        self._refused = ""

    # --- proof -------------------------------------------------------------------------------------

    def note_sent(self, count: int) -> None:
        self._said = Said(self._said.messages + count, self._said.verdicts)

    def note_settled(self, count: int) -> None:
        self._said = Said(self._said.messages, self._said.verdicts + count)

    def ask_proof(self, *, anyway: bool = False) -> bytes | None:
        """The question whether everything is stored; nothing where one is open, None where none is needed.

        `anyway`: ask also where nothing was said, to hear whether this is a broker at all.
        """
        if not self._receipts or (self._said == self._proved and not anyway):
            return None
        if self._asked is not None:
            return b""
        self._asked = self._said
        return self._question()

    def _question(self) -> bytes:
        raise NotImplementedError

    @property
    def is_asking(self) -> bool:
        """Whether the broker owes an answer to that question."""
        return self._asked is not None

    @property
    def has_receipts(self) -> bool:
        return self._receipts

    def answered(self, refused: int | None) -> None:
        """The broker's answer: so many of the messages are not stored (None: some, nobody says how many)."""
        self.is_known = True
        if self._asked is None:
            return
        asked, self._asked = self._asked, None
        messages = asked.beyond(self._proved).messages
        self._proved = asked
        if refused != 0:
            self._refused = f"the broker has refused {refused or 'some'} of {messages} messages"
            self._refused_in_doubt = 0 if refused else messages

    def proved(self) -> None:
        """The broker has read everything that was sent so far, as far as one without receipts can say it."""
        self._proved = self._said

    # --- doubt -------------------------------------------------------------------------------------

    def take_doubt(self) -> Said:
        """What is in doubt; it is not told again."""
        doubted, self._doubted = self._doubted, NOTHING
        return doubted

    def check(self, *, verdicts: bool = False) -> None:
        """Raise ConnectionLost where messages are in doubt, Undelivered where some were refused."""
        if self._refused:
            text, self._refused = self._refused, ""
            raise Undelivered(f"{self.protocol}: {text}; its log says why", in_doubt=self._refused_in_doubt)
        if self._doubted.messages or (verdicts and self._doubted.verdicts):
            doubted = self.take_doubt()
            raise ConnectionLost(
                f"{self.protocol}: the connection was lost ({self._why}), and nobody knows which of the last "
                f"{doubted} sent on it the broker has stored; {self._advice(doubted)}",
                in_doubt=doubted.messages,
                verdicts_in_doubt=doubted.verdicts,
            )

    def timed_out(self, text: str) -> TimedOut:
        """An error that tells what is in doubt, too."""
        doubted = self.take_doubt()
        if doubted != NOTHING:
            text += f", and {doubted} sent on it are in doubt: {self._advice(doubted)}"
        return TimedOut(text, in_doubt=doubted.messages, verdicts_in_doubt=doubted.verdicts)

    def broken(self, text: str) -> ConnectionLost:
        """The error of a peer that does not speak the protocol, which tells what is in doubt, too."""
        doubted = self.take_doubt()
        if doubted != NOTHING:
            text += f"; {doubted} sent to it are not stored, as far as anybody knows"
        return ConnectionLost(text, in_doubt=doubted.messages, verdicts_in_doubt=doubted.verdicts)

    def _advice(self, doubted: Said) -> str:
        advice = "send again what must not be lost, the next call connects again"
        if not doubted.messages:
            advice = "what was not stored comes again"
        return advice


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
