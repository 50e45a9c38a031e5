"""Seeded runs that break the embedded log in every place, and see that it keeps its promises.

    python -m tests.engines.crash SEED [COUNT]     repeat a run, step by step; or COUNT of them

A run is random work of several consumers on several queues of a log on a simulated disk, whose
writer and keeper advance at random moments. Again and again its life ends: the power fails (between
two calls or within one, recovery included), the process is killed, a write or sync fails, or it is
closed; meanwhile the disk may be full for a while. After each end a new life begins on what is left.

What must hold after every end, as `crash_model.py` knows it:

  * lost 0: what had a receipt, or was shown by `read` or `events`, is there: offset, id, payload,
    attributes. What was settled, and is known to be synced, does not come back.
  * invented 0: nothing is there that was never sent, and nothing in another place.
  * What is left is a prefix of what happened, over all queues, and everything in it is exactly as it
    was: order of delivery, order and reasons of dead letters, attempts, retries, expiry, counts.
  * A transaction is there with all its parts or with none, and once for each key.
  * No id ever names two payloads, not even one whose message was delivered and then lost.
  * A crash is no damage: nothing is reported.
"""

import errno
import logging
import random
import sys
from collections import Counter
from collections.abc import Callable, Sequence

from penstock.broker.batch import RETRIES_NONE, Batch, Slice
from penstock.broker.life import Event, Reason
from penstock.broker.policy import Policies
from penstock.broker.words import Outcome, Ranges, Where
from penstock.engines.interface import (
    DiskFull,
    EngineError,
    EngineFailed,
    Fate,
    ReaderInfo,
    Stored,
    TransactionDone,
)
from penstock.engines.log.engine import LogEngine
from penstock.engines.log.state import LogSettings
from penstock.engines.log.workers import InlineWorker
from tests.engines.crash_model import DEAD, GONE, READY, Hold, Ids, Message, QueueModel
from tests.engines.simdisk import PowerCut, SimDisk

SECTIONS: dict[str, dict[str, object]] = {
    "orders": {},
    "mails": {"durability": "interval", "max-deliveries": 2},
    "logs": {"durability": "none", "retention-seconds": 0},
    "tasks": {"max-deliveries": 3, "retention-seconds": 0},
    "drops": {"on-expiry": "drop", "dead-letters": "off", "retention-seconds": 0},
}
POLICIES = Policies(SECTIONS)
CONSUMERS = ("ann", "bob", "cy")
LIVES_MAX = 5
STEPS_MAX = 150
SECOND_US = 1_000_000
EVERYTHING = 1 << 50
FAULT_CALLS = ("write", "sync", "create", "allocate", "rename", "truncate", "remove", "sync_names")


class Broken(AssertionError):
    """The log has broken a promise. Says which seed shows it."""


class Transaction:
    """An attempted transaction: its parts, and where they went."""

    def __init__(self, parts: list[tuple[str, Batch]], ranges: list[tuple[str, int, int]]) -> None:
        self.parts = parts
        self.ranges = ranges


class Controls:
    """What control blocks say: which queues are paused, who holds retention."""

    def __init__(self, turn: int, paused: frozenset[str], readers: dict[str, ReaderInfo]) -> None:
        self.turn = turn
        self.paused = paused
        self.readers = readers


class Run:
    """One seed: a disk, a log on it, and the model of both."""

    def __init__(self, seed: int, say: Callable[[str], None] | None = None) -> None:
        self.rng = rng = random.Random(seed)
        self.say = say
        self.disk = SimDisk()
        self.settings = LogSettings(
            segment_bytes=rng.choice((2048, 4096, 8192)),
            cache_bytes=rng.choice((0, 1000, 8000)),
            block_bytes=rng.choice((64, 200, 1000)),
            interval_us=SECOND_US // 2,
            snapshot_blocks=rng.randint(5, 20),
        )
        self.now_us = 1_700_000_000 * SECOND_US
        self.turn = 0
        self.safe_turn = -1  # everything up to this turn was promised to survive a power cut
        self.written_turn = -1  # and a crash of the process
        self.queues = {name: QueueModel(name, POLICIES.for_queue(name).durability) for name in SECTIONS}
        self.transactions: dict[str, Transaction] = {}
        self.controls = [Controls(-1, frozenset(), {})]
        self.ids = Ids()
        self.counts: Counter[str] = Counter()
        self.sent = 0
        self.full_allowed = False
        self.steps: list[tuple[int, Callable[[], None]]] = [
            (16, self.append),
            (14, self.take),
            (10, self.settle),
            (4, self.give_back),
            (3, self.transact),
            (3, self.expire),
            (2, self.redrive),
            (1, self.withdraw),
            (1, self.purge),
            (1, self.pause),
            (1, self.reader),
            (5, self.read),
            (2, self.look),
            (2, self.trim),
            (6, self.tick),
            (22, self.flush),
            (22, self.poll),
            (24, self.write),
            (12, self.keep),
            (3, self.room),
            (6, self.wait_a_while),
        ]

    # --- lives -----------------------------------------------------------------------------------

    def run(self) -> None:
        self.engine = self.open(self.disk)
        for _ in range(self.rng.randint(2, LIVES_MAX)):
            self.live()
            self.begin_again()
        self.counts["runs"] += 1

    def open(self, disk: SimDisk) -> LogEngine:
        self.writer, self.keeper = InlineWorker(), InlineWorker()
        return LogEngine.open(
            disk,
            self.now_us,
            settings=self.settings,
            policies=POLICIES,
            writer=self.writer,
            keeper=self.keeper,
        )

    def live(self) -> None:
        """Work until something ends it; then there is another disk."""
        rng = self.rng
        self.arm()
        weights = [weight for weight, _ in self.steps]
        steps = [step for _, step in self.steps]
        try:
            for step in rng.choices(steps, weights, k=rng.randint(5, STEPS_MAX)):
                if self.say:
                    self.say(f"{step.__name__}")
                step()
            end = rng.choice(("cut", "cut", "cut", "kill", "kill", "close"))
            if end == "close":
                self.engine.close(self.now_us)
                if self.engine.failed is None and not self.engine.full:
                    self.safe_turn = self.turn
                end = rng.choice(("cut", "kill"))
                self.counts["closed"] += 1
        except PowerCut:
            end = "cut"
            self.counts["power cuts within a call"] += 1
        except EngineFailed:
            end = rng.choice(("cut", "kill"))
            self.counts["failed"] += 1
        self.end(end)

    def arm(self) -> None:
        """Perhaps: something that will go wrong in this life."""
        rng = self.rng
        self.full_allowed = False
        chance = rng.random()
        if chance < 0.4:
            self.disk.cut_after(rng.randint(1, 50))
        elif chance < 0.55:
            self.disk.fail(rng.choice(FAULT_CALLS), rng.randint(1, 12), errno.EIO)
        elif chance < 0.65:
            self.full_allowed = True
            self.disk.fail(rng.choice(("write", "allocate", "create")), rng.randint(1, 8), errno.ENOSPC)

    def end(self, how: str) -> None:
        """The power fails, or the process is killed."""
        if self.say:
            self.say(f"--- {how}")
        self.counts[how] += 1
        before = self.disk
        if how == "cut":
            self.disk = before.crash(self.rng)
        else:
            self.disk = before.kill()
        self.disk.capacity_bytes = None
        self.check(self.disk.copy(), before.published, killed=how == "kill")
        if how == "cut":
            # What is left has survived a power cut: it is on the disk.
            self.all_safe()

    def all_safe(self) -> None:
        """Everything that is in the model now must survive."""
        self.safe_turn = self.turn
        self.turn += 1

    def begin_again(self) -> None:
        """The next opening of the log, which may end like any other life."""
        while True:
            if self.rng.random() < 0.15:
                self.disk.cut_after(self.rng.randint(1, 8))
            try:
                self.engine = self.open(self.disk)
            except PowerCut:
                self.counts["power cuts while opening"] += 1
                self.end("cut")
                continue
            break
        self.disk.cut_after(-1)
        # Whatever an opening has found, it has synced.
        self.all_safe()
        for queue in self.queues.values():
            queue.written_offset = queue.safe_offset = len(queue.messages)
            queue.withdraw_requests(self.turn)

    # --- steps: in -------------------------------------------------------------------------------

    def batch(self) -> Batch:
        rng = self.rng
        count = rng.choice((1, 1, 2, 3, 6))
        payloads = []
        for _ in range(count):
            self.sent += 1
            payloads.append(
                b"%d:" % self.sent + rng.choice((b"a", b"-", b"\0")) * rng.choice((0, 3, 40, 200))
            )
        ttls = [rng.choice((0, 1, 3, 60)) for _ in range(count)] if rng.random() < 0.3 else None
        retries = [rng.choice((-1, 0, 1, 2, 255)) for _ in range(count)] if rng.random() < 0.3 else None
        reply = [b"to-%d" % rng.randint(0, 99) for _ in range(count)] if rng.random() < 0.1 else None
        protocol = rng.choice(("", "sspq", "phpmq", "rq"))
        return Batch.of(payloads, ttl_seconds=ttls, retries=retries, reply=reply, protocol=protocol)

    def accept(self, queue: QueueModel, batch: Batch) -> tuple[int, int]:
        """The engine has taken these in."""
        first = len(queue.messages)
        for i, payload in enumerate(batch.messages()):
            ttl = batch.ttl_seconds[i] if batch.ttl_seconds is not None else 0
            queue.messages.append(
                Message(
                    first + i,
                    payload,
                    self.now_us + ttl * SECOND_US if ttl else 0,
                    batch.retries[i] if batch.retries is not None else RETRIES_NONE,
                    batch.reply[i] if batch.reply is not None else None,
                    batch.protocol,
                    self.now_us,
                    self.turn,
                )
            )
        self.counts["messages"] += len(batch)
        return first, first + len(batch)

    def append(self) -> None:
        queue = self.rng.choice(list(self.queues.values()))
        batch, turn = self.batch(), self.turn
        first = len(queue.messages)
        end = first + len(batch)

        def receipt(result: Stored | EngineError) -> None:
            if isinstance(result, EngineError):
                assert isinstance(result, EngineFailed), result
                return
            assert result[:3] == (queue.name, first, end), f"receipt {result}, expected {first} to {end}"
            self.shown(queue, result.origin, first, end)
            self.counts["receipts"] += 1
            if queue.durability == "commit":
                queue.safe_offset = max(queue.safe_offset, end)
                self.safe_turn = max(self.safe_turn, turn - 1)
            if queue.durability != "none":
                queue.written_offset = max(queue.written_offset, end)
                self.written_turn = max(self.written_turn, turn - 1)

        # With `none` the receipt comes at once: the message must be known before it is sent.
        self.accept(queue, batch)
        try:
            self.engine.append(queue.name, batch, self.now_us, receipt)
        except EngineError as error:
            del queue.messages[first:]
            self.refused(error)

    def refused(self, error: EngineError) -> None:
        if not isinstance(error, DiskFull):
            raise error
        assert self.full_allowed, f"the disk is not full: {error}"
        self.counts["refused: disk full"] += 1

    def transact(self) -> None:
        rng = self.rng
        if self.transactions and rng.random() < 0.3:
            key = rng.choice(list(self.transactions))
            self.repeat(self.engine, key, self.transactions[key], known=True)
            return
        key = f"key-{len(self.transactions)}-{self.sent}"
        parts = [(rng.choice(list(self.queues)), self.batch()) for _ in range(rng.randint(1, 4))]
        sizes = {name: len(queue.messages) for name, queue in self.queues.items()}
        ranges = [(name, *self.accept(self.queues[name], batch)) for name, batch in parts]
        turn = self.turn

        def receipt(result: TransactionDone | EngineError) -> None:
            if isinstance(result, EngineError):
                assert isinstance(result, EngineFailed), result
                return
            assert not result.repeated
            assert [part[:3] for part in result.stored] == ranges
            self.counts["transactions"] += 1
            self.safe_turn = max(self.safe_turn, turn - 1)
            self.written_turn = max(self.written_turn, turn - 1)
            for name, first, end in ranges:
                queue = self.queues[name]
                self.shown(
                    queue,
                    next(p.origin for p in result.stored if p.first == first and p.queue == name),
                    first,
                    end,
                )
                queue.safe_offset = max(queue.safe_offset, end)
                queue.written_offset = max(queue.written_offset, end)

        try:
            self.engine.transact(key, parts, self.now_us, receipt)
        except EngineError as error:
            for name, size in sizes.items():
                del self.queues[name].messages[size:]
            self.refused(error)
        else:
            self.transactions[key] = Transaction(parts, ranges)

    def repeat(self, engine: LogEngine, key: str, transaction: Transaction, known: bool) -> None:
        """The same key again: nothing is added when it has been committed."""

        def receipt(result: TransactionDone | EngineError) -> None:
            if isinstance(result, TransactionDone):
                assert result.repeated == known, f"transaction {key}: {result}"
                ranges = [part[:3] for part in result.stored]
                assert ranges == transaction.ranges or not known, f"{key}: {ranges}, {transaction.ranges}"

        before = [(name, engine.describe(name).offset_end) for name in engine.queues()]
        engine.transact(key, transaction.parts, self.now_us, receipt)
        after = [(name, engine.describe(name).offset_end) for name in engine.queues()]
        assert (before == after) == known, f"transaction {key}, known: {known}: {before}, then {after}"

    # --- steps: out ------------------------------------------------------------------------------

    def queue(self) -> QueueModel:
        """One that the log knows."""
        known = set(self.engine.queues())
        return self.rng.choice(
            [q for q in self.queues.values() if q.name in known] or [self.queues["orders"]]
        )

    def exists(self, queue: QueueModel) -> bool:
        return queue.name in self.engine.queues()

    def take(self) -> None:
        rng = self.rng
        queue = self.queue()
        consumer, dead = rng.choice(CONSUMERS), rng.random() < 0.2
        slices = self.engine.take(
            queue.name,
            consumer,
            rng.choice((1, 2, 5, 20)),
            self.now_us,
            bytes_max=rng.choice((50, 300, 1 << 20)),
            dead=dead,
        )
        if slices:
            assert queue.name not in self.controls[-1].paused, "a paused queue gave messages"
        self.match(queue, slices, dead)
        for piece in slices:
            for offset in range(piece.offset_start, piece.offset_end):
                queue.messages[offset].hold = Hold(consumer, dead, piece.origin)
        self.expire()

    def match(self, queue: QueueModel, slices: Sequence[Slice], dead: bool) -> None:
        """These must be the next messages of the queue, and exactly as they were sent."""
        expected = queue.dead() if dead else [m for m in queue.ready() if not self.is_over(m)]
        taken = [offset for piece in slices for offset in range(piece.offset_start, piece.offset_end)]
        wanted = [message.offset for message in expected[: len(taken)]]
        assert taken == wanted, f"{queue.name}: offsets {taken} came, {wanted} were next"
        for piece in slices:
            self.compare(queue, piece, with_notes=True)

    def is_over(self, message: Message) -> bool:
        return 0 < message.life.expires_us <= self.now_us

    def compare(self, queue: QueueModel, piece: Slice, *, with_notes: bool) -> None:
        for i in range(piece.lo, piece.hi):
            offset = piece.first_offset + i
            assert offset < len(queue.messages), f"{queue.name}: offset {offset} is invented"
            message = queue.messages[offset]
            payload = bytes(piece.payload[piece.bounds[i] : piece.bounds[i + 1]])
            self.ids.shown(piece.origin, offset, payload)
            life = message.life if with_notes else message.lives[0]
            found = (
                payload,
                piece.attempts[i] if piece.attempts is not None else 0,
                piece.retries[i] if piece.retries is not None else RETRIES_NONE,
                piece.expires_us[i] if piece.expires_us is not None else 0,
                piece.reply[i] if piece.reply is not None else None,
                piece.time_us,
                piece.protocol,
            )
            expected = (
                message.payload,
                life.attempts,
                life.retries,
                life.expires_us,
                message.reply,
                message.time_us,
                message.protocol,
            )
            assert found == expected, f"{queue.name}, offset {offset}: {found} instead of {expected}"

    def shown(self, queue: QueueModel, origin: bytes, first: int, end: int) -> None:
        for offset in range(first, end):
            self.ids.shown(origin, offset, queue.messages[offset].payload)

    def settle(self) -> None:
        rng = self.rng
        queue, consumer, held = self.some_held()
        if not held:
            return
        dead = held[0].hold is not None and held[0].hold.dead
        origin = held[0].hold.origin if held[0].hold is not None and rng.random() < 0.5 else None
        outcome = rng.choice((Outcome.ACK, Outcome.ACK, Outcome.REJECT, Outcome.REQUEUE))
        ttl = rng.choice((0, 0, 1, 30))
        ranges = ranges_of(held)
        mine = {
            m.offset
            for m in held
            if m.hold is not None and m.hold.dead == dead and origin in (None, m.hold.origin)
        }
        fates = self.engine.settle(
            queue.name, consumer, outcome, ranges, self.now_us, origin=origin, ttl_seconds=ttl, dead=dead
        )
        assert offsets_of(fates) == mine, f"{queue.name}: {fates} instead of {mine}"
        expires_us = (self.now_us + ttl * SECOND_US if ttl else 0) if outcome is Outcome.REQUEUE else None
        self.happen(queue, fates, expires_us)

    def some_held(self) -> tuple[QueueModel, str, list[Message]]:
        """Some messages that one consumer holds."""
        rng = self.rng
        holding = [
            (queue, message.hold.consumer)
            for queue in self.queues.values()
            for message in queue.messages
            if message.hold is not None
        ]
        queue, consumer = rng.choice(holding or [(self.queue(), rng.choice(CONSUMERS))])
        held = [m for m in queue.messages if m.hold is not None and m.hold.consumer == consumer]
        if held and rng.random() < 0.5:
            held = rng.sample(held, rng.randint(1, len(held)))
        return queue, consumer, sorted(held, key=lambda m: m.offset)

    def happen(
        self,
        queue: QueueModel,
        fates: Sequence[Fate],
        expires_us: int | None = None,
    ) -> None:
        for fate in fates:
            if self.say:
                self.say(f"    {queue.name} {fate}")
            for offset in range(fate.first, fate.end):
                queue.happens(queue.messages[offset], fate.event, fate.reason, self.turn, expires_us)
                self.counts[fate.event.name.lower()] += 1

    def give_back(self) -> None:
        rng = self.rng
        queue, consumer, held = self.some_held()
        all_of_it = rng.random() < 0.5
        if all_of_it:
            held = [m for m in queue.messages if m.hold is not None and m.hold.consumer == consumer]
        fates = self.engine.give_back(
            queue.name,
            consumer,
            self.now_us,
            ranges=None if all_of_it else ranges_of(held),
            where=rng.choice((Where.PLACE, Where.TAIL)),
            lost=rng.random() < 0.7,
        )
        assert offsets_of(fates) == {m.offset for m in held}, f"{queue.name}: {fates} instead of {held}"
        self.happen(queue, fates)

    def expire(self) -> None:
        for name, fate in self.engine.expire(self.now_us):
            queue = self.queues[name]
            for offset in range(fate.first, fate.end):
                assert self.is_over(queue.messages[offset]), f"{name}: offset {offset} has not expired"
            self.happen(queue, [fate])

    def redrive(self) -> None:
        rng = self.rng
        queue = self.queue()
        if not self.exists(queue):
            return
        reason = rng.choice((None, None, Reason.REJECTED, Reason.EXPIRED))
        limit = rng.choice((None, 1, 3))
        ranges = None if rng.random() < 0.7 else [(0, rng.randint(0, len(queue.messages)))]
        chosen = [
            m
            for m in queue.dead()
            if reason in (None, m.life.reason) and (ranges is None or m.offset < ranges[0][1])
        ][:limit]
        count = self.engine.redrive(queue.name, self.now_us, reason=reason, ranges=ranges, limit=limit)
        assert count == len(chosen), f"{queue.name}: {count} redriven instead of {len(chosen)}"
        for message in chosen:
            queue.happens(message, Event.REDRIVEN, message.life.reason, self.turn)

    def withdraw(self) -> None:
        queue = self.queue()
        if self.exists(queue) and queue.messages:
            first = self.rng.randrange(len(queue.messages))
            ranges = [(first, first + self.rng.choice((1, 3)))]
            self.happen(queue, self.engine.withdraw(queue.name, ranges, Reason.OPERATOR, self.now_us))

    def purge(self) -> None:
        queue = self.queue()
        if not self.exists(queue):
            return
        dead = self.rng.random() < 0.5
        chosen = queue.dead() if dead else queue.ready()
        count = self.engine.purge(queue.name, self.now_us, dead=dead)
        assert count == len(chosen), f"{queue.name}: {count} purged instead of {len(chosen)}"
        for message in chosen:
            queue.happens(message, Event.WITHDRAWN, Reason.PURGED, self.turn)

    # --- steps: the rest -------------------------------------------------------------------------

    def pause(self) -> None:
        queue = self.queue()
        if self.exists(queue):
            last = self.controls[-1]
            paused = queue.name not in last.paused
            self.engine.pause(queue.name, paused, self.now_us)
            names = last.paused | {queue.name} if paused else last.paused - {queue.name}
            self.controls.append(Controls(self.turn, names, last.readers))

    def reader(self) -> None:
        rng = self.rng
        queue = self.queue()
        last = self.controls[-1]
        name = rng.choice(("spark", "audit"))
        if name in last.readers and rng.random() < 0.5:
            self.engine.release_retention(name, self.now_us)
            readers = {key: reader for key, reader in last.readers.items() if key != name}
        elif self.exists(queue):
            position = rng.randint(0, len(queue.messages))
            reader = ReaderInfo(
                name, queue.name, rng.choice(("messages", "events")), position, self.now_us + 10 * SECOND_US
            )
            self.engine.hold_retention(reader, self.now_us)
            readers = {**last.readers, name: reader}
        else:
            return
        self.controls.append(Controls(self.turn, last.paused, readers))

    def read(self) -> None:
        """What a reader sees is promised to stay."""
        rng = self.rng
        queue = self.queue()
        if not self.exists(queue):
            return
        start = rng.choice((0, rng.randint(0, len(queue.messages))))
        for piece in self.engine.read(queue.name, start, rng.choice((EVERYTHING, start + 3))):
            self.compare(queue, piece, with_notes=False)
            queue.safe_offset = max(queue.safe_offset, piece.offset_end)
        for run in self.engine.events(queue.name, 0, EVERYTHING):
            queue.safe_event = max(queue.safe_event, run.event_offset + run.end - run.first)

    def look(self) -> None:
        queue = self.queue()
        if self.exists(queue):
            self.compare_counts(self.engine, queue)

    def compare_counts(self, engine: LogEngine, queue: QueueModel) -> None:
        info = engine.describe(queue.name)
        found = (info.ready, info.held, info.dead)
        assert found == queue.counts(), f"{queue.name}: {found} instead of {queue.counts()}"
        ends = (info.offset_end, info.event_end)
        expected = (len(queue.messages), len(queue.messages) + len(queue.happenings))
        assert ends == expected, f"{queue.name}: ends at {ends} instead of {expected}"
        living = [m for m in queue.messages if m.life.room == READY]
        assert info.bytes >= sum(len(m.payload) for m in living)
        assert info.oldest_us == (living[0].time_us if living else 0), f"{queue.name}: {info}"

    def trim(self) -> None:
        self.engine.trim(self.now_us)

    def tick(self) -> None:
        self.engine.tick(self.now_us)
        self.end_turn()

    def flush(self) -> None:
        self.engine.flush(self.now_us)
        self.end_turn()

    def end_turn(self) -> None:
        if not self.engine.full:  # without room, settlements may have to wait
            self.turn += 1

    def poll(self) -> None:
        self.engine.poll()

    def write(self) -> None:
        self.writer.step()

    def keep(self) -> None:
        self.keeper.step()

    def room(self) -> None:
        """The disk fills up, or there is room again."""
        if self.disk.capacity_bytes is not None:
            self.disk.capacity_bytes = None
        elif self.rng.random() < 0.3:
            self.full_allowed = True
            self.disk.capacity_bytes = self.disk.used_bytes + self.rng.choice((0, 1000, 5000))

    def wait_a_while(self) -> None:
        self.now_us += self.rng.choice((1, 1000, 1000, SECOND_US // 2, SECOND_US, 20 * SECOND_US))

    # --- after the end ---------------------------------------------------------------------------

    def check(self, disk: SimDisk, published: int, killed: bool) -> None:
        """Open what is left, and compare it with what must be there. The model becomes what is there."""
        engine = self.open(disk)
        assert not engine.damage, f"a crash is no damage: {engine.damage}"
        assert disk.published >= published, f"published {published}, after the crash {disk.published}"
        lost = self.cut_back(engine, killed)
        known = set(engine.queues())
        happened = {}
        for queue in self.queues.values():
            happened[queue.name] = len(queue.happenings)
            queue.withdraw_requests(self.turn)
        there = [queue for queue in self.queues.values() if queue.name in known]
        for queue in there:
            self.compare_counts(engine, queue)
            self.compare_log(engine, queue)
        for queue in there:
            self.drain(engine, queue)
        for key, transaction in self.transactions.items():
            if self.rng.random() < 0.2:
                self.repeat(engine, key, transaction, known=True)
        for key, transaction in lost:
            self.repeat(engine, key, transaction, known=False)
        engine.flush(self.now_us)
        engine.wait()
        for queue in self.queues.values():
            queue.cut(len(queue.messages), happened[queue.name])

    def cut_back(self, engine: LogEngine, killed: bool) -> list[tuple[str, Transaction]]:
        """Find out what the crash has taken, and whether it had the right to; which transactions are gone."""
        known = set(engine.queues())
        safe_turn = max(self.safe_turn, self.written_turn) if killed else self.safe_turn
        turn_kept, turn_lost = -1, self.turn + 1
        for queue in self.queues.values():
            messages = events = dead = 0
            if queue.name in known:
                info = engine.describe(queue.name)
                messages, events, dead = info.offset_end, info.event_end, info.dead
            assert messages <= len(queue.messages), (
                f"{queue.name}: {messages} messages, {len(queue.messages)} were sent"
            )
            possible = queue.events_possible(messages, events, dead)
            assert possible, (
                f"{queue.name}: {messages} messages and {events} events are left of {len(queue.messages)} messages "
                f"and {len(queue.happenings)} other events"
            )
            safe_messages, safe_happenings = queue.safe_counts(safe_turn, killed)
            assert messages >= safe_messages, (
                f"{queue.name}: LOST: {messages} messages left, {safe_messages} promised"
            )
            assert possible[0] >= safe_happenings, (
                f"{queue.name}: {possible[0]} events left, {safe_happenings} were synced"
            )
            assert events >= queue.safe_event, (
                f"{queue.name}: {events} events left, {queue.safe_event} were shown"
            )
            kept = [m.turn for m in queue.messages[:messages]] + [
                h.turn for h in queue.happenings[: possible[-1]]
            ]
            lost = [m.turn for m in queue.messages[messages:]] + [
                h.turn for h in queue.happenings[possible[0] :]
            ]
            turn_kept, turn_lost = max([turn_kept, *kept]), min([turn_lost, *lost])
            self.counts["messages taken by a crash"] += len(queue.messages) - messages
            queue.cut(messages, possible[0])
            queue.safe_offset = min(queue.safe_offset, messages)
        assert turn_kept <= turn_lost, (
            f"something of turn {turn_kept} is left, something of turn {turn_lost} is lost"
        )
        self.cut_controls(engine, safe_turn)
        return self.cut_transactions()

    def cut_transactions(self) -> list[tuple[str, Transaction]]:
        lost = []
        for key, transaction in list(self.transactions.items()):
            there = [len(self.queues[name].messages) >= end for name, _, end in transaction.ranges]
            assert all(there) or not any(
                len(self.queues[name].messages) > first for name, first, _ in transaction.ranges
            ), f"transaction {key} is there in part: {transaction.ranges}"
            if not all(there):
                lost.append((key, self.transactions.pop(key)))
        return lost

    def cut_controls(self, engine: LogEngine, safe_turn: int) -> None:
        paused = frozenset(name for name in engine.queues() if engine.describe(name).paused)
        readers = {reader.name: reader for reader in engine.readers()}
        while self.controls[-1].paused != paused or self.controls[-1].readers != readers:
            gone = self.controls.pop()
            assert gone.turn > safe_turn, f"paused {paused}, readers {readers}: turn {gone.turn} is forgotten"

    def compare_log(self, engine: LogEngine, queue: QueueModel) -> None:
        """Readers find the whole log from its start on, and every event."""
        info = engine.describe(queue.name)
        seen = set()
        for piece in engine.read(queue.name, 0, EVERYTHING):
            self.compare(queue, piece, with_notes=False)
            seen |= set(range(piece.offset_start, piece.offset_end))
        missing = set(range(info.offset_start, info.offset_end)) - seen
        assert not missing, f"{queue.name}: offsets {missing} of {info} cannot be read"
        if info.event_start == 0:
            self.compare_events(engine, queue)

    def compare_events(self, engine: LogEngine, queue: QueueModel) -> None:
        number = 0
        found: dict[int, list[tuple[Event, Reason]]] = {m.offset: [] for m in queue.messages}
        for run in engine.events(queue.name, 0, EVERYTHING):
            assert run.event_offset == number, f"{queue.name}: event {run.event_offset} after {number - 1}"
            number += run.end - run.first
            for offset in range(run.first, run.end):
                found[offset].append((run.event, run.reason))
        expected: dict[int, list[tuple[Event, Reason]]] = {
            m.offset: [(Event.ACCEPTED, Reason.NONE)] for m in queue.messages
        }
        for happening in queue.happenings:
            expected[happening.message.offset].append((happening.event, happening.reason))
        for message in queue.messages:
            # How a request ended is not known exactly (see events_possible), and its withdrawal at this
            # opening is not synced yet.
            if message.reply is None:
                assert found[message.offset] == expected[message.offset], (
                    f"{queue.name}, offset {message.offset}: {found[message.offset]} instead of "
                    f"{expected[message.offset]}"
                )

    def drain(self, engine: LogEngine, queue: QueueModel) -> None:
        """Take everything: exactly what is ready, then exactly what is dead, in order."""
        engine.pause(queue.name, False, self.now_us)
        for dead in (False, True):
            wanted = queue.dead() if dead else [m for m in queue.ready() if not self.is_over(m)]
            slices: list[Slice] = []
            while more := engine.take(queue.name, "drain", 50, self.now_us, bytes_max=500, dead=dead):
                slices += more
            self.match(queue, slices, dead)
            taken = sum(map(len, slices))
            assert taken == len(wanted), (
                f"{queue.name}: {taken} taken (dead: {dead}), {len(wanted)} are there"
            )
            for piece in slices:
                for offset in range(piece.offset_start, piece.offset_end):
                    queue.messages[offset].hold = Hold("drain", dead, piece.origin)
            if not dead:
                self.counts["drained"] += taken
                for name, fate in engine.expire(self.now_us):
                    self.happen(self.queues[name], [fate])
        left = [m.offset for m in queue.messages if m.hold is None and m.life.room != GONE]
        assert not left, f"{queue.name}: nobody can get {left}"
        assert {m.life.room for m in queue.messages} <= {READY, DEAD, GONE}


def ranges_of(messages: Sequence[Message]) -> Ranges:
    ranges: Ranges = []
    for message in messages:
        if ranges and ranges[-1][1] == message.offset:
            ranges[-1] = (ranges[-1][0], message.offset + 1)
        else:
            ranges.append((message.offset, message.offset + 1))
    return ranges


def offsets_of(fates: Sequence[Fate]) -> set[int]:
    return {offset for fate in fates for offset in range(fate.first, fate.end)}


def run(seed: int, say: Callable[[str], None] | None = None) -> "Counter[str]":
    """One run; Broken where it shows a broken promise, or any error that nobody expects."""
    attempt = Run(seed, say)
    try:
        attempt.run()
    except Exception as error:
        raise Broken(
            f"seed {seed}: {type(error).__name__}: {error}\n    python -m tests.engines.crash {seed}   repeats it"
        ) from error
    return attempt.counts


def main(arguments: Sequence[str]) -> None:
    first = int(arguments[0])
    count = int(arguments[1]) if len(arguments) > 1 else 1
    say: Callable[[str], None] | None = (lambda text: print(text)) if count == 1 else None
    total: Counter[str] = Counter()
    for seed in range(first, first + count):
        total += run(seed, say)
    print(dict(total))


if __name__ == "__main__":
    logging.disable(logging.CRITICAL)
    main(sys.argv[1:])
