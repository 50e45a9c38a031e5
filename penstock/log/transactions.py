"""Transactions: messages for many queues, all or nothing, once for each key; and repairs of dead letters.

All blocks of a transaction, and the control block that ends it, are written one behind the other. Recovery
takes them as one: without their end they are void. So whatever a transaction does to the state is done
here in one call, between the blocks of the turn before and its own.

A cluster may have several logs, and a transaction stages in some of them. The log of its key decides, the
others that have stages of it take part, and whoever commits it goes from one to the other (`http/sharding/`):

    begin       the log of the key gives the attempt a name, in memory
    prepare     each of the others says that it can store its stages, and keeps them from now on
    commit      the log of the key stores its own, and with them what the others have to store. With that the
                transaction is committed
    commit      each of the others, `decided`, stores what it has kept
    finish      the log of the key is told where that is

Messages that are moved to another log are a stage there, whose key is one of the log that they are in. In
place of its commit, that one takes them out (`move`), and says which of them the other has to store: what
somebody took meanwhile stays.

Rules that always hold:
  * An attempt can be decided as long as the log of the key knows its name: until another one of that key
    begins, until somebody has asked what became of it and was told that nothing did, until the log is opened
    again. So nobody who was told so is told otherwise later, and nothing need be written down for it.
  * What is prepared stays until it is stored, or its attempt is known to be over.
  * What was decided is remembered until all have stored their part, however many keys come behind it.
"""

import logging
import secrets
import sys
from array import array
from bisect import bisect_left
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from itertools import groupby
from typing import Any, Final

from penstock.log.adoption import ADOPTED_BYTES_MAX, Run
from penstock.log.block import FLAG_DELAYED, FLAG_END, FLAG_PART, HEADER_BYTES, KIND_CONTROL, control_parts
from penstock.log.columns import check_batch, join_batches, split_columns, stored_bytes
from penstock.log.committer import Committer
from penstock.log.errors import AttemptOver, LogDamaged, LogRefused, StageDamaged, StageUnknown
from penstock.log.fingerprint import Fingerprint
from penstock.log.queue import LogQueue
from penstock.log.redrive import Redrive
from penstock.log.repairs import cut_batch, repair_queue_of, runs_of
from penstock.log.results import (
    Begun,
    Decision,
    Fate,
    Rows,
    Shares,
    Step,
    Stored,
    TransactionDone,
    TransactionReceipt,
)
from penstock.log.sealer import SealedBlock, Sealer
from penstock.log.stages import Stage, StagePart
from penstock.log.state import FORMAT_MOVES, FORMAT_SHARES, LogState, StoredPart
from penstock.log.views import check_queue, known_queue
from penstock.model.batch import Batch
from penstock.model.life import Reason
from penstock.model.pending import AS_STORED

log = logging.getLogger("penstock.log")

ATTEMPTS_MAX = 10_000
"""That are begun and not decided: those who have come first begin again."""

REDRIVE_RUNS = 200
"""Runs of dead letters that are redriven in one turn: a few milliseconds."""


class _Work:
    """What a transaction does, before it is done."""

    __slots__ = ("blocks", "redriven", "stored")

    def __init__(self) -> None:
        self.blocks: list[SealedBlock] = []
        self.stored: list[StoredPart] = []
        self.redriven = 0


NOT_BEGUN: Final = Begun()


class Transactions:
    def __init__(
        self,
        state: LogState,
        committer: Committer,
        sealer: Sealer,
        seal_all: Callable[[int], None],
        mark: Callable[[LogQueue], None],
    ) -> None:
        self._state = state
        self._committer = committer
        self._sealer = sealer
        self._seal_all = seal_all  # what has gathered in this turn comes before
        self._mark = mark  # a queue has something to seal
        self._under_way: set[str] = set()  # keys that somebody commits
        self._attempts: dict[str, str] = {}  # that may be decided, by key

    def transact(
        self,
        key: str,
        parts: Sequence[tuple[str, Batch]],
        now_us: int,
        receipt: TransactionReceipt | None = None,
    ) -> list[tuple[str, Fate]]:
        """All of these messages or none, once for each key, whatever happens meanwhile.

        Without a key nothing is remembered: said again, the messages are stored again.
        A batch that is `dead` becomes dead letters, which nobody has had before. One of `repairs` is no new
        messages: the dead letters that it names go back into their queue with these payloads, as far as
        they are dead and nobody holds them. Where that queue has been deleted, none of them is. One of
        `moves` is what it takes out of another queue, as far as nobody holds it there: what was taken out
        is told.
        """
        known = self.stored(key)
        if known is not None:
            self._answer(receipt, TransactionDone(key, known, repeated=True))
            return []
        parts = [
            (name, batch) for name, batch in parts if not self._is_gone(batch.source or name, batch.identity)
        ]
        self._check(key, parts)
        queues = self._queues_of([(name, batch.repairs is not None) for name, batch in parts], now_us)
        self._seal_all(now_us)
        work = _Work()
        fates: list[tuple[str, Fate]] = []
        for name, batch in parts:
            queue = queues[name]
            if batch.moves is not None:
                batch = batch.picked(self._take_out(batch.source, batch.moves, fates, work, now_us))
                if not len(batch):
                    continue
            if batch.repairs is None:
                self._accept(queue, len(batch), self._split(queue, batch, now_us), batch.dead, work, now_us)
                if batch.delay_us is not None:
                    queue.delay_new(queue.pending.tail - len(batch), batch.delay_us)
            else:
                redrive = Redrive(queue, batch.repairs, key)
                redrive.hold(sys.maxsize)
                if redrive.taken:
                    redrive.commit()
                    payloads = cut_batch(batch, redrive.taken)
                    assert queue.repair_queue is not None
                    work.blocks += self._split(queue.repair_queue, payloads, now_us)
                    self._redriven(redrive, len(payloads), work, now_us)
                    self._release(redrive, sys.maxsize)
        self._answer(receipt, self._end(key, work, "", now_us))
        return fates

    def _take_out(
        self, name: str, offsets: "array[int]", fates: list[tuple[str, Fate]], work: "_Work", now_us: int
    ) -> list[tuple[int, int]]:
        """Which of these, by ranges of their numbers, a queue gives away; the rows that say so are in the
        transaction."""
        source = self._state.queues[name]
        found, rows = source.take_out([(first, end) for _, first, end in runs_of(offsets)], Reason.OPERATOR)
        if found:
            work.blocks.append(self._sealer.settlement_block(source, rows, now_us, FLAG_PART))
            self._mark(source)
        taken: list[tuple[int, int]] = []
        for fate in found:
            row = bisect_left(offsets, fate.first)
            taken.append((row, row + fate.end - fate.first))
            fates.append((name, fate))
        return sorted(taken)

    def commit(
        self,
        key: str,
        stage_ids: Sequence[str],
        now_us: int,
        receipt: TransactionReceipt | None = None,
        begun: Begun = NOT_BEGUN,
        shares: Shares | None = None,
        *,
        decided: bool = False,
        rows: Rows = None,
    ) -> Generator[None, None, None]:
        """What is staged under these ids becomes messages, in this order, all of it or nothing, once.

        All stages of the key are over with it. Where it is committed already, nothing changes: the answer
        says what is remembered of the contents, and what the stages bring that are asked for.
        Of one that an earlier version has begun, the stages are the rest, which no `max-bytes` holds up; nor
        does it where another log has `decided`, perhaps about some `rows` of them. `shares`: what other logs
        have of it.

        To be gone through, in turns of the loop: there may be very many dead letters to redrive.
        """
        while key in self._under_way:  # His answer is the first one.
            yield
        self._under_way.add(key)
        try:
            yield from self._commit(key, stage_ids, now_us, receipt, begun, shares, decided, rows)
        finally:
            self._under_way.remove(key)

    def _commit(
        self,
        key: str,
        stage_ids: Sequence[str],
        now_us: int,
        receipt: TransactionReceipt | None,
        begun: Begun,
        shares: Shares | None,
        decided: bool,
        rows: Rows,
    ) -> Iterator[None]:
        state, segments = self._state, self._state.segments
        if self._answer_repeated(key, stage_ids, receipt):
            return
        if decided and key not in state.stages.prepared:
            # It has been stored, and so many came after it that it is forgotten.
            self._answer(receipt, TransactionDone(key, [], repeated=True))
            self._committer.push()
            return
        if shares is not None and self._attempts.get(key) != shares.attempt:
            raise AttemptOver(f"transaction {key!r}: another commit of it has begun meanwhile; commit again")
        steps = state.steps_of(key)
        if steps != begun.steps:
            raise LogRefused(
                f"transaction {key!r}: {steps} chunks of it are in the log, of an earlier version. The files "
                f"that say how to go on are damaged, gone, or with the front-end of a cluster that led before"
            )
        redrives: list[tuple[StagePart, Redrive]] = []
        can_be_made = False
        try:
            parts = self._parts(key, stage_ids, decided=decided)
            if rows is not None:
                parts = self._picked(parts, rows)
            for part, letters in self._letters(parts, decided=decided):
                redrive = Redrive(state.queues[part.queue], letters, key)
                redrives.append((part, redrive))
                while not redrive.hold(REDRIVE_RUNS):
                    yield
                for lo, hi in redrive.taken:
                    size = segments.bytes_of(segments.stage_queue, [(part.first + lo, part.first + hi)])
                    redrive.staged.append(Run(part.first + lo, hi - lo, size, 0))
                    if not len(redrive.staged) % REDRIVE_RUNS:
                        yield
            if redrives:  # Some time has gone by: of what was found before, nothing need be as it was.
                if self._answer_repeated(key, stage_ids, receipt):
                    return
                parts = self._parts(key, stage_ids, decided=decided)
            letters_count = sum(len(redrive.rows) for _, redrive in redrives)
            self._check_parts(parts, letters_count, bounded=not steps and not decided)
            if redrives:
                now_us = max(now_us, self._committer.active.time_max_us)
            queues = self._queues_of([(part.queue, part.letters >= 0) for part in parts], now_us)
            can_be_made = True
        finally:
            for _, redrive in redrives if not can_be_made else ():
                redrive.give_up()
        # Another queue may have the name by now, and other letters.
        redrives = [
            (part, it) for part, it in redrives if it.taken and state.queues.get(part.queue) is it.queue
        ]
        self._seal_all(now_us)
        work = _Work()
        for part, redrive in redrives:
            redrive.commit()
            repair_queue = redrive.queue.repair_queue
            assert repair_queue is not None
            block = self._sealer.adoption_block(
                repair_queue, redrive.staged, part.protocol, now_us, FLAG_PART
            )
            work.blocks.append(block)
            self._redriven(redrive, block.header.count, work, now_us)
        by_queue: dict[str, list[StagePart]] = {}
        for part in parts:
            if part.letters < 0:
                by_queue.setdefault(part.queue, []).append(part)
        for name, its in by_queue.items():
            alike = groupby(its, key=lambda part: (part.protocol, part.reason, part.delayed))
            for (protocol, reason, delayed), group in alike:
                for runs in _runs(group, now_us):
                    queue = queues[name]
                    count = sum(run.length for run in runs)
                    flags = FLAG_PART | FLAG_DELAYED if delayed else FLAG_PART
                    block = self._sealer.adoption_block(queue, runs, protocol, now_us, flags)
                    self._accept(queue, count, [block], Reason(reason), work, now_us)
                    if delayed:
                        queue.pending.delay(queue.pending.tail - count, queue.pending.tail, AS_STORED)
        text = begun.fingerprint
        if shares is not None:
            totals = [*self._totals(stage_ids), *shares.totals]
            text = Fingerprint.of_totals(key, totals).text(shares.stages)
        elif not steps and not decided:
            text = Fingerprint.of_totals(key, self._totals(stage_ids)).text(stage_ids)
        done = self._end(key, work, text, now_us, shares.shards if shares is not None else None)
        if redrives:
            state.redriving += 1
            self._committer.push()
            try:
                for _, redrive in redrives:
                    while not self._release(redrive, REDRIVE_RUNS):
                        yield
            finally:  # Whoever goes through this may stop, and the log has it.
                for _, redrive in redrives:
                    self._release(redrive, sys.maxsize)
                state.redriving -= 1
        # What was redriven is there when this is answered.
        self._answer(receipt, done)
        if redrives:
            self._committer.push()

    # --- with parts in other logs ----------------------------------------------------------------

    def begin(self, key: str) -> str:
        """The name of an attempt to commit it; none that was begun before is decided any more."""
        if key in self._under_way:
            raise AttemptOver(f"transaction {key!r} is being committed; commit again in a moment")
        self._attempts.pop(key, None)
        if len(self._attempts) >= ATTEMPTS_MAX:
            del self._attempts[next(iter(self._attempts))]
        attempt = self._attempts[key] = secrets.token_hex(8)
        return attempt

    def prepare(self, key: str, attempt: str, stage_ids: Sequence[str], now_us: int) -> list[list[Any]]:
        """These can be stored, and stay until it is known whether they are; what they bring."""
        if key in self._state.transactions:
            raise LogRefused(f"transaction {key!r} was committed before; use a new key for what is new")
        parts = self._parts(key, stage_ids)
        for _ in self._letters(parts):
            pass  # They can be read.
        letters = sum(part.end - part.first for part in parts if part.letters >= 0)
        self._check_parts(parts, letters, bounded=True)
        self._state.stages.prepare(key, attempt)
        self._sealer.announce(FORMAT_SHARES)
        self._sealer.control({"op": "prepared", "key": key, "attempt": attempt}, now_us)
        return self._totals(stage_ids)

    def move(
        self,
        key: str,
        attempt: str,
        source: str,
        offsets: "array[int]",
        stages: dict[str, list[str]],
        now_us: int,
        receipt: TransactionReceipt,
    ) -> list[Fate]:
        """These leave their queue, as far as nobody holds them, and are messages of another log from now on,
        which has them as such stages."""
        if self._attempts.get(key) != attempt:
            raise AttemptOver(f"another attempt to move messages of queue {source!r} has begun meanwhile")
        known_queue(self._state, source)
        self._committer.check_room(self._state.gathered_bytes + HEADER_BYTES * (len(offsets) + 2))
        self._seal_all(now_us)
        work = _Work()
        fates: list[tuple[str, Fate]] = []
        taken = self._take_out(source, offsets, fates, work, now_us)
        done = self._end(key, work, "", now_us, stages, taken)
        self._answer(receipt, done._replace(rows=taken))
        return [fate for _, fate in fates]

    def unprepare(self, key: str, attempt: str, now_us: int) -> None:
        """This attempt is over, and nothing was decided."""
        if self._state.stages.unprepare(key, attempt):
            self._sealer.control({"op": "unprepared", "key": key, "attempt": attempt}, now_us)

    def is_decided(self, key: str, attempt: str) -> bool:
        """Whether an attempt, or another one, was decided; if not, it is over with this."""
        if key in self._state.transactions or key in self._state.decisions:
            return True
        if key in self._under_way:
            raise AttemptOver(f"transaction {key!r} is being committed; ask again in a moment")
        if self._attempts.get(key) == attempt:
            del self._attempts[key]
        return False

    def finish(self, key: str, stored: list[list[Any]], now_us: int) -> None:
        """All others have stored what was decided, at these offsets."""
        decision = self._state.decisions.get(key)
        if decision is not None and decision.stored is None:
            self._state.finish(key, stored)
            self._sealer.control({"op": "finished", "key": key, "stored": stored}, now_us)

    # --- the end of stages -----------------------------------------------------------------------

    def abort(self, key: str, now_us: int) -> None:
        """Whatever is staged for a key goes."""
        if key in self._state.stages.prepared:
            raise LogRefused(f"transaction {key!r} is being committed; ask in a moment how it stands")
        self._attempts.pop(key, None)
        if self._state.stages.drop(key):
            self._sealer.control({"op": "stage-gone", "key": key}, now_us)
            self._state.rows_gone_end = self._committer.position

    def _answer_repeated(
        self, key: str, stage_ids: Sequence[str], receipt: TransactionReceipt | None
    ) -> bool:
        """Whether a key is committed; then it is answered."""
        known = self.stored(key)
        if known is None:
            return False
        text, asked = self._state.fingerprints.get(key, ""), self._asked(key, stage_ids)
        self._answer(receipt, TransactionDone(key, known, True, 0, text, asked))
        self._committer.push()
        return True

    def _parts(self, key: str, stage_ids: Sequence[str], *, decided: bool = False) -> list[StagePart]:
        # One may have two ids.
        stages = dict.fromkeys(self._stage(key, stage_id, decided=decided) for stage_id in stage_ids)
        found = [part for stage in stages for part in stage.parts]
        return [part for part in found if not self._is_gone(part.queue, part.identity)]

    def _picked(self, parts: Sequence[StagePart], rows: Sequence[Sequence[int]]) -> list[StagePart]:
        """Of these, what has such numbers, counted over all of them."""
        segments = self._state.segments
        found: list[StagePart] = []
        before = 0
        for part in parts:
            count = part.end - part.first
            for lo, hi in rows:
                first, end = part.first + max(lo - before, 0), part.first + min(hi - before, count)
                if first < end:
                    size = segments.bytes_of(segments.stage_queue, [(first, end)])
                    found.append(part._replace(first=first, end=end, payload_bytes=size))
            before += count
        return found

    def _stage(self, key: str, stage_id: str, *, decided: bool) -> Stage:
        stage = self._state.stages.find(stage_id)
        if stage is None or stage.info.key != key or not stage.synced:
            raise StageUnknown(f"it has no stage {stage_id!r} (any more); stage that part again")
        if (
            stage.damage and not decided
        ):  # Of messages that cannot be read any more it is told as of all others.
            raise StageDamaged(f"stage {stage_id!r} is damaged ({stage.damage}); stage that part again")
        return stage

    def _asked(self, key: str, stage_ids: Sequence[str]) -> list[Any] | None:
        """What these stages bring; None where one is not there."""
        found = [self._state.stages.find(stage_id) for stage_id in stage_ids]
        if any(stage is None or stage.info.key != key for stage in found):
            return None
        return Fingerprint.of_totals(key, self._totals(stage_ids)).totals()

    def _totals(self, stage_ids: Sequence[str]) -> list[list[Any]]:
        found = {self._state.stages.find(stage_id) for stage_id in stage_ids}
        return [stage.totals for stage in found if stage is not None]

    def _letters(
        self, parts: Sequence[StagePart], *, decided: bool = False
    ) -> Iterator[tuple[StagePart, "array[int]"]]:
        """Those parts that are payloads for dead letters, and for which."""
        segments = self._state.segments
        for part in parts:
            if part.letters < 0:
                continue
            known_queue(self._state, part.queue)
            why = f"row {part.letters} is not in the log"
            try:
                block = segments.block_at(segments.stage_queue, part.letters)
            except LogDamaged as error:
                block, why = None, str(error)
            if block is None and decided:
                log.error("queue %r: dead letters of a transaction are not redriven: %s", part.queue, why)
                continue
            if block is None:
                raise StageDamaged(f"a stage is damaged ({why}); stage that part again")
            offsets = array("q")
            at = part.letters - block.header.first_offset
            offsets.frombytes(bytes(block.payload[block.bounds[at] : block.bounds[at + 1]]))
            yield part, offsets

    def _check_parts(self, parts: Sequence[StagePart], letters: int, *, bounded: bool) -> None:
        """Refuse what cannot be stored, before anything has changed."""
        payload_bytes: dict[str, int] = {}
        for part in parts:
            if part.letters >= 0:
                known_queue(self._state, part.queue)
            # What is dead takes no room that a queue's max-bytes gives to the living.
            living = part.letters < 0 and not part.reason
            payload_bytes[part.queue] = payload_bytes.get(part.queue, 0) + living * part.payload_bytes
        for name, more in payload_bytes.items() if bounded else ():
            check_queue(self._state, name, more)
        # Two blocks for each part, and a row for each letter, at most.
        self._committer.check_room(self._state.gathered_bytes + HEADER_BYTES * (3 * len(parts) + letters + 1))

    def _answer(self, receipt: TransactionReceipt | None, done: TransactionDone) -> None:
        """When it is synced, also where it was committed a moment ago and by somebody else."""
        if receipt is not None:
            self._committer.when_synced(lambda error: receipt(error or done))
            self._committer.want_sync()

    def _is_gone(self, name: str, identity: str) -> bool:
        """Whether these are repairs of a queue that is no more."""
        if not identity:
            return False
        found = self._state.queues.get(name)
        return found is None or found.identity != identity

    def _check(self, key: str, parts: Sequence[tuple[str, Batch]]) -> None:
        """Refuse what cannot be stored, before anything has changed."""
        if self._state.steps_of(key):
            raise LogRefused(f"transaction {key!r} has begun, in an earlier version: commit its stages")
        payload_bytes: dict[str, int] = {}
        for name, batch in parts:
            check_batch(name, batch)
            if batch.repairs is not None:
                known_queue(self._state, name)
            if batch.moves is not None:
                known_queue(self._state, batch.source)
            # What is dead takes no room that a queue's max-bytes gives to the living.
            living_bytes = 0 if batch.dead or batch.repairs is not None else len(batch.payload)
            payload_bytes[name] = payload_bytes.get(name, 0) + living_bytes
        for name, more in payload_bytes.items():
            check_queue(self._state, name, more)
        self._committer.check_room(
            self._state.gathered_bytes + sum(stored_bytes(batch) for _, batch in parts)
        )

    def _queues_of(self, parts: Sequence[tuple[str, bool]], now_us: int) -> dict[str, LogQueue]:
        """The queue of each part; what is missing is declared first, repair queues for repairs too."""
        declare, known = self._sealer.declare, self._state.queues
        queues = {
            name: known.get(name) or declare(name, now_us) for name in dict.fromkeys(it[0] for it in parts)
        }
        for name, are_repairs in parts:
            if are_repairs and queues[name].repair_queue is None:
                declare(repair_queue_of(name), now_us)
        return queues

    def _split(self, queue: LogQueue, batch: Batch, now_us: int) -> list[SealedBlock]:
        """The blocks of messages that come with the transaction itself."""
        return [
            self._sealer.message_block(queue, columns, batch.protocol, now_us, FLAG_PART)
            for columns in split_columns(join_batches([batch], now_us), self._state.settings.block_bytes)
        ]

    def _accept(
        self,
        queue: LogQueue,
        count: int,
        blocks: list[SealedBlock],
        dead: Reason,
        work: "_Work",
        now_us: int,
    ) -> None:
        """New messages, perhaps dead ones, which are in these blocks."""
        first = queue.pending.accept(count)
        self._state.changed[queue.number] = queue
        work.blocks += blocks
        work.stored.append((queue.name, first, first + count, self._state.opening))
        if dead:
            rows = queue.bury(first, first + count, dead, now_us)
            work.blocks.append(self._sealer.settlement_block(queue, rows, now_us, FLAG_PART))

    def _redriven(self, redrive: Redrive, count: int, work: "_Work", now_us: int) -> None:
        """The rows of dead letters whose payloads are in the blocks before."""
        queue = redrive.queue
        repair_queue = queue.repair_queue
        assert repair_queue is not None
        repair_queue.pending.accept(count)
        self._state.changed[repair_queue.number] = repair_queue
        block = self._sealer.repair_block(queue, redrive.rows, redrive.payload_first, now_us, FLAG_PART)
        work.blocks.append(block)
        work.redriven += count

    def _release(self, redrive: Redrive, runs_max: int) -> bool:
        """Some letters come behind the tail; payloads of earlier repairs are let go of behind that."""
        is_all = redrive.release(runs_max)
        if self._state.by_number.get(redrive.queue.number) is redrive.queue:  # It may have been deleted.
            self._mark(redrive.queue)
        return is_all

    def _end(
        self,
        key: str,
        work: "_Work",
        fingerprint: str,
        now_us: int,
        shards: dict[str, list[str]] | None = None,
        rows: Rows = None,
    ) -> TransactionDone:
        """All blocks and their end into one segment, one behind the other."""
        state = self._state
        fields: dict[str, object] = {"op": "transaction", "key": key, "parts": [it[:3] for it in work.stored]}
        steps = state.steps_of(key)
        if steps:
            fields |= {"step": steps, "last": True}
        if fingerprint:
            fields["fingerprint"] = fingerprint
        if shards is not None:
            fields["shards"] = shards
            self._sealer.announce(FORMAT_SHARES if rows is None else FORMAT_MOVES)
        if rows is not None:
            fields["rows"] = rows
        for block in work.blocks:
            self._sealer.announce(block.format)
        control = control_parts(fields)
        end = self._sealer.header(KIND_CONTROL, FLAG_PART | FLAG_END, 0, 0, control, now_us)
        self._committer.reserve(
            sum(HEADER_BYTES + block.header.body_bytes for block in work.blocks)
            + HEADER_BYTES
            + end.body_bytes
        )
        for block in work.blocks:
            self._sealer.add(block, sync=True)
        self._committer.add(end, control, sync=True)
        if state.stages.drop(key):
            state.rows_gone_end = self._committer.position
        stored = work.stored
        if steps:
            stored = state.remember_step(key, Step(steps, last=True), stored, fingerprint)
        elif key:
            state.remember(key, stored, fingerprint)
        if shards is not None:
            state.decisions[key] = Decision(shards, None, rows)
            self._attempts.pop(key, None)
        told = [self._stored(part) for part in stored]
        return TransactionDone(key, told, False, work.redriven, fingerprint)

    def stored(self, key: str) -> list[Stored] | None:
        """Where a committed transaction's messages are; None where the key is not known (any more).

        It may have been committed a moment ago: only a receipt says that it is safe. Of a queue that was
        deleted since then no offset is left, so that first and end are the same.
        """
        known = self._state.transactions.get(key)
        if known is None:
            return None
        # A queue whose name is lost by damage has no origin to tell.
        return [self._stored(part) for part in known if part[0] in self._state.queues or part[1] == part[2]]

    def _stored(self, part: StoredPart) -> Stored:
        name, first, end, opening = part
        queue = self._state.queues.get(name)
        return Stored(name, first, end, queue.origin(opening) if queue is not None else b"")


def _runs(parts: Iterable[StagePart], now_us: int) -> Iterator[list[Run]]:
    """What one adoption block after the other names."""
    runs: list[Run] = []
    size = 0
    for part in parts:
        if runs and size + part.payload_bytes > ADOPTED_BYTES_MAX:
            yield runs
            runs, size = [], 0
        expires_us = now_us + part.ttl_min_us if part.ttl_min_us else 0
        runs.append(Run(part.first, part.end - part.first, part.payload_bytes, expires_us))
        size += part.payload_bytes
    yield runs
