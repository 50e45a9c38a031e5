"""`penstock pipeline check|run|test|infer|export`: queues through Spark, as a file says.

`check` judges files without Spark; with `--spark`, Spark judges SQL and schemas too, and reads nothing. `run`
runs one until it is told to stop (SIGTERM, Ctrl-C: the batch that runs is finished), or with `--once` until
everything is done that was there when it began. Of one file that is all: what ends the pipeline ends the
command. Several files, or a folder, are a service (`pipeline/service.py`): it keeps them running. `test` runs
the tests in files. `infer` prints the columns of a queue's messages. `export` writes a project of Spark
Declarative Pipelines.

`list`, `pause`, `resume` and `restart` ask the broker (`pipeline_state.py`), and need no Spark.

Exit codes: 0 done or stopped, 1 failed, 2 a mistake in a file or on the command line.
"""

import argparse
import json
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from queue import Empty, SimpleQueue
from types import FrameType
from typing import TYPE_CHECKING, Any, Final

from penstock.cli import pipeline_state
from penstock.cli.main import EXIT_MISUSE
from penstock.cli.messaging import URL_VARIABLE, add_token, token_given, warn
from penstock.common import units
from penstock.common.secret_file import TOKEN_FILE_VARIABLE, TOKEN_VARIABLE, exposed, token_around
from penstock.common.text import printable
from penstock.errors import Misuse, PenstockError

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from penstock.pipeline.model import Pipeline, Source
    from penstock.pipeline.progress import Teller
    from penstock.pipeline.running import Run
    from penstock.pipeline.service import Service

HELP = "run queues through Spark, as a file says"

SIGNALS: Final = (signal.SIGTERM, signal.SIGINT)
STOP_SECONDS: Final = 120.0
"""How long batches that run are waited for when it shall stop."""


class NotInstalled(PenstockError):
    """Spark is not there."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument(
        "action",
        choices=(*_ACTIONS, *pipeline_state.ACTIONS),
        help="judge files; run one, or a folder; test them, …; of those that run: list, pause, …",
    )
    parser.add_argument(
        "files",
        nargs="*",
        metavar="FILE",
        help="what a pipeline is, in TOML, or a folder; infer: a queue; pause, …: a NAME",
    )
    parser.set_defaults(via=None, vias=("http",), cafile=None)
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
    parser.add_argument("--format", choices=("json", "csv"), help="infer: what payloads are (default: json)")
    parser.add_argument("--sample", type=int, metavar="N", help="infer: of how many messages (default: 1000)")
    parser.add_argument("--to", choices=("sdp",), help="export: Spark Declarative Pipelines (the default)")
    parser.add_argument("--out", metavar="DIR", help="export: a new folder for the project")
    parser.epilog = (
        "examples:\n"
        "  penstock pipeline check orders.toml\n"
        "  penstock pipeline run orders.toml --once\n"
        "  penstock pipeline run orders.toml --master spark://host:7077\n"
        "  penstock pipeline run /etc/penstock/pipelines\n"
        "  penstock pipeline pause orders\n"
        "  penstock pipeline test orders.toml\n"
        "  penstock pipeline infer orders\n"
        "  penstock pipeline export orders.toml --to sdp --out orders-sdp"
    )


def run(args: argparse.Namespace) -> int:
    for flag, actions in _FLAGS.items():
        if getattr(args, flag) not in (None, False) and args.action not in actions:
            raise Misuse(f"--{flag} is for {' and '.join(actions)}")
    if args.action in pipeline_state.ACTIONS:
        return pipeline_state.run(args)
    if not args.files:
        raise Misuse(f"{args.action} what? name a FILE, or a folder with such files")
    _check_installed()
    return _ACTIONS[args.action](args)


# --- check -------------------------------------------------------------------------------------------------


def _check(args: argparse.Namespace) -> int:
    from penstock.pipeline.file import PipelineMistakes, read_pipeline
    from penstock.pipeline.service import Files, clashes

    pipelines: list[Pipeline] = []
    wrong = False
    found = Files(args.files, missing=True).found()
    if not found:
        raise Misuse(f"{', '.join(args.files)}: there is no file of a pipeline, *.toml, in it")
    for path in found:
        try:
            pipeline = read_pipeline(path)
        except PipelineMistakes as mistakes:
            wrong = True
            _say_mistakes(args, path, mistakes.lines)
        else:
            pipelines.append(pipeline)
    shared = [line for at, it in enumerate(pipelines) for line in clashes(it, pipelines[:at])]
    _say_mistakes(args, "", shared)
    if pipelines and not shared:
        wrong = not _judge(args, pipelines) or wrong
    return EXIT_MISUSE if wrong or shared else 0


def _judge(args: argparse.Namespace, pipelines: "list[Pipeline]") -> bool:
    """Say what they are; and what of them nobody has judged, or have Spark do it. Whether all are fine."""
    from penstock.pipeline.sinks import check_installed

    spark: SparkSession | None = None
    fine = True
    for pipeline in pipelines:
        check_installed(pipeline)
    if args.spark:
        spark = _start_spark(pipelines[0].name, None, pipelines[0].spark)
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


def _summary(pipeline: "Pipeline") -> str:
    sources = " and ".join(_described(source) for source in pipeline.sources)
    steps, expectations = len(pipeline.steps), len(pipeline.expectations)
    middle = f", {units.counted(steps, 'step')}" if steps else ""
    middle += f", {units.counted(expectations, 'expectation')}" if expectations else ""
    sinks = []
    for sink in pipeline.sinks:
        where = sink.options.get("path") or sink.options.get("queue")
        sinks.append(f"{sink.format}{f' to {where}' if where else ''}")
    return f"{pipeline.name} reads {sources}{middle}, writes {' and '.join(sinks)}"


def _described(source: "Source") -> str:
    queues = source.options.get("subscribe") or source.options["subscribePattern"]
    parsed = f" as {source.parse.format}" if source.parse is not None else ""
    return f"{queues}{parsed}"


# --- run ---------------------------------------------------------------------------------------------------


def _run(args: argparse.Namespace) -> int:
    """Several files, or a folder, are kept running; of one, what ends it ends the command."""
    _check_runnable(args)
    if len(args.files) > 1 or os.path.isdir(args.files[0]):
        return _serve(args)
    from penstock.pipeline.file import PipelineMistakes
    from penstock.pipeline.running import check_broker

    (path,) = args.files
    try:
        pipeline = _read(args, path)
    except PipelineMistakes as mistakes:
        _say_mistakes(args, path, mistakes.lines)
        return EXIT_MISUSE
    check_broker(pipeline)
    with _stopping() as stopping:
        spark = _start_spark(pipeline.name, args.master, pipeline.spark)
        try:
            running = _new_run(args, pipeline, spark)
            stopping.attach(running)
            _say(args, f"{pipeline.name}: {_summary(pipeline).partition(' ')[2]}")
            running.run()
            _say(args, f"{pipeline.name}: {'stopped' if running.stop.is_set() else 'done'}")
        finally:
            _stop_spark(spark)
    return 0


def _serve(args: argparse.Namespace) -> int:
    """Keep many running."""
    from penstock.pipeline.service import Files, Service, shared_settings

    for path in args.files:
        if not os.path.exists(path):
            raise Misuse(f"{path}: there is no such file or folder")
    files = Files(args.files)
    with _stopping() as stopping:
        pipelines: list[Pipeline] = []
        for path in files.found():
            with suppress(PenstockError):  # which the service tells
                pipelines.append(_read(args, path))
        spark = _start_spark("penstock pipelines", args.master, shared_settings(pipelines))

        def say(name: str, state: str, more: str) -> None:
            if args.json:
                _print(args, json.dumps({"pipeline": name, "event": "state", "state": state, "text": more}))
            else:
                _print(args, f"{name}: {state}{': ' if more else ''}{more}")

        try:
            service = Service(
                files,
                spark,
                lambda path: _read(args, path),
                lambda name: _new_teller(args, name),
                say,
                once=args.once,
            )
            stopping.attach(service)
            return 0 if service.run() else 1
        finally:
            _stop_spark(spark)


def _check_runnable(args: argparse.Namespace) -> None:
    if args.master is not None and args.master.startswith("sc://"):
        raise Misuse(
            "--master: a pipeline does not run over Spark Connect; name a cluster, spark://HOST:7077"
        )


def _read(args: argparse.Namespace, path: str) -> "Pipeline":
    """What a file says, with what the command line and the environment say; all that it needs is there."""
    from penstock.pipeline.file import read_pipeline
    from penstock.pipeline.running import overridden
    from penstock.pipeline.sinks import check_installed

    pipeline = read_pipeline(path)
    given = {"url": args.url, "token": token_given(args)}
    token, warning = token_around(os.environ)
    warn(warning)
    said = [*(it.options for it in pipeline.sources), *(it.options for it in pipeline.sinks)]
    if any("token" in options for options in said):
        warn(exposed(path))
    around = {"url": os.environ.get(URL_VARIABLE), "token": token}
    pipeline = overridden(
        pipeline,
        {name: text for name, text in given.items() if text},
        {name: text for name, text in around.items() if text},
    )
    check_installed(pipeline)
    return pipeline


class _Stopping:
    """What signals ask for: the first to finish, which may take a while, the second to end at once.

    They are passed on by a thread: the main one may be within what they would set.
    """

    def __init__(self) -> None:
        self._asked = 0
        self._run: Run | Service | None = None
        self._signals: SimpleQueue[int] = SimpleQueue()
        threading.Thread(target=self._follow, name="signals", daemon=True).start()

    def attach(self, run: "Run | Service") -> None:
        self._run = run
        # Spark puts a handler of its own there when it starts, and a signal may have come before.
        self.listen()
        self._pass_on()

    def listen(self) -> None:
        for number in SIGNALS:
            signal.signal(number, self._heard)

    def _heard(self, number: int, frame: FrameType | None) -> None:
        self._signals.put(number)

    def _follow(self) -> None:
        for seconds in (None, STOP_SECONDS):
            with suppress(Empty):
                self._signals.get(timeout=seconds)
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


# --- test, infer, export -----------------------------------------------------------------------------------


def _test(args: argparse.Namespace) -> int:
    from penstock.pipeline.file import PipelineMistakes, read_pipeline
    from penstock.pipeline.flows import own_session
    from penstock.pipeline.sinks import check_installed
    from penstock.pipeline.testing import differences

    try:
        pipelines = [read_pipeline(path) for path in args.files]
    except PipelineMistakes as mistakes:
        _say_mistakes(args, "", mistakes.lines)
        return EXIT_MISUSE
    for pipeline in pipelines:
        check_installed(pipeline)
        if not pipeline.tests:
            raise Misuse(f"{pipeline.file} has no [[test]]; add one with given and expect")
    failed = 0
    spark = _start_spark(pipelines[0].name, args.master, pipelines[0].spark)
    try:
        for pipeline in pipelines:
            session = own_session(spark, pipeline)
            for test in pipeline.tests:
                found = differences(session, pipeline, test)
                failed += bool(found)
                if args.json:
                    print(json.dumps({"file": pipeline.file, "test": test.name, "differences": found}))
                    continue
                print(f"{pipeline.file}: {test.name}: {'failed' if found else 'fine'}")
                for line in found:
                    print(f"  {printable(line)}")
    finally:
        _stop_spark(spark)
    return 1 if failed else 0


def _infer(args: argparse.Namespace) -> int:
    from penstock.pipeline.inferring import FORMATS, SAMPLE, inferred
    from penstock.spark.session import local_session

    if len(args.files) > 1:
        raise Misuse("infer takes one queue")
    if args.sample is not None and args.sample < 1:
        raise Misuse(f"--sample {args.sample}: there is nothing to see in that many messages; use 1 or more")
    token, warning = token_around(os.environ)
    warn(warning)
    said = {"url": args.url or os.environ.get(URL_VARIABLE), "token": token_given(args) or token}
    _quiet()
    spark = local_session("infer", args.master, {"spark.log.level": "OFF"})
    try:
        options = {name: text for name, text in said.items() if text}
        print(inferred(spark, args.files[0], options, args.format or FORMATS[0], args.sample or SAMPLE))
    finally:
        _stop_spark(spark)
    return 0


def _export(args: argparse.Namespace) -> int:
    from penstock.pipeline.exporting import export
    from penstock.pipeline.file import PipelineMistakes, read_pipeline

    if len(args.files) > 1 or not args.out:
        raise Misuse("export takes one file, and --out with a folder for the project")
    try:
        pipeline = read_pipeline(args.files[0])
    except PipelineMistakes as mistakes:
        _say_mistakes(args, args.files[0], mistakes.lines)
        return EXIT_MISUSE
    for path in export(pipeline, args.out):
        print(path)
    return 0


_ACTIONS: Final[dict[str, Callable[[argparse.Namespace], int]]] = {
    "check": _check,
    "run": _run,
    "test": _test,
    "infer": _infer,
    "export": _export,
}
_FLAGS: Final = {
    "once": ("run",),
    "master": ("run", "test", "infer"),
    "spark": ("check",),
    "url": ("check", "run", "infer", *pipeline_state.ACTIONS),
    "format": ("infer",),
    "sample": ("infer",),
    "to": ("export",),
    "out": ("export",),
}
"""Which flags are for which actions."""


# --- both --------------------------------------------------------------------------------------------------


def _check_installed() -> None:
    """Whether Spark's Python side is there."""
    try:
        import penstock.spark  # noqa: F401 - what it needs is what is asked for
    except ImportError as error:
        if (error.name or "").partition(".")[0] == "penstock":
            raise
        raise NotInstalled(f"{error.name} is not installed; pip install 'penstock[spark]'") from None


def _start_spark(name: str, master: str | None, settings: Mapping[str, str]) -> "SparkSession":
    from penstock.spark.session import local_session

    _quiet()
    session = local_session(name, master, {"spark.log.level": "OFF", **settings})
    _quiet_without_java()
    return session


def _quiet() -> None:
    # What PySpark would say there, with all of Java's words, is told as one line.
    for logger in ("SQLQueryContextLogger", "DataFrameQueryContextLogger"):
        logging.getLogger(logger).disabled = True
    # So is what is said of a Java that does not answer.
    logging.getLogger("py4j").setLevel(logging.CRITICAL)
    logging.getLogger().addFilter(lambda record: "py4j" not in record.pathname)  # some of it as nobody's


def _quiet_without_java() -> None:
    """Java that has ended is told as one line, and not by whoever listens for what it counts."""
    from pyspark import SparkContext

    server: Any = getattr(SparkContext._active_spark_context, "_accumulatorServer", None)
    if server is None:  # It is the server's of Spark Connect.
        return
    tell = server.handle_error

    def handle_error(request: object, address: object) -> None:
        if not isinstance(sys.exception(), (EOFError, ConnectionError)):
            tell(request, address)

    server.handle_error = handle_error


def _stop_spark(spark: "SparkSession") -> None:
    from penstock.pipeline.running import JAVA_GONE

    with suppress(*JAVA_GONE):
        spark.stop()


def _new_run(args: argparse.Namespace, pipeline: "Pipeline", spark: "SparkSession") -> "Run":
    from penstock.pipeline.running import Run

    return Run(pipeline, spark, _new_teller(args, pipeline.name), once=args.once)


def _new_teller(args: argparse.Namespace, name: str) -> "Teller":
    from penstock.pipeline.progress import Teller

    return Teller(name, lambda line: _print(args, line), time.monotonic, as_json=args.json)


def _print(args: argparse.Namespace, line: str) -> None:
    """In one piece: many pipelines speak at a time."""
    stream = sys.stdout if args.json else sys.stderr
    stream.write(f"{line}\n")
    stream.flush()


def _say(args: argparse.Namespace, line: str) -> None:
    if not args.json:
        print(line, file=sys.stderr, flush=True)
