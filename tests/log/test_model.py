"""The embedded log against a plain dict: any order of calls, with restarts in between.

The model knows offsets, states and policies, and nothing of blocks, ranges or files. It is told
what the engine was told and must foretell what the engine delivers: which messages, in which
order, with which attributes. Where the interface leaves the engine a choice (which messages one
`expire` finds within the second; in which order they die) the model checks that the choice is one
of those allowed, and follows it.

The segments are so small that rolling, snapshots, trimming and compacting happen all the time, and
the workers run only when a step says so, so that everything may be half way when the next call comes.
"""

import shutil
import tempfile
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from penstock.log.disk import RealDisk
from penstock.log.errors import LogError
from penstock.log.log import Log
from penstock.log.results import Fate, Stored, TransactionDone
from penstock.log.state import LogSettings
from penstock.model.batch import RETRIES_NONE, Batch, Slice
from penstock.model.ids import id_of
from penstock.model.life import Event, Reason, State, after
from penstock.model.pending import AS_STORED
from penstock.model.policy import Policies
from penstock.model.words import KEEP_TTL, RETRY_DELAYS, Outcome, Where
from tests.log.contract_looking import all_states
from tests.log.inline import InlineWorker
from tests.seeds import SEEDED

SECOND = 1_000_000
START_US = 1_700_000_000 * SECOND
TINY = LogSettings(segment_bytes=4096, block_bytes=512, cache_bytes=1024, snapshot_blocks=8)
QUEUES = {
    "plain": {"retention-seconds": 0},
    "strict": {"retention-seconds": 1, "max-deliveries": 2, "on-expiry": "drop"},
    "careless": {"retention-seconds": 0, "dead-letters": "off"},
    "patient": {"retention-seconds": 0, "retry-delays": [0.5, 0, 2]},
}
NEVER_DIES = {"careless"}
DROPS_EXPIRED = {"strict", "careless"}
DELIVERIES_MAX = {"plain": 20, "strict": 2, "careless": 20, "patient": 20}
RETRIES_US = {"patient": [SECOND // 2, 0, 2 * SECOND]}
CONSUMERS = ("ann", "bob")

Place = tuple[int, int, int]  # (offset, 1, 0) in its own place; (tail, 0, number of the move) when moved


@dataclass
class Entry:
    """What the model knows of one message."""

    payload: bytes
    stored_retries: int
    expires_us: int
    asking: bool
    place: Place
    retries: int
    state: State = State.READY
    attempts: int = 0
    reason: Reason = Reason.NONE
    death: int = 0  # when it died, among the dead
    due_us: int = 0  # until when it is delayed, where it is
    consumer: str = ""
    message_id: bytes = b""


class Model:
    """One queue, told by the state machine below."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.entries: dict[int, Entry] = {}
        self.moves = 0

    def accept(self, batch: Batch, now_us: int) -> None:
        for i, payload in enumerate(batch.messages()):
            offset = len(self.entries)
            retries = batch.retries[i] if batch.retries is not None else RETRIES_NONE
            ttl = batch.ttl_seconds[i] if batch.ttl_seconds is not None else 0
            expires_us = now_us + ttl * SECOND if ttl else 0
            self.entries[offset] = Entry(
                payload, retries, expires_us, batch.reply is not None, (offset, 1, 0), retries
            )
            if batch.delay_us is not None and batch.delay_us[i]:
                self.delay(offset, now_us + batch.delay_us[i])

    def delay(self, offset: int, due_us: int) -> tuple[Event, Reason]:
        entry = self.entries[offset]
        entry.state, entry.due_us, entry.place = State.DELAYED, due_us, (offset, 1, 0)
        return Event.DELAYED, Reason.NONE

    def retry_us(self, entry: Entry) -> int:
        """How long it waits after a delivery that has failed."""
        delays = RETRIES_US.get(self.name, [0])
        return delays[min(entry.attempts, len(delays)) - 1]

    def due(self, now_us: int) -> None:
        for offset in self.where(State.DELAYED):
            if self.entries[offset].due_us <= now_us:
                self.entries[offset].state = State.READY

    def where(self, *states: State) -> list[int]:
        return [offset for offset, entry in self.entries.items() if entry.state in states]

    def line(self, dead: bool) -> list[int]:
        """What can be taken, in the order in which it is taken."""
        if dead:
            return sorted(self.where(State.DEAD), key=lambda o: (self.entries[o].death, o))
        return sorted(self.where(State.READY), key=lambda o: (self.entries[o].place, o))

    def held_by(self, consumer: str, dead: bool) -> list[int]:
        state = State.DEAD_HELD if dead else State.HELD
        return [o for o in self.where(state) if self.entries[o].consumer == consumer]

    # --- arrows, each as an event and a reason -----------------------------------------------

    def end(self, offset: int, event: Event, reason: Reason) -> tuple[Event, Reason]:
        entry = self.entries[offset]
        entry.asking = False
        if event is Event.DEAD:
            self.moves += 1
            entry.state, entry.reason, entry.death = State.DEAD, reason, self.moves
        else:
            entry.state = State.GONE
        return event, reason

    def expire(self, offset: int) -> tuple[Event, Reason]:
        dropped = self.name in DROPS_EXPIRED
        return self.end(offset, Event.EXPIRED if dropped else Event.DEAD, Reason.EXPIRED)

    def reject(self, offset: int) -> tuple[Event, Reason]:
        self.entries[offset].attempts += 1
        return self.end(offset, Event.REJECTED if self.name in NEVER_DIES else Event.DEAD, Reason.REJECTED)

    def move(self, offset: int, tail: int) -> None:
        self.moves += 1
        entry = self.entries[offset]
        entry.state, entry.place = State.READY, (tail, 0, self.moves)

    def is_worn_out(self, entry: Entry) -> bool:
        """Delivered as often as the queue allows to those without a retry counter."""
        return entry.retries == RETRIES_NONE and entry.attempts >= DELIVERIES_MAX[self.name]

    def use_up(self, offset: int, reason: Reason) -> tuple[Event, Reason]:
        """There is no further delivery; whoever waits for an answer is told."""
        event = Event.REJECTED if self.name in NEVER_DIES else Event.DEAD
        return self.end(offset, Event.WITHDRAWN if self.entries[offset].asking else event, reason)

    def requeue(
        self, offset: int, expires_us: int | None, delay_us: int | None, now_us: int
    ) -> tuple[Event, Reason]:
        entry = self.entries[offset]
        if entry.state is State.DEAD_HELD:
            self.end(offset, Event.DEAD, entry.reason)
            return Event.REQUEUED, Reason.NONE
        entry.attempts += 1
        if self.is_worn_out(entry):
            return self.use_up(offset, Reason.TOO_MANY_DELIVERIES)
        if expires_us is not None:
            entry.expires_us = expires_us
        elif 0 < entry.expires_us <= now_us:
            return self.expire(offset)
        if delay_us is None:
            delay_us = self.retry_us(entry)
        if delay_us:
            return self.delay(offset, now_us + delay_us)
        self.move(offset, len(self.entries))
        return Event.REQUEUED, Reason.NONE

    def give_back(self, offset: int, tail: bool, lost: bool, now_us: int) -> tuple[Event, Reason]:
        entry = self.entries[offset]
        reason = Reason.CONSUMER_LOST if lost else Reason.CONSUMER_CANCELLED
        if entry.state is State.DEAD_HELD:
            entry.state = State.DEAD
            if lost:
                self.end(offset, Event.DEAD, entry.reason)
            return (Event.REQUEUED if lost else Event.RETURNED), reason
        if lost:
            entry.attempts += 1
            if entry.retries == 0:
                return self.use_up(offset, Reason.RETRIES_EXHAUSTED)
            if self.is_worn_out(entry):
                return self.use_up(offset, Reason.TOO_MANY_DELIVERIES)
        if 0 < entry.expires_us <= now_us:
            entry.attempts += not lost
            return self.expire(offset)
        if lost and 0 < entry.retries < 255:
            entry.retries -= 1
        if lost and self.retry_us(entry):
            return self.delay(offset, now_us + self.retry_us(entry))[0], reason
        entry.state = State.READY
        if tail:
            self.move(offset, len(self.entries))
        return (Event.REQUEUED if tail else Event.RETURNED), reason

    def redrive(self, offset: int) -> None:
        entry = self.entries[offset]
        entry.attempts, entry.retries, entry.expires_us = 0, entry.stored_retries, 0
        self.move(offset, len(self.entries))

    def restart(self) -> None:
        """Nobody holds anything any more, and nobody waits for an answer."""
        for entry in self.entries.values():
            if entry.state is State.HELD:
                entry.state = State.READY
            elif entry.state is State.DEAD_HELD:
                entry.state = State.DEAD
            if entry.asking and entry.state in (State.READY, State.DELAYED):
                entry.state = State.GONE


def flat(fates: Iterable[Fate]) -> list[tuple[int, Event, Reason]]:
    return [(o, fate.event, fate.reason) for fate in fates for o in range(fate.first, fate.end)]


def runs(offsets: Iterable[int]) -> list[tuple[int, int]]:
    """The same offsets as ranges, as a session would name them."""
    found: list[tuple[int, int]] = []
    for offset in sorted(offsets):
        if found and found[-1][1] == offset:
            found[-1] = (found[-1][0], offset + 1)
        else:
            found.append((offset, offset + 1))
    return found


# Payloads have even sizes and limits are odd: whether an empty message fits into nothing is left open.
payloads = st.one_of(
    st.binary(max_size=6).map(lambda half: half * 2), st.integers(50, 350).map(lambda n: b"xy" * n)
)
Row = tuple[bytes, int, int, int]
messages = st.lists(
    st.tuples(
        payloads,
        st.sampled_from([0, 1, 3, 30]),
        st.sampled_from([-1, 0, 1, 2, 255]),
        st.sampled_from([0, 0, 1, SECOND // 3, 2 * SECOND, 5 * SECOND]),
    ),
    min_size=1,
    max_size=6,
)
queues = st.sampled_from(list(QUEUES))
consumers = st.sampled_from(CONSUMERS)


def batch_of(rows: list[Row], columns: str) -> Batch:
    """`columns` says which attributes the batch has: t for TTL, r for retries, d for delays, a for asking."""
    return Batch.of(
        [payload for payload, _, _, _ in rows],
        ttl_seconds=[ttl for _, ttl, _, _ in rows] if "t" in columns else None,
        retries=[retries for _, _, retries, _ in rows] if "r" in columns else None,
        delay_us=[delay_us for _, _, _, delay_us in rows] if "d" in columns else None,
        reply=[b"to-%d" % i for i in range(len(rows))] if "a" in columns else None,
        protocol="rq" if "a" in columns else "http",
    )


columns = st.sampled_from(["", "", "", "t", "r", "d", "tr", "tr", "td", "trd", "ar"])
SELDOM = (
    "withdraw",
    "purge",
    "purge-dead",
    "transact",
    "trim",
    "trim-all",
    "trim-all",
    "read",
    "crash",
    "close",
)


class LogAgainstModel(RuleBasedStateMachine):
    """Every call goes to both; every answer is compared."""

    def __init__(self) -> None:
        super().__init__()
        # In memory where the system has such a folder: syncing is not what is tested here.
        memory = Path("/dev/shm")
        self.folder = tempfile.mkdtemp(dir=memory if memory.is_dir() else None)
        self.now_us = START_US
        self.models: dict[str, Model] = {}
        self.transactions: dict[str, list[Stored]] = {}
        self.untold: list[tuple[str, int, Event, Reason]] = []  # expired during a take
        self.receipts: list[tuple[int, Stored]] = []
        self.sent = 0
        self.events_before: dict[str, int] = {}  # this opening, by queue
        self.delivered: Counter[str] = Counter()  # in this opening

    @initialize()
    def open(self) -> None:
        self.writer, self.keeper = InlineWorker(), InlineWorker()
        self.engine = Log.open(
            RealDisk(self.folder),
            self.now_us,
            settings=TINY,
            policies=Policies(QUEUES),
            writer=self.writer,
            keeper=self.keeper,
        )
        self.due()

    # --- in ----------------------------------------------------------------------------------

    @rule(name=queues, rows=messages, kinds=columns)
    def append(self, name: str, rows: list[Row], kinds: str) -> None:
        batch = batch_of(rows, kinds)
        model = self.models.setdefault(name, Model(name))
        first = len(model.entries)
        number = self.sent
        self.sent += 1

        def receipt(stored: Stored | LogError) -> None:
            assert isinstance(stored, Stored)
            assert (stored.queue, stored.first, stored.end) == (name, first, first + len(rows))
            for offset in range(stored.first, stored.end):
                model.entries[offset].message_id = id_of(stored.origin, offset)
            self.receipts.append((number, stored))

        self.engine.append(name, batch, self.now_us, receipt)
        model.accept(batch, self.now_us)

    def transact(self, key: str, parts: list[tuple[str, list[Row], str]]) -> None:
        known = self.transactions.get(key)
        batches = [(name, batch_of(rows, kinds)) for name, rows, kinds in parts]
        answers: list[TransactionDone | LogError] = []
        self.engine.transact(key, batches, self.now_us, answers.append)
        self.settle_down()
        (done,) = answers
        assert isinstance(done, TransactionDone)
        assert (done.key, done.repeated) == (key, known is not None)
        if known is not None:
            assert done.stored == known
            return
        for (name, batch), stored in zip(batches, done.stored, strict=True):
            model = self.models.setdefault(name, Model(name))
            first = len(model.entries)
            assert (stored.queue, stored.first, stored.end) == (name, first, first + len(batch))
            model.accept(batch, self.now_us)
            for offset in range(stored.first, stored.end):
                model.entries[offset].message_id = id_of(stored.origin, offset)
        self.transactions[key] = done.stored

    # --- out ---------------------------------------------------------------------------------

    @precondition(lambda self: self.doors())
    @rule(
        data=st.data(),
        consumer=consumers,
        count=st.integers(1, 8),
        bytes_max=st.sampled_from([1_000_001, 1_000_001, 301, 11, 1]),
    )
    def take(self, data: st.DataObject, consumer: str, count: int, bytes_max: int) -> None:
        name, dead = data.draw(st.sampled_from(self.doors()))
        slices = self.engine.take(name, consumer, count, self.now_us, bytes_max=bytes_max, dead=dead)
        self.compare(name, consumer, slices, self.foretell(name, count, bytes_max, dead), dead)

    @rule(name=queues, consumer=consumers, every=st.sampled_from([2, 3, 7]))
    def scatter(self, name: str, consumer: str, every: int) -> None:
        """Small messages in one block, of which some live on, here and there: see `retention.py`."""
        self.append(name, [(b"%06d" % (100 * self.sent + i), 0, RETRIES_NONE, 0) for i in range(24)], "")
        expected = self.foretell(name, 1 << 20, 1 << 30, dead=False)
        slices = self.engine.take(name, consumer, 1 << 20, self.now_us, bytes_max=1 << 30)
        self.compare(name, consumer, slices, expected, dead=False)
        settled = [offset for offset in expected if offset % every]
        self.engine.settle(name, consumer, Outcome.ACK, runs(settled), self.now_us)
        for offset in settled:
            self.models[name].end(offset, Event.ACKED, Reason.NONE)

    def doors(self) -> list[tuple[str, bool]]:
        """Where there is something to take."""
        return [
            (name, dead) for name in self.models for dead in (False, True) if self.models[name].line(dead)
        ]

    def holders(self) -> list[tuple[str, str, bool]]:
        """Who holds something, of which queue, taken through which door."""
        return [
            (name, consumer, dead)
            for name, model in self.models.items()
            for consumer in CONSUMERS
            for dead in (False, True)
            if model.held_by(consumer, dead)
        ]

    def foretell(self, name: str, count: int, bytes_max: int, dead: bool) -> list[int]:
        """The offsets that a take must deliver. What it finds expired on its way ends."""
        model = self.models.get(name, Model(name))
        expected: list[int] = []
        for offset in model.line(dead):
            entry = model.entries[offset]
            if len(expected) == count or bytes_max <= 0:
                break
            if not dead and 0 < entry.expires_us <= self.now_us:
                self.untold.append((name, offset, *model.expire(offset)))
                continue
            size = len(entry.payload)
            if size > bytes_max and expected:
                break
            bytes_max -= size
            expected.append(offset)
        return expected

    def compare(self, name: str, consumer: str, slices: list[Slice], expected: list[int], dead: bool) -> None:
        taken: list[int] = []
        self.delivered[name] += sum(map(len, slices))
        for piece in slices:
            for i, payload in zip(range(piece.lo, piece.hi), piece.messages(), strict=True):
                offset = piece.first_offset + i
                entry = self.models[name].entries[offset]
                seen = (
                    payload,
                    max(piece.expires_us[i], 0) if piece.expires_us is not None else 0,
                    piece.retries[i] if piece.retries is not None else RETRIES_NONE,
                    piece.attempts[i] if piece.attempts is not None else 0,
                    piece.reply is not None,
                )
                answerable = piece.protocol == "rq"
                known = (entry.payload, entry.expires_us, entry.retries, entry.attempts, answerable)
                assert seen == known
                if entry.message_id:
                    assert id_of(piece.origin, offset) == entry.message_id
                entry.message_id = id_of(piece.origin, offset)
                entry.state = State.DEAD_HELD if dead else State.HELD
                entry.consumer = consumer
                taken.append(offset)
        assert taken == expected

    @precondition(lambda self: self.holders())
    @rule(
        data=st.data(),
        outcome=st.sampled_from(Outcome),
        ttl=st.sampled_from([0, 0, 2, KEEP_TTL]),
        delay_us=st.sampled_from([None, None, 0, 700_000]),
    )
    def settle(self, data: st.DataObject, outcome: Outcome, ttl: int, delay_us: int | None) -> None:
        name, consumer, dead = data.draw(st.sampled_from(self.holders()))
        model = self.models[name]
        held = model.held_by(consumer, dead)
        ranges = data.draw(st.sampled_from([runs(held), runs(held[:1]), [(held[0] + 1, held[-1] + 3)]]))
        mine = [o for o in held if any(a <= o < b for a, b in ranges)]
        fates = self.engine.settle(
            name,
            consumer,
            outcome,
            ranges,
            self.now_us,
            ttl_seconds=ttl,
            dead=dead,
            delay_us=RETRY_DELAYS if delay_us is None else delay_us,
        )
        expires_us = None if ttl == KEEP_TTL else self.now_us + ttl * SECOND if ttl else 0
        expected = []
        for offset in mine:
            if outcome is Outcome.ACK:
                verdict = model.end(offset, Event.ACKED, Reason.NONE)
            elif outcome is Outcome.REJECT:
                verdict = model.reject(offset)
            else:
                verdict = model.requeue(offset, expires_us, delay_us, self.now_us)
            expected.append((offset, *verdict))
        assert flat(fates) == expected

    @precondition(lambda self: self.holders())
    @rule(
        data=st.data(),
        tail=st.booleans(),
        lost=st.sampled_from([True, True, False]),
        everything=st.booleans(),
    )
    def give_back(self, data: st.DataObject, tail: bool, lost: bool, everything: bool) -> None:
        name, consumer, _ = data.draw(st.sampled_from(self.holders()))
        model = self.models[name]
        held = sorted(model.held_by(consumer, True) + model.held_by(consumer, False))
        mine = held if everything else held[1:]
        fates = self.engine.give_back(
            name,
            consumer,
            self.now_us,
            ranges=None if everything else runs(mine),
            where=Where.TAIL if tail else Where.PLACE,
            lost=lost,
        )
        assert flat(fates) == [(o, *model.give_back(o, tail, lost, self.now_us)) for o in mine]

    # --- without a consumer --------------------------------------------------------------------

    @precondition(lambda self: self.models)
    @rule(data=st.data(), act=st.sampled_from(SELDOM))
    def seldom(self, data: st.DataObject, act: str) -> None:
        """What would leave nothing to do for the others, were it as frequent as they are."""
        name = data.draw(st.sampled_from(list(self.models)))
        if act == "withdraw":
            self.withdraw(name, data.draw(st.integers(0, len(self.models[name].entries))))
        elif act == "transact":
            parts = data.draw(st.lists(st.tuples(queues, messages, columns), max_size=3))
            self.transact(data.draw(st.sampled_from("klm")), parts)
        elif act == "trim":
            self.engine.trim(self.now_us)
        elif act == "trim-all":
            self.settle_down()
            self.engine.trim(self.now_us)
            self.engine.wait()
        elif act == "read":
            self.read_the_log()
        elif act in ("crash", "close"):
            self.restart(crash=act == "crash")
        else:
            self.purge(name, dead=act == "purge-dead")

    def withdraw(self, name: str, first: int) -> None:
        model, ranges = self.models[name], [(first, first + 2)]
        living = model.where(State.READY, State.DELAYED, State.HELD)
        hit = [o for o in living if any(a <= o < b for a, b in ranges)]
        fates = self.engine.withdraw(name, ranges, Reason.OPERATOR, self.now_us)
        assert sorted(flat(fates)) == [(o, Event.WITHDRAWN, Reason.OPERATOR) for o in hit]
        for offset in hit:
            model.end(offset, Event.WITHDRAWN, Reason.OPERATOR)

    def purge(self, name: str, dead: bool) -> None:
        model = self.models[name]
        hit = model.where(*([State.DEAD] if dead else [State.READY, State.DELAYED]))
        assert sorted(flat(self.engine.purge(name, self.now_us, dead=dead))) == [
            (o, Event.WITHDRAWN, Reason.PURGED) for o in hit
        ]
        for offset in hit:
            model.end(offset, Event.WITHDRAWN, Reason.PURGED)

    @precondition(lambda self: any(dead for _, dead in self.doors()))
    @rule(
        data=st.data(),
        reason=st.sampled_from([None, None, Reason.REJECTED, Reason.EXPIRED]),
        limit=st.sampled_from([None, 0, 1, 3]),
        ranges=st.none() | st.lists(st.tuples(st.integers(0, 20), st.integers(0, 30)), max_size=3),
    )
    def redrive(
        self,
        data: st.DataObject,
        reason: Reason | None,
        limit: int | None,
        ranges: list[tuple[int, int]] | None,
    ) -> None:
        name = data.draw(st.sampled_from([name for name, dead in self.doors() if dead]))
        model = self.models[name]
        hit = [
            o
            for o in model.line(dead=True)
            if (reason is None or model.entries[o].reason is reason)
            and (ranges is None or any(a <= o < b for a, b in ranges))
        ][:limit]
        fates = self.engine.redrive(name, self.now_us, reason=reason, ranges=ranges, limit=limit)
        assert flat(fates) == [(o, Event.REDRIVEN, model.entries[o].reason) for o in hit]
        for offset in hit:
            model.redrive(offset)

    # --- time ----------------------------------------------------------------------------------

    @rule(step_us=st.sampled_from([1, 300_000, 300_000, SECOND, 4 * SECOND]), expire=st.booleans())
    def later(self, step_us: int, expire: bool) -> None:
        self.now_us += step_us
        self.due()
        if expire:
            self.engine.flush(self.now_us)
            self.expire()

    def due(self) -> None:
        """That the time of some has come is in no block: after a restart, somebody has to look again."""
        self.engine.flush(self.now_us)
        self.engine.due(self.now_us)
        while 0 < self.engine.due_us <= self.now_us:
            self.engine.due(self.now_us)
        for model in self.models.values():
            model.due(self.now_us)

    def expire(self) -> None:
        told = [(n, *row) for n, fate in self.engine.expire(self.now_us) for row in flat([fate])]
        for row in self.untold:
            told.remove(row)
        self.untold = []
        for name, offset, event, reason in told:
            entry = self.models[name].entries[offset]
            assert entry.state in (State.READY, State.DELAYED)
            assert 0 < entry.expires_us <= self.now_us
            assert self.models[name].expire(offset) == (event, reason)
        # A second after the moment, at the latest, nothing is left of it.
        for model in self.models.values():
            for offset in model.where(State.READY, State.DELAYED):
                expires_us = model.entries[offset].expires_us
                assert not 0 < expires_us <= self.now_us - SECOND

    # --- the log -------------------------------------------------------------------------------

    @rule(act=st.sampled_from(["flush", "write", "keep", "settle-down"]))
    def work(self, act: str) -> None:
        """The end of a turn; one job of one worker, and what its end brings about; or all there is."""
        if act == "flush":
            self.engine.flush(self.now_us)
        elif act == "settle-down":
            self.settle_down()
        else:
            (self.writer if act == "write" else self.keeper).step()
            self.engine.poll()

    def settle_down(self) -> None:
        self.engine.flush(self.now_us)
        self.engine.wait()
        self.every_receipt_has_come()

    def every_receipt_has_come(self) -> None:
        """Once each, and those of one queue in the order of its messages."""
        assert sorted(number for number, _ in self.receipts) == list(range(self.sent))
        for name in QUEUES:
            firsts = [stored.first for _, stored in self.receipts if stored.queue == name]
            assert firsts == sorted(firsts)

    def restart(self, crash: bool) -> None:
        """A crash finds everything synced, but snapshots, trimming and compacting half way."""
        if crash:
            self.engine.flush(self.now_us)
            while self.writer.step():
                self.engine.poll()
            ends = self.event_ends()
            self.engine.abandon()
        else:
            ends = self.event_ends()
            self.engine.close(self.now_us)
        self.every_receipt_has_come()
        self.untold = []
        for model in self.models.values():
            model.restart()
        self.events_before, self.delivered = ends, Counter()
        self.open()

    def event_ends(self) -> dict[str, int]:
        return {name: self.engine.describe(name).event_end for name in self.engine.queues()}

    def read_the_log(self) -> None:
        """Everything from the start of the log on is there, and the events lead to the state."""
        self.settle_down()
        for name in self.engine.queues():
            info = self.engine.describe(name)
            entries = self.models[name].entries
            found = {
                piece.offset_start + i: payload
                for piece in self.engine.read(name, 0, info.offset_end)
                for i, payload in enumerate(piece.messages())
            }
            assert found == {o: entries[o].payload for o in found}
            assert set(range(info.offset_start, info.offset_end)) <= found.keys()
            states = dict.fromkeys(entries, State.NEW)
            number = info.event_start
            counts: Counter[tuple[Event, Reason]] = Counter()
            for run in self.engine.events(name, info.event_start, info.event_end):
                assert run.event_offset == number
                if number >= self.events_before.get(name, 0):
                    counts[run.event, run.reason] += run.end - run.first
                number += run.end - run.first
                for offset in range(run.first, run.end) if info.event_start == 0 else ():
                    if run.dispatched_us and states[offset] is State.DELAYED:
                        states[offset] = after(states[offset], Event.DUE)
                    if run.dispatched_us:
                        states[offset] = after(states[offset], Event.HELD)
                    states[offset] = after(states[offset], run.event)
            assert number == info.event_end
            if info.event_start <= self.events_before.get(name, 0):
                counts[Event.HELD, Reason.NONE] = self.delivered[name]
                assert self.engine.counts(name) == +counts
            if info.event_start == 0:
                # Neither who holds what nor that a time has come is an event.
                told = {State.HELD: State.READY, State.DEAD_HELD: State.DEAD, State.DELAYED: State.READY}
                found_in = {o: told.get(state, state) for o, state in states.items()}
                assert found_in == {o: told.get(e.state, e.state) for o, e in entries.items()}

    @invariant()
    def counts_are_equal(self) -> None:
        assert not self.engine.damage
        for name in self.engine.queues():
            model, info = self.models[name], self.engine.describe(name)
            living = model.where(State.READY, State.DELAYED, State.HELD)
            assert (info.ready, info.delayed, info.held, info.dead, info.offset_end) == (
                len(model.where(State.READY)),
                len(model.where(State.DELAYED)),
                len(model.where(State.HELD)),
                len(model.where(State.DEAD, State.DEAD_HELD)),
                len(model.entries),
            )
            assert info.bytes == sum(len(model.entries[o].payload) for o in living)
            assert (info.oldest_us == 0) == (not living)
            self.states_are_equal(model)

    def states_are_equal(self, model: Model) -> None:
        found = all_states(self.engine, model.name, len(model.entries), runs_max=3)
        assert list(found) == [o for o, entry in model.entries.items() if entry.state is not State.GONE]
        deaths: Counter[Reason] = Counter()
        for offset, looked in found.items():
            entry = model.entries[offset]
            is_held = entry.state in (State.HELD, State.DEAD_HELD)
            is_dead = entry.state in (State.DEAD, State.DEAD_HELD)
            deaths[entry.reason] += is_dead
            assert (looked.state, looked.attempts) == (entry.state, entry.attempts)
            assert looked.reason is (entry.reason if is_dead else Reason.NONE)
            assert looked.consumer == (entry.consumer if is_held else "")
            assert looked.retries in (entry.retries, AS_STORED)
            assert looked.expires_us in (entry.expires_us, AS_STORED)
            if entry.state is State.DELAYED:
                assert looked.time_us in (entry.due_us, AS_STORED)
        assert self.engine.deaths(model.name) == +deaths

    def teardown(self) -> None:
        try:
            self.restart(crash=True)
            for name in self.models:
                for dead in (False, True):
                    expected = self.foretell(name, 1 << 20, 1 << 30, dead)
                    slices = self.engine.take(
                        name, "last", 1 << 20, self.now_us, bytes_max=1 << 30, dead=dead
                    )
                    self.compare(name, "last", slices, expected, dead)
        finally:
            self.engine.abandon()
            shutil.rmtree(self.folder)


TestLogAgainstModel = LogAgainstModel.TestCase
TestLogAgainstModel.settings = settings(
    max_examples=200 if SEEDED else 60,
    stateful_step_count=60,
    deadline=None,
    derandomize=not SEEDED,
    print_blob=True,
)
