"""Archiver: turns what is synced of a log into two Delta tables, a commit at a time, at its own pace.

    lane     a view of the log and its table: how far each queue is archived
    slice    what one commit takes: some queues, of each the rows behind what is archived, at most so many
    gap      offsets that are not in the log (any more) when it is their turn: told, and passed over
    refused  a queue whose table is not that of its log: nothing is archived of it until somebody decides

Every `seconds` a slice is taken of the queues that have waited longest, `QUEUES_MAX` of them at most: however
many queues there are, so many files come and no more. A queue with `rows` waiting is taken at once.

Rules that always hold:
  * What is taken goes by the state of the table that the commit is made on: behind the last row that is
    there. Killed at any moment, or beside another archiver of the same log, each row is in the table once.
  * The positions that are told (`Told.held`) are those of rows that are in the table, and safe.
  * In memory are a row group and an index of the log's segments, however long the backlog.
  * It is busy for half of the time at most.

How it fails: `LakeError` and `LogError`, and the next turn begins anew.
"""

import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping
from datetime import UTC, datetime
from itertools import pairwise
from typing import Any, Final, NamedTuple

import numpy as np
import pyarrow as pa

from penstock.lake.table import FILE_BYTES, VIEWS, Span, Table, Written, fits, moment
from penstock.log.arrow import events_batches, messages_batches
from penstock.log.errors import QueueDeleted
from penstock.log.reader import LogReader, ReaderQueue
from penstock.model.rights import matcher

QUEUES_MAX: Final = 100
SLICE_BYTES: Final = 256 << 20
COMPACT_FILES: Final = 60
"""So many small files of a queue's day become one; when the day is over, two are enough."""

COMPACT_TURNS: Final = 4
"""Of these at most, between two commits."""

ALONE_SECONDS: Final = 600.0
"""So long nothing is compacted by who has begun, or has seen somebody else archive the same log: that one may
be compacting still, as where a leader was deposed and does not know it. Who was overtaken does not begin to:
it comes right behind a commit of one's own, which has a turn."""

UNSYNCED_MAX: Final = 10
"""So many commits are synced by who begins: each archiver that was killed has left one at most."""

VACUUM_SECONDS: Final = 86_400
TOO_LONG: Final = (
    "its name is too long for the name of a folder; it is not archived, and nothing is kept for it"
)
GAPS_MAX: Final = 100
DAY_US: Final = 86_400 * 1_000_000
MOMENT_US: Final = 1000
"""Some who compact a table keep times of its statistics to the millisecond."""

log = logging.getLogger("penstock.lake")


class Plan(NamedTuple):
    """The settings of `[archive]`."""

    path: str
    queues: tuple[str, ...] = ("*",)
    seconds: int = 60
    rows: int = 1_000_000


Key = tuple[str, str]  # a queue's name, and its identity: which of all queues that ever had this name


class Place(NamedTuple):
    """How far a queue is archived."""

    next: int
    last_us: int = 0  # when the latest row of the file before that came; 0: there is none


class Lane:
    """A view and its table."""

    def __init__(self, table: Table, reader: LogReader, plan: Plan) -> None:
        self.table = table
        self.refused: dict[str, str] = {}
        self.gaps: list[str] = []
        self.rows = 0  # that were archived in this life
        self.last_us = 0  # of the last commit
        self._reader = reader
        self._plan = plan
        self._turn = -1  # of the log, as of which the places are known
        self._version = -1  # of the table, likewise
        self._places: dict[Key, Place] = {}
        self._identities: dict[str, str] = {}  # of the queues that were there at the last look
        self._checked: set[Key] = set()
        self._waits_since: dict[str, float] = {}
        self._small: dict[tuple[str, str, str], int] = {}  # files of this log, by queue, day and life
        self._others: dict[Key, list[Span]] = {}  # what there is of other logs, in order
        self._next_at = 0.0
        self._is_another_there = False  # who has archived the same log, and may go on with it
        self._alone_at = float("-inf")  # nobody is, from then on

    @property
    def _events(self) -> bool:
        return self.table.view == "events"

    def begin(self) -> None:
        """As the table is now."""
        self.table.open(make=True)
        self._turn = -1
        self.follow()

    def look(self, queues: Mapping[str, ReaderQueue], began: Mapping[Key, ReaderQueue]) -> dict[str, int]:
        """The places of queues that are new here, or have moved without a commit. They `began` to be held
        there."""
        moved = {}
        for name, queue in queues.items():
            key = name, self._reader.identity(name)
            start = queue.event_start if self._events else queue.offset_start
            place = self._places.setdefault(
                key, Place(began[key].event_start if self._events else began[key].offset_start)
            )
            if key not in self._checked:
                self._check(key, queue, place)
            if name in self.refused:
                continue  # The table has other rows: what the log has is kept, for whoever decides.
            if self._identities.get(name) != key[1]:
                self._identities[name] = key[1]
                moved[name] = place.next
            if place.next < start:
                self.gap(name, place.next, start)
                self._places[key] = Place(start)
                moved[name] = start
        for gone in (self._identities.keys() | self.refused.keys()) - queues.keys():
            self._identities.pop(gone, None)
            self.refused.pop(gone, None)
        return moved

    def follow(self) -> bool:
        """Look at the table; whether somebody else has changed it since the last time."""
        self.table.refresh()
        turn, version = self.table.turn(self._reader.log), self.table.delta.version()
        if (turn, version) == (self._turn, self._version):
            return False
        self._is_another_there |= 0 < turn != self._turn
        # Whoever has committed that may have been killed before it was synced, and retention goes by it.
        self.table.sync(self._version if self._version >= 0 else version - UNSYNCED_MAX)
        spans = self.table.spans()
        self._places, self._small, self._others = {}, {}, {}
        for span in spans:
            key = span.queue, span.identity
            is_ours = span.identity.startswith(self._reader.log)
            if not is_ours:
                self._others.setdefault(key, []).append(span)
            if key not in self._places or self._places[key].next < span.end:
                self._places[key] = Place(span.end, span.last_us)
            if is_ours and span.size < FILE_BYTES // 2:
                self._count(span)
        self._checked.clear()
        self._identities.clear()
        self._turn, self._version = turn, version
        return True

    def _count(self, span: Span) -> None:
        part = span.queue, span.day, span.identity
        self._small[part] = self._small.get(part, 0) + 1

    def _check(self, key: Key, queue: ReaderQueue, place: Place) -> None:
        """Whether what was archived last is what the log has there: a log that was put back from a copy
        gives offsets once more, to other messages, which are later than all that was archived before."""
        name, last = key[0], place.next - 1
        end = queue.event_end if self._events else queue.offset_end
        self.refused.pop(name, None)
        why = ""
        if last >= end:
            why = f"the table is ahead: it has {self.table.counter} {last}, and the log ends before {end}"
        elif not place.last_us:
            why = self._is_restored(key, queue)
        elif last >= (queue.event_start if self._events else queue.offset_start):
            time_us = self._time_us(name, last)
            if time_us is not None and time_us - place.last_us >= MOMENT_US:
                stored, there = moment(time_us), moment(place.last_us)
                why = f"{self.table.counter} {last} is of {there} in the table and of {stored} in the log"
        if why:
            self.refused[name] = (
                f"{why}. Was the log put back from a copy, or restored? Archive into another path, or delete "
                "the queue and make it again"
            )
        else:
            self._checked.add(key)

    def _time_us(self, name: str, number: int) -> int | None:
        """When it came; None: it is damaged by now, and nobody can tell."""
        look = self._reader.event_blocks if self._events else self._reader.messages
        block = next(look(name, number, number + 1, fail_on_loss=False), None)
        return None if block is None else block.header.time_us

    def _is_restored(self, key: Key, queue: ReaderQueue) -> str:
        """Why nothing is archived of a queue that is new to the table: its log was restored from a backup. It
        is another log since, and what it had before is in the table under the number that it had then."""
        name, identity = key
        start, end = (
            (queue.event_start, queue.event_end) if self._events else (queue.offset_start, queue.offset_end)
        )
        digits = len(self._reader.log)
        for (other, life), spans in self._others.items():
            if other != name or life[digits:] != identity[digits:]:
                continue
            span = next((it for it in spans if it.end > start), None)
            row = None if span is None else self.table.row_from(span, start)
            if row is not None and row[0] < end and self._time_us(name, row[0]) == row[1]:
                return f"{self.table.counter} {row[0]} is in the table already, of log {life[:digits]}"
        return ""

    def gap(self, queue: str, first: int, end: int) -> None:
        what = f"queue {queue!r}: {self.table.counter}s {first} to {end - 1}"
        text = f"{what} are not in the log, nor in the table"
        if text not in self.gaps:
            log.warning("%s: %s", self.table.uri, text)
            self.gaps = [*self.gaps, text][-GAPS_MAX:]

    # --- what is next ------------------------------------------------------------------------------

    def waiting(self, queues: Mapping[str, ReaderQueue]) -> dict[str, int]:
        """How many rows each queue has that are not archived."""
        found = {}
        for name, identity in self._identities.items():
            queue = queues.get(name)
            if queue is not None:
                end = queue.event_end if self._events else queue.offset_end
                found[name] = end - self._places[name, identity].next
        return {name: count for name, count in found.items() if count > 0}

    def picked(self, waiting: Mapping[str, int], now: float) -> list[str]:
        """Whose turn it is."""
        since = {name: self._waits_since.get(name, now) for name in waiting}
        self._waits_since = since
        full = [name for name, count in waiting.items() if count >= self._plan.rows]
        if now < self._next_at:
            return full[:QUEUES_MAX]
        oldest = sorted((name for name in waiting if name not in full), key=lambda name: since[name])
        return (full + oldest)[:QUEUES_MAX]

    # --- a commit ----------------------------------------------------------------------------------

    def archive(self, names: list[str], queues: Mapping[str, ReaderQueue], now: float) -> dict[str, int]:
        """A slice of these queues, as one commit; where they are now."""
        rows, size = self._plan.rows, SLICE_BYTES
        files: list[Written] = []
        places: dict[Key, Place] = {}
        for name in names:
            if rows <= 0 or size <= 0:
                break
            key = name, self._identities[name]
            place = self._places[key]
            end = queues[name].event_end if self._events else queues[name].offset_end
            taken = _Slice(self, key, place.next, min(end, place.next + rows), size)
            try:
                its = list(taken.files())
            except QueueDeleted:
                continue
            files += its
            rows -= taken.rows
            size -= taken.size
            places[key] = Place(taken.at, its[-1].span.last_us if its else place.last_us)
        if files:
            self.table.commit(files, self._reader.log, self._turn + 1)
            self._turn += 1
            self._version += 1
            self.last_us = time.time_ns() // 1000
        self._next_at = now + self._plan.seconds
        for written in files:
            self._count(written.span)
            self.rows += written.span.rows
        self._places |= places
        for name, _ in places:
            self._waits_since.pop(name, None)
        return {name: place.next for (name, _), place in places.items()}

    def batches(self, queue: str, start: int, end: int) -> Iterator[pa.RecordBatch]:
        make = events_batches if self._events else messages_batches
        # What is damaged is passed over: the log says where, and the gap is told here.
        return make(self._reader, queue, start, end, columns=self.table.columns, fail_on_loss=False)

    # --- housekeeping ------------------------------------------------------------------------------

    def tidy(self, now: float) -> None:
        """Make fewer files of many."""
        if self._is_another_there:
            self._is_another_there, self._alone_at = False, now + ALONE_SECONDS
        if now < self._alone_at:
            return
        today = datetime.now(UTC).date().isoformat()
        ripe = [
            part for part, count in self._small.items() if count >= (COMPACT_FILES if part[1] >= today else 2)
        ]
        for part in sorted(ripe, key=lambda part: -self._small[part])[:COMPACT_TURNS]:
            self._version += self.table.compact(*part)
            self._small[part] = 1


class _Slice:
    """Rows of one queue on their way into files, a file for each day."""

    def __init__(self, lane: Lane, key: Key, start: int, end: int, bytes_max: int) -> None:
        self.rows = 0
        self.size = 0
        self.at = start
        self._lane = lane
        self._queue, self._identity = key
        self._end = end
        self._bytes_max = bytes_max
        self._days = self._by_day(lane.batches(self._queue, start, end))
        self._ahead: tuple[int, pa.RecordBatch] | None = None  # what comes next, and its day

    def files(self) -> Iterator[Written]:
        self._ahead = next(self._days, None)
        while self._ahead is not None:
            day = self._ahead[0]
            text = datetime.fromtimestamp(day * 86_400, UTC).date().isoformat()
            yield self._lane.table.write(self._queue, self._identity, text, self._of(day))
        if self.size < self._bytes_max and self.at < self._end:
            self._lane.gap(self._queue, self.at, self._end)
            self.at = self._end

    def _of(self, day: int) -> Iterator[pa.RecordBatch]:
        while self._ahead is not None and self._ahead[0] == day:
            yield self._ahead[1]
            self._ahead = next(self._days, None)

    def _by_day(self, batches: Iterator[pa.RecordBatch]) -> Iterator[tuple[int, pa.RecordBatch]]:
        for batch in batches:
            numbers = batch.column(self._lane.table.counter).to_numpy()
            for row in np.flatnonzero(np.diff(numbers, prepend=self.at - 1) != 1):
                self._lane.gap(self._queue, int(numbers[row - 1]) + 1 if row else self.at, int(numbers[row]))
            self.at = int(numbers[-1]) + 1
            self.rows += batch.num_rows
            self.size += batch.nbytes
            days = batch.column("timestamp").cast(pa.int64()).to_numpy() // DAY_US
            bounds = [0, *np.flatnonzero(np.diff(days)) + 1, batch.num_rows]
            for first, stop in pairwise(map(int, bounds)):
                yield int(days[first]), batch.slice(first, stop - first)
            if self.size >= self._bytes_max:
                return


class Told(NamedTuple):
    """What whoever started an archiver is told."""

    held: Mapping[str, Mapping[str, int]]  # by view: queues, and where they are archived up to
    state: Mapping[str, Any]


class Archiver:
    """Both lanes of a log."""

    def __init__(self, data: str, plan: Plan, tell: Callable[[Told], None], *, vacuums: bool = True) -> None:
        """`vacuums`: it removes what is no part of the tables any more, of whatever log."""
        self._plan = plan
        self._tell = tell
        self._wanted = [matcher(pattern) for pattern in plan.queues]
        self._reader = LogReader(data)
        self._too_long: dict[str, str] = {}
        self._known: dict[Key, ReaderQueue] | None = None  # as they were when they began to be held
        self._lanes: dict[str, Lane] = {}  # until the tables are there, none
        self._is_open = False
        self._vacuum_at = time.monotonic() + 3600 if vacuums else math.inf

    def close(self) -> None:
        self._reader.close()

    def queues(self) -> dict[str, ReaderQueue]:
        self._reader.refresh()
        named = {
            name: it
            for name, it in self._reader.queues().items()
            if any(wanted(name) for wanted in self._wanted)
        }
        self._too_long = {name: TOO_LONG for name in named if not fits(name)}
        return {name: it for name, it in named.items() if name not in self._too_long}

    def turn(self, now: float) -> bool:
        """One look at the log, and a commit for each table whose time has come. Whether there was one."""
        queues = self.queues()
        began = self._hold_new(queues)
        self._open()
        done = []
        for view, lane in self._lanes.items():
            refused = dict(lane.refused)
            held = lane.look(queues, began)
            picked = lane.picked(lane.waiting(queues), now)
            if picked and lane.follow():
                held |= lane.look(queues, began)
                picked = lane.picked(lane.waiting(queues), now)
            if picked:
                held |= lane.archive(picked, queues, now)
                done.append(lane)
            if held or refused != lane.refused:
                self._say({view: held}, queues)
        self._reader.rest()  # A map would keep the room of a file that retention has removed.
        for lane in done:
            lane.tidy(now)
        if now >= self._vacuum_at:
            self._vacuum_at = now + VACUUM_SECONDS
            for lane in self._lanes.values():
                lane.table.vacuum()
        return bool(done)

    def _hold_new(self, queues: Mapping[str, ReaderQueue]) -> dict[Key, ReaderQueue]:
        """Before anything else, and whether there is a table or not: nothing of a new queue may be lost. What
        retention has taken of it before that is a gap: all that is there at the first look was held before,
        or is older than its table."""
        known, began = self._known or {}, dict[Key, ReaderQueue]()
        new: dict[str, tuple[int, int]] = {}
        for name, queue in queues.items():
            key = name, self._reader.identity(name)
            if key not in known:
                new[name] = queue.offset_start, queue.event_start
                queue = queue if self._known is None else queue._replace(offset_start=0, event_start=0)
            began[key] = known.get(key, queue)
        if new or self._known is None:
            held = {view: {name: it[at] for name, it in new.items()} for at, view in enumerate(VIEWS)}
            self._say(held, queues)
        self._known = began
        return began

    def _open(self) -> None:
        if not self._is_open:
            lanes = self._lanes or {
                view: Lane(Table(self._plan.path, view), self._reader, self._plan) for view in VIEWS
            }
            for lane in lanes.values():
                lane.begin()
            self._lanes, self._is_open = lanes, True

    def begin_again(self) -> None:
        """Something has failed: the next turn opens the tables anew."""
        self._is_open = False

    def _say(self, held: Mapping[str, Mapping[str, int]], queues: Mapping[str, ReaderQueue]) -> None:
        tables = {
            view: {
                "rows": lane.rows,
                "version": lane.table.delta.version(),
                "committed_us": lane.last_us,
                "waiting": sum(lane.waiting(queues).values()),
            }
            for view, lane in self._lanes.items()
        }
        lanes = self._lanes.values()
        refused = self._too_long | {name: why for lane in lanes for name, why in lane.refused.items()}
        gaps = [text for lane in lanes for text in lane.gaps]
        self._tell(Told(held, {"tables": tables, "refused": refused, "gaps": gaps}))
