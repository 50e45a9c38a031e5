"""The core of a PHPMQ client: its windows, and the messages that were fetched ahead.

A *window* is what `consume` asks for: at most `prefetch` unsettled messages at this client. It stays across
connections; `opened` asks for all windows again. With a `count`, no more messages than that are ever held:
the window shrinks before the verdicts that would free more room than is wanted, in the same write.

Rules that always hold:
  * What was fetched over a lost connection is forgotten: the broker gives it again, to whomever.
  * A verdict is written only on the connection that the message came over.
  * Leaving a loop ends its window (`is_over`), and that does no IO: it may happen at any moment, even in the
    middle of a write. The broker is told with the next verdict, and gives no more than `prefetch` until then.

How it fails: `NotSupported` where PHPMQ cannot say it, with nothing changed; `PeerViolation` from `feed`.
"""

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import repeat
from typing import NamedTuple, TypeVar

from penstock.broker.batch import Batch
from penstock.broker.words import Outcome
from penstock.client.core import Core
from penstock.client.errors import NotSupported
from penstock.protocols.errors import MisuseError
from penstock.protocols.phpmq import Limits
from penstock.protocols.phpmq_session import ClientSession


class Fetched(NamedTuple):
    """A message that is here and was not handed out yet."""

    id: bytes
    body: bytes
    ttl_seconds: int  # what was left when it was dispatched; 0: it has no TTL
    generation: int  # of the connection that it came over


class Held:
    """A message in the hands of the caller, until its client is told what became of it."""

    __slots__ = ("_fetched", "_settled", "queue")

    def __init__(self, queue: str, fetched: Fetched) -> None:
        self._fetched = fetched
        self._settled = False
        self.queue = queue

    @property
    def body(self) -> bytes:
        return self._fetched.body

    @property
    def id(self) -> str:
        """32 hex digits that name the message for its whole life."""
        return self._fetched.id.decode("ascii", "replace")

    @property
    def ttl(self) -> int | None:
        """Seconds that were left when it was dispatched; None: it has no end."""
        return self._fetched.ttl_seconds or None

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.id} of {self.queue!r}, {len(self.body)} bytes>"


M = TypeVar("M", bound=Held)

DROPPED = "queue %r: %s of %d messages dropped: the connection they came over is gone, and they come again"


def unsettled(messages: Iterable[M]) -> dict[tuple[str, int], list[M]]:
    """Those without a verdict, by queue and connection: each group can be settled in one go."""
    groups: dict[tuple[str, int], list[M]] = {}
    for message in messages:
        if not message._settled:
            groups.setdefault((message.queue, message._fetched.generation), []).append(message)
    return groups


def ids_of(messages: Iterable[Held]) -> list[bytes]:
    return [message._fetched.id for message in messages]


def mark_settled(messages: Iterable[Held]) -> None:
    for message in messages:
        message._settled = True


@dataclass(slots=True, eq=False)
class Window:
    """One `consume`."""

    queue: str
    prefetch: int
    count: int | None  # how many messages are wanted in all; None: no end
    handed_out: int = 0
    settled: int = 0  # by verdicts on this connection, or handed out over former ones
    asked: int = 0  # the size that the broker was told last
    is_over: bool = False  # nobody waits for its messages any more

    @property
    def is_done(self) -> bool:
        return self.count is not None and self.handed_out >= self.count

    @property
    def size(self) -> int:
        """How many unsettled messages may be here now."""
        if self.is_over:
            return 0
        return self.prefetch if self.count is None else max(0, min(self.prefetch, self.count - self.settled))


class PhpmqCore(Core):
    """See the module's docstring."""

    protocol = "phpmq"

    def __init__(self, payload_bytes_max: int) -> None:
        super().__init__()
        self._limits = Limits(payload_bytes_max=payload_bytes_max)
        self._session: ClientSession | None = None
        self._windows: dict[str, Window] = {}
        self._inboxes: dict[str, deque[Fetched]] = {}

    # --- the connection ----------------------------------------------------------------------------

    def opened(self) -> bytes:
        self.generation += 1
        self._session = ClientSession(limits=self._limits)
        self._inboxes.clear()
        requests = []
        for window in self._windows.values():
            window.settled = window.handed_out
            window.asked = window.size
            if window.size:
                requests.append(self._session.consume(window.queue, window.size))
        return b"".join(requests)

    def lost(self, why: str) -> None:
        super().lost(why)
        self._session = None
        self._inboxes.clear()

    def feed(self, data: bytes | bytearray | memoryview) -> None:
        assert self._session is not None
        for event in self._session.receive(data):
            batch = event.batch
            inbox = self._inboxes.setdefault(event.queue, deque())
            ttls: Sequence[int] | repeat[int] = (
                batch.ttl_seconds if batch.ttl_seconds is not None else repeat(0)
            )
            inbox.extend(map(Fetched, event.ids, batch.messages(), ttls, repeat(self.generation)))

    # --- out ---------------------------------------------------------------------------------------

    def send(self, queue: str, bodies: list[bytes], ttl_seconds: int | None) -> bytes:
        """Messages for a queue, as one buffer."""
        if ttl_seconds is not None and (ttl_seconds < 1 or ttl_seconds != int(ttl_seconds)):
            raise NotSupported(
                f"queue {queue!r}: a ttl of {ttl_seconds} s: use whole seconds from 1, or None for no end"
            )
        ttls = None if ttl_seconds is None else [int(ttl_seconds)] * len(bodies)
        try:
            encoded = self._open_session().send(queue, Batch.of(bodies, ttl_seconds=ttls))
        except MisuseError as error:
            raise NotSupported(str(error)) from None
        self._unproved += len(bodies)
        return encoded

    def consume(self, queue: str, prefetch: int, count: int | None) -> tuple[Window, bytes]:
        """Open a window on a queue, or take over the one that is there."""
        if prefetch < 1:
            raise NotSupported(f"queue {queue!r}: a prefetch of {prefetch}: use at least 1")
        if count is not None and count < 1:
            raise NotSupported(f"queue {queue!r}: a count of {count}: use at least 1, or None for no end")
        window = Window(queue, prefetch, count)
        try:
            encoded = self._open_session().consume(queue, window.size)
        except MisuseError as error:
            raise NotSupported(str(error)) from None
        window.asked = window.size
        self._windows[queue] = window
        return window, encoded

    def take(self, window: Window) -> Fetched | None:
        """The next message for a window, if one is here."""
        inbox = self._inboxes.get(window.queue)
        if not inbox:
            return None
        window.handed_out += 1
        return inbox.popleft()

    def settle(
        self, outcome: Outcome, queue: str, ids: Sequence[bytes], generation: int, ttl_seconds: int = 0
    ) -> bytes | None:
        """A verdict on messages that came over one connection; None where that is not the present one."""
        session = self._session
        if session is None or generation != self.generation:
            return None
        try:
            if outcome is Outcome.ACK:
                verdicts = session.ack(queue, ids)
            elif outcome is Outcome.REJECT:
                verdicts = session.reject(queue, ids)
            else:
                verdicts = session.requeue(queue, ids, ttl_seconds)
        except MisuseError as error:
            raise NotSupported(str(error)) from None
        window = self._windows.get(queue)
        if window is None:
            return verdicts
        window.settled += len(ids)
        if window.size == window.asked:
            return verdicts
        window.asked = window.size
        return session.consume(queue, window.size) + verdicts

    def _open_session(self) -> ClientSession:
        assert self._session is not None  # whoever does the IO has connected before
        return self._session
