"""Sealer: what has gathered for a queue in one turn becomes a block and goes to the committer."""

from collections.abc import Callable, Sequence
from functools import partial

from penstock.log.adoption import Adoption, Run, adoption_parts
from penstock.log.block import (
    FLAG_DELAYED,
    FLAG_ELSEWHERE,
    FLAG_HEADERS,
    FLAG_REPAIRED,
    FLAG_WHY,
    HEADER_BYTES,
    KIND_CONTROL,
    KIND_MESSAGES,
    KIND_SETTLEMENTS,
    Buffer,
    Columns,
    Header,
    control_parts,
    message_parts,
    protocol_number,
    with_header,
)
from penstock.log.columns import join_batches, split_columns
from penstock.log.committer import Committer
from penstock.log.errors import LogFailed, LogRefused
from penstock.log.ledger import EVENTS_MAX, NO_ROWS, Ledger
from penstock.log.queue import LogQueue
from penstock.log.state import FORMAT_DELAYS, FORMAT_STAGES, LogState
from penstock.model.ids import PART_MAX

BACKGROUND_SYNC_US = 1_000_000
"""durability = none: nobody waits, but readers of the log want to see something."""


class SealedBlock:
    """A block that has its offsets or event numbers, but not yet its place in the log."""

    __slots__ = ("adoption", "buffers", "columns", "format", "header")

    def __init__(
        self,
        header: Header,
        buffers: list[Buffer],
        columns: Columns | None = None,
        adoption: Adoption | None = None,
        format_number: int = 0,
    ) -> None:
        self.header = header
        self.buffers = buffers
        self.columns = columns  # of messages
        self.adoption = adoption  # where those are; neither: settlements
        self.format = format_number  # whoever reads it must know that one


class Sealer:
    """Makes blocks. Numbers messages and events in the order in which it is asked."""

    def __init__(self, state: LogState, committer: Committer) -> None:
        self._state = state
        self._committer = committer
        self.on_stored: Callable[[str], None] | None = (
            None  # messages of a queue that waits for it are durable
        )
        self.settlements_wait = False  # of queues with durability commit, for a sync
        self.lazy_us = 0  # how long blocks that nobody waits for may stay unsynced; 0: there are none

    def header(
        self, kind: int, flags: int, queue: int, count: int, parts: list[Buffer], now_us: int
    ) -> Header:
        body_bytes = sum(map(len, parts))
        return Header(
            kind, flags, 0, queue, count, self._state.opening, 0, 0, 0, 0, body_bytes, now_us, 0, 0, 0, 0
        )

    def control(self, fields: dict[str, object], now_us: int) -> None:
        """Something rare, written down at once."""
        parts = control_parts(fields)
        self._committer.add(self.header(KIND_CONTROL, 0, 0, 0, parts, now_us), parts, sync=True)

    def format(self) -> None:
        """Whoever does not know what there may be in this log is told so before he comes to anything else."""
        state = self._state
        number = state.segments.stage_queue
        state.format = max(state.format, FORMAT_STAGES if number else 0)
        if state.format:
            fields: dict[str, object] = {"op": "format", "format": state.format, "queue": number}
            self.control(fields, self._committer.active.time_max_us)

    def announce(self, number: int) -> None:
        """The same before the first block that is of a newer format."""
        if number > self._state.format:
            self._state.format = number
            self.format()

    def declare(self, name: str, now_us: int) -> LogQueue:
        """A queue that is there from now on. LogRefused where there is no number for one more."""
        number = self._state.number_last + 1
        if number > PART_MAX:
            raise LogRefused(
                f"queue {name!r}: {PART_MAX} queues were made in this log, and no number is left for it; "
                f"send to queues that are there, or begin a new log in another data folder"
            )
        queue = self._state.declare(number, name)
        self.control({"op": "queue", "number": number, "name": name}, now_us)
        return queue

    def messages(self, queue: LogQueue) -> None:
        """The gathered batches of a queue: one block, or a few where they are large."""
        batches, queue.parts = queue.parts, None
        receipts, queue.parts_receipts = queue.parts_receipts, None
        assert batches is not None
        self._state.gathered_bytes -= queue.parts_stored_bytes
        queue.parts_bytes = queue.parts_stored_bytes = 0
        durability = queue.policy.durability
        time_us = queue.parts_time_us
        try:
            for columns in split_columns(join_batches(batches, time_us), self._state.settings.block_bytes):
                block = self.message_block(queue, columns, batches[0].protocol, time_us)
                self.add(block, sync=durability == "commit")
        except Exception as error:
            # They have their offsets. What comes behind them without them would be stored under these.
            failed = self._failed(error)
            for receipt in receipts or ():
                receipt(failed)
            raise failed from error
        for receipt in receipts or ():
            if durability == "commit":
                self._committer.when_synced(receipt)
            else:
                self._committer.when_written(receipt)
        self._note_lazy(durability)

    def _failed(self, error: Exception) -> LogFailed:
        """What has its numbers is not in the log: nothing may come behind it."""
        self._committer.fail(error)
        assert self._committer.failed is not None
        return self._committer.failed

    def _note_lazy(self, durability: str) -> None:
        if durability == "interval":
            self.lazy_us = min(self.lazy_us or BACKGROUND_SYNC_US, self._state.settings.interval_us)
        elif durability == "none":
            self.lazy_us = self.lazy_us or BACKGROUND_SYNC_US

    def message_block(
        self, queue: LogQueue, columns: Columns, protocol: str, now_us: int, flags: int = 0
    ) -> SealedBlock:
        count = len(columns)
        buffers = message_parts(columns)
        flags |= columns.flags
        format_number = FORMAT_DELAYS if flags & (FLAG_DELAYED | FLAG_HEADERS) else 0
        header = self.header(KIND_MESSAGES, flags, queue.number, count, buffers, now_us)
        header.protocol = protocol_number(protocol)
        header.first_offset = queue.next_stored
        header.first_event = queue.next_event
        header.event_count = count
        header.extra = len(columns.payload)
        queue.next_stored += count
        queue.next_event += count
        queue.weight.bytes += header.extra
        if columns.expires is not None:
            header.expires_min_us = min(filter(None, columns.expires), default=0)
            if header.expires_min_us and queue.number != self._state.segments.stage_queue:
                self._state.timers.add(
                    header.expires_min_us, queue.number, header.first_offset, header.offset_end
                )
        if columns.reply is not None:
            queue.ask(header.first_offset, header.offset_end)
        if columns.due is not None and queue.number != self._state.segments.stage_queue:
            due_us = min(filter(None, columns.due), default=0)
            if due_us:
                self._state.delays.add(due_us, -queue.number, header.first_offset, header.offset_end)
        return SealedBlock(header, buffers, columns, format_number=format_number)

    def adoption_block(
        self, queue: LogQueue, runs: Sequence[Run], protocol: str, now_us: int, flags: int
    ) -> SealedBlock:
        """Rows of the stage queue become messages."""
        buffers = adoption_parts(runs)
        count = sum(run.length for run in runs)
        header = self.header(KIND_MESSAGES, flags | FLAG_ELSEWHERE, queue.number, count, buffers, now_us)
        header.protocol = protocol_number(protocol)
        header.first_offset, header.first_event, header.event_count = (
            queue.next_stored,
            queue.next_event,
            count,
        )
        header.extra = sum(run.payload_bytes for run in runs)
        header.expires_min_us = min([run.expires_us for run in runs if run.expires_us], default=0)
        queue.next_stored += count
        queue.next_event += count
        queue.weight.bytes += header.extra
        adoption = Adoption(header, runs)
        for first, run in zip(adoption.ends, runs, strict=False):
            if run.expires_us:
                # One for each: all of them at once would have to be read when the first is due.
                self._state.timers.add(run.expires_us, queue.number, first, first + run.length)
        if flags & FLAG_DELAYED:
            self._state.delays.add(now_us, -queue.number, header.first_offset, header.offset_end)
        return SealedBlock(header, buffers, adoption=adoption)

    def add(self, block: SealedBlock, sync: bool) -> None:
        """Give a block its place; messages are kept at hand for those who take them next."""
        header, columns = block.header, block.columns
        if block.format > self._state.format:
            self.announce(block.format)
        self._committer.add(header, block.buffers, sync=sync)
        if block.adoption is not None:
            self._committer.active.adopt(block.adoption)
            self._state.segments.keep(self._committer.active, block.adoption)
        elif columns is None:
            queue = self._state.by_number[header.queue]
            if queue.settling is None:
                queue.settling = []
            queue.settling.append((header.first_event + header.event_count, header.first_offset))
        elif (
            header.queue != self._state.segments.stage_queue
        ):  # Nobody takes these before they are committed.
            self._state.segments.cache(self._committer.active, with_header(header, columns))
        self._show_when_synced(header)
        if header.kind == KIND_MESSAGES:
            queue = self._state.by_number[header.queue]
            if queue.policy.waits_for_sync:
                self.tell_stored(queue)

    def tell_stored(self, queue: LogQueue) -> None:
        """Who hands out messages is told when those are durable that the log has by now."""
        self._committer.when_synced(partial(self._stored, queue))

    def _stored(self, queue: LogQueue, error: LogFailed | None) -> None:
        if error is None and self.on_stored is not None:
            self.on_stored(queue.name)

    def ledger(self, queue: LogQueue, now_us: int) -> bool:
        """The settlements of a queue. False where the disk has no room for them yet."""
        ledger = queue.ledger
        buffers = ledger.parts()
        if not self._committer.fits(HEADER_BYTES + sum(map(len, buffers))):
            return False
        queue.ledger = NO_ROWS
        # Nobody is promised anything by a settlement: it goes along with the next sync, which comes
        # within the interval at the latest. A power cut before that delivers the message again.
        try:
            if ledger.event_count <= EVENTS_MAX:
                self.add(self._settlement_block(queue, ledger, buffers, now_us), sync=False)
            else:
                for piece in ledger.pieces(EVENTS_MAX):
                    self.add(self._settlement_block(queue, piece, piece.parts(), now_us), sync=False)
        except Exception as error:
            raise self._failed(error) from error
        if queue.policy.durability == "commit":
            self.settlements_wait = True
        self._note_lazy("none" if queue.policy.durability == "none" else "interval")
        return True

    def settlement_block(self, queue: LogQueue, ledger: Ledger, now_us: int, flags: int) -> SealedBlock:
        """Rows of a queue that do not wait for others, as those of a transaction."""
        return self._settlement_block(queue, ledger, ledger.parts(), now_us, flags)

    def repair_block(
        self, queue: LogQueue, ledger: Ledger, payload_first: int, now_us: int, flags: int
    ) -> SealedBlock:
        """Rows of messages whose payloads are in the repair queue, one behind the other."""
        block = self.settlement_block(queue, ledger, now_us, flags | FLAG_REPAIRED)
        block.header.expires_min_us = payload_first
        return block

    def _settlement_block(
        self, queue: LogQueue, ledger: Ledger, buffers: list[Buffer], now_us: int, flags: int = 0
    ) -> SealedBlock:
        flags |= ledger.flags
        header = self.header(KIND_SETTLEMENTS, flags, queue.number, len(ledger), buffers, now_us)
        header.first_offset = ledger.lowest
        header.first_event = queue.next_event
        header.event_count = ledger.event_count
        header.extra = ledger.names_count
        queue.next_event += ledger.event_count
        if ledger.more_than_acks:
            if queue.recorded is None:
                queue.recorded = {}
            ledger.count(queue.recorded)
        is_new = ledger.has_delays or flags & FLAG_WHY
        return SealedBlock(header, buffers, format_number=FORMAT_DELAYS if is_new else 0)

    def _show_when_synced(self, header: Header) -> None:
        queue = self._state.by_number[header.queue]
        offset_end = header.offset_end if header.kind == KIND_MESSAGES else 0
        event_end = header.first_event + header.event_count

        def show() -> None:
            queue.synced_offset = max(queue.synced_offset, offset_end)
            queue.synced_event = event_end
            settling = queue.settling
            if settling is not None:
                while settling and settling[0][0] <= event_end:
                    settling.pop(0)
                queue.settling = settling or None

        self._committer.show_when_synced(show)
