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

from penstock.common.given import File, SettingsError, Spot, hint_for, sections_of
from penstock.errors import PenstockError
from penstock.pipeline.batchwise import fanned_out
from penstock.pipeline.ends import PLACE
from penstock.pipeline.failures import cause_of
from penstock.pipeline.flows import flows_of, streaming_graph
from penstock.pipeline.formats import DELTA, FORMATS, PENSTOCK
from penstock.pipeline.graph import Graph, StepFailed
from penstock.pipeline.model import Pipeline, Sink
from penstock.spark.options import STREAM, write_options
from penstock.spark.writing_columns import check_columns, columns_for

NEAR: Final = 0.85
"""How alike two names are of which one is taken for the other, mistyped."""


def mistakes(session: SparkSession, pipeline: Pipeline) -> list[str]:
    """What is wrong with a pipeline whose file is right in itself, in the order of its lines."""
    file = pipeline.text
    found = [*_settings(session, pipeline, file), *_parser_options(session, pipeline, file)]
    try:
        graph = streaming_graph(session, pipeline)
        flows_of(session, pipeline, graph)
    except StepFailed as error:
        found.append(_section(file, error.section, error.number).wrong(error.why))
    except PySparkException as error:
        found.append(Spot(file.path, "[source]", file, ("source",)).wrong(cause_of(error)))
    else:
        for number, sink in enumerate(pipeline.sinks):
            rows = graph.frames[pipeline.origin(sink)]
            found += _sink(session, sink, rows, _section(file, "sink", number))
    return sorted(map(str, found), key=lambda text: _line(text.removeprefix(file.path)))


def placed(pipeline: Pipeline, error: StepFailed) -> str:
    """What is wrong, with its line."""
    return str(_section(pipeline.text, error.section, error.number).wrong(error.why))


def _section(file: File, name: str, number: int) -> Spot:
    """Where a section is, of which there may be several."""
    if isinstance(file.tables[name], list):
        return sections_of(file, (name,), name)[number][0]
    return Spot(file.path, f"[{name}]", file, (name,))


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


def _sink(session: SparkSession, sink: Sink, frame: DataFrame, spot: Spot) -> Iterable[SettingsError]:
    found: list[SettingsError] = []
    columns = {name.lower(): name for name in frame.columns}
    used = {"partitionBy": sink.partition_by}
    if sink.format == PENSTOCK:
        used["queue"] = tuple(PLACE.findall(sink.options.get("queue", "")))
    for key, names in used.items():
        for name in names:
            if name.lower() not in columns:
                hint = hint_for(name, columns, frame.columns)
                found.append(spot.inner(key).wrong(f"there is no column {name!r}; {hint}"))
    try:
        if sink.format == PENSTOCK and not found:
            rows, own = fanned_out(frame, sink)
            options = {**sink.options, **own}
            _check_messages(rows, {name: text for name, text in options.items() if text})
        elif not found and sink.format in FORMATS and sink.format != DELTA:
            _write_nothing(session, sink, frame)
    except PenstockError as error:
        found.append(spot.wrong(error))
    except PySparkException as error:
        found.append(spot.wrong(cause_of(error)))
    try:
        _check_mode(session, frame, sink.mode)
    except PySparkException as error:
        assert spot.file is not None
        said: Any = spot.file.tables
        for part in spot.keys:
            said = said[part]
        found.append((spot.inner("mode") if "mode" in said else spot).wrong(cause_of(error)))
    return found


def _check_messages(frame: DataFrame, options: dict[str, str]) -> None:
    said = write_options(options, STREAM)
    check_columns(frame.schema, columns_for(said, payloads="value" in frame.columns), said.queue)


def _write_nothing(session: SparkSession, sink: Sink, frame: DataFrame) -> None:
    if not FORMATS[sink.format].needs_path:
        return
    options = {name: value for name, value in sink.options.items() if name != "path"}
    with tempfile.TemporaryDirectory() as folder:
        writing = session.createDataFrame([], frame.schema).write.format(sink.format).options(**options)
        if sink.partition_by:
            writing = writing.partitionBy(*sink.partition_by)
        writing.save(f"{folder}/nothing")


def check_modes(session: SparkSession, pipeline: Pipeline, graph: Graph) -> None:
    """Whether Spark would write each sink's rows as a stream."""
    for number, sink in enumerate(pipeline.sinks):
        try:
            _check_mode(session, graph.frames[pipeline.origin(sink)], sink.mode)
        except PySparkException as error:
            raise StepFailed(pipeline.file, "sink", number, sink.name, cause_of(error)) from error


def _check_mode(session: SparkSession, frame: DataFrame, mode: str) -> None:
    spark = _java(session).sql
    output_mode = getattr(spark.streaming.OutputMode, mode.capitalize())()
    checker = spark.catalyst.analysis.UnsupportedOperationChecker
    checker.checkForStreaming(frame._jdf.queryExecution().analyzed(), output_mode)
