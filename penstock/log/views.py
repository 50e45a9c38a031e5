"""Views: what is in the log and how a queue stands, for those who only look.

Reading shows synced messages and events only: nothing that a power cut could take back. What is
damaged is left out, and never in silence: it is in the state's damage report when the next thing
that can be read is handed out.
"""

from collections.abc import Iterator

from penstock.log.block import KIND_MESSAGES, Header
from penstock.log.columns import slice_of
from penstock.log.errors import LogDamaged, LogRefused, QueueFull, QueueTooSmall, QueueUnknown
from penstock.log.info import QueueInfo
from penstock.log.ledger import read_rows
from penstock.log.queue import LogQueue
from penstock.log.repairs import is_repair_queue
from penstock.log.results import EventRun
from penstock.log.scan import read_body
from penstock.log.segments import Segments
from penstock.log.state import LogState
from penstock.model.batch import Slice
from penstock.model.life import Event, Reason
from penstock.model.policy import QueueNameError, check_queue_name


def read_messages(state: LogState, queue: LogQueue, start: int, end: int) -> Iterator[Slice]:
    """The messages from offset `start` to `end`, in whatever state they are."""
    end = min(end, queue.synced_offset)
    segments = state.segments
    while start < end:
        # Looked up anew for every block: between two of them, segments may go or be compacted.
        found = segments.messages_from(queue.number, start)
        first = min(found[1].first_offset, end) if found is not None else end
        if start < first:
            state.messages_missing(queue, start, first)
        if found is None or first == end:
            return
        segment, header = found
        try:
            block = segments.load(segment, header.position, max(start, first))
        except LogDamaged as error:
            _, _, stop = segments.missing(queue.number, max(start, first))
            stop = min(stop, header.offset_end)
            state.report(queue, max(start, first), min(stop, end), error)
            start = stop
            continue
        assert block is not None  # Its header is one of messages, and holds this offset.
        header = block.header
        lo, hi = max(start - header.first_offset, 0), min(end - header.first_offset, header.count)
        yield slice_of(block, lo, hi, queue.origin(header.opening))
        start = header.offset_end


def read_events(state: LogState, queue: LogQueue, start: int, end: int) -> Iterator[EventRun]:
    """The events from number `start` to `end`, in runs."""
    end = min(end, queue.synced_event)
    segments = state.segments
    while start < end:
        # Looked up anew for every block: between two of them, segments may go or be compacted.
        found = segments.events_from(queue.number, start)
        first = min(found[1].first_event, end) if found is not None else end
        if max(start, queue.event_start) < first:
            state.events_missing(queue, max(start, queue.event_start), first)
        if found is None or first == end:
            return
        segment, header = found
        stop = header.first_event + header.event_count
        runs: list[EventRun] = []
        if header.kind == KIND_MESSAGES:
            runs.append(accepted_run(header))
        else:
            name = state.disk.where(segment.name)
            try:
                body = read_body(segments.file_of(segment), segment.base, header, name)
                runs += settlement_runs(header, body)
            except LogDamaged:
                state.events_missing(queue, first, stop)
        for run in runs:
            yield from clip(run, start, end)
        start = stop


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
        delayed=pending.delayed.total,
        held=held,
        dead=pending.dead.places.total + dead_held,
        offset_start=queue.offset_start,
        offset_end=pending.tail,
        event_start=queue.event_start,
        event_end=event_end(queue),
        bytes=living_bytes(state.segments, queue),
        oldest_us=_oldest_us(state.segments, queue),
        paused=queue.paused,
        identity=queue.identity,
    )


def event_end(queue: LogQueue) -> int:
    return queue.next_event + queue.ledger.event_count + queue.pending.tail - queue.next_stored


def living_bytes(segments: Segments, queue: LogQueue) -> int:
    """Payload bytes of the messages that are ready or with a consumer."""
    weigh(segments, queue)
    return queue.weight.bytes + queue.parts_bytes


def weigh(segments: Segments, queue: LogQueue) -> None:
    """Make the weight of a queue that of its living messages, as of now.

    Where a block cannot be read any more, by what its segment has of the queue on the average.
    """
    weight, number = queue.weight, queue.number
    if not weight.known:
        weight.bytes = segments.bytes_of(number, _joined(list(_living_runs(queue))))
    else:
        weight.bytes -= segments.bytes_of(number, _joined(_pairs(weight.left)))
        weight.bytes += segments.bytes_of(number, _joined(_pairs(weight.back)))
    weight.forget()
    weight.known = True


def weigh_early(segments: Segments, queue: LogQueue) -> None:
    """The same where nobody has asked: what cannot be read is met by who does."""
    try:
        weigh(segments, queue)
    except OSError:
        queue.weight.forget()


def _living_runs(queue: LogQueue) -> Iterator[tuple[int, int]]:
    """The living messages that are in blocks."""
    pending = queue.pending
    for room in (pending.ready, pending.delayed):
        for a, b, _ in room:
            if a < queue.next_stored:
                yield a, min(b, queue.next_stored)
    for a, b, _ in pending.waiting.places:
        yield a, b
    for holds in pending.held.values():
        for a, b, hold in holds:
            if not hold.dead:
                yield a, b


def _pairs(ends: list[int]) -> list[tuple[int, int]]:
    return list(zip(ends[::2], ends[1::2], strict=True))


def _joined(runs: list[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """One run for those that touch. A message may be in two of them, if it came back in between."""
    runs.sort()
    at = 0
    while at < len(runs):
        first, end = runs[at]
        at += 1
        while at < len(runs) and runs[at][0] == end:
            end = runs[at][1]
            at += 1
        yield first, end


def _oldest_us(segments: Segments, queue: LogQueue) -> int:
    """When the oldest living message came; 0 where there is none.

    To find that out takes a look into a segment. It is done again when another message is the oldest one,
    or segments have gone.
    """
    offset = queue.pending.oldest_living()
    if offset >= queue.next_stored:
        return queue.parts_time_us if offset < queue.pending.tail else 0
    if queue.oldest_offset != offset or queue.oldest_changes != segments.replaced:
        found = segments.messages_from(queue.number, offset)
        queue.oldest_us = found[1].time_us if found is not None and found[1].first_offset <= offset else 0
        queue.oldest_offset, queue.oldest_changes = offset, segments.replaced
    return queue.oldest_us


def known_queue(state: LogState, name: str) -> LogQueue:
    """A queue that is there for others; QueueUnknown where there is none."""
    found = state.queues.get(name)
    if found is None or is_repair_queue(name):
        raise QueueUnknown(f"there is no queue {name!r}")
    return found


def check_new_queue(state: LogState, name: str) -> None:
    """Refuse a queue that can never be here."""
    try:
        check_queue_name(name)
    except QueueNameError as error:
        raise LogRefused(str(error)) from error
    if state.owns is not None and not state.owns(name):
        raise LogRefused(
            f"queue {name!r} is in another log of this cluster (cluster.shards), and nothing is stored in "
            f"two logs in one step; take the messages from their queue, and send them to this one"
        )


def check_queue(state: LogState, name: str, payload_bytes: int) -> None:
    """Refuse what the queue cannot accept; a queue that is not there yet has its policy already."""
    found = state.queues.get(name)
    if found is None or is_repair_queue(name):
        check_new_queue(state, name)
    max_bytes = (found.policy if found is not None else state.policies.for_queue(name)).max_bytes
    if not max_bytes:
        return
    if payload_bytes > max_bytes:
        raise QueueTooSmall(
            f"queue {name!r}: {payload_bytes} bytes are more than its max-bytes of {max_bytes}, so that it "
            f"never has room for them; send less at a time, or raise max-bytes"
        )
    living = living_bytes(state.segments, found) if found is not None else 0
    if living + payload_bytes > max_bytes:
        raise QueueFull(
            f"queue {name!r}: {payload_bytes} more bytes would be over its max-bytes of "
            f"{max_bytes}; wait until consumers have settled some"
        )
