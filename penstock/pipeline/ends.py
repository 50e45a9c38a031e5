"""Ends: what a pipeline's file says besides sources and steps: tables, expectations, sinks and tests.

    [[table]]    name, format, path: a table to join
    [[expect]]   a condition for the rows of a view, and what becomes of those that are against it
    [sink]       format, mode, and the format's options; several: [[sink]], each with a name
    [[test]]     rows in, rows out

Each names views, and a name that no view has is a mistake.
"""

import re
from collections.abc import Collection, Mapping
from difflib import get_close_matches
from typing import Any, Final

from penstock.common.given import FileKey, Given, Spot, hint_for
from penstock.common.kinds import Text, Word
from penstock.pipeline.formats import APPEND, FORMATS, MODES, PENSTOCK, TABLE_FORMATS, Format
from penstock.pipeline.kinds import (
    ANYTHING,
    VIEW_NAME,
    Columns,
    Counts,
    OptionKind,
    Rows,
    SchemaKind,
    Sql,
    Texts,
    place_of,
)
from penstock.pipeline.model import (
    BAD_RECORDS,
    DEAD,
    DROP,
    FAIL,
    INPUT,
    KEEP,
    Expectation,
    Sink,
    Source,
    StaticTable,
    Test,
)
from penstock.pipeline.sections import Sections
from penstock.spark.options import STREAM, WrongOption, write_options

VIEW: Final = Text("the name of a source, a table or a step", "NAME")
TABLE: Final = (
    FileKey("name", VIEW_NAME, "the view that it is in SQL", required=True),
    FileKey("format", Word(TABLE_FORMATS), "what it is", required=True),
    FileKey("path", Text("a path", "PATH"), "where it is", required=True),
    FileKey("schema", SchemaKind(), "its columns"),
    FileKey("options", Texts(), "of Spark's reader"),
)
EXPECT: Final = (
    FileKey("name", VIEW_NAME, "what it is called where it is counted", required=True),
    FileKey("on", VIEW, "the view whose rows are looked at"),
    FileKey("sql", Sql(), "a condition that holds for every row", required=True),
    FileKey("on-violation", Word((KEEP, DROP, DEAD, FAIL)), "what becomes of a row that is against it"),
)
SINK: Final = (
    FileKey("name", VIEW_NAME, "what it is called, where there are several"),
    FileKey("from", VIEW, "the view whose rows these are"),
    FileKey("format", Text("the name of a format: parquet, delta, json, console, penstock", ""), "", True),
    FileKey("mode", Word(MODES), "which rows of a result are written"),
    FileKey("path", Text("a path", "PATH"), "where"),
    FileKey("partitionBy", Columns(), "columns that make folders"),
)
TEST: Final = (
    FileKey("name", Text("what it shows, in a few words", ""), "what it shows", required=True),
    FileKey("given", Rows(payloads=True), "rows of sources and tables", required=True),
    FileKey("expect", Rows(payloads=False), "rows of views and sinks, and bad records"),
    FileKey("violations", Counts(), "rows against expectations"),
)
PLACE: Final = re.compile(r"\{([A-Za-z_][A-Za-z0-9_]*)\}")
"""In the name of a queue, a column that says which one."""

_NOT_OPTIONS: Final = ("format", "mode", "partitionBy", "name", "from")


class Ends(Sections):
    """One file on its way in: these sections of it."""

    def _view(self, given: Given, views: Collection[str]) -> str:
        """The view that is named there."""
        known = {name.lower(): name for name in views}
        name: str = given.value
        if name.lower() not in known:
            hint = hint_for(name, {it: it for it in views}, views)
            self._mistake(given.spot, f"there is no view {name!r}; {hint}")
        return known.get(name.lower(), name)

    def _tables(self, sources: Collection[Source]) -> list[StaticTable]:
        found: list[StaticTable] = []
        taken = {INPUT, *(source.name.lower() for source in sources)}
        for spot, table in self._some("table"):
            given = self._section(spot, table, TABLE)
            said = {key: it.value for key, it in given.items()}
            name = said.get("name", "")
            if name.lower() in taken:
                self._mistake(spot.inner("name"), f"{name!r} is another view already; take another name")
            taken.add(name.lower())
            options = said.get("options", {})
            if said.get("format") == "delta":
                for key in ("schema", "options"):
                    if key in table:
                        self._mistake(spot.inner(key), "a Delta table says that itself; leave it out")
            found.append(
                StaticTable(name, said.get("format", ""), said.get("path", ""), said.get("schema"), options)
            )
        return found

    def _expectations(self, views: Collection[str], result: str) -> list[Expectation]:
        found: list[Expectation] = []
        for spot, table in self._some("expect"):
            given = self._section(spot, table, EXPECT)
            name = given["name"].value if "name" in given else ""
            if any(it.name == name for it in found):
                self._mistake(spot.inner("name"), f"another one is called {name!r}; take another name")
            of = self._view(given["on"], views) if "on" in given else result
            if "sql" in given:
                self._unjudged.append(f"{spot.name} sql")
            sql = given["sql"].value if "sql" in given else "true"
            found.append(
                Expectation(name, of, sql, given["on-violation"].value if "on-violation" in given else KEEP)
            )
        return found

    def _tests(
        self,
        givable: Collection[str],
        views: Collection[str],
        sinks: Collection[Sink],
        expectations: Collection[Expectation],
    ) -> list[Test]:
        found: list[Test] = []
        names = {
            "given": givable,
            "expect": [*views, *(sink.name for sink in sinks if sink.name), BAD_RECORDS],
            "violations": [it.name for it in expectations],
        }
        for spot, table in self._some("test"):
            given = self._section(spot, table, TEST)
            said: dict[str, Any] = {key: it.value for key, it in given.items()}
            for key, known in names.items():
                for name in said.get(key, {}):
                    if name not in known:
                        hint = hint_for(name, {it: it for it in known}, known) if known else "there is none"
                        self._mistake(spot.inner(key).inner(name), f"there is no such name here; {hint}")
            if not said.get("expect") and not said.get("violations"):
                self._mistake(spot, "it expects nothing; add expect = and the rows of a view or a sink")
            found.append(
                Test(
                    said.get("name", ""),
                    said.get("given", {}),
                    said.get("expect", {}),
                    said.get("violations", {}),
                )
            )
        return found

    # --- sinks -----------------------------------------------------------------------------------

    def _sinks(self, views: Collection[str]) -> list[Sink]:
        sections = self._some("sink")
        found: list[Sink] = []
        for spot, table in sections:
            sink = self._sink(spot, table, views)
            if len(sections) > 1 and "name" not in table:
                self._mistake(spot, "there is no name; add name = and what it is called")
            if any(sink.name == other.name for other in found if other.name):
                self._mistake(spot.inner("name"), f"another sink is called {sink.name!r}; take another name")
            path = sink.options.get("path")
            others = [other.options["path"] for other in found if "path" in other.options]
            if path is not None and place_of(path) in map(place_of, others):
                self._mistake(spot.inner("path"), "another sink writes there; take another path")
            found.append(sink)
        return found

    def _sink(self, spot: Spot, table: Mapping[str, Any], views: Collection[str]) -> Sink:
        name = table.get("format")
        its_format = FORMATS.get(name) if isinstance(name, str) else None
        own: list[FileKey] = []
        if its_format is not None:
            own += (FileKey(option.name, OptionKind(option), "") for option in its_format.options)
            own += (FileKey(key, ANYTHING, "") for key in its_format.keys or ())
        common = [key for key in SINK if _applies(key, its_format)]
        others = its_format is None or its_format.keys is None
        given = self._section(spot, table, (*common, *own), others)
        if isinstance(name, str) and its_format is None:
            self._check_foreign(spot, given, name)
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
        options = {key: it.value for key, it in given.items() if key not in _NOT_OPTIONS}
        if name == PENSTOCK:
            judged = {key: PLACE.sub("x", text) for key, text in options.items()}
            odd = re.search("{[^{}]*}", judged.get("queue", ""))
            if odd is not None:
                why = "in { } stands the name of a column, of letters, digits and _; name it so in a step"
                self._mistake(given["queue"].spot, f"{odd[0]} is no column: {why}")
            try:
                write_options(judged, STREAM)
            except WrongOption as error:
                self._mistake(spot, error)
        partition_by = given["partitionBy"].value if "partitionBy" in given else ()
        of = self._view(given["from"], views) if "from" in given else None
        return Sink(
            str(name), mode, options, partition_by, given["name"].value if "name" in given else "", of
        )

    def _check_foreign(self, spot: Spot, given: Mapping[str, Given], name: str) -> None:
        near = get_close_matches(name.lower(), FORMATS, n=1, cutoff=0.8)
        if near and "format" in given:
            self._mistake(given["format"].spot, f"did you mean {near[0]}?", f" = {name!r}")
        self._unjudged.append(f"{spot.name} format {name!r} and its options")


def _applies(key: FileKey, its_format: Format | None) -> bool:
    """Whether a format can be told that."""
    if its_format is None:
        return True
    return {"path": its_format.needs_path, "partitionBy": its_format.partitions}.get(key.name, True)
