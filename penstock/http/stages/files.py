"""Stage files: parts of transactions on the disk, and the intents of large commits.

They live in `DATA/stages/`, beside the log and apart from it:

    lock            locked (`flock`) by the process that owns the folder
    ID.stage        one part of a transaction; ID is 32 random hex digits
    HASH.intent     a large commit that is on its way; HASH is of its key
    NAME.tmp        not finished; the next start removes it

Both kinds of files begin alike:

    4   magic       "PSTG" or "PSTI"
    4   checksum    crc32 of the JSON
    4   length      of the JSON
    …   JSON        what the file is

Of a stage the JSON has the key, the time, and its pieces: runs of messages for one queue, each with what
`control/batches.py` says of a batch and the crc32 of its bytes. The bytes of the pieces follow, one after
the other.

Rules that always hold:
  * A file gets its name when it is synced, and counts when the name is synced. It never changes: an intent
    that has something new to say is another file under the same name.
  * No text of a caller's is in a path.
  * Bytes are handed out only after their checksum was right.

How it fails: `StageDamaged` where bytes are not what was written, OSError where the disk says no. Everything
here waits for the disk: it is called in threads.
"""

import contextlib
import errno
import hashlib
import json
import logging
import os
import secrets
import struct
import time
import zlib
from array import array
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import BinaryIO, Final, NamedTuple

from penstock.control.batches import column_bytes, pack_batch, unpack_batch
from penstock.control.frames import Buffer, Fields, FrameError
from penstock.errors import PenstockError
from penstock.log.disk import STAGES, RealDisk, SyncFailed, discard, write_whole
from penstock.log.errors import LogInUse
from penstock.model.batch import Batch

STAGE_SUFFIX: Final = ".stage"
INTENT_SUFFIX: Final = ".intent"
TEMPORARY_SUFFIX: Final = ".tmp"

STAGE_MAGIC: Final = b"PSTG"
INTENT_MAGIC: Final = b"PSTI"
_HEAD: Final = struct.Struct("<4sII")

PIECE_BYTES: Final = 1 << 20
PIECE_MESSAGES: Final = 10_000
"""The most that a piece has, of payload and of messages; a larger message is a piece of its own."""

PIECE_REPAIRS: Final = 500
"""The same of payloads for dead letters, each of which may be a run of its own to the broker."""

LOCK_SECONDS: Final = 30.0
LOCK_LOOK_SECONDS: Final = 0.05

log = logging.getLogger("penstock.stages")


class StageDamaged(PenstockError):
    """A file whose bytes are not what was written."""


class StagesInUse(PenstockError):
    """Another process has the folder, and does not let go of it."""


class Piece(NamedTuple):
    """Where a run of messages stands in its file."""

    queue: str
    fields: Fields
    checksum: int
    position: int
    length: int

    messages: int
    payload_bytes: int


@dataclass(frozen=True, slots=True)
class Stage:
    """One part of a transaction, as far as it is kept in memory."""

    id: str
    key: str  # of its transaction; "" where the file's head is damaged
    time_us: int  # when it was staged
    count: int
    payload_bytes: int
    file_bytes: int
    damage: str = ""  # what is wrong with the file's head


@dataclass(frozen=True, slots=True)
class Intent:
    """A large commit: what is to be stored under a key, in which order, and cut into which chunks."""

    key: str
    stages: tuple[str, ...]
    chunk_bytes: int
    chunk_messages: int
    begun: bool  # whether the first chunk is known to be stored
    fingerprint: str = ""  # of all of it; older versions wrote none


# --- encoding --------------------------------------------------------------------------------------


class StageFile(NamedTuple):
    """A stage that is ready to be written."""

    stage: Stage
    buffers: list[Buffer]


def encode_stage(key: str, parts: Sequence[tuple[str, Batch]], time_us: int) -> StageFile:
    """A part of a transaction as the bytes of a file."""
    pieces: list[Fields] = []
    buffers: list[Buffer] = []
    for queue, batch in parts:
        for run in _runs(batch):
            fields, its_buffers = pack_batch(run)
            checksum = 0
            for buffer in its_buffers:
                checksum = zlib.crc32(buffer, checksum)
            pieces.append({"queue": queue, "batch": fields, "crc": checksum})
            buffers += its_buffers
    count = sum(len(batch) for _, batch in parts)
    payload_bytes = sum(len(batch.payload) for _, batch in parts)
    head = _encode_head(
        STAGE_MAGIC,
        {"key": key, "time_us": time_us, "count": count, "payload": payload_bytes, "pieces": pieces},
    )
    file_bytes = len(head) + sum(len(buffer) for buffer in buffers)
    stage = Stage(secrets.token_hex(16), key, time_us, count, payload_bytes, file_bytes)
    return StageFile(stage, [head, *buffers])


def _encode_head(magic: bytes, fields: Fields) -> bytes:
    text = json.dumps(fields, separators=(",", ":")).encode()
    return _HEAD.pack(magic, zlib.crc32(text), len(text)) + text


def _runs(batch: Batch) -> Iterator[Batch]:
    """The batch in runs that are small enough to be read and sent one by one."""
    bounds, count = batch.bounds, len(batch)
    messages_max = PIECE_MESSAGES if batch.repairs is None else PIECE_REPAIRS
    if count <= messages_max and len(batch.payload) <= PIECE_BYTES:
        yield batch
        return
    first = 0
    while first < count:
        most = min(count, first + messages_max)
        end = max(bisect_right(bounds, bounds[first] + PIECE_BYTES, first + 1, most + 1) - 1, first + 1)
        start = bounds[first]
        run = Batch(
            batch.payload[start : bounds[end]],
            array("i", [bound - start for bound in bounds[first : end + 1]]),
            batch.ttl_seconds[first:end] if batch.ttl_seconds is not None else None,
            batch.retries[first:end] if batch.retries is not None else None,
            protocol=batch.protocol,
            dead=batch.dead,
            repairs=batch.repairs[first:end] if batch.repairs is not None else None,
        )
        run.identity = batch.identity
        yield run
        first = end


# --- the folder ------------------------------------------------------------------------------------


class StageFolder:
    """`open` comes first, and makes it ours alone."""

    def __init__(self, data: str) -> None:
        self.path = os.path.join(data, STAGES)
        self._data = data
        self._disk = RealDisk(self.path, read_only=True)  # which does not make the folder

    def open(self) -> None:
        """Make the folder where there is none, wait until nobody else has it, and tidy up."""
        if not os.path.isdir(self.path):
            os.makedirs(self.path, 0o750, exist_ok=True)
            data = os.open(self._data, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                os.fsync(data)
            finally:
                os.close(data)
        self._lock()
        for name in self._names(TEMPORARY_SUFFIX):
            self._disk.remove(name)
        # A name that only the kernel knows would be trusted from now on.
        self._disk.sync_names()

    def _lock(self) -> None:
        # The process of a broker that was killed sees the end of its link and leaves, but a moment later.
        deadline = time.monotonic() + LOCK_SECONDS
        while True:
            try:
                return self._disk.lock()
            except LogInUse:
                if time.monotonic() > deadline:
                    raise StagesInUse(
                        f"{self.path}: another process has had it locked for {LOCK_SECONDS:.0f} s; "
                        f"stop that one (fuser {self._disk.where(RealDisk.LOCK)} names it)"
                    ) from None
                time.sleep(LOCK_LOOK_SECONDS)

    def close(self) -> None:
        self._disk.unlock()

    def _names(self, suffix: str) -> list[str]:
        return [name for name in self._disk.names() if name.endswith(suffix)]

    def free_bytes(self) -> int:
        return self._disk.free_bytes()

    # --- stages ----------------------------------------------------------------------------------

    def write(self, file: StageFile) -> None:
        """Keep a stage: when this returns, no power cut can take it. Where it raises, nothing is left."""
        name = file.stage.id + STAGE_SUFFIX
        try:
            self._write_whole(name, file.buffers)
        except OSError:
            discard(self._disk, name)
            raise

    def stages(self) -> list[Stage]:
        """Every stage that is there and can be read. Only heads are read."""
        found: list[Stage] = []
        for name in self._names(STAGE_SUFFIX):
            try:
                found.append(self._describe(name))
            except OSError as error:
                # It stays where it is: the disk may give it again, and a commit that needs it waits for that.
                log.warning("a stage cannot be read: %s: %s", os.path.join(self.path, name), error.strerror)
        return found

    def _describe(self, name: str) -> Stage:
        path = os.path.join(self.path, name)
        stage_id = name.removesuffix(STAGE_SUFFIX)
        with open(path, "rb") as file:
            facts = os.fstat(file.fileno())
            try:
                head, _ = _read_head(file, STAGE_MAGIC, path)
            except StageDamaged as error:
                return Stage(stage_id, "", facts.st_mtime_ns // 1000, 0, 0, facts.st_size, str(error))
        return Stage(stage_id, head["key"], head["time_us"], head["count"], head["payload"], facts.st_size)

    def pieces(self, stage_id: str) -> list[Piece]:
        """What a stage is made of; StageDamaged where the file does not have the size for it."""
        path = self._stage_path(stage_id)
        with _open_stage(path) as file:
            head, position = _read_head(file, STAGE_MAGIC, path)
            size = os.fstat(file.fileno()).st_size
        pieces: list[Piece] = []
        for fields in head["pieces"]:
            batch: Fields = fields["batch"]
            length = column_bytes(batch)
            pieces.append(
                Piece(
                    fields["queue"], batch, fields["crc"], position, length, batch["count"], batch["payload"]
                )
            )
            position += length
        if position != size:
            raise StageDamaged(f"{path}: has {size} bytes instead of {position}")
        return pieces

    def read(self, stage_id: str, pieces: Iterable[Piece]) -> Iterator[tuple[str, Batch]]:
        """The messages of some pieces of a stage, each checked before it is handed out."""
        path = self._stage_path(stage_id)
        with _open_stage(path) as file:
            for piece in pieces:
                file.seek(piece.position)
                data = file.read(piece.length)
                if len(data) != piece.length or zlib.crc32(data) != piece.checksum:
                    raise StageDamaged(
                        f"{path}: the {piece.length} bytes at {piece.position} do not have their checksum"
                    )
                try:
                    batch, _ = unpack_batch(piece.fields, memoryview(data), 0)
                except FrameError as error:
                    raise StageDamaged(f"{path}: at {piece.position}: {error}") from None
                yield piece.queue, batch

    def remove(self, stage_ids: Iterable[str]) -> None:
        """Let go of stages, for good. One that is gone already is fine."""
        self._remove([stage_id + STAGE_SUFFIX for stage_id in stage_ids])

    def _stage_path(self, stage_id: str) -> str:
        return os.path.join(self.path, stage_id + STAGE_SUFFIX)

    # --- intents ---------------------------------------------------------------------------------

    def write_intent(self, intent: Intent) -> None:
        head = _encode_head(
            INTENT_MAGIC,
            {
                "key": intent.key,
                "stages": intent.stages,
                "chunk_bytes": intent.chunk_bytes,
                "chunk_messages": intent.chunk_messages,
                "begun": intent.begun,
                "fingerprint": intent.fingerprint,
            },
        )
        self._write_whole(_intent_name(intent.key), [head])

    def intents(self) -> tuple[list[Intent], list[str]]:
        """Every intent that is there; and what is wrong with those that cannot be read."""
        found: list[Intent] = []
        damage: list[str] = []
        for name in self._names(INTENT_SUFFIX):
            path = os.path.join(self.path, name)
            with open(path, "rb") as file:
                try:
                    fields, _ = _read_head(file, INTENT_MAGIC, path)
                except StageDamaged as error:
                    damage.append(str(error))
                    continue
            fields["stages"] = tuple(fields["stages"])
            found.append(Intent(**fields))
        return found, damage

    def remove_intent(self, key: str) -> None:
        self._remove([_intent_name(key)])

    def intent_path(self, key: str) -> str:
        return os.path.join(self.path, _intent_name(key))

    # --- files -----------------------------------------------------------------------------------

    def _write_whole(self, name: str, buffers: Sequence[Buffer]) -> None:
        try:
            write_whole(self._disk, name, *buffers)
        except SyncFailed as error:
            raise OSError(errno.EIO, str(error)) from error

    def _remove(self, names: Sequence[str]) -> None:
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                self._disk.remove(name)
        if names:
            self._disk.sync_names()


def _open_stage(path: str) -> BinaryIO:
    try:
        return open(path, "rb")
    except FileNotFoundError:
        raise StageDamaged(f"{path}: is gone") from None


def _intent_name(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest() + INTENT_SUFFIX


def _read_head(file: BinaryIO, magic: bytes, path: str) -> tuple[Fields, int]:
    """The JSON that a file begins with, and where it ends."""
    start = file.read(_HEAD.size)
    if len(start) < _HEAD.size:
        raise StageDamaged(f"{path}: is cut short")
    found, checksum, length = _HEAD.unpack(start)
    if found != magic:
        raise StageDamaged(f"{path}: does not begin as such a file does")
    text = file.read(length)
    if len(text) != length or zlib.crc32(text) != checksum:
        raise StageDamaged(f"{path}: its head does not have its checksum")
    fields: Fields = json.loads(text)
    return fields, _HEAD.size + length
