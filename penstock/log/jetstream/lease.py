"""Lease: which broker of a cluster leads, and which brokers there are.

One record in JetStream names the leader. It is written by compare and set, so of several who try one wins;
the leader writes it again every `RENEW_SECONDS`, and whoever sees it unchanged for `LEASE_SECONDS` may take
it, or for `SUSPECT_SECONDS` where the leader cannot be reached either. No two clocks are compared: everybody
counts seconds of its own, and only those in which the cluster answered.

    following   somebody else leads, or nobody does
    leading     this broker does
    unsure      it did, and could not say so again for `UNSURE_SECONDS`: somebody else may be about to

Rules that always hold:
  * A leader is unsure before anybody else may take its lease, and says so: it hands out nothing then. It
    counts from when it sent the record that was stored last, everybody else from when it was seen, which
    is later; and `UNSURE_SECONDS` is the shorter time by so much that clocks may differ by a fifth.
  * Who gives the lease back is unsure before it says so. A record that has vanished is written again, as
    somebody's that nobody knows, and waited for like any other.
  * Who does not have the log (`is_warm`) leaves a lease that is free to those who have it, for
    `COLD_SECONDS`: reading the log takes as long as the log is large, and nobody is served meanwhile.
  * The lease says who should write the log. Who can is decided by the log itself (`appender.py`).
  * `term` goes up with every new leader, and never down.
  * A step that has begun is ended before `stop` gives the lease back: its answer says what there is to give.

How it fails: not at all. A cluster that does not answer is asked again, and so it is after a fault of ours,
which is logged. A record that cannot be read is somebody's lease like any other. Fields that are not known
are left out: a later version may have more.
"""

import asyncio
import json
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict, dataclass, field
from enum import Enum
from typing import Any, Final, Protocol

from penstock.log.jetstream.api import Stored
from penstock.log.jetstream.errors import JetStreamError, JetStreamTrouble
from penstock.log.jetstream.names import LogNames

RENEW_SECONDS: Final = 0.5
LOOK_SECONDS: Final = 0.35
SOON_SECONDS: Final = 0.05
LEASE_SECONDS: Final = 3.0
SUSPECT_SECONDS: Final = 2.0
UNSURE_SECONDS: Final = 1.6
ASK_SECONDS: Final = 0.8
"""Of one question: an answer that is lost leaves time for another question before the leader is unsure."""

COLD_SECONDS: Final = 30.0
"""Whoever has the log and has not taken a free lease in this time is not going to."""

MEMBER_SECONDS: Final = 1.5
MEMBER_GONE_SECONDS: Final = 5.0
MEMBER_FORGET_SECONDS: Final = 600.0
LEASE: Final = "lease"
UNKNOWN: Final = "?"
"""Who leads where the record has vanished or cannot be read."""

WARM: Final = "warm"
"""The fact of a member that says whether it has the log."""

_MEMBER: Final = "member."
_RELEASE_ATTEMPTS: Final = 3
_NEVER: Final = float("-inf")
# Seconds that go on while the machine sleeps, where it can tell: a lease does not sleep.
_CLOCK: Final = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)

log = logging.getLogger("penstock.cluster")


class Role(Enum):
    FOLLOWING = "following"
    LEADING = "leading"
    UNSURE = "unsure"


@dataclass(frozen=True, slots=True)
class Claim:
    """What the record says: who leads, and how to reach it."""

    leader: str = ""  # empty: nobody, it has let go
    term: int = 0
    relay: str = ""
    version: str = ""


@dataclass(slots=True)
class View:
    """What a broker knows of its cluster."""

    role: Role = Role.FOLLOWING
    claim: Claim = field(default_factory=Claim)
    members: dict[str, dict[str, Any]] = field(default_factory=dict)
    """By their names: what each says of itself. JSON: `Any`."""


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
    """Looks after the lease for one broker, on the loop on which it is started. `changed` is called there,
    too. Questions to the register are answered or fail within about `ASK_SECONDS`."""

    def __init__(
        self,
        register: Register,
        names: LogNames,
        member: str,
        *,
        offer: Callable[[int], Claim],
        facts: Callable[[], dict[str, Any]],
        changed: Callable[[View], None],
        is_warm: Callable[[], bool] = lambda: True,
        heard: Callable[[str, dict[str, Any], str], None] = lambda member, facts, stored: None,
        clock: Callable[[], float] = now,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        """`offer` makes what we would say if we led in that term; `facts` what we say of ourselves, with
        `WARM` among it; `is_warm` is asked for the same. `heard` gets every new record of a member, with when
        it was stored; our own first, then others as they were stored."""
        self._register = register
        self._names = names
        self._member = member
        self._offer = offer
        self._facts = facts
        self._changed = changed
        self._is_warm = is_warm
        self._heard = heard
        self._clock = clock
        self._sleep = sleep
        self.view = View()
        self._seq = 0  # of the record that we saw last
        self._since: float | None = None  # we have seen it unchanged from then on, with no gap
        self._renewed = _NEVER  # when we sent the last record that was stored, as long as we lead
        self._suspected = False
        self._free_since: float | None = None  # we could have taken it from then on
        self._has_looked = False
        self._members_seen: dict[str, tuple[int, float]] = {}  # sequence number, and since when
        self._tasks: list[asyncio.Task[None]] = []
        self._resting: set[asyncio.Task[None] | None] = set()  # between two steps
        self._stopping = False

    # --- life ------------------------------------------------------------------------------------

    async def start(self) -> None:
        loop = asyncio.get_running_loop()
        self._tasks = [
            loop.create_task(self._again_and_again(self._step), name="lease"),
            # Apart from the lease, which must not wait for it.
            loop.create_task(self._again_and_again(self._look_at_members), name="members"),
        ]

    async def stop(self) -> None:
        """Let go of the lease where it is ours, and of our place among the members."""
        self._stopping = True
        for task in self._tasks:
            if task in self._resting or task is not self._tasks[0]:
                task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        try:
            await self._release()
            subject = self._names.state(_MEMBER + self._member)
            await self._register.purge_subject(self._names.state_stream, subject)
        except JetStreamTrouble as error:
            log.warning("the cluster was not told that this broker stops: %s", error)

    async def _release(self) -> None:
        """Whatever has become of what we said last."""
        self._renewed = _NEVER
        for _ in range(_RELEASE_ATTEMPTS):
            seq, claim = await self._look()
            if claim.leader != self._member:
                return
            try:
                await self._put(asdict(Claim(term=claim.term)), seq)
            except JetStreamError as error:
                if not error.wrong_last:
                    raise
            else:
                return

    def suspect(self) -> None:
        """The leader cannot be reached: take its lease as soon as it must be unsure of it."""
        self._suspected = True

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
                log.debug("the lease could not be looked at: %s", error)
            except Exception as error:
                if told != str(error):  # once, and not three times a second
                    told = str(error)
                    log.exception("a fault in the election, which goes on")
            if not self._stopping:
                task = asyncio.current_task()
                self._resting.add(task)
                await self._sleep(pause)
                self._resting.discard(task)

    async def _step(self) -> float:
        before = (self.view.role, self.view.claim)
        began = self._clock()
        pause = LOOK_SECONDS
        try:
            if self.view.role is Role.FOLLOWING:
                await self._follow()
            else:
                while not await self._lead():
                    pass
                pause = max(RENEW_SECONDS - (self._clock() - began), 0.0)
        except BaseException:
            self._since = None
            raise
        finally:
            self._check_sure()
            if (self.view.role, self.view.claim) != before:
                self._changed(self.view)
        self._has_looked = True
        return pause

    # --- following -------------------------------------------------------------------------------

    async def _look(self) -> tuple[int, Claim]:
        """What the record says. Where it is gone, no term was higher than the number of the last record."""
        stored = await self._register.last(self._names.state_stream, self._names.state(LEASE))
        if stored is not None:
            return stored.seq, _read(stored)
        info = await self._register.stream(self._names.state_stream)
        return 0, Claim(term=int(info["state"]["last_seq"]))

    async def _follow(self) -> None:
        seq, claim = await self._look()
        seen = self._clock()
        if seq != self._seq or self._since is None:
            if seq != self._seq:
                self._suspected = False
                self._free_since = None
            self._seq = seq
            self._since = seen
            self.view.claim = claim
        if claim.leader == self._member:
            # We took it, and the answer was lost. When that was, nobody knows: saying so again makes sure.
            self.view.role = Role.LEADING
            return
        patience = SUSPECT_SECONDS if self._suspected else LEASE_SECONDS
        if not seq and claim.term:
            # It has vanished. Who had it may be sure of it; and only of a record that is there can be told
            # whether it has changed. Not where this comes late, and it was there and has vanished again.
            await self._put(asdict(Claim(UNKNOWN, claim.term)), 0, stream_seq=claim.term)
        elif (not claim.leader or seen - self._since >= patience) and await self._may_take(seen):
            await self._take(claim)

    async def _may_take(self, seen: float) -> bool:
        """Whether the lease, which is free, is for us: not where somebody else can lead at once."""
        if self._free_since is None:
            self._free_since = seen
        if self._is_warm() or seen - self._free_since >= COLD_SECONDS:
            return True
        others = {name: facts for name, facts in (await self.see_members()).items() if name != self._member}
        return not any(facts.get(WARM) for facts in others.values())

    async def _take(self, claim: Claim) -> None:
        offer = self._offer(max(claim.term, self.view.claim.term) + 1)
        sent = self._clock()
        # In a new cluster, a record of somebody else may come and vanish again before ours arrives.
        stream_seq = None if self._seq else 0
        try:
            self._seq = await self._put(asdict(offer), self._seq, stream_seq)
        except JetStreamError as error:
            if not error.wrong_last:
                raise
            return  # Somebody else was first, and is seen next time.
        self._renewed = sent
        self.view.claim = offer
        self.view.role = Role.LEADING
        log.info("this broker leads now, in term %d", offer.term)

    # --- leading ---------------------------------------------------------------------------------

    async def _lead(self) -> bool:
        """Say so again; False where that must be said once more."""
        sent = self._clock()
        try:
            self._seq = await self._put(asdict(self.view.claim), self._seq)
        except JetStreamError as error:
            if not error.wrong_last:
                raise
            self._seq, claim = await self._look()
            if claim != self.view.claim:
                log.warning("another broker leads now: %s, in term %d", claim.leader, claim.term)
                self._renewed = _NEVER
                self._since = None
                self.view.claim = claim
                self.view.role = Role.FOLLOWING
            # Or our own, whose answer was lost. It was heard at some time before now: the next one says when.
            return self.view.role is Role.FOLLOWING
        self._renewed = sent
        if self.view.role is Role.UNSURE:
            log.info("this broker still leads, in term %d", self.view.claim.term)
        self.view.role = Role.LEADING
        return True

    def _check_sure(self) -> None:
        if self.view.role is Role.LEADING and not self.is_sure:
            log.warning("the lease could not be renewed in time: nothing is handed out until it is")
            self.view.role = Role.UNSURE

    @property
    def is_sure(self) -> bool:
        """Whether we lead and nobody else can, by this machine's own clock. From any thread."""
        return self._clock() - self._renewed < UNSURE_SECONDS

    # --- members ---------------------------------------------------------------------------------

    async def _look_at_members(self) -> float:
        """Say that we are there, and see who else is. Not before anything else is said in a new cluster."""
        if not self._has_looked:
            return LOOK_SECONDS
        subject = self._names.state(_MEMBER + self._member)
        await self._register.put(subject, json.dumps(self._facts()).encode())
        await self.see_members()
        return MEMBER_SECONDS

    async def see_members(self) -> dict[str, dict[str, Any]]:
        """Who is there at this moment. Whoever begins to lead asks: somebody may have come a moment ago."""
        found = await self._register.last_of(self._names.state_stream, [self._names.state(_MEMBER + ">")])
        ours = self._names.state(_MEMBER + self._member)
        found.sort(key=lambda it: (it.subject != ours, it.seq))
        seen = self._clock()
        members: dict[str, dict[str, Any]] = {}
        for stored in found:
            name = stored.subject.removeprefix(self._names.state(_MEMBER))
            seq, since = self._members_seen.get(name, (0, seen))
            if seq != stored.seq:
                self._members_seen[name] = (stored.seq, seen)
                since = seen
                self._heard(name, _fields(stored.payload), stored.time)
            if seen - since <= MEMBER_GONE_SECONDS:
                members[name] = _fields(stored.payload)
            elif seen - since > MEMBER_FORGET_SECONDS and self.view.role is Role.LEADING:
                # It died, and comes back under another name.
                await self._register.purge_subject(
                    self._names.state_stream, self._names.state(_MEMBER + name)
                )
                self._members_seen.pop(name, None)
        self.view.members = members
        return members

    # --- records ---------------------------------------------------------------------------------

    async def _put(self, fields: dict[str, Any], last_seq: int, stream_seq: int | None = None) -> int:
        payload = json.dumps(fields).encode()
        return await self._register.put(
            self._names.state(LEASE), payload, last_seq=last_seq, stream_seq=stream_seq
        )


def _fields(payload: bytes) -> dict[str, Any]:
    try:
        said = json.loads(payload)
    except (ValueError, RecursionError):
        said = None
    return said if isinstance(said, dict) else {}


def _read(stored: Stored) -> Claim:
    said = _fields(stored.payload)
    if not isinstance(said.get("leader"), str) or not isinstance(said.get("term"), int):
        return Claim(UNKNOWN, stored.seq)
    texts = (str(said.get(name, "")) for name in ("relay", "version"))
    return Claim(said["leader"], said["term"], *texts)
