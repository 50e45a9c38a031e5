"""Telling: what a pipeline says about itself to its brokers, under the names of its readers; and what it is
told there.

The broker knows how far a reader has come, and not what it is, nor why it has stopped. So a pipeline says its
kind, its name, its state, its last batch with rows, its rates, and what goes wrong. It says so again and
again: a broker that was restarted knows it again in a moment, and one that hears nothing shows that.

A pipeline that a service keeps (`service.py`) is told in the answers what people wish of it. And while it
does not run, though it shall again, what it has not read is held for it by this.

Rules that always hold:
  * Nobody waits for it but the end of a run, and that for `LAST_SECONDS` only. It is told by a thread.
  * What cannot be told is not: a pipeline runs on whatever becomes of this.
  * A wish is passed on once, and then said to be done.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from typing import Any, Final

from penstock.common.text import printable
from penstock.errors import PenstockError
from penstock.pipeline.flows import reader_of
from penstock.pipeline.model import Pipeline, Source
from penstock.pipeline.progress import Batch
from penstock.spark.api import Answer, Broker, Refused
from penstock.spark.lease import readers_of
from penstock.spark.offsets import Positions, extents_of, starting_positions
from penstock.spark.options import STREAM, ReadOptions, read_options

RUNNING, PAUSED, RETRYING, FAILED, STOPPED = "running", "paused", "retrying", "failed", "stopped"
HELD: Final = (PAUSED, RETRYING, FAILED)
"""States in which nothing reads, and something is to be read later."""

TELL_SECONDS: Final = 5.0
WISH_SECONDS: Final = 2.0
"""Likewise, where somebody may wait for what he has wished."""

LAST_SECONDS: Final = 5.0
HOLD_SECONDS: Final = 40.0
"""A lease that has less left is renewed."""

RATE_SECONDS: Final = 60.0
ERROR_CHARACTERS_MAX: Final = 1000

Wished = Callable[[str], None]
OthersRead = Sequence[tuple[str | None, str, Positions]]
"""What `flows.others_read` finds."""


class Telling:
    """One pipeline's. `start` begins it, `close` ends it."""

    def __init__(
        self,
        pipeline: Pipeline,
        standing: Callable[[], Mapping[str, Any]],  # `Teller.state`
        wished: Wished | None = None,
        has_read: Callable[[], Positions] = dict,  # how far it has come, where its broker has forgotten it
        others_read: Callable[[], OthersRead] = list,
    ) -> None:
        self._pipeline = pipeline
        self._wished = wished
        self._has_read = has_read
        self._others_read = others_read
        self._flows: OthersRead | None = None  # None: not asked since it was last run
        self._held_until: dict[str, float] = {}  # by source
        self._standing = standing
        self._about: dict[str, Any] = {"kind": "pipeline", "state": RUNNING, "error": None}
        self._wishes: dict[str, int] = {}  # by source: each broker counts by a clock of its own
        self._since = time.monotonic()
        self._retry_at: float | None = None
        self._lately = deque([(self._since, 0)])  # how many rows there were, and when
        self._of_file = ""
        self._lock = threading.Lock()
        self._new = threading.Event()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._tell, name=f"telling {pipeline.name}", daemon=True)

    def start(self) -> "Telling":
        self._thread.start()
        return self

    # --- what there is to say ----------------------------------------------------------------------

    def add(self, batches: Sequence[Batch]) -> None:
        """Queries have done these: it gets on."""
        if batches:
            with self._lock:
                self._about["error"] = None
            self._new.set()

    def is_now(self, state: str, error: str = "", retry_seconds: float | None = None) -> None:
        """Another state, from now on; why, and when it will be tried again."""
        with self._lock:
            self._about |= {"state": state, "error": _line(error)}
            self._since = time.monotonic()
            self._flows, self._held_until = None, {}
            self._retry_at = None if retry_seconds is None else self._since + retry_seconds
        self._new.set()

    def is_of(self, pipeline: Pipeline, file_error: str = "") -> None:
        """What its file says now; or why that is not taken."""
        with self._lock:
            self._pipeline, self._of_file = pipeline, file_error
            self._flows, self._held_until = None, {}
        self._new.set()

    def close(self, error: str = "", *, state: str = "") -> None:
        """It is over; why, where it has failed."""
        self.is_now(state or (FAILED if error else STOPPED), error)
        self._ended.set()
        self._new.set()
        self._thread.join(LAST_SECONDS)

    def _now(self) -> dict[str, Any]:
        now, standing = time.monotonic(), self._standing()
        batch = standing["batch"] or {}
        self._lately.append((now, standing["rows"]))
        while len(self._lately) > 2 and now - self._lately[1][0] > RATE_SECONDS:
            self._lately.popleft()
        (since, rows) = self._lately[0]
        with self._lock:
            return {
                **self._about,
                "name": self._pipeline.name,
                "error": _line(self._of_file) or self._about["error"],
                "state_seconds": round(now - self._since, 1),
                "retry_seconds": None if self._retry_at is None else round(max(self._retry_at - now, 0), 1),
                "batch": batch.get("number"),
                "rows": batch.get("rows"),
                "rows_total": standing["rows"],
                "rows_per_second": round((standing["rows"] - rows) / max(now - since, 1.0), 3),
                "bad_records": standing["bad_records"],
                "sinks": standing["sinks"] or None,
                "expectations": standing["expectations"] or None,
                "expectations_checked": standing["expectations_checked"] or None,
            }

    # --- saying it -----------------------------------------------------------------------------------

    def _tell(self) -> None:
        while True:
            self._new.clear()
            ended = self._ended.is_set()
            about = self._now()
            for source in self._pipeline.sources:
                try:
                    self._say(source, about)
                except PenstockError:  # Its reader may not be there yet, or the broker.
                    continue
            if ended:
                return
            if self._wished is None:
                self._ended.wait(TELL_SECONDS)
            else:
                self._new.wait(WISH_SECONDS)

    def _say(self, source: Source, about: Mapping[str, Any]) -> None:
        options, name = read_options(source.options, STREAM), reader_of(self._pipeline, source)
        if self._wished is not None:
            about = {**about, "wish": self._wishes.get(source.name, 0)}
        holds = self._wished is not None and about["state"] in HELD
        is_due = holds and time.monotonic() > self._held_until.get(source.name, 0)
        with closing(Broker(options.url, options.token, 0)) as broker:
            answer: Answer = None
            try:
                answer = broker.put("readers", name, fields={"about": about})
            except Refused as error:
                if error.name != "reader-not-found" or not holds:
                    raise
            if holds and (is_due or answer is None or answer["lease_seconds_left"] < HOLD_SECONDS):
                self._hold(broker, options, source)
                answer = answer or broker.put("readers", name, fields={"about": about})
        self._hear(source.name, answer)

    def _hold(self, broker: Broker, options: ReadOptions, source: Source) -> None:
        """All flows are where they have come to, as long as none of them runs. Queues that came since are
        read from their beginning; one that has read nothing yet begins where it says."""
        if self._flows is None:
            self._flows = [(None, "", self._has_read()), *self._others_read()]
        extents, name = extents_of(broker, options), reader_of(self._pipeline, source)
        for of, end, read in self._flows:
            if read.keys() & extents.keys():
                positions = {
                    queue: at if it.start < (at := read.get(queue, 0)) <= it.end else it.start
                    for queue, it in extents.items()
                }
            else:
                positions = starting_positions(broker, options, extents) if not end else {}
            for reader, held in readers_of(name + end, positions if of in (None, source.name) else {}):
                broker.put("readers", reader, fields={"view": options.view, "positions": held})
        self._held_until[source.name] = time.monotonic() + HOLD_SECONDS / 2

    def _hear(self, source: str, answer: Answer) -> None:
        wish = answer.get("wish")
        if self._wished is None or wish is None or wish["number"] <= self._wishes.get(source, 0):
            return
        self._wishes[source] = wish["number"]
        self._wished(wish["action"])
        self._new.set()


def _line(text: str) -> str | None:
    return printable(text)[:ERROR_CHARACTERS_MAX] or None
