"""Commits: staged messages go into the log, under a key, once.

A small transaction is one call of the link, which the log carries out whole or not at all
(`commit_at_once`). A large one would hold up the broker's loop. It goes as `LargeCommit`, chunk by chunk,
and an intent on the disk sees to it that the last chunk follows, whoever dies in between.

# Why every message of a large commit is stored once

The log takes a transaction in steps. A step's messages and the fact that it was taken are one write of
the log. A step that it has is not taken again, one that is not the next is refused, and a key that has begun
is not forgotten before its last step. A receipt comes after the sync, which covers the steps before it too.

The intent is written and synced before the first step is sent. It names the stages, and the bounds that
chunks are cut by; and no stage is removed before the last step's receipt. So step *n* has the same messages
whenever it is sent. One process at a time has the folder of the stages, one task in it is at work for a key,
and the first process carries out calls in the order in which they were made. That is why several steps may be
on their way: where one is refused, so are those behind it. So, wherever either process, or the power, ends:

  * before the intent is synced: nothing was sent. The transaction is open, as it was.
  * between that and the mark: the intent is found, and the first step is sent again. The log has it and
    says so after its sync, or takes it now. Then the intent is marked as begun, and synced again.
  * between the mark and the last receipt: the log is asked how many steps it has, and the next ones are
    sent. That is never the first: where the log does not know the key of a marked intent, it was
    committed, and later pushed out of the log's memory by ten thousand others.
  * behind the last receipt: the key is committed. Stages are removed, then the intent; what is left of them
    is found at the next start, and removed before any other key is committed.

The outcome is all or nothing. An intent is withdrawn only where the log has refused the first step, when
nothing is stored; behind that it is carried out, however often that must be tried. A reader sees the first
chunks before the last ones are there.

How it fails: `CallRefused` where the log says no, `StageDamaged` where a stage is not what was staged. A
large commit tells those who wait for it what is in its way, and tries again after a pause, or at once when
somebody asks.
"""

import asyncio
import contextlib
import errno
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any, Final, NamedTuple

from penstock.control.batches import pack_batches
from penstock.errors import PenstockError
from penstock.http.link import CallRefused, Link
from penstock.http.problems import Problem
from penstock.http.stages.chunks import Chunk, load_chunk, plan_chunks
from penstock.http.stages.files import Intent, StageDamaged, StageFolder
from penstock.log.fingerprint import KIND
from penstock.model.batch import Batch

AT_ONCE_BYTES: Final = 8 << 20
AT_ONCE_MESSAGES: Final = 100_000
"""A transaction of at most so much payload and so many messages is one step, for readers too."""

CHUNK_BYTES: Final = 4 << 20
CHUNK_MESSAGES: Final = 50_000

CHUNKS_AT_WORK: Final = 3
"""Chunks of all large commits that are read, sent or synced at a time: the work of this process, of the first
one, and of the disk."""

PAUSE_SECONDS_MIN, PAUSE_SECONDS_MAX = 0.5, 15.0

DEFINITE: Final = ("refused", "disk-full", "queue-full", "no-queue", "name", "draining", "too-fast")
"""Kinds of no that say that nothing was stored."""

log = logging.getLogger("penstock.stages")

InThread = Callable[..., Awaitable[Any]]  # Any: what the function returns that it is given
Drop = Callable[[str, Sequence[str]], Awaitable[None]]


class Range(NamedTuple):
    """Where messages of a transaction are."""

    queue: str
    first: int
    end: int


class Known(NamedTuple):
    """What the log knows of a key."""

    stored: list[Range] | None  # None: it is not committed
    steps: int  # that are stored, where it has begun and not ended
    fingerprint: str  # of what is committed; empty where nobody knows


async def known_of(link: Link, key: str) -> Known:
    """What has become of a key; that it is committed is said only when no power cut can undo it."""
    answer = (await link.call("transaction", {"key": KIND + key})).fields
    if answer["stored"] is None:
        return Known(None, answer["steps"], "")
    # It may have been committed a moment ago. A repetition is answered behind its sync.
    return Known(await commit_at_once(link, key, []), 0, answer["fingerprint"])


async def commit_at_once(
    link: Link, key: str, parts: Sequence[tuple[str, Batch]], fingerprint: str = ""
) -> list[Range]:
    """All of it in one step; where it is there already, it stays as it is."""
    return await _transact(link, key, parts, {"fingerprint": fingerprint})


async def _transact(
    link: Link, key: str, parts: Sequence[tuple[str, Batch]], more: dict[str, Any]
) -> list[Range]:
    fields, buffers = pack_batches([batch for _, batch in parts])
    named = [{"queue": queue, "batch": it} for (queue, _), it in zip(parts, fields, strict=True)]
    answer = await link.call("transact", {"key": KIND + key, "parts": named, **more}, *buffers)
    return _joined([Range(queue, first, end) for queue, first, end, _ in answer.fields["stored"]])


def _joined(ranges: Iterable[Range]) -> list[Range]:
    """Ranges of a queue that follow upon each other as one."""
    joined: list[Range] = []
    for it in ranges:
        if joined and (joined[-1].queue, joined[-1].end) == (it.queue, it.first):
            joined[-1] = joined[-1]._replace(end=it.end)
        else:
            joined.append(it)
    return joined


class LargeCommit:
    """One large commit, from its intent to its end. `run` is its task; `join` waits for an outcome."""

    def __init__(
        self,
        folder: StageFolder,
        link: Link,
        intent: Intent,
        room: asyncio.Semaphore,
        in_thread: InThread,
        drop: Drop,
        on_end: Callable[[str], None],
    ) -> None:
        self._folder = folder
        self._link = link
        self._intent = intent
        self._room = room  # for `CHUNKS_AT_WORK`, first come first served
        self._in_thread = in_thread
        self._drop = drop  # all stages of a key, those that are named included
        self._on_end = on_end
        self._chunks: list[Chunk] = []
        self._sent = 0  # chunks, for knowing whether there was any progress
        self._waiting: list[asyncio.Future[list[Range]]] = []
        self._asked = asyncio.Event()
        self._broken: Problem | None = None

    @property
    def key(self) -> str:
        return self._intent.key

    @property
    def intent(self) -> Intent:
        """What it carries out."""
        return self._intent

    def join(self) -> "asyncio.Future[list[Range]]":
        """Where the messages are, as soon as they are; or what is in the way, where something is."""
        waiter: asyncio.Future[list[Range]] = asyncio.get_running_loop().create_future()
        if self._broken is not None:
            waiter.set_exception(self._broken)
        else:
            self._waiting.append(waiter)
            self._asked.set()
        return waiter

    async def run(self) -> None:
        """Carry it out, however long that takes."""
        try:
            await self._run()
        finally:
            self._tell(self._unfinished())  # nobody waits for a process that ends

    def _unfinished(self) -> Problem:
        return Problem("unavailable", f"transaction {self.key!r} is finished later; ask again then")

    async def _run(self) -> None:
        pause = PAUSE_SECONDS_MIN
        while True:
            sent = self._sent
            try:
                stored = await self._go_on()
            except _FirstRefused as refused:
                await self._withdraw(refused.refusal)
                return
            except StageDamaged as error:
                self._break(error)
                return
            except (CallRefused, OSError) as error:
                reason = error if isinstance(error, CallRefused) else disk_problem(error, self._folder.path)
                log.warning("the commit of transaction %r waits, and is tried again: %s", self.key, reason)
                self._tell(reason)
            except (
                Exception
            ):  # no memory, or a fault of ours: it has begun, and whoever asks is to be answered
                log.exception("the commit of transaction %r has failed, and is tried again", self.key)
                self._tell(self._unfinished())
            else:
                await self._tidy_up()
                self._on_end(self.key)
                self._tell(stored)
                return
            pause = PAUSE_SECONDS_MIN if self._sent > sent else min(2 * pause, PAUSE_SECONDS_MAX)
            self._asked.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause):
                    await self._asked.wait()

    async def _go_on(self) -> list[Range]:
        """Everything that the log does not have yet."""
        intent = self._intent
        if not self._chunks:
            self._chunks = await self._in_thread(
                plan_chunks, self._folder, intent.stages, intent.chunk_bytes, intent.chunk_messages
            )
        number = 0
        if intent.begun:
            known = await known_of(self._link, self.key)
            if known.stored is not None:
                return known.stored
            if not known.steps:
                log.warning(
                    "transaction %r was committed so long ago that the log does not say any more where",
                    self.key,
                )
                return []
            number = known.steps
        else:
            await self._begin()
            number = 1
        return await self._send_from(number)

    async def _send_from(self, number: int) -> list[Range]:
        """All chunks from that one on; what the last one is answered."""
        sending: deque[asyncio.Task[list[Range]]] = deque()
        stored: list[Range] = []
        try:
            for following in range(number, len(self._chunks)):
                sending.append(await self._start_sending(following))
                while sending and (sending[0].done() or len(sending) >= CHUNKS_AT_WORK):
                    stored = await sending.popleft()
            while sending:
                stored = await sending.popleft()
        finally:
            # What is behind a failure is refused as well. Nobody needs that answer: the log is asked.
            for task in sending:
                task.cancel()
            await asyncio.gather(*sending, return_exceptions=True)
        return stored

    async def _begin(self) -> None:
        try:
            await (await self._start_sending(0))
        except CallRefused as refusal:
            if refusal.kind in DEFINITE and not await self._has_begun():
                raise _FirstRefused(refusal) from None
            raise
        begun = replace(self._intent, begun=True)
        await self._in_thread(self._folder.write_intent, begun)
        self._intent = begun

    async def _has_begun(self) -> bool:
        known = await known_of(self._link, self.key)
        return known.stored is not None or known.steps > 0

    async def _start_sending(self, number: int) -> "asyncio.Task[list[Range]]":
        """Read a chunk and send it; the answer comes with the task. Those sent before are ahead of it."""
        await self._room.acquire()
        try:
            parts = await self._in_thread(load_chunk, self._folder, self._chunks[number])
        except BaseException:
            self._room.release()
            raise
        task = asyncio.get_running_loop().create_task(self._send(number, parts))
        task.add_done_callback(lambda _: self._room.release())
        return task

    async def _send(self, number: int, parts: Sequence[tuple[str, Batch]]) -> list[Range]:
        last = number == len(self._chunks) - 1
        more = {"step": [number, last], "fingerprint": self._intent.fingerprint if last else ""}
        stored = await _transact(self._link, self.key, parts, more)
        self._sent += 1
        return stored

    async def _withdraw(self, refusal: CallRefused) -> None:
        """The log has refused the first step: nothing has happened, and nothing is promised."""
        try:
            await self._in_thread(self._folder.remove_intent, self.key)
        except OSError:
            # It would be found at the next start and carried out, when the caller has long given up.
            log.exception("remove %s by hand", self._folder.intent_path(self.key))
        self._on_end(self.key)
        self._tell(refusal)

    def _break(self, error: StageDamaged) -> None:
        path = self._folder.intent_path(self.key)
        self._broken = Problem(
            "conflict",
            f"transaction {self.key!r} cannot be finished: {error}. A part of it may be in the log. "
            f"Compare, and remove {path} to give it up",
        )
        log.error("%s", self._broken)
        self._tell(self._broken)

    async def _tidy_up(self) -> None:
        try:
            await self._drop(self.key, self._intent.stages)
            await self._in_thread(self._folder.remove_intent, self.key)
        except OSError as error:
            log.warning("files of transaction %r, which is committed, stay: %s", self.key, error)

    def _tell(self, outcome: list[Range] | PenstockError) -> None:
        waiting, self._waiting = self._waiting, []
        for waiter in waiting:
            if waiter.done():  # whoever asked has gone
                continue
            if isinstance(outcome, PenstockError):
                waiter.set_exception(outcome)
            else:
                waiter.set_result(outcome)


class _FirstRefused(Exception):
    """Of a large commit nothing is stored, and nothing will be."""

    def __init__(self, refusal: CallRefused) -> None:
        self.refusal = refusal


def disk_problem(error: OSError, path: str) -> Problem:
    """What a failure of the stages' disk is to a caller."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return Problem(
            "disk-full", f"{path}: no room; make some, and try again", headers={"Retry-After": "1"}
        )
    return Problem("unavailable", f"{path}: {error.strerror}; look at the disk, and try again")
