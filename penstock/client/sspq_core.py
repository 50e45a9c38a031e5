"""The core of an SSPQ client: one message in flight, and one question at a time.

    idle ── ask ──► waiting ── a message ──► holding ── ack ──► idle
                       └────── declined ──► idle

A question cannot be taken back: where a `receive` gave up waiting, the next one gets its answer, which may
have come in the meantime. On a lost connection the question is gone, and so is the message that was held:
the broker gives it again with one retry less.
"""

from collections.abc import Sequence
from itertools import count

from penstock.client.core import Core
from penstock.client.errors import NotSupported
from penstock.model.batch import RETRIES_ENDLESS, Batch
from penstock.protocols.errors import MisuseError
from penstock.protocols.sspq_session import ClientSession, Declined, Delivery, State, Synced

DECLINED = {
    False: "sspq: the broker says that no message will come: it stops, or the queue is paused or closed "
    "to this client; try again later or elsewhere",
    True: "sspq: the broker says that no dead letter will come: the queue keeps none (dead-letters = off), "
    "is paused or closed to this client, or the broker stops",
}
"""By whether it was asked for a dead letter."""
DROPPED = "sspq: acknowledgement dropped: done before, or the connection is gone and the message comes again"


class Taken:
    """A message in the hands of the caller, until it acknowledges it."""

    __slots__ = ("_delivery", "_number")

    def __init__(self, number: int, delivery: Delivery) -> None:
        self._number = number
        self._delivery = delivery

    @property
    def body(self) -> bytes:
        return self._delivery.payload

    @property
    def retries(self) -> int | None:
        """How often it is given again if it is not acknowledged; None: without end."""
        left = self._delivery.retries
        return None if left == RETRIES_ENDLESS else left

    @property
    def is_dead(self) -> bool:
        """Whether it is a dead letter."""
        return self._delivery.dead

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {len(self.body)} bytes, retries {self.retries}>"


class SspqCore(Core):
    protocol = "sspq"

    def __init__(self, payload_bytes_max: int, *, receipts: bool = True) -> None:
        super().__init__(receipts=receipts)
        self._payload_bytes_max = payload_bytes_max
        self._session: ClientSession | None = None
        self._answer: Delivery | Declined | None = None
        self._held = 0  # the number of the message in flight; 0: none
        self._numbers = count(1)

    # --- the connection ----------------------------------------------------------------------------

    def _begin(self) -> bytes:
        self._session = ClientSession(payload_bytes_max=self._payload_bytes_max)
        self._answer = None
        return b""

    def lost(self, why: str) -> str:
        self._session = None
        self._answer = None
        self._held = 0
        return super().lost(why)

    def feed(self, data: bytes | bytearray | memoryview) -> None:
        assert self._session is not None
        for answer in self._session.receive(data):
            if isinstance(answer, Delivery | Declined):
                self._answer = answer
                self._held = next(self._numbers) if isinstance(answer, Delivery) else 0
            elif isinstance(answer, Synced):
                self.answered(None if answer.refused else 0)

    def _question(self) -> bytes:
        return self._open_session().sync()

    # --- out ---------------------------------------------------------------------------------------

    def send(self, bodies: list[bytes], retries: int | None) -> bytes:
        """Messages for the listener's queue, as one buffer."""
        if retries is not None and not 0 <= retries <= RETRIES_ENDLESS:
            raise NotSupported(f"retries is {retries}: use 0 to 254, or {RETRIES_ENDLESS} or None for no end")
        column: Sequence[int] | None = None if retries is None else [retries] * len(bodies)
        try:
            encoded = self._open_session().send(Batch.of(bodies, retries=column))
        except MisuseError as error:
            raise NotSupported(str(error)) from None
        self.note_sent(len(bodies))
        return encoded

    def ask(self, *, dead: bool) -> bytes:
        """The question for a message or a dead letter; nothing where it was asked before."""
        session, answer = self._open_session(), self._answer
        waiting = session.state if answer is None else _WAITING[answer.dead]
        if waiting is _WAITING[dead]:
            return b""
        if waiting is _WAITING[not dead]:
            raise NotSupported(
                f"sspq: a {_CALL[not dead]}() that timed out still waits for its message; "
                f"call it again and acknowledge, or use another client for {_CALL[dead]}()"
            )
        try:
            return session.ask(dead=dead)
        except MisuseError:
            raise NotSupported(
                "sspq: one message at a time: acknowledge the last one first, or use another client"
            ) from None

    @property
    def is_waiting(self) -> bool:
        """Whether an answer to a question will come over the connection that is open."""
        session = self._session
        return session is not None and session.state in _WAITING.values()

    def is_answered(self) -> bool:
        """Whether it is here, or will not come."""
        return not self.is_waiting

    def take(self) -> tuple[int, Delivery] | Declined | None:
        """The answer to the question, if it is here; a message with the number to confirm it by."""
        answer, self._answer = self._answer, None
        return (self._held, answer) if isinstance(answer, Delivery) else answer

    def confirm(self, number: int) -> bytes | None:
        """The message is done; None where it is not in flight any more."""
        if self._session is None or number != self._held:
            return None
        self._held = 0
        self.note_settled(1)
        return self._session.confirm()

    def _open_session(self) -> ClientSession:
        assert self._session is not None  # whoever does the IO has connected before
        return self._session


_WAITING = {False: State.WAITING, True: State.WAITING_DEAD}
_CALL = {False: "receive", True: "receive_dead"}
