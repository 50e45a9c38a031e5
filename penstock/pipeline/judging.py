"""Judging: what Spark makes of a pipeline before it runs, each mistake with its line in the file.

Nothing of a queue is read, and no query is started. What a start would refuse is found by asking the parts
of Spark that would: its analyzer for SQL, its check of output modes, its writers (with no rows, into a folder
that goes away again). Of what Spark would pass over without a word, a setting or a parser's option that does
not exist, it is asked which ones do.
"""

import re
import tempfile
from collections.abc import Iterable, Iterator
from difflib import get_close_matches
from typing import Any, Final

from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession

from penstock.common.given import File, SettingsError, Spot, hint_for, read_file, sections_of
from penstock.errors import PenstockError
from penstock.pipeline import plan
from penstock.pipeline.failures import cause_of
from penstock.pipeline.formats import DELTA, FORMATS, PENSTOCK
from penstock.pipeline.model import Pipeline
from penstock.pipeline.steps import StepFailed
from penstock.spark.options import STREAM, write_options
from penstock.spark.writing_columns import check_columns, columns_for

NEAR: Final = 0.85
"""How alike two names are of which one is taken for the other, mistyped."""


def mistakes(session: SparkSession, pipeline: Pipeline) -> list[str]:
    """What is wrong with a pipeline whose file is right in itself, in the order of its lines."""
    file = read_file(pipeline.file, "FILE")
    found = [*_settings(session, pipeline, file), *_parser_options(session, pipeline, file)]
    try:
        frame = plan.main_frame(session, pipeline)
    except StepFailed as error:
        found.append(sections_of(file, ("step",), "step")[error.number - 1][0].wrong(error.why))
    except PySparkException as error:
        found.append(Spot(file.path, "[source]", file, ("source",)).wrong(cause_of(error)))
    else:
        found += _sink(session, pipeline, frame, file)
    return sorted(map(str, found), key=lambda text: _line(text.removeprefix(file.path)))


def _line(text: str) -> int:
    found = re.match(", line ([0-9]+)", text)
    return int(found[1]) if found is not None else 0


# --- names that Spark would pass over --------------------------------------------------------------


def _settings(session: SparkSession, pipeline: Pipeline, file: File) -> Iterator[SettingsError]:
    if not pipeline.spark:
        return
    entries = _java(session).internal.config.ConfigEntry.listAllEntries().toArray()
    known = [entry.key() for entry in entries]
    for name in pipeline.spark:
        # Packages have settings that Spark has never heard of: only what looks like another one is wrong.
        near = get_close_matches(name, known, n=1, cutoff=NEAR) if name not in known else ()
        if near:
            spot = Spot(file.path, f"[run] spark {name}", file, ("run", "spark"))
            yield spot.wrong(f"Spark has no such setting; did you mean {near[0]}?")


def _java(session: SparkSession) -> Any:  # whatever Java has there
    """Spark's own classes. Where a pipeline runs, the session is this process's, and has them."""
    jvm: Any = session._jvm
    return jvm.org.apache.spark


def _parser_options(session: SparkSession, pipeline: Pipeline, file: File) -> Iterator[SettingsError]:
    catalyst = _java(session).sql.catalyst
    tables = {"json": catalyst.json.JSONOptions, "csv": catalyst.csv.CSVOptions}
    for number, source in enumerate(pipeline.sources):
        parse = source.parse
        if parse is None or parse.format not in tables or not parse.options:
            continue
        known = sorted(str(tables[parse.format].getAllOptions().mkString(",")).split(","))
        for name in parse.options:
            if name.lower() not in map(str.lower, known):
                hint = hint_for(name, {it: it for it in known}, known)
                spot = _parse_spot(file, number).inner("options")
                yield spot.wrong(f"Spark's parser of {parse.format} has no option {name!r}; {hint}")


def _parse_spot(file: File, number: int) -> Spot:
    """Where it is said how the payloads of a source become columns."""
    source = file.tables.get("source")
    if isinstance(source, list):
        return sections_of(file, ("source",), "source")[number][0].inner("parse")
    if "parse" in file.tables:
        return Spot(file.path, "[parse]", file, ("parse",))
    return Spot(file.path, "[source.parse]", file, ("source", "parse"))


# --- the sink --------------------------------------------------------------------------------------


def _sink(session: SparkSession, pipeline: Pipeline, frame: DataFrame, file: File) -> Iterable[SettingsError]:
    sink = pipeline.sink
    spot = Spot(file.path, "[sink]", file, ("sink",))
    found: list[SettingsError] = []
    columns = {name.lower(): name for name in frame.columns}
    for name in sink.partition_by:
        if name.lower() not in columns:
            hint = hint_for(name, columns, frame.columns)
            found.append(spot.inner("partitionBy").wrong(f"there is no column {name!r}; {hint}"))
    try:
        if sink.format == PENSTOCK:
            _check_messages(frame, dict(sink.options))
        elif not found and sink.format in FORMATS and sink.format != DELTA:
            _write_nothing(session, pipeline, frame)
    except PenstockError as error:
        found.append(spot.wrong(error))
    except PySparkException as error:
        found.append(spot.wrong(cause_of(error)))
    try:
        _check_mode(session, frame, sink.mode)
    except PySparkException as error:
        said = "mode" in file.tables["sink"]
        found.append((spot.inner("mode") if said else spot).wrong(cause_of(error)))
    return found


def _check_messages(frame: DataFrame, options: dict[str, str]) -> None:
    said = write_options(options, STREAM)
    check_columns(frame.schema, columns_for(said, payloads="value" in frame.columns), said.queue)


def _write_nothing(session: SparkSession, pipeline: Pipeline, frame: DataFrame) -> None:
    sink = pipeline.sink
    if not FORMATS[sink.format].needs_path:
        return
    options = {name: value for name, value in sink.options.items() if name != "path"}
    with tempfile.TemporaryDirectory() as folder:
        writing = session.createDataFrame([], frame.schema).write.format(sink.format).options(**options)
        if sink.partition_by:
            writing = writing.partitionBy(*sink.partition_by)
        writing.save(f"{folder}/nothing")


def _check_mode(session: SparkSession, frame: DataFrame, mode: str) -> None:
    spark = _java(session).sql
    output_mode = getattr(spark.streaming.OutputMode, mode.capitalize())()
    checker = spark.catalyst.analysis.UnsupportedOperationChecker
    checker.checkForStreaming(frame._jdf.queryExecution().analyzed(), output_mode)
