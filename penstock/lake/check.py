"""Check: a table beside the log that it is made of, by offsets and counts.

It goes by what the files of the table say of themselves (their statistics), and reads no row. What it finds
is wrong, or only worth knowing: lives of queues that are over, and what is not archived yet.
"""

from collections.abc import Iterable, Iterator, Mapping
from itertools import groupby
from typing import NamedTuple

from penstock.lake.table import Span, Table, doubles_of, gaps_of


class Extent(NamedTuple):
    """What the log has of a queue, in one view."""

    identity: str
    start: int
    end: int


class Found(NamedTuple):
    """One life of a queue in a table."""

    queue: str
    view: str
    identity: str
    first: int
    end: int
    rows: int
    files: int
    missing: int  # in the log, and not in the table yet
    wrong: tuple[str, ...]
    note: str = ""


def check(table: Table, extents: Mapping[str, Extent]) -> Iterator[Found]:
    """Everything that a table has, and queues of the log that it should have (`extents`) and has not."""
    seen: set[str] = set()
    logs = {extent.identity[:6] for extent in extents.values()}
    for (queue, identity), group in groupby(table.spans(), key=lambda it: (it.queue, it.identity)):
        spans = list(group)
        extent = extents.get(queue)
        if extent is not None and extent.identity == identity:
            seen.add(queue)
            yield _compared(table, spans, extent)
        else:
            log = "this log" if identity[:6] in logs else "another log"
            yield _life(table, spans, note=f"of an earlier queue of this name, or of another one, in {log}")
    for queue in sorted(extents.keys() - seen):
        extent = extents[queue]
        if extent.start < extent.end:
            count = extent.end - extent.start
            yield Found(queue, table.view, extent.identity, extent.start, extent.start, 0, 0, count, ())


def _life(
    table: Table, spans: list[Span], missing: int = 0, wrong: Iterable[str] = (), note: str = ""
) -> Found:
    what = table.counter
    told = [f"a gap: {what}s {first} to {end - 1} are not all there" for first, end in gaps_of(spans)]
    told += [f"doubled: {what}s {first} to {end - 1}" for first, end in doubles_of(spans)]
    first, end, rows = spans[0].first, max(it.end for it in spans), sum(it.rows for it in spans)
    queue, identity = spans[0].queue, spans[0].identity
    return Found(queue, table.view, identity, first, end, rows, len(spans), missing, (*told, *wrong), note)


def _compared(table: Table, spans: list[Span], extent: Extent) -> Found:
    end = max(it.end for it in spans)
    wrong = []
    if end > extent.end:
        wrong.append(f"ahead: the log ends before {extent.end}; was it put back from a copy?")
    if extent.start < spans[0].first:
        last = spans[0].first - 1
        wrong.append(
            f"a gap: {table.counter}s {extent.start} to {last} are not there, and the log begins there"
        )
    if end < extent.start:
        wrong.append(f"behind: {table.counter}s {end} to {extent.start - 1} are not in the log any more")
    return _life(table, spans, max(extent.end - max(end, extent.start), 0), wrong)
