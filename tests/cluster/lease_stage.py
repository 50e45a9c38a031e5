"""A stage for elections: a loop whose clock jumps from event to event, and a register that compares and sets.

Between the register and every member is a wire that delays and loses; members' clocks run at rates of their
own, and their processes stand still for a while. `histories.py` goes further, without asyncio: here it is
`Election` that is looked at, and its tasks.
"""

import asyncio
import json
import random
import selectors
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from penstock.cluster.election import ASK_SECONDS, Election
from penstock.cluster.records import LEASE as LEASE_KEY
from penstock.cluster.records import UNKNOWN, Claim, View
from penstock.log.jetstream.api import Stored
from penstock.log.jetstream.errors import Failure, JetStreamError, NoAnswer
from penstock.log.jetstream.names import LogNames

NAMES = LogNames("sim")
LEASE = NAMES.state(LEASE_KEY)
RATES = (0.9, 1.1)

_T = TypeVar("_T")


class TwoLeaders(AssertionError):
    """What must never be."""


class _Jump(selectors.DefaultSelector):
    """Waits by moving the loop's clock."""

    loop: "SimLoop"

    def select(self, timeout: float | None = None) -> list[Any]:
        assert timeout is not None, "everybody waits for ever"
        self.loop.now += max(timeout, 0.0)
        return []


class SimLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self.now = 1000.0
        selector = _Jump()
        selector.loop = self
        super().__init__(selector)

    def time(self) -> float:
        return self.now


class Store:
    """The state stream: the last record of each subject."""

    def __init__(self, world: "World") -> None:
        self._world = world
        self.seq = 0
        self.records: dict[str, tuple[int, bytes]] = {}

    def put(self, subject: str, payload: bytes, last_seq: int | None, stream_seq: int | None) -> int:
        there = self.records.get(subject, (0, b""))[0]
        if (last_seq is not None and last_seq != there) or stream_seq not in (None, self.seq):
            raise JetStreamError("put", Failure(400, 10071, f"wrong last sequence: {there}"))
        self.seq += 1
        if subject == LEASE:
            self._world.check(payload)
        self.records[subject] = self.seq, payload
        return self.seq

    def last(self, subject: str) -> Stored | None:
        found = self.records.get(subject)
        return Stored(found[0], subject, found[1]) if found is not None else None

    def last_of(self, patterns: Sequence[str]) -> list[Stored]:
        heads = tuple(pattern.rstrip("*") for pattern in patterns)
        return [
            Stored(seq, subject, payload)
            for subject, (seq, payload) in self.records.items()
            if subject.startswith(heads)
        ]


class Member:
    """One broker: a clock, a wire to the store, and an election. It is a `lease.Register`."""

    def __init__(self, world: "World", name: str) -> None:
        self.world = world
        self.name = name
        rng = world.rng
        self.rate = rng.uniform(*RATES)
        self._offset = rng.uniform(-500, 500)
        self.stalled_until = 0.0
        self.loss = 0.0
        self.delay_seconds = 0.005
        self.seen: list[View] = []
        self.warm = True
        self.election = Election(
            self,
            NAMES,
            name,
            1,
            offer=lambda shard, term: Claim(name, term, f"{name}:1", "1"),
            facts=lambda: {"name": name},
            changed=self.seen.append,
            warm=lambda: [0] if self.warm else [],
            clock=self.clock,
            sleep=self.sleep,
        )

    def clock(self) -> float:
        return self.world.loop.now * self.rate + self._offset

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds / self.rate)
        await self._awake()

    async def _awake(self) -> None:
        while (wait := self.stalled_until - self.world.loop.now) > 0:
            await asyncio.sleep(wait)

    async def _ask(self, answer: Callable[[], _T]) -> _T:
        """There and back; whatever is lost or late, the store may have done it, now or later."""
        rng, loop = self.world.rng, self.world.loop
        future: asyncio.Future[_T] = loop.create_future()

        def back(result: _T | JetStreamError) -> None:
            if not future.done():
                if isinstance(result, JetStreamError):
                    future.set_exception(result)
                else:
                    future.set_result(result)

        def there() -> None:
            if self.world.silent_until > loop.now:
                return
            result: _T | JetStreamError
            try:
                result = answer()
            except JetStreamError as error:
                result = error
            except TwoLeaders as error:
                self.world.broken = error
                return
            if rng.random() >= self.loss:
                loop.call_later(rng.uniform(0, 2 * self.delay_seconds), back, result)

        if rng.random() >= self.loss:
            loop.call_later(rng.uniform(0, 2 * self.delay_seconds), there)
        try:
            result = await asyncio.wait_for(future, ASK_SECONDS / self.rate)
        except TimeoutError:
            await self._awake()
            raise NoAnswer("no answer") from None
        await self._awake()
        return result

    async def last(self, stream: str, subject: str) -> Stored | None:
        return await self._ask(lambda: self.world.store.last(subject))

    async def last_of(self, stream: str, subjects: Sequence[str]) -> list[Stored]:
        return await self._ask(lambda: self.world.store.last_of(subjects))

    async def put(
        self, subject: str, payload: bytes, *, last_seq: int | None = None, stream_seq: int | None = None
    ) -> int:
        return await self._ask(lambda: self.world.store.put(subject, payload, last_seq, stream_seq))

    async def stream(self, name: str) -> dict[str, Any]:
        return await self._ask(lambda: {"state": {"last_seq": self.world.store.seq}})

    async def purge_subject(self, name: str, subject: str) -> int:
        return await self._ask(lambda: int(self.world.store.records.pop(subject, None) is not None))


class World:
    """One seed."""

    def __init__(self, seed: int, loop: SimLoop, names: Sequence[str]) -> None:
        self.rng = random.Random(seed)
        self.loop = loop
        self.store = Store(self)
        self.silent_until = 0.0  # nobody hears the store
        self.broken: TwoLeaders | None = None
        self._leader = ""
        self._term = 0
        self.members = [Member(self, name) for name in names]
        self.store.put(LEASE, b'{"leader": "", "term": 0}', None, None)

    def check(self, payload: bytes) -> None:
        """A record of the lease is about to be stored."""
        try:
            claim = Claim(**json.loads(payload))
        except (ValueError, TypeError):
            return  # a stranger's
        if claim.leader == UNKNOWN:
            return
        sure = [it.name for it in self.members if it.election.is_sure(0)]
        if claim.leader != self._leader and [name for name in sure if name != claim.leader]:
            raise TwoLeaders(f"{claim.leader or 'nobody'} leads from now on, and {sure} are sure")
        if claim.leader and claim.leader != self._leader and claim.term <= self._term:
            raise TwoLeaders(f"term {claim.term} after {self._term}")
        self._leader, self._term = claim.leader, max(self._term, claim.term)
