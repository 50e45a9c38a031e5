"""Appender: the one hand that writes a cluster's log, record after record.

Every record goes out with a message id and with the sequence number that must be the stream's last one at
that moment. So a record that is sent again, because nobody said whether it had arrived, is stored once; and
a writer that has been overtaken by another is told so by its very next record. That is all that keeps two
brokers from writing one log: leases and clocks only decide who tries.

Rules that always hold:
  * One record is under way at a time: the next goes out when the one before is stored.
  * It is tried until it is stored, or until somebody else has written, or until `stop`: a cluster that has no
    leader, or no room, for a minute or a day, costs that time and no record.
  * Once overtaken, it writes nothing any more.

How it fails: `Overtaken`, for good. `StationClosed` when it is stopped while it tries. `trouble` says
meanwhile what it waits for.
"""

import asyncio
import logging
import time

from penstock.engines.jetstream.errors import JetStreamError, JetStreamTrouble, LinkLost, NoAnswer
from penstock.engines.jetstream.names import LogNames
from penstock.engines.jetstream.records import HEAD_BYTES_MAX, Kind, Record, RecordDamaged, read_record
from penstock.engines.jetstream.station import Station, StationClosed
from penstock.protocols import nats_write
from penstock.protocols.nats_headers import header_block
from penstock.protocols.nats_jetstream import failure_of, read_object

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
    """See the module's docstring. Its calls wait, from the log's threads."""

    def __init__(self, station: Station, names: LogNames, writer: int, seq_last: int) -> None:
        self._station = station
        self._names = names
        self.writer = writer
        self.seq_last = seq_last  # of the stream, as far as we know
        self._number = 0
        self._turn = asyncio.Lock()
        self._overtaken: Overtaken | None = None
        self._stopped = False
        self.trouble = ""  # what it waits for at this moment

    @property
    def bytes_max(self) -> int:
        """How much fits into one record."""
        return self._station.link.message_bytes_max - HEAD_BYTES_MAX - HEADERS_BYTES_MAX

    def write(self, name: str, writes: list[tuple[int, bytes]]) -> None:
        """Bytes at positions of a file, all or none of them; they are safe when this returns."""
        self._station.ask(self._write(name, writes))

    async def _write(self, name: str, writes: list[tuple[int, bytes]]) -> None:
        parts: list[tuple[int, memoryview]] = []
        for position, data in writes:
            view = memoryview(data)
            step = self.bytes_max
            parts += [(position + at, view[at : at + step]) for at in range(0, len(view), step)]
        async with self._turn:
            for place, (position, part) in enumerate(parts, 1):
                await self._append(Kind.WRITE, name, position, part, more=place < len(parts))

    def send_file(self, name: str, data: bytes) -> None:
        """A whole file, which is there when this returns, or not at all."""

        async def send() -> None:
            view = memoryview(data)
            step = min(self.bytes_max, PIECE_BYTES_MAX)
            starts = range(0, len(view), step) or [0]
            for at in starts:
                async with self._turn:
                    await self._append(Kind.PIECE, name, at, view[at : at + step], more=at != starts[-1])

        self._station.ask(send())

    def truncate(self, name: str, size: int) -> None:
        async def cut() -> None:
            async with self._turn:
                await self._append(Kind.TRUNCATE, name, size, memoryview(b""), more=False)

        self._station.ask(cut())

    def remove(self, name: str) -> None:
        """Take a file out of the stream, for good."""

        async def purge() -> None:
            async with self._turn:
                if self._overtaken is not None:
                    raise self._overtaken
                await self._station.api.purge_subject(self._names.stream, self._names.file(name))

        self._station.ask(purge())

    def stop(self) -> None:
        """Try no more. Whoever waits is told."""
        self._stopped = True

    # --- one record, on the station's loop ---------------------------------------------------------

    async def _append(self, kind: Kind, name: str, position: int, data: memoryview, *, more: bool) -> None:
        if self._overtaken is not None:
            raise self._overtaken
        payload = Record(kind, name, position, self.writer, self._number, more, data).pack()
        headers = header_block(
            [
                (b"Nats-Msg-Id", b"%x-%d" % (self.writer, self._number)),
                (b"Nats-Expected-Last-Sequence", b"%d" % self.seq_last),
                (b"Nats-Expected-Stream", self._names.stream.encode()),
            ]
        )
        subject = nats_write.subject_bytes(self._names.file(name))
        began = told = time.monotonic()
        while True:
            seq, why = await self._try(subject, payload, headers)
            if seq:
                break
            if self._stopped:
                raise StationClosed(f"stopped while a record waited to be stored: {why}")
            self.trouble = why
            if time.monotonic() - told > TELL_SECONDS:
                told = time.monotonic()
                log.warning("the log has not been stored for %.0f s, and waits: %s", told - began, why)
            await asyncio.sleep(PAUSE_SECONDS)
        if self.trouble:
            self.trouble = ""
            log.info("the log is stored again, after %.1f s", time.monotonic() - began)
        self._number += 1
        self.seq_last = seq

    async def _try(self, subject: bytes, payload: bytes, headers: bytes) -> tuple[int, str]:
        """Its sequence number, or why it has none yet."""
        try:
            _, said = await self._station.requests.ask(
                subject, payload, headers=headers, seconds=ANSWER_SECONDS
            )
        except (JetStreamError, NoAnswer, LinkLost) as error:
            return 0, str(error)
        answer = read_object(said)
        failure = failure_of(answer)
        if failure is None:
            return int(answer["seq"]), ""
        refusal = JetStreamError(self._names.stream, failure)
        if refusal.wrong_last:
            return await self._who_was_first(str(refusal)), str(refusal)
        return 0, str(refusal)

    async def _who_was_first(self, why: str) -> int:
        """Something stands where our record should. It may be our own, whose answer was lost long ago."""
        try:
            stored = await self._station.api.message(self._names.stream, self.seq_last + 1)
        except JetStreamTrouble:
            return 0
        if stored is not None:
            try:
                record = read_record(stored.payload)
            except RecordDamaged:
                record = None
            if record is not None and (record.writer, record.number) == (self.writer, self._number):
                return stored.seq
        elif not await self._is_behind():
            return 0
        self._overtaken = Overtaken(
            f"another broker has written to {self._names.stream} behind record {self.seq_last}: {why}"
        )
        raise self._overtaken

    async def _is_behind(self) -> bool:
        """Whether the stream has gone on without us. (What was written there may be purged again.)"""
        try:
            info = await self._station.api.stream(self._names.stream)
        except JetStreamTrouble:
            return False
        return int(info["state"]["last_seq"]) > self.seq_last
