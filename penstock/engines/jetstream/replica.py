"""Replica: the files of a cluster's log in a local folder, made from its stream, and kept up with it.

A stream holds records (`records.py`), one after the other; here they become files again, which the embedded
log opens as it opens its own. The folder is a cache: it can be deleted at any time, and is when it cannot
be trusted.

    FOLDER/log/        the log's files
    FOLDER/records/    for every segment, which record of the stream has which of its bytes
    FOLDER/replica     up to which record all of this goes; there after a clean stop only

Rules that always hold:
  * Records are applied in the order of the stream; a write of several records when the last of them is there.
  * What a record says is used only if its checksum holds. One that does not, or is missing, is asked for once
    more, of the stream's leader: another node may have it whole. What nobody has is told in `reports`, and
    leaves a hole, in which the log's own recovery finds no block and says which messages that concerns.
  * A file that the stream does not have any more goes.

How it fails: `JetStreamTrouble` when the cluster does not answer; asked again it goes on where it was. An
`OSError` of the local disk is the caller's.
"""

import json
import logging
import os
import shutil
from array import array
from collections.abc import Iterator
from contextlib import suppress
from typing import Final

from penstock.engines.jetstream.api import JetStream
from penstock.engines.jetstream.names import LogNames
from penstock.engines.jetstream.records import Kind, Record, RecordDamaged, read_record
from penstock.engines.log.committer import SPARE
from penstock.engines.log.disk import STAGES, WATERMARK, RealDisk, Watermark
from penstock.engines.log.segments import parse_segment_name
from penstock.protocols.nats_jetstream import read_direct_seqs

LOG: Final = "log"
RECORDS: Final = "records"
_STATE: Final = "replica"
_PART: Final = ".tmp"  # what the log's recovery removes as unfinished
READ_MESSAGES: Final = 500
READ_BYTES: Final = 8 << 20
MEND_RECORDS_MAX: Final = 10_000

log = logging.getLogger("penstock.nats")


def is_shared(name: str) -> bool:
    """Whether a file of the log's folder belongs to the stream, too."""
    local = (RealDisk.LOCK, WATERMARK, STAGES)
    return name not in local and not name.startswith(SPARE) and not name.endswith(_PART)


class RecordIndex:
    """Which record has which bytes of a segment: pairs of a position in the file and a sequence number."""

    def __init__(self, folder: str) -> None:
        self._folder = folder
        os.makedirs(folder, exist_ok=True)

    def note(self, name: str, position: int, seq: int) -> None:
        with open(os.path.join(self._folder, name), "ab") as file:
            file.write(array("Q", (position, seq)).tobytes())

    def forget(self, name: str) -> None:
        with suppress(FileNotFoundError):
            os.unlink(os.path.join(self._folder, name))

    def read(self, name: str) -> "array[int]":
        """Positions and sequence numbers, in turn; whole pairs only."""
        pairs = array("Q")
        with suppress(FileNotFoundError), open(os.path.join(self._folder, name), "rb") as file:
            data = file.read()
            pairs.frombytes(data[: len(data) // 16 * 16])
        return pairs


class Replica:
    """See the module's docstring. Everything that waits runs on the loop of the link."""

    def __init__(self, api: JetStream, names: LogNames, folder: str) -> None:
        self._api = api
        self._names = names
        self._folder = folder
        self.path = os.path.join(folder, LOG)
        self.applied = 0  # the last record that is in the files
        self.reports: list[str] = []
        self._born = ""  # when the stream was made: another one of the same name is another log
        self._open: list[tuple[int, Record]] = []  # the records of a write that is not whole yet
        self._last: dict[str, int] = {}  # by file: its last record
        self.index: RecordIndex

    # --- the folder ------------------------------------------------------------------------------

    async def begin(self) -> None:
        """Find out what the folder is worth: go on from it, or begin anew."""
        info = await self._api.stream(self._names.stream)
        self._born = str(info["created"])
        known = self._read_state()
        if known is not None and known <= int(info["state"]["last_seq"]):
            self.applied = known
            self.index = RecordIndex(os.path.join(self._folder, RECORDS))
        else:
            self.wipe()

    def _read_state(self) -> int | None:
        """The record up to which the folder goes. The note is used once: the files change from now on."""
        path = os.path.join(self._folder, _STATE)
        try:
            with open(path) as file:
                fields = json.load(file)
            os.unlink(path)
        except (FileNotFoundError, ValueError):
            return None
        return int(fields["applied"]) if fields.get("stream") == self._born else None

    def wipe(self) -> None:
        """Forget everything: the next time, all of it is read again."""
        for part in (LOG, RECORDS):
            shutil.rmtree(os.path.join(self._folder, part), ignore_errors=True)
        with suppress(FileNotFoundError):
            os.unlink(os.path.join(self._folder, _STATE))
        os.makedirs(self.path, exist_ok=True)
        self.index = RecordIndex(os.path.join(self._folder, RECORDS))
        self.applied = 0
        self._open = []
        self._last = {}

    def leave(self, applied: int) -> None:
        """The files hold everything up to that record, and nothing else: they can be used the next time."""
        temporary = os.path.join(self._folder, _STATE + ".new")
        with open(temporary, "w") as file:
            json.dump({"stream": self._born, "applied": applied}, file)
        os.rename(temporary, os.path.join(self._folder, _STATE))

    # --- keeping up ------------------------------------------------------------------------------

    async def catch_up(self) -> int:
        """Apply everything that the stream has at this moment; the sequence number of its last record."""
        info = await self._api.stream(self._names.stream)
        last = int(info["state"]["last_seq"])
        while self.applied < last:
            found = await self._api.read(
                self._names.stream, self.applied + 1, READ_MESSAGES, bytes_max=READ_BYTES
            )
            seqs = read_direct_seqs(found.headers)
            if seqs:
                for seq, payload in zip(seqs, found.payloads, strict=True):
                    await self._take(seq, payload)
                continue
            # A node may be behind the leader; and what is left may have been taken out.
            stored = await self._api.next_message(self._names.stream, self.applied + 1)
            if stored is None:
                self.applied = last
            else:
                await self._take(stored.seq, stored.payload)
        return last

    async def _take(self, seq: int, payload: bytes) -> None:
        record = await self._whole(seq, payload)
        if record is None:
            self._flush()
        else:
            end = self._end_of(record.name)
            if record.kind is Kind.WRITE and record.position > end:
                await self._mend(record, seq, end)
            self._apply(seq, record)
        self.applied = seq

    async def _whole(self, seq: int, payload: bytes) -> Record | None:
        try:
            return read_record(payload)
        except RecordDamaged as damage:
            stored = await self._api.message(self._names.stream, seq)
            if stored is not None:
                with suppress(RecordDamaged):
                    record = read_record(stored.payload)
                    log.warning("record %d of %s: one node's copy %s", seq, self._names.stream, damage)
                    return record
            self._report(f"record {seq} of stream {self._names.stream} {damage}: it is not used")
            return None

    async def _mend(self, record: Record, seq: int, end: int) -> None:
        """There is a hole before this record: the node that we read from may not have all that it should."""
        first = self._last.get(record.name, 0) + 1
        for missing in range(max(first, seq - MEND_RECORDS_MAX), seq):
            stored = await self._api.message(self._names.stream, missing)
            if stored is None:
                continue
            try:
                other = read_record(stored.payload)
            except RecordDamaged:
                continue
            if other.name == record.name and other.kind is Kind.WRITE:
                self._apply(missing, other)
        end = self._end_of(record.name)
        if record.position > end:
            self._report(
                f"stream {self._names.stream}: bytes {end} to {record.position - 1} of {record.name} are "
                f"missing before record {seq}"
            )

    def _report(self, text: str) -> None:
        if text not in self.reports:
            log.error("%s", text)
            self.reports.append(text)

    # --- applying --------------------------------------------------------------------------------

    def _end_of(self, name: str) -> int:
        """Where the next bytes of a file are expected."""
        waiting = max((record.end for _, record in self._open if record.name == name), default=0)
        try:
            return max(waiting, os.stat(os.path.join(self.path, name)).st_size)
        except FileNotFoundError:
            return waiting

    def _apply(self, seq: int, record: Record) -> None:
        if self._open:
            _, before = self._open[-1]
            if (record.writer, record.number) != (before.writer, before.number + 1):
                # Its writer died in the middle of it: nobody was told that it is safe.
                self._open = []
        self._last[record.name] = seq
        if record.kind is Kind.WRITE:
            self._open.append((seq, record))
            if not record.more:
                self._flush()
        elif record.kind is Kind.PIECE:
            self._piece(record)
        else:
            os.truncate(os.path.join(self.path, record.name), record.position)

    def _flush(self) -> None:
        """All records of a write are there: now it has happened."""
        whole, self._open = self._open, []
        for seq, record in whole:
            flags = os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC
            fd = os.open(os.path.join(self.path, record.name), flags, 0o640)
            try:
                _write_all(fd, record.data, record.position)
            finally:
                os.close(fd)
            if parse_segment_name(record.name) is not None:
                self.index.note(record.name, record.position, seq)

    def _piece(self, record: Record) -> None:
        path = os.path.join(self.path, record.name)
        flags = os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | (0 if record.position else os.O_TRUNC)
        fd = os.open(path + _PART, flags, 0o640)
        try:
            _write_all(fd, record.data, record.position)
        finally:
            os.close(fd)
        if not record.more:
            os.rename(path + _PART, path)
            self.index.forget(record.name)

    # --- what is gone ------------------------------------------------------------------------------

    async def drop_removed(self) -> None:
        """Files that the stream does not have any more go, and so do the unfinished ones."""
        subjects = await self._api.subjects(self._names.stream, self._names.files)
        there = {self._names.name_of(subject) for subject in subjects}
        for name in self._shared_names():
            if name not in there:
                os.unlink(os.path.join(self.path, name))
                self.index.forget(name)

    def _shared_names(self) -> Iterator[str]:
        return filter(is_shared, sorted(os.listdir(self.path)))

    def set_watermark(self) -> None:
        """Everything that came from the stream is safe: recovery need not make sure of it again."""
        ends = [
            parsed[0] + os.stat(os.path.join(self.path, name)).st_size
            for name in self._shared_names()
            if (parsed := parse_segment_name(name)) is not None and not parsed[1]
        ]
        watermark = Watermark(os.path.join(self.path, WATERMARK), writable=True)
        watermark.set(max(ends, default=0))
        watermark.close()


def _write_all(fd: int, data: bytes | memoryview, position: int) -> None:
    rest = memoryview(data)
    while rest:
        count = os.pwrite(fd, rest, position)
        rest = rest[count:]
        position += count
