"""The steps of a crash run: each does one thing with the log that a broker does, and tells the model."""

import random
from array import array
from collections.abc import Callable, Sequence
from itertools import groupby

from penstock.log.errors import DiskFull, LogError, LogFailed, StageUnknown
from penstock.log.info import ReaderInfo
from penstock.log.log import Log
from penstock.log.readers import FORGET_AFTER_US
from penstock.log.results import Fate, StageInfo, Stored, TransactionDone
from penstock.model.batch import Batch
from penstock.model.life import Event, Reason
from penstock.model.pending import Mark
from penstock.model.policy import Policies, at_birth
from penstock.model.words import KEEP_TTL, RETRY_DELAYS, Outcome, Ranges, Where
from tests.log.crash_check import EVERYTHING, Checker
from tests.log.crash_model import (
    GONE,
    SECOND_US,
    Controls,
    Message,
    Model,
    QueueModel,
    Staged,
    Transaction,
)
from tests.log.inline import InlineWorker
from tests.log.simdisk import PowerCut, SimDisk, nothing

SECTIONS: dict[str, dict[str, object]] = {
    "orders": {"retention-seconds": 3},
    "mails": {"durability": "interval", "max-deliveries": 2, "retention-bytes": 500},
    "logs": {"durability": "none", "retention-seconds": 0},
    "tasks": {"max-deliveries": 3, "retention-seconds": 0, "retry-delays": [1, 2.5]},
    "drops": {"on-expiry": "drop", "dead-letters": "off", "retention-seconds": 0},
}
POLICIES = Policies(SECTIONS)
CONSUMERS = ("ann", "bob", "cy")


class Steps:
    """What one life of the log is made of. Whoever owns it sets disk, engine and workers."""

    disk: SimDisk
    engine: Log
    writer: InlineWorker
    keeper: InlineWorker

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.model = Model((name, POLICIES.for_queue(name)) for name in SECTIONS)
        self.checker = Checker(self.model)
        self.sent = 0
        self.full_allowed = False  # DiskFull would be no surprise
        self.long: tuple[Log, QueueModel, str, Mark, int, int] | None = None  # a purge or redrive in slices
        self.weighted: tuple[tuple[int, Callable[[], None]], ...] = (
            (16, self.append),
            (2, self.scatter),
            (16, self.take),
            (14, self.settle),
            (4, self.give_back),
            (3, self.transact),
            (5, self.stage),
            (5, self.commit),
            (1, self.abort),
            (3, self.expire),
            (6, self.due),
            (2, self.redrive),
            (3, self.repair),
            (1, self.withdraw),
            (1, self.purge),
            (1, self.pause),
            (1, self.reader),
            (5, self.read),
            (2, self.look),
            (6, self.trim),
            (6, self.tick),
            (22, self.flush),
            (22, self.poll),
            (24, self.write),
            (12, self.keep),
            (3, self.room),
            (6, self.wait_a_while),
        )
        if rng.getstate()[1][1] % 2:  # in half of the runs, without a draw that would change the others
            self.weighted += ((12, self.go_on),)
        if rng.getstate()[1][2] % 2:
            self.weighted += ((8, self.move), (2, self.withdraw_free))
        if rng.random() < 0.3:  # a life of small messages, whose segments are compacted all the time
            self.weighted += ((30, self.scatter), (30, self.trim_all))
        if rng.random() < 0.4:  # a life of stages
            self.weighted += (
                (20, self.stage_whole),
                (25, self.commit),
                (12, self.drain),
                (15, self.trim_all),
            )

    @property
    def now_us(self) -> int:
        return self.model.now_us

    # --- in --------------------------------------------------------------------------------------

    def batch(self) -> Batch:
        rng = self.rng
        count = rng.choice((1, 1, 2, 3, 6))
        payloads = []
        for _ in range(count):
            self.sent += 1
            filling = rng.choice((b"a", b"-", b"\0")) * rng.choice((0, 3, 40, 200))
            payloads.append(b"%d:" % self.sent + filling)
        asks = rng.random() < 0.1
        return Batch.of(
            payloads,
            ttl_seconds=[rng.choice((0, 1, 3, 60)) for _ in payloads] if rng.random() < 0.3 else None,
            retries=[rng.choice((-1, 0, 1, 2, 255)) for _ in payloads] if rng.random() < 0.3 else None,
            reply=[b"to-%d" % rng.randint(0, 99) for _ in payloads] if asks else None,
            protocol=rng.choice(("", "sspq", "phpmq", "rq")),
            delay_us=self.delays(count) if not asks and rng.random() < 0.2 else None,
            headers=self.headers(count) if rng.random() < 0.2 else None,
        )

    def delays(self, count: int) -> list[int]:
        return [self.rng.choice((0, 1, SECOND_US, 2 * SECOND_US, 30 * SECOND_US)) for _ in range(count)]

    def headers(self, count: int) -> list[bytes]:
        return [self.rng.choice((b"", b'{"a":"1"}', b'{"long":"%b"}' % (b"x" * 50))) for _ in range(count)]

    def scatter(self) -> None:
        """Many small messages in one block, of which some live on, here and there: compacted, with a header
        each, they may be larger than the block was."""
        rng = self.rng
        queue = self.model.queues[rng.choice(("logs", "tasks", "drops"))]
        payloads = [b"%d" % (self.sent + i) for i in range(rng.choice((20, 40, 60)))]
        self.sent += len(payloads)
        self.append(queue, Batch.of(payloads))
        if queue.name not in self.engine.queues() or queue.name in self.model.controls[-1].paused:
            return
        consumer, every = rng.choice(CONSUMERS), rng.choice((2, 3, 4, 10))
        self.checker.delivery(
            queue, self.engine.take(queue.name, consumer, 500, self.now_us), consumer, dead=False
        )
        self.expire()
        held = [m for m in queue.held_by(consumer) if m.hold is not None and not m.hold.dead]
        settled = [m for m in held if m.offset % every]
        fates = self.engine.settle(queue.name, consumer, Outcome.ACK, ranges_of(settled), self.now_us)
        touched(queue, fates, settled)
        self.model.happen(queue, fates)
        self.model.counts["scattered"] += 1

    def append(self, queue: QueueModel | None = None, batch: Batch | None = None) -> None:
        model = self.model
        queue = queue or self.rng.choice(list(model.queues.values()))
        batch, turn = batch or self.batch(), model.turn
        # With durability = none the receipt comes at once, so the model has to know them before.
        first, end = model.accept(queue, batch)

        def receipt(result: Stored | LogError) -> None:
            if isinstance(result, LogError):
                assert isinstance(result, LogFailed), result
                return
            assert result[:3] == (queue.name, first, end), f"{result} instead of {first} to {end}"
            model.show(queue, result.origin, first, end)
            if queue.durability != "none":
                model.confirm(queue, end, turn, safe=queue.durability == "commit")

        try:
            self.engine.append(queue.name, batch, self.now_us, receipt)
        except LogError as error:
            del queue.messages[first:]
            self.refused(error)

    def refused(self, error: LogError) -> None:
        if not isinstance(error, DiskFull):
            raise error
        assert self.full_allowed, f"the disk is not full: {error}"
        self.model.counts["refused"] += 1

    def transact(self) -> None:
        rng, model = self.rng, self.model
        known = [it for it in model.transactions if it.key]
        if known and rng.random() < 0.3:
            self.checker.repeat(self.engine, rng.choice(known), known=True)
            return
        key = rng.choice((f"key-{self.sent}", f"key-{self.sent}", ""))  # without a key: not remembered
        parts = [(rng.choice(list(model.queues)), self.batch()) for _ in range(rng.randint(1, 4))]
        for _, batch in parts:
            if batch.delay_us is None:
                batch.dead = rng.choice((Reason.NONE, Reason.NONE, Reason.BAD_RECORD))
        sizes = {name: len(queue.messages) for name, queue in model.queues.items()}
        ranges = [(name, *model.accept(model.queues[name], batch)) for name, batch in parts]
        turn = model.turn

        def receipt(result: TransactionDone | LogError) -> None:
            if isinstance(result, LogError):
                assert isinstance(result, LogFailed), result
                return
            assert not result.repeated
            assert [part[:3] for part in result.stored] == ranges, f"{result} instead of {ranges}"
            for name, first, end, origin in result.stored:
                model.show(model.queues[name], origin, first, end)
                model.confirm(model.queues[name], end, turn, safe=True)

        try:
            self.engine.transact(key, parts, self.now_us, receipt)
        except LogError as error:
            for name, size in sizes.items():
                del model.queues[name].messages[size:]
            self.refused(error)
        else:
            for (name, first, end), (_, batch) in zip(ranges, parts, strict=True):
                if batch.dead:
                    event, reason = at_birth(POLICIES.for_queue(name), batch.dead)
                    model.happen(model.queues[name], [Fate(first, end, event, reason)])
            model.transactions.append(Transaction(key, parts, ranges))
            if rng.random() < 0.2:
                # The moment that matters for a transaction: the power fails while it is written.
                self.flush()
                self.disk.cut_after(rng.randint(1, 5))
                self.writer.wait()

    # --- stages ----------------------------------------------------------------------------------

    def staged_batch(self) -> Batch:
        rng = self.rng
        count = rng.choice((1, 2, 5, 20, 60)) if rng.random() < 0.9 else 300
        payloads = [b"%d:" % (self.sent + i) + b"s" * rng.choice((0, 3, 40, 90)) for i in range(count)]
        self.sent += count
        batch = Batch.of(
            payloads,
            ttl_seconds=[rng.choice((0, 1, 3, 60)) for _ in payloads] if rng.random() < 0.3 else None,
            retries=[rng.choice((-1, 0, 1, 2, 255)) for _ in payloads] if rng.random() < 0.3 else None,
            protocol=rng.choice(("", "http", "http", "spark")),
            delay_us=self.delays(count) if rng.random() < 0.2 else None,
            headers=self.headers(count) if rng.random() < 0.2 else None,
        )
        if batch.delay_us is None:
            batch.dead = rng.choice((Reason.NONE, Reason.NONE, Reason.NONE, Reason.BAD_RECORD))
        return batch

    def stage(self) -> None:
        rng, model, engine = self.rng, self.model, self.engine
        committed = [it.key for it in model.transactions if it.stages is not None]
        key = rng.choice([*model.stages, *committed[-1:], f"stage-{self.sent}"])
        parts = [(rng.choice(list(model.queues)), self.staged_batch()) for _ in range(rng.randint(1, 4))]
        if (queue := self.queue()) is not None and (letters := queue.dead()):
            batch = Batch.of([b"%d. staged repair of %d" % (self.sent, m.offset) for m in letters])
            batch.repairs = array("q", [m.offset for m in letters])
            batch.identity = rng.choice(("", engine.describe(queue.name).identity))
            parts.insert(rng.randint(0, len(parts)), (queue.name, batch))
        staged, turn, ends = Staged(key, parts, self.now_us), model.turn, len(model.ended)

        def receipt(result: StageInfo | LogError) -> None:
            if isinstance(result, LogError):
                assert isinstance(result, LogFailed), result
                return
            model.staging.remove(staged)
            staged.stage, staged.is_safe = result.stage, True
            assert (result.messages, result.payload_bytes) == staged.size
            assert all(result.stage not in it for it in model.stages.values()), f"{result}: an id for two"
            model.counts["stages"] += 1
            model.written_turn = max(model.written_turn, turn - 1)
            model.safe_turn = max(model.safe_turn, turn - 1)
            if any(it.stage == result.stage for it in engine.stages(key)):
                model.stages[key] = {**model.stages.pop(key, {}), result.stage: staged}
            else:
                ended = [it for it in model.ended[ends:] if it.key == key]
                lapsed = model.latest_us - staged.time_us >= engine._settings.stage_seconds * SECOND_US
                assert ended or lapsed, f"{result} is not there"
                if not ended:
                    ended.append(model.end_stages(key))
                ended[-1].stages[result.stage] = staged

        model.staging.append(staged)
        try:
            engine.stage(key, parts, self.now_us, receipt)
        except LogError as error:
            model.staging.remove(staged)
            self.refused(error)
        else:
            self.cut_soon()

    def stage_whole(self) -> None:
        """With its receipt."""
        self.stage()
        self.flush()
        self.engine.wait()

    def drain(self) -> None:
        """Most of what a queue has is acknowledged, so that segments are compacted."""
        rng = self.rng
        queue = self.queue()
        if queue is None or queue.name in self.model.controls[-1].paused:
            return
        consumer = rng.choice(CONSUMERS)
        slices = self.engine.take(queue.name, consumer, rng.choice((50, 500)), self.now_us)
        self.checker.delivery(queue, slices, consumer, dead=False)
        self.expire()
        held = [m for m in queue.held_by(consumer) if m.hold is not None and not m.hold.dead]
        settled = [m for m in held if rng.random() < 0.9]
        fates = self.engine.settle(queue.name, consumer, Outcome.ACK, ranges_of(settled), self.now_us)
        touched(queue, fates, settled)
        self.model.happen(queue, fates)

    def cut_soon(self) -> None:
        """The moment that matters: the power fails while it is written."""
        if self.rng.random() < 0.2:
            self.flush()
            self.disk.cut_after(self.rng.randint(1, 8))
            self.writer.wait()

    def commit(self) -> None:
        rng, model = self.rng, self.model
        if not model.stages:
            return
        key = rng.choice(list(model.stages))
        staged = list(model.stages[key].values())
        rng.shuffle(staged)
        del staged[1 : rng.choice((1, 99, 99))]
        stages = [it.stage for it in staged]
        if any(it.key == key for it in model.transactions):
            (done,) = [it for it in model.transactions if it.key == key]
            self.checker.repeat(self.engine, done._replace(stages=stages), known=True)
            return
        if rng.random() < 0.1:
            other = next((it for its in model.stages.values() for it in its if it not in stages), "0" * 32)
            try:
                self.engine.commit(f"{key}?", [*stages, other], self.now_us)
            except StageUnknown:
                return
            raise AssertionError(f"{key}: a stage of another key was committed")
        parts = [part for it in staged for part in it.parts]
        time_us, redriven = self.now_us, 0
        if any(batch.repairs is not None for _, batch in parts):
            time_us = max(time_us, self.engine._committer.active.time_max_us)
        turn = model.turn
        ranges: list[tuple[str, int, int]] = []

        def receipt(result: TransactionDone | LogError) -> None:
            if isinstance(result, LogError):
                assert isinstance(result, LogFailed), result
                return
            assert not result.repeated
            assert result.redriven == redriven, f"{result}: {redriven}"
            assert [part[:3] for part in result.stored] == ranges, f"{result} instead of {ranges}"
            ended.is_safe = True
            model.counts["commits"] += 1
            for name, first, end, origin in result.stored:
                model.show(model.queues[name], origin, first, end)
                model.confirm(model.queues[name], end, turn, safe=True)

        cut: PowerCut | None = None
        try:
            self.engine.commit(key, stages, self.now_us, receipt)
        except LogError as error:
            self.refused(error)
            return
        except PowerCut as error:  # While the loop wrote it: all of it may be there, or nothing.
            cut = error
        happened = {name: len(queue.happenings) for name, queue in model.queues.items()}
        for name, batch in parts:
            if batch.repairs is not None:
                redriven += self.redriven(model.queues[name], batch)
        doors: list[tuple[str, Batch]] = []
        by_queue: dict[str, list[Batch]] = {}
        for name, batch in parts:
            if batch.repairs is None:
                by_queue.setdefault(name, []).append(batch)
        for name, batches in by_queue.items():
            alike = groupby(batches, key=lambda it: (it.protocol, it.dead, it.delay_us is not None))
            for (_, dead, _), group in alike:
                queue, its = model.queues[name], list(group)
                first = len(queue.messages)
                for batch in its:
                    model.accept(queue, batch, time_us)
                ranges.append((name, first, len(queue.messages)))
                doors.append((name, its[0]))
                if dead:
                    event, reason = at_birth(POLICIES.for_queue(name), dead)
                    model.happen(queue, [Fate(first, len(queue.messages), event, reason)])
        brought = tuple(
            (name, before, len(model.queues[name].happenings))
            for name, before in happened.items()
            if before < len(model.queues[name].happenings)
        )
        model.transactions.append(Transaction(key, doors, ranges, stages, brought))
        ended = model.end_stages(key)
        if cut is not None:
            raise cut
        self.due()  # Which of a staged part are delayed is found by looking at them.
        self.cut_soon()

    def redriven(self, queue: QueueModel, batch: Batch) -> int:
        """Dead letters go back with these payloads, as far as they are dead; how many."""
        dead = {message.offset: message for message in queue.dead()}
        count = 0
        for offset, payload in zip(batch.repairs or (), batch.messages(), strict=True):
            message = dead.pop(offset, None)
            if message is not None:
                count += 1
                reason = message.life.reason
                queue.happens(message, Event.REDRIVEN, reason, self.model.turn, payload=payload)
        return count

    def abort(self) -> None:
        if not self.model.stages:
            return
        key = self.rng.choice(list(self.model.stages))
        self.engine.abort(key, self.now_us)
        ended = self.model.end_stages(key)

        def confirmed(error: LogError | None) -> None:
            ended.is_safe = error is None

        if self.rng.random() < 0.5:
            self.engine.confirm(self.now_us, confirmed)
        self.cut_soon()

    def lapse(self, waits: bool) -> None:
        """Stages that nobody has ended for long may be gone."""
        model, limit_us = self.model, self.engine._settings.stage_seconds * SECOND_US
        old = {
            key: self.now_us - max(it.time_us for it in stages.values()) >= limit_us
            for key, stages in model.stages.items()
        }
        for key, is_old in old.items():
            if not self.engine.stages(key):
                assert is_old, f"the stages of {key} are gone, too soon"
                model.end_stages(key)
                model.counts["stages lapsed"] += 1
        if not model.staging and not waits:  # One of those may be young.
            assert not (model.stages and all(old.values())), f"{[*model.stages]} were there for too long"

    # --- out -------------------------------------------------------------------------------------

    def queue(self) -> QueueModel | None:
        """Any queue that the log knows."""
        known = self.engine.queues()
        return self.model.queues[self.rng.choice(known)] if known else None

    def take(self) -> None:
        rng = self.rng
        if (queue := self.queue()) is None:
            return
        consumer, dead = rng.choice(CONSUMERS), rng.random() < 0.2
        slices = self.engine.take(
            queue.name,
            consumer,
            rng.choice((1, 2, 5, 20)),
            self.now_us,
            bytes_max=rng.choice((50, 300, 1 << 20)),
            dead=dead,
        )
        paused = queue.name in self.model.controls[-1].paused
        assert not (slices and paused), f"{queue.name} is paused and gave {slices}"
        self.checker.delivery(queue, slices, consumer, dead)
        self.expire()

    def settle(self) -> None:
        rng = self.rng
        queue, consumer, held = self.some_held()
        if queue is None or not held:
            return
        hold = held[0].hold
        assert hold is not None
        origin = rng.choice((None, hold.origin))
        outcome = rng.choice((Outcome.ACK,) * 4 + (Outcome.REJECT, Outcome.REQUEUE))
        ttl = rng.choice((0, 0, 1, 30, KEEP_TTL))
        delay_us = rng.choice((None, 0, SECOND_US, 25 * SECOND_US))
        why = rng.choice(("", "broken", "é\n"))
        mine = [m for m in held if m.hold is not None and m.hold.dead == hold.dead]
        fates = self.engine.settle(
            queue.name,
            consumer,
            outcome,
            ranges_of(held),
            self.now_us,
            origin=origin,
            ttl_seconds=ttl,
            dead=hold.dead,
            delay_us=RETRY_DELAYS if delay_us is None else delay_us,
            why=why,
        )
        touched(queue, fates, [m for m in mine if m.hold is not None and origin in (None, m.hold.origin)])
        expires_us = None
        if outcome is Outcome.REQUEUE and ttl != KEEP_TTL:
            expires_us = self.now_us + ttl * SECOND_US if ttl else 0
        self.model.happen(queue, fates, expires_us, delay_us, why if outcome is Outcome.REJECT else "")

    def due(self) -> None:
        self.flush()  # What is in no block yet is looked at later.
        self.checker.due(self.engine)

    def some_held(self) -> tuple[QueueModel | None, str, list[Message]]:
        """Some messages that one consumer holds."""
        rng = self.rng
        holding = [
            (queue, message.hold.consumer)
            for queue in self.model.queues.values()
            for message in queue.messages
            if message.hold is not None
        ]
        if not holding:
            return None, "", []
        queue, consumer = rng.choice(holding)
        held = queue.held_by(consumer)
        if rng.random() < 0.5:
            held = rng.sample(held, rng.randint(1, len(held)))
        return queue, consumer, sorted(held, key=lambda m: m.offset)

    def give_back(self) -> None:
        rng = self.rng
        queue, consumer, held = self.some_held()
        if queue is None:
            return
        all_of_it = rng.random() < 0.5
        fates = self.engine.give_back(
            queue.name,
            consumer,
            self.now_us,
            ranges=None if all_of_it else ranges_of(held),
            where=rng.choice((Where.PLACE, Where.TAIL)),
            lost=rng.random() < 0.7,
        )
        touched(queue, fates, queue.held_by(consumer) if all_of_it else held)
        self.model.happen(queue, fates)

    def expire(self) -> None:
        for name, fate in self.engine.expire(self.now_us):
            queue = self.model.queues[name]
            early = [o for o in range(fate.first, fate.end) if not self.model.is_over(queue.messages[o])]
            assert not early, f"{name}: offsets {early} have not expired: {fate}"
            self.model.happen(queue, [fate])

    def redrive(self) -> None:
        rng = self.rng
        if (queue := self.queue()) is None:
            return
        reason = rng.choice((None, None, Reason.REJECTED, Reason.EXPIRED))
        limit = rng.choice((None, 1, 3))
        end = rng.choice((EVERYTHING, rng.randint(0, len(queue.messages))))
        dead = [m for m in queue.dead() if reason in (None, m.life.reason) and m.offset < end][:limit]
        ranges = None if end == EVERYTHING else [(0, end)]
        fates = self.engine.redrive(queue.name, self.now_us, reason=reason, ranges=ranges, limit=limit)
        touched(queue, fates, sorted(dead, key=lambda message: message.offset))
        self.model.happen(queue, fates)

    def repair(self) -> None:
        """Dead letters, and some messages that are none, with other payloads."""
        rng, model = self.rng, self.model
        if (queue := self.queue()) is None or not queue.messages:
            return
        dead = {message.offset: message for message in queue.dead()}
        named = [offset for offset in dead if rng.random() < 0.7]
        named += [rng.randrange(len(queue.messages) + 2) for _ in range(rng.choice((0, 0, 1, 3)))]
        if rng.random() < 0.5:
            named.sort()
        batch = Batch.of(
            [b"%d. repair of %d" % (self.sent, offset) + b"+" * rng.choice((0, 90)) for offset in named]
        )
        batch.repairs = array("q", named)
        self.sent += 1
        if not named:
            return
        key = rng.choice(("", f"repair-{self.sent}"))
        events_end = 0

        def receipt(result: TransactionDone | LogError) -> None:
            if isinstance(result, LogError):
                assert isinstance(result, LogFailed), result
                return
            assert not result.stored
            if not result.repeated:
                assert result.redriven == len(repaired), f"{result}: {repaired}"
                queue.safe_event = max(queue.safe_event, events_end)

        repaired: list[int] = []
        for offset, payload in zip(named, batch.messages(), strict=True):
            message = dead.pop(offset, None)
            if message is not None:
                repaired.append(offset)
                queue.happens(message, Event.REDRIVEN, message.life.reason, model.turn, payload=payload)
        try:
            self.engine.transact(key, [(queue.name, batch)], self.now_us, receipt)
        except LogError as error:
            queue.cut_happenings(len(repaired))
            self.refused(error)
            return
        model.counts["repaired"] += len(repaired)
        events_end = self.engine.describe(queue.name).event_end
        if key and rng.random() < 0.5:
            self.engine.transact(key, [(queue.name, batch)], self.now_us, receipt)
        if rng.random() < 0.2:
            self.flush()
            self.disk.cut_after(rng.randint(1, 5))
            self.writer.wait()

    def withdraw(self) -> None:
        queue = self.queue()
        if queue is not None and queue.messages:
            first = self.rng.randrange(len(queue.messages))
            ranges = [(first, first + self.rng.choice((1, 3)))]
            fates = self.engine.withdraw(queue.name, ranges, Reason.OPERATOR, self.now_us)
            self.model.happen(queue, fates)

    def withdraw_free(self) -> None:
        """What nobody holds, dead or not."""
        queue = self.queue()
        if queue is not None and queue.messages:
            first = self.rng.randrange(len(queue.messages))
            end = first + self.rng.choice((1, 4))
            free = [message for message in queue.messages[first:end] if is_free(message)]
            fates = self.engine.withdraw_free(queue.name, [(first, end)], Reason.OPERATOR, self.now_us)
            touched(queue, fates, free)
            self.model.happen(queue, fates)

    def move(self) -> None:
        """Messages out of one queue into another, as far as nobody holds them: both or neither."""
        rng, model = self.rng, self.model
        if (source := self.queue()) is None or not source.messages:
            return
        to = model.queues[rng.choice([name for name in model.queues if name != source.name])]
        # Of requests it could not be told whether they were moved, or withdrawn by the next opening.
        plain = [message for message in source.messages if not message.life.asks]
        count = min(len(plain), rng.choice((1, 3, 8)))
        if not count:
            return
        named = [plain[i] for i in sorted(rng.sample(range(len(plain)), count))]
        self.sent += 1
        payloads = [b"%d. move of %d" % (self.sent, message.offset) for message in named]
        delays = self.delays(count) if rng.random() < 0.3 else None
        headers = self.headers(count) if rng.random() < 0.3 else None
        batch = Batch.of(payloads, delay_us=delays, headers=headers, protocol="http")
        batch.moves, batch.source = array("q", [message.offset for message in named]), source.name
        rows = [(row, row + 1) for row, message in enumerate(named) if is_free(message)]
        picked = batch.picked(rows)
        key = rng.choice(("", f"move-{self.sent}"))
        size, turn, happened = len(to.messages), model.turn, len(source.happenings)
        ranges = [(to.name, *model.accept(to, picked))] if rows else []

        def receipt(result: TransactionDone | LogError) -> None:
            if isinstance(result, LogError):
                assert isinstance(result, LogFailed), result
                return
            assert [part[:3] for part in result.stored] == ranges, f"{result} instead of {ranges}"
            for name, first, end, origin in result.stored:
                model.show(model.queues[name], origin, first, end)
                model.confirm(model.queues[name], end, turn, safe=True)

        try:
            fates = self.engine.transact(key, [(to.name, batch)], self.now_us, receipt)
        except LogError as error:
            del to.messages[size:]
            self.refused(error)
            return
        touched(source, [fate for _, fate in fates], [message for message in named if is_free(message)])
        model.happen(source, [fate for _, fate in fates])
        model.counts["moved"] += len(rows)
        if ranges:
            brought = ((source.name, happened, len(source.happenings)),)
            model.transactions.append(Transaction(key, [(to.name, picked)], ranges, None, brought))
        if rng.random() < 0.3:
            self.flush()
            self.disk.cut_after(rng.randint(1, 5))
            self.writer.wait()

    def purge(self) -> None:
        if (queue := self.queue()) is None:
            return
        dead = self.rng.random() < 0.5
        chosen = queue.dead() if dead else queue.ready() + queue.delayed()
        fates = self.engine.purge(queue.name, self.now_us, dead=dead)
        touched(queue, fates, sorted(chosen, key=lambda message: message.offset))
        self.model.happen(queue, fates)

    def go_on(self) -> None:
        """A slice of a purge or redrive, between which anything happens: it takes what was there when it
        began, in order. A crash ends it, and leaves whole slices."""
        rng = self.rng
        if self.long is None or self.long[0] is not self.engine or rng.random() < 0.2:
            if (queue := self.queue()) is None:
                return
            what = rng.choice(("redrive", "purge", "purge-dead"))
            mark = self.engine.mark(queue.name)
            self.long = (self.engine, queue, what, mark, len(queue.messages), queue.sequence)
        _, queue, what, mark, tail, sequence = self.long
        limit = rng.choice((1, 3, 50))
        chosen = [m for m in queue.dead() if m.life.died <= sequence]
        if what == "redrive":
            fates = self.engine.redrive(queue.name, self.now_us, limit=limit, mark=mark)
        elif what == "purge-dead":
            fates = self.engine.purge(queue.name, self.now_us, dead=True, limit=limit, mark=mark)
        else:
            own = [m for m in queue.ready() if m.life.place[1] and m.offset < tail]
            moved = [m for m in queue.ready() if not m.life.place[1] and m.life.place[2] <= sequence]
            chosen = own + moved + [m for m in queue.delayed() if m.offset < tail]
            fates = self.engine.purge(queue.name, self.now_us, limit=limit, mark=mark)
        touched(queue, fates, sorted(chosen[:limit], key=lambda message: message.offset))
        self.model.happen(queue, fates)
        self.model.counts["slices"] += 1

    # --- looking and telling -----------------------------------------------------------------------

    def pause(self) -> None:
        if (queue := self.queue()) is None:
            return
        controls = self.model.controls
        paused = queue.name not in controls[-1].paused
        self.engine.pause(queue.name, paused, self.now_us)
        controls.append(Controls(self.model.turn, controls[-1].paused ^ {queue.name}, controls[-1].readers))

    def reader(self) -> None:
        rng, controls = self.rng, self.model.controls
        name = rng.choice(("spark", "audit"))
        readers = dict(controls[-1].readers)
        mine = [key for key in readers if key[0] == name]
        if mine and rng.random() < 0.4:
            gone = rng.choice((None, *mine))  # one queue of it, or all
            for key in mine if gone is None else (gone,):
                del readers[key]
            self.engine.release_retention(name, self.now_us, queue=gone[1] if gone is not None else None)
        elif (queue := self.queue()) is not None:
            view = rng.choice(("messages", "events"))
            info = self.engine.describe(queue.name)
            start, end = {
                "messages": (info.offset_start, info.offset_end),
                "events": (info.event_start, info.event_end),
            }[view]
            lease_until_us = self.now_us + 10 * SECOND_US
            reader = ReaderInfo(name, queue.name, view, rng.randint(start, end), lease_until_us)
            readers[name, queue.name] = reader
            self.engine.hold_retention(reader, self.now_us)
        else:
            return
        controls.append(Controls(self.model.turn, controls[-1].paused, readers))

    def read(self) -> None:
        """What a reader sees is promised to stay."""
        if (queue := self.queue()) is None:
            return
        start = self.rng.choice((0, self.rng.randint(0, len(queue.messages))))
        end = self.rng.choice((EVERYTHING, start + 3))
        for piece in self.engine.read(queue.name, start, end):
            self.checker.content(queue, piece, as_stored=True)
            queue.safe_offset = max(queue.safe_offset, piece.offset_end)
        for run in self.engine.events(queue.name, start, EVERYTHING):
            queue.safe_event = max(queue.safe_event, run.event_offset + run.end - run.first)

    def look(self) -> None:
        if (queue := self.queue()) is not None:
            self.checker.counts(self.engine, queue)

    # --- time, room and work in the background -----------------------------------------------------

    def trim(self) -> None:
        controls = self.model.controls
        self.engine.trim(self.now_us)
        for key, reader in controls[-1].readers.items():
            if reader.lease_until_us + FORGET_AFTER_US <= self.now_us:
                left = {other: it for other, it in controls[-1].readers.items() if other != key}
                controls.append(Controls(self.model.turn, controls[-1].paused, left))
                self.model.counts["readers forgotten"] += 1

    def trim_all(self) -> None:
        """To the end, with everything that it waits for."""
        self.flush()
        self.engine.wait()
        self.trim()
        self.engine.wait()

    def tick(self) -> None:
        waits = self.engine._committer.waits_for_room
        try:
            self.engine.tick(self.now_us)
        except PowerCut:  # While the loop wrote it: that stages have lapsed may be on the disk.
            self.lapse(waits=True)
            raise
        self.lapse(waits or self.engine.failed is not None)
        self.end_turn()

    def flush(self) -> None:
        calls = len(self.disk.calls)
        self.engine.flush(self.now_us)
        if ("write", self.engine._committer.active.name) in self.disk.calls[calls:]:
            self.model.counts["written by the loop"] += 1
        self.end_turn()

    def end_turn(self) -> None:
        if not self.engine.full:  # without room, settlements may have to wait for another turn
            self.model.turn += 1

    def poll(self) -> None:
        self.engine.poll()

    def write(self) -> None:
        """The loop goes on while the writer waits for a sync."""
        broken: list[Exception] = []

        def turn() -> None:
            self.disk.meanwhile = nothing
            self.model.counts["turns while a sync is under way"] += 1
            try:
                self.append()
                self.flush()
            except Exception as error:  # noqa: BLE001 - of the loop's, and not of the writer's job
                broken.append(error)

        if self.rng.random() < 0.5:
            self.disk.meanwhile = turn
        self.writer.step()
        self.disk.meanwhile = nothing
        for error in broken:
            raise error

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
        """Sometimes the clock is set back meanwhile."""
        model = self.model
        model.now_us += self.rng.choice(
            (1, 1000, 1000, SECOND_US // 2, SECOND_US, 20 * SECOND_US, 400 * SECOND_US, -5 * SECOND_US)
        )
        model.latest_us = max(model.latest_us, model.now_us)


def is_free(message: Message) -> bool:
    return message.hold is None and message.life.room != GONE


def ranges_of(messages: Sequence[Message]) -> Ranges:
    ranges: Ranges = []
    for message in messages:
        if ranges and ranges[-1][1] == message.offset:
            ranges[-1] = (ranges[-1][0], message.offset + 1)
        else:
            ranges.append((message.offset, message.offset + 1))
    return ranges


def touched(queue: QueueModel, fates: Sequence[Fate], messages: Sequence[Message]) -> None:
    """Exactly these messages must have got a fate."""
    found = sorted(offset for fate in fates for offset in range(fate.first, fate.end))
    wanted = [message.offset for message in messages]
    assert found == wanted, f"{queue.name}: {found} were settled instead of {wanted}"
