"""StreamReader: a stream's side of the source, in a process of its own beside Spark's driver.

Spark asks, one call after the other: where to begin (`initialOffset`), how far to go now (`latestOffset`),
into which tasks that divides (`partitions`), and says what is done (`commit`). What it is told it writes
down, so that a query that is started again goes on where it was; then `initialOffset` is not asked.

Where a query begins is not written down, and Spark asks for it twice, to plan its first batch and to run it;
and once more where that batch is run again. So one that begins at the end of a queue, which moves meanwhile,
has a first batch without rows, whose end says where it begins.

Rules that always hold:
  * The same start and end are the same messages, whenever they are asked for: a batch can be replayed.
  * An offset says which queues its positions are of, so that one that was deleted is not taken for another.
  * Where nothing is new Spark asks again at once. The broker has a rest first, the longer the more it had to
    do for the last answer: with very many queues that is something.
"""

import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

from pyspark.sql.datasource import DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxBytes,
    ReadMaxRows,
    ReadMinRows,
    SupportsTriggerAvailableNow,
)
from pyspark.sql.types import StructType

from penstock.errors import PenstockError
from penstock.spark.api import Broker, Patience, Unreachable
from penstock.spark.archive import Archive, reached
from penstock.spark.cuts import within_bytes
from penstock.spark.lease import Lease
from penstock.spark.offsets import (
    Extent,
    Identities,
    Offset,
    Positions,
    check_view,
    extents_of,
    identities_of,
    kept_position,
    offset_of,
    positions_of,
    starting_positions,
)
from penstock.spark.options import ReadOptions
from penstock.spark.reading import Piece, Scan
from penstock.spark.splits import Range, shares

if TYPE_CHECKING:
    import pyarrow as pa

log = logging.getLogger("penstock.spark")

IDLE_SHARE: Final = 5
IDLE_SECONDS_MAX: Final = 1.0
"""A look that found nothing is followed by a rest of so many times its own length, up to this."""


class StreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    def __init__(self, options: ReadOptions, schema: StructType) -> None:
        # Spark makes one of these to ask, and another that it sends to the executors, to read with.
        self._options = options
        self._scan = Scan(options, schema)
        self._broker = Broker(options.url, options.token, options.retry_seconds)
        self._archive = Archive(options.url)
        # Of the table, where it was asked; and what it did not have then, with where that began in the log.
        self._firsts: dict[tuple[str, str], int] = {}
        self._unarchived: dict[tuple[str, str], int] = {}
        self._initial: Offset | None = None  # where it begins; None: Spark has not asked
        self._plans_first = False
        self._starts: Positions = {}  # as of the last look
        self._ends: Positions | None = None  # likewise
        self._target: Positions | None = None  # of the trigger availableNow
        self._gathers_since: float | None = None  # there is something, but not enough
        self._idle_seconds = 0.0
        self._lease: Lease | None = None

    # --- where to begin, and how far to go ---------------------------------------------------------

    def initialOffset(self) -> Offset:
        if self._initial is None:
            broker = self._broker.in_haste()
            try:
                extents = self._extents(broker)
                positions = starting_positions(broker, self._options, extents)
            finally:
                broker.close()
            self._hold(positions)
            self._initial = offset_of(positions, extents, self._options.view)
            self._plans_first = self._options.begins_at_ends
        return self._initial

    def getDefaultReadLimit(self) -> ReadLimit:
        # Spark hands back one of these, or says that everything shall be read; the options say the rest.
        options = self._options
        if options.max_offsets_per_trigger is not None:
            return ReadMaxRows(options.max_offsets_per_trigger)
        if options.max_bytes_per_trigger is not None:
            return ReadMaxBytes(options.max_bytes_per_trigger)
        if options.min_offsets_per_trigger is not None:
            return ReadMinRows(options.min_offsets_per_trigger)
        return ReadAllAvailable()

    def prepareForTriggerAvailableNow(self) -> None:
        self._target = {queue: extent.end for queue, extent in self._look().items()}

    def latestOffset(self, start: Offset, limit: ReadLimit) -> Offset:
        with self._telling():
            return self._latest_offset(start, limit)

    def _latest_offset(self, start: Offset, limit: ReadLimit) -> Offset:
        if self._plans_first:
            self._plans_first = False
            return start
        check_view(self._options, start)
        time.sleep(self._idle_seconds)
        began = time.monotonic()
        before, identities = positions_of(start), identities_of(start)
        extents = {
            queue: extent
            for queue, extent in self._look_from(before, identities).items()
            if queue in before or (extent.end and (self._target is None or queue in self._target))
        }
        positions = {
            queue: kept_position(
                self._options, queue, before.get(queue, 0), extent, identities.get(queue, "")
            )
            for queue, extent in extents.items()
        }
        for queue in sorted(before.keys() - extents.keys()):
            if self._options.wants(queue):
                kept_position(self._options, queue, before[queue], None)
            else:
                log.warning(
                    "queue %r is not subscribed to any more, and that it was read up to %d is forgotten: "
                    "should it come back, it is read from its first message on",
                    queue,
                    before[queue],
                )
        self._hold(positions)
        if self._lease is not None:
            # What is before was read: Spark asks when it has noted that its last batch is done.
            self._lease.move(self._wanted(positions))
        waiting = {
            queue: max(self._end(queue, extents) - position, 0) for queue, position in positions.items()
        }
        end = start
        if isinstance(limit, ReadAllAvailable) or not self._gathers(sum(waiting.values())):
            if not isinstance(limit, ReadAllAvailable):
                waiting = self._limited(positions, waiting)
            end = offset_of(
                {queue: position + waiting.get(queue, 0) for queue, position in positions.items()},
                extents,
                self._options.view,
            )
        took = time.monotonic() - began
        self._idle_seconds = min(IDLE_SHARE * took, IDLE_SECONDS_MAX) if end == start else 0.0
        return end

    def _gathers(self, count: int) -> bool:
        """Whether to wait until there is more than that, for the sake of larger batches."""
        least = self._options.min_offsets_per_trigger
        # With the trigger availableNow nobody knows whether more will come.
        if least is None or not 0 < count < least or self._target is not None:
            self._gathers_since = None
            return False
        now = time.monotonic()
        if self._gathers_since is None:
            self._gathers_since = now
        if now - self._gathers_since < self._options.max_trigger_delay:
            return True
        self._gathers_since = None
        return False

    def _limited(self, positions: Positions, waiting: dict[str, int]) -> dict[str, int]:
        """How much of what waits in each queue is read now."""
        most, bytes_max = self._options.max_offsets_per_trigger, self._options.max_bytes_per_trigger
        if most is not None:
            waiting = shares(waiting, most)
        if bytes_max is not None:
            ranges = [
                Range(queue, positions[queue], positions[queue] + count)
                for queue, count in waiting.items()
                if count
            ]
            waiting = within_bytes(self._broker, ranges, bytes_max)
        return waiting

    def reportLatestOffset(self) -> Positions | None:
        return dict(sorted(self._ends.items())) if self._ends is not None else None

    def _look_from(self, before: Positions, identities: Identities) -> dict[str, Extent]:
        """What there is now. Of several front-ends the one that is asked may have led, and not know that it
        leads no more: it says of a queue that it ends before the query's position."""
        patience = Patience(self._options.retry_seconds)
        while True:
            extents = self._look()
            ahead = [
                queue
                for queue, position in before.items()
                if (it := extents.get(queue)) is not None
                and position > it.end
                and identities.get(queue, "") == it.identity
            ]
            if not ahead or not self._broker.is_several:
                return extents
            queue = ahead[0]
            why = f"queue {queue!r} ends at {extents[queue].end} there, and was read up to {before[queue]}"
            try:
                patience.failed(self._broker.passed_over(why))
            except Unreachable:
                return extents  # So it is at all of them.

    def _look(self) -> dict[str, Extent]:
        extents = self._extents(self._broker)
        self._ends = {queue: extent.end for queue, extent in extents.items()}
        return extents

    def _extents(self, broker: Broker) -> dict[str, Extent]:
        """What there is to be read, with `history` also what only the table has."""
        extents = extents_of(broker, self._options)
        self._starts = {queue: extent.start for queue, extent in extents.items()}
        if not self._options.history or not any(self._starts.values()):
            return extents
        starts = {(queue, extent.identity): extent.start for queue, extent in extents.items() if extent.start}
        unknown = {key: start for key, start in starts.items() if key not in self._firsts}
        if unknown != self._unarchived:
            # What retention has taken since the last look may have come there before.
            self._firsts = self._archive.firsts(broker)
            self._unarchived = {key: start for key, start in unknown.items() if key not in self._firsts}
        return reached(extents, self._firsts)

    def _end(self, queue: str, extents: Mapping[str, Extent]) -> int:
        """Where to stop in a queue: at its end, or where it was when availableNow was said."""
        end = extents[queue].end
        return end if self._target is None else min(end, self._target.get(queue, 0))

    # --- reading -----------------------------------------------------------------------------------

    def partitions(self, start: Offset, end: Offset) -> Sequence[Piece]:
        with self._telling():
            return self._partitions(start, end)

    def _partitions(self, start: Offset, end: Offset) -> Sequence[Piece]:
        self._plans_first = False
        check_view(self._options, end)
        before, ends = positions_of(start), positions_of(end)
        known, identities = identities_of(start), identities_of(end)
        for queue, identity in identities.items():
            # Of one that was deleted since, and the query may go on all the same, the next begins at 0.
            if known.get(queue, identity) != identity:
                before[queue] = 0
        self._hold({queue: before.get(queue, 0) for queue in ends})
        ranges = [
            Range(queue, self._begin(queue, before.get(queue, 0), stop), stop, identities.get(queue, ""))
            for queue, stop in ends.items()
        ]
        if not self._options.history:
            return self._scan.pieces(self._broker, ranges)
        self._look()  # Retention moves on.
        return self._scan.pieces_of_both(self._broker, self._archive, ranges, self._starts)

    def _begin(self, queue: str, start: int, end: int) -> int:
        """Where to begin in a queue: where the query is, unless something is lost and it may go on."""
        if start > end:
            if self._options.begins_at_ends and start == (self._initial or {}).get(queue):
                # The first batch, which has no rows, is run again; the queue has grown since it was planned.
                return end
            # The log is not the one that was read. It has begun anew, and so does the query in it.
            start = 0
        if not self._options.fail_on_data_loss and not self._options.history:
            start = min(max(start, self._starts.get(queue, 0)), end)
        return start

    def read(self, partition: InputPartition) -> Iterator["pa.RecordBatch"]:
        return self._scan.read(partition)

    @contextmanager
    def _telling(self) -> Iterator[None]:
        """What ends a query is told to the broker, under the name of its reader."""
        try:
            yield
        except PenstockError as error:
            if self._lease is not None:
                self._lease.failed(str(error))
            raise

    # --- retention ---------------------------------------------------------------------------------

    def commit(self, end: Offset) -> None:
        if self._lease is not None:
            self._lease.move(self._wanted(positions_of(end)))

    def stop(self) -> None:
        if self._lease is not None:
            self._lease.end()
        self._broker.close()

    def _hold(self, positions: Positions) -> None:
        options = self._options
        if options.reader is None:
            return
        if self._lease is None:
            broker = Broker(options.url, options.token, options.retry_seconds)
            self._lease = Lease(broker, options.reader, options.view)
        self._lease.hold(self._wanted(positions))

    def _wanted(self, positions: Positions) -> Positions:
        """A batch that is done again may have a queue in it that nobody wants held any more. What is in the
        table only is not held."""
        return {
            queue: max(position, self._starts.get(queue, 0)) if self._options.history else position
            for queue, position in positions.items()
            if self._options.wants(queue)
        }
