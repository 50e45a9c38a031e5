"""Appender: the one hand that writes a cluster's log, record after record.

Every record goes out with a message id and with the sequence number that must be the stream's last one at
that moment. So a record that is sent again, because nobody said whether it had arrived, is stored once; and
a writer that has been overtaken by another is told so by its very next record. That is all that keeps two
brokers from writing one log: leases and clocks only decide who tries.

Rules that always hold:
  * One record is under way at a time: the next goes out when the one before is stored. Removals do not wait.
  * It is tried until it is stored, or until somebody else has written, or until `stop`: a cluster that has no
    leader, or no room, for a minute or a day, costs that time and no record.
  * What has ended it, has ended it for good: once overtaken or stopped it sends nothing any more. A record
    that it gave up may be stored or not, so its number must not be used for another one.
  * What it takes out of the stream is at most what it knew of: nothing that another has written since goes.
    And it takes out nothing once another has written: that one may have promised it to somebody. It looks
    immediately before, because JetStream cannot take out on a condition.

How it fails: `Overtaken`, or `LinkClosed` when it was stopped; both for good. `trouble` says meanwhile
what it waits for.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable

from penstock.log.jetstream.api import JetStream, Stored
from penstock.log.jetstream.errors import JetStreamError, JetStreamTrouble
from penstock.log.jetstream.link_thread import LinkClosed, LinkThread
from penstock.log.jetstream.names import LogNames
from penstock.log.jetstream.records import HEAD_BYTES_MAX, Kind, Record, RecordDamaged, read_record
from penstock.log.jetstream.room import RECORD_BYTES, Room

ANSWER_SECONDS = 2.0
PAUSE_SECONDS = 0.1
TELL_SECONDS = 5.0
HEADERS_BYTES_MAX = 512
PIECE_BYTES_MAX = 1 << 20
"""Of a whole file that is sent: other writes go between its pieces."""

log = logging.getLogger("penstock.nats")


class Overtaken(JetStreamTrouble):
    """Another broker writes this log now."""


class Appender:
    """Its calls wait, from the log's threads."""

    def __init__(
        self,
        nats: LinkThread,
        names: LogNames,
        writer: int,
        seq_last: int,
        records: dict[str, int] | None = None,
        room: Room | None = None,
    ) -> None:
        """`records` says how many records each file has; it is kept so. `room` is told what is sent."""
        self._nats = nats
        # Everything is tried again here, where somebody may call `stop` meanwhile.
        self._api = JetStream(nats.link, answer_seconds=ANSWER_SECONDS, patience_seconds=0.0)
        self._names = names
        self.writer = writer
        self.seq_last = seq_last  # of the stream, as far as we know
        self._records = records if records is not None else {}
        self.room = room if room is not None else Room()
        self.room.refused = ""  # as the one before has left it
        self._removing: dict[str, int] = {}  # files that are being taken out, by how many calls
        self._missing: dict[str, int] = {}  # records that somebody else has taken out, by file: as told
        self._number = 0
        self._turn = asyncio.Lock()
        self._ended: JetStreamTrouble | None = None
        self._stopped = False
        self.reached = "", 0  # the file that was written to last, and up to where that is stored
        self.may_reach = "", 0  # the same of a write that was given up and may be stored nevertheless
        self._is_in_doubt = False  # the record that was sent last
        self.trouble = ""  # what it waits for at this moment
        self._full = ""  # what NATS said last to a record for which it has no room

    @property
    def bytes_max(self) -> int:
        """How much fits into one record."""
        return self._nats.link.message_bytes_max - HEAD_BYTES_MAX - HEADERS_BYTES_MAX

    def write(self, name: str, writes: list[tuple[int, bytes]]) -> None:
        """Bytes at positions of a file, all or none of them; they are safe when this returns."""
        self._nats.ask(self._write(name, writes))

    async def _write(self, name: str, writes: list[tuple[int, bytes]]) -> None:
        parts: list[tuple[int, memoryview]] = []
        for position, data in writes:
            view = memoryview(data)
            step = self.bytes_max
            parts += [(position + at, view[at : at + step]) for at in range(0, len(view), step)]
        async with self._turn:
            for place, (position, part) in enumerate(parts, 1):
                is_last = place == len(parts)
                try:
                    await self._append(Kind.WRITE, name, position, part, more=not is_last)
                except BaseException:
                    if is_last and self._is_in_doubt:
                        self.may_reach = name, position + len(part)
                    raise
                if is_last:
                    self.reached = name, position + len(part)

    def send_file(self, name: str, data: bytes) -> None:
        """A whole file, which is there when this returns, or not at all."""

        async def send() -> None:
            view = memoryview(data)
            step = min(self.bytes_max, PIECE_BYTES_MAX)
            starts = range(0, len(view), step) or [0]
            for at in starts:
                async with self._turn:
                    await self._append(Kind.PIECE, name, at, view[at : at + step], more=at != starts[-1])

        self._nats.ask(send())

    def truncate(self, name: str, size: int) -> None:
        async def cut() -> None:
            async with self._turn:
                await self._append(Kind.TRUNCATE, name, size, memoryview(b""), more=False)

        self._nats.ask(cut())

    def remove(self, name: str) -> None:
        """Take a file out of the stream, for good. It waits for no record: that may wait for its room."""

        async def purge() -> None:
            self._check()
            before_seq = self.seq_last + 1
            self._removing[name] = self._removing.get(name, 0) + 1
            try:
                await self._until_done(lambda: self._try_purge(name, before_seq))
                self._records.pop(name, None)
            finally:
                self._removing[name] -= 1
                if not self._removing[name]:
                    del self._removing[name]

        self._nats.ask(purge())

    def stop(self) -> None:
        """Try no more. Whoever waits is told, after `ANSWER_SECONDS` at the latest."""
        self._stopped = True

    async def look_for_removed(self) -> list[str]:
        """On the link's loop: what of our log somebody else has taken out of the stream, in words; each once.

        A record counts when it is stored, so the stream has at least as many of each file, unless we take
        it out ourselves.
        """
        before = dict(self._records)
        subjects = await self._api.subjects(self._names.stream, self._names.files)
        there = {self._names.name_of(subject): count for subject, count in subjects.items()}
        told = []
        for name, count in before.items():
            missing = count - there.get(name, 0)
            ours = name in self._removing or name not in self._records
            if missing > self._missing.get(name, 0) and not ours:
                self._missing[name] = missing
                told.append(
                    f"stream {self._names.stream}: {missing} of {count} records of file {name} were removed "
                    f"by somebody else; this front-end still has them"
                )
        return told

    # --- on the link's loop ---------------------------------------------------------------------

    def _check(self) -> None:
        if self._stopped and self._ended is None:
            self._ended = LinkClosed(f"nothing more is written to {self._names.stream}: stopped")
        if self._ended is not None:
            raise self._ended

    async def _append(self, kind: Kind, name: str, position: int, data: memoryview, *, more: bool) -> None:
        self._is_in_doubt = False
        self._check()
        self._is_in_doubt = True
        payload = Record(kind, name, position, self.writer, self._number, more, data).pack()
        subject, message_id = self._names.file(name), f"{self.writer:x}-{self._number}"
        try:
            self.seq_last = await self._until_done(lambda: self._try(subject, payload, message_id))
        except BaseException as error:
            if self._ended is None:
                self._ended = LinkClosed(f"a record of {self._names.stream} was given up: {error}")
            raise
        self._is_in_doubt = False
        self._number += 1
        self._records[name] = self._records.get(name, 0) + 1

    async def _until_done(self, attempt: Callable[[], Awaitable[tuple[int, str]]]) -> int:
        """What the attempt comes to when it is not 0; until then, it says why."""
        began = told = time.monotonic()
        waited = False  # `trouble` may be another call's: a removal does not wait for records
        while True:
            done, why = await attempt()
            if done:
                break
            if self._stopped:
                raise LinkClosed(f"stopped while the log waited to be stored: {why}")
            self.trouble, waited = why, True
            if time.monotonic() - told > TELL_SECONDS:
                told = time.monotonic()
                log.warning("the log has not been stored for %.0f s, and waits: %s", told - began, why)
                self.room.refused = self._full
            await asyncio.sleep(PAUSE_SECONDS)
        if waited:
            self.trouble = ""
            log.info("the log is stored again, after %.1f s", time.monotonic() - began)
        return done

    async def _try_purge(self, name: str, before_seq: int) -> tuple[int, str]:
        try:
            last = await self._api.last(self._names.stream, self._names.files)
            if last is None or last.seq <= self.seq_last or self._is_ours(last):
                subject = self._names.file(name)
                await self._api.purge_subject(self._names.stream, subject, before_seq=before_seq)
                return 1, ""
        except JetStreamTrouble as error:
            return 0, str(error)
        raise self._overtaken(f"record {last.seq} is there")

    def _is_ours(self, stored: Stored) -> bool:
        try:
            return read_record(stored.payload).writer == self.writer
        except RecordDamaged:
            return False

    def _overtaken(self, why: str) -> Overtaken:
        self._ended = error = Overtaken(
            f"another broker has written to {self._names.stream} behind record {self.seq_last}: {why}"
        )
        return error

    async def _try(self, subject: str, payload: bytes, message_id: str) -> tuple[int, str]:
        """Its sequence number, or why it has none yet."""
        stream = self._names.stream
        try:
            seq = await self._api.put(
                subject, payload, stream_seq=self.seq_last, message_id=message_id, stream=stream
            )
        except JetStreamTrouble as error:
            why, overtaken = str(error), isinstance(error, JetStreamError) and error.wrong_last
            self._full = error.failure.text if isinstance(error, JetStreamError) and error.is_full else ""
        else:
            self._full = self.room.refused = ""
            self.room.sent_bytes += len(payload) + RECORD_BYTES
            return seq, ""
        return await self._who_was_first(why) if overtaken else (0, why)

    async def _who_was_first(self, why: str) -> tuple[int, str]:
        """Something stands where our record should. It may be our own, whose answer was lost long ago."""
        try:
            stored = await self._api.message(self._names.stream, self.seq_last + 1)
            if stored is None:
                # What was written there may be purged again.
                info = await self._api.stream(self._names.stream)
                last = int(info["state"]["last_seq"])
                if last == self.seq_last:
                    return 0, why  # it is on its way
                if last < self.seq_last:
                    return 0, (
                        f"stream {self._names.stream} ends with record {last}, and {self.seq_last} had been "
                        f"stored: its nodes have lost what is between; restore them"
                    )
        except JetStreamTrouble as error:
            return 0, f"{why}; {error}"
        if stored is not None:
            try:
                record = read_record(stored.payload)
            except RecordDamaged:
                record = None
            if record is not None and (record.writer, record.number) == (self.writer, self._number):
                return stored.seq, ""
            self._is_in_doubt = False  # It is not there, and comes no more.
        raise self._overtaken(why)
