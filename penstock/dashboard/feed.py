"""Feed: the queues as they change, read once for every page that is open.

    listing   `/v1/queues` of the public API, in the name of this process: every queue, once
    stream    `/v1/events`: what changes
    tick      once a second, to all pages alike: the rows that have changed, the totals, the broker's state
    health    `/readyz` every `HEALTH_SECONDS`
    findings  `/v1/health` every `ATTENTION_SECONDS`: what needs attention, the most urgent first
    history   totals of the last five minutes; what was before it ran is the API's `/v1/samples`

Rules that always hold:
  * It runs while somebody listens, and `LINGER_SECONDS` longer (a page that is loaded again finds it
    warm). Thirty open pages cost the broker what one costs: nothing but the health question, since rows
    and findings are this process's own.
  * A row is replaced, never changed. Totals are the sums of the rows.
  * In the name of somebody who may read nothing, nothing is asked but the health.
  * Listeners are called in the loop and must not wait; one that fails is logged and leaves nobody else
    without its tick.

How it fails: a stream that ends is opened again after a second; meanwhile the state says so.
"""

import asyncio
import contextlib
import json
import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final, NamedTuple

from penstock.control.frames import Fields
from penstock.dashboard.caller import ApiError, Caller
from penstock.model.rights import Right

TICK_SECONDS: Final = 1.0
HEALTH_SECONDS: Final = 5.0
ATTENTION_SECONDS: Final = 2.0
FINDINGS_MAX: Final = 500
LINGER_SECONDS: Final = 30.0
HISTORY_TICKS: Final = 300
"""How far back totals are kept: five minutes."""

LIST_ROWS: Final = 2000
SHOWN: Final = (
    "ready",
    "held",
    "delayed",
    "dead",
    "bytes",
    "consumers",
    "rate_in",
    "rate_out",
    "paused",
    "offset_end",
    "oldest_at",
)
"""What a row must differ in to be told again."""

_DATA: Final = b"data: "
SUMMED: Final = ("rate_in", "rate_out", "ready", "held", "delayed", "dead", "consumers")

log = logging.getLogger("penstock.dashboard")


class Totals(NamedTuple):
    """Over all queues, at a moment (seconds since 1970)."""

    at: float
    rate_in: float = 0.0
    rate_out: float = 0.0
    ready: float = 0
    held: float = 0
    delayed: float = 0
    dead: float = 0
    consumers: float = 0
    queues: int = 0
    paused: int = 0
    oldest_seconds: float | None = None  # the age of the oldest message that is not settled


@dataclass(frozen=True, slots=True)
class Health:
    """Whether the broker answers, and what is wrong where it does not; empty: nothing."""

    ready: bool = True
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Attention:
    """What needs attention, as `/v1/health` has it: the most urgent findings, and how many there are."""

    findings: Sequence[Fields] = ()
    count: int = 0
    missing: Sequence[str] = ()  # of a cluster with several logs: who does not answer

    def of_queue(self, queue: str) -> list[Fields]:
        return [it for it in self.findings if it["queue"] == queue]

    def of_broker(self) -> list[Fields]:
        return [it for it in self.findings if it["queue"] is None and it["reader"] is None]


@dataclass(frozen=True, slots=True)
class Tick:
    """What every page is told once a second."""

    changed: Sequence[Fields]  # rows as `/v1/queues` shows them, and `oldest_at` (seconds since 1970)
    totals: Totals
    health: Health
    is_first: bool = False  # every queue has just been listed
    gone: Sequence[str] = ()  # names of queues that were deleted; one that is among `changed`, too, came anew
    attention: Attention = Attention()


Listener = Callable[[Tick], None]


class Feed:
    def __init__(self, caller: Caller, clock: Callable[[], float] = time.time) -> None:
        self._caller = caller
        self._clock = clock
        self._rows: dict[str, Fields] = {}
        self._changed: dict[str, None] = {}
        self._gone: dict[str, None] = {}
        self._listeners: dict[Listener, None] = {}
        self._running: asyncio.Task[None] | None = None
        self._ending: asyncio.TimerHandle | None = None
        self.complete = False
        """Whether every queue has been told; before that, an empty list means nothing."""

        self.health = Health()
        self.attention = Attention()
        self.states: dict[str, list[tuple[str, str]]] = {}
        """Of queues that need attention: states, each with its level."""

        self.history: deque[Totals] = deque(maxlen=HISTORY_TICKS)

    @property
    def rows(self) -> Mapping[str, Fields]:
        """Every queue's newest row, by name."""
        return self._rows

    @property
    def is_running(self) -> bool:
        return self._running is not None

    # --- listening -------------------------------------------------------------------------------

    def listen(self, listener: Listener) -> None:
        """To be called with every tick from now on."""
        self._listeners[listener] = None
        if self._ending is not None:
            self._ending.cancel()
            self._ending = None
        if self._running is None:
            self._running = asyncio.get_running_loop().create_task(self._run())

    def forget(self, listener: Listener) -> None:
        self._listeners.pop(listener, None)
        if not self._listeners and self._running is not None and self._ending is None:
            self._ending = asyncio.get_running_loop().call_later(LINGER_SECONDS, self._rest)

    def _rest(self) -> None:
        self._ending = None
        if self._running is not None:
            self._running.cancel()
            self._running = None
        self._rows.clear()
        self._changed.clear()
        self.complete = False
        self.attention, self.states = Attention(), {}
        self.history.clear()

    async def stop(self) -> None:
        running = self._running
        if self._ending is not None:
            self._ending.cancel()
        self._rest()
        if running is not None:
            await asyncio.gather(running, return_exceptions=True)

    # --- reading ---------------------------------------------------------------------------------

    async def _run(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._keep_reading())
            tasks.create_task(self._keep_asking())
            tasks.create_task(self._keep_caring())
            tasks.create_task(self._keep_ticking())

    async def _keep_reading(self) -> None:
        while True:
            try:
                if self._caller.sees_some:
                    await self._list()
                    await self._read()
            except ApiError as error:
                log.warning("the dashboard cannot read the events: %s", error)
            except Exception:  # pages would go on showing rows that stand still
                log.exception("the dashboard cannot read the events")
            await asyncio.sleep(TICK_SECONDS)

    async def _list(self) -> None:
        after: str | None = None
        before = dict.fromkeys(self._rows)
        while True:
            answer = await self._caller.get("/v1/queues", after=after, limit=LIST_ROWS)
            self._put(answer["queues"])
            if answer.get("missing"):  # What is not told may be there all the same.
                before.clear()
            for row in answer["queues"]:
                before.pop(row["name"], None)
            after = answer["next"]
            if after is None:
                break
        self._drop(before)
        if not self.complete:
            with contextlib.suppress(ApiError):  # Then they begin with nothing.
                await self._recall()
        first, self.complete = not self.complete, True
        self.tick(first)

    async def _recall(self) -> None:
        """What the broker remembers of the last minutes: totals go on from there."""
        if not self._caller.may(Right.READ):
            return
        answer = await self._caller.get("/v1/samples", seconds=HISTORY_TICKS)
        known = self.history[0].at if self.history else self._clock()
        past = [
            Totals(at, oldest_seconds=it["oldest_seconds"], **{name: it[name] for name in SUMMED})
            for it in answer["samples"]
            if (at := datetime.fromisoformat(it["time"]).timestamp()) < known
        ]
        self.history.extendleft(reversed(past))

    async def _read(self) -> None:
        gathered = b""
        async with contextlib.aclosing(self._caller.stream("GET", "/v1/events")) as stream:
            async for part in stream:
                *events, gathered = (gathered + part).split(b"\n\n")
                for event in events:
                    for line in event.split(b"\n"):
                        if line.startswith(_DATA):
                            told = json.loads(line.removeprefix(_DATA))
                            self._put(told["queues"])
                            self._drop(told.get("gone", ()))

    def _drop(self, names: Iterable[str]) -> None:
        for name in names:
            self._rows.pop(name, None)
            self._changed.pop(name, None)
            self._gone[name] = None

    def _put(self, rows: Sequence[Fields]) -> None:
        now = self._clock()
        for row in rows:
            age = row["oldest_seconds"]
            row["oldest_at"] = None if age is None else round(now - age, 1)
            before = self._rows.get(row["name"])
            if before is not None and before["identity"] != row["identity"]:
                # Deleted and made again since: nothing that is shown of the old one is about this one.
                self._drop([row["name"]])
                before = None
            self._rows[row["name"]] = row
            if before is None or any(_differ(row[field], before[field], field) for field in SHOWN):
                self._changed[row["name"]] = None

    async def _keep_asking(self) -> None:
        while True:
            try:
                await self._caller.get("/readyz")
                self.health = Health()
            except ApiError as error:
                self.health = Health(False, str(error))
            await asyncio.sleep(HEALTH_SECONDS)

    async def _keep_caring(self) -> None:
        while True:
            try:
                if self._caller.sees_some:
                    self._care(await self._caller.get("/v1/health", limit=FINDINGS_MAX))
            except ApiError as error:
                log.warning("the dashboard cannot read what needs attention: %s", error)
            except Exception:  # pages would go on showing what is over
                log.exception("the dashboard cannot read what needs attention")
            await asyncio.sleep(ATTENTION_SECONDS)

    def _care(self, answer: Fields) -> None:
        states: dict[str, list[tuple[str, str]]] = {}
        for it in answer["attention"]:
            if it["queue"] is not None:
                states.setdefault(it["queue"], []).append((it["state"], it["level"]))
        for name in {*states, *self.states}:
            if states.get(name) != self.states.get(name) and name in self._rows:
                self._changed[name] = None
        self.states = states
        missing = answer.get("missing", ())
        self.attention = Attention(answer["attention"], answer["bad"] + answer["warn"], missing)

    # --- telling ---------------------------------------------------------------------------------

    async def _keep_ticking(self) -> None:
        while True:
            await asyncio.sleep(TICK_SECONDS)
            self.tick()

    def tick(self, is_first: bool = False) -> None:
        """Tell everybody what has changed since the last time."""
        names, self._changed = self._changed, {}
        gone, self._gone = list(self._gone), {}
        totals = self.totals()
        self.history.append(totals)
        tick = Tick([self._rows[name] for name in names], totals, self.health, is_first, gone, self.attention)
        for listener in list(self._listeners):
            try:
                listener(tick)
            except Exception:  # a page that fails must not stop the others
                log.exception("a page could not be told what has changed")

    def totals(self) -> Totals:
        rows, now = self._rows.values(), self._clock()
        sums = dict.fromkeys(SUMMED, 0.0)
        for name in SUMMED:
            sums[name] = sum(row[name] for row in rows)
        ages = [row["oldest_at"] for row in rows if row["oldest_at"] is not None]
        return Totals(
            now,
            **sums,
            queues=len(rows),
            paused=sum(row["paused"] for row in rows),
            oldest_seconds=round(max(now - min(ages), 0.0), 1) if ages else None,
        )


def _differ(one: Any, two: Any, field: str) -> bool:  # values of JSON
    if field == "oldest_at" and one is not None and two is not None:
        # It is computed from an age that was a little older when it came here than when it was told.
        return bool(abs(one - two) > 1.0)
    return bool(one != two)
