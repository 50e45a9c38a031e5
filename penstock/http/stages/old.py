"""Old stages: what earlier versions have left in `DATA/stages/`, and how the log takes it over.

They kept parts of transactions in files, and cut a large commit into chunks, each a step in the log:

    ID.stage        one part of a transaction
    HASH.intent     a large commit that was on its way; HASH is of its key
    lock, NAME.tmp  nobody needs them any more

    4   magic       "PSTG" or "PSTI"
    4   checksum    crc32 of the JSON
    4   length      of the JSON
    …   JSON        what the file is
    …   pieces      of a stage: runs of messages for one queue, each as `control/batches.py` has it, with a
                    checksum in the JSON

At the start, for each key, before anybody is answered about it:

    committed                       the files go
    marked as begun, and unknown    the same: it was committed, and forgotten since then
    begun: the log has steps of it  what follows upon these steps is staged, and committed with them
    not begun                       its stages are staged again, and known by their old ids too

Chunks are a function of the stages' files, their order, and the two bounds that the intent has: so what the
steps have stored is known by their number. Files go when the log has what was in them, synced. Whatever is
staged twice because this process has died in between goes with the commit: nothing is stored twice.

How it fails: a key that the log does not take over now (it is full, say) is tried again, and whoever asks for
it meanwhile is told why. Damaged files are named in the broker's log, and stay. Where they would be needed to
finish what has begun, that is a conflict for whoever asks for the key.
"""

import asyncio
import json
import logging
import os
import struct
import zlib
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from typing import BinaryIO, Final, NamedTuple

from penstock.control.batches import column_bytes, unpack_batch
from penstock.control.frames import Fields, FrameError
from penstock.errors import PenstockError
from penstock.http.link import CALL_SECONDS, CallRefused
from penstock.http.problems import Problem
from penstock.log.disk import STAGES
from penstock.model.batch import Batch

REPAIR_WEIGHT: Final = 100
"""A repaired dead letter counted as so many messages where chunks were cut."""

PAUSE_SECONDS: Final = 5.0
_HEAD: Final = struct.Struct("<4sII")

log = logging.getLogger("penstock.stages")

Parts = Sequence[tuple[str, Batch]]
Chunk = list[tuple[str, "Piece"]]  # with the paths of their files


class OldDamaged(PenstockError):
    """A file whose bytes are not what was written."""


class Piece(NamedTuple):
    """Where a run of messages stands in its file."""

    queue: str
    fields: Fields
    checksum: int
    position: int
    length: int


class Leftover:
    """What there is of a key."""

    def __init__(self) -> None:
        self.stages: list[str] = []  # paths
        self.intent: Fields | None = None
        self.intent_path = ""
        self.is_over = False  # The log has it all.
        self.is_broken = False  # Nobody can finish it.
        self.steps = 0  # of a commit that has begun: chunks that the log has
        self.staged: list[str] | None = None  # of the others: ids of new stages, one each
        self.tried = asyncio.Event()
        self.problem: Problem | None = None  # what is in the way


Call = Callable[[str, str, Fields], Awaitable[Fields]]  # about a key
Stage = Callable[[str, Parts, str], Awaitable[Fields]]


class TakeOver:
    """Belongs to one loop."""

    def __init__(self, data: str, call: Call, stage: Stage) -> None:
        self._path = os.path.join(data, STAGES)
        self._call = call
        self._stage = stage
        self._left: dict[str, Leftover] = {}
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Find out what there is, before anything else is committed: so far, the log remembers all."""
        self._left = await asyncio.to_thread(_look, self._path)
        for key, left in list(self._left.items()):
            known = await self._call("transaction", key, {})
            left.steps = known["steps"]
            forgotten = left.intent is not None and left.intent["begun"] and not left.steps
            left.is_over = known["stored"] is not None or forgotten
        self._task = asyncio.get_running_loop().create_task(self._run())

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def check(self, key: str) -> None:
        """Wait until a key is taken over; a Problem where that does not go now."""
        left = self._left.get(key)
        if left is None:
            return
        with suppress(TimeoutError):
            async with asyncio.timeout(CALL_SECONDS):
                await left.tried.wait()
        if key in self._left:
            raise left.problem or _waits(key, "others are taken over first")

    async def _run(self) -> None:
        while waiting := [it for it in self._left.items() if not it[1].is_broken]:
            for key, left in waiting:
                try:
                    await self._take_over(key, left)
                except OldDamaged as error:
                    told = f"transaction {key!r} cannot be finished: {error}. A part of it is in the log"
                    left.problem, left.is_broken = Problem("conflict", told), True
                except (PenstockError, OSError, MemoryError) as error:
                    left.problem = _waits(key, error)
                else:
                    del self._left[key]
                if not left.tried.is_set() and key in self._left:
                    log.error("%s", left.problem)
                left.tried.set()
            if self._left:
                await asyncio.sleep(PAUSE_SECONDS)
        await asyncio.to_thread(_tidy_up, self._path)

    async def _take_over(self, key: str, left: Leftover) -> None:
        if left.steps and not left.is_over:
            await self._finish(key, left)
            left.is_over = True
        while left.stages and not left.is_over:
            await self._stage_again(key, left.stages[-1])
            left.stages.pop()
        paths = [*left.stages, left.intent_path] if left.intent is not None else left.stages
        await asyncio.to_thread(_remove, self._path, paths)

    async def _stage_again(self, key: str, path: str) -> None:
        try:
            parts = await asyncio.to_thread(lambda: [_read(path, piece) for piece in _pieces(path)])
        except OldDamaged as error:
            log.warning("a stage of transaction %r is damaged, and is never committed: %s", key, error)
            return
        await self._stage(key, parts, os.path.basename(path).partition(".")[0])
        await asyncio.to_thread(_remove, self._path, [path])

    async def _finish(self, key: str, left: Leftover) -> None:
        """Stage what the log does not have yet of a commit that has begun, and commit it."""
        intent = left.intent
        if intent is None:
            raise OldDamaged(f"the log has {left.steps} chunks of it, and no file says how to go on")
        begun = {"steps": left.steps}
        if left.staged is None:  # by this process; what another one has staged is of no use
            log.warning("the commit of transaction %r was cut off: it goes on", key)
            await self._call("abort", key, begun)
            left.staged = []
        paths = [os.path.join(self._path, f"{stage_id}.stage") for stage_id in intent["stages"]]
        plan = await asyncio.to_thread(_plan_chunks, paths, intent["chunk_bytes"], intent["chunk_messages"])
        for chunk in plan[left.steps + len(left.staged) :]:
            parts = await asyncio.to_thread(_read_chunk, chunk)
            left.staged.append((await self._stage(key, parts, ""))["stage"])
        fingerprint = intent.get("fingerprint", "")
        try:
            await self._call("commit", key, {**begun, "stages": left.staged, "fingerprint": fingerprint})
        except CallRefused as refusal:
            if refusal.kind == "no-stage":  # It has waited for longer than stages are kept.
                left.staged = None
            raise


def _waits(key: str, why: object) -> Problem:
    return Problem(
        "unavailable",
        f"transaction {key!r} is of an earlier version, and is not taken over yet: {why}; try again",
        headers={"Retry-After": "5"},
    )


# --- the files, in threads ---------------------------------------------------------------------------


def _look(folder: str) -> dict[str, Leftover]:
    """What there is, by its key. What cannot be read is told, and left where it is."""
    found: dict[str, Leftover] = {}
    try:
        names = sorted(os.listdir(folder))
    except FileNotFoundError:
        return found
    except OSError as error:
        log.warning("transactions of an earlier version are not taken over: %s", error)
        return found
    for name in names:
        path = os.path.join(folder, name)
        magic = {".stage": b"PSTG", ".intent": b"PSTI"}.get(os.path.splitext(name)[1])
        if magic is None:
            continue
        try:
            with open(path, "rb") as file:
                fields, _ = _read_head(file, magic, path)
        except (OldDamaged, OSError) as error:
            log.warning("a file of a transaction of an earlier version cannot be read, and stays: %s", error)
            continue
        left = found.setdefault(fields["key"], Leftover())
        if magic == b"PSTG":
            left.stages.append(path)
        else:
            left.intent, left.intent_path = fields, path
    return found


def _read_head(file: BinaryIO, magic: bytes, path: str) -> tuple[Fields, int]:
    """The JSON that a file begins with, and where it ends."""
    start = file.read(_HEAD.size)
    if len(start) < _HEAD.size:
        raise OldDamaged(f"{path}: is cut short")
    found, checksum, length = _HEAD.unpack(start)
    if found != magic:
        raise OldDamaged(f"{path}: does not begin as such a file does")
    text = file.read(length)
    if len(text) != length or zlib.crc32(text) != checksum:
        raise OldDamaged(f"{path}: its head does not have its checksum")
    fields: Fields = json.loads(text)
    return fields, _HEAD.size + length


def _pieces(path: str) -> list[Piece]:
    """What a stage is made of."""
    try:
        with open(path, "rb") as file:
            head, position = _read_head(file, b"PSTG", path)
            size = os.fstat(file.fileno()).st_size
    except FileNotFoundError:
        raise OldDamaged(f"{path}: is gone") from None
    pieces: list[Piece] = []
    for fields in head["pieces"]:
        length = column_bytes(fields["batch"])
        pieces.append(Piece(fields["queue"], fields["batch"], fields["crc"], position, length))
        position += length
    if position != size:
        raise OldDamaged(f"{path}: has {size} bytes instead of {position}")
    return pieces


def _read(path: str, piece: Piece) -> tuple[str, Batch]:
    with open(path, "rb") as file:
        file.seek(piece.position)
        data = file.read(piece.length)
    if len(data) != piece.length or zlib.crc32(data) != piece.checksum:
        raise OldDamaged(f"{path}: the {piece.length} bytes at {piece.position} do not have their checksum")
    try:
        return piece.queue, unpack_batch(piece.fields, memoryview(data), 0)[0]
    except FrameError as error:
        raise OldDamaged(f"{path}: at {piece.position}: {error}") from None


def _read_chunk(chunk: Chunk) -> Parts:
    return [_read(path, piece) for path, piece in chunk]


def _plan_chunks(paths: Sequence[str], chunk_bytes: int, chunk_messages: int) -> list[Chunk]:
    """All pieces of these stages, in chunks that have at most so much payload and so many messages.

    A piece is never cut: where it is larger than allowed, it is a chunk of its own.
    """
    chunks: list[Chunk] = [[]]
    payload_bytes = count = 0
    for path in paths:
        for piece in _pieces(path):
            weight = piece.fields["count"] * (REPAIR_WEIGHT if piece.fields.get("repairs") else 1)
            payload_bytes += piece.fields["payload"]
            count += weight
            if chunks[-1] and (payload_bytes > chunk_bytes or count > chunk_messages):
                chunks.append([])
                payload_bytes, count = piece.fields["payload"], weight
            chunks[-1].append((path, piece))
    return chunks


def _remove(folder: str, paths: Sequence[str]) -> None:
    """Let go of files, for good. One that is gone already is fine."""
    for path in paths:
        with suppress(FileNotFoundError):
            os.remove(path)
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _tidy_up(folder: str) -> None:
    """Nothing is to be taken over any more: the folder goes, unless something damaged is in it."""
    with suppress(FileNotFoundError):
        for name in os.listdir(folder):
            if name == "lock" or name.endswith(".tmp"):
                os.remove(os.path.join(folder, name))
        with suppress(OSError):
            os.rmdir(folder)
