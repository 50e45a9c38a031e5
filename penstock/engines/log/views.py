"""Views: what is in the log and how a queue stands, for those who only look.

Reading shows synced messages and events only: nothing that a power cut could take back.
"""

from collections.abc import Iterator

from penstock.broker.batch import Slice
from penstock.broker.life import Event, Reason
from penstock.engines.interface import EventRun, QueueInfo
from penstock.engines.log.block import KIND_MESSAGES, PROTOCOLS, Header
from penstock.engines.log.ledger import read_rows
from penstock.engines.log.queue import LogQueue
from penstock.engines.log.scan import read_body
from penstock.engines.log.segments import Segments
from penstock.engines.log.state import LogState


def read_messages(state: LogState, queue: LogQueue, start: int, end: int) -> Iterator[Slice]:
    """The messages from offset `start` to `end`, in whatever state they are."""
    end = min(end, queue.synced_offset)
    for block in state.segments.messages(queue.number, start, end):
        header = block.header
        yield Slice(
            block.payload,
            block.bounds,
            max(start - header.first_offset, 0),
            min(end - header.first_offset, header.count),
            header.first_offset,
            queue.origin(header.opening),
            header.time_us,
            block.expires,
            block.retries,
            None,
            block.reply,
            PROTOCOLS[header.protocol],
        )


def read_events(state: LogState, queue: LogQueue, start: int, end: int) -> Iterator[EventRun]:
    """The events from number `start` to `end`, in runs."""
    end = min(end, queue.synced_event)
    segments = state.segments
    for segment in list(segments.all):
        span = segment.spans.get(queue.number)
        if span is None or span.end_event <= start or span.first_event >= end:
            continue
        entries = segments.index_of(segment).queues[queue.number]
        for first_event, position in zip(entries.events, entries.positions, strict=True):
            if first_event >= end:
                break
            header = segments.header_at(segment, position)
            if first_event + header.event_count <= start:
                continue
            if header.kind == KIND_MESSAGES:
                runs = iter((accepted_run(header),))
            else:
                name = state.disk.where(segment.name)
                body = read_body(segments.file_of(segment), segment.base, header, name)
                runs = settlement_runs(header, body)
            for run in runs:
                yield from clip(run, start, end)


def accepted_run(header: Header) -> EventRun:
    """The event that every message of a block begins with."""
    return EventRun(
        header.first_event,
        Event.ACCEPTED,
        header.first_offset,
        header.offset_end,
        Reason.NONE,
        "",
        0,
        0,
        header.time_us,
    )


def settlement_runs(header: Header, body: memoryview) -> Iterator[EventRun]:
    """The events that a settlement block records."""
    number = header.first_event
    for row in read_rows(header, body):
        yield EventRun(
            number,
            row.event,
            row.first,
            row.end,
            row.reason,
            row.consumer,
            row.attempt,
            row.dispatched_us,
            header.time_us,
        )
        number += row.end - row.first


def clip(run: EventRun, start: int, end: int) -> Iterator[EventRun]:
    """The part of a run whose event numbers lie between `start` and `end`."""
    skip = max(start - run.event_offset, 0)
    drop = max(run.event_offset + (run.end - run.first) - end, 0)
    if run.first + skip < run.end - drop:
        yield run._replace(event_offset=run.event_offset + skip, first=run.first + skip, end=run.end - drop)


def describe(state: LogState, queue: LogQueue) -> QueueInfo:
    pending = queue.pending
    held, dead_held = pending.held_counts()
    return QueueInfo(
        name=queue.name,
        ready=pending.ready_count,
        held=held,
        dead=pending.dead.places.total + dead_held,
        offset_start=queue.offset_start,
        offset_end=pending.tail,
        event_start=queue.event_start,
        event_end=queue.next_event + queue.ledger.event_count + pending.tail - queue.next_stored,
        bytes=living_bytes(state.segments, queue),
        oldest_us=_oldest_us(state.segments, queue),
        paused=queue.paused,
    )


def _oldest_us(segments: Segments, queue: LogQueue) -> int:
    oldest = queue.pending.oldest_living()
    if oldest == queue.pending.tail:
        return 0
    if oldest >= queue.next_stored:
        return queue.parts_time_us
    block = segments.block_at(queue.number, oldest)
    return block.header.time_us if block is not None else 0


def living_bytes(segments: Segments, queue: LogQueue) -> int:
    """Payload bytes from the oldest living message on."""
    oldest = queue.pending.oldest_living()
    total = queue.parts_bytes
    if oldest >= queue.next_stored:
        return total
    for segment in segments.holding(queue.number):
        span = segment.spans[queue.number]
        if span.first_offset >= oldest:
            total += span.bytes
        elif span.end_offset > oldest:
            total += segments.bytes_from(segment, queue.number, oldest)
    return total
