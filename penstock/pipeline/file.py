"""File: a pipeline's TOML, judged as a whole before Spark is started.

    name = "orders"
    [source]         any reading option of the data source; several: [[source]], each with a name
    [parse]          how payloads become columns; of one of several sources: [source.parse]
    [[step]]         sql or python, in order
    [sink]           format, mode, and the format's options
    [run]            trigger, checkpoint, watermark, spark

Rules that always hold:
  * All mistakes are told, not only the first; each is one line with the file, the line, the key, and what
    would be right.
  * Nothing that was written is ignored: a key that does not exist is a mistake.
  * What only Spark can judge is in `Pipeline.unjudged`.

How it fails: `PipelineMistakes`. A step in Python is imported here, so that whatever that does is done.
"""

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from difflib import get_close_matches
from typing import Any, Final

from penstock.common.given import (
    File,
    FileKey,
    Given,
    SettingsError,
    Spot,
    check,
    hint_for,
    read_file,
    sections_of,
)
from penstock.common.kinds import NAME, Kind, Text, Word, WrongValue
from penstock.errors import PenstockError
from penstock.log.tables import VIEWS
from penstock.pipeline.ddl import TIMES, read_ddl
from penstock.pipeline.formats import APPEND, CONSOLE, FORMATS, MODES, PENSTOCK, Format
from penstock.pipeline.functions import NeedsSpark, load_function, make_importable
from penstock.pipeline.kinds import (
    ONCE,
    VIEW_NAME,
    Columns,
    Conf,
    OptionKind,
    SchemaKind,
    Sql,
    Table,
    Texts,
    Trigger,
    WatermarkKind,
    text_of,
)
from penstock.pipeline.model import (
    DEAD,
    DROP,
    FAIL,
    INPUT,
    Parse,
    Pipeline,
    Sink,
    Source,
    Step,
    Watermark,
)
from penstock.spark.options import READING, STREAM, WrongOption, read_options, write_options

TOP: Final = (
    FileKey("name", NAME, "what it is called, in Spark and at the broker", required=True),
    FileKey("source", Table(), "what to read"),
    FileKey("parse", Table(), "how payloads become columns"),
    FileKey("step", Table(), "what is done with them"),
    FileKey("sink", Table(), "where they go", required=True),
    FileKey("run", Table(), "how it runs"),
)
SOURCE: Final = (
    FileKey("name", VIEW_NAME, "the view that it is in SQL"),
    FileKey("watermark", WatermarkKind(), "how late rows may come"),
    FileKey("parse", Table(), "how payloads become columns"),
    *(FileKey(option.name, OptionKind(option), "") for option in READING),
)
PARSE: Final = (
    FileKey("format", Word(("json", "csv", "text")), "what payloads are", required=True),
    FileKey("schema", SchemaKind(), "the columns"),
    FileKey("on-bad-record", Word((DEAD, DROP, FAIL)), "what becomes of a record that does not fit"),
    FileKey("options", Texts(), "of Spark's parser"),
)
STEP: Final = (
    FileKey("name", VIEW_NAME, "the view that its result is in SQL"),
    FileKey("sql", Sql(), "a query over the views"),
    FileKey("python", Text("a module and a function in it, as in module:function", "PATH"), "a function"),
)
SINK: Final = (
    FileKey("format", Text("the name of a format: parquet, delta, json, console, penstock", ""), "", True),
    FileKey("mode", Word(MODES), "which rows of a result are written"),
    FileKey("path", Text("a path", "PATH"), "where"),
    FileKey("partitionBy", Columns(), "columns that make folders"),
)
RUN: Final = (
    FileKey("trigger", Trigger(), "how often"),
    FileKey("checkpoint", Text("a path", "PATH"), "where it remembers how far it has come"),
    FileKey("watermark", WatermarkKind(), "how late rows may come"),
    FileKey("spark", Conf(), "settings of Spark"),
)

_RESERVED_PARSER_OPTIONS: Final = ("mode", "columnNameOfCorruptRecord")


class PipelineMistakes(PenstockError):
    """What is wrong with a file, a line for each mistake."""

    def __init__(self, lines: Sequence[str]) -> None:
        super().__init__("\n".join(lines))
        self.lines = tuple(lines)


def read_pipeline(path: str) -> Pipeline:
    """The pipeline in a file."""
    try:
        file = read_file(path, "FILE")
    except SettingsError as error:
        raise PipelineMistakes([str(error)]) from None
    return _Reader(file).pipeline()


class _Reader:
    """One file on its way in; gathers the mistakes."""

    def __init__(self, file: File) -> None:
        self._file = file
        self._mistakes: list[SettingsError] = []
        self._unjudged: list[str] = []

    # --- reading ---------------------------------------------------------------------------------

    def _mistake(self, spot: Spot, problem: object, said: str = "") -> None:
        self._mistakes.append(spot.wrong(problem, said))

    def _spot(self, name: str, *keys: str | int) -> Spot:
        return Spot(self._file.path, name, self._file, keys)

    def _absent(self, name: str) -> Spot:
        """Of something that is not there, and so has no line."""
        return Spot(self._file.path, name)

    def _section(
        self, spot: Spot, table: Mapping[str, Any], keys: Sequence[FileKey], others: bool = False
    ) -> dict[str, Given]:
        """What a section says, without what is wrong. `others`: other keys than these may be right."""
        known = {key.name: key for key in keys}
        given: dict[str, Given] = {}
        for name, value in table.items():
            its_spot = spot.inner(name) if spot.keys else self._spot(name, name)
            key = known.get(name)
            if key is None and others and not get_close_matches(name.lower(), known, n=1, cutoff=0.8):
                self._take(given, name, _ANYTHING, value, its_spot)
            elif key is None:
                hint = hint_for(name, {it: it for it in known}, known)
                self._mistake(its_spot, f"there is no such setting; {hint}")
            else:
                self._take(given, name, key.kind, value, its_spot)
        for key in keys:
            if key.required and key.name not in table:
                self._mistake(spot, f"there is no {key.name}; add {key.name} = and {key.kind.wanted()}")
        return given

    def _take(self, given: dict[str, Given], name: str, kind: Kind, value: object, spot: Spot) -> None:
        try:
            given[name] = check(kind, value, spot)
        except SettingsError as error:
            self._mistakes.append(error)

    def _sections(self, name: str) -> list[tuple[Spot, dict[str, Any]]]:
        try:
            return sections_of(self._file, (name,), name)
        except SettingsError as error:
            self._mistakes.append(error)
            return []

    # --- the whole -------------------------------------------------------------------------------

    def pipeline(self) -> Pipeline:
        tables = self._file.tables
        top = self._top(tables)
        run = self._section(self._spot("[run]", "run"), _table(tables, "run"), RUN)
        sources = self._sources(tables, run.get("watermark"))
        steps = self._steps(tables, sources)
        sink = self._sink(_table(tables, "sink")) if "sink" in tables else None
        checkpoint = run.get("checkpoint")
        if sink is not None and checkpoint is None:
            self._check_without_checkpoint(sink, sources)
        if self._mistakes:
            raise PipelineMistakes(sorted(map(str, self._mistakes), key=self._line))
        assert sink is not None
        trigger = run["trigger"].value if "trigger" in run else None
        return Pipeline(
            name=top["name"].value,
            file=self._file.path,
            sources=tuple(sources),
            steps=tuple(steps),
            sink=sink,
            interval=trigger if trigger != ONCE else None,
            once=trigger == ONCE,
            checkpoint=checkpoint.value if checkpoint is not None else None,
            spark=run["spark"].value if "spark" in run else {},
            unjudged=tuple(self._unjudged),
        )

    def _line(self, mistake: str) -> int:
        """Where it stands; 0 for what is missing as a whole."""
        found = re.match(", line ([0-9]+)", mistake.removeprefix(self._file.path))
        return int(found[1]) if found is not None else 0

    def _top(self, tables: Mapping[str, Any]) -> dict[str, Given]:
        plain = {name: value for name, value in tables.items() if name not in ("source", "step")}
        return self._section(self._absent("the file"), plain, TOP)

    def _check_without_checkpoint(self, sink: Sink, sources: Iterable[Source]) -> None:
        spot = self._spot("[run]", "run") if "run" in self._file.tables else self._absent("[run]")
        wanted = 'add checkpoint = and a path, as in checkpoint = "out/_checkpoint/NAME"'
        if sink.format != CONSOLE:
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
        if its_format == "text" and "schema" in given:
            self._mistake(given["schema"].spot, "a text has no columns: it is the column value; leave it out")
        if its_format in ("json", "csv") and "schema" not in section:
            self._mistake(spot, "there is no schema; add schema = and columns as in id bigint, region string")
        options: dict[str, str] = given["options"].value if "options" in given else {}
        for name in options:
            if name.lower() in (it.lower() for it in _RESERVED_PARSER_OPTIONS):
                self._mistake(given["options"].spot, f"{name!r} is not yours to set; on-bad-record does it")
        fields = read_ddl(schema) if schema else ()
        if fields is None:
            self._unjudged.append(f"{spot.name} schema")
        on_bad_record = given["on-bad-record"].value if "on-bad-record" in given else DEAD
        return Parse(its_format or "text", schema, fields, options, on_bad_record)

    # --- steps -----------------------------------------------------------------------------------

    def _steps(self, tables: Mapping[str, Any], sources: Sequence[Source]) -> list[Step]:
        make_importable(os.path.dirname(os.path.abspath(self._file.path)))
        taken = {INPUT, *(source.name.lower() for source in sources)}
        steps: list[Step] = []
        if "step" in tables:
            for spot, table in self._sections("step"):
                steps.append(self._step(spot, table, taken))
        elif len(sources) > 1:
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
            function, takes_views = load_function(path)
        except NeedsSpark:
            self._unjudged.append(f"{spot.name} python")
            return Step(name, None, None, path)
        except WrongValue as error:
            self._mistake(given["python"].spot, error, f" = {path!r}")
            return Step(name, None, None, path)
        return Step(name, None, function, path, takes_views)

    # --- sink ------------------------------------------------------------------------------------

    def _sink(self, table: Mapping[str, Any]) -> Sink:
        spot = self._spot("[sink]", "sink")
        name = table.get("format")
        its_format = FORMATS.get(name) if isinstance(name, str) else None
        own: list[FileKey] = []
        if its_format is not None:
            own += (FileKey(option.name, OptionKind(option), "") for option in its_format.options)
            own += (FileKey(key, _ANYTHING, "") for key in its_format.keys or ())
        common = [key for key in SINK if _applies(key, its_format)]
        others = its_format is None or its_format.keys is None
        given = self._section(spot, table, (*common, *own), others)
        if isinstance(name, str) and its_format is None:
            self._check_foreign(given, name)
        mode = given["mode"].value if "mode" in given else APPEND
        if its_format is not None:
            if mode not in its_format.modes:
                self._mistake(
                    given["mode"].spot,
                    f"{name} has {' and '.join(its_format.modes)}: {its_format.why_modes}",
                    f' = "{mode}"',
                )
            if its_format.needs_path and "path" not in table:
                self._mistake(spot, f"there is no path; add path = and where the {name} files go")
        options = {key: it.value for key, it in given.items() if key not in ("format", "mode", "partitionBy")}
        if name == PENSTOCK:
            try:
                write_options({key: text for key, text in options.items() if key in table}, STREAM)
            except WrongOption as error:
                self._mistake(spot, error)
        partition_by = given["partitionBy"].value if "partitionBy" in given else ()
        return Sink(str(name), mode, options, partition_by)

    def _check_foreign(self, given: Mapping[str, Given], name: str) -> None:
        near = get_close_matches(name.lower(), FORMATS, n=1, cutoff=0.8)
        if near and "format" in given:
            self._mistake(given["format"].spot, f"did you mean {near[0]}?", f" = {name!r}")
        self._unjudged.append(f"[sink] format {name!r} and its options")


def _table(tables: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """A section; an empty one where something else stands there, which is told elsewhere."""
    found = tables.get(name)
    return found if isinstance(found, dict) else {}


def _applies(key: FileKey, its_format: Format | None) -> bool:
    """Whether a format can be told that."""
    if its_format is None:
        return True
    return {"path": its_format.needs_path, "partitionBy": its_format.partitions}.get(key.name, True)


class _Anything(Kind):
    """An option that somebody else judges, as a text."""

    def check(self, value: object) -> object:
        return text_of(value)

    def wanted(self) -> str:
        return "a text, a number, or true or false"


_ANYTHING: Final = _Anything()
