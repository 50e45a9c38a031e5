"""Search: the messages of some queues that are in certain states, between two places, and fit a condition.

The first process says how messages stand, a stretch at a time (`looking.py`); what they are is read from the
files of the log, judged, and handed out as it is found:

    search = Search(wanted, asking, …)
    for items in search.walk(reader): ...      Found and Missing, in the order of offsets, or newest first
    search.ended                               whether that was all, why not, and where to go on

Rules that always hold:
  * A message is found once, as it stood when its stretch was asked for; stretches are asked for when it is
    their turn, and are short, so that this was a moment ago. What comes behind the end that a queue had when
    its turn began is not looked at: a search ends.
  * Nothing is passed over in silence: what retention has removed since the turn of its queue began, what
    cannot be read, and a queue that was deleted meanwhile is `Missing`, and then the search is not complete.
  * Memory is that of one stretch: `STRETCH` messages, of which `KEPT_BYTES` are kept where the newest come
    first. After `REST_SECONDS` of work it lets others have its thread.

How it fails: `TooLong` where the condition takes too long for one message. What the reader and the first
process raise is raised here, but for what is said of one queue alone.
"""

import time
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Final, NamedTuple, Protocol

from penstock.http import kinds
from penstock.http.link import CallRefused
from penstock.http.reading.letters import Range, Ranges, Run, by_payload, parted, rows_of, within
from penstock.http.reading.looking import GONE, STATE_WORDS, STATES, Extent, Runs, extent_of, payloads_at
from penstock.http.where.condition import SECONDS_MAX, Condition, Row, TooLong
from penstock.log.errors import LogDamaged, LogRefused, QueueDeleted
from penstock.log.read_block import Block
from penstock.log.reader import LogReader, OffsetsMissing
from penstock.model.batch import RETRIES_NONE
from penstock.model.life import Reason, State

STRETCH: Final = 10_000
"""Messages that are judged by one answer of the first process."""

WINDOW: Final = 4096
WINDOW_MAX: Final = 1 << 20
"""Offsets that are asked for at a time where the newest come first: many, where few of them are meant."""

KEPT_BYTES: Final = 8 << 20
"""Payload of what is found before it is turned round, and handed out newest first."""

PART_BYTES: Final = 256 << 10
"""Payload that is handed out at a time, and the message that goes beyond it."""

PART_ITEMS: Final = 1000
REST_SECONDS: Final = 0.2
REFRESH_SECONDS: Final = 1.0

_OF_RUNS: Final = frozenset({"queue", "state", "reason", "attempts", "died", "consumer"})
_ALL: Final = frozenset(Row._fields)
_EMPTY: Final = Row("", 0, "", None, None, None, "", 0, None, None, None, b"", 0)


class Place(NamedTuple):
    """Where in a log to begin, or to stop: an offset, or a moment."""

    offset: int | None = None
    time_us: int | None = None


class Cursor(NamedTuple):
    """Where to go on: behind the queues before this one, in it at this offset (newest first: before it)."""

    queue: str
    identity: str
    offset: int
    newest: bool


class Wanted(NamedTuple):
    """What is looked for."""

    queues: Sequence[str]  # in the order of their names
    condition: Condition | None = None
    states: frozenset[str] = frozenset(STATES)
    start: Place = Place()
    end: Place = Place()  # exclusive
    limit: int | None = None
    newest: bool = False
    after: Cursor | None = None
    ranges: Ranges | None = None  # only these offsets; merged. Of one queue, oldest first


class Spans(NamedTuple):
    """Messages that fit, between the last such and `next`: those that are free, and those that somebody
    holds."""

    free: Ranges
    held: Ranges
    next: int


class Found(NamedTuple):
    row: Row
    why: str | None  # what was said when it was rejected
    repaired: bool

    @property
    def bytes(self) -> int:
        return self.row.value_bytes


class Missing(NamedTuple):
    """Messages that should have been looked at, and could not be."""

    queue: str
    first: int
    end: int
    why: str  # "retention", "damaged" or "deleted"


Item = Found | Missing


class Ended(NamedTuple):
    complete: bool
    why: str | None = None  # "limit", "time", "missing", "stopping"
    next: Cursor | None = None


class Asking(Protocol):
    """Questions to the first process, from a thread."""

    def states(self, queue: str, start: int, end: int, identity: str, only: str | None) -> Runs: ...


class _Stop(Exception):
    """The search ends here, in the middle of a queue."""

    def __init__(self, why: str, offset: int) -> None:
        super().__init__(why)
        self.why = why
        self.offset = offset


class Search:
    """One search. `check` raises where a queue may not be looked at any more; `stops` says that nobody is
    served any longer."""

    def __init__(
        self,
        wanted: Wanted,
        asking: Asking,
        *,
        now_us: int,
        deadline: float = float("inf"),
        check: Callable[[str], None] = lambda _queue: None,
        stops: Callable[[], bool] = lambda: False,
    ) -> None:
        self._wanted = wanted
        self._asking = asking
        self._now_us = now_us
        self._deadline = deadline
        self._check = check
        self._stops = stops
        self._left = wanted.limit
        living = wanted.states - {GONE}
        self._only = next(iter(living)) if len(living) == 1 and GONE not in wanted.states else None
        condition = wanted.condition
        self._by_runs = condition is not None and condition.columns <= _OF_RUNS
        self._rest = 0.0
        self._refreshed = 0.0
        self.queue = ""
        self.offset = 0  # what is looked at next
        self.searched = 0  # messages that were looked at, or passed over because of how they stand
        self.total = 0  # about so many there are
        self.found = 0
        self.missing = 0
        self.ended: Ended | None = None

    def walk(self, reader: LogReader) -> Iterator[list[Item]]:
        """What is found, as it is found; an empty list where it only rests. For a thread."""
        after = self._wanted.after
        queues = [name for name in self._wanted.queues if after is None or name >= after.queue]
        for name in queues:
            known = reader.queue(name)
            self.total += known.offset_end - known.offset_start if known is not None else 0
        self._refreshed = time.monotonic()
        self._rest_later()
        if after is not None and after.identity and after.queue not in queues:
            yield [self._lost(Missing(after.queue, after.offset, after.offset, "deleted"))]
        for at, name in enumerate(queues):
            self._follow(reader)
            mine = after if after is not None and after.queue == name else None
            extent = extent_of(reader, name)
            if extent is None:
                continue  # Nothing of it is synced, or it was deleted since it was named.
            if mine is not None and mine.identity not in ("", extent.identity):
                if len(queues) == 1:
                    raise QueueDeleted(name)
                yield [self._lost(Missing(name, mine.offset, mine.offset, "deleted"))]
                mine = None
            try:
                yield from self._queue(reader, name, extent, mine)
            except _Stop as stop:
                self.ended = Ended(
                    False, stop.why, Cursor(name, extent.identity, stop.offset, self._wanted.newest)
                )
                return
            except (QueueDeleted, CallRefused, LogRefused) as error:
                if isinstance(error, CallRefused) and error.kind not in ("deleted", "no-queue"):
                    raise
                yield [self._lost(Missing(name, self.offset, extent.offset_end, "deleted"))]
            if self._left == 0 and at + 1 < len(queues):
                self.ended = Ended(False, "limit", self._beginning(reader, queues[at + 1]))
                return
        self.total = max(self.total, self.searched)
        self.ended = Ended(False, "missing") if self.missing else Ended(True)

    def _beginning(self, reader: LogReader, name: str) -> Cursor:
        extent, newest = extent_of(reader, name), self._wanted.newest
        if extent is None:
            return Cursor(name, "", kinds.OFFSET_MAX if newest else 0, newest)
        return Cursor(name, extent.identity, extent.offset_end if newest else 0, newest)

    def _follow(self, reader: LogReader) -> None:
        if time.monotonic() > self._refreshed + REFRESH_SECONDS:
            reader.refresh()
            self._refreshed = time.monotonic()

    def _lost(self, missing: Missing) -> Missing:
        self.missing += max(missing.end - missing.first, 1)
        return missing

    def spans(self, reader: LogReader) -> Iterator[Spans | Missing]:
        """What fits of one queue, oldest first, without the messages themselves. For a thread."""
        (name,) = self._wanted.queues
        extent = extent_of(reader, name)
        if extent is None:
            return
        at, hi = self._bounds(reader, name, extent)
        self._rest_later()
        condition = self._wanted.condition if not self._by_runs else None
        while at < hi:
            self._go_on(name, at)
            runs = self._asking.states(name, at, hi, extent.identity, self._only)
            pieces, others = parted(self._chosen(name, runs), STRETCH)
            spans = Spans([], [], 0)
            if condition is None:
                for run in pieces:
                    _add(spans, run.state, run.consumer, run.first, run.end)
            else:
                for item in self._judged(reader, name, extent, runs, pieces):
                    if isinstance(item, Missing):
                        yield item
                    elif item is None:
                        yield spans._replace(next=self.offset)
                        spans = Spans([], [], 0)
                    else:
                        row = item.row
                        _add(spans, row.state, row.consumer, row.offset, row.offset + 1)
            at = self._skipped(others[0].first if others else runs.offset_end, hi)
            yield spans._replace(next=at)

    def _skipped(self, at: int, hi: int) -> int:
        """The first offset from there on that is asked for."""
        ranges = self._wanted.ranges
        if ranges is None:
            return at
        row = bisect_right(ranges, at, key=lambda it: it.end)
        return max(at, ranges[row].first) if row < len(ranges) else hi

    # --- one queue -----------------------------------------------------------------------------------

    def _queue(
        self, reader: LogReader, name: str, extent: Extent, after: Cursor | None
    ) -> Iterator[list[Item]]:
        self.queue = name
        lo, hi = self._bounds(reader, name, extent)
        if after is not None:
            lo, hi = (lo, min(hi, after.offset)) if self._wanted.newest else (max(lo, after.offset), hi)
        span = extent.offset_end - extent.offset_start
        self.total += max(hi - max(lo, extent.offset_start), 0) - span
        self.offset = hi if self._wanted.newest else lo
        if lo < hi:
            walk = self._backward if self._wanted.newest else self._forward
            yield from walk(reader, name, extent, lo, hi)

    def _bounds(self, reader: LogReader, name: str, extent: Extent) -> tuple[int, int]:
        places = []
        for place, otherwise in ((self._wanted.start, 0), (self._wanted.end, extent.offset_end)):
            offset = place.offset if place.offset is not None else otherwise
            if place.time_us is not None:
                offset = reader.offset_at(name, place.time_us, living=True)
            places.append(min(offset, extent.offset_end))
        lo, hi = places
        if self._wanted.ranges is not None:
            hi = min(hi, self._wanted.ranges[-1].end) if self._wanted.ranges else lo
            lo = self._skipped(lo, hi)
        kept = reader.kept_from(name, lo) if lo < hi else None
        return (max(lo, kept) if kept is not None else hi), hi

    def _forward(
        self, reader: LogReader, name: str, extent: Extent, lo: int, hi: int
    ) -> Iterator[list[Item]]:
        at = lo
        items: list[Item] = []
        size = 0
        while at < hi:
            self._go_on(name, at)
            runs = self._asking.states(name, at, hi, extent.identity, self._only)
            pieces, others = parted(self._chosen(name, runs), STRETCH)
            stop = others[0].first if others else runs.offset_end
            for item in self._judged(reader, name, extent, runs, pieces):
                if item is not None:
                    items.append(item)
                    size += item.bytes if isinstance(item, Found) else 0
                if items and (item is None or size >= PART_BYTES or len(items) >= PART_ITEMS):
                    yield items
                    items, size = [], 0
                elif item is None:
                    yield []
                if item is None and time.monotonic() > self._deadline:
                    self.searched += self._passed(extent, pieces, at, self.offset)
                    raise _Stop("time", self.offset)
                if isinstance(item, Found) and self._counted():
                    if items:
                        yield items
                    behind = item.row.offset + 1
                    self.searched += self._passed(extent, pieces, at, behind)
                    if behind < hi:
                        raise _Stop("limit", behind)
                    return
            self.searched += self._passed(extent, pieces, at, stop)
            at = self.offset = self._skipped(stop, hi)
            if items:
                yield items
                items, size = [], 0

    def _backward(
        self, reader: LogReader, name: str, extent: Extent, lo: int, hi: int
    ) -> Iterator[list[Item]]:
        top, window = hi, WINDOW
        while top > lo:
            self._go_on(name, top)
            bottom = max(lo, top - window)
            runs = self._asking.states(name, bottom, top, extent.identity, self._only)
            if runs.offset_end < top:
                window = max((top - bottom) // 2, 1)
                continue
            pieces, cut = _last(self._chosen(name, runs), STRETCH)
            bottom = bottom if cut is None else cut
            kept: deque[Item] = deque()
            size = 0
            for item in self._judged(reader, name, extent, runs, pieces):
                if item is None:
                    yield []
                    if time.monotonic() > self._deadline:
                        raise _Stop("time", top)
                    continue
                kept.append(item)
                size += item.bytes if isinstance(item, Found) else 0
                while size > KEPT_BYTES and len(kept) > 1:
                    # It is met again: what is behind it comes first.
                    dropped = kept.popleft()
                    if isinstance(dropped, Found):
                        size -= dropped.bytes
                        bottom = dropped.row.offset + 1
                    else:
                        self.missing -= max(dropped.end - dropped.first, 1)
                        bottom = max(bottom, dropped.end)
            part: list[Item] = []
            for item in reversed(kept):
                part.append(item)
                if isinstance(item, Found) and self._counted():
                    yield part
                    self.searched += self._passed(extent, pieces, item.row.offset, top)
                    if item.row.offset > lo:
                        raise _Stop("limit", item.row.offset)
                    return
                if len(part) >= PART_ITEMS:
                    yield part
                    part = []
            else:
                yield part
            self.searched += self._passed(extent, pieces, bottom, top)
            top = self.offset = bottom
            window = min(2 * window, WINDOW_MAX)

    def _go_on(self, name: str, offset: int) -> None:
        """Between two stretches: whether there is to be another."""
        self._check(name)
        if self._stops():
            raise _Stop("stopping", offset)
        if time.monotonic() > self._deadline:
            raise _Stop("time", offset)

    def _counted(self) -> bool:
        """One more is found; whether that was the last that is wanted."""
        self.found += 1
        if self._left is not None:
            self._left -= 1
        return self._left == 0

    @staticmethod
    def _passed(extent: Extent, pieces: Sequence[Run], first: int, end: int) -> int:
        """Messages between two offsets. Before the log is complete, only what lives is in it."""
        start = min(max(first, extent.offset_start), end)
        before = sum(
            max(min(run.end, start) - max(run.first, first), 0) for run in pieces if run.first < start
        )
        return end - start + before

    # --- a stretch -----------------------------------------------------------------------------------

    def _chosen(self, name: str, runs: Runs) -> list[Run]:
        """What of a stretch is to be looked at, in order."""
        states, column, found = self._wanted.states, runs.columns, list[Run]()
        at = runs.offset_start
        gone = Run(0, 0, None, 0, None, RETRIES_NONE, Reason.NONE, None, runs.steps, GONE)
        for row in range(runs.count):
            first, end = column["first"][row], column["end"][row]
            if GONE in states and at < first:
                found.append(gone._replace(first=at, end=first))
            at = end
            state = State(column["state"][row])
            word, consumer = STATE_WORDS[state], column["consumer"][row]
            if word not in states:
                continue
            run = Run(
                first,
                end,
                column["time_us"][row] if state is State.DEAD else None,
                column["expires_us"][row],
                column["attempts"][row],
                column["retries"][row],
                Reason(column["reason"][row]),
                None,
                runs.steps,
                word,
                runs.consumers[consumer] if consumer >= 0 else None,
                column["time_us"][row] if state is State.DELAYED else 0,
            )
            found += by_payload(run, runs)
        if GONE in states and at < runs.offset_end:
            found.append(gone._replace(first=at, end=runs.offset_end))
        if self._wanted.ranges is not None:
            found = within(found, self._wanted.ranges)
        return [run for run in found if self._may_fit(name, run)] if self._by_runs else found

    def _may_fit(self, name: str, run: Run) -> bool:
        """Whether a condition that speaks of runs alone is true of this one."""
        assert self._wanted.condition is not None
        row = _EMPTY._replace(
            queue=name,
            state=run.state,
            reason=run.reason.label or None,
            attempts=run.attempts,
            died=run.died_us,
            consumer=run.consumer,
        )
        return self._wanted.condition.matches(row, self._now_us)

    def _judged(
        self, reader: LogReader, name: str, extent: Extent, runs: Runs, pieces: Sequence[Run]
    ) -> Iterator[Item | None]:
        """What of these pieces fits; None where it is time to rest."""
        condition = self._wanted.condition if not self._by_runs else None
        asked = _ALL if condition is None else condition.columns
        identity = extent.identity.encode()
        for it in _blocks(reader, name, pieces, extent.offset_start):
            if isinstance(it, Missing):
                yield self._lost(it)
                continue
            run, block, first, end = it
            if not block.origin.startswith(identity):
                raise QueueDeleted(name)
            if time.monotonic() > self._rest:
                yield None
                self._rest_later()
            if not self._is_in_time(block):
                continue
            for row in self._rows(reader, name, run, block, first, end, asked):
                self.offset = row.offset + 1
                if condition is None:
                    yield Found(row, runs.why_of(row.offset), run.distance is not None)
                elif self._fits(condition, row):
                    # All of it only now: most are not found.
                    at = row.offset
                    for whole in self._rows(reader, name, run, block, at, at + 1, _ALL):
                        yield Found(whole, runs.why_of(at), run.distance is not None)
                if time.monotonic() > self._rest:
                    yield None
                    self._rest_later()

    def _rows(
        self,
        reader: LogReader,
        name: str,
        run: Run,
        block: Block,
        first: int,
        end: int,
        asked: frozenset[str],
    ) -> Iterator[Row]:
        rows = rows_of(name, run, block, first, end, asked, {})
        if run.distance is None or not asked & {"value", "value_bytes"}:
            yield from rows
            return
        payloads = payloads_at(reader, name, range(first + run.distance, end + run.distance))
        for row in rows:
            # One that has been let go of meanwhile is gone, with what it was sent with.
            value = payloads.get(row.offset + run.distance, row.value)
            yield row._replace(value=value, value_bytes=len(value))

    def _is_in_time(self, block: Block) -> bool:
        """A clock that was set back leaves blocks where one would not look for them."""
        start, end, at = self._wanted.start.time_us, self._wanted.end.time_us, block.header.time_us
        return (start is None or start <= at) and (end is None or at < end)

    def _fits(self, condition: Condition, row: Row) -> bool:
        try:
            return condition.matches(row, self._now_us)
        except TooLong:
            raise TooLong(
                f"queue {row.queue!r}: the condition takes more than {SECONDS_MAX:.0f} s for the message at "
                f"offset {row.offset}, which has {len(row.value)} bytes; write it with fewer patterns, or "
                f"leave that message out: offset != {row.offset} and (…)"
            ) from None

    def _rest_later(self) -> None:
        self._rest = time.monotonic() + REST_SECONDS


def _add(spans: Spans, state: str, consumer: str | None, first: int, end: int) -> None:
    ranges = spans.held if state == "held" or consumer is not None else spans.free
    if ranges and ranges[-1].end == first:
        ranges[-1] = Range(ranges[-1].first, end)
    else:
        ranges.append(Range(first, end))


def _last(pieces: list[Run], messages_max: int) -> tuple[list[Run], int | None]:
    """The last so many messages of these, and the offset that they begin at; None: these are all."""
    for at in range(len(pieces) - 1, -1, -1):
        run = pieces[at]
        if run.letters > messages_max:
            middle = run.end - messages_max
            return [run._replace(first=middle), *pieces[at + 1 :]], middle
        messages_max -= run.letters
    return pieces, None


def _blocks(
    reader: LogReader, queue: str, runs: Sequence[Run], complete_from: int
) -> Iterator[tuple[Run, Block, int, int] | Missing]:
    """Which block has which messages of which run: (run, block, first offset, end); and what no block has.

    Before `complete_from`, where the log began to be complete when the search did, gaps are no loss.
    """
    block: Block | None = None
    for run in runs:
        at = run.first
        # Several runs in one block are usual; its checksum is not reckoned up for each of them.
        if block is not None and block.header.first_offset + block.lo <= at < block.offset_end:
            end = min(run.end, block.offset_end)
            yield run, block, at, end
            at = end
        while at < run.end:
            lost, why = at, "retention"
            try:
                for block in reader.messages(queue, at, run.end):
                    base = block.header.first_offset
                    at = base + block.hi
                    yield run, block, base + block.lo, at
                    lost = at
                at = run.end
                continue
            except OffsetsMissing as missing:
                known = reader.queue(queue)
                if known is not None and missing.first >= known.offset_start:
                    why = "damaged"
                at = missing.end
            except LogDamaged:
                after = next(reader.messages(queue, lost, run.end, fail_on_loss=False), None)
                why = "damaged"
                at = max(after.header.first_offset + after.lo, lost + 1) if after is not None else run.end
            block = None
            at = min(at, run.end)
            if max(lost, complete_from) < at:
                yield Missing(queue, max(lost, complete_from), at, why)
