"""Service: many pipelines in one Spark, as files say: `penstock pipeline run DIR`.

It looks at its files once a second. A file that is new begins a pipeline, one that is gone ends it, one that
says something else has it go on as that; what else happens to a pipeline is its keeper's business.

Where state is shown: at the broker, by the door that every reader has (`telling.py`). There are lag, rights,
audit, metrics and a page already, and somebody who may operate a pipeline's queues wishes there what it shall
do. So the service listens nowhere, has no users of its own, and works from behind any firewall.

Rules that always hold:
  * What counts is what a file says, not when it was written; and only what it said twice in a row, so that
    nobody's half-written file is taken.
  * A file that is not right, or that clashes with another, changes nothing: what runs goes on, and that is
    told. It is judged again when it, or another file, changes.
  * No pipeline ends another one. Spark deals out its cores to all of them alike.
  * A stop finishes the batches that run.

How it fails: `PipelineFailed`, where Spark has ended under all of them. Whoever has started it starts it
again; every pipeline goes on from its checkpoint.
"""

import math
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from threading import Event
from typing import Any, Final

from pyspark.sql import SparkSession

from penstock.common.text import printable
from penstock.pipeline.failures import cause_of
from penstock.pipeline.file import PipelineMistakes
from penstock.pipeline.flows import reader_of
from penstock.pipeline.formats import APPEND, DELTA, FORMATS
from penstock.pipeline.keeping import Keeper, Say
from penstock.pipeline.kinds import place_of
from penstock.pipeline.model import Pipeline
from penstock.pipeline.progress import Teller
from penstock.pipeline.running import ENDED, JAVA_GONE, PipelineFailed, Run
from penstock.pipeline.telling import FAILED, RETRYING, RUNNING, Telling
from penstock.spark.session import java_has_ended

LOOK_SECONDS: Final = 1.0
END_SECONDS: Final = 10.0
"""How long keepers may take to end where no batch is waited for."""

POOL: Final = "spark.scheduler.pool"
SETTINGS: Final[Mapping[str, str]] = {"spark.scheduler.mode": "FAIR"}
"""Of a Spark that is shared: else a large batch would hold up all that come after it."""

OF_SESSIONS: Final = "spark.sql."
OF_ALL: Final = ("spark.sql.catalog", "spark.sql.extensions", "spark.sql.warehouse.dir")

NOT_TAKEN: Final = "not taken"
STOPPED_ITSELF: Final = "Spark has ended by itself; its cluster may be gone"


def clashes(pipeline: Pipeline, others: Iterable[Pipeline]) -> Iterator[str]:
    """What several pipelines must not have in common: the broker and Spark know them by it."""
    for other in others:
        if pipeline.name == other.name:
            yield f"{pipeline.file}: name: {other.file} is called {pipeline.name!r} too; take another"
        elif shared := _readers(pipeline) & _readers(other):
            yield (
                f"{pipeline.file}: name: {other.file} has the reader {min(shared)!r} too, and each would let "
                "go of what the other holds; take another name, or another reader"
            )
        checkpoints = [it.checkpoint for it in (pipeline, other) if it.checkpoint is not None]
        if len(checkpoints) > len(set(map(place_of, checkpoints))):
            yield f"{pipeline.file}: [run] checkpoint: {other.file} has the same; take another"
        for path in sorted(_places(pipeline).keys() & _places(other).keys()):
            if not _places(pipeline)[path] or not _places(other)[path]:
                yield f"{pipeline.file}: [sink] path: {other.file} writes to {path}, too; take another"


def _readers(pipeline: Pipeline) -> set[str]:
    return {reader_of(pipeline, source) for source in pipeline.sources}


def _places(pipeline: Pipeline) -> dict[str, bool]:
    """Where it writes, and whether others may, too: many may add rows to a Delta table."""
    return {
        place_of(sink.options["path"]): (sink.format, sink.mode) == (DELTA, APPEND)
        for sink in pipeline.sinks
        if sink.format in FORMATS and "path" in sink.options
    }


def shared_settings(pipelines: Iterable[Pipeline]) -> dict[str, str]:
    """What these ask of Spark that one pipeline cannot have for itself; of the first that asks for it."""
    settings = dict(SETTINGS)
    for pipeline in pipelines:
        for name, value in pipeline.spark.items():
            if not name.startswith(OF_SESSIONS) or name.startswith(OF_ALL):
                settings.setdefault(name, value)
    return settings


class Files:
    """What the files say, as far as they have said it twice."""

    def __init__(self, paths: Iterable[str], *, missing: bool = False) -> None:
        self._paths = tuple(paths)
        self._missing = missing  # named, though it is not there: somebody wants to be told
        self._before: dict[str, bytes | None] = {}
        self._settled: dict[str, bytes | None] | None = None

    def found(self) -> list[str]:
        """Those that are there: named, or in a folder that is."""
        there: dict[str, None] = {}
        for path in self._paths:
            inside = sorted(map(str, Path(path).glob("*.toml"))) if os.path.isdir(path) else [path]
            there |= dict.fromkeys(it for it in inside if self._missing or os.path.exists(it))
        return list(there)

    def look(self) -> dict[str, bytes]:
        now: dict[str, bytes | None] = {path: _read(path) for path in self.found()}
        if self._settled is None:
            self._before, self._settled = now, dict(now)
        for path in {**self._settled, **self._before, **now}:
            if self._before.get(path) == now.get(path):
                self._settled[path] = now.get(path)
        self._before = now
        return {path: text for path, text in self._settled.items() if text is not None}


def _read(path: str) -> bytes | None:
    try:
        return Path(path).read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        return str(error).encode()  # Whoever judges the file says it again, for people.


class Service:
    """`stop` may be set at any time, by anybody: batches are finished; with `stop_now`, they are not."""

    def __init__(
        self,
        files: Files,
        spark: SparkSession,
        read: Callable[[str], Pipeline],
        new_teller: Callable[[str], Teller],
        say: Say,
        *,
        once: bool = False,
    ) -> None:
        self.stop = Event()
        self.stop_now = Event()
        self._files = files
        self._spark = spark
        self._read = read
        self._new_teller = new_teller
        self._say = say
        self._once = once
        self._has_looked = False
        self._judged: dict[str, bytes] = {}  # by file: what it said when it was judged
        self._refused: dict[str, str] = {}  # by file: why it was not taken
        self._kept: dict[str, Keeper] = {}  # by file
        self._ending: list[Keeper] = []

    def run(self) -> bool:
        """Until it is told to stop, or with `once` until all is done; whether all went well."""
        try:
            while not self.stop.is_set() and not self._is_done():
                self._check_spark()
                self._look()
                self.stop.wait(LOOK_SECONDS)
        except PipelineFailed as error:
            self._end(str(error))
            raise
        fine = not self._refused and all(it.state != FAILED for it in self._kept.values())
        self._end()
        return fine or not self._once

    def _is_done(self) -> bool:
        """Whether nothing is left to run; a moment ago everything was judged."""
        busy = ("", RUNNING, RETRYING)
        return self._once and self._has_looked and not any(it.state in busy for it in self._kept.values())

    def _end(self, error: str = "") -> None:
        keepers = [*self._kept.values(), *self._ending]
        for keeper in keepers:
            keeper.end(error, now=bool(error))
        deadline = time.monotonic() + END_SECONDS if error else math.inf
        for keeper in keepers:
            while not keeper.has_ended(LOOK_SECONDS) and time.monotonic() < deadline:
                if self.stop_now.is_set() and deadline == math.inf:
                    deadline = time.monotonic() + END_SECONDS
                    for it in keepers:
                        it.end(now=True)

    def _check_spark(self) -> None:
        if java_has_ended(0):
            raise PipelineFailed(ENDED)
        with suppress(*JAVA_GONE):
            context: Any = self._spark.sparkContext._jsc
            if context.sc().isStopped():
                raise PipelineFailed(STOPPED_ITSELF)

    # --- files ---------------------------------------------------------------------------------------

    def _look(self) -> None:
        self._ending = [it for it in self._ending if not it.has_ended()]
        settled = self._files.look()
        changed = [path for path, text in settled.items() if self._judged.get(path) != text]
        gone = [path for path in self._judged if path not in settled]
        for path in gone:
            del self._judged[path]
            self._refused.pop(path, None)
            self._let_go(path)
        if gone or changed:
            changed += [path for path in self._refused if path not in changed]
        for path in changed:
            self._judged[path] = settled[path]
            self._take(path)
        self._has_looked = True

    def _let_go(self, path: str) -> None:
        keeper = self._kept.pop(path, None)
        if keeper is not None:
            keeper.end(for_good=True)
            self._ending.append(keeper)

    def _take(self, path: str) -> None:
        """A file is new, or says something else."""
        keeper = self._kept.get(path)
        others = [it.pipeline for at, it in self._kept.items() if at != path]
        try:
            pipeline = self._read(path)
            mistakes = list(clashes(pipeline, others))
            if not mistakes and keeper is not None and keeper.pipeline != pipeline:
                mistakes = self._new_run(pipeline, self._new_teller(pipeline.name), None).check()
        except PipelineMistakes as error:
            mistakes = list(error.lines)
        except Exception as error:  # noqa: BLE001 - whatever it is, the others go on
            mistakes = [f"{path}: {cause_of(error)}"]
        if mistakes:
            self._refuse(path, "; ".join(mistakes))
            return
        self._refused.pop(path, None)
        if keeper is not None and keeper.pipeline == pipeline:
            keeper.not_replaced("")
        elif keeper is not None and keeper.pipeline.name == pipeline.name:
            self._say(pipeline.name, "changed", path)
            keeper.replace(pipeline)
        else:
            self._let_go(path)
            if any(clashes(pipeline, (it.pipeline for it in self._ending))):
                del self._judged[path]  # That one finishes its batch: the next look takes this one.
            else:
                teller = self._new_teller(pipeline.name)
                self._kept[path] = Keeper(pipeline, self._spark, self._new_run, teller, self._say)

    def _refuse(self, path: str, why: str) -> None:
        if self._refused.get(path) == why:
            return
        self._refused[path] = why
        keeper = self._kept.get(path)
        going_on = "; what it said before goes on" if keeper is not None else ""
        self._say(keeper.pipeline.name if keeper is not None else path, NOT_TAKEN, printable(why + going_on))
        if keeper is not None:
            keeper.not_replaced(f"{why}{going_on}")

    def _new_run(self, pipeline: Pipeline, teller: Teller, telling: Telling | None) -> Run:
        """One that shares Spark with the others; called in the thread that runs it."""
        self._spark.sparkContext.setLocalProperty(POOL, pipeline.name)
        return Run(pipeline, self._spark, teller, once=self._once, telling=telling)
