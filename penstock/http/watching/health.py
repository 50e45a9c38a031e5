"""Health: what needs attention, found out from time to time by the rules of `common/health.py`.

    queues    by their rows of the mirror, which cost the broker nothing more; and by what has to be asked
              for: who does not read, who waits for room, and who holds messages of a queue in trouble
    readers   where there are any
    broker    its engine, and whether it is ready

Rules that always hold:
  * A turn looks at the queues whose row has changed, and at those where time alone can make something of
    it. It lets others have the loop in between.
  * Asking is followed by a pause of `ASK_SHARE` times as long as the answers took: at most about a hundredth
    of the broker's time. Who holds what is asked for a few queues at a time, those in trouble first.
  * A finding is told as it was when it was last so; `since` does not move while it lasts.

How it fails: a turn that fails is logged, and the next one tries again. What was found stays, and `looked` of
the answer says how old it is. Where the broker does not answer, that is a finding of its own: `not-ready`.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Final, Protocol

from penstock.common.health import BAD, BY_STATE, LEVELS, STATES, WARN, rules
from penstock.common.health_phases import Phase, look, visible
from penstock.control.frames import Fields
from penstock.errors import PenstockError
from penstock.http.archiving import READERS
from penstock.http.hrefs import queue_href, reader_href
from penstock.http.watching.mirror import Caller, Mirror
from penstock.http.watching.tracks import BrokerTrack, QueueTrack, ReaderTrack
from penstock.model.rights import Right, User

TURN_SECONDS: Final = 2.0
TURN_SHARE: Final = 10
"""A turn is followed by a pause of so many times as long as this process was busy with it."""

ASK_SHARE: Final = 100
ASK_SECONDS_MAX: Final = 10.0
ANSWER_SECONDS_MAX: Final = 5.0
SLICE_WORK: Final = 2000
"""So many queues are passed by before others have the loop."""

LOOK_WORK: Final = 20
"""To look at one takes as long as to pass by so many."""

ASKED_ABOUT_MAX: Final = 50
NAMES_MAX: Final = 5
DAMAGE_SHOWN: Final = 10

log = logging.getLogger("penstock.http")


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that needs attention."""

    state: str
    scope: str
    subject: str  # the queue's or the reader's name; empty: the broker
    level: str
    since: float  # seconds since 1970
    why: str
    figures: dict[str, float | None]
    who: tuple[str, ...]
    lines: tuple[str, ...]  # in the words of somebody else
    queues: tuple[str, ...]  # whoever may read none of these is not told; none: everybody is

    @property
    def urgency(self) -> tuple[object, ...]:
        return (LEVELS.index(self.level), STATES.index(self.state), self.since, self.subject)

    @property
    def href(self) -> str:
        """The page where one sees more."""
        if self.scope == "queue":
            return queue_href(self.subject, part=BY_STATE[self.state].part or None)
        return reader_href(self.subject) if self.scope == "reader" else "/engine"

    def is_for(self, user: User) -> bool:
        return not self.queues or any(user.may(Right.READ, queue) for queue in self.queues)


class Archives(Protocol):
    """What archives queues, as far as its health goes."""

    @property
    def error(self) -> str: ...


class _Thing:
    """Something that is watched: its track, and how far it is with each rule."""

    __slots__ = ("phases", "queues", "track", "who")

    def __init__(self, track: Any, queues: tuple[str, ...] = ()) -> None:  # of its scope
        self.track = track
        self.phases: dict[str, Phase] = {}
        self.queues = queues
        self.who: tuple[str, ...] = ()


class Health:
    def __init__(
        self,
        link: Caller,
        mirror: Mirror,
        patience: float,
        clock: Callable[[], float] = time.monotonic,
        archiving: Archives | None = None,
    ) -> None:
        self._link = link
        self._archiving = archiving
        self._mirror = mirror
        self._patience = patience
        self._clock = clock
        self._tables = {
            scope: tuple(rule for rule in rules(patience) if rule.scope == scope)
            for scope in ("queue", "reader", "broker")
        }
        self._why = {rule.state: rule.why for rule in rules(patience)}
        self._queues: dict[str, _Thing] = {}
        self._readers: dict[str, _Thing] = {}
        self._broker = _Thing(BrokerTrack(patience))
        self._engine: Fields = {}
        self._read: set[str] = set()  # queues that readers with a name read
        self._blocked: dict[str, tuple[int, float]] = {}  # consumers: which of its blockings, since when
        self._blocked_of: dict[str, list[str]] = {}  # by queue
        self._waited_for: set[str] = set()
        self._ask_at = 0.0
        self._busy_seconds = 0.0  # with the last look at all queues
        self._task: asyncio.Task[None] | None = None
        self.looked_at: float | None = None
        """When the last turn was complete, in seconds since 1970."""

    # --- turns -----------------------------------------------------------------------------------

    def start(self) -> None:
        self._task = asyncio.get_running_loop().create_task(self._keep())

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _keep(self) -> None:
        while True:
            try:
                await self.turn()
            except PenstockError as error:
                log.warning("the health of the broker could not be looked at: %s", error)
            except Exception:  # a turn less; without the next one, nobody would be told anything any more
                log.exception("the health of the broker could not be looked at")
            await asyncio.sleep(max(TURN_SECONDS, TURN_SHARE * self._busy_seconds))

    async def turn(self) -> None:
        """Look at everything once."""
        at = self._clock()
        if at >= self._ask_at:
            try:
                async with asyncio.timeout(ANSWER_SECONDS_MAX):
                    await self._ask(at)
            except TimeoutError:
                self._not_answering(f"it has not answered for {ANSWER_SECONDS_MAX:.0f} s", self._clock())
            except PenstockError as error:
                self._not_answering(str(error), self._clock())
            spent = self._clock() - at
            self._ask_at = self._clock() + min(max(TURN_SECONDS, ASK_SHARE * spent), ASK_SECONDS_MAX)
        await self._look_at_queues()
        self.looked_at = time.time()

    # --- what has to be asked for ----------------------------------------------------------------

    async def _ask(self, at: float) -> None:
        held = [name for name, it in self._queues.items() if it.phases and it.track.row["held"]]
        held.sort(key=lambda name: not any(phase.active for phase in self._queues[name].phases.values()))
        # At once: of each of several logs, three questions one by one would wake both processes three times.
        (engine, _), (health, _), (told, _) = await asyncio.gather(
            self._link.call("engine", {"brief": True}),
            self._link.call("health", {"brief": True}),
            self._link.call("attention", {"queues": held[:ASKED_ABOUT_MAX]}),
        )
        self._engine = engine
        thing = self._broker
        failing = self._archiving.error if self._archiving is not None else ""
        figures = thing.track.look(engine, health, at, failing)
        thing.phases = look(self._tables["broker"], thing.phases, figures, at)
        thing.who = _offline(engine)
        if engine["readers"] or self._readers:
            readers, _ = await self._link.call("readers")
            self._look_at_readers(readers["readers"], at)
        self._hear(told, at)

    def _not_answering(self, reason: str, at: float) -> None:
        if self._engine:
            thing = self._broker
            figures = thing.track.look(self._engine, {"ready": False, "reason": reason}, at)
            thing.phases = look(self._tables["broker"], thing.phases, figures, at)

    def _look_at_readers(self, readers: list[Fields], at: float) -> None:
        known, self._readers = self._readers, {}
        # That a queue is archived says nothing of what it is for.
        others = [reader for reader in readers if reader["name"] not in READERS.values()]
        self._read = {it["queue"] for reader in others for it in reader["queues"]}
        for reader in readers:
            thing = known.get(reader["name"]) or _Thing(ReaderTrack(reader, at, self._patience))
            thing.queues = tuple(it["queue"] for it in reader["queues"])
            thing.phases = look(self._tables["reader"], thing.phases, thing.track.look(reader, at), at)
            self._readers[reader["name"]] = thing

    def _hear(self, told: Fields, at: float) -> None:
        before, self._blocked = self._blocked, {}
        self._blocked_of = {}
        for it in told["blocked"]:
            known = before.get(it["name"])
            # One that has read in between is blocked anew.
            is_same = known is not None and known[0] == it["blockings"]
            self._blocked[it["name"]] = known if known is not None and is_same else (it["blockings"], at)
            for queue in it["queues"]:
                self._blocked_of.setdefault(queue, []).append(it["name"])
        self._waited_for = set(told["waited_for"])
        for queue, holders in told["holders"].items():
            if queue in self._queues:
                self._queues[queue].who = tuple(name for name, _ in holders)

    # --- queues ----------------------------------------------------------------------------------

    async def _look_at_queues(self) -> None:
        rows = self._mirror.rows
        for gone in [name for name in self._queues if name not in rows]:
            del self._queues[gone]
        work = 0
        self._busy_seconds, began = 0.0, time.thread_time()
        for name, row in list(rows.items()):
            thing = self._queues.get(name)
            if thing is None or not thing.track.goes_on(row):
                # Of a queue that was not there at the last look, all has happened since then.
                first = row if self.looked_at is None else {**row, "delivered": 0, "held": 0, "counts": {}}
                thing = _Thing(QueueTrack(first, self._clock(), self._patience), queues=(name,))
                self._queues[name] = thing
            if thing.track.row is row and not thing.phases and not thing.track.is_restless:
                work += 1
            else:
                self._look_at_queue(name, thing, row)
                work += LOOK_WORK
            if work >= SLICE_WORK:
                work = 0
                self._busy_seconds += time.thread_time() - began
                await asyncio.sleep(0)
                began = time.thread_time()
        self._busy_seconds += time.thread_time() - began

    def _look_at_queue(self, name: str, thing: _Thing, row: Fields) -> None:
        at = self._clock()
        blocked = [at - self._blocked[it][1] for it in self._blocked_of.get(name, ())]
        figures = thing.track.look(
            row,
            at,
            blocked=blocked,
            senders_wait=name in self._waited_for,
            is_read=name in self._read,
            disk_bytes_free=self._engine.get("disk_bytes_free", 0),
            is_dying="dying" in thing.phases,
        )
        thing.phases = look(self._tables["queue"], thing.phases, figures, at)

    # --- telling ---------------------------------------------------------------------------------

    def findings(self, user: User, queue: str | None = None) -> list[Finding]:
        """What somebody may know of, the most urgent first; with a queue, of that one alone."""
        if queue is not None:
            thing = self._queues.get(queue)
            found: Iterable[Finding] = self._of("queue", queue, thing) if thing is not None else ()
        else:
            found = self._all()
        return sorted((it for it in found if it.is_for(user)), key=lambda it: it.urgency)

    def _all(self) -> Iterator[Finding]:
        yield from self._of("broker", "", self._broker)
        for scope, things in (("reader", self._readers), ("queue", self._queues)):
            for name, thing in things.items():
                if thing.phases:
                    yield from self._of(scope, name, thing)

    def _of(self, scope: str, subject: str, thing: _Thing) -> Iterator[Finding]:
        began = time.time() - self._clock()  # when the clock was at 0
        for state in visible(thing.phases):
            phase, rule = thing.phases[state], BY_STATE[state]
            figures = {name: _number(getattr(phase.figures, name)) for name in rule.shown}
            yield Finding(
                state,
                scope,
                subject,
                BAD if phase.is_bad else WARN,
                began + phase.began,
                self._why[state](phase.figures),
                figures,
                self._who(state, subject, thing),
                self._lines(state),
                thing.queues,
            )

    def _who(self, state: str, subject: str, thing: _Thing) -> tuple[str, ...]:
        if state == "blocked":
            return tuple(self._blocked_of.get(subject, ())[:NAMES_MAX])
        return thing.who if state in ("stalled", "full", "growing", "node-offline") else ()

    def _lines(self, state: str) -> tuple[str, ...]:
        if state != "damaged":
            return ()
        damage = self._engine["damage"]
        more = len(damage) - DAMAGE_SHOWN
        return (*damage[:DAMAGE_SHOWN], *([f"and {more} more"] if more > 0 else []))


def _offline(engine: Fields) -> tuple[str, ...]:
    nodes = engine["cluster"]["nodes"] if engine["cluster"] is not None else ()
    return tuple(it["name"] for it in nodes if it["state"] == "offline")


def _number(value: float | None) -> float | None:
    return round(value, 3) if isinstance(value, float) else value
