"""Exporting: a pipeline as a project of Spark Declarative Pipelines, `spark-pipelines run`.

    spark-pipeline.yml         its name, its settings, and where its checkpoints are
    transformations/NAME.py    a view for each source, table and step; a sink and a flow for each sink, and
                               for the bad records of each source

Records are parsed by the same code (`parsing.py`), so that the same ones are good. In its SQL, a view that is
a stream is read as one, `STREAM(name)`.

Rules that always hold:
  * What cannot be said there is refused, all of it, by name: nothing is left out without a word.
  * No token is written: the source takes it from the environment, as always. What else is secret by its name
    is refused.

How it fails: `NotExported`.
"""

import json
import os
import re
from collections.abc import Iterator, Mapping
from typing import Final

from penstock.errors import PenstockError
from penstock.log.tables import VIEWS
from penstock.pipeline.batchwise import broker_of
from penstock.pipeline.coding import AVRO, PROTOBUF
from penstock.pipeline.ends import PLACE
from penstock.pipeline.flows import reader_of
from penstock.pipeline.formats import APPEND, CONSOLE, DELTA, PENSTOCK
from penstock.pipeline.model import DEAD, DROP, FAIL, INPUT, Pipeline, Source, step_name
from penstock.spark.options import BAD_RECORD

_HEAD = '''"""{file}, as a project of Spark Declarative Pipelines; written by `penstock pipeline export`."""

from pyspark import pipelines as dp
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as sql

from penstock.pipeline.model import Field, Parse
from penstock.pipeline.parsing import bad_records, good_records, parsed, without_copies

spark = SparkSession.active()
'''


_SECRET: Final = re.compile("secret|password|token|access.?key", re.IGNORECASE)
_SECRET_IN_URL: Final = re.compile("://[^/]*@")


class NotExported(PenstockError):
    """What of a pipeline cannot be exported, a line for each."""


def export(pipeline: Pipeline, folder: str) -> list[str]:
    """Write the project into a new folder; the paths of its files."""
    refused = list(_refused(pipeline))
    if refused:
        raise NotExported("\n".join(f"{pipeline.file}: {it}" for it in refused))
    assert pipeline.checkpoint is not None, "what needs none was refused"
    settings = {"spark.sql.session.timeZone": "UTC", **pipeline.spark}
    spec = {
        "name": pipeline.name,
        "storage": f"file://{os.path.abspath(pipeline.checkpoint)}/sdp",
        "libraries": [{"glob": {"include": "transformations/**"}}],
        "configuration": settings,
    }
    parts = [_HEAD.format(file=os.path.basename(pipeline.file)), *_views(pipeline), *_sinks(pipeline)]
    files = {
        "spark-pipeline.yml": json.dumps(spec, indent=2) + "\n",  # which is YAML
        f"transformations/{re.sub('[^A-Za-z0-9_]', '_', pipeline.name)}.py": "\n\n".join(parts),
    }
    if os.path.exists(folder) and os.listdir(folder):
        raise NotExported(f"{folder}: there is something in it; name a new folder")
    os.makedirs(os.path.join(folder, "transformations"), exist_ok=True)
    for name, text in files.items():
        with open(os.path.join(folder, name), "w", encoding="utf-8") as file:
            file.write(text)
    return [os.path.join(folder, name) for name in files]


def _without_token(options: Mapping[str, str]) -> dict[str, str]:
    return {name: text for name, text in options.items() if name != "token"}


def _secrets(where: str, options: Mapping[str, str]) -> Iterator[str]:
    for name, text in options.items():
        if _SECRET.search(name) or _SECRET_IN_URL.search(text):
            yield f"{where}: {name} cannot be exported: it would stand in a file; leave it out, and add it"


def _refused(pipeline: Pipeline) -> Iterator[str]:
    yield from _secrets("[run] spark", pipeline.spark)
    for source in pipeline.sources:
        yield from _secrets(f"source {source.name}", _without_token(source.options))
        parse = source.parse
        if parse is not None and (parse.format in (AVRO, PROTOBUF) or parse.fields is None):
            what = parse.format if parse.fields is not None else "a schema that only Spark can read"
            yield f"source {source.name}: {what} cannot be exported; parse json, csv or text"
    for table in pipeline.tables:
        yield from _secrets(f"[[table]] {table.name}", table.options)
        if table.format == DELTA:
            yield f"[[table]] {table.name}: delta cannot be exported: Spark has no reader of its own for it"
    for number, step in enumerate(pipeline.steps):
        name = step_name(pipeline.steps, number)
        if step.sql is None:
            yield f"[[step]] {name}: python cannot be exported; say it in SQL"
        elif re.search(rf"\b{INPUT}\s*\.", step.sql, re.IGNORECASE):
            yield f"[[step]] {name}: {INPUT}.COLUMN cannot be exported; give {INPUT} another alias"
    for expectation in pipeline.expectations:
        if expectation.on_violation not in (DROP, FAIL):
            why = f"{expectation.on_violation} cannot be exported: nobody counts there; drop and fail can"
            yield f"[[expect]] {expectation.name}: {why}"
    for sink in pipeline.sinks:
        where = f"[[sink]] {sink.name}" if sink.name else "[sink]"
        options = _without_token(sink.options) if sink.format == PENSTOCK else sink.options
        yield from _secrets(where, options)
        if sink.format in (DELTA, CONSOLE):
            yield f"{where}: {sink.format} cannot be exported: Spark has no sink of that name there"
        if sink.mode != APPEND:
            yield f"{where}: mode {sink.mode} cannot be exported; a sink there takes append"
        if sink.partition_by:
            yield f"{where}: partitionBy cannot be exported; sinks have none there"


# --- what is written ---------------------------------------------------------------------------------------


def _view_of(name: str) -> str:
    """What a view is called there, where no name has a space in it."""
    return name.replace(" ", "_")


def _views(pipeline: Pipeline) -> Iterator[str]:
    for source in pipeline.sources:
        yield from _source(pipeline, source)
    for table in pipeline.tables:
        schema = f".schema({table.schema!r})" if table.schema is not None else ""
        read = f"spark.read.format({table.format!r}).options(**{dict(table.options)!r}){schema}"
        yield _function("temporary_view", table.name, f"{read}.load({os.path.abspath(table.path)!r})")
    before = pipeline.sources[0].name if len(pipeline.sources) == 1 else ""
    streams = [source.name for source in pipeline.sources]
    for number, step in enumerate(pipeline.steps):
        name = step_name(pipeline.steps, number)
        assert step.sql is not None, "a step in Python was refused"
        names = {stream.lower(): stream for stream in streams} | {INPUT: step.of or before}
        text = step.sql
        for view, stream in names.items():
            read = rf"\b(from|join)(\s+)`?{re.escape(view)}`?(?![\w.`(])"
            text = re.sub(read, rf"\1\2STREAM({_view_of(stream)})", text, flags=re.IGNORECASE)
        yield _function("temporary_view", name, f"spark.sql({text!r}){_expected(pipeline, name)}")
        streams.append(name)
        before = name


def _source(pipeline: Pipeline, source: Source) -> Iterator[str]:
    options = _without_token(source.options)
    options["reader"] = f"{reader_of(pipeline, source)}.sdp"
    read = f"spark.readStream.format('penstock').options(**{options!r}).load()"
    if source.view == "messages":
        read = f"without_copies({read})"
    parse = source.parse
    if parse is not None:
        columns = [column.name for column in VIEWS[source.view]]
        columns += ["headers"] if source.options.get("includeHeaders") == "true" else []
        constant = f"PARSE_{source.name.upper()}"
        yield f"{constant} = {parse!r}\n"
        if parse.on_bad_record == DEAD:
            to = _without_token(broker_of(source))
            letters = f"bad_records(parsed({read}, {constant}), {constant}, {pipeline.name!r})"
            yield from _sink(f"bad_records_{source.name}", PENSTOCK, {**to, "dead": BAD_RECORD}, letters)
        read = f"good_records(parsed({read}, {constant}), {constant}, {columns!r})"
    if source.watermark is not None:
        read += f".withWatermark({source.watermark.column!r}, {source.watermark.delay!r})"
    yield _function("temporary_view", source.name, read + _expected(pipeline, source.name))


def _expected(pipeline: Pipeline, view: str) -> str:
    """What lets only those rows through that expectations do."""
    found = ""
    for expectation in pipeline.expectations:
        if expectation.of == view:
            holds = f"coalesce(cast(({expectation.sql}) as boolean), false)"
            if expectation.on_violation == FAIL:
                said = f"expectation {expectation.name}: a row is against it"
                holds = f"if({holds}, true, cast(raise_error('{said}') as boolean))"
            found += f".where(sql.expr({holds!r}))"
    return found


def _sinks(pipeline: Pipeline) -> Iterator[str]:
    for sink in pipeline.sinks:
        options = dict(sink.options)
        frame = f"spark.readStream.table({_view_of(pipeline.origin(sink))!r})"
        if sink.format == PENSTOCK:
            options = _without_token({**broker_of(pipeline.sources[0]), **options})
            names = PLACE.findall(options.get("queue", ""))
            if names:
                frame = f"spark.sql({_fanned_out(pipeline.origin(sink), options.pop('queue'), names)!r})"
        elif "path" in options:
            options["path"] = os.path.abspath(options["path"])
        yield from _sink(f"sink_{sink.name}" if sink.name else "sink", sink.format, options, frame)


def _fanned_out(view: str, queue: str, names: list[str]) -> str:
    """As SQL: a frame of which a column is dropped would be looked at before its view is there."""
    texts = PLACE.split(queue)  # every second one is a column
    parts = [f"cast(`{it}` as string)" if at % 2 else _quoted(it) for at, it in enumerate(texts)]
    left_out = ", ".join(f"`{name}`" for name in dict.fromkeys(names))
    return f"select * except ({left_out}), concat({', '.join(parts)}) as queue from STREAM({_view_of(view)})"


def _quoted(text: str) -> str:
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"


def _sink(name: str, its_format: str, options: dict[str, str], frame: str) -> Iterator[str]:
    yield f"dp.create_sink({name!r}, {its_format!r}, {options!r})\n"
    yield f"@dp.append_flow(target={name!r})\ndef to_{name}() -> DataFrame:\n    return {frame}\n"


def _function(decorator: str, view: str, frame: str) -> str:
    name = _view_of(view)
    return f"@dp.{decorator}(name={name!r})\ndef view_{name}() -> DataFrame:\n    return {frame}\n"
