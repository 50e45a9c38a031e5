"""Telling: what a pipeline says about itself to its brokers, under the names of its readers.

The broker knows how far a reader has come, and not what it is, nor why it has stopped. So a run says its
kind, its name and its last batch with rows, and in the end what went wrong; the page of readers shows it.

Rules that always hold:
  * Nobody waits for it but the end of a run, and that for `LAST_SECONDS` only. It is told by a thread, at
    most once in `TELL_SECONDS`.
  * What cannot be told is not: a pipeline runs on whatever becomes of this.
"""

import threading
from collections.abc import Sequence
from contextlib import closing
from typing import Any, Final

from penstock.common.text import printable
from penstock.errors import PenstockError
from penstock.pipeline.model import Pipeline
from penstock.pipeline.plan import reader_of
from penstock.pipeline.progress import Batch
from penstock.spark.api import Broker
from penstock.spark.options import STREAM, read_options

TELL_SECONDS: Final = 5.0
LAST_SECONDS: Final = 5.0
ERROR_CHARACTERS_MAX: Final = 1000


class Telling:
    """One run's. `close` ends it."""

    def __init__(self, pipeline: Pipeline) -> None:
        self._pipeline = pipeline
        self._about: dict[str, Any] = {"kind": "pipeline", "name": pipeline.name, "error": None}
        self._lock = threading.Lock()
        self._new = threading.Event()
        self._ended = threading.Event()
        self._new.set()
        self._thread = threading.Thread(target=self._tell, name=f"telling {pipeline.name}", daemon=True)
        self._thread.start()

    def add(self, batches: Sequence[Batch]) -> None:
        """The main query has done these."""
        if batches:
            with self._lock:
                self._about |= {"batch": batches[-1].number, "rows": batches[-1].rows, "error": None}
            self._new.set()

    def close(self, error: str = "") -> None:
        """The run is over; why, where it has failed."""
        with self._lock:
            self._about["error"] = printable(error)[:ERROR_CHARACTERS_MAX] or None
        self._ended.set()
        self._new.set()
        self._thread.join(LAST_SECONDS)

    def _tell(self) -> None:
        while True:
            self._new.wait()
            self._new.clear()
            ended = self._ended.is_set()
            with self._lock:
                about = dict(self._about)
            for source in self._pipeline.sources:
                try:
                    options = read_options(source.options, STREAM)
                    with closing(Broker(options.url, options.token, 0)) as broker:
                        broker.put("readers", reader_of(self._pipeline, source), fields={"about": about})
                except PenstockError:  # Its reader may not be there yet.
                    self._new.set()
            if ended:
                return
            self._ended.wait(TELL_SECONDS)
