"""Progress: what a pipeline has done since somebody last looked, from what Spark tells about its batches.

For people there is a line about once a second while rows come, for all batches since the last one:

    orders: 12,040 rows, 8,021 a second; 0 behind; batch 12 took 150 ms

For programs there is an object for every batch that had rows. `lag` is how many offsets are behind the batch,
by queue and source together, as the source knew when it planned it; null where it does not know.

Rules that always hold:
  * Every batch counts once, however often this is asked.
  * Nothing here waits for Spark.
"""

import json
from collections.abc import Callable, Iterable
from typing import Any, Final, NamedTuple

from pyspark.sql.streaming.query import StreamingQuery

from penstock.common import units
from penstock.pipeline.plan import BAD_COUNT, BAD_RECORDS

LINE_SECONDS: Final = 1.0

Report = dict[str, Any]
"""What Spark says of one batch. Its keys are Spark's."""


class Batch(NamedTuple):
    """One batch that had rows."""

    number: int
    rows: int
    rows_per_second: float
    lag: int | None
    milliseconds: int
    bad_records: int

    @classmethod
    def of(cls, report: Report) -> "Batch":
        bad = (report.get("observedMetrics") or {}).get(BAD_RECORDS)
        return cls(
            int(report["batchId"]),
            int(report["numInputRows"]),
            float(report.get("processedRowsPerSecond") or 0.0),
            _lag(report["sources"]),
            int(report.get("batchDuration") or 0),
            int(bad[BAD_COUNT]) if bad is not None else 0,
        )


class Follower:
    """The batches of one query, each handed out once."""

    def __init__(self, query: StreamingQuery) -> None:
        self._query = query
        self._seen = -1

    def batches(self) -> list[Batch]:
        """Those that have ended since this was last asked, and had rows."""
        last = self._query.lastProgress
        if last is None or last.batchId == self._seen:
            return []
        # Every report that is fetched is a call into Java.
        told = [last] if last.batchId == self._seen + 1 else self._query.recentProgress
        found: list[Batch] = []
        for progress in told:
            report: Report = json.loads(progress.json)
            number = int(report["batchId"])
            # While nothing comes Spark tells of the next batch again and again, without rows.
            if number > self._seen and int(report["numInputRows"]):
                self._seen = number
                found.append(Batch.of(report))
        return found


class Teller:
    """Lines for people, or objects for programs."""

    def __init__(
        self, name: str, say: Callable[[str], None], clock: Callable[[], float], as_json: bool = False
    ) -> None:
        self._name = name
        self._say = say
        self._clock = clock
        self._as_json = as_json
        self._waiting: list[Batch] = []
        self._bad = 0
        self._said_at = float("-inf")

    def add(self, batches: Iterable[Batch], bad_batches: Iterable[Batch]) -> None:
        """What the main query has done, and those of the bad records."""
        for batch in batches:
            if self._as_json:
                self._object("batch", **batch._replace(bad_records=0)._asdict())
            self._waiting.append(batch)
        for batch in bad_batches:
            if self._as_json and batch.bad_records:
                self._object("bad-records", count=batch.bad_records)
            self._bad += batch.bad_records
        if self._clock() - self._said_at >= LINE_SECONDS:
            self.tell()

    def note(self, text: str) -> None:
        """Something that is no progress, and no failure either."""
        if self._as_json:
            self._object("note", text=text)
        else:
            self._say(f"{self._name}: {text}")

    def tell(self) -> None:
        """Say now what there is to say."""
        waiting, self._waiting = self._waiting, []
        bad, self._bad = self._bad, 0
        if self._as_json or not (waiting or bad):
            return
        self._said_at = self._clock()
        if waiting:
            self._say(f"{self._name}: {_line(waiting)}")
        if bad:
            records = units.counted(bad, "bad record")
            self._say(f"{self._name}: {records}; `penstock dead QUEUE --reason bad-record` shows why")

    def _object(self, event: str, **facts: object) -> None:
        facts.pop("bad_records", None)
        self._say(json.dumps({"pipeline": self._name, "event": event, **facts}))


def _line(batches: list[Batch]) -> str:
    last = batches[-1]
    rows = sum(batch.rows for batch in batches)
    seconds = sum(batch.milliseconds for batch in batches) / 1000
    behind = "" if last.lag is None else f"; {last.lag:,} behind"
    rate = f", {rows / seconds:,.0f} a second" if seconds else ""
    took = f"batch {last.number} took {last.milliseconds:,} ms"
    return f"{units.counted(rows, 'row')}{rate}{behind}; {took}"


def _lag(sources: Iterable[Report]) -> int | None:
    total: int | None = None
    for source in sources:
        latest, end = _positions(source.get("latestOffset")), _positions(source.get("endOffset"))
        if latest is not None and end is not None:
            total = (total or 0) + sum(max(offset - end.get(queue, 0), 0) for queue, offset in latest.items())
    return total


def _positions(told: object) -> dict[str, int] | None:
    """Offsets as the source told them; Spark hands JSON on as it is, or as a text."""
    if isinstance(told, str):
        try:
            told = json.loads(told)
        except ValueError:
            return None
    return told if isinstance(told, dict) else None
