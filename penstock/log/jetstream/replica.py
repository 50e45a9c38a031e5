"""Replica: the files of a cluster's log in a local folder, made from its stream, and kept up with it.

A stream holds records (`records.py`), one after the other; here they become files again, which the embedded
log opens as it opens its own. The folder is a cache: it can be deleted while its broker is stopped, and is
when it cannot be trusted.

    FOLDER/log/        the log's files
    FOLDER/records/    for every segment, which record of the stream has which of its bytes
    FOLDER/replica     up to which record all of this goes; there after a clean stop only
    FOLDER/kept        the segments that nobody writes to any more, and behind which record all is to be read
                       again: for who was killed, or has led and was overtaken

Rules that always hold:
  * Records are applied in the order of the stream; a write of several records when the last of them is there.
  * What a record says is used only if its checksum holds. A subject that no file of the log can have is a
    stranger's, and is passed over.
  * A node whose store is damaged leaves out, without a word, what it cannot read, and still counts it. So
    before anybody leads, the records of every file are counted (`complete`), and a file that has another
    number of them, a damaged one, or a hole, is read anew, several times: which node answers is chance, and
    another one may have it whole. What nobody has is told in `reports`, and leaves a hole, in which the log's
    own recovery finds no block and says which messages that concerns.
  * So is a file that is not here, though its records came: somebody may have deleted it, and whoever leads
    takes out of the stream what was never finished.
  * A file that the stream does not have any more goes.

How it fails: `JetStreamTrouble` when the cluster does not answer, an `OSError` of the local disk; asked again
it goes on where it was. `LogInUse` when a broker leads from this folder at this moment.
"""

import json
import logging
import os
from array import array
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Final, NamedTuple

from penstock.log.committer import SPARE
from penstock.log.disk import HISTORY, STAGES, WATERMARK, RealDisk, Watermark
from penstock.log.jetstream.api import JetStream, Stored
from penstock.log.jetstream.names import LogNames
from penstock.log.jetstream.records import Kind, Record, RecordDamaged, is_name, read_record
from penstock.log.private import make_folder, open_private
from penstock.log.segment import parse_segment_name

LOG: Final = "log"
RECORDS: Final = "records"
_STATE: Final = "replica"
_KEPT: Final = "kept"
_PART: Final = ".tmp"  # what the log's recovery removes as unfinished
READ_MESSAGES: Final = 500
READ_BYTES: Final = 2 << 20
READINGS_MAX: Final = 12
"""Of a file that is not whole. With one bad node of three, once in half a million it is always asked."""

_SETTLE_ATTEMPTS: Final = 10

log = logging.getLogger("penstock.nats")


def is_shared(name: str) -> bool:
    """Whether a file of the log's folder belongs to the stream, too."""
    local = (RealDisk.LOCK, WATERMARK, STAGES, HISTORY)
    return is_name(name) and name not in local and not name.startswith(SPARE) and not name.endswith(_PART)


class RecordIndex:
    """Which record has which bytes of a segment: pairs of a position in the file and a sequence number."""

    def __init__(self, folder: str) -> None:
        self._folder = folder
        make_folder(folder)

    def note(self, name: str, position: int, seq: int) -> None:
        if parse_segment_name(name) is None:
            return
        with open(os.path.join(self._folder, name), "ab", opener=open_private) as file:
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


class _Note(NamedTuple):
    """How a folder was left."""

    stream: str  # when it was made
    applied: int
    records: dict[str, int]
    sizes: dict[str, int]


class Replica:
    """Everything that waits runs on the loop of the link."""

    def __init__(self, api: JetStream, names: LogNames, folder: str) -> None:
        self._api = api
        self._names = names
        self._folder = folder
        self.path = os.path.join(folder, LOG)
        self.applied = 0  # the last record that is in the files
        self.seen = (0, 0)  # of the stream: its last record, and how many it has
        self.reports: list[str] = []
        self._born = ""  # when the stream was made: another one of the same name is another log
        self._open: dict[str, list[tuple[int, Record]]] = {}  # by file: a write that is not whole yet
        self._suspects: set[str] = set()  # files in which something is damaged, or missing
        self._nothing_from = 0  # from this record on, nothing came when the stream said that it had more
        self._is_partial = False  # files are missing whose records are all before `applied`
        self._kept: _Note | None = None  # as it was written down last
        self.end = 0  # up to this position the files of the log go
        self.records: dict[str, int] = {}  # by file: how many it has; kept by whoever leads, too
        self.index: RecordIndex

    # --- the folder ------------------------------------------------------------------------------

    async def begin(self) -> None:
        """Find out what the folder is worth: go on from it, or begin anew."""
        info = await self._api.stream(self._names.stream)
        self._born = str(info["created"])
        self._check_free()
        known = self._read_state()
        last = int(info["state"]["last_seq"])
        if known is not None and known.applied <= last and known.sizes == self._sizes():
            self.applied = known.applied
            self.records = known.records
            for name, size in known.sizes.items():
                if name.startswith(LOG + os.sep):
                    self._reaches(name, size)
            self.index = RecordIndex(os.path.join(self._folder, RECORDS))
            return
        if known is not None and known.applied > last:
            self.wipe()
            self._report(
                f"stream {self._names.stream} ends with record {last}, and had record {known.applied} when "
                f"this broker was stopped: its nodes have lost what is between"
            )
            return
        self.fall_back(last)

    def fall_back(self, last: int | None = None) -> None:
        """Of a folder that may have what the stream does not, those segments are good that were written down
        as finished; from there on all is read again. `last`: that record is the stream's last one."""
        note = self._read_note(_KEPT)
        self._kept = None
        sizes = self._sizes()
        good = (
            {name for name in note.records if _is_as_noted(name, note, sizes)} if note is not None else set()
        )
        if note is None or not good or (last is not None and note.applied > last):
            self.wipe()
            return
        self._clear(good)
        self.applied = note.applied
        self.records = {name: note.records[name] for name in good}
        self._is_partial = True
        log.info("of the copy of the log in %s, %d segments are used again", self._folder, len(good))

    def keep(self) -> None:
        """Write down the segments that nobody writes to any more, if there are others than before. From any
        thread, also while this broker leads: what is stored of the one that is written to was stored behind
        all of theirs."""
        if not hasattr(self, "index"):
            return
        found = {it: parsed for it in self._shared_names() if (parsed := parse_segment_name(it)) is not None}
        newest = max(found, key=found.__getitem__, default="")
        first = self.index.read(newest)[1:2] if newest else None
        if not first:
            return
        applied = first[0] - 1
        records = dict(self.records)
        done = {
            name
            for name in found
            if name in records and max(self.index.read(name)[1::2], default=applied + 1) <= applied
        }
        kept = {name: records[name] for name in done - self._suspects}
        if self._kept is not None and (applied, kept) == (self._kept.applied, self._kept.records):
            return
        paths = [os.path.join(part, name) for part in (LOG, RECORDS) for name in sorted(kept)]
        known = self._kept.sizes if self._kept is not None else {}
        try:
            for path in (*(it for it in paths if it not in known), LOG, RECORDS):
                _sync(os.path.join(self._folder, path))
            sizes = {path: os.stat(os.path.join(self._folder, path)).st_size for path in paths}
            self._write_note(_KEPT, note := _Note(self._born, applied, kept, sizes))
        except OSError as error:  # A file may have gone meanwhile; the next time tells.
            log.debug("what is kept of the copy of the log was not written down: %s", error)
        else:
            self._kept = note

    def _check_free(self) -> None:
        """Somebody who leads from this folder would lose its files under its feet."""
        disk = RealDisk(self.path)
        disk.lock()
        disk.unlock()

    def _read_state(self) -> _Note | None:
        """How the folder was left. The note is used once: the files change from now on."""
        note = self._read_note(_STATE)
        with suppress(FileNotFoundError):
            os.unlink(os.path.join(self._folder, _STATE))
            _sync(self._folder)
        return note

    def _read_note(self, name: str) -> _Note | None:
        try:
            with open(os.path.join(self._folder, name)) as file:
                note = _Note(*json.load(file))
            return note if note.stream == self._born and isinstance(note.applied, int) else None
        except (FileNotFoundError, ValueError, TypeError):
            return None

    def _sizes(self) -> dict[str, int]:
        """Of all files that belong to the copy. Somebody may have deleted some, and left the others."""
        return {
            os.path.join(part, entry.name): entry.stat().st_size
            for part in (LOG, RECORDS)
            if os.path.isdir(os.path.join(self._folder, part))
            for entry in os.scandir(os.path.join(self._folder, part))
            if part == RECORDS or is_shared(entry.name)
        }

    def _reaches(self, name: str, size: int) -> None:
        """A file has so many bytes."""
        segment = parse_segment_name(os.path.basename(name))
        if segment is not None:
            self.end = max(self.end, segment[0] + size)

    def wipe(self) -> None:
        """Forget everything: the next time, all of it is read again. What an earlier version has staged is no
        copy, and stays: whoever leads from here takes it over. So does the history."""
        for note in (_STATE, _KEPT):
            with suppress(FileNotFoundError):
                os.unlink(os.path.join(self._folder, note))
        self._clear(set())

    def _clear(self, kept: set[str]) -> None:
        make_folder(self.path)
        for folder in (self.path, os.path.join(self._folder, RECORDS)):
            for name in set(os.listdir(folder)) - kept - {STAGES, HISTORY} if os.path.isdir(folder) else ():
                with suppress(OSError):
                    os.unlink(os.path.join(folder, name))
        self.index = RecordIndex(os.path.join(self._folder, RECORDS))
        self.applied = 0
        self.reports = []
        self.records = {}
        self._open = {}
        self._suspects = set()
        self._nothing_from = 0
        self._is_partial = False

    def leave(self, applied: int) -> None:
        """The files hold everything up to that record, and nothing else: they can be used the next time.

        Not while a write is only half here: the first half of it is nowhere but in memory. And not before the
        disk has them: a power cut must not leave the note and take the files. Where the disk takes no note,
        all of it is read again, and nothing else waits for that.
        """
        if self._open or self._suspects:
            return
        try:
            self._leave_note(applied)
        except OSError as error:
            log.warning("the copy of the log in %s is read anew the next time: %s", self._folder, error)

    def _leave_note(self, applied: int) -> None:
        sizes = self._sizes()
        for name in (*sizes, LOG, RECORDS):
            _sync(os.path.join(self._folder, name))
        self._write_note(_STATE, _Note(self._born, applied, self.records, sizes))

    def _write_note(self, name: str, note: _Note) -> None:
        temporary = os.path.join(self._folder, name + ".new")
        with open(temporary, "w", opener=open_private) as file:
            json.dump(note, file)
        _sync(temporary)
        os.rename(temporary, os.path.join(self._folder, name))
        _sync(self._folder)

    # --- keeping up ------------------------------------------------------------------------------

    async def catch_up(self) -> int:
        """Apply everything that the stream has at this moment; the sequence number of the last record."""
        state = (await self._api.stream(self._names.stream))["state"]
        last = int(state["last_seq"])
        self.seen = last, int(state["messages"])
        while self.applied < last:
            found = await self._read(self.applied + 1)
            if not found:
                # A node may be behind the leader; and what is left may have been taken out.
                stored = await self._api.next_message(self._names.stream, self.applied + 1)
                found = [stored] if stored is not None else []
            for stored in found:
                self._take(stored)
            if not found:
                self._nothing_from = self.applied + 1
                self.applied = last
        if self._is_partial:
            for name, count in sorted((await self._counts()).items()):
                if name not in self.records:
                    await self._read_anew(name, count)
            self._is_partial = False
        return self.applied

    async def _read(self, seq: int, only: str = "") -> list[Stored]:
        """The next records from a sequence number on, as one of the nodes has them; of one file, if named."""
        return await self._api.read(
            self._names.stream,
            seq,
            READ_MESSAGES,
            bytes_max=READ_BYTES,
            only=self._names.file(only) if only else "",
        )

    def _take(self, stored: Stored) -> None:
        name = self._names.name_of(stored.subject)
        if not is_shared(name):
            self.applied = stored.seq
            return
        self.records[name] = self.records.get(name, 0) + 1
        try:
            hole = self._apply(stored.seq, _record_of(name, stored.payload))
        except RecordDamaged as damage:
            hole = str(damage)
        except OSError:
            self._suspects.add(name)  # It may be half applied, and is counted again with the next try.
            raise
        if hole:
            self._suspects.add(name)
        self.applied = stored.seq

    # --- making sure -----------------------------------------------------------------------------

    async def complete(self) -> int:
        """Catch up, and see that nothing is missing, for whoever wants to lead; the last record."""
        for _ in range(_SETTLE_ATTEMPTS):  # whoever led before may still write
            last = await self.catch_up()
            counts = await self._counts()
            info = await self._api.stream(self._names.stream)
            if int(info["state"]["last_seq"]) == last:
                break
        here = set(self._shared_names())
        for name, count in sorted(counts.items()):
            if name in self._suspects or name not in here or self.records.get(name, 0) != count:
                await self._read_anew(name, count)
        await self._look_for_end(last)
        self._drop(set(counts))
        # What is only half there now stays so: from now on somebody else writes.
        self._open = {}
        self._suspects = set()
        return last

    async def _counts(self) -> dict[str, int]:
        """By file: how many records the stream has of it."""
        subjects = await self._api.subjects(self._names.stream, self._names.files)
        counts = {self._names.name_of(subject): count for subject, count in subjects.items()}
        return {name: count for name, count in counts.items() if is_shared(name)}

    async def _read_anew(self, name: str, count: int) -> None:
        """A file that is not whole: whatever any node has of it."""
        payloads: dict[int, bytes] = {}
        whole: set[int] = set()
        for _ in range(READINGS_MAX):
            seq = 1
            while found := await self._read(seq, name):
                for stored in found:
                    if stored.seq not in whole:
                        payloads[stored.seq] = stored.payload
                        with suppress(RecordDamaged):
                            _record_of(name, stored.payload)
                            whole.add(stored.seq)
                seq = found[-1].seq + 1
            if len(whole) >= count:
                break
        known = len(self.reports)
        was_bad = name in self._suspects or self.records.get(name, 0) < count
        self._suspects.add(name)  # until it is whole: the disk may fail in between
        self._forget(name)
        what = f"stream {self._names.stream}, file {name}"
        for seq, payload in sorted(payloads.items()):
            try:
                hole = self._apply(seq, _record_of(name, payload))
            except RecordDamaged as damage:
                hole = f"record {seq} {damage}: it is not used"
            if hole:
                self._report(f"{what}: {hole}")
        if len(payloads) < count:
            self._report(f"{what}: {count - len(payloads)} of {count} records are missing")
        if len(whole) < count:
            self._flush(name)  # its last record may be the one that nobody has
        if was_bad and len(self.reports) == known:
            log.warning("%s: one node's copy is damaged, and another one's is whole", what)
        self.records[name] = max(count, len(payloads))  # what is missing has been told

    async def _look_for_end(self, last: int) -> None:
        """Nobody ever takes out the last record: where there is none, it is lost."""
        if not 0 < self._nothing_from <= last:
            return
        for _ in range(READINGS_MAX):
            if await self._read(self._nothing_from):
                return  # it was read with the rest of its file
        self._report(
            f"stream {self._names.stream}: it says that its last record is {last}, and has none behind "
            f"{self._nothing_from - 1}: the last ones are missing"
        )

    def _forget(self, name: str) -> None:
        for path in (name, name + _PART):
            with suppress(FileNotFoundError):
                os.unlink(os.path.join(self.path, path))
        self.index.forget(name)
        self._open.pop(name, None)

    def _report(self, text: str) -> None:
        if text not in self.reports:
            log.error("%s", text)
            self.reports.append(text)

    # --- applying --------------------------------------------------------------------------------

    def _apply(self, seq: int, record: Record) -> str:
        """What is missing before this record; empty: nothing."""
        name = record.name
        waiting = self._open.get(name)
        if waiting:
            before = waiting[-1][1]
            if record.writer != before.writer:
                # Its writer died in the middle of it: nobody was told that it is safe.
                del self._open[name]
            elif record.number != before.number + 1:
                # Its writer went on, so it was whole once: what is left of it is good.
                self._flush(name)
        hole = ""
        if record.kind is not Kind.PIECE or record.position:
            end = self._end_of(name if record.kind is not Kind.PIECE else name + _PART)
            if record.position > end:
                hole = f"bytes {end} to {record.position - 1} are missing before record {seq}"
        if record.kind is Kind.WRITE:
            self._open.setdefault(name, []).append((seq, record))
            if not record.more:
                self._flush(name)
        elif record.kind is Kind.PIECE:
            self._piece(seq, record)
        else:
            self._put(name, b"", record.position)
        return hole

    def _end_of(self, name: str) -> int:
        """Where the next bytes of a file are expected."""
        if name in self._open:
            return self._open[name][-1][1].end
        try:
            return os.stat(os.path.join(self.path, name)).st_size
        except FileNotFoundError:
            return 0

    def _flush(self, name: str) -> None:
        """All records of a write are there: now it has happened."""
        for seq, record in self._open.pop(name, ()):
            self._put(name, record.data, record.position)
            self.index.note(name, record.position, seq)
            self._reaches(name, record.end)

    def _piece(self, seq: int, record: Record) -> None:
        if not record.position:
            self.index.forget(record.name)
            self.index.note(record.name, 0, seq)
        self._put(record.name + _PART, record.data, record.position)
        if not record.more:
            path = os.path.join(self.path, record.name)
            os.rename(path + _PART, path)

    def _put(self, name: str, data: bytes | memoryview, position: int) -> None:
        """A file from this position on. Whoever writes at a place had nothing behind it, so nothing stays."""
        fd = open_private(os.path.join(self.path, name), os.O_WRONLY | os.O_CREAT)
        try:
            os.ftruncate(fd, position)
            _write_all(fd, data, position)
        finally:
            os.close(fd)

    # --- what is gone ------------------------------------------------------------------------------

    async def drop_removed(self) -> None:
        """Files that the stream does not have any more go, and so do the unfinished ones."""
        self._drop(set(await self._counts()))

    def _drop(self, there: set[str]) -> None:
        for name in {*self._shared_names(), *self.records} - there:
            self._forget(name)
            self.records.pop(name, None)

    def unfinished(self) -> list[str]:
        """Files of which the stream has something, and that are not there: their writer died over them.

        None where something is damaged, because then they may be all that is left.
        """
        there = set(self._shared_names())
        return [] if self.reports else sorted(set(self.records) - there)

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


def _is_as_noted(name: str, note: _Note, sizes: Mapping[str, int]) -> bool:
    paths = (os.path.join(LOG, name), os.path.join(RECORDS, name))
    return all(path in sizes and sizes[path] == note.sizes.get(path) for path in paths)


def _record_of(name: str, payload: bytes) -> Record:
    record = read_record(payload)
    if record.name != name:
        raise RecordDamaged(f"is one of file {record.name}, and stands in {name}")
    return record


def _sync(path: str) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _write_all(fd: int, data: bytes | memoryview, position: int) -> None:
    rest = memoryview(data)
    while rest:
        count = os.pwrite(fd, rest, position)
        rest = rest[count:]
        position += count
