"""Running: a pipeline from its start to its end.

    start    the broker is asked once, so that a wrong address is told in a line and at once; then the queries
             (`flows.py`) begin, one after the other
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
from typing import Any, Final

from py4j.protocol import Py4JError, Py4JNetworkError  # type: ignore[import-untyped]  # py4j has no types
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession
from pyspark.sql.streaming.query import StreamingQuery

from penstock.errors import PenstockError
from penstock.pipeline.beginnings import beginning, has_begun
from penstock.pipeline.failures import cause_of
from penstock.pipeline.flows import Flow, FlowWriter, flows_of, frame_of, own_session, streaming_graph
from penstock.pipeline.graph import StepFailed
from penstock.pipeline.judging import check_modes, mistakes, placed
from penstock.pipeline.model import Pipeline
from penstock.pipeline.progress import Follower, Teller
from penstock.pipeline.sinks import start_flow
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

ENDED: Final = (
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

    def __init__(
        self,
        pipeline: Pipeline,
        spark: SparkSession,
        teller: Teller,
        *,
        once: bool,
        telling: Telling | None = None,  # of whoever keeps it running; else it has its own
    ) -> None:
        self._pipeline = pipeline
        self._teller = teller
        self._telling = telling
        self._once = once or pipeline.once
        self._queries: list[StreamingQuery] = []
        self.stop = Event()
        self.stop_now = Event()
        with self._told():
            self._session = own_session(spark, pipeline)

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
        self._queries = []
        telling, failure = self._telling or Telling(self._pipeline, self._teller.state).start(), ""
        try:
            with self._told():
                try:
                    self._start()
                    self._watch(telling)
                finally:
                    self._end()
                    self._teller.tell()
        except PenstockError as error:
            failure = str(error)
            raise
        finally:
            if self._telling is None:
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
                    f"{self._pipeline.name}: {ENDED if gone else cause_of(error)}"
                ) from error

    # --- start -----------------------------------------------------------------------------------

    def _start(self) -> None:
        session = self._session
        # Where this thread has no session that is active, Spark finds no sink of ours.
        java: Any = session._jvm
        java.SparkSession.setActiveSession(session._jsparkSession)
        # Spark judges the whole before anything runs.
        try:
            graph = streaming_graph(session, self._pipeline)
            flows = flows_of(session, self._pipeline, graph)
            # What it refuses in a stream, such as every row of a table where none of the stream fits, would
            # be done within a batch, and again with the next.
            check_modes(session, self._pipeline, graph)
        except StepFailed as error:
            raise PipelineFailed(f"{self._pipeline.name}: {placed(self._pipeline, error)}") from error
        new = {it.name for it in flows if it.checkpoint is None or not has_begun(session, it.checkpoint)}
        for flow in flows:
            pipeline = self._beginning(flow, flows, new)
            writer = FlowWriter(pipeline, flow, graph, self._teller)
            frame = frame_of(session, pipeline, flow)
            self._queries.append(start_flow(frame, flow, writer, pipeline.interval, once=self._once))
            if flow.name in new and flow.checkpoint is not None and flow is not flows[-1]:
                self._wait_for_beginning(self._queries[-1], flow.checkpoint)

    def _beginning(self, flow: Flow, flows: list[Flow], new: set[str]) -> Pipeline:
        """The pipeline, where a new flow reads its sources from where the others have begun, or go on."""
        if flow.name not in new:
            return self._pipeline
        others = sorted((it for it in flows if it is not flow), key=lambda it: it.name in new)
        sources = list(self._pipeline.sources)
        for number, source in enumerate(sources):
            for other in others:
                if source.name in other.reads and source.name in flow.reads and other.checkpoint is not None:
                    begins = beginning(self._session, source, other.checkpoint, anew=other.name in new)
                    if begins:
                        sources[number] = replace(source, options={**source.options, **begins})
                        break
        return replace(self._pipeline, sources=tuple(sources))

    def _wait_for_beginning(self, query: StreamingQuery, checkpoint: str) -> None:
        """Until it is written down where a query begins: the others begin there, too."""
        deadline = time.monotonic() + BEGIN_SECONDS
        while not self.stop.is_set() and time.monotonic() < deadline:
            if not query.isActive or has_begun(self._session, checkpoint):
                return
            self.stop.wait(LOOK_SECONDS / 4)

    # --- watch -----------------------------------------------------------------------------------

    def _watch(self, telling: Telling) -> None:
        followers = [Follower(query) for query in self._queries]
        active = True
        while active:
            self.stop.wait(LOOK_SECONDS)
            active = any(query.isActive for query in self._queries)
            if self.stop.is_set():
                self._finish()
                active = False
            failure = next((it for it in (query.exception() for query in self._queries) if it), None)
            done = [batch for follower in followers for batch in follower.batches()]
            telling.add([batch for batch in done if batch.query == self._pipeline.name])
            self._teller.add(done, [follower.ended for follower in followers])
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
        for query in self._queries:
            with suppress(*JAVA_GONE):
                query.stop()


def _is_at_work(query: StreamingQuery) -> bool:
    status = query.status
    return bool(status["isTriggerActive"] and status["isDataAvailable"])


def _batch_of(query: StreamingQuery) -> int:
    """The number of the last batch that is done; -1: none is."""
    progress = query.lastProgress
    return int(progress["batchId"]) if progress is not None else -1
