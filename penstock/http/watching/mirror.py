"""Mirror: the queues as the first process sees them, kept here so that looking costs the broker little.

    round      ask for the rows that have changed since the last round, part by part; all of them at first
    schedule   a round every second, or less often where rounds take long: at most about a hundredth of
               the broker's time is spent on being looked at
    refresh    a round now, for somebody who wants to see what has just happened
    rates      messages per second over the last `WINDOW_SECONDS`, from the counters in the rows
    recorder   is told of every row, and makes history of them (`penstock/http/history`)

Rules that always hold:
  * A refresh shows what happened before it was asked for. A round that is under way may have passed by
    already, so the next one serves, and it serves everybody who asks meanwhile.
  * A row is replaced, never changed: who has one may go on reading it, in a thread too.
  * A queue at rest is its row and nothing else: there may be a hundred thousand.
  * Rates are as of the last round, whoever asked for it, and never of less than a second: a refresh
    shortly after a round does not make them jump.
  * A subscriber has a set of names, and gets the newest rows of them when it is ready for them. What it
    is too slow for is not kept.

How it fails: a refresh raises what the call raised. Rows may be lost with it, so the round after a
failed one asks for all of them again.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Final, NamedTuple, Protocol

from penstock.control.frames import Buffer, Fields, Frame
from penstock.errors import PenstockError
from penstock.http.history.recorder import Recorder

ROUND_SECONDS_MIN: Final = 1.0
ROUND_SECONDS_MAX: Final = 30.0
"""One round that was kept waiting must not stop the schedule for an hour."""

ROUND_SHARE: Final = 100
"""A round is followed by a pause of so many times its own length."""

WINDOW_SECONDS: Final = 5.0
SPACING_SECONDS: Final = 0.5
"""Samples of a queue are about this far apart, however often somebody asks."""

RATE_SECONDS_MIN: Final = 1.0

SHOWN: Final = (
    "name",
    "ready",
    "delayed",
    "held",
    "dead",
    "offset_start",
    "offset_end",
    "event_start",
    "event_end",
    "bytes",
    "consumers",
    "paused",
    "identity",
)
"""What the API shows of a row as it is."""

log = logging.getLogger("penstock.http")


class Caller(Protocol):
    """What the mirror needs of the link."""

    async def call(self, name: str, fields: Fields | None = None, *buffers: Buffer) -> Frame: ...


class Sample(NamedTuple):
    """The counters of a queue at a moment (of the mirror's clock)."""

    at: float
    accepted: int
    acked: int


class Rates(NamedTuple):
    """Messages per second."""

    accepted: float
    acked: float


_AT_REST: Final = Rates(0.0, 0.0)


class Trend:
    """The counters of one queue over the last seconds: samples with straight lines between them."""

    __slots__ = ("_samples",)

    def __init__(self, first: Sample) -> None:
        self._samples = [first]  # a handful

    @property
    def last(self) -> Sample:
        return self._samples[-1]

    def add(self, sample: Sample, same_until: float) -> None:
        """New counters; the last ones were still right at `same_until`."""
        last = self.last
        if sample[1:] == last[1:]:
            return
        if same_until > last.at:
            self._append(Sample(same_until, *last[1:]))
        self._append(sample)
        while len(self._samples) > 2 and self._samples[1].at <= sample.at - WINDOW_SECONDS:
            del self._samples[0]

    def _append(self, sample: Sample) -> None:
        samples = self._samples
        if len(samples) > 1 and sample.at - samples[-2].at < SPACING_SECONDS:
            samples[-1] = sample
        else:
            samples.append(sample)

    def rates(self, at: float, begin: float) -> Rates:
        """Of the window that ends at `at`; nothing is known of what was before `begin`."""
        start = max(at - WINDOW_SECONDS, begin)
        accepted, acked = self._counters_at(start)
        seconds = max(at - start, RATE_SECONDS_MIN)
        return Rates((self.last.accepted - accepted) / seconds, (self.last.acked - acked) / seconds)

    def _counters_at(self, at: float) -> tuple[float, float]:
        before = self._samples[0]
        for sample in self._samples:
            if sample.at > at:
                if before is sample:
                    break
                part = (at - before.at) / (sample.at - before.at)
                return (
                    before.accepted + part * (sample.accepted - before.accepted),
                    before.acked + part * (sample.acked - before.acked),
                )
            before = sample
        return before.accepted, before.acked


class _Row:
    """What a row is made of."""


def _slim(row: Fields) -> Fields:
    """The same row: what one class's objects have as attributes shares its keys, and takes half as much."""
    kept = _Row()
    for field, value in row.items():
        setattr(kept, field, value)
    return vars(kept)


class Changes:
    """A subscriber's names of queues that have changed since it last took them."""

    def __init__(self, names: Sequence[str]) -> None:
        self._names = dict.fromkeys(names)
        self._some = asyncio.Event()
        if names:
            self._some.set()

    def add(self, names: Mapping[str, object]) -> None:
        self._names |= dict.fromkeys(names)
        if self._names:
            self._some.set()

    async def wait(self) -> None:
        """Until there are some."""
        await self._some.wait()

    def take(self) -> list[str]:
        """All of them; from now on they count as known."""
        names, self._names = self._names, {}
        self._some.clear()
        return list(names)


class Mirror:
    def __init__(self, link: Caller, clock: Callable[[], float] = time.monotonic) -> None:
        self._link = link
        self._clock = clock
        self._ahead_us = 0  # how far the log's time is ahead of the machine's
        self._rows: dict[str, Fields] = {}
        self._names: list[str] = []
        self._in_order = True
        self._trends: dict[str, Trend] = {}  # of those whose rates are not 0, or were not when last told
        self._subscribers: set[Changes] = set()
        self._first_at: float | None = None  # when the first round was complete
        self._round_at = 0.0  # when the last complete round began
        self._all = True  # the next round has to ask for every row
        self._untold: dict[str, None] = {}  # what a round has found that did not come to its end
        self._running: asyncio.Task[None] | None = None
        self._next: asyncio.Task[None] | None = None
        self._schedule: asyncio.Task[None] | None = None
        self.recorder = Recorder()
        self.round_seconds = 0.0
        """How long the last complete round took."""

    # --- rounds ----------------------------------------------------------------------------------

    def start(self) -> None:
        self._schedule = asyncio.get_running_loop().create_task(self._keep())

    async def stop(self) -> None:
        for task in (self._schedule, self._next, self._running):
            if task is not None:
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError, PenstockError):
                    await task

    async def _keep(self) -> None:
        while True:
            try:
                await self.refresh()
            except PenstockError as error:
                log.warning("the queues could not be looked at: %s", error)
            except Exception:  # a round less; without the schedule, rows would stand still for everybody
                log.exception("the queues could not be looked at")
            await asyncio.sleep(
                min(max(ROUND_SECONDS_MIN, ROUND_SHARE * self.round_seconds), ROUND_SECONDS_MAX)
            )

    async def refresh(self) -> None:
        """Returns when the rows show all that had happened when this was called."""
        if self._next is None:
            self._next = asyncio.get_running_loop().create_task(self._round_after(self._running))
        # Others wait for the same round: one who goes away does not take it along.
        await asyncio.shield(self._next)

    async def _round_after(self, running: asyncio.Task[None] | None) -> None:
        if running is not None:
            await asyncio.wait([running])
        self._running, self._next = self._next, None
        await self._round()

    async def _round(self) -> None:
        began = self._clock()
        ask_all, self._all = self._all, True
        changed = self._untold
        # Of a round for all, those that it does not name are gone; of another, those that it names so.
        unseen = dict.fromkeys(self._rows) if ask_all else {}
        more = True
        while more:
            fields, _ = await self._link.call("queues", {"all": ask_all})
            ask_all = False
            self._ahead_us = max(fields.get("time_us", 0) - time.time_ns() // 1000, 0)
            for name in fields["gone"]:
                self._forget(name, changed)
            for row in fields["queues"]:
                self._put(row, changed)
                unseen.pop(row["name"], None)
            more = fields["more"]
        for name in unseen:
            self._forget(name, changed)
        self._all = False
        ended = self._clock()
        self.round_seconds = ended - began
        self._round_at = began
        if self._first_at is None:
            self._first_at = ended
        self._publish(changed)
        self._untold = {}

    def put(self, row: Fields) -> None:
        """A row that was asked for alone."""
        changed: dict[str, None] = {}
        self._put(row, changed)
        self._publish(changed)

    def _forget(self, name: str, changed: dict[str, None]) -> None:
        """A queue is gone: those who are told find no row of it."""
        if self._rows.pop(name, None) is not None:
            self._trends.pop(name, None)
            self._in_order = False
            self.recorder.forget(name)
            changed[name] = None

    def _put(self, row: Fields, changed: dict[str, None]) -> None:
        name: str = row["name"]
        if name in self._rows and self._rows[name]["identity"] != row["identity"]:
            self._forget(name, changed)
        before = self._rows.get(name)
        if before is None:
            self._names.append(name)
            self._in_order = False
        row = _slim(row)
        self.recorder.put(row, is_new=before is None and self._first_at is not None)
        row["times"] = None  # It has them.
        counters = _counters(row)
        if before is not None:
            known = _counters(before)
        elif self._first_at is None:
            known = counters
        else:  # It was not there a round ago: all that its counters say has happened since then.
            known = (0, 0)
        trend = self._trends.get(name)
        if trend is None and counters != known:
            trend = self._trends[name] = Trend(Sample(self._round_at, *known))
        if trend is not None:
            trend.add(Sample(self._clock(), *counters), self._round_at)
        self._rows[name] = row
        changed[name] = None

    def _publish(self, changed: dict[str, None]) -> None:
        told = {**changed, **dict.fromkeys(self._trends)}
        for subscriber in self._subscribers:
            subscriber.add(told)
        still = self._round_at - WINDOW_SECONDS
        self._trends = {name: trend for name, trend in self._trends.items() if trend.last.at > still}

    # --- looking ---------------------------------------------------------------------------------

    @property
    def rows(self) -> Mapping[str, Fields]:
        """Every queue's row by name, in the order in which the queues were made."""
        return self._rows

    @property
    def names(self) -> Sequence[str]:
        """The names of all queues, in order."""
        if not self._in_order:
            self._in_order = True
            self._names = [name for name in dict.fromkeys(self._names) if name in self._rows]
            self._names.sort()
        return self._names

    def now(self) -> float:
        """The moment, as samples have it."""
        return self._clock()

    def now_us(self) -> int:
        """What the time is in the log, which never goes back where the clock of the machine does."""
        return time.time_ns() // 1000 + self._ahead_us

    def rates(self, name: str) -> Rates:
        trend = self._trends.get(name)
        if trend is None:
            return _AT_REST
        begin = trend.last.at if self._first_at is None else self._first_at
        return trend.rates(max(self._round_at, trend.last.at), begin)

    def queue(self, name: str) -> Fields:
        """A queue as the API shows it."""
        row, rates = self._rows[name], self.rates(name)
        shown: Fields = {field: row[field] for field in SHOWN}
        shown["rate_in"] = round(rates.accepted, 3)
        shown["rate_out"] = round(rates.acked, 3)
        shown["oldest_seconds"] = oldest_seconds(row, self.now_us())
        return shown

    def subscribe(self) -> Changes:
        """To be told of every change from now on; at first, all queues have changed."""
        changes = Changes(self.names)
        self._subscribers.add(changes)
        return changes

    def unsubscribe(self, changes: Changes) -> None:
        self._subscribers.discard(changes)

    @property
    def subscriber_count(self) -> int:
        return len(self._subscribers)


def _counters(row: Fields) -> tuple[int, int]:
    """What rates are made of."""
    return row["offset_end"], row["counts"].get("acked", 0)


def oldest_seconds(row: Fields, now_us: int) -> float | None:
    """The age of the oldest message that is not settled; None where there is none."""
    return max(now_us - row["oldest_us"], 0) / 1_000_000 if row["oldest_us"] else None
