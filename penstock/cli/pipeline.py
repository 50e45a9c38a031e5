"""`penstock pipeline check|run FILE`: queues through Spark, as a file says.

`check` judges files without Spark; with `--spark`, Spark judges SQL and schemas too, and reads nothing. `run`
runs one until it is told to stop (SIGTERM, Ctrl-C: the batch that runs is finished), or with `--once` until
everything is done that was there when it began.

Exit codes: 0 done or stopped, 1 failed, 2 a mistake in a file or on the command line.
"""

import argparse
import json
import logging
import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import TYPE_CHECKING, Final

from penstock.cli.main import EXIT_MISUSE
from penstock.cli.messaging import URL_VARIABLE, add_token, token_given, warn
from penstock.common import units
from penstock.common.secret_file import TOKEN_FILE_VARIABLE, TOKEN_VARIABLE, exposed, token_around
from penstock.common.text import printable
from penstock.errors import Misuse, PenstockError

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from penstock.pipeline.model import Pipeline, Source
    from penstock.pipeline.running import Run

HELP = "run queues through Spark, as a file says"

SIGNALS: Final = (signal.SIGTERM, signal.SIGINT)


class NotInstalled(PenstockError):
    """Spark is not there."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("action", choices=("check", "run"), help="judge files, or run one")
    parser.add_argument("files", nargs="+", metavar="FILE", help="what a pipeline is, in TOML")
    parser.add_argument("--once", action="store_true", help="run: until what is there now is done")
    parser.add_argument(
        "--master", metavar="URL", help="run: a Spark cluster (default: local[*], this machine)"
    )
    parser.add_argument("--spark", action="store_true", help="check: let Spark judge the whole too")
    parser.add_argument(
        "--url",
        metavar="URL",
        help=f"the broker's HTTP API (default: what the file says, else {URL_VARIABLE})",
    )
    add_token(
        parser, "a file with our token", f"what the file says, else {TOKEN_VARIABLE} or {TOKEN_FILE_VARIABLE}"
    )
    parser.add_argument("--json", action="store_true", help="for programs: one JSON object a line")
    parser.epilog = (
        "examples:\n"
        "  penstock pipeline check orders.toml\n"
        "  penstock pipeline run orders.toml --once\n"
        "  penstock pipeline run orders.toml --master spark://host:7077"
    )


def run(args: argparse.Namespace) -> int:
    return _check(args) if args.action == "check" else _run(args)


# --- check -------------------------------------------------------------------------------------------------


def _check(args: argparse.Namespace) -> int:
    _check_installed()
    from penstock.pipeline.file import PipelineMistakes, read_pipeline

    if args.once or args.master:
        raise Misuse("--once and --master are for run")
    pipelines: list[Pipeline] = []
    wrong = False
    for path in args.files:
        try:
            pipeline = read_pipeline(path)
        except PipelineMistakes as mistakes:
            wrong = True
            _say_mistakes(args, path, mistakes.lines)
        else:
            pipelines.append(pipeline)
    clashes = list(_clashes(pipelines))
    _say_mistakes(args, "", clashes)
    if pipelines and not clashes:
        wrong = not _judge(args, pipelines) or wrong
    return EXIT_MISUSE if wrong or clashes else 0


def _judge(args: argparse.Namespace, pipelines: "list[Pipeline]") -> bool:
    """Say what they are; and what of them nobody has judged, or have Spark do it. Whether all are fine."""
    from penstock.pipeline.sinks import check_installed

    spark: SparkSession | None = None
    fine = True
    for pipeline in pipelines:
        check_installed(pipeline.sink)
    if args.spark:
        spark = _start_spark(pipelines[0], None)
    try:
        for pipeline in pipelines:
            mistakes = _new_run(args, pipeline, spark).check() if spark is not None else []
            if mistakes:
                fine = False
                _say_mistakes(args, pipeline.file, mistakes)
                continue
            unjudged = () if spark is not None else pipeline.unjudged
            if args.json:
                facts = {"file": pipeline.file, "name": pipeline.name, "mistakes": [], "unjudged": unjudged}
                print(json.dumps(facts))
                continue
            print(f"{pipeline.file}: fine: {_summary(pipeline)}")
            if unjudged:
                print(f"  not judged without Spark (--spark): {', '.join(unjudged)}")
    finally:
        if spark is not None:
            _stop_spark(spark)
    return fine


def _say_mistakes(args: argparse.Namespace, path: str, lines: "tuple[str, ...] | list[str]") -> None:
    if args.json and lines:
        print(json.dumps({"file": path or None, "name": None, "mistakes": lines, "unjudged": []}))
        return
    for line in lines:
        print(f"penstock pipeline: {printable(line)}", file=sys.stderr)


def _clashes(pipelines: "list[Pipeline]") -> Iterator[str]:
    """What several pipelines must not have in common: the broker and Spark know them by it."""
    for number, pipeline in enumerate(pipelines):
        for other in pipelines[:number]:
            if pipeline.name == other.name:
                yield f"{pipeline.file}: name: {other.file} is called {pipeline.name!r} too; take another"
            if pipeline.checkpoint is not None and pipeline.checkpoint == other.checkpoint:
                yield f"{pipeline.file}: [run] checkpoint: {other.file} has the same; take another"


def _summary(pipeline: "Pipeline") -> str:
    sink = pipeline.sink
    sources = " and ".join(_described(source) for source in pipeline.sources)
    where = sink.options.get("path") or sink.options.get("queue")
    steps = len(pipeline.steps)
    middle = f", {units.counted(steps, 'step')}" if steps else ""
    return f"{pipeline.name} reads {sources}{middle}, writes {sink.format}{f' to {where}' if where else ''}"


def _described(source: "Source") -> str:
    queues = source.options.get("subscribe") or source.options["subscribePattern"]
    parsed = f" as {source.parse.format}" if source.parse is not None else ""
    return f"{queues}{parsed}"


# --- run ---------------------------------------------------------------------------------------------------


def _run(args: argparse.Namespace) -> int:
    _check_installed()
    from penstock.pipeline.file import PipelineMistakes, read_pipeline
    from penstock.pipeline.running import check_broker, overridden
    from penstock.pipeline.sinks import check_installed

    if args.spark:
        raise Misuse("--spark is for check")
    if len(args.files) > 1:
        raise Misuse("run takes one file; start another process for each")
    if args.master is not None and args.master.startswith("sc://"):
        raise Misuse(
            "--master: a pipeline does not run over Spark Connect; name a cluster, spark://HOST:7077"
        )
    (path,) = args.files
    try:
        pipeline = read_pipeline(path)
    except PipelineMistakes as mistakes:
        _say_mistakes(args, path, mistakes.lines)
        return EXIT_MISUSE
    given = {"url": args.url, "token": token_given(args)}
    token, warning = token_around(os.environ)
    warn(warning)
    if any(
        "token" in options for options in (*(it.options for it in pipeline.sources), pipeline.sink.options)
    ):
        warn(exposed(path))
    around = {"url": os.environ.get(URL_VARIABLE), "token": token}
    pipeline = overridden(
        pipeline,
        {name: text for name, text in given.items() if text},
        {name: text for name, text in around.items() if text},
    )
    check_installed(pipeline.sink)
    check_broker(pipeline)
    with _stopping() as stopping:
        spark = _start_spark(pipeline, args.master)
        try:
            running = _new_run(args, pipeline, spark)
            stopping.attach(running)
            _say(args, f"{pipeline.name}: {_summary(pipeline).partition(' ')[2]}")
            running.run()
            _say(args, f"{pipeline.name}: {'stopped' if running.stop.is_set() else 'done'}")
        finally:
            _stop_spark(spark)
    return 0


class _Stopping:
    """What signals ask for: the first to finish, the second to end at once."""

    def __init__(self) -> None:
        self._asked = 0
        self._run: Run | None = None

    def attach(self, run: "Run") -> None:
        self._run = run
        # Spark puts a handler of its own there when it starts, and a signal may have come before.
        self.listen()
        self._pass_on()

    def listen(self) -> None:
        for number in SIGNALS:
            signal.signal(number, self._heard)

    def _heard(self, number: int, frame: FrameType | None) -> None:
        self._asked += 1
        self._pass_on()

    def _pass_on(self) -> None:
        if self._run is not None and self._asked:
            self._run.stop.set()
            if self._asked > 1:
                self._run.stop_now.set()


@contextmanager
def _stopping() -> Iterator[_Stopping]:
    before = [(number, signal.getsignal(number)) for number in SIGNALS]
    stopping = _Stopping()
    stopping.listen()
    try:
        yield stopping
    finally:
        for number, handler in before:
            signal.signal(number, handler)


# --- both --------------------------------------------------------------------------------------------------


def _check_installed() -> None:
    """Whether Spark's Python side is there."""
    try:
        import penstock.spark  # noqa: F401 - what it needs is what is asked for
    except ImportError as error:
        if (error.name or "").partition(".")[0] == "penstock":
            raise
        raise NotInstalled(f"{error.name} is not installed; pip install 'penstock[spark]'") from None


def _start_spark(pipeline: "Pipeline", master: str | None) -> "SparkSession":
    from penstock.spark.session import local_session

    # What PySpark would say there, with all of Java's words, is told as one line.
    for name in ("SQLQueryContextLogger", "DataFrameQueryContextLogger"):
        logging.getLogger(name).disabled = True
    # So is what is said of a Java that does not answer.
    logging.getLogger("py4j").setLevel(logging.CRITICAL)
    logging.getLogger().addFilter(lambda record: "py4j" not in record.pathname)  # some of it as nobody's
    return local_session(pipeline.name, master, {"spark.log.level": "OFF", **pipeline.spark})


def _stop_spark(spark: "SparkSession") -> None:
    from penstock.pipeline.running import JAVA_GONE

    with suppress(*JAVA_GONE):
        spark.stop()


def _new_run(args: argparse.Namespace, pipeline: "Pipeline", spark: "SparkSession") -> "Run":
    from penstock.pipeline.progress import Teller
    from penstock.pipeline.running import Run

    def say(line: str) -> None:
        print(line, file=sys.stdout if args.json else sys.stderr, flush=True)

    teller = Teller(pipeline.name, say, time.monotonic, as_json=args.json)
    return Run(pipeline, spark, teller, once=args.once)


def _say(args: argparse.Namespace, line: str) -> None:
    if not args.json:
        print(line, file=sys.stderr, flush=True)
