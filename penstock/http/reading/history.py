"""History: everything that has happened to some messages, from the log of events.

Events are stored in the order in which they happened, each block saying which offset it touches at the
lowest. So the walk begins at the acceptance of the first message, passes over blocks that cannot be about
any of them by their headers alone, and ends where all of them have ended, or the log does.

Rules that always hold:
  * The first event is the acceptance, which the message's own block tells: it is there even where
    retention has taken the events of that time. The others follow in their order, as far as they are kept.
  * Only what is synced is shown. Who holds a message now is not among it, see `model/life.py`.
  * The walk is one of the bulk readers': it has their threads, and rests every `REST_EVENTS`.

Measured, with 10 M events in 100,000 blocks behind the message: 0.25 s where headers alone tell that they are
about others, 1 s where every block has to be looked into (2.3 s without numpy).

How it fails: a walk of more than `EVENTS_MAX` events, or one that finds more than `FOUND_MAX` (of a message
that goes back into its queue again and again), is the problem `unavailable`, which says what to use instead.
Blocks that are damaged are left out, and the log of this process tells so.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from typing import Final

from penstock.http.problems import Problem
from penstock.http.reading.looking import Fields, Seen, iso_time
from penstock.http.reading.pool import ReaderPool
from penstock.log.block import KIND_MESSAGES, BodyReader
from penstock.log.read_block import Block
from penstock.log.reader import LogReader
from penstock.model.life import Event, Reason

EVENTS_MAX: Final = 50_000_000
FOUND_MAX: Final = 100_000
"""Each of these is 700 bytes here, and 150 in the answer."""

REST_EVENTS: Final = 1_000_000
_ENDINGS: Final = frozenset({Event.ACKED, Event.REJECTED, Event.EXPIRED, Event.WITHDRAWN})

Histories = dict[int, list[Fields]]
"""Events by the offset of their message, first first."""


async def histories_of(pool: ReaderPool, queue: str, messages: Sequence[Seen]) -> Histories:
    """What has happened to each of some messages, which are given in the order of their offsets."""
    histories: Histories = {}
    if messages:
        stream = pool.stream(walk_events, queue, messages)
        try:
            async for found in stream:
                histories = found or histories
        finally:
            await stream.aclose()
    return histories


def walk_events(reader: LogReader, queue: str, messages: Sequence[Seen]) -> Iterator[Histories | None]:
    """None at every rest, and at last what was found. For a thread."""
    walk = _Walk(messages)
    known = reader.queue(queue)
    start = end = messages[0].event
    if known is not None:
        start, end = max(start, known.event_start), known.event_end
    limit = start + EVENTS_MAX
    while walk.open and start < end:
        if start >= limit:
            raise _too_many(queue, messages[0], f"{EVENTS_MAX} events have happened")
        stop = min(start + REST_EVENTS, end)
        about = (walk.open[0], walk.open[-1] + 1)
        for block in reader.event_blocks(queue, start, stop, fail_on_loss=False, about=about):
            walk.take(block)
            if walk.count > FOUND_MAX:
                raise _too_many(queue, messages[0], f"{FOUND_MAX} events have happened to what is looked at")
            if not walk.open:
                break
        start = stop
        yield None
    yield walk.found


def _too_many(queue: str, first: Seen, what: str) -> Problem:
    return Problem(
        "unavailable",
        f"queue {queue!r}: more than {what} since offset {first.offset} came; "
        f"read …/log?view=events&start={first.event} instead",
    )


class _Walk:
    """The messages whose events are looked for, and what was found."""

    def __init__(self, messages: Sequence[Seen]) -> None:
        self.open = [message.offset for message in messages]  # those that may have more events, in order
        self.found: Histories = {
            message.offset: [_event_fields(Event.ACCEPTED, message.time_us)] for message in messages
        }
        self.count = 0  # of events that were found
        self._hits = _hits_of(self.open)

    def take(self, block: Block) -> None:
        """The events of a block that are about messages which are still open."""
        header = block.header
        if header.kind == KIND_MESSAGES:
            return
        reader, count = BodyReader(block.body), header.count
        firsts, lengths = reader.raw(8 * count).cast("q"), reader.raw(8 * count).cast("q")
        rows = self._hits(firsts, lengths)
        if not rows:
            return
        dispatched = reader.raw(8 * count).cast("q")
        attempts, consumers = reader.raw(4 * count).cast("i"), reader.raw(4 * count).cast("i")
        events, reasons = reader.raw(count), reader.raw(count)
        names = reader.binary(header.extra)
        ended: set[int] = set()
        for row in rows:
            first, event = firsts[row], Event(events[row])
            # Of a block that the walk rests in, each half is taken once.
            number = sum(lengths[:row]) - first
            for offset in _within(self.open, first, first + lengths[row]):
                if not block.lo <= number + offset < block.hi:
                    continue
                self.count += 1
                self.found[offset].append(
                    _event_fields(
                        event,
                        header.time_us,
                        Reason(reasons[row]),
                        names[consumers[row]].decode(),
                        attempts[row],
                        dispatched[row],
                    )
                )
                if event in _ENDINGS:
                    ended.add(offset)
        if ended:
            self.open = [offset for offset in self.open if offset not in ended]
            self._hits = _hits_of(self.open)


def _event_fields(
    event: Event,
    time_us: int,
    reason: Reason = Reason.NONE,
    consumer: str = "",
    attempt: int = 0,
    dispatched_us: int = 0,
) -> Fields:
    return {
        "event": event.name.lower(),
        "time": iso_time(time_us),
        "reason": reason.label or None,
        "consumer": consumer or None,
        "attempt": attempt,
        "dispatched": iso_time(dispatched_us) if dispatched_us > 0 else None,
    }


def _within(offsets: Sequence[int], first: int, end: int) -> Sequence[int]:
    return offsets[bisect_left(offsets, first) : bisect_left(offsets, end)]


# --- which runs of a block are about some offsets --------------------------------------------------

Hits = Callable[[memoryview, memoryview], list[int]]
"""The rows whose runs (first offsets, lengths) have one of the offsets that this was made for."""


def _hits_of(offsets: Sequence[int]) -> Hits:
    """The fastest way that there is here: runs are many."""
    try:
        return numpy_hits(offsets)
    except ImportError:
        return plain_hits(offsets)


def plain_hits(offsets: Sequence[int]) -> Hits:
    def hits(firsts: memoryview, lengths: memoryview) -> list[int]:
        return [
            row
            for row, (first, length) in enumerate(zip(firsts, lengths, strict=True))
            if _within(offsets, first, first + length)
        ]

    return hits


def numpy_hits(offsets: Sequence[int]) -> Hits:
    import numpy as np

    wanted = np.array(offsets)

    def hits(firsts: memoryview, lengths: memoryview) -> list[int]:
        first = np.frombuffer(firsts, np.int64)
        before = np.searchsorted(wanted, first)
        behind = np.searchsorted(wanted, first + np.frombuffer(lengths, np.int64))
        rows: list[int] = np.flatnonzero(before < behind).tolist()
        return rows

    return hits
