"""The engine interface: where messages live, seen from the broker.

An engine keeps messages and the state of each (`broker/life.py`); the broker keeps credit,
protocol state and timers. Everything is shaped for batches, and nothing here waits: what takes
time is answered by a callback, on the broker's own thread.

    declare     a queue without messages, where there is none of that name
    append      many messages for one queue; the receipt comes when they are durable
    transact    many messages for many queues, all or nothing, once per key
    ready       how many could be taken now
    take        the next messages for a consumer, as slices of stored blocks
    settle      a consumer's verdict on what it holds
    give_back   what a consumer leaves behind: lost, cancelled
    resume      what a consumer had when the broker before this one ended, and still has
    withdraw    taken out by the sender or an operator
    purge       everything that nobody holds taken out, living or dead
    redrive     dead letters back behind the tail
    expire      what its TTL has ended by now
    read        a range of offsets, whatever state the messages are in; synced ones only
    events      a range of events, likewise
    states      where the living messages of a range are, in runs
    describe    counts and positions of a queue
    counts      what has happened in a queue since the engine was opened
    changed     which queues `describe` shows otherwise than before
    info        how the engine itself stands
    confirm     a call back when all that has happened until now is durable
    durable_end up to which offset the messages of a queue are durable
    trim        let go of what retention no longer asks for

A dead letter stays where it is, so a door is a flag (`dead=True`), never another queue.
What may meet any number of runs (`purge`, `redrive`, `states`) takes a bound on them, and is asked
again for the rest.
Time is an argument, in microseconds since the epoch. Ranges are `(first, end)`, end exclusive.

Errors: `EngineRefused` says no to one call and changes nothing; `EngineFailed` is final for
this engine: nothing is accepted, taken or settled any more.
"""

from array import array
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from penstock.broker.batch import Batch, Slice
from penstock.broker.life import Event, Reason, State
from penstock.broker.policy import Policies
from penstock.broker.words import Outcome, Ranges, Where
from penstock.errors import PenstockError


class EngineError(PenstockError):
    """The base of what an engine says no with."""


class EngineRefused(EngineError):
    """This call cannot be done now; nothing was changed. The text says what would help."""


class QueueUnknown(EngineRefused):
    """There is no queue of that name. The first message that is sent to it makes it."""


class ReaderUnknown(EngineRefused):
    """There is no reader of that name (any more): its lease has ended, or it was released."""


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


class Step(NamedTuple):
    """Which of the calls this is that make up one transaction, where it is too large for a single one."""

    number: int  # from 0, one after the other
    last: bool


class TransactionDone(NamedTuple):
    """A transaction's receipt. `repeated`: the key, or the step, had been stored before, nothing was added.

    `steps`: how many of a transaction's steps are stored, while the last one is not; 0: it is whole.
    """

    key: str
    stored: list[Stored]  # of the whole transaction; of one step, where it is not whole
    repeated: bool
    steps: int = 0
    redriven: int = 0  # dead letters that this call has repaired


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
    """A named reader that holds retention in a queue: up to where it has read, and until when it holds.

    A reader of several queues is one of these for each.
    """

    name: str
    queue: str
    view: str  # "messages" (position is an offset) or "events" (an event offset)
    position: int
    lease_until_us: int
    capped: bool = False
    """Told by `readers` alone: it is so far behind that what it has not read is not all held for it."""


class StateRuns:
    """Living messages in runs that share everything but the offset, by offset; a column per attribute.

    Offsets from the one asked for up to `next` that are in no run are gone. The columns that begin with
    `repair` are a table of their own: messages whose payload is not the one that they were sent with.
    """

    __slots__ = (
        "attempts",
        "consumer",
        "consumers",
        "end",
        "expires_us",
        "first",
        "next",
        "reason",
        "repair_distance",
        "repair_end",
        "repair_first",
        "retries",
        "state",
        "time_us",
    )

    def __init__(self) -> None:
        self.next = 0
        self.consumers: list[str] = []
        self.first = array("q")
        self.end = array("q")
        self.time_us = array("q")  # held: of dispatch; dead: of death; otherwise 0
        self.expires_us = array("q")  # 0: never, -2: as stored
        self.attempts = array("i")  # deliveries that have ended
        self.retries = array("i")  # what is left, -1: no counter, -2: as stored
        self.consumer = array("i")  # index into `consumers`, -1: nobody holds them
        self.state = array("B")  # life.State
        self.reason = array("B")  # life.Reason, of death
        self.repair_first = array("q")
        self.repair_end = array("q")
        self.repair_distance = array("q")  # from an offset to that of its payload among the repaired ones

    def __len__(self) -> int:
        return len(self.first)

    def end_at(self, offset: int) -> None:
        """Leave out what is at or behind an offset."""
        rows = bisect_left(self.first, offset)
        for column in (
            self.first,
            self.end,
            self.time_us,
            self.expires_us,
            self.attempts,
            self.retries,
            self.consumer,
            self.state,
            self.reason,
        ):
            del column[rows:]
        if rows and self.end[-1] > offset:
            self.end[-1] = offset
        self.next = offset


SYNC_BOUNDS_SECONDS = (0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0)


@dataclass(slots=True)
class SyncInfo:
    """How long syncs have taken since the engine was opened."""

    count: int = 0
    seconds_sum: float = 0.0
    seconds_last: float = 0.0
    buckets: list[int] = field(default_factory=lambda: [0] * (len(SYNC_BOUNDS_SECONDS) + 1))
    """How many took at most the bound of the same index, and more than the one before; the last: longer."""

    def add(self, seconds: float) -> None:
        self.count += 1
        self.seconds_sum += seconds
        self.seconds_last = seconds
        self.buckets[bisect_left(SYNC_BOUNDS_SECONDS, seconds)] += 1

    def quantile(self, part: float) -> float:
        """About the time within which that part of all syncs returned; 0 where there was none.

        Within a bucket they are taken to be spread evenly; beyond the last bound nobody knows.
        """
        rank = part * self.count
        low = 0.0
        for bound, count in zip(SYNC_BOUNDS_SECONDS, self.buckets, strict=False):
            if count and rank <= count:
                return low + (bound - low) * rank / count
            rank -= count
            low = bound
        return low if self.count else 0.0


@dataclass(slots=True)
class EngineInfo:
    """An engine as `GET /v1/engine` shows it."""

    engine: str  # "log"
    data: str  # where the messages are
    opening: int
    position: int  # where the next block goes
    segments: int
    log_bytes: int
    disk_bytes_free: int
    disk_bytes_total: int
    bytes_in_flight: int
    full: bool
    failed: str  # empty: it has not
    damage: list[str]
    sync: SyncInfo
    readers: int  # names, not queues
    # A front-end and its NATS cluster, as JSON (`cluster/info.py`); None: messages are on this machine alone.
    cluster: dict[str, Any] | None = None


class Engine(Protocol):
    """See the module's docstring."""

    @property
    def opening(self) -> int:
        """A number that no earlier opening of these messages had, and no later one will have."""

    @property
    def queue_count(self) -> int: ...

    def has_queue(self, queue: str) -> bool: ...

    def declare(self, queue: str, now_us: int) -> None: ...

    def append(self, queue: str, batch: Batch, now_us: int, receipt: Receipt | None = None) -> None: ...

    def transact(
        self,
        key: str,
        parts: Sequence[tuple[str, Batch]],
        now_us: int,
        receipt: TransactionReceipt | None = None,
        *,
        step: Step | None = None,
        fingerprint: str = "",
    ) -> None: ...

    def transaction(self, key: str) -> list[Stored] | None: ...

    def transaction_fingerprint(self, key: str) -> str: ...

    def transaction_newest(self, series: str) -> str | None: ...

    def transaction_steps(self, key: str) -> int: ...

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
        bytes_each: int = 0,
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

    def resume(
        self, queue: str, consumer: str, ranges: Ranges, now_us: int, *, origin: bytes, dead: bool = False
    ) -> Ranges: ...

    def withdraw(self, queue: str, ranges: Ranges, reason: Reason, now_us: int) -> list[Fate]: ...

    def purge(
        self,
        queue: str,
        now_us: int,
        *,
        dead: bool = False,
        limit: int | None = None,
        runs_max: int | None = None,
    ) -> list[Fate]: ...

    def redrive(
        self,
        queue: str,
        now_us: int,
        *,
        reason: Reason | None = None,
        ranges: Ranges | None = None,
        limit: int | None = None,
        runs_max: int | None = None,
    ) -> list[Fate]: ...

    def expire(self, now_us: int) -> list[tuple[str, Fate]]: ...

    def read(self, queue: str, start: int, end: int) -> Iterator[Slice]: ...

    def events(self, queue: str, start: int, end: int) -> Iterator[EventRun]: ...

    def states(
        self, queue: str, start: int, end: int, runs_max: int, only: State | None = None
    ) -> StateRuns: ...

    def queues(self) -> list[str]: ...

    def describe(self, queue: str) -> QueueInfo: ...

    def counts(self, queue: str) -> dict[tuple[Event, Reason], int]: ...

    def deaths(self, queue: str) -> dict[Reason, int]: ...

    def changed(self) -> list[str]: ...

    def info(self) -> EngineInfo: ...

    def is_paused(self, queue: str) -> bool: ...

    def pause(self, queue: str, paused: bool, now_us: int) -> None: ...

    def hold_retention(self, reader: ReaderInfo, now_us: int) -> None: ...

    def release_retention(self, name: str, now_us: int, *, queue: str | None = None) -> None: ...

    def readers(self) -> list[ReaderInfo]: ...

    def confirm(self, now_us: int, call: Callable[[EngineFailed | None], None]) -> None: ...

    def durable_end(self, queue: str) -> int: ...

    def trim(self, now_us: int) -> None: ...

    def tick(self, now_us: int) -> None: ...

    def flush(self, now_us: int) -> None: ...

    def close(self, now_us: int) -> None: ...
