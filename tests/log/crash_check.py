"""The checks of a crash run: a log beside its model. See `crash.py` for what must hold."""

from collections.abc import Iterator, Sequence

from penstock.log.errors import LogError
from penstock.log.info import QueueInfo
from penstock.log.log import Log
from penstock.log.results import TransactionDone
from penstock.model.batch import RETRIES_NONE, Batch, Slice
from penstock.model.life import Event, Reason
from tests.log.crash_model import DEAD, GONE, READY, Hold, Model, QueueModel, Transaction

EVERYTHING = 1 << 50


class Checker:
    """Compares; where it says so, it makes the model what was found."""

    def __init__(self, model: Model) -> None:
        self._model = model

    # --- at any time -----------------------------------------------------------------------------

    def delivery(self, queue: QueueModel, slices: Sequence[Slice], consumer: str, dead: bool) -> None:
        """These must be the next messages of the queue, exactly as they were sent; they are held now."""
        expected = queue.dead() if dead else [m for m in queue.ready() if not self._model.is_over(m)]
        taken = [offset for piece in slices for offset in range(piece.offset_start, piece.offset_end)]
        wanted = [message.offset for message in expected[: len(taken)]]
        assert taken == wanted, f"{queue.name}: offsets {taken} came, {wanted} were next"
        for piece in slices:
            self.content(queue, piece, as_stored=False)
            for offset in range(piece.offset_start, piece.offset_end):
                queue.messages[offset].hold = Hold(consumer, dead, piece.origin)

    def content(self, queue: QueueModel, piece: Slice, *, as_stored: bool) -> None:
        """Payload, id and every attribute of some messages: as they came, or as they are now."""
        for i in range(piece.lo, piece.hi):
            offset = piece.first_offset + i
            assert offset < len(queue.messages), f"{queue.name}: offset {offset} is invented"
            message = queue.messages[offset]
            payload = bytes(piece.payload[piece.bounds[i] : piece.bounds[i + 1]])
            life = message.lives[0] if as_stored else message.life
            self._model.ids.shown(piece.origin, offset, payload if life.payload is None else message.payload)
            found = (
                payload,
                piece.attempts[i] if piece.attempts is not None else 0,
                piece.retries[i] if piece.retries is not None else RETRIES_NONE,
                max(piece.expires_us[i], 0) if piece.expires_us is not None else 0,  # or it came without
                piece.reply[i] if piece.reply is not None else None,
                piece.headers[i] if piece.headers is not None else b"",
                piece.time_us,
                piece.protocol,
                piece.origin,
            )
            expected = (
                message.payload if life.payload is None else life.payload,
                life.attempts,
                life.retries,
                life.expires_us,
                message.reply,
                message.headers,
                message.time_us,
                message.protocol,
                message.origin or piece.origin,
            )
            assert found == expected, f"{queue.name}, offset {offset}: {found} instead of {expected}"

    def counts(self, engine: Log, queue: QueueModel) -> None:
        info = engine.describe(queue.name)
        found = (info.ready, info.delayed, info.held, info.dead)
        assert found == queue.counts(), f"{queue.name}: {found} instead of {queue.counts()}"
        ends = (info.offset_end, info.event_end)
        expected = (len(queue.messages), len(queue.messages) + len(queue.happenings))
        assert ends == expected, f"{queue.name}: ends at {ends} instead of {expected}"
        said = {i: why for a, b, why in engine.whys(queue.name, 0, EVERYTHING) for i in range(a, b)}
        whys = {m.offset: m.life.why for m in queue.messages if m.life.room == DEAD and m.life.why}
        assert said == whys, f"{queue.name}: {said} was said instead of {whys}"
        living = [m for m in queue.messages if m.life.room == READY]
        assert info.bytes == sum(len(m.payload) for m in living), f"{queue.name}: {info}"
        assert info.oldest_us == (living[0].time_us if living else 0), f"{queue.name}: {info}"
        self._readers(queue, info)

    def _readers(self, queue: QueueModel, info: QueueInfo) -> None:
        """Nothing that a reader still wants has been removed."""
        starts = {"messages": info.offset_start, "events": info.event_start}
        for reader in self._model.controls[-1].readers.values():
            # A lease that was over once may have cost it something, whatever the clock says now.
            if reader.queue == queue.name and reader.lease_until_us > self._model.latest_us:
                assert starts[reader.view] <= reader.position, f"{reader} comes too late: {info}"

    def repeat(self, engine: Log, transaction: Transaction, *, known: bool) -> None:
        """The same key again: nothing is added when it has been committed."""

        def receipt(result: TransactionDone | LogError) -> None:
            if isinstance(result, TransactionDone):
                assert result.repeated == known, f"{transaction}: {result}"
                ranges = [part[:3] for part in result.stored]
                assert not known or ranges == transaction.ranges, f"{ranges} instead of {transaction}"

        before = [(name, engine.describe(name).offset_end) for name in engine.queues()]
        if transaction.stages is None:
            engine.transact(transaction.key, transaction.parts, self._model.now_us, receipt)
        else:
            engine.commit(transaction.key, transaction.stages, self._model.now_us, receipt)
        after = [(name, engine.describe(name).offset_end) for name in engine.queues()]
        changes = bool(transaction.ranges) and not known
        assert (before != after) == changes, f"{transaction}, known: {known}: {before}, then {after}"

    # --- after the end of a life -------------------------------------------------------------------

    def after_end(self, engine: Log, *, killed: bool) -> None:
        """`engine` is open on a copy of what was left, and can be used up.

        The model becomes what is there: what was not promised may be gone.
        """
        model = self._model
        self.due(engine)
        lost = self._cut_back(engine, killed)
        assert not engine.damage, f"a crash is no damage: {engine.damage}"
        happened = {queue.name: len(queue.happenings) for queue in model.queues.values()}
        for queue in model.queues.values():
            queue.withdraw_requests(model.turn)
        there = [model.queues[name] for name in engine.queues()]
        for queue in there:
            self.counts(engine, queue)
            self._log(engine, queue)
            self._repair_queue(engine, queue)
        for queue in there:
            self._drain(engine, queue)
        all_due(engine, 1 << 60)
        for queue in there:
            self._drain_delayed(engine, queue)
        self._open_stages(engine, {transaction.key for transaction in lost})
        for transaction in model.transactions:
            self.repeat(engine, transaction, known=bool(transaction.key))
        for transaction in lost:
            self.repeat(engine, transaction, known=False)
        engine.flush(model.now_us)
        engine.wait()
        for queue in model.queues.values():
            queue.cut(len(queue.messages), happened[queue.name])

    def due(self, engine: Log) -> None:
        """All that was delayed until now is ready."""
        all_due(engine, self._model.latest_us)
        for queue in self._model.queues.values():
            queue.due(self._model.latest_us)

    def _cut_back(self, engine: Log, killed: bool) -> list[Transaction]:
        """Find out what the crash has taken, and whether it had the right to; which transactions are gone."""
        model = self._model
        known = set(engine.queues())
        safe_turn = max(model.safe_turn, model.written_turn) if killed else model.safe_turn
        turn_kept, turn_lost = -1, model.turn + 1
        for queue in model.queues.values():
            messages = events = dead = 0
            if queue.name in known:
                info = engine.describe(queue.name)
                messages, events, dead = info.offset_end, info.event_end, info.dead
            sent, happened = len(queue.messages), len(queue.happenings)
            found = f"{queue.name}: of {sent} messages and {happened} other events {messages} and {events}"
            assert messages <= sent, f"{found} are left"
            possible = queue.events_possible(messages, events, dead)
            assert possible, f"{found} (together) are left, {dead} dead: no moment was like that"
            safe_messages, safe_happenings = queue.safe_counts(safe_turn, killed)
            assert messages >= safe_messages, (
                f"LOST: {found} are left; {safe_messages} messages were promised"
            )
            assert possible[0] >= safe_happenings, f"{found} are left; {safe_happenings} events were synced"
            assert events >= queue.safe_event, f"{found} are left; {queue.safe_event} events were shown"
            kept = [m.turn for m in queue.messages[:messages]]
            kept += [h.turn for h in queue.happenings[: possible[-1]]]
            lost = [m.turn for m in queue.messages[messages:]]
            lost += [h.turn for h in queue.happenings[possible[0] :]]
            turn_kept, turn_lost = max([turn_kept, *kept]), min([turn_lost, *lost])
            model.counts["messages taken back"] += sent - messages
            queue.cut(messages, possible[0])
        assert turn_kept <= turn_lost, f"turn {turn_lost} is lost, but something of turn {turn_kept} is there"
        self._cut_controls(engine, safe_turn)
        self._cut_stages(engine, safe_turn)
        return self._cut_transactions(engine)

    def _cut_stages(self, engine: Log, safe_turn: int) -> None:
        """What was confirmed is there, and what was given up is gone, as far as somebody was told."""
        model = self._model
        keys = {*model.stages, *(it.key for it in model.ended), *(it.key for it in model.staging)}
        found = {key: {info.stage: info for info in engine.stages(key)} for key in keys}
        assert sum(map(len, found.values())) == engine.stages_count, f"{found}: others are there too"
        for key, infos in found.items():
            for stage, staged in list(model.stages.get(key, {}).items()):
                if not staged.is_safe and stage not in infos:  # A killed process had left it, unsynced.
                    del model.stages[key][stage]
            ended = [it for it in model.ended if it.key == key]
            told = {stage for it in ended for stage in it.stages} | {*model.stages.get(key, ())}
            while {*model.stages.get(key, ())} != infos.keys() & told:
                assert ended, (
                    f"LOST: {key} has {list(infos)}, {list(model.stages.get(key, ()))} were promised"
                )
                last = ended.pop()
                may_be_back = last.turn > safe_turn and not last.is_safe
                assert may_be_back, f"stages of {key} are back: {list(infos)}"
                model.stages[key] = {**last.stages, **model.stages.get(key, {})}
                model.ended.remove(last)
            for stage, info in infos.items():
                if stage not in told:  # Its receipt was on its way.
                    size = info.messages, info.payload_bytes
                    mine = next(it for it in model.staging if it.key == key and it.size == size)
                    model.staging.remove(mine)
                    mine.stage = stage
                    model.stages.setdefault(key, {})[stage] = mine
            if not model.stages.get(key, True):
                del model.stages[key]
        model.staging.clear()

    def _open_stages(self, engine: Log, but: set[str]) -> None:
        """Every stage has what was put into it. Everything that was there before is taken."""
        model = self._model
        for key, stages in model.stages.items():
            if key in but or engine.transaction(key) is not None:
                continue
            engine.commit(key, list(stages), model.now_us)
            all_due(engine, 1 << 60)
            parts = [part for it in stages.values() for part in it.parts if part[1].repairs is None]
            for name in {name for name, _ in parts}:
                engine.pause(name, False, model.now_us)
                its = [batch for queue, batch in parts if queue == name]
                assert self._taken(engine, name, dead=False) == [
                    it for batch in its if not batch.dead for it in attributes_of(batch)
                ], f"{name}: what was staged for {key}"
                buries = engine.policies.for_queue(name).dead_letters
                assert self._taken(engine, name, dead=True) == [
                    it for batch in its if batch.dead and buries for it in attributes_of(batch)
                ], f"{name}: dead letters that were staged for {key}"

    def _taken(self, engine: Log, name: str, *, dead: bool) -> list[tuple[bytes, int, int, str]]:
        """Everything that can be taken: payload, retries, TTL, door."""
        found: list[tuple[bytes, int, int, str]] = []
        while more := engine.take(name, "drain", 50, self._model.now_us, bytes_max=500, dead=dead):
            for piece in more:
                for i, payload in zip(range(piece.lo, piece.hi), piece.messages(), strict=True):
                    expires_us = max(piece.expires_us[i], 0) if piece.expires_us is not None else 0
                    ttl_us = expires_us and expires_us - piece.time_us
                    retries = piece.retries[i] if piece.retries is not None else RETRIES_NONE
                    found.append((payload, retries, ttl_us // 1_000_000, piece.protocol))
        return found

    def _cut_controls(self, engine: Log, safe_turn: int) -> None:
        controls = self._model.controls
        paused = frozenset(name for name in engine.queues() if engine.describe(name).paused)
        readers = {(reader.name, reader.queue): reader for reader in engine.readers()}
        while controls[-1].paused != paused or controls[-1].readers != readers:
            gone = controls.pop()
            assert gone.turn > safe_turn, f"paused {paused}, readers {readers}: {gone} is forgotten"

    def _cut_transactions(self, engine: Log) -> list[Transaction]:
        lost: list[Transaction] = []
        model = self._model
        for transaction in model.transactions:
            sizes = [len(model.queues[name].messages) for name, _, _ in transaction.ranges]
            ranges = zip(sizes, transaction.ranges, strict=True)
            whole = {size >= end if size > first else None for size, (_, first, end) in ranges}
            for name, before, then in transaction.redriven:
                happened = len(model.queues[name].happenings)
                whole.add(happened >= then if happened > before else None)
            if transaction.key:
                whole.add(True if engine.transaction(transaction.key) is not None else None)
            assert whole in ({True}, {None}), (
                f"transaction {transaction.key} is there in part: {transaction.ranges}, {sizes}"
            )
            if whole == {None}:
                lost.append(transaction)
                continue
            for (name, first, end), (_, batch) in zip(transaction.ranges, transaction.parts, strict=True):
                born = [len(m.lives) > 1 for m in model.queues[name].messages[first:end]]
                assert not batch.dead or all(born), f"{transaction}: its dead letters are there, and alive"
        model.transactions = [it for it in model.transactions if it not in lost]
        return lost

    def _log(self, engine: Log, queue: QueueModel) -> None:
        """Readers find every message from the start of the log on, and every event."""
        info = engine.describe(queue.name)
        seen: set[int] = set()
        for piece in engine.read(queue.name, 0, EVERYTHING):
            self.content(queue, piece, as_stored=True)
            seen |= set(range(piece.offset_start, piece.offset_end))
        missing = set(range(info.offset_start, info.offset_end)) - seen
        assert not missing, f"{queue.name}: offsets {missing} of {info} cannot be read"
        if info.event_start == 0:
            self._events(engine, queue)

    def _repair_queue(self, engine: Log, queue: QueueModel) -> None:
        """A new opening keeps exactly the repaired payloads that somebody can still get."""
        found = engine._state.queues[queue.name]
        if found.repair_queue is not None:
            pending = found.repair_queue.pending
            living = {i for first, end in pending.unsettled(0, pending.tail) for i in range(first, end)}
            used = {i + far for first, end, far in found.repairs for i in range(first, end)}
            assert living == used, f"{queue.name}: its repair queue has {living}, and {used} are in use"

    def _events(self, engine: Log, queue: QueueModel) -> None:
        number = 0
        found: dict[int, list[tuple[Event, Reason]]] = {m.offset: [] for m in queue.messages}
        for run in engine.events(queue.name, 0, EVERYTHING):
            assert run.event_offset == number, f"{queue.name}: event {run.event_offset} after {number - 1}"
            number += run.end - run.first
            for offset in range(run.first, run.end):
                found[offset].append((run.event, run.reason))
        expected = {m.offset: [(Event.ACCEPTED, Reason.NONE)] for m in queue.messages}
        for happening in queue.happenings:
            expected[happening.message.offset].append((happening.event, happening.reason))
        for message in queue.messages:
            # How a request ended is not known for sure (see events_possible), and its withdrawal by
            # this opening is not synced yet.
            if message.reply is None:
                there, wanted = found[message.offset], expected[message.offset]
                assert there == wanted, f"{queue.name}, offset {message.offset}: {there} instead of {wanted}"

    def _drain(self, engine: Log, queue: QueueModel) -> None:
        """Take everything: exactly what is ready, then exactly what is dead, in order."""
        model = self._model
        engine.pause(queue.name, False, model.now_us)
        for dead in (False, True):
            slices = self._all(engine, queue, dead)
            self.delivery(queue, slices, "drain", dead)
            for name, fate in engine.expire(model.now_us):
                model.happen(model.queues[name], [fate])

    def _drain_delayed(self, engine: Log, queue: QueueModel) -> None:
        """What was left because it is delayed, when it is not any more. The model's time does not go on."""
        delayed = [m for m in queue.delayed() if not self._model.is_over(m)]
        slices = self._all(engine, queue, dead=False)
        taken = [offset for piece in slices for offset in range(piece.offset_start, piece.offset_end)]
        assert taken == [m.offset for m in delayed], f"{queue.name}: offsets {taken} were delayed"
        for piece in slices:
            self.content(queue, piece, as_stored=False)
        for name, fate in engine.expire(self._model.now_us):
            self._model.happen(self._model.queues[name], [fate])
        # While they were delayed nobody came who would have seen that their time was over.
        self.delivery(queue, self._all(engine, queue, dead=True), "drain", dead=True)
        left = {m.offset for m in queue.messages if m.hold is None and m.life.room != GONE} - {*taken}
        assert not left, f"{queue.name}: {left} are alive, and nobody gets them"

    def _all(self, engine: Log, queue: QueueModel, dead: bool) -> list[Slice]:
        slices: list[Slice] = []
        while more := engine.take(queue.name, "drain", 50, self._model.now_us, bytes_max=500, dead=dead):
            slices += more
        return slices


def all_due(engine: Log, now_us: int) -> None:
    """As often as it takes: in one go the log does not look at everything."""
    engine.due(now_us)
    while 0 < engine.due_us <= now_us:
        engine.due(now_us)


def attributes_of(batch: Batch) -> Iterator[tuple[bytes, int, int, str]]:
    """What consumers see of messages that were sent so: payload, retries, TTL, door."""
    for i, payload in enumerate(batch.messages()):
        yield (
            payload,
            batch.retries[i] if batch.retries is not None else RETRIES_NONE,
            batch.ttl_seconds[i] if batch.ttl_seconds is not None else 0,
            batch.protocol,
        )
