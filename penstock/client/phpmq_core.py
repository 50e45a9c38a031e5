"""The core of a PHPMQ client: its windows, and the messages that were fetched ahead.

A *window* is what one `consume` asks for: at most `prefetch` unsettled messages at this client. Several may
be open on one queue: the broker is asked for the room of all of them together, and for that of what earlier
ones have handed out and is unsettled, because it counts that, too. Windows stay across connections; `opened`
asks for all of them again. With a `count`, no more messages than that are ever held: the window shrinks
before the verdicts that would free more room than is wanted, in the same write.

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

from penstock.client.core import Core
from penstock.client.errors import NotSupported
from penstock.model.batch import Batch
from penstock.model.words import Outcome
from penstock.protocols.errors import MisuseError
from penstock.protocols.phpmq import SYNC_QUEUE, Limits
from penstock.protocols.phpmq_session import ClientSession


@dataclass(slots=True, eq=False)
class Fetched:
    """A message that is here."""

    id: bytes
    body: bytes
    ttl_seconds: int  # what was left when it was dispatched; 0: it has no TTL
    generation: int  # of the connection that it came over
    window: "Window | None" = None  # that it was handed out to
    is_settled: bool = False


class Held:
    """A message in the hands of the caller, until its client is told what became of it."""

    __slots__ = ("_fetched", "queue")

    def __init__(self, queue: str, fetched: Fetched) -> None:
        self._fetched = fetched
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


DROPPED = "queue %r: %s of %d messages dropped: the connection they came over is gone, and they come again"


def unsettled(messages: Iterable[Held]) -> dict[tuple[str, int], list[Fetched]]:
    """Those without a verdict, by queue and connection: each group can be settled in one go."""
    groups: dict[tuple[str, int], dict[Fetched, None]] = {}
    for message in messages:
        fetched = message._fetched
        if not fetched.is_settled:  # and once, however often it is in the list
            groups.setdefault((message.queue, fetched.generation), {})[fetched] = None
    return {which: list(group) for which, group in groups.items()}


@dataclass(slots=True, eq=False)
class Window:
    """One `consume`."""

    queue: str
    prefetch: int
    count: int | None  # how many messages are wanted in all; None: no end
    handed_out: int = 0
    settled: int = 0  # by verdicts on this connection, or handed out over former ones
    is_over: bool = False  # nobody waits for its messages any more

    @property
    def is_done(self) -> bool:
        return self.count is not None and self.handed_out >= self.count

    @property
    def size(self) -> int:
        """How many unsettled messages may be here now; of one that is over, those that are."""
        if self.is_over:
            return self.handed_out - self.settled
        return self.prefetch if self.count is None else max(0, min(self.prefetch, self.count - self.settled))


class Windows:
    """Those on one queue."""

    __slots__ = ("_all", "asked")

    def __init__(self) -> None:
        self._all: list[Window] = []
        self.asked = 0  # the size that the broker was told last

    def add(self, window: Window) -> None:
        self._all.append(window)

    def remove(self, window: Window) -> None:
        self._all.remove(window)

    def begin(self) -> None:
        """There is a new connection, over which nothing was handed out yet."""
        self._all = [window for window in self._all if not window.is_over]
        for window in self._all:
            window.settled = window.handed_out

    def size(self) -> int:
        """What to ask the broker for; nothing where nobody waits."""
        self._all = [window for window in self._all if not window.is_over or window.size]
        if all(window.is_over for window in self._all):
            return 0
        return sum(window.size for window in self._all)


class PhpmqCore(Core):
    protocol = "phpmq"

    def __init__(self, payload_bytes_max: int, *, receipts: bool = True) -> None:
        super().__init__(receipts=receipts)
        self._limits = Limits(payload_bytes_max=payload_bytes_max)
        self._session: ClientSession | None = None
        self._windows: dict[str, Windows] = {}
        self._inboxes: dict[str, deque[Fetched]] = {}

    # --- the connection ----------------------------------------------------------------------------

    def _begin(self) -> bytes:
        self._session = ClientSession(limits=self._limits)
        self._inboxes.clear()
        requests = []
        for queue, windows in self._windows.items():
            windows.begin()
            windows.asked = windows.size()
            if windows.asked:
                requests.append(self._session.consume(queue, windows.asked))
        return b"".join(requests)

    def lost(self, why: str) -> str:
        self._session = None
        self._inboxes.clear()
        return super().lost(why)

    def forked(self) -> None:
        super().forked()
        self._windows.clear()

    def feed(self, data: bytes | bytearray | memoryview) -> None:
        assert self._session is not None
        for event in self._session.receive(data):
            batch = event.batch
            if event.queue == SYNC_QUEUE:
                for content in batch.messages():
                    self.answered(int(content) if content.isdigit() else None)
                continue
            inbox = self._inboxes.setdefault(event.queue, deque())
            ttls: Sequence[int] | repeat[int] = (
                batch.ttl_seconds if batch.ttl_seconds is not None else repeat(0)
            )
            inbox.extend(map(Fetched, event.ids, batch.messages(), ttls, repeat(self.generation)))

    def _question(self) -> bytes:
        return self._open_session().sync()

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
        self.note_sent(len(bodies))
        return encoded

    def consume(self, queue: str, prefetch: int, count: int | None) -> tuple[Window, bytes]:
        """Open a window on a queue, beside those that are there."""
        if prefetch < 1:
            raise NotSupported(f"queue {queue!r}: a prefetch of {prefetch}: use at least 1")
        if count is not None and count < 1:
            raise NotSupported(f"queue {queue!r}: a count of {count}: use at least 1, or None for no end")
        window = Window(queue, prefetch, count)
        windows = self._windows.get(queue) or Windows()
        windows.add(window)
        size = windows.size()
        try:
            encoded = self._open_session().consume(queue, size)
        except MisuseError as error:
            windows.remove(window)
            raise NotSupported(str(error)) from None
        windows.asked = size
        self._windows[queue] = windows
        return window, encoded

    def take(self, window: Window) -> Fetched | None:
        """The next message for a window, if one is here."""
        inbox = self._inboxes.get(window.queue)
        if not inbox:
            if window.queue not in self._windows:
                raise NotSupported(
                    f"queue {window.queue!r}: this loop was begun before a fork, in the parent process; "
                    "consume again here"
                )
            return None
        window.handed_out += 1
        fetched = inbox.popleft()
        fetched.window = window
        return fetched

    def has(self, queue: str) -> bool:
        """Whether a message of it is here."""
        return bool(self._inboxes.get(queue))

    def settle(
        self, outcome: Outcome, queue: str, fetched: Sequence[Fetched], generation: int, ttl_seconds: int = 0
    ) -> bytes | None:
        """A verdict on messages that came over one connection; None where that is not the present one."""
        session = self._session
        if session is None or generation != self.generation:
            return None
        ids = [one.id for one in fetched]
        try:
            if outcome is Outcome.ACK:
                verdicts = session.ack(queue, ids)
            elif outcome is Outcome.REJECT:
                verdicts = session.reject(queue, ids)
            else:
                verdicts = session.requeue(queue, ids, ttl_seconds)
        except MisuseError as error:
            raise NotSupported(str(error)) from None
        self.note_settled(len(ids))
        for one in fetched:
            one.is_settled = True
            if one.window is not None:
                one.window.settled += 1
        windows = self._windows[queue]
        size = windows.size()
        if size == windows.asked:
            return verdicts
        windows.asked = size
        return session.consume(queue, size) + verdicts

    def _open_session(self) -> ClientSession:
        assert self._session is not None  # whoever does the IO has connected before
        return self._session
