"""Session: how Penstock's own commands start Spark, in one place.

Spark on this machine (`local[*]`) unless somebody names a master. What is set here is what Penstock relies on
(UTC) and what a command wants that is no server (no web UI, loopback only, few shuffle partitions). Whatever
`conf` says goes before.

Rules that always hold:
  * Nothing is set on a cluster or a Connect server that is meant for this machine.
  * A signal that is for this command, such as Ctrl-C, which a terminal sends to a whole group of processes,
    does not reach Java and its Python workers: whoever runs the command decides what becomes of them.
  * What Java prints while Spark starts is shown only if Spark does not start. After that its standard error
    is ours, and `spark.log.level` says how much comes. With `quiet` nothing comes, not from its Python
    workers either.

  * A Python worker that is slow to start ends nothing at once. Spark gives one 10 s to connect back, which no
    setting of its own changes, and a busy machine may need more: `tried_again` begins again, and says so.

How it fails: `SparkNotStarted`, one line that says what is missing.
"""

import os
import shutil
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Mapping
from typing import IO, Any, Final, TypeVar

from pyspark import SparkConf, SparkContext
from pyspark.errors import PySparkException
from pyspark.java_gateway import launch_gateway
from pyspark.sql import SparkSession

from penstock.errors import PenstockError

MASTER_DEFAULT: Final = "local[*]"
CONNECT: Final = "sc://"
SAID_LINES_MAX: Final = 50

TRACEBACK: Final = "Traceback (most recent call last):"
JOINS_TRACEBACKS: Final = "During handling of the above exception"
LINE_CLOSED: Final = ("BrokenPipeError", "ConnectionResetError", "EOFError")

EVERYWHERE: Final[Mapping[str, str]] = {
    "spark.sql.session.timeZone": "UTC",
    # Without it the option `pushFilters` is an error of Spark's.
    "spark.sql.python.filterPushdown.enabled": "true",
}
CLASSIC: Final[Mapping[str, str]] = {
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    "spark.log.level": "ERROR",
    # A third less for every exchange with a Python worker than a TCP socket takes.
    "spark.python.unix.domain.socket.enabled": "true",
    # How long either side waits for the first words of the other; Spark's 15 s are for machines at leisure.
    "spark.python.authenticate.socketTimeout": "120s",
}
LOCAL: Final[Mapping[str, str]] = {
    "spark.driver.host": "127.0.0.1",
    "spark.driver.bindAddress": "127.0.0.1",
    # Spark's own default of 200 is for clusters; here each partition is a task that costs milliseconds.
    "spark.sql.shuffle.partitions": str(max(os.cpu_count() or 1, 2)),
}


LATE: Final = "Python worker"
NO_WORD: Final = "connect back"
"""In what Spark says where a worker of its own did not report in time; the two words stand in one line."""

STARTS_MAX: Final = 3
"""How often something is begun that slow workers end."""

T = TypeVar("T")


class SparkNotStarted(PenstockError):
    """Spark could not be started. Says why, and what to do."""


def local_session(
    name: str, master: str | None = None, conf: Mapping[str, str] | None = None, *, quiet: bool = False
) -> SparkSession:
    """A session for a command of ours; the one that is there already, where there is one."""
    master = master or MASTER_DEFAULT
    settings = {"spark.app.name": name, **settings_for(master), **(conf or {})}
    builder: Any = SparkSession.builder  # without types of its own
    try:
        if master.startswith(CONNECT):
            builder = builder.remote(master)
        elif SparkSession.getActiveSession() is None:
            _start({"spark.master": master, **settings}, is_local(master), quiet)
        session: SparkSession = builder.config(map=settings).getOrCreate()
    except PySparkException as error:
        raise SparkNotStarted(f"Spark did not start: {one_line(error)}") from None
    return session


def is_local(master: str) -> bool:
    return master.partition("[")[0] in ("local", "local-cluster")


def settings_for(master: str) -> dict[str, str]:
    """What is set with that master."""
    if master.startswith(CONNECT):
        return dict(EVERYWHERE)
    return {**EVERYWHERE, **CLASSIC, **(LOCAL if is_local(master) else {})}


def one_line(error: Exception) -> str:
    """What went wrong, of all that Spark says about it.

    An error of ours in a data source comes back as the end of a Python traceback inside a Java one.
    """
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    for line in reversed(lines):
        raised, colon, text = line.partition(": ")
        if colon and raised.startswith("penstock.") and raised.replace(".", "").isidentifier():
            return text
    return lines[0] if lines else type(error).__name__


def tried_again(work: Callable[[], T], say: Callable[[str], None]) -> T:
    """What `work` returns; done again where Spark did not wait for a Python worker that began slowly.

    Whatever it does must be safe to begin again, as queries with checkpoints and reports are.
    """
    for _ in range(STARTS_MAX - 1):
        try:
            return work()
        except Exception as error:
            if not worker_was_late(error):
                raise
        say("a Python worker of Spark's did not start within 10 s: this machine is busy; trying again")
    return work()


def java_has_ended(within_seconds: float) -> bool:
    """Whether Java, that this process started, is gone by then: its calls fail a moment before it ends."""
    gateway: Any = SparkContext._gateway
    process = getattr(gateway, "proc", None)
    if process is None:
        return False
    try:
        process.wait(within_seconds)
    except subprocess.TimeoutExpired:
        return False
    return True


def worker_was_late(error: BaseException | None) -> bool:
    """Whether that is what ended something."""
    while error is not None:
        if any(LATE in line and NO_WORD in line for line in str(error).splitlines()):
            return True
        error = error.__cause__
    return False


# --- starting ----------------------------------------------------------------------------------------------


def _start(settings: Mapping[str, str], local: bool, quiet: bool) -> None:
    """Java, and Spark's context in it."""
    java = os.path.join(os.environ["JAVA_HOME"], "bin", "java") if os.environ.get("JAVA_HOME") else "java"
    if shutil.which(java) is None:
        raise SparkNotStarted(
            "Spark needs Java 17 or newer, and there is none (PATH, JAVA_HOME); "
            "on Debian: apt-get install openjdk-17-jre-headless"
        )
    _name_python(settings, local)
    if local:
        # Otherwise Spark looks for an address of this machine that others can reach.
        os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
    # Not from Java's own settings: without Java there are none yet.
    conf = SparkConf(loadDefaults=False).setAll(list(settings.items()))
    ear = _Ear()
    launch: Any = launch_gateway  # without types
    try:
        gateway = launch(conf, {"stderr": ear.mouth, "process_group": 0})
        SparkContext(conf=conf, gateway=gateway)
    except Exception as error:
        raise SparkNotStarted(f"Spark did not start: {ear.last_words() or one_line(error)}") from error
    finally:
        ear.mouth.close()
    if not quiet:
        ear.tell_from_now_on()


def _name_python(settings: Mapping[str, str], local: bool) -> None:
    """With which Python Spark works, unless somebody has said it: Java takes the first `python3` of PATH.

    On a cluster that one is left to be named so where it is ours: the others may have theirs elsewhere.
    """
    named = settings.get("spark.pyspark.python")
    first = shutil.which("python3")
    is_ours = first is not None and os.path.dirname(first) == os.path.dirname(sys.executable)
    if named or local or not is_ours:
        os.environ.setdefault("PYSPARK_PYTHON", named or sys.executable)


class _Ear:
    """Hears what Java says: keeps it, until it is to be told."""

    def __init__(self) -> None:
        reading, writing = os.pipe()
        self.mouth: IO[bytes] = os.fdopen(writing, "wb")
        self._kept: deque[str] = deque(maxlen=SAID_LINES_MAX)
        self._telling = False
        self._told = _Told()
        self._thread = threading.Thread(target=self._listen, args=(os.fdopen(reading, "rb"),), daemon=True)
        self._thread.start()

    def _listen(self, pipe: IO[bytes]) -> None:
        with pipe:
            for line in pipe:
                text = line.decode("utf-8", "replace")
                if self._telling:
                    self._told.tell(text)
                else:
                    self._kept.append(text.strip())

    def tell_from_now_on(self) -> None:
        self._telling = True

    def last_words(self) -> str:
        """What was said last that looks like a reason."""
        errors = [line for line in self._kept if "Error" in line or "Exception" in line]
        return (errors or [""])[-1]


class _Told:
    """Standard error, without the tracebacks of Python workers whose Spark has closed the line: it does so
    whenever a query ends."""

    def __init__(self) -> None:
        self._traceback: list[str] = []
        self._left_out = False  # the last one was, and what joins it to the next one goes as well

    def tell(self, line: str) -> None:
        if self._traceback or TRACEBACK in line:
            self._traceback.append(line)
            if not line[0].isspace() and TRACEBACK not in line:
                self._end()
        elif not (self._left_out and (not line.strip() or JOINS_TRACEBACKS in line)):
            self._write([line])

    def _end(self) -> None:
        lines, self._traceback = self._traceback, []
        if lines[-1].startswith(LINE_CLOSED) and any("pyspark" in line for line in lines):
            self._left_out = True
        else:
            self._write(lines)

    def _write(self, lines: list[str]) -> None:
        self._left_out = False
        sys.stderr.writelines(lines)
        sys.stderr.flush()
