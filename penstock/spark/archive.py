"""Archive: what of a query's ranges the log has no more, and the broker's table has.

    firsts    on the driver: where the table begins, queue by queue
    cut       on the driver: a range divided into what comes from the table and what comes from the log
    part_of   on an executor: a range that retention took from the log since it was divided
    batches   on an executor: the rows of a part

Offsets in the table are those of the log, so a stream that begins in one and goes on in the other has one
checkpoint, and knows no seam: each batch looks anew what has to come from where.

Rules that always hold:
  * The table is asked only for what is before the log's first offset, and then gives all that it has of a
    range. Retention takes nothing that is not there: what goes between plan and reading is read there, too.
  * Rows of the table do not change, so that a batch can be replayed. They come in the order of offsets,
    whatever order a compaction has left them in.
  * Only rows of the queue that has the name now (`identity`).
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from operator import itemgetter
from typing import TYPE_CHECKING, Final, NamedTuple

from penstock.spark.api import Broker
from penstock.spark.offsets import Extent
from penstock.spark.options import WrongOption
from penstock.spark.splits import Range, split

if TYPE_CHECKING:
    import pyarrow as pa

    from penstock.lake.table import Span, Table


INSTALL: Final = "pip install 'penstock[lake]'"


class Part(NamedTuple):
    """What a task reads from the table."""

    whole: Range
    files: tuple[tuple[int, tuple[str, ...]], ...]
    """In the order of offsets: the first one, and the files that begin there; several where they overlap."""


class Archive:
    """The table of a broker, as the driver sees it."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._table: Table | None = None

    def firsts(self, broker: Broker) -> dict[tuple[str, str], int]:
        """The first offset of each queue there, by name and identity."""
        found: dict[tuple[str, str], int] = {}
        for span in self._spans(broker):
            key = span.queue, span.identity
            found[key] = min(span.first, found.get(key, span.first))
        return found

    def cut(
        self,
        broker: Broker,
        ranges: Sequence[Range],
        starts: Mapping[str, int],
        min_partitions: int | None,
    ) -> tuple[list[Part], list[Range]]:
        """Parts for the table, and what is left for the log."""
        parts: list[Part] = []
        rest: list[Range] = []
        spans: dict[tuple[str, str], list[Span]] = {}
        if any(_is_early(whole, starts) for whole in ranges):
            for span in self._spans(broker):
                spans.setdefault((span.queue, span.identity), []).append(span)
        for whole in ranges:
            its = spans.get((whole.queue, whole.identity), []) if _is_early(whole, starts) else []
            end = min(max((it.end for it in its), default=whole.start), whole.end)
            if end <= whole.start:
                rest.append(whole)
                continue
            pieces = chain.from_iterable(split([whole._replace(end=end)], min_partitions))
            parts += (_part(piece, its) for piece in pieces)
            if end < whole.end:
                rest.append(whole._replace(start=end))
        return parts, rest

    def table(self, broker: Broker) -> "Table":
        """Where it is; it may not be there yet."""
        try:
            from penstock.lake.table import Table
        except ImportError as error:
            raise WrongOption(
                f"option 'history' needs the extra lake, here and where tasks run: {INSTALL} ({error})"
            ) from None
        if self._table is None:
            path = broker.get("archive")["path"]
            if path is None:
                raise WrongOption(
                    f"option 'history': the broker at {self._url} archives nothing; set path under [archive] "
                    "of its settings, or leave the option out"
                )
            self._table = Table(path, "messages")
        return self._table

    def _spans(self, broker: Broker) -> "list[Span]":
        return _spans(self.table(broker))


def _is_early(whole: Range, starts: Mapping[str, int]) -> bool:
    """Whether there is something in a range that the log, which begins at `starts`, has no more."""
    return whole.start < min(starts.get(whole.queue, 0), whole.end)


def _spans(table: "Table", queue: str | None = None) -> "list[Span]":
    from penstock.lake.table import NoTable

    try:
        return table.open().spans(queue)
    except NoTable:
        return []


def _part(whole: Range, spans: "Sequence[Span]") -> Part:
    """A range, and what of its queue's files it is in."""
    return Part(
        whole, tuple(_together([it for it in spans if it.first < whole.end and it.end > whole.start]))
    )


def _together(files: "Sequence[Span]") -> Iterator[tuple[int, tuple[str, ...]]]:
    """Files in order, those that overlap as one: where a clock is set back over midnight, days take turns."""
    first, end, paths = 0, 0, list[str]()
    for it in files:
        if paths and it.first >= end:
            yield first, tuple(paths)
            paths = []
        if not paths:
            first = it.first
        paths.append(it.path)
        end = max(end, it.end)
    if paths:
        yield first, tuple(paths)


def reached(extents: Mapping[str, Extent], firsts: Mapping[tuple[str, str], int]) -> dict[str, Extent]:
    """What there is to be read with the table, which begins at `firsts`."""
    return {
        queue: it._replace(start=min(it.start, firsts.get((queue, it.identity), it.start)))
        for queue, it in extents.items()
    }


# --- on an executor --------------------------------------------------------------------------------


def part_of(table: "Table", whole: Range) -> Part:
    """All of a range, as the table is now."""
    return _part(whole, [it for it in _spans(table, whole.queue) if it.identity == whole.identity])


def batches(table: "Table", part: Part, columns: Sequence[str]) -> Iterator["pa.RecordBatch"]:
    """The rows of a part, as far as they are there."""
    import pyarrow as pa

    for first, paths in part.files:
        rows = chain.from_iterable(_rows(table, path, part.whole, columns) for path in paths)
        for batch in _in_order(rows, max(first, part.whole.start)):
            name = pa.repeat(pa.scalar(part.whole.queue), batch.num_rows)
            arrays = [name if it == "queue" else batch.column(it) for it in columns]
            yield pa.RecordBatch.from_arrays(arrays, names=list(columns))


def _rows(table: "Table", path: str, whole: Range, columns: Sequence[str]) -> Iterator["pa.RecordBatch"]:
    """Those of a file that are in a range, as they stand there."""
    import pyarrow.compute as pc
    import pyarrow.parquet as pq

    with table.input(path) as source:
        file = pq.ParquetFile(source)
        place = file.schema_arrow.get_field_index("offset")
        groups = []
        for number in range(file.num_row_groups):
            bounds = file.metadata.row_group(number).column(place).statistics
            if bounds is None or (bounds.min < whole.end and bounds.max >= whole.start):
                groups.append(number)
        for batch in file.iter_batches(row_groups=groups, columns=[it for it in columns if it != "queue"]):
            offsets = batch.column("offset")
            yield batch.filter(pc.and_(pc.greater_equal(offsets, whole.start), pc.less(offsets, whole.end)))


def _in_order(rows: Iterable["pa.RecordBatch"], at: int) -> Iterator["pa.RecordBatch"]:
    """By offset, from one on. What was compacted is there by the size that its files had: of that, all is in
    memory."""
    import numpy as np

    runs: list[tuple[int, pa.RecordBatch]] = []
    for batch in rows:
        offsets = batch.column("offset").to_numpy()
        for run in np.split(np.arange(batch.num_rows), np.flatnonzero(np.diff(offsets) != 1) + 1):
            if not len(run):
                continue
            first, its = int(offsets[run[0]]), batch.slice(int(run[0]), len(run))
            if runs or first != at:
                runs.append((first, its))
            else:
                at = first + len(run)
                yield its
    for _, its in sorted(runs, key=itemgetter(0)):
        yield its
