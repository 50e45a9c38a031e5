"""Keeping: one pipeline in a Spark that it shares with others, through all that happens to it.

            ┌────────── resume, restart ───────────┐
            ▼                                      │
        running ── pause ──────────────────────► paused
          │  ▲
          │  └── after a while ── retrying ◄── what may pass has ended the run
          │
          ├── what does not pass, or tries in vain ──► failed     (a restart, or another file, tries again)
          └── told to end, or done (once) ───────────► stopped

Rules that always hold:
  * A run is finished before the next one begins: two queries never share a checkpoint.
  * What passes (`failures.passes`) is tried again for as long as it takes, with pauses that grow. What nobody
    knows is tried again `TRIES_MAX` times, unless there was progress meanwhile.
  * Whatever happens here concerns nobody else: an exception of any kind is a state, and never leaves.
  * What Spark makes of a pipeline is asked before it runs, so that a mistake is told with its line.

How it fails: it does not. Java that has ended is not its business: whoever keeps them all sees that.
"""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Final

from pyspark.sql import SparkSession

from penstock.common.text import printable
from penstock.errors import PenstockError
from penstock.pipeline.beginnings import has_read
from penstock.pipeline.failures import cause_of, passes
from penstock.pipeline.flows import others_read
from penstock.pipeline.model import Pipeline
from penstock.pipeline.pausing import is_noted, note
from penstock.pipeline.progress import Teller
from penstock.pipeline.running import ENDED, PipelineFailed, Run, check_broker
from penstock.pipeline.telling import FAILED, PAUSED, RETRYING, RUNNING, STOPPED, OthersRead, Telling
from penstock.spark.offsets import Positions

PAUSE_SECONDS_MIN: Final = 1.0
PAUSE_SECONDS_MAX: Final = 60.0
TRIES_MAX: Final = 5
STEADY_SECONDS: Final = 60.0
"""A run that has lasted so long has got on, even if nothing came."""

NewRun = Callable[[Pipeline, Teller, Telling], Run]
Say = Callable[[str, str, str], None]
"""Of a pipeline: its name, its state, and more about that."""


class Misjudged(PenstockError):
    """What Spark finds wrong with a pipeline, each mistake with its line."""


class Keeper:
    """One pipeline, and the thread that runs it."""

    def __init__(
        self, pipeline: Pipeline, spark: SparkSession, new_run: NewRun, teller: Teller, say: Say
    ) -> None:
        self.pipeline = pipeline
        self.state = ""  # as long as it has not begun
        self._spark = spark
        self._new_run = new_run
        self._say = say
        self._changed = threading.Condition()
        self._run: Run | None = None
        self._go = True  # something is to be run now
        self._paused = False
        self._recalled = False  # whether it is known that it was paused, or was not, when it was last kept
        self._ending = False
        self._now = False  # no batch is waited for
        self._judged = False
        self._tries = 0
        self._ends_with = ""
        self._why = ""  # it is in its state
        self._for_good = False
        self._teller = teller  # of all its runs: counts grow as long as it is kept
        self._telling = Telling(pipeline, teller.state, self.wished, self._has_read, self._others_read)
        self._thread = threading.Thread(target=self._keep, name=f"keeping {pipeline.name}", daemon=True)
        self._thread.start()

    # --- what others want of it --------------------------------------------------------------------

    def wished(self, action: str) -> None:
        """Somebody wants it to pause, to resume, or to restart; the broker is told when this returns."""
        self._note(self.pipeline, paused=action == "pause")
        with self._changed:
            was_paused, self._paused = self._paused, action == "pause"
            self._go = not self._paused and (action == "restart" or was_paused)
            self._tries = 0
            self._interrupt()

    def replace(self, pipeline: Pipeline) -> None:
        """Go on as another one of the same name; Spark has judged it."""
        if self._paused and pipeline.checkpoint != self.pipeline.checkpoint:
            self._note(pipeline, paused=True)
            self._note(self.pipeline, paused=False)
        with self._changed:
            self.pipeline = pipeline
            self._telling.is_of(pipeline)
            self._go, self._tries, self._judged = not self._paused, 0, True
            self._interrupt()

    def not_replaced(self, why: str) -> None:
        """Its file has changed, and is not taken; empty: it is as it was again."""
        self._telling.is_of(self.pipeline, why)

    def end(self, error: str = "", *, now: bool = False, for_good: bool = False) -> None:
        """Finish the batch that runs, unless `now`, and end. `error`: why, if that is no good end.

        One that is paused says so with its last word, unless it ends for good: then it is paused no more.
        """
        with self._changed:
            self._ending, self._now = True, now
            self._for_good = self._for_good or for_good
            self._ends_with = error or self._ends_with
            self._interrupt()

    def has_ended(self, seconds: float = 0) -> bool:
        self._thread.join(seconds)
        return not self._thread.is_alive()

    def _interrupt(self) -> None:
        if self._run is not None and (self._go or self._paused or self._ending):
            self._run.stop.set()
            if self._now:
                self._run.stop_now.set()
        self._changed.notify_all()

    # --- the thread --------------------------------------------------------------------------------

    def _keep(self) -> None:
        with suppress(Exception):  # It is tried again, and told, before anything runs.
            self._recall()
        self._telling.start()
        wait_seconds: float | None = None
        if self._paused:
            self._go = False
            self._is_now(PAUSED)
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._go or self._paused or self._ending, wait_seconds)
                if self._paused and self.state != PAUSED and not self._ending:
                    self._is_now(PAUSED)
                if self._paused and not self._ending:
                    self._changed.wait_for(lambda: self._go or self._ending)
                if self._ending:
                    break
                self._go = False
            wait_seconds = self._try()
        if self._for_good:
            self._note(self.pipeline, paused=False)
        if self._ends_with:
            # Whoever ends them all says why, once. One that had failed before has a reason of its own.
            self._telling.close(self._why if self.state == FAILED else self._ends_with)
            return
        paused = self.state == PAUSED and not self._for_good
        self._is_now(PAUSED if paused else STOPPED)
        self._telling.close(state=PAUSED if paused else "")

    def _try(self) -> float | None:
        """Run it; for how long to wait then, None: until somebody wants something."""
        began, rows, error = time.monotonic(), self._teller.state()["rows"], None
        try:
            self._recall()
            if not self._paused:
                check_broker(self.pipeline)
                self._run_once()
        except Exception as raised:  # noqa: BLE001 - whatever it is, the others go on
            error = raised
        with self._changed:
            self._run = None
            if self._ending or self._paused or self._go:
                self.state = "" if self._go else self.state  # The next run is told of.
                return None
        if error is None:
            self._is_now(STOPPED, "done")
            return None
        if ENDED in str(error):
            return None
        why = cause_of(error).removeprefix(f"{self.pipeline.name}: ")
        if self._teller.state()["rows"] > rows or time.monotonic() - began > STEADY_SECONDS:
            self._tries = 0
        self._tries += 1
        verdict = passes(error)
        if verdict is False or (verdict is None and self._tries > TRIES_MAX):
            tried = "" if verdict is False else f" (tried {self._tries} times)"
            self._is_now(FAILED, f"{why}{tried}")
            return None
        seconds = min(PAUSE_SECONDS_MIN * float(2 ** min(self._tries - 1, 10)), PAUSE_SECONDS_MAX)
        self._is_now(RETRYING, why, seconds)
        return seconds

    def _recall(self) -> None:
        """Whether it was paused when it was last kept. As long as nobody can tell, it does not run."""
        with self._changed:
            self._paused = self._paused or (not self._recalled and is_noted(self._spark, self.pipeline))
            self._recalled = True

    def _note(self, pipeline: Pipeline, *, paused: bool) -> None:
        try:
            note(self._spark, pipeline, paused=paused)
        except Exception as error:  # noqa: BLE001 - whatever it is, it is done as far as it can be
            self._teller.note(f"what was paused or resumed will not be known later: {cause_of(error)}")

    def _has_read(self) -> Positions:
        """How far it has come, by its checkpoint; nothing: it has not begun."""
        with _told():
            return has_read(self._spark, self.pipeline.checkpoint) if self.pipeline.checkpoint else {}

    def _others_read(self) -> OthersRead:
        with _told():
            return others_read(self._spark, self.pipeline)

    def _run_once(self) -> None:
        run = self._new_run(self.pipeline, self._teller, self._telling)
        with self._changed:
            self._run = run
            self._interrupt()
        if not self._judged:
            mistakes = run.check()
            if mistakes:
                raise Misjudged("; ".join(mistakes))
            self._judged = True
        self._is_now(RUNNING)
        run.run()

    def _is_now(self, state: str, why: str = "", retry_seconds: float | None = None) -> None:
        if self.state == state == RUNNING or self.state == state == PAUSED:
            return
        self.state, self._why = state, why
        again = "" if retry_seconds is None else f"again in {retry_seconds:g} s: "
        self._say(self.pipeline.name, state, printable(again + why))
        self._telling.is_now(state, why if state in (FAILED, RETRYING) else "", retry_seconds)


@contextmanager
def _told() -> Iterator[None]:
    """What Spark raises is one of ours, for who has nothing to do with Spark."""
    try:
        yield
    except Exception as error:
        raise PipelineFailed(cause_of(error)) from error
