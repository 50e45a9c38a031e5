"""Running: a pipeline from its start to its end.

    start    the broker is asked once, so that a wrong address is told in a line and at once; then the queries
             of bad records begin, then the main one
    watch    progress is told, also to the broker (`telling.py`); a query that fails ends them all
    stop     the batches that run are finished, then the queries end

Rules that always hold:
  * Whatever ends it, no query is left running.
  * A stop loses nothing: what was read and not finished is read again by the next start, from the checkpoint.

How it fails: `PipelineFailed`, one line with the cause.
"""

import time
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from dataclasses import replace
from threading import Event
from typing import Final

from py4j.protocol import Py4JError, Py4JNetworkError  # type: ignore[import-untyped]  # py4j has no types
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession
from pyspark.sql.streaming.query import StreamingQuery

from penstock.errors import PenstockError
from penstock.pipeline import plan
from penstock.pipeline.failures import cause_of
from penstock.pipeline.formats import PENSTOCK
from penstock.pipeline.judging import mistakes
from penstock.pipeline.model import Pipeline, Source
from penstock.pipeline.progress import Follower, Teller
from penstock.pipeline.sinks import start, start_sink
from penstock.pipeline.telling import Telling
from penstock.spark.api import Broker
from penstock.spark.offsets import extents_of
from penstock.spark.options import STREAM, read_options
from penstock.spark.session import java_has_ended, tried_again

LOOK_SECONDS: Final = 0.2
BEGIN_SECONDS: Final = 120.0
"""How long a query may take to know where it begins; then something is wrong that it will tell itself."""


END_SECONDS: Final = 3.0
"""How long Java may take to be gone when a call into it ended without an answer."""

JAVA_GONE: Final = (Py4JError, ConnectionError)
"""What a call into Java may raise where there is no Java any more."""

_ENDED: Final = (
    "Spark's Java process has ended; somebody has killed it, or it needs more memory (spark.driver.memory)"
)


class PipelineFailed(PenstockError):
    """A pipeline that has ended before its time. Says which, and why."""


def overridden(pipeline: Pipeline, options: Mapping[str, str], defaults: Mapping[str, str]) -> Pipeline:
    """The same, with other options of its sources: `options` go before the file, `defaults` behind it."""
    return replace(
        pipeline,
        sources=tuple(
            replace(source, options={**defaults, **source.options, **options}) for source in pipeline.sources
        ),
    )


def check_broker(pipeline: Pipeline) -> None:
    """Whether somebody answers where the sources are; what is wrong is told as `penstock.spark` tells it."""
    for source in pipeline.sources:
        options = read_options(source.options, STREAM)
        with closing(Broker(options.url, options.token, options.retry_seconds).in_haste()) as broker:
            extents_of(broker, options)


class Run:
    """One run of a pipeline. `stop` may be set at any time, by anybody."""

    def __init__(self, pipeline: Pipeline, spark: SparkSession, teller: Teller, *, once: bool) -> None:
        self._pipeline = pipeline
        self._teller = teller
        self._once = once or pipeline.once
        self._bad: list[StreamingQuery] = []
        self._main: StreamingQuery | None = None
        self.stop = Event()
        self.stop_now = Event()
        with self._told():
            self._session = plan.own_session(spark, pipeline)

    def check(self) -> list[str]:
        """What Spark finds wrong with it, without reading anything."""
        found: list[str] = []
        with self._told():
            found += mistakes(self._session, self._pipeline)
        return found

    def run(self) -> None:
        """Until it is done, which it is with `once`, or told to stop, or fails."""
        tried_again(self._run, self._teller.note)

    def _run(self) -> None:
        self._bad, self._main = [], None
        telling, failure = Telling(self._pipeline), ""
        try:
            with self._told():
                try:
                    self._start()
                    self._watch(telling)
                finally:
                    self._end()
                    self._teller.tell()
        except PipelineFailed as error:
            failure = str(error)
            raise
        finally:
            telling.close(failure)

    @contextmanager
    def _told(self) -> Iterator[None]:
        """What Spark raises becomes one line. After a stop it is what a stop looks like, and not told."""
        try:
            yield
        except (PySparkException, *JAVA_GONE) as error:
            gone = isinstance(error, (Py4JNetworkError, ConnectionError)) or java_has_ended(
                END_SECONDS if isinstance(error, Py4JError) else 0
            )
            if not self.stop.is_set():
                raise PipelineFailed(
                    f"{self._pipeline.name}: {_ENDED if gone else cause_of(error)}"
                ) from error

    # --- start -----------------------------------------------------------------------------------

    def _start(self) -> None:
        pipeline, session = self._pipeline, self._session
        # Spark judges the whole before anything runs.
        main = plan.main_frame(session, pipeline)
        for source in plan.reported(pipeline):
            self._bad.append(self._start_bad(source))
        self._wait_for_beginnings()
        self._main = start_sink(main, pipeline, once=self._once)

    def _wait_for_beginnings(self) -> None:
        """What comes between the beginnings of two queries that begin at the end of a queue is seen by the
        first one alone."""
        deadline = time.monotonic() + BEGIN_SECONDS
        while not self.stop.is_set() and time.monotonic() < deadline:
            if all(_has_begun(query) for query in self._bad):
                return
            self.stop.wait(LOOK_SECONDS / 4)

    def _start_bad(self, source: Source) -> StreamingQuery:
        pipeline = self._pipeline
        writing = (
            plan.bad_frame(self._session, pipeline, source)
            .writeStream.format(PENSTOCK)
            .outputMode("append")
            .options(**plan.bad_options(source))
            .option("checkpointLocation", plan.bad_checkpoint(pipeline, source))
        )
        name = f"{pipeline.name}.{source.name}.{plan.BAD_RECORDS}"
        return start(writing, name, pipeline.interval, once=self._once)

    @property
    def _queries(self) -> list[StreamingQuery]:
        return [*self._bad, *([self._main] if self._main is not None else [])]

    # --- watch -----------------------------------------------------------------------------------

    def _watch(self, telling: Telling) -> None:
        assert self._main is not None
        main, bad = Follower(self._main), [Follower(query) for query in self._bad]
        active = True
        while active:
            self.stop.wait(LOOK_SECONDS)
            active = any(query.isActive for query in self._queries)
            if self.stop.is_set():
                self._finish()
                active = False
            self._raise_failure()
            done = main.batches()
            telling.add(done)
            self._teller.add(done, [batch for follower in bad for batch in follower.batches()])

    def _raise_failure(self) -> None:
        for query in self._queries:
            failure = query.exception()
            if failure is not None:
                raise failure

    # --- stop ------------------------------------------------------------------------------------

    def _finish(self) -> None:
        """Wait for the batches that run at this moment; those that begin after it have not done anything."""
        running = [(query, _batch_of(query)) for query in self._queries if _is_at_work(query)]
        for query, batch in running:
            while not self.stop_now.is_set() and query.isActive:
                if not _is_at_work(query) or _batch_of(query) != batch:
                    break
                self.stop_now.wait(LOOK_SECONDS / 4)

    def _end(self) -> None:
        # Without Java there is nothing left to stop, and what has happened is told by somebody else.
        with suppress(*JAVA_GONE):
            for query in self._queries:
                query.stop()


def _has_begun(query: StreamingQuery) -> bool:
    """Whether it knows where it begins, or will never know."""
    return not query.isActive or query.lastProgress is not None or bool(query.status["isDataAvailable"])


def _is_at_work(query: StreamingQuery) -> bool:
    status = query.status
    return bool(status["isTriggerActive"] and status["isDataAvailable"])


def _batch_of(query: StreamingQuery) -> int:
    """The number of the last batch that is done; -1: none is."""
    progress = query.lastProgress
    return int(progress["batchId"]) if progress is not None else -1
