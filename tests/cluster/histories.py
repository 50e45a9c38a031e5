"""Histories of a cluster, by seed: fronts that lead shards, on simulated time, wires and nodes.

What is simulated: a register that compares and sets, with replicas that answer reads and may lag; wires that
delay and lose, in one direction or both; processes that stand still, die, stop and come; clocks that run at
rates up to a fifth apart; copies that take time; logs that cannot be opened; records that vanish, or that
strangers write. What is real: `Leases`, which decides everything; the steps are those of `Election`.

    never two      at no moment are two fronts sure of one shard
    terms          a new leader has a higher term than all before
    warm           nobody claims a shard whose log it does not have while somebody has said that it has
    quiet          when all is well, every shard has a leader after `LED_SECONDS`; after `EVEN_SECONDS` all
                   lead their shares, and nothing changes any more
"""

import heapq
import json
import random
from collections import Counter
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from typing import Any

from penstock.cluster import lease
from penstock.cluster.election import ASK_SECONDS, LOOK_SECONDS, MEMBER_SECONDS
from penstock.cluster.lease import RENEW_SECONDS, Leases
from penstock.cluster.records import MEMBER, Act, Claim, Put, Seen, fields_of

RATES = (0.9, 1.1)
SAID_SECONDS = 3.0
LED_SECONDS = 16.0
EVEN_SECONDS = 60.0

Call = Callable[[], Any]
Steps = Generator[tuple[str, Any], Any, None]


class Broken(AssertionError):
    """What must never be."""


class Refused(Exception):
    pass


class NoAnswer(Exception):
    pass


@dataclass
class Store:
    """The state stream, and two nodes that follow it; one of them may lag."""

    seq: int = 0
    records: dict[str, tuple[int, bytes]] = field(default_factory=dict)
    lagging: dict[str, tuple[int, bytes]] = field(default_factory=dict)
    lags_until: float = 0.0

    def put(self, put: Put) -> int:
        if self.records.get(put.key, (0,))[0] != put.last_seq:
            raise Refused
        return self.write(put.key, put.payload)

    def write(self, key: str, payload: bytes) -> int:
        self.seq += 1
        self.records[key] = self.seq, payload
        return self.seq

    def look(self, now: float, is_other_node: bool) -> list[Seen]:
        if now >= self.lags_until:
            self.lagging = self.records
        found = self.lagging if is_other_node else self.records
        return [Seen(key, seq, payload) for key, (seq, payload) in found.items()]

    def last(self, key: str) -> tuple[Seen | None, int]:
        found = self.records.get(key)
        return (Seen(key, *found) if found is not None else None), self.seq

    def lag(self, until: float) -> None:
        self.lagging, self.lags_until = dict(self.records), until


class Front:
    """One front-end: a clock, a wire, copies, and what it decides."""

    def __init__(self, world: "World", name: str) -> None:
        rng = world.rng
        self.world, self.name = world, name
        self.rate = rng.uniform(*RATES)
        self.offset = rng.uniform(-500, 500)
        self.paused_until = 0.0
        self.deaf_until = 0.0  # but for its session, which is stored
        self.loss_there = self.loss_back = 0.0
        self.delay_seconds = 0.005
        self.opens = 1.0  # how likely
        self.is_gone = False
        self.is_stopping = False
        self.stopping: Steps | None = None
        self.copied: dict[int, float] = {}  # shard: when its copy is current
        self.opened: set[int] = set()
        self.said: tuple[float, Any] = -1e9, None
        self.said_warm: dict[int, float] = {}  # shard: since when the others could know that we have it
        self.leases = Leases(name, world.shards, self._offer)

    def _offer(self, shard: int, term: int) -> Claim:
        return Claim(self.name, term, f"{self.name}:1", "1")

    def clock(self) -> float:
        return self.world.now * self.rate + self.offset

    def is_sure(self, shard: int) -> bool:
        return self.clock() < self.leases.sure_until[shard]

    @property
    def warm(self) -> frozenset[int]:
        now = self.world.now
        return frozenset(shard for shard, at in self.copied.items() if at <= now)

    # --- steps -----------------------------------------------------------------------------------

    def start(self) -> None:
        for steps in (self._renewing(), self._looking(), self._saying()):
            self.world.run(self, steps)

    def _renewing(self) -> Steps:
        while True:
            began = self.clock()
            try:
                puts = [self.leases.beat(began)]
                if puts[0] is None:
                    seen, last = yield "ask", lambda: self.world.store.last(self.leases.session_key)
                    self.leases.saw_own(seen, last, self.clock())
                    puts = [self.leases.beat(self.clock())]
                yield "puts", [it for it in (*puts, *self.leases.touches(began)) if it is not None]
            except NoAnswer:
                pass
            yield "sleep", max(RENEW_SECONDS - (self.clock() - began), 0.02)

    def _looking(self) -> Steps:
        while True:
            try:
                if not self.leases.session:
                    yield "sleep", 0.05
                    continue
                yield from self._look()
                yield from self._act()
                yield from self._serve()
                for key in self.leases.forgotten(self.clock()):
                    yield "ask", lambda key=key: self.world.store.records.pop(key, None)
            except NoAnswer:
                pass
            yield "sleep", LOOK_SECONDS

    def _look(self) -> Steps:
        is_other_node = self.world.rng.random() < 0.4
        try:
            found = yield "ask", lambda: self.world.store.look(self.world.now, is_other_node)
        except NoAnswer:
            self.leases.looked_in_vain()
            raise
        self.leases.saw(found, self.clock())

    def _act(self) -> Steps:
        for _ in range(5):
            self.leases.warm = self.warm
            wanted = self.leases.wants(self.clock())
            if not (yield "puts", wanted):
                return

    def _serve(self) -> Steps:
        """What the caller of an election does with a view."""
        view = self.leases.view(self.clock())
        for shard in view.copies:
            if shard not in self.copied:
                self.copied[shard] = self.world.now + self.world.rng.uniform(0.2, self.world.copy_seconds)
        for shard in set(self.copied) - view.copies - view.leads:
            del self.copied[shard]
        self.opened &= view.leads
        for shard in view.leads - self.opened:
            if self.world.rng.random() < self.opens:
                self.opened.add(shard)
                self.copied.setdefault(shard, self.world.now)
                self.copied[shard] = min(self.copied[shard], self.world.now)
            else:
                self.world.counts["not opened"] += 1
                self.leases.let_go(shard, "", self.clock())
        for shard, to in view.give.items():
            self.world.counts["given"] += 1
            yield "sleep", 0.05  # its log is closed
            self.opened.discard(shard)
            if self.leases.leads(shard):
                self.leases.let_go(shard, to, self.clock())
        yield from self._act()

    def _saying(self) -> Steps:
        while True:
            at = self.clock()
            self.leases.warm = self.warm
            ours = self.leases.said_of_us({}, at)
            if at - self.said[0] >= MEMBER_SECONDS or ours != self.said[1]:
                self.said = at, ours
                try:
                    payload = json.dumps({"home": self.name, **ours}).encode()
                    yield "ask", lambda payload=payload: self.world.store.write(MEMBER + self.name, payload)
                    self.said_warm = {it: self.said_warm.get(it, self.world.now) for it in ours["warm"]}
                except NoAnswer:
                    pass
            yield "sleep", LOOK_SECONDS

    def stop(self) -> Steps:
        self.is_stopping = True
        try:
            self.leases.leave(self.clock())
            yield from self._act()
            for _ in range(3):
                put = self.leases.end(self.clock())
                if put is None or (yield "puts", [put]):
                    break
                seen, last = yield "ask", lambda: self.world.store.last(self.leases.session_key)
                self.leases.saw_own(seen, last, self.clock())
            for key in (MEMBER + self.name, self.leases.session_key):
                yield "ask", lambda key=key: self.world.store.records.pop(key, None)
        except NoAnswer:
            pass
        self.leases.end(self.clock())
        self.is_gone = True


class World:
    """One seed."""

    def __init__(self, seed: int, *, shards: int | None = None, fronts: int | None = None) -> None:
        self.rng = random.Random(seed)
        self.seed = seed
        self.shards = shards or self.rng.choice((1, 2, 3, 4))
        self.now = 1000.0
        self.copy_seconds = self.rng.choice((0.3, 1.0, 3.0))
        self.store = Store()
        self.counts: Counter[str] = Counter()
        self.changes: list[tuple[float, int, str, int]] = []  # when, shard, leader, term
        self._leaders: dict[int, tuple[str, int]] = {}
        self._terms = [0] * self.shards
        self._events: list[tuple[float, int, Call]] = []
        self._number = 0
        self.fronts: list[Front] = []
        self.gone: list[Front] = []
        self._named = 0
        for shard in range(self.shards):
            key = Leases("", self.shards, lambda shard, term: Claim()).lease_key(shard)
            self.store.write(key, b'{"leader": "", "term": 0}')
        for _ in range(fronts or self.rng.choice((2, 3, 3, 4))):
            self.join()

    def join(self) -> Front:
        self._named += 1
        front = Front(self, f"m{self._named}")
        self.fronts.append(front)
        front.start()
        return front

    # --- time ------------------------------------------------------------------------------------

    def at(self, when: float, call: Call) -> None:
        self._number += 1
        heapq.heappush(self._events, (when, self._number, call))

    def until(self, end: float) -> None:
        while self._events and self._events[0][0] <= end:
            self.now, _, call = heapq.heappop(self._events)
            call()
        self.now = end

    def run(self, front: Front, steps: Steps) -> None:
        self._go(front, steps, None, None)

    def _go(self, front: Front, steps: Steps, value: Any, error: Exception | None) -> None:
        if front.paused_until > self.now:
            self.at(front.paused_until, lambda: self._go(front, steps, value, error))
            return
        if front.is_gone or (front.is_stopping and steps is not front.stopping):
            return
        try:
            what, given = steps.throw(error) if error is not None else steps.send(value)
        except StopIteration:
            return
        self._check_sure(front)
        if what == "sleep":
            self.at(self.now + given / front.rate, lambda: self._go(front, steps, None, None))
        elif what == "ask":
            self._ask(front, given, lambda said, wrong: self._go(front, steps, said, wrong))
        else:
            self._write(front, given, lambda said, wrong: self._go(front, steps, said, wrong))

    def _write(self, front: Front, puts: list[Put], then: Callable[[Any, Exception | None], None]) -> None:
        """Several at once; what was refused of a lease is looked at. True: something has changed."""
        left, changed, failed = len(puts), False, False
        if not puts:
            self.at(self.now, lambda: then(False, None))
            return

        def ended() -> None:
            nonlocal left
            left -= 1
            if not left:
                then(changed, NoAnswer() if failed else None)

        def write(put: Put) -> None:
            def answered(seq: Any, wrong: Exception | None) -> None:
                nonlocal changed, failed
                if wrong is None:
                    changed = True
                    front.leases.stored(put, seq, front.clock())
                    self._check_sure(front)
                elif isinstance(wrong, Refused):
                    front.leases.refused(put, front.clock())
                    if put.shard >= 0:
                        self._ask(front, lambda: self.store.last(put.key), looked)
                        return
                else:
                    failed = True
                ended()

            def looked(said: Any, wrong: Exception | None) -> None:
                nonlocal failed, changed
                if wrong is not None:
                    failed = True
                elif said[0] is None:
                    front.leases.lost_lease(put.shard)
                else:
                    front.leases.saw_lease(put.shard, said[0], front.clock())
                    changed = changed or put.act is Act.RELEASE
                ended()

            if put.act is Act.CLAIM:
                if front.is_stopping:
                    raise Broken(f"{front.name} stops, and claims shard {put.shard}")
                self._check_warm(front, put.shard)
            self._ask(front, lambda: self._stored(front, put), answered, is_beat=put.act is Act.BEAT)

        for put in puts:
            write(put)

    def _ask(
        self,
        front: Front,
        what: Call,
        then: Callable[[Any, Exception | None], None],
        is_beat: bool = False,
    ) -> None:
        rng, done = self.rng, False

        def once(said: Any, wrong: Exception | None) -> None:
            nonlocal done
            if front.paused_until > self.now:
                self.at(front.paused_until + rng.choice((0, 1e-6)), lambda: once(said, wrong))
            elif not done:
                done = True
                if not front.is_gone:
                    then(said, wrong)

        def there() -> None:
            said, wrong = None, None
            try:
                said = what()
            except Refused as error:
                wrong = error
            if rng.random() >= front.loss_back:
                self.at(self.now + rng.uniform(0, 2 * front.delay_seconds), lambda: once(said, wrong))

        if rng.random() >= front.loss_there and (is_beat or self.now >= front.deaf_until):
            self.at(self.now + rng.uniform(0, 2 * front.delay_seconds), there)
        self.at(self.now + ASK_SECONDS / front.rate, lambda: once(None, NoAnswer()))

    # --- what must hold --------------------------------------------------------------------------

    def _check_sure(self, front: Front) -> None:
        for shard, until in enumerate(front.leases.sure_until):
            if until > front.clock():
                for other in (*self.fronts, *self.gone):
                    if other is not front and not other.is_gone and other.is_sure(shard):
                        raise Broken(f"{front.name} and {other.name} are sure of shard {shard}")

    def _stored(self, front: Front, put: Put) -> int:
        seq = self.store.put(put)
        shard = put.shard
        if put.act is Act.CLAIM:
            claim = Claim(**put.said)
            others = [it for it in (*self.fronts, *self.gone) if it is not front and not it.is_gone]
            sure = [it.name for it in others if it.is_sure(shard)]
            if sure:
                raise Broken(f"{front.name} leads shard {shard} from now on, and {sure} are sure")
            if claim.term <= self._terms[shard]:
                raise Broken(f"term {claim.term} of shard {shard} after {self._terms[shard]}")
            self._terms[shard] = claim.term
            self.counts["changes"] += 1
            self.changes.append((self.now, shard, front.name, claim.term))
        return seq

    def _check_warm(self, front: Front, shard: int) -> None:
        """Who claims it has its log, or nobody has who could be known."""
        if shard in front.warm:
            return
        self.counts["cold"] += 1
        before = self.now - SAID_SECONDS
        for other in self.fronts:
            session = self.store.records.get(other.leases.session_key, (0, b'"ended"'))[1]
            said = fields_of(self.store.records.get(MEMBER + other.name, (0, b""))[1])
            if shard not in said.get("warm", ()):
                continue  # Its record has vanished, or a stranger has written over it.
            has_said = other.said_warm.get(shard, self.now) < before and b'"ended"' not in session
            if (
                other is not front
                and has_said
                and shard in other.said[1]["warm"]
                and self.store.lags_until < before
            ):
                raise Broken(f"{front.name} claims shard {shard} without its log, and {other.name} has it")

    def leader(self, shard: int) -> Front | None:
        return next((it for it in self.fronts if it.is_sure(shard)), None)

    # --- what happens ----------------------------------------------------------------------------

    def chaos(self, seconds: float) -> None:
        events: list[tuple[int, Call]] = [
            (8, self._suspect),
            (7, self._pause),
            (8, self._wire),
            (4, self._good_wires),
            (3, self._silence),
            (3, self._lag),
            (3, self._copy),
            (2, self._vanish),
            (1, self._purge),
            (1, self._deaf),
            (1, self._stranger),
            (2, self._replace),
            (2, self._kill),
            (2, self._bad_log),
        ]
        weights, calls = zip(*events, strict=True)
        end = self.now + seconds
        while self.now < end:
            self.until(min(self.now + self.rng.expovariate(1.5), end))
            self.rng.choices(calls, weights)[0]()
            self.counts["sure"] += self.leader(self.rng.randrange(self.shards)) is not None

    def _any(self) -> Front:
        return self.rng.choice(self.fronts)

    def _suspect(self) -> None:
        name = self._any().name
        for front in self.fronts:
            if self.rng.random() < 0.8:
                front.leases.suspect(name)

    def _pause(self) -> None:
        self._any().paused_until = self.now + self.rng.choice((0.5, 1.5, 3, 4, 6))

    def _wire(self) -> None:
        front = self._any()
        front.loss_there, front.loss_back = (self.rng.choice((0, 0, 0.1, 0.5, 1)) for _ in range(2))
        front.delay_seconds = self.rng.choice((0.005, 0.05, 0.3, 1.0, 3.0))

    def _good_wires(self) -> None:
        for front in self.fronts:
            front.loss_there = front.loss_back = 0.0
            front.delay_seconds = 0.005

    def _silence(self) -> None:
        """Of all: a cluster without a quorum."""
        for front in self.fronts:
            front.loss_there = 1.0
        self.at(self.now + self.rng.uniform(0.3, 4), self._good_wires)

    def _lag(self) -> None:
        self.store.lag(self.now + self.rng.uniform(0.2, 6))

    def _copy(self) -> None:
        self._any().copied.clear()

    def _vanish(self) -> None:
        self.store.records.pop(self.rng.choice(list(self.store.records) or [""]), None)

    def _purge(self) -> None:
        self.store.records.clear()

    def _deaf(self) -> None:
        """And a lease vanishes that it may have."""
        self._any().deaf_until = self.now + self.rng.uniform(3, 9)
        self.store.records.pop(
            self.rng.choice([it for it in self.store.records if it[:5] == "lease"] or [""]), None
        )

    def _stranger(self) -> None:
        """A record that nobody can read, or of a later version."""
        key = self.rng.choice(list(self.store.records) or ["lease"])
        payload = self.store.records.get(key, (0, b""))[1]
        with_more = payload.replace(b"{", b'{"more": [1], ', 1)
        self.store.write(key, self.rng.choice((b"", b"[]", b'{"leader": 3}', b"\xff", with_more)))

    def stop(self, front: Front) -> None:
        front.stopping = front.stop()
        self.run(front, front.stopping)

    def _replace(self) -> None:
        if len(self.fronts) > 1:
            front = self.fronts.pop(self.rng.randrange(len(self.fronts)))
            self.gone.append(front)
            self.stop(front)
        self.join()

    def _kill(self) -> None:
        if len(self.fronts) > 1:
            front = self.fronts.pop(self.rng.randrange(len(self.fronts)))
            front.is_gone = True
        if len(self.fronts) < 4:
            self.join()

    def _bad_log(self) -> None:
        self._any().opens = self.rng.choice((0.0, 0.5, 1.0))

    def quiet(self) -> None:
        """All is well from now on: who leads, how soon, and how evenly."""
        self._good_wires()
        for front in self.fronts:
            front.paused_until, front.opens = min(front.paused_until, self.now), 1.0
            front.deaf_until = 0.0
        self.until(self.now + LED_SECONDS)
        nobody = set(range(self.shards))
        for _ in range(20):  # One may just be handed over.
            nobody = {shard for shard in nobody if self.leader(shard) is None}
            self.until(self.now + 0.1)
        if nobody:
            raise Broken(f"nobody leads shards {nobody} after {LED_SECONDS} s: {self.told()}")
        self.until(self.now + EVEN_SECONDS)
        self.check_even()
        changes = len(self.changes)
        self.until(self.now + 15)
        if len(self.changes) > changes:
            raise Broken(f"nothing happens, and leaders change: {self.changes[changes:]}")

    def check_even(self) -> None:
        led = Counter({front.name: 0 for front in self.fronts})
        led.update(front.name for shard in range(self.shards) if (front := self.leader(shard)) is not None)
        if sum(led.values()) != self.shards or max(led.values()) - min(led.values()) > 1:
            raise Broken(f"shards are led by {dict(led)}: {self.told()}")

    def told(self) -> list[Any]:
        return [
            (it.name, sorted(it.warm), it.leases.view(it.clock()).claims, it.leases.view(it.clock()).give)
            for it in self.fronts
        ]


def run(seed: int, *, seconds: float = 12.0, is_quiet: bool = False) -> "Counter[str]":
    world = World(seed)
    try:
        world.chaos(seconds)
        if is_quiet:
            world.quiet()
    except AssertionError as error:
        raise type(error)(f"PENSTOCK_TEST_SEED={seed}: {error}") from error
    return world.counts


def short_weariness(monkeypatch: Any) -> None:
    """So that a quiet time of a minute is long enough. Any: pytest's."""
    for name, seconds in (("WEARY_SECONDS", 4.0), ("WEARY_SECONDS_MAX", 8.0), ("DECLINED_SECONDS", 5.0)):
        monkeypatch.setattr(lease, name, seconds)
