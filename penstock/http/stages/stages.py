"""Stages: parts of transactions that wait for their commit, and what becomes of transactions.

A transaction is a key that its owner makes up. Under it any number of parts are staged, each a file of its
own (`files.py`), synced before it is confirmed. Then either

    commit   some of them go into the log, in the order given, once, whatever is repeated and whoever
             dies meanwhile (`commits.py`); those that are not named are the leftovers of failed tries
    abort    all of them go away
    sweep    nobody has done either for `stage-seconds`: they go away too, which the log tells

Rules that always hold:
  * One thing at a time is done to a key, commit or abort. Whoever comes meanwhile waits for the outcome.
  * A key that was committed stays committed: to commit it again, with the same stages or with some that have
    the same messages, changes nothing and is answered as the first time; to abort it does nothing. The log
    remembers the last 10,000 such keys. With stages that have other messages it is the problem `key-reused`,
    with others that the commit has dropped `stage-not-found`: nobody can say what was in them.
  * What is in memory is what is on the disk: a stage is there after its sync, and gone before its file is.
  * All files together have at most `stages-bytes-max` bytes, and leave some room on the disk for the log.

How it fails: a `Problem`, or what the link and the disk say.
"""

import asyncio
import contextlib
import functools
import logging
from collections.abc import Callable, Coroutine, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Final, NamedTuple, ParamSpec, TypeVar
from weakref import WeakValueDictionary

from penstock.common.clock import Clock
from penstock.errors import PenstockError
from penstock.http.link import Link
from penstock.http.problems import Problem
from penstock.http.stages.chunks import load_chunk, plan_chunks, read_chunks
from penstock.http.stages.commits import (
    AT_ONCE_BYTES,
    AT_ONCE_MESSAGES,
    CHUNK_BYTES,
    CHUNK_MESSAGES,
    CHUNKS_AT_WORK,
    Known,
    LargeCommit,
    Range,
    commit_at_once,
    disk_problem,
    known_of,
)
from penstock.http.stages.files import Intent, Stage, StageDamaged, StageFolder, encode_stage
from penstock.log.fingerprint import KIND, OF_STREAMS, Fingerprint, digest_of_stages, is_of_stages
from penstock.model.batch import Batch

SWEEP_SECONDS: Final = 60.0
STAGES_MAX: Final = 100_000
LOG_ROOM_BYTES: Final = 256 << 20
"""Staging leaves so much of the disk free: the log needs room to go on accepting messages."""

THREADS: Final = 4
LOADS_MAX: Final = 4
"""So many small transactions are in memory at a time."""

COPIED: Final = (
    "is this a copy of another query's checkpoint, or is the option queue another one since then? Begin with "
    "a new checkpoint"
)
ALIKE_MAX: Final = 10_000
ASKED_AT_ONCE: Final = 500
"""Keys that the log is asked about in one go, at the start."""

log = logging.getLogger("penstock.stages")

P = ParamSpec("P")
T = TypeVar("T")


class Committed(NamedTuple):
    """The outcome of a commit."""

    stored: list[Range]
    repeated: bool


class Standing(NamedTuple):
    """How a transaction stands."""

    stored: list[Range] | None  # None: it is open
    committing: bool  # a large commit is on its way
    stages: list[Stage]


class Stages:
    """Belongs to one loop."""

    def __init__(self, data: str, link: Link, *, seconds: int, bytes_max: int) -> None:
        self._folder = StageFolder(data)
        self._link = link
        self._seconds = seconds
        self._bytes_max = bytes_max
        self._clock = Clock()  # It is never looked at: no step makes stages older.
        self._bytes = 0  # of all files, those included that are being written
        self._stages: dict[str, Stage] = {}
        self._by_key: dict[str, dict[str, Stage]] = {}
        self._large: dict[str, LargeCommit] = {}
        self._alike: dict[str, str] = {}  # by key: the stages last found to bring what is committed already
        self._tasks: set[asyncio.Task[None]] = set()
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._room = asyncio.Semaphore(CHUNKS_AT_WORK)
        self._loads = asyncio.Semaphore(LOADS_MAX)
        self._threads = ThreadPoolExecutor(THREADS, "stage")

    # --- life ------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Take over what is on the disk: finish large commits that had begun, forget what was committed."""
        await self._in_thread(self._folder.open)
        for stage in await self._in_thread(self._folder.stages):
            if stage.damage:
                log.error("a stage is damaged, and is never committed: %s", stage.damage)
            self._put(stage)
        intents, damage = await self._in_thread(self._folder.intents)
        for text in damage:
            log.error("the intent of a large commit is damaged, a part of it may be in the log: %s", text)
        # This comes before anything else is committed: so far, the log remembers whatever was.
        await self._forget_committed()
        for intent in intents:
            await self._resume(intent)
        await self._sweep()
        self._start_task(self._sweep_now_and_then())

    async def _forget_committed(self) -> None:
        keys = [key for key in self._by_key if key]
        for at in range(0, len(keys), ASKED_AT_ONCE):
            some = keys[at : at + ASKED_AT_ONCE]
            known = await asyncio.gather(*(known_of(self._link, key) for key in some))
            for key, found in zip(some, known, strict=True):
                if found.stored is not None:
                    await self._drop(key)

    async def _resume(self, intent: Intent) -> None:
        key = intent.key
        known = await known_of(self._link, key)
        stages = [self._stages[stage_id] for stage_id in intent.stages if stage_id in self._stages]
        given_up = len(stages) < len(intent.stages) or self._age(stages) >= self._seconds
        if known.stored is not None or (given_up and not intent.begun and not known.steps):
            # It is committed; or it was withdrawn and aborted, and the disk did not know; or nothing of it is
            # stored, and so much later (in a cluster others have led meanwhile) nobody waits for it any more.
            await self._in_thread(self._folder.remove_intent, key)
            return
        log.warning("the commit of transaction %r was cut off: it goes on", key)
        self._begin_large(intent)

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.to_thread(self._threads.shutdown)
        self._folder.close()

    def _start_task(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._task_ended)

    def _task_ended(self, task: "asyncio.Task[None]") -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            log.error("a task of the stages failed", exc_info=task.exception())

    async def _in_thread(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        call = functools.partial(function, *args, **kwargs)
        return await asyncio.get_running_loop().run_in_executor(self._threads, call)

    # --- what there is ---------------------------------------------------------------------------

    def _put(self, stage: Stage) -> None:
        self._stages[stage.id] = stage
        self._by_key.setdefault(stage.key, {})[stage.id] = stage
        self._bytes += stage.file_bytes

    async def _drop(self, key: str, stage_ids: Iterable[str] = ()) -> None:
        """Let go of all stages of a key, and of some that may be unknown."""
        mine = self._by_key.pop(key, {})
        for stage in mine.values():
            del self._stages[stage.id]
        stage_ids = {*mine, *stage_ids}
        if stage_ids:
            await self._in_thread(self._folder.remove, stage_ids)
        self._bytes -= sum(stage.file_bytes for stage in mine.values())

    def _lock(self, key: str) -> asyncio.Lock:
        """The lock of a key. It is there as long as somebody has it."""
        lock = self._locks.get(key)
        if lock is None:
            lock = self._locks[key] = asyncio.Lock()
        return lock

    # --- what is done ----------------------------------------------------------------------------

    async def stage(self, key: str, parts: Sequence[tuple[str, Batch]]) -> Stage:
        """Keep a part of a transaction; it is synced when this returns."""
        file = await self._in_thread(encode_stage, key, parts, self._clock.now_us())
        size = file.stage.file_bytes
        self._check_room(size)
        self._bytes += size
        try:
            await self._in_thread(self._folder.write, file)
        except OSError as error:
            raise disk_problem(error, self._folder.path) from error
        finally:
            self._bytes -= size
        self._put(file.stage)
        return file.stage

    def _check_room(self, size: int) -> None:
        if self._bytes + size > self._bytes_max:
            raise _full(
                f"stages have {self._bytes} bytes, and {size} more would be over [http] stages-bytes-max "
                f"({self._bytes_max}); commit or abort some transactions"
            )
        if len(self._stages) >= STAGES_MAX:
            raise _full(
                f"there are {STAGES_MAX} stages; commit or abort some transactions, or stage more at a time"
            )
        if self._folder.free_bytes() - size < LOG_ROOM_BYTES:
            raise _full(
                f"{self._folder.path}: staging leaves {LOG_ROOM_BYTES} bytes of the disk to the log, and "
                f"{size} more would not; make room"
            )

    async def commit(self, key: str, stage_ids: Sequence[str]) -> Committed:
        """Store exactly these stages, once. Answered when they are durable."""
        async with self._lock(key):
            large = self._large.get(key)
            if large is not None and large.intent.stages != tuple(stage_ids):
                await self._check_same(key, stage_ids, [], large.intent.fingerprint)
                large = self._large.get(key)  # it may have ended meanwhile
            if large is not None:
                outcome, repeated = large.join(), True
            else:
                known = await known_of(self._link, key)
                if known.stored is not None:
                    await self._check_same(key, stage_ids, known.stored, known.fingerprint)
                    await self._tidy_up(key)
                    return Committed(known.stored, repeated=True)
                self._check_intent(key, known)
                self._check_stages(key, stage_ids)
                parts, fingerprint = await self._prepare(key, stage_ids)
                if parts is not None:
                    stored = await commit_at_once(self._link, key, parts, fingerprint)
                    await self._tidy_up(key)
                    return Committed(stored, repeated=False)
                intent = await self._new_intent(key, stage_ids, fingerprint)
                outcome, repeated = self._begin_large(intent).join(), False
        return Committed(await outcome, repeated)

    async def _check_same(
        self, key: str, stage_ids: Sequence[str], stored: Sequence[Range], fingerprint: str
    ) -> None:
        """Whether these stages bring what is stored under their key already."""
        try:
            self._check_stages(key, stage_ids)
            asked = await self._in_thread(_fingerprint_of, self._folder, key, stage_ids)
        except (Problem, StageDamaged) as error:
            self._check_repeated(key, stage_ids, fingerprint, error)
            return
        except OSError as error:
            raise disk_problem(error, self._folder.path) from error
        if (KIND + key).startswith(OF_STREAMS):
            queues = {it.queue for it in stored}
            if queues and not queues.issuperset(asked.counts()):
                raise _reused(key, stored, asked, COPIED)
        elif fingerprint and stage_ids and not asked.is_of(fingerprint):
            raise _reused(key, stored, asked, "use a new key for what is new")
        if stage_ids:
            self._alike[key] = digest_of_stages(stage_ids)
        if len(self._alike) > ALIKE_MAX:
            del self._alike[next(iter(self._alike))]

    def _check_repeated(
        self, key: str, stage_ids: Sequence[str], fingerprint: str, error: PenstockError
    ) -> None:
        """Whether somebody asks again because an answer was lost, about stages that are gone since then.

        Other stages of the key are those of a second writer, and were dropped when the first one committed.
        """
        if not is_of_stages(fingerprint, stage_ids) and self._alike.get(key) != digest_of_stages(stage_ids):
            raise Problem(
                "stage-not-found",
                f"transaction {key!r} was committed with other stages, with which these cannot be compared "
                f"({error}); stage all parts again",
            ) from None

    def _check_intent(self, key: str, known: Known) -> None:
        if known.steps:
            raise Problem(
                "conflict",
                f"transaction {key!r}: {known.steps} chunks of it are in the log, and the intent that says "
                f"how to go on is damaged, gone, or with the front-end of a cluster that led before: "
                f"{self._folder.intent_path(key)}",
            )

    def _check_stages(self, key: str, stage_ids: Sequence[str]) -> None:
        for stage_id in stage_ids:
            stage = self._stages.get(stage_id)
            if stage is not None and stage.damage:
                raise _damaged(key, stage.damage)
            if stage is None or stage.key != key:
                raise Problem(
                    "stage-not-found",
                    f"transaction {key!r} has no stage {stage_id!r} (any more); stage that part again",
                )

    async def _prepare(
        self, key: str, stage_ids: Sequence[str]
    ) -> tuple[list[tuple[str, Batch]] | None, str]:
        """All messages of these stages, or None where they are too many to be handled at once; and what is
        remembered of them.

        All are read and found undamaged in either case: nothing is begun that could not be finished.
        """
        async with self._loads:
            try:
                return await self._in_thread(_read_all, self._folder, key, stage_ids)
            except StageDamaged as error:
                log.warning("transaction %r is not committed, for a stage of it is damaged: %s", key, error)
                raise _damaged(key, str(error)) from None
            except OSError as error:
                raise disk_problem(error, self._folder.path) from error

    async def _new_intent(self, key: str, stage_ids: Sequence[str], fingerprint: str) -> Intent:
        intent = Intent(key, tuple(stage_ids), CHUNK_BYTES, CHUNK_MESSAGES, False, fingerprint)
        try:
            await self._in_thread(self._folder.write_intent, intent)
        except OSError as error:
            # It may have its name already; nothing of it was sent, and nothing shall be.
            with contextlib.suppress(OSError):
                await self._in_thread(self._folder.remove_intent, key)
            raise disk_problem(error, self._folder.path) from error
        return intent

    def _begin_large(self, intent: Intent) -> LargeCommit:
        commit = LargeCommit(
            self._folder, self._link, intent, self._room, self._in_thread, self._drop, self._end_large
        )
        self._large[intent.key] = commit
        self._start_task(commit.run())
        return commit

    def _end_large(self, key: str) -> None:
        del self._large[key]

    async def _tidy_up(self, key: str) -> None:
        """A key is committed: nothing under it is needed any more."""
        try:
            await self._drop(key)
        except OSError as error:
            log.warning("stages of transaction %r, which is committed, stay on the disk: %s", key, error)

    async def abort(self, key: str) -> bool:
        """Let go of all its stages; whether it was committed before, which stays."""
        async with self._lock(key):
            if key in self._large:
                raise Problem(
                    "conflict",
                    f"transaction {key!r} is being committed, and cannot be aborted any more; "
                    f"commit it again to wait for the end",
                )
            known = await known_of(self._link, key)
            self._check_intent(key, known)
            try:
                await self._drop(key)
            except OSError as error:
                raise disk_problem(error, self._folder.path) from error
            return known.stored is not None

    async def standing(self, key: str) -> Standing:
        """How a transaction stands; a Problem where there is none."""
        # In this order: whoever commits it drops the stages afterwards.
        committing, stages = key in self._large, list(self._by_key.get(key, {}).values())
        known = await known_of(self._link, key)
        if known.stored is None and not committing and not stages:
            raise Problem(
                "transaction-not-found",
                f"there is no transaction {key!r}: nothing is staged for it, and it was not committed lately",
            )
        return Standing(known.stored, committing and known.stored is None, stages)

    # --- sweeping --------------------------------------------------------------------------------

    def _age(self, stages: Iterable[Stage]) -> float:
        """How many seconds ago the last of these was staged."""
        return (self._clock.now_us() - max(stage.time_us for stage in stages)) / 1_000_000

    async def _sweep_now_and_then(self) -> None:
        while True:
            await asyncio.sleep(min(SWEEP_SECONDS, self._seconds))
            await self._sweep()

    async def _sweep(self) -> None:
        """Let go of what nobody has committed or aborted for too long."""
        for key in list(self._by_key):
            stages = self._by_key.get(key)  # now: to let go of the others has taken its time
            if stages is None:
                continue
            age = self._age(stages.values())
            if age < self._seconds or key in self._large or key in self._locks:
                continue
            log.warning(
                "transaction %r was not committed for %.0f s: its %d stages are removed",
                key,
                age,
                len(stages),
            )
            try:
                await self._drop(key)
            except OSError:
                log.exception("stages of transaction %r cannot be removed", key)


def _read_all(
    folder: StageFolder, key: str, stage_ids: Sequence[str]
) -> tuple[list[tuple[str, Batch]] | None, str]:
    """See `Stages._prepare`. In a thread."""
    chunks = plan_chunks(folder, stage_ids, AT_ONCE_BYTES, AT_ONCE_MESSAGES)
    fingerprint = Fingerprint(KIND + key)
    parts = None if len(chunks) > 1 else load_chunk(folder, chunks[0]) if chunks else []
    fingerprint.add(read_chunks(folder, chunks) if parts is None else parts)
    return parts, fingerprint.text(stage_ids)


def _fingerprint_of(folder: StageFolder, key: str, stage_ids: Sequence[str]) -> Fingerprint:
    """Of what is staged. In a thread."""
    fingerprint = Fingerprint(KIND + key)
    fingerprint.add(read_chunks(folder, plan_chunks(folder, stage_ids, CHUNK_BYTES, CHUNK_MESSAGES)))
    return fingerprint


def _reused(key: str, stored: Sequence[Range], asked: Fingerprint, advice: str) -> Problem:
    counts = sorted(asked.counts().items())
    there = [f"{it.end - it.first} in {it.queue!r} from offset {it.first} on" for it in stored]
    here = [f"{count} for {queue!r}" for queue, count in counts]
    return Problem(
        "key-reused",
        f"transaction {key!r} was committed for other messages ({_some(there)}) than are staged now "
        f"({_some(here)}), of which none is stored; {advice}",
        stored=[{"queue": it.queue, "offset_start": it.first, "offset_end": it.end} for it in stored],
        asked=[{"queue": queue, "count": count} for queue, count in counts],
    )


def _some(texts: Sequence[str]) -> str:
    more = f" and {len(texts) - 3} more" if len(texts) > 3 else ""
    return ", ".join(texts[:3]) + more or "none that are new"


def _damaged(key: str, what: str) -> Problem:
    return Problem("conflict", f"transaction {key!r}: a stage is damaged ({what}); stage that part again")


def _full(detail: str) -> Problem:
    return Problem("disk-full", detail, headers={"Retry-After": "1"})
