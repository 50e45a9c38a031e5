"""Lease: which broker of a cluster leads, and which brokers there are.

One record in JetStream names the leader. It is written by compare and set, so of several who try one wins;
the leader writes it again every `RENEW_SECONDS`, and whoever sees it unchanged for `LEASE_SECONDS` may take
it. No two clocks are compared: everybody counts seconds of its own, and only those in which the cluster
answered.

    following   somebody else leads, or nobody does
    leading     this broker does
    unsure      it did, and could not say so again for `UNSURE_SECONDS`: somebody else may be about to

Rules that always hold:
  * A leader is unsure before anybody else may take its lease, and says so: it hands out nothing then.
  * The lease says who should write the log. Who can is decided by the log itself (`appender.py`).
  * `term` goes up with every new leader, and never down.

How it fails: not at all. A cluster that does not answer is asked again.
"""

import asyncio
import json
import logging
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from enum import Enum
from typing import Any, Final

from penstock.engines.jetstream.api import JetStream, Stored
from penstock.engines.jetstream.errors import JetStreamError, JetStreamTrouble
from penstock.engines.jetstream.names import LogNames
from penstock.engines.jetstream.station import Station

RENEW_SECONDS: Final = 0.7
LOOK_SECONDS: Final = 0.35
LEASE_SECONDS: Final = 3.0
UNSURE_SECONDS: Final = 2.2
ASK_SECONDS: Final = 1.0
MEMBER_SECONDS: Final = 1.5
MEMBER_GONE_SECONDS: Final = 5.0
LEASE: Final = "lease"
_MEMBER: Final = "member."

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
    secret: str = ""
    version: str = ""


@dataclass(slots=True)
class View:
    """What a broker knows of its cluster."""

    role: Role = Role.FOLLOWING
    claim: Claim = field(default_factory=Claim)
    members: dict[str, dict[str, Any]] = field(default_factory=dict)
    """By their names: what each says of itself. JSON: `Any`."""


class Election:
    """Looks after the lease for one broker, on the loop of its station. `changed` is called there, too."""

    def __init__(
        self,
        station: Station,
        names: LogNames,
        member: str,
        *,
        offer: Callable[[int], Claim],
        facts: Callable[[], dict[str, Any]],
        changed: Callable[[View], None],
    ) -> None:
        """`offer` makes what we would say if we led in that term; `facts` what we say of ourselves."""
        self._api = JetStream(station.requests, answer_seconds=ASK_SECONDS, patience_seconds=0)
        self._names = names
        self._member = member
        self._offer = offer
        self._facts = facts
        self._changed = changed
        self.view = View()
        self._seq = 0  # of the record that we saw last
        self._since: float | None = None  # we have seen it unchanged from then on, with no gap
        self._renewed = 0.0  # when we last said that we lead, and were heard
        self._suspected = False
        self._members_seen: dict[str, tuple[int, float]] = {}  # sequence number, and since when
        self._members_looked = 0.0
        self._task: asyncio.Task[None] | None = None
        self._stopping = False

    # --- life ------------------------------------------------------------------------------------

    async def start(self) -> None:
        self._task = asyncio.get_running_loop().create_task(self._run(), name="lease")

    async def stop(self) -> None:
        """Let go of the lease where it is ours, and of our place among the members."""
        self._stopping = True
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        try:
            if self.view.role is not Role.FOLLOWING:
                claim = Claim(term=self.view.claim.term)
                await self._put(LEASE, asdict(claim), self._seq)
            await self._api.purge_subject(self._names.state_stream, self._names.state(_MEMBER + self._member))
        except JetStreamTrouble as error:
            log.warning("the cluster was not told that this broker stops: %s", error)

    def suspect(self) -> None:
        """The leader cannot be reached: take its lease as soon as it has missed saying so once."""
        self._suspected = True

    async def _run(self) -> None:
        while True:
            before = (self.view.role, self.view.claim)
            try:
                if self.view.role is Role.FOLLOWING:
                    await self._follow()
                else:
                    await self._lead()
                if time.monotonic() - self._members_looked > MEMBER_SECONDS:
                    await self._look_at_members()
            except JetStreamTrouble as error:
                self._since = None
                log.debug("the lease could not be looked at: %s", error)
            self._check_sure()
            if (self.view.role, self.view.claim) != before:
                self._changed(self.view)
            pause = LOOK_SECONDS if self.view.role is Role.FOLLOWING else RENEW_SECONDS
            await asyncio.sleep(pause)

    # --- following -------------------------------------------------------------------------------

    async def _follow(self) -> None:
        stored = await self._api.last(self._names.state_stream, self._names.state(LEASE))
        now = time.monotonic()
        seq, claim = _read(stored)
        if seq != self._seq:
            self._seq = seq
            self._since = now
            self._suspected = False
            self.view.claim = claim
        elif self._since is None:
            self._since = now
        if claim.leader == self._member:
            # We took it, and the answer was lost. When that was, nobody knows: saying so again makes sure.
            self._renewed = 0.0
            self.view.role = Role.LEADING
            return
        patience = 2 * RENEW_SECONDS if self._suspected else LEASE_SECONDS
        if not claim.leader or now - self._since >= patience:
            await self._take(claim)

    async def _take(self, claim: Claim) -> None:
        offer = self._offer(claim.term + 1)
        sent = time.monotonic()
        try:
            self._seq = await self._put(LEASE, asdict(offer), self._seq)
        except JetStreamError as error:
            if not error.wrong_last:
                raise
            return  # Somebody else was first, and is seen next time.
        self._renewed = sent
        self.view.claim = offer
        self.view.role = Role.LEADING
        log.info("this broker leads now, in term %d", offer.term)

    # --- leading ---------------------------------------------------------------------------------

    async def _lead(self) -> None:
        sent = time.monotonic()
        try:
            self._seq = await self._put(LEASE, asdict(self.view.claim), self._seq)
        except JetStreamError as error:
            if not error.wrong_last:
                raise
            stored = await self._api.last(self._names.state_stream, self._names.state(LEASE))
            seq, claim = _read(stored)
            self._seq = seq
            if claim != self.view.claim:
                log.warning("another broker leads now: %s, in term %d", claim.leader, claim.term)
                self.view.role = Role.FOLLOWING
                self.view.claim = claim
                self._since = None
                return
            # Our own, whose answer was lost. It was heard at some time before now: the next one says when.
            return
        self._renewed = sent
        if self.view.role is Role.UNSURE:
            log.info("this broker still leads, in term %d", self.view.claim.term)
        self.view.role = Role.LEADING

    def _check_sure(self) -> None:
        if self.view.role is Role.LEADING and not self.is_sure:
            log.warning(
                "the lease could not be renewed for %.1f s: nothing is handed out until it can",
                time.monotonic() - self._renewed,
            )
            self.view.role = Role.UNSURE

    @property
    def is_sure(self) -> bool:
        """Whether nobody else can have taken the lease, by this machine's own clock. From any thread."""
        return time.monotonic() - self._renewed <= UNSURE_SECONDS

    async def resign(self) -> None:
        """We hold the lease and cannot lead: somebody else shall."""
        if self.view.role is not Role.FOLLOWING:
            self.view.role = Role.FOLLOWING
            claim = Claim(term=self.view.claim.term)
            self._seq = await self._put(LEASE, asdict(claim), self._seq)
            self.view.claim = claim
            self._since = None
            self._changed(self.view)

    # --- members ---------------------------------------------------------------------------------

    async def _look_at_members(self) -> None:
        """Say that we are there, and see who else is."""
        self._members_looked = now = time.monotonic()
        subject = self._names.state(_MEMBER + self._member)
        await self._api.put(subject, json.dumps(self._facts()).encode())
        found = await self._api.last_of(self._names.state_stream, [self._names.state(_MEMBER + ">")])
        members: dict[str, dict[str, Any]] = {}
        for stored in found:
            name = stored.subject.decode().removeprefix(self._names.state(_MEMBER))
            seq, since = self._members_seen.get(name, (0, now))
            if seq != stored.seq:
                self._members_seen[name] = (stored.seq, now)
                since = now
            if now - since <= MEMBER_GONE_SECONDS:
                members[name] = json.loads(stored.payload)
        self.view.members = members

    # --- records ---------------------------------------------------------------------------------

    async def _put(self, key: str, fields: dict[str, Any], last_seq: int) -> int:
        return await self._api.put(self._names.state(key), json.dumps(fields).encode(), last_seq=last_seq)


def _read(stored: Stored | None) -> tuple[int, Claim]:
    if stored is None:
        return 0, Claim()
    return stored.seq, Claim(**json.loads(stored.payload))
