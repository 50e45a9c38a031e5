"""How the log stands, as it tells operators and readers: queues, readers, states, syncs, itself."""

from array import array
from bisect import bisect_left
from dataclasses import dataclass, field
from typing import Any, Final

ARCHIVE_READERS: Final = {"messages": "penstock.archive", "events": "penstock.archive-events"}
"""What stands for `[archive]` among the readers, by view. Nobody else has a reader of such a name."""


@dataclass(slots=True)
class QueueInfo:
    """A queue as `GET /v1/queues/{q}` shows it, as far as the engine knows."""

    name: str
    ready: int
    delayed: int
    held: int
    dead: int
    offset_start: int
    offset_end: int
    event_start: int
    event_end: int
    bytes: int  # payload from the oldest living message on
    oldest_us: int  # when the oldest living message was accepted; 0: there is none
    paused: bool
    identity: str  # what the ids of its messages begin with: another queue of this name has another


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

    end: int = field(default=0, compare=False)
    """Likewise: where there is nothing more to read."""


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
        "steps",
        "time_us",
        "whys",
    )

    def __init__(self) -> None:
        self.next = 0
        # Tails when the clock was put forward, and how far: moments of expiry before these are so much later.
        self.steps: tuple[tuple[int, int], ...] = ()
        self.consumers: list[str] = []
        self.whys: list[tuple[int, int, str]] = []  # first, end, what was said when these were rejected
        self.first = array("q")
        self.end = array("q")
        self.time_us = array("q")  # held: of dispatch; dead: of death; delayed: until when, -2: as stored
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
class StagesInfo:
    """Parts of transactions that wait for their commit, or are on their way into the log."""

    count: int
    bytes: int
    since_us: int  # when the oldest came; 0: there is none


@dataclass(slots=True)
class LogInfo:
    """An engine as `GET /v1/engine` shows it."""

    engine: str  # "log"
    data: str  # where the messages are
    opening: int
    position: int  # where the next block goes
    segments: int
    log_bytes: int
    disk_bytes_free: int
    disk_bytes_total: int
    disk_bytes_reserve: int  # with less of it free, somebody should make room
    disk_room_in: str  # whose room that is: the folder, or what limits a cluster's stream most
    bytes_in_flight: int
    full: bool
    failed: str  # empty: it has not
    damage: list[str]
    sync: SyncInfo
    readers: int  # names, not queues
    stages: StagesInfo
    # A front-end and its NATS cluster, as JSON (`cluster/info.py`); None: messages are on this machine alone.
    cluster: dict[str, Any] | None = None
