"""File: a pipeline's TOML, judged as a whole before Spark is started.

    name = "orders"
    [source]         any reading option of the data source; several: [[source]], each with a name
    [parse]          how payloads become columns; of one of several sources: [source.parse]
    [[step]]         sql or python, in order
    [run]            trigger, checkpoint, watermark, spark

and what `ends.py` reads: tables, expectations, sinks and tests.

Rules that always hold:
  * All mistakes are told, not only the first; each is one line with the file, the line, the key, and what
    would be right.
  * Nothing that was written is ignored: a key that does not exist is a mistake.
  * What only Spark can judge is in `Pipeline.unjudged`.

How it fails: `PipelineMistakes`. A step in Python is imported here, so that whatever that does is done.
"""

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from importlib.util import find_spec
from typing import Any, Final

from penstock.common.given import FileKey, Given, SettingsError, Spot, hint_for
from penstock.common.kinds import NAME, Text, Word, WrongValue
from penstock.log.tables import VIEWS
from penstock.pipeline.coding import AVRO, PACKAGES, PROTOBUF, WrongDefinition, ddl_of, fields_of
from penstock.pipeline.ddl import TIMES, read_ddl
from penstock.pipeline.ends import EXPECT, SINK, TABLE, TEST, VIEW, Ends
from penstock.pipeline.formats import CONSOLE
from penstock.pipeline.functions import NeedsSpark, load_function, make_importable
from penstock.pipeline.kinds import (
    ONCE,
    VIEW_NAME,
    Conf,
    OptionKind,
    SchemaKind,
    Sql,
    Table,
    Texts,
    Trigger,
    WatermarkKind,
)
from penstock.pipeline.model import (
    DEAD,
    DROP,
    FAIL,
    INPUT,
    Field,
    Parse,
    Pipeline,
    Sink,
    Source,
    Step,
    Watermark,
    step_name,
)
from penstock.pipeline.sections import PipelineMistakes, expanded_file
from penstock.spark.options import READING, STREAM, WrongOption, read_options

__all__ = [
    "EXPECT",
    "PARSE",
    "RUN",
    "SINK",
    "SOURCE",
    "STEP",
    "TABLE",
    "TEST",
    "PipelineMistakes",
    "read_pipeline",
]

TOP: Final = (
    FileKey("name", NAME, "what it is called, in Spark and at the broker", required=True),
    FileKey("source", Table(), "what to read"),
    FileKey("parse", Table(), "how payloads become columns"),
    FileKey("table", Table(), "what to join"),
    FileKey("step", Table(), "what is done with them"),
    FileKey("expect", Table(), "what holds for every row"),
    FileKey("sink", Table(), "where they go", required=True),
    FileKey("test", Table(), "rows in, rows out"),
    FileKey("run", Table(), "how it runs"),
)
SOURCE: Final = (
    FileKey("name", VIEW_NAME, "the view that it is in SQL"),
    FileKey("watermark", WatermarkKind(), "how late rows may come"),
    FileKey("parse", Table(), "how payloads become columns"),
    # Copies of bad records are never read.
    *(FileKey(option.name, OptionKind(option), "") for option in READING if option.name != "copies"),
)
PARSE: Final = (
    FileKey("format", Word(("json", "csv", "text", AVRO, PROTOBUF)), "what payloads are", required=True),
    FileKey("schema", SchemaKind(), "the columns"),
    FileKey("schema-file", Text("a path", "PATH"), "the schema of avro, the descriptor set of protobuf"),
    FileKey("message", Text("the full name of a message", "NAME"), "which one of the descriptor set"),
    FileKey("rescued", VIEW_NAME, "the column for what does not fit into the others"),
    FileKey("on-bad-record", Word((DEAD, DROP, FAIL)), "what becomes of a record that does not fit"),
    FileKey("options", Texts(), "of Spark's parser"),
)
STEP: Final = (
    FileKey("name", VIEW_NAME, "the view that its result is in SQL"),
    FileKey("from", VIEW, "the view that is its input"),
    FileKey("sql", Sql(), "a query over the views"),
    FileKey("python", Text("a module and a function in it, as in module:function", "PATH"), "a function"),
)
RUN: Final = (
    FileKey("trigger", Trigger(), "how often"),
    FileKey("checkpoint", Text("a path", "PATH"), "where it remembers how far it has come"),
    FileKey("watermark", WatermarkKind(), "how late rows may come"),
    FileKey("spark", Conf(), "settings of Spark"),
)

_RESERVED_PARSER_OPTIONS: Final = ("mode", "columnNameOfCorruptRecord")

_PARSE_RULES: Final = (
    (
        "schema",
        ("json", "csv", AVRO, PROTOBUF),
        "a text has no columns: it is the column value; leave it out",
    ),
    ("schema", ("json", "csv", "text"), "the columns are those of schema-file; leave it out"),
    ("schema-file", (AVRO, PROTOBUF), "it is for avro and protobuf; say the columns with schema"),
    ("message", (PROTOBUF,), "only protobuf has messages; leave it out"),
    ("rescued", ("json",), "only of json something can be rescued; leave it out"),
    (
        "options",
        ("json", "csv", "text"),
        "they are for Spark's parsers, which do not read this; leave them out",
    ),
)
"""Which keys are for which formats, and what to say to the others."""


def read_pipeline(path: str) -> Pipeline:
    """The pipeline in a file."""
    try:
        file, mistakes = expanded_file(path)
    except SettingsError as error:
        raise PipelineMistakes([str(error)]) from None
    return _Reader(file, mistakes).pipeline()


class _Reader(Ends):
    """One file on its way in."""

    # --- the whole -------------------------------------------------------------------------------

    def pipeline(self) -> Pipeline:
        tables = self._file.tables
        top = self._top(tables)
        run = self._section(self._spot("[run]", "run"), _table(tables, "run"), RUN)
        sources = self._sources(tables, run.get("watermark"))
        static = self._tables(sources)
        views = [*(it.name for it in sources), *(it.name for it in static)]
        givable = list(views)
        steps = self._steps(tables, sources, views)
        result = step_name(steps, len(steps) - 1) if steps else sources[0].name if sources else INPUT
        streams = [name for name in views if all(name != it.name for it in static)]
        expectations = self._expectations(streams, result)
        sinks = self._sinks(views)
        tests = self._tests(givable, views, sinks, expectations)
        checkpoint = run.get("checkpoint")
        if sinks and checkpoint is None:
            self._check_without_checkpoint(sinks, sources)
        if self._mistakes:
            raise PipelineMistakes(sorted(map(str, self._mistakes), key=self._line))
        trigger = run["trigger"].value if "trigger" in run else None
        return Pipeline(
            name=top["name"].value,
            file=self._file.path,
            sources=tuple(sources),
            steps=tuple(steps),
            sinks=tuple(sinks),
            interval=trigger if trigger != ONCE else None,
            once=trigger == ONCE,
            checkpoint=checkpoint.value if checkpoint is not None else None,
            spark=run["spark"].value if "spark" in run else {},
            unjudged=tuple(self._unjudged),
            text=self._file,
            tables=tuple(static),
            expectations=tuple(expectations),
            tests=tuple(tests),
        )

    def _top(self, tables: Mapping[str, Any]) -> dict[str, Given]:
        # Where there may be several, [[NAME]] is read by those who know it.
        several = ("source", "step", "table", "expect", "sink", "test")
        plain = {
            name: {} if name in several and isinstance(value, list) else value
            for name, value in tables.items()
            if name not in ("source", "step")
        }
        return self._section(self._absent("the file"), plain, TOP)

    def _check_without_checkpoint(self, sinks: Sequence[Sink], sources: Iterable[Source]) -> None:
        spot = self._spot("[run]", "run") if "run" in self._file.tables else self._absent("[run]")
        wanted = 'add checkpoint = and a path, as in checkpoint = "out/_checkpoint/NAME"'
        if any(sink.format != CONSOLE for sink in sinks):
            self._mistake(spot, f"there is no checkpoint, by which a restart knows where to go on; {wanted}")
        elif any(source.parse is not None and source.parse.on_bad_record == DEAD for source in sources):
            self._mistake(
                spot,
                "there is no checkpoint, by which a bad record is told once; "
                f'{wanted}, or on-bad-record = "{DROP}" under [parse]',
            )

    # --- sources ---------------------------------------------------------------------------------

    def _sources(self, tables: Mapping[str, Any], watermark: Given | None) -> list[Source]:
        given = tables.get("source")
        if given is None:
            self._mistake(self._absent("[source]"), 'there is none; add [source] with subscribe = "QUEUE"')
            return []
        if isinstance(given, dict):
            sections = [(self._spot("[source]", "source"), given)]
        else:
            sections = self._sections("source")
        several = len(sections) > 1
        if several and "parse" in tables:
            self._mistake(
                self._spot("[parse]", "parse"),
                "there are several sources; write it as [source.parse] under its own",
            )
        if several and watermark is not None:
            self._mistake(
                watermark.spot, "there are several sources; write it under its own, beside subscribe"
            )
        sources: list[Source] = []
        for spot, table in sections:
            source = self._source(spot, table, several, tables, None if several else watermark)
            # Spark makes no difference between views whose names differ in case.
            same = [other.name for other in sources if other.name.lower() == source.name.lower()]
            if same:
                self._mistake(spot.inner("name"), f"another source is called {same[0]!r}; take another name")
            reader = source.options.get("reader", "").strip()
            same = [other.name for other in sources if other.options.get("reader", "").strip() == reader]
            if reader and same:
                self._mistake(
                    spot.inner("reader"),
                    f"source {same[0]!r} has the same, and each would let go of what the other holds; take "
                    "another name",
                )
            sources.append(source)
        return sources

    def _source(
        self,
        spot: Spot,
        table: Mapping[str, Any],
        several: bool,
        tables: Mapping[str, Any],
        watermark: Given | None,
    ) -> Source:
        given = self._section(spot, table, SOURCE)
        name = given["name"].value if "name" in given else INPUT
        if several and "name" not in table:
            self._mistake(spot, "there is no name; add name = and what it is called in SQL")
        elif several and "name" in given and name.lower() == INPUT:
            self._mistake(
                given["name"].spot, f"{INPUT!r} is the result of the step before; take another name"
            )
        options = {key: it.value for key, it in given.items() if key not in ("name", "watermark", "parse")}
        self._judge(spot, table, options)
        view = options.get("view", "messages").lower()
        parse = self._parse(spot, table, view, None if several else tables.get("parse"))
        own = given.get("watermark", watermark)
        if "watermark" in given and watermark is not None:
            self._mistake(watermark.spot, "there is another one under [source]; leave one out")
        if own is not None:
            self._check_watermark(own, view, parse)
        return Source(name, options, view, parse, own.value if own is not None else None)

    def _judge(self, spot: Spot, table: Mapping[str, Any], options: Mapping[str, str]) -> None:
        """What no option says alone."""
        said = {key for key in table if key not in ("name", "watermark", "parse")}
        if said != options.keys():
            return  # some are wrong by themselves
        try:
            read_options(options, STREAM)
        except WrongOption as error:
            self._mistake(spot, error)

    def _check_watermark(self, given: Given, view: str, parse: Parse | None) -> None:
        watermark: Watermark = given.value
        types = {column.name: column.type for column in VIEWS.get(view, ())}
        if parse is not None:
            types.pop("value", None)
            if parse.fields is None:
                return
            types |= {field.name: field.type for field in parse.fields}
            types |= {parse.rescued: "string"} if parse.rescued is not None else {}
        by_name = {name.lower(): name for name in types}
        name = by_name.get(watermark.column.lower())
        if name is None:
            hint = hint_for(watermark.column, {it: it for it in types}, types)
            self._mistake(given.spot, f"there is no column {watermark.column!r}; {hint}")
        elif types[name] not in TIMES:
            self._mistake(given.spot, f"column {name!r} is {types[name]}; a watermark needs a timestamp")

    # --- parse -----------------------------------------------------------------------------------

    def _parse(self, source: Spot, table: Mapping[str, Any], view: str, top: object) -> Parse | None:
        spot = Spot(source.source, "[source.parse]", source.file, (*source.keys, "parse"))
        if "parse" in table and top is not None:
            self._mistake(
                self._spot("[parse]", "parse"), "there is another one under the source; leave one out"
            )
        section = table.get("parse")
        if section is None and top is not None:
            spot, section = self._spot("[parse]", "parse"), top
        if not isinstance(section, dict):
            return None
        given = self._section(spot, section, PARSE)
        if view != "messages":
            self._mistake(spot, f"view {view!r} has no payload to parse; leave it out, or read view messages")
        its_format = given["format"].value if "format" in given else None
        schema = given["schema"].value if "schema" in given else ""
        for key, formats, why in _PARSE_RULES:
            if key in section and its_format is not None and its_format not in formats:
                self._mistake(spot.inner(key), why)
        if its_format in ("json", "csv") and "schema" not in section:
            self._mistake(spot, "there is no schema; add schema = and columns as in id bigint, region string")
        options: dict[str, str] = given["options"].value if "options" in given else {}
        for name in options:
            if name.lower() in (it.lower() for it in _RESERVED_PARSER_OPTIONS):
                self._mistake(given["options"].spot, f"{name!r} is not yours to set; on-bad-record does it")
        fields, definition = read_ddl(schema) if schema else (), b""
        message = given["message"].value if "message" in given else ""
        if its_format in (AVRO, PROTOBUF):
            fields, definition = self._defined(spot, given, its_format, message)
            schema = ddl_of(fields)
        if fields is None:
            self._unjudged.append(f"{spot.name} schema")
        rescued = given["rescued"].value if "rescued" in given else None
        if rescued is not None and any(it.name.lower() == rescued.lower() for it in fields or ()):
            self._mistake(given["rescued"].spot, f"the schema has a column {rescued!r}; take another name")
        on_bad_record = given["on-bad-record"].value if "on-bad-record" in given else DEAD
        return Parse(
            its_format or "text", schema, fields, options, on_bad_record, rescued, definition, message
        )

    def _defined(
        self, spot: Spot, given: Mapping[str, Given], its_format: str, message: str
    ) -> tuple[tuple[Field, ...], bytes]:
        """The columns of a schema that stands in a file of its own, beside this one, and that schema."""
        needed = {AVRO: ("schema-file",), PROTOBUF: ("schema-file", "message")}[its_format]
        for key in needed:
            if key not in given:
                self._mistake(spot, f"there is no {key}, which {its_format} needs; add {key} =")
        if any(key not in given for key in needed):
            return (), b""
        path = os.path.join(os.path.dirname(os.path.abspath(self._file.path)), given["schema-file"].value)
        package = PACKAGES[its_format].partition(".")[0]
        if find_spec(package) is None or find_spec(PACKAGES[its_format]) is None:
            self._mistake(
                given["format"].spot, f"{its_format} needs a package; pip install 'penstock[{its_format}]'"
            )
            return (), b""
        try:
            with open(path, "rb") as file:
                definition = file.read()
            return fields_of(its_format, definition, message), definition
        except OSError as error:
            self._mistake(given["schema-file"].spot, f"it cannot be read ({error.strerror}): {path}")
        except WrongDefinition as error:
            named = "message" if "there is no message" in str(error) else "schema-file"
            self._mistake(given[named].spot, error)
        return (), b""

    # --- steps -----------------------------------------------------------------------------------

    def _steps(self, tables: Mapping[str, Any], sources: Sequence[Source], views: list[str]) -> list[Step]:
        """The steps; their names are views from then on."""
        make_importable(os.path.dirname(os.path.abspath(self._file.path)))
        taken = {INPUT, *(name.lower() for name in views)}
        steps: list[Step] = []
        if "step" in tables:
            for spot, table in self._sections("step"):
                step = self._step(spot, table, taken)
                if "from" in table and isinstance(table["from"], str):
                    step = replace(step, of=self._view(Given(table["from"], spot.inner("from")), views))
                steps.append(step)
                views.append(step_name(steps, len(steps) - 1))
        elif len(sources) > 1 and not all("from" in table for _, table in self._some("sink")):
            self._mistake(self._absent("[[step]]"), "there is none; add one that joins the sources with SQL")
        return steps

    def _step(self, spot: Spot, table: Mapping[str, Any], taken: set[str]) -> Step:
        given = self._section(spot, table, STEP)
        if ("sql" in table) == ("python" in table):
            self._mistake(spot, "say what to do, with one of sql and python")
        name = given["name"].value if "name" in given else None
        if name is not None:
            if name.lower() in taken:
                self._mistake(given["name"].spot, f"{name!r} is another view already; take another name")
            taken.add(name.lower())
        if "sql" in given:
            self._unjudged.append(f"{spot.name} sql")
            return Step(name, given["sql"].value, None, None)
        if "python" not in given:
            return Step(name, None, None, None)
        path = given["python"].value
        try:
            function, takes_views = load_function(path, self._file.path)
        except NeedsSpark:
            self._unjudged.append(f"{spot.name} python")
            return Step(name, None, None, path)
        except WrongValue as error:
            self._mistake(given["python"].spot, error, f" = {path!r}")
            return Step(name, None, None, path)
        return Step(name, None, function, path, takes_views)


def _table(tables: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """A section; an empty one where something else stands there, which is told elsewhere."""
    found = tables.get(name)
    return found if isinstance(found, dict) else {}
