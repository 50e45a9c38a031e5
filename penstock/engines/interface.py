"""The engine interface: where messages live, seen from the broker.

An engine keeps messages and the state of each (`broker/life.py`); the broker keeps credit,
protocol state and timers. Everything is shaped for batches, and nothing here waits: what takes
time is answered by a callback, on the broker's own thread.

    append      many messages for one queue; the receipt comes when they are durable
    transact    many messages for many queues, all or nothing, once per key
    ready       how many could be taken now
    take        the next messages for a consumer, as slices of stored blocks
    settle      a consumer's verdict on what it holds
    give_back   what a consumer leaves behind: lost, cancelled
    withdraw    taken out by the sender or an operator
    redrive     dead letters back behind the tail
    expire      what its TTL has ended by now
    read        a range of offsets, whatever state the messages are in; synced ones only
    events      a range of events, likewise
    describe    counts and positions of a queue
    trim        let go of what retention no longer asks for

A dead letter stays where it is, so a door is a flag (`dead=True`), never another queue.
Time is an argument, in microseconds since the epoch. Ranges are `(first, end)`, end exclusive.

Errors: `EngineRefused` says no to one call and changes nothing; `EngineFailed` is final for
this engine: nothing is accepted, taken or settled any more.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from penstock.broker.batch import Batch, Slice
from penstock.broker.life import Event, Reason
from penstock.broker.policy import Policies
from penstock.broker.words import Outcome, Ranges, Where
from penstock.errors import PenstockError


class EngineError(PenstockError):
    """The base of what an engine says no with."""


class EngineRefused(EngineError):
    """This call cannot be done now; nothing was changed. The text says what would help."""


class DiskFull(EngineRefused):
    """No room for new messages. Deliveries and settlements go on; try again when there is room."""


class QueueFull(EngineRefused):
    """The queue has its `max-bytes`. Try again when consumers have settled some."""


class EngineFailed(EngineError):
    """The engine has stopped for good; what it confirmed is safe, the rest is unknown."""


class LogInUse(EngineError):
    """Another process has this data folder open."""


class LogDamaged(EngineError):
    """Stored bytes are not what was written. Says file, position and offsets."""


class Stored(NamedTuple):
    """A receipt: these messages are as durable as their queue promises."""

    queue: str
    first: int
    end: int
    origin: bytes


Receipt = Callable[[Stored | EngineError], None]


class TransactionDone(NamedTuple):
    """A transaction's receipt. `repeated`: the key had been committed before, nothing was added."""

    key: str
    stored: list[Stored]
    repeated: bool


TransactionReceipt = Callable[[TransactionDone | EngineError], None]


class Fate(NamedTuple):
    """What has become of a run of messages."""

    first: int
    end: int
    event: Event
    reason: Reason
    consumer: str = ""  # who had them, where they were taken from somebody's hands


class EventRun(NamedTuple):
    """One recorded event of a run of messages that share everything but the offset."""

    event_offset: int  # of the run's first message; the others follow
    event: Event
    first: int
    end: int
    reason: Reason
    consumer: str
    attempt: int
    dispatched_us: int  # 0: not dispatched
    time_us: int


@dataclass(slots=True)
class QueueInfo:
    """A queue as `GET /v1/queues/{q}` shows it, as far as the engine knows."""

    name: str
    ready: int
    held: int
    dead: int
    offset_start: int
    offset_end: int
    event_start: int
    event_end: int
    bytes: int  # payload from the oldest living message on
    oldest_us: int  # when the oldest living message was accepted; 0: there is none
    paused: bool


@dataclass(slots=True)
class ReaderInfo:
    """A named reader that holds retention: up to where it has read, and until when it holds."""

    name: str
    queue: str
    view: str  # "messages" (position is an offset) or "events" (an event offset)
    position: int
    lease_until_us: int


class Engine(Protocol):
    """See the module's docstring."""

    def append(self, queue: str, batch: Batch, now_us: int, receipt: Receipt | None = None) -> None: ...

    def transact(
        self,
        key: str,
        parts: Sequence[tuple[str, Batch]],
        now_us: int,
        receipt: TransactionReceipt | None = None,
    ) -> None: ...

    def set_policies(self, policies: Policies) -> None: ...

    def ready(self, queue: str, *, dead: bool = False) -> int: ...

    def take(
        self,
        queue: str,
        consumer: str,
        count: int,
        now_us: int,
        *,
        bytes_max: int = ...,
        dead: bool = False,
    ) -> list[Slice]: ...

    def settle(
        self,
        queue: str,
        consumer: str,
        outcome: Outcome,
        ranges: Ranges,
        now_us: int,
        *,
        origin: bytes | None = None,
        ttl_seconds: int = 0,
        dead: bool = False,
    ) -> list[Fate]: ...

    def give_back(
        self,
        queue: str,
        consumer: str,
        now_us: int,
        *,
        ranges: Ranges | None = None,
        where: Where = Where.PLACE,
        lost: bool = True,
    ) -> list[Fate]: ...

    def withdraw(self, queue: str, ranges: Ranges, reason: Reason, now_us: int) -> list[Fate]: ...

    def purge(self, queue: str, now_us: int, *, dead: bool = False) -> int: ...

    def redrive(
        self,
        queue: str,
        now_us: int,
        *,
        reason: Reason | None = None,
        ranges: Ranges | None = None,
        limit: int | None = None,
    ) -> int: ...

    def expire(self, now_us: int) -> list[tuple[str, Fate]]: ...

    def read(self, queue: str, start: int, end: int) -> Iterator[Slice]: ...

    def events(self, queue: str, start: int, end: int) -> Iterator[EventRun]: ...

    def queues(self) -> list[str]: ...

    def describe(self, queue: str) -> QueueInfo: ...

    def is_paused(self, queue: str) -> bool: ...

    def pause(self, queue: str, paused: bool, now_us: int) -> None: ...

    def hold_retention(self, reader: ReaderInfo, now_us: int) -> None: ...

    def release_retention(self, name: str, now_us: int) -> None: ...

    def readers(self) -> list[ReaderInfo]: ...

    def trim(self, now_us: int) -> None: ...

    def tick(self, now_us: int) -> None: ...

    def flush(self, now_us: int) -> None: ...

    def close(self, now_us: int) -> None: ...
