"""Election: a front-end takes part in leading the shards of its cluster, by the rules of `lease.py`.

Three tasks, which do not wait for each other: our session is written again, everything there is is
looked at (leases, sessions, members: one question), and our record among the members is written. What is
in that look decides what is written behind it.

How it fails: not at all. A cluster that does not answer is asked again, and so it is after a fault of
ours, which is logged. A step that has begun is ended before `stop` gives back what we lead.
"""

import asyncio
import contextlib
import json
import logging
import time
from collections.abc import Awaitable, Callable, Collection, Sequence
from typing import Any, Final, Protocol

from penstock.cluster.lease import RENEW_SECONDS, Leases
from penstock.cluster.records import MEMBER, SHARDS, Act, Claim, Put, Role, Seen, View, fields_of
from penstock.errors import PenstockError
from penstock.log.jetstream.api import Stored
from penstock.log.jetstream.errors import JetStreamError, JetStreamTrouble, passes
from penstock.log.jetstream.names import SHARDS_MAX, LogNames

LOOK_SECONDS: Final = 0.35
SOON_SECONDS: Final = 0.05
HURRY_SECONDS: Final = 2.5
"""So long it is looked often where somebody has just gone: what that one led is free soon."""

ASK_SECONDS: Final = 0.75
"""Of one question: an answer that is lost leaves time for another question before we are unsure."""

MEMBER_SECONDS: Final = 1.5
_ATTEMPTS: Final = 3
_ROUNDS: Final = 5
_FOUND_SECONDS: Final = 0.2
_FOUND_ATTEMPTS: Final = 100
# Seconds that go on while the machine sleeps, where it can tell: a lease does not sleep.
_CLOCK: Final = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)

log = logging.getLogger("penstock.cluster")


class ShardsError(PenstockError):
    """The cluster does not say how many shards it has."""


class Register(Protocol):
    """What is needed of JetStream's API."""

    async def last(self, stream: str, subject: str) -> Stored | None: ...

    async def last_of(self, stream: str, subjects: Sequence[str]) -> list[Stored]: ...

    async def put(
        self, subject: str, payload: bytes, *, last_seq: int | None = None, stream_seq: int | None = None
    ) -> int: ...

    async def stream(self, name: str) -> dict[str, Any]: ...

    async def purge_subject(self, name: str, subject: str) -> int: ...


def now() -> float:
    """Seconds of this machine's own."""
    return time.clock_gettime(_CLOCK)


class Election:
    """Takes part for one front-end, on the loop on which it is started. `changed` is called there, too.
    Questions to the register are answered or fail within about `ASK_SECONDS`.

    The caller opens the log of a shard that it leads, and hands out only while it `is_sure` of it. It lets
    go of one by `release`, when that log is closed: because the view says `give`, or because it cannot lead.
    """

    def __init__(
        self,
        register: Register,
        names: LogNames,
        member: str,
        shards: int,
        *,
        offer: Callable[[int, int], Claim],
        facts: Callable[[], dict[str, Any]],
        changed: Callable[[View], None],
        warm: Callable[[], Collection[int]] | None = None,
        heard: Callable[[str, dict[str, Any], str], None] = lambda member, facts, stored: None,
        clock: Callable[[], float] = now,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        """`offer` makes what we would say if we led that shard in that term; `facts` what we say of ourselves
        (`HOME` among it), `warm` of which shards we have the log (all, if not given). `changed` gets every
        new view; changes of `members` alone are no news. `heard` gets every new record of a member, with when
        it was stored; our own first, then others as they were stored."""
        self._register = register
        self._names = names
        self._facts = facts
        self._changed = changed
        self._warm = warm if warm is not None else lambda: range(shards)
        self._heard = heard
        self._clock = clock
        self._sleep = sleep
        self.leases = Leases(member, shards, offer)
        self.view = self.leases.view(clock())
        self._said: tuple[float, dict[str, Any]] = float("-inf"), {}  # of us, and when
        self._begun = asyncio.Event()
        self._acting = asyncio.Lock()
        self._tasks: list[asyncio.Task[None]] = []
        self._resting: set[asyncio.Task[None] | None] = set()  # between two steps
        self._hurries_until = float("-inf")
        self._hurries = asyncio.Event()
        self._stopping = False

    # --- asked from anywhere ---------------------------------------------------------------------

    def is_sure(self, shard: int) -> bool:
        """Whether we lead it and nobody else can, by this machine's own clock. From any thread."""
        return self._clock() < self.leases.sure_until[shard]

    def leads(self, shard: int) -> bool:
        """Whether the lease is ours, as far as we know. From any thread."""
        return self.leases.leads(shard)

    # --- life ------------------------------------------------------------------------------------

    async def start(self) -> None:
        loop = asyncio.get_running_loop()
        self._tasks = [
            loop.create_task(self._again_and_again(step), name=name)
            for step, name in (
                (self._renew, "session"),
                (self._look_and_act, "leases"),
                (self._say, "members"),
            )
        ]

    async def stop(self) -> None:
        """Give back whatever we lead, end our session, and leave the members."""
        self._stopping = True
        for task in self._tasks:
            if task in self._resting or task is self._tasks[2] or not self._begun.is_set():
                task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        state, leases = self._names.state_stream, self.leases
        try:
            leases.leave(self._clock())
            self._tell()
            with contextlib.suppress(JetStreamTrouble):  # A lease is free, too, when its session has ended.
                await self._act()
            await self._end_session()
            # A lease that still names us is free because our session has ended: that is left to be read.
            for key in (MEMBER + leases.member, *(() if leases.are_named() else (leases.session_key,))):
                await self._register.purge_subject(state, self._names.state(key))
        except JetStreamTrouble as error:
            log.warning("the cluster was not told that this broker stops: %s", error)
        finally:
            leases.end(self._clock())

    async def _end_session(self) -> None:
        for _ in range(_ATTEMPTS):
            put = self.leases.end(self._clock())
            if put is None or await self._write(put):
                return
            await self._look_at_ours()

    async def release(self, shard: int, to: str = "") -> None:
        """Let go of a shard whose log is closed here: for somebody (who gets it, if it takes it soon), or for
        anybody but us. We are not sure of it from now on, whatever becomes of the record; a cluster that
        does not answer is told as soon as it does."""
        self.leases.let_go(shard, to, self._clock())
        self._tell()
        try:
            await self._act()
        except JetStreamTrouble as error:
            log.info("the lease of shard %d is given back as soon as that can be stored: %s", shard, error)
        self._tell()

    def suspect(self, member: str) -> None:
        """It cannot be reached: its leases are free as soon as it must be unsure of them."""
        self.leases.suspect(member)

    def hurry(self) -> None:
        """Somebody has gone: what that one led may be free in a moment."""
        self._hurries_until = self._clock() + HURRY_SECONDS
        self._hurries.set()

    async def _again_and_again(self, step: Callable[[], Awaitable[float]]) -> None:
        """A step says how long to wait until the next one. Nothing but `stop` ends this."""
        told = ""
        while not self._stopping:
            pause = LOOK_SECONDS
            began = self._clock()
            try:
                pause = await step()
                told = ""
            except JetStreamTrouble as error:
                # Who has waited for an answer in vain has waited long enough.
                pause = max(LOOK_SECONDS - (self._clock() - began), SOON_SECONDS)
                log.debug("no step of the election: %s", error)
            except Exception as error:
                if told != str(error):  # once, and not three times a second
                    told = str(error)
                    log.exception("a fault in the election, which goes on")
            self._tell()
            if not self._stopping:
                task = asyncio.current_task()
                self._resting.add(task)
                await self._rest(pause, may_hurry=step == self._look_and_act)
                self._resting.discard(task)

    async def _rest(self, seconds: float, *, may_hurry: bool) -> None:
        ends: list[asyncio.Future[Any]] = [asyncio.ensure_future(self._sleep(seconds))]
        if may_hurry:
            ends.append(asyncio.ensure_future(self._hurries.wait()))
        try:
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for end in ends:
                end.cancel()

    # --- steps -----------------------------------------------------------------------------------

    async def _renew(self) -> float:
        """Our session, and in a cluster with one shard the lease, too."""
        began = self._clock()
        said = await asyncio.gather(self._beat(), self._touch(), return_exceptions=True)
        self._raise_first(said)
        return max((RENEW_SECONDS if self.leases.session else LOOK_SECONDS) - (self._clock() - began), 0.0)

    async def _beat(self) -> None:
        for _ in range(_ATTEMPTS):
            put = self.leases.beat(self._clock())
            if put is None:
                await self._look_at_ours()
                put = self.leases.beat(self._clock())
            if put is None:
                return  # Somebody has our name, and is waited for.
            if await self._write(put):
                self._begun.set()
                return

    async def _touch(self) -> None:
        for _ in range(_ATTEMPTS):
            puts = self.leases.touches(self._clock())
            if all([await self._write(put) for put in puts]):
                return  # Else it is looked at, and may be ours: the answer to the last one was lost.

    async def _look_at_ours(self) -> None:
        key = self.leases.session_key
        stored = await self._register.last(self._names.state_stream, self._names.state(key))
        seq_last = 0
        if stored is None:
            info = await self._register.stream(self._names.state_stream)
            seq_last = int(info["state"]["last_seq"])
        had = self.leases.session
        self.leases.saw_own(self._seen(stored), seq_last, self._clock())
        if had and not self.leases.session:
            log.warning("the session of this front-end is over: others may lead all that it led")

    async def _look_and_act(self) -> float:
        if not self._begun.is_set():
            await self._begun.wait()
        self._hurries.clear()
        await self._look()
        self._tell()
        await self._act()
        for key in self.leases.forgotten(self._clock()):
            await self._register.purge_subject(self._names.state_stream, self._names.state(key))
        return SOON_SECONDS if self._clock() < self._hurries_until else LOOK_SECONDS

    async def _look(self) -> None:
        filters = [self._names.state(it) for it in self.leases.filters]
        try:
            found = await self._register.last_of(self._names.state_stream, filters)
        except BaseException:
            self.leases.looked_in_vain()
            raise
        seen = [it for it in map(self._seen, found) if it is not None]
        for name, facts, stored in self.leases.saw(seen, self._clock()):
            self._heard(name, facts, stored)

    async def see_members(self) -> dict[str, dict[str, Any]]:
        """Who is there at this moment. Whoever begins to lead asks: somebody may have come a moment ago."""
        await self._look()
        self._tell()
        return self.view.members

    async def _say(self) -> float:
        """That we are there, and what we have: every `MEMBER_SECONDS`, and soon where that has changed."""
        if not self._begun.is_set():
            await self._begun.wait()
        at, before = self._clock(), self._said
        self.leases.warm = frozenset(self._warm())
        ours = self.leases.said_of_us({}, at)
        if at - before[0] >= MEMBER_SECONDS or ours != before[1]:
            self._said = at, ours
            facts = self.leases.said_of_us(self._facts(), at)
            subject = self._names.state(MEMBER + self.leases.member)
            await self._register.put(subject, json.dumps(facts).encode())
        return LOOK_SECONDS

    # --- writing ---------------------------------------------------------------------------------

    async def _act(self) -> None:
        """Write what follows from what was seen, and from what was written: who was fenced frees leases."""
        async with self._acting:
            for _ in range(_ROUNDS):
                self.leases.warm = frozenset(self._warm())
                puts = self.leases.wants(self._clock())
                said = await asyncio.gather(*map(self._write, puts), return_exceptions=True)
                self._raise_first(said)
                if not any(said):
                    return
                self._tell()

    @staticmethod
    def _raise_first(said: Sequence[object]) -> None:
        for it in said:
            if isinstance(it, BaseException):
                raise it

    async def _write(self, put: Put) -> bool:
        """Whether it is stored. False: somebody else was first."""
        try:
            seq = await self._register.put(self._names.state(put.key), put.payload, last_seq=put.last_seq)
        except JetStreamError as error:
            if not error.wrong_last:
                raise
            self.leases.refused(put, self._clock())
            if put.shard >= 0:
                await self._look_at_lease(put)
                return put.act is Act.RELEASE  # once more, if it is ours still
            return False
        self.leases.stored(put, seq, self._clock())
        if put.act is Act.CLAIM and self.leases.leads(put.shard):
            log.debug("this front-end leads shard %d now, in term %d", put.shard, put.said["term"])
        elif put.act is Act.FENCE:
            log.info("front-end %s has not been heard of: what it led is free", put.member)
        return True

    async def _look_at_lease(self, put: Put) -> None:
        led = self.leases.leads(put.shard)
        stored = self._seen(await self._register.last(self._names.state_stream, self._names.state(put.key)))
        if stored is None:
            self.leases.lost_lease(put.shard)
        else:
            self.leases.saw_lease(put.shard, stored, self._clock())
        if led and not self.leases.leads(put.shard):
            log.warning("the lease of shard %d is not ours any more", put.shard)

    def _seen(self, stored: Stored | None) -> Seen | None:
        if stored is None:
            return None
        key = stored.subject.removeprefix(self._names.state(""))
        return Seen(key, stored.seq, stored.payload, stored.time)

    def _tell(self) -> None:
        before, view = self.view, self.leases.view(self._clock())
        self.view = view
        if (view.claims, view.roles, view.copies, view.give) != (
            before.claims,
            before.roles,
            before.copies,
            before.give,
        ):
            for shard, (was, role) in enumerate(zip(before.roles, view.roles, strict=True)):
                if was is Role.LEADING and role is Role.UNSURE:
                    log.warning("shard %d: not sure to lead it; nothing is handed out until we are", shard)
            self._changed(view)


async def shards_of(register: Register, names: LogNames, wanted: int) -> int:
    """How many shards the cluster has; where it is new, it gets as many as are wanted. Asked by everybody
    before it takes part, when the state stream is there.

    A cluster whose log has no shard in its name has one, and so have those of earlier versions. In a new one
    (nothing was ever written to its state stream), the first to come writes all leases, free, and behind
    them how many they are: then a lease that is missing has vanished. Where that was begun and not ended, it
    is as if they had.
    """
    stream, record = names.state_stream, names.state(SHARDS)
    seq_last = -1
    for attempt in range(_FOUND_ATTEMPTS):
        if (found := await shards_found(register, names)) is not None:
            return found
        last = int((await register.stream(stream))["state"]["last_seq"])
        if await has_one_log(register, names):
            wanted = 1
        elif last and (last != seq_last or attempt < 2):
            seq_last = last
            await asyncio.sleep(_FOUND_SECONDS)  # Somebody else may be at it.
            continue
        try:
            if not last:
                await _write_leases(register, names, wanted)
            await register.put(record, json.dumps({SHARDS: wanted}).encode(), last_seq=0)
        except JetStreamTrouble as error:
            if isinstance(error, JetStreamError) and error.wrong_last:
                continue
            if not passes(error) or attempt == _FOUND_ATTEMPTS - 1:
                raise
            await asyncio.sleep(_FOUND_SECONDS)  # The stream is new, and its leader may not listen yet.
    raise ShardsError(
        f"stream {stream} does not say how many shards cluster {names.log} has: others write to it"
    )


async def shards_found(register: Register, names: LogNames) -> int | None:
    """How many a cluster says that it has; None: it says nothing, or is not there."""
    found = await register.last(names.state_stream, names.state(SHARDS))
    return _shards_said(found) if found is not None else None


async def has_one_log(register: Register, names: LogNames) -> bool:
    """Whether there is a log with no shard in its name."""
    try:
        await register.stream(names.stream)
    except JetStreamError as error:
        if error.not_found:
            return False
        raise
    return True


async def _write_leases(register: Register, names: LogNames, shards: int) -> None:
    """All that there is, and nothing else: each names the record before it."""
    leases = Leases("", shards, lambda shard, term: Claim())
    for shard in range(shards):
        payload = json.dumps({"leader": "", "term": 0}).encode()
        key = names.state(leases.lease_key(shard))
        await register.put(key, payload, last_seq=0, stream_seq=shard)


def _shards_said(found: Stored) -> int:
    said = fields_of(found.payload).get(SHARDS)
    if not isinstance(said, int) or not 1 <= said <= SHARDS_MAX:
        raise ShardsError(
            f"{found.subject} should say how many shards the cluster has, 1 to {SHARDS_MAX}, and says "
            f"{found.payload[:80]!r}: see who else may write to NATS (docs/cluster.md#rights-in-nats)"
        )
    return said
