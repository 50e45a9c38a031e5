"""Progress: what a pipeline has done since somebody last looked, from what Spark tells about its batches.

For people there is a line about once a second while rows come, for all batches since the last one:

    orders: 12,040 rows, 8,021 a second; 0 behind; batch 12 took 150 ms

For programs there is an object for every batch that had rows, and `Teller.state()` at any time: what was read
and what became of it since the run began. `lag` is how many offsets are behind the batch, by queue and source
together, as the source knew when it planned it; null where it does not know.

Rules that always hold:
  * Every batch counts once, however often this is asked.
  * What a batch has found is said behind the line of that batch, though it is known before Spark tells of it.
  * Nothing here waits for Spark.
  * `counted` and `state` may be called by any thread.
"""

import json
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final, NamedTuple

from pyspark.sql.streaming.query import StreamingQuery

from penstock.common import units

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
    query: str = ""

    @classmethod
    def of(cls, report: Report) -> "Batch":
        return cls(
            int(report["batchId"]),
            int(report["numInputRows"]),
            float(report.get("processedRowsPerSecond") or 0.0),
            _lag(report["sources"]),
            int(report.get("batchDuration") or 0),
            str(report.get("name") or ""),
        )


class Judged(NamedTuple):
    """What an expectation makes of rows."""

    checked: int
    violated: int


class Found(NamedTuple):
    """What a batch has found that people are told."""

    query: str
    number: int
    bad_records: int
    judged: Mapping[str, Judged]


class Follower:
    """The batches of one query, each handed out once."""

    def __init__(self, query: StreamingQuery) -> None:
        self._query = query
        self._name = str(query.name or "")
        self._seen = -1

    @property
    def ended(self) -> tuple[str, int]:
        """The query, and the last of its batches that is known to have ended; -1: none is."""
        return self._name, self._seen

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
            self._seen = max(self._seen, number - 1)
            # While nothing comes Spark tells of the next batch again and again, without rows.
            if number > self._seen and int(report["numInputRows"]):
                self._seen = number
                found.append(Batch.of(report))
        return found


class Teller:
    """Lines for people, or objects for programs; and how it stands, for whoever asks."""

    def __init__(
        self, name: str, say: Callable[[str], None], clock: Callable[[], float], as_json: bool = False
    ) -> None:
        self._name = name
        self._say = say
        self._clock = clock
        self._as_json = as_json
        self._lock = threading.Lock()
        self._waiting: dict[str, list[Batch]] = {}  # by query
        self._said_at = float("-inf")
        self._rows = 0
        self._last: dict[str, Batch] = {}  # of each query
        self._bad = 0
        self._sinks: Counter[str] = Counter()
        self._checked: Counter[str] = Counter()
        self._violations: Counter[str] = Counter()
        self._untold: list[Found] = []
        self._ended: dict[str, int] = {}  # of each query the last batch

    def add(self, batches: Iterable[Batch], ended: Iterable[tuple[str, int]] = ()) -> None:
        """What queries have done; and up to which batch each has come, where that had no rows."""
        self._ended |= ended
        for batch in batches:
            if self._as_json:
                self._object("batch", **batch._asdict())
            with self._lock:
                self._rows += batch.rows
                self._last.pop(batch.query, None)  # the newest is the last
                self._last[batch.query] = batch
                self._waiting.setdefault(batch.query, []).append(batch)
            self._ended[batch.query] = max(self._ended.get(batch.query, -1), batch.number)
        if self._clock() - self._said_at >= LINE_SECONDS:
            self._tell(lambda found: found.number <= self._ended.get(found.query, -1))

    def counted(
        self,
        sinks: Mapping[str, int] | None = None,
        judged: Mapping[str, Judged] | None = None,
        bad_records: int = 0,
        *,
        query: str = "",
        number: int = -1,
    ) -> None:
        """What a batch has written to sinks, and what it has found: how many rows hurt which expectation."""
        with self._lock:
            self._bad += bad_records
            if bad_records or judged:
                self._untold.append(Found(query, number, bad_records, judged or {}))
            self._sinks.update(sinks or {})
            for name, (checked, violated) in (judged or {}).items():
                self._checked[name] += checked
                self._violations[name] += violated

    def state(self) -> dict[str, Any]:
        """How it stands since the run began.

        `rows` were read; `sinks` and `expectations` have the rows that were written to each, and that hurt
        each, of those in `expectations_checked`;
        `batch` is the last that had rows; `lag` is that of all queries together, null where none knows.
        """
        with self._lock:
            lags = [batch.lag for batch in self._last.values() if batch.lag is not None]
            last = next(reversed(self._last.values()), None)
            return {
                "rows": self._rows,
                "bad_records": self._bad,
                "sinks": dict(self._sinks),
                "expectations": dict(self._violations),
                "expectations_checked": dict(self._checked),
                "lag": sum(lags) if lags else None,
                "batch": last._asdict() if last is not None else None,
            }

    def note(self, text: str) -> None:
        """Something that is no progress, and no failure either."""
        if self._as_json:
            self._object("note", text=text)
        else:
            self._say(f"{self._name}: {text}")

    def tell(self) -> None:
        """Say now what there is to say."""
        self._tell(lambda _: True)

    def _tell(self, is_due: Callable[[Found], bool]) -> None:
        with self._lock:
            waiting, self._waiting = self._waiting, {}
            due = [found for found in self._untold if is_due(found)]
            self._untold = [found for found in self._untold if not is_due(found)]
        bad = sum(found.bad_records for found in due)
        judged: dict[str, Judged] = {}
        for name, (checked, violated) in (it for found in due for it in found.judged.items()):
            before = judged.get(name, Judged(0, 0))
            judged[name] = Judged(before.checked + checked, before.violated + violated)
        untold = {name: it for name, it in judged.items() if it.violated}
        if waiting or bad or untold:
            self._said_at = self._clock()
        if self._as_json:
            if bad:
                self._object("bad-records", count=bad)
            for name, it in untold.items():
                self._object("expectation", name=name, **it._asdict())
            return
        for query, batches in waiting.items():
            self._say(f"{query or self._name}: {_line(batches)}")
        if bad:
            records = units.counted(bad, "bad record")
            self._say(f"{self._name}: {records}; `penstock dead QUEUE --reason bad-record` shows why")
        for name, (checked, violated) in untold.items():
            of = units.counted(checked, "row")
            self._say(f"{self._name}: expectation {name}: {violated:,} of {of} against it")

    def _object(self, event: str, **facts: object) -> None:
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
