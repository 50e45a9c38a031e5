"""Letters: the dead letters of a queue, run by run, and which of them a condition is true of.

The first process knows which messages are dead, since when and why; what they are and when they came is in
the log, and who had them when they died is among its events. `dead_runs` walks the first in the order of
offsets, `matching` and `walk_deaths` look at the others, and only at what the condition asks for:

    queue, reason, attempts, died             the same for a whole run, which is judged once
    offset, id, protocol, timestamp           the headers of blocks
    expires, retries, value, value_bytes,     their bodies
    headers
    consumer                                  the events since the letters came

Rules that always hold:
  * A dead letter that somebody holds is not one of these.
  * The walk sees every letter that is dead all the time, once; one that comes or goes meanwhile perhaps.
  * A letter that cannot be read (a damaged block, which the log tells) fits no condition that asks for it.
"""

import time
from bisect import bisect_left, bisect_right
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Final, NamedTuple, TypeVar

from penstock.http.link import Link
from penstock.http.reading.looking import Runs, ask_states, late_us, payloads_at
from penstock.http.where.condition import SECONDS_MAX, Condition, Row, TooLong
from penstock.log.block import KIND_MESSAGES
from penstock.log.read_block import Block, Columns
from penstock.log.reader import LogReader
from penstock.log.segment import merged as joined
from penstock.log.views import settlement_runs
from penstock.model.batch import RETRIES_NONE
from penstock.model.ids import id_of
from penstock.model.life import Event, Reason, State
from penstock.model.pending import AS_STORED

RUNS_MAX: Final = 1000
"""Runs that are asked for at a time."""

REST_EVENTS: Final = 1_000_000
REST_SECONDS: Final = 0.2
"""After so much a walk lets others have its thread."""

_OF_RUNS: Final = frozenset({"queue", "reason", "attempts", "died", "state"})
_OF_BODIES: Final = frozenset({"expires", "retries", "value", "value_bytes", "due", "headers"})
_UNKNOWN: Final = Row("", 0, "", 0, None, None, "", 0, 0, None, None, b"", 0)
_NO_COLUMNS: Final = Columns(memoryview(b""), memoryview(b""), None, None)


class Range(NamedTuple):
    """Offsets from `first` to `end`, exclusive."""

    first: int
    end: int


Ranges = list[Range]


class Run(NamedTuple):
    """Messages that share everything but what the log says of them; dead letters, but for a search."""

    first: int
    end: int
    died_us: int | None
    expires_us: int  # AS_STORED: what the message came with; 0: never
    attempts: int | None
    retries: int  # AS_STORED likewise; RETRIES_NONE: it has no such counter
    reason: Reason
    distance: int | None = None  # to their repaired payloads; None: they have their own
    steps: Sequence[Sequence[int]] = ()  # see Runs
    state: str = "dead"
    consumer: str | None = None  # who holds them
    due_us: int = 0  # AS_STORED likewise; 0: they are not delayed

    @property
    def letters(self) -> int:
        return self.end - self.first


_Part = TypeVar("_Part", Range, Run)


def parted(parts: list[_Part], letters_max: int) -> tuple[list[_Part], list[_Part]]:
    """The first so many letters of some runs or ranges, and the others."""
    for at, part in enumerate(parts):
        if part.end - part.first >= letters_max:
            middle = part.first + letters_max
            before, behind = parts[:at], parts[at + 1 :]
            before.append(part._replace(end=middle))
            if middle < part.end:
                behind.insert(0, part._replace(first=middle))
            return before, behind
        letters_max -= part.end - part.first
    return parts, []


def merged(ranges: Ranges, start: int = 0) -> Ranges:
    """The same offsets, those before `start` left out, in the order of offsets and each once."""
    return [Range(*it) for it in joined((max(a, start), b) for a, b in ranges if max(a, start) < b)]


def within(runs: list[Run], ranges: Ranges) -> list[Run]:
    """What of these runs is in the ranges, which are merged. Both are in order."""
    found: list[Run] = []
    at = 0
    for run in runs:
        at = bisect_right(ranges, run.first, at, key=lambda it: it.end)
        behind = bisect_left(ranges, run.end, at, key=lambda it: it.first)
        found += (
            run._replace(first=max(first, run.first), end=min(end, run.end))
            for first, end in ranges[at:behind]
        )
    return found


async def dead_runs(
    link: Link,
    queue: str,
    identity: str | None,
    start: int,
    end: int,
    wants: Callable[[Run], bool],
    letters_min: int,
) -> AsyncIterator[list[Run]]:
    """The dead letters between two offsets that somebody wants, in order; so many at a time at least, or
    all that are left. With an `identity`, of no other queue of that name."""
    found: list[Run] = []
    at, letters = start, 0
    while at < end:
        runs = await ask_states(link, queue, at, end, RUNS_MAX, "dead", identity)
        at = runs.offset_end
        for run in _runs(runs):
            if wants(run):
                found.append(run)
                letters += run.letters
        if letters >= letters_min:
            yield found
            found, letters = [], 0
    if found:
        yield found


def _runs(runs: Runs) -> Iterator[Run]:
    """Those that nobody holds."""
    column = runs.columns
    for row in range(runs.count):
        if column["state"][row] == State.DEAD:
            yield from by_payload(
                Run(
                    column["first"][row],
                    column["end"][row],
                    column["time_us"][row],
                    column["expires_us"][row],
                    column["attempts"][row],
                    column["retries"][row],
                    Reason(column["reason"][row]),
                    steps=runs.steps,
                ),
                runs,
            )


def by_payload(run: Run, runs: Runs) -> Iterator[Run]:
    """A run in parts: those with repaired payloads, and the others."""
    firsts, ends, distances = runs.repairs
    at = run.first
    for row in range(bisect_right(ends, at), len(firsts)):
        first, end = max(firsts[row], at), min(ends[row], run.end)
        if first >= run.end:
            break
        if at < first:
            yield run._replace(first=at, end=first)
        yield run._replace(first=first, end=end, distance=distances[row])
        at = end
    if at < run.end:
        yield run._replace(first=at)


def is_of_runs(condition: Condition) -> bool:
    """Whether runs can be judged as a whole, without the log."""
    return condition.columns <= _OF_RUNS


def matching_runs(queue: str, runs: Iterable[Run], condition: Condition, now_us: int) -> Ranges:
    """The runs that such a condition is true of."""
    found: Ranges = []
    for run in runs:
        row = _UNKNOWN._replace(queue=queue, attempts=run.attempts, reason=run.reason.label, died=run.died_us)
        if condition.matches(row, now_us):
            _add(found, run.first, run.end)
    return found


def matching(
    reader: LogReader,
    queue: str,
    runs: Sequence[Run],
    condition: Condition,
    now_us: int,
    consumers: Mapping[int, str],
) -> Iterator[Ranges]:
    """The letters that any condition is true of. For a thread: it reads files, and rests in between."""
    found: Ranges = []
    rest = time.monotonic() + REST_SECONDS
    asks_bodies = bool(condition.columns & _OF_BODIES)
    for run, block, first, end in _blocks(reader, queue, runs, headers_only=not asks_bodies):
        rows = rows_of(queue, run, block, first, end, condition.columns, consumers)
        if run.distance is not None and asks_bodies:
            rows = _repaired(reader, queue, rows, first, end, run.distance)
        for row in rows:
            try:
                fits = condition.matches(row, now_us)
            except TooLong:
                raise TooLong(
                    f"queue {queue!r}: the condition takes more than {SECONDS_MAX:.0f} s for the letter at "
                    f"offset {row.offset}, which has {len(row.value)} bytes; write it with fewer patterns, "
                    f"or leave that letter out: offset != {row.offset} and (…)"
                ) from None
            if fits:
                _add(found, row.offset, row.offset + 1)
            if time.monotonic() > rest:
                yield found
                found, rest = [], time.monotonic() + REST_SECONDS
    yield found


def rows_of(
    queue: str,
    run: Run,
    block: Block,
    first: int,
    end: int,
    asked: frozenset[str],
    consumers: Mapping[int, str],
) -> Iterator[Row]:
    """The messages of a run in one block, as far as is asked."""
    header, attempts, reason, died_us = block.header, run.attempts, run.reason.label or None, run.died_us
    protocol, time_us, base = block.protocol, header.time_us, header.first_offset
    bounds, payload, expires, retries, due, headers = block.columns() if asked & _OF_BODIES else _NO_COLUMNS
    asks_id = "id" in asked
    expires_us, retries_left, later_us = run.expires_us, run.retries, late_us(run.steps, first)
    state, consumer, due_us = run.state, run.consumer, run.due_us
    for offset in range(first, end):
        i = offset - base
        value = payload[bounds[i] : bounds[i + 1]] if bounds else payload
        if run.expires_us == AS_STORED:
            expires_us = expires[i] if expires is not None else 0
        if run.retries == AS_STORED:
            retries_left = retries[i] if retries is not None else RETRIES_NONE
        if run.due_us == AS_STORED:
            due_us = due[i] if due is not None else 0
        # In the order of its fields, without their names: there are millions of these.
        yield Row(
            queue,
            offset,
            id_of(block.origin, offset).decode() if asks_id else "",
            attempts,
            reason,
            consumer or consumers.get(offset) or None,
            protocol,
            time_us,
            died_us,
            expires_us + later_us if expires_us > 0 else None,
            retries_left if retries_left != RETRIES_NONE else None,
            value,
            len(value),
            state,
            due_us + later_us if due_us > 0 else None,
            headers.at(i) if headers is not None else b"",
        )


def _repaired(
    reader: LogReader, queue: str, rows: Iterator[Row], first: int, end: int, distance: int
) -> Iterator[Row]:
    """The same letters with their repaired payloads, as far as these can be read."""
    payloads = payloads_at(reader, queue, range(first + distance, end + distance))
    for row in rows:
        value = payloads.get(row.offset + distance)
        if value is not None:
            yield row._replace(value=memoryview(value), value_bytes=len(value))


def walk_deaths(reader: LogReader, queue: str, runs: Sequence[Run]) -> Iterator[dict[int, str]]:
    """Who had these letters when they died, by offset; empty for nobody. For a thread, rests in between.

    A letter may have died several times: what comes later counts.
    """
    known = reader.queue(queue)
    first_block = next(_blocks(reader, queue, runs, headers_only=True), None)
    if known is None or first_block is None:
        return
    header, offset = first_block[1].header, first_block[2]
    start = max(header.first_event + offset - header.first_offset, known.event_start)
    about = runs[0].first, runs[-1].end
    ends = [run.end for run in runs]
    for at in range(start, known.event_end, REST_EVENTS):
        found: dict[int, str] = {}
        stop = min(at + REST_EVENTS, known.event_end)
        for block in reader.event_blocks(queue, at, stop, fail_on_loss=False, about=about):
            if block.header.kind == KIND_MESSAGES:
                continue
            for event in settlement_runs(block.header, block.body):
                if event.event is not Event.DEAD:
                    continue
                for run in islice(runs, bisect_right(ends, event.first), None):
                    if run.first >= event.end:
                        break
                    offsets = range(max(run.first, event.first), min(run.end, event.end))
                    found |= dict.fromkeys(offsets, event.consumer)
        yield found


def _blocks(
    reader: LogReader, queue: str, runs: Sequence[Run], *, headers_only: bool
) -> Iterator[tuple[Run, Block, int, int]]:
    """Which block has which letters of which run: (run, block, first offset, end)."""
    block: Block | None = None
    for run in runs:
        at = run.first
        # Several runs in one block are usual; its checksum is not reckoned up for each of them.
        if block is not None and block.header.first_offset + block.lo <= at < block.offset_end:
            end = min(run.end, block.offset_end)
            yield run, block, at, end
            at = end
        if at < run.end:
            for block in reader.messages(queue, at, run.end, fail_on_loss=False, headers_only=headers_only):
                first = block.header.first_offset
                yield run, block, first + block.lo, first + block.hi


def _add(ranges: Ranges, first: int, end: int) -> None:
    if ranges and ranges[-1].end == first:
        ranges[-1] = Range(ranges[-1].first, end)
    else:
        ranges.append(Range(first, end))
