"""docs/reports.md says what is so: tables, columns, options, outcomes; and its example runs."""

import re
import shlex
from pathlib import Path

import pyarrow as pa
import pytest

from penstock.cli import main as cli
from penstock.report.job import Result
from penstock.report.period import BUCKETS_MAX
from penstock.report.tables import (
    ACCURACY,
    BUCKET_ACCURACY,
    FAILED,
    OUTCOMES,
    TABLES,
    of_nothing,
    schema_of,
    write_tables,
)

PAGE = (Path(__file__).parents[2] / "docs" / "reports.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)


def rows_below(heading: str) -> list[list[str]]:
    """The rows of the first table below a line that begins so."""
    rest = PAGE.partition(f"\n{heading}")[2]
    lines = re.search(r"(?:^\|.*\n)+", rest, re.MULTILINE)
    assert lines is not None, heading
    rows = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines[0].splitlines()]
    return [[cell.strip("| ") for cell in row] for row in rows[2:]]


def test_every_table_is_there_in_order() -> None:
    assert re.findall(r"^### `(\w+)`$", PAGE, re.MULTILINE) == list(TABLES)


@pytest.mark.parametrize("name", TABLES)
def test_a_table_has_its_columns(name: str) -> None:
    expected = [[f"`{column.name}`", column.type, column.means] for column in TABLES[name]]
    assert rows_below(f"### `{name}`") == expected


def test_outcomes() -> None:
    said = {row[0].strip("`"): row[2] == "yes" for row in rows_below("**How a delivery ends**")}
    assert said == {outcome: outcome in FAILED for outcome in OUTCOMES}


def test_the_commands_can_be_typed() -> None:
    parser = cli.command_parser("report", cli.load("report", cli.COMMANDS))
    commands = [
        line[2:]
        for kind, block in BLOCKS
        if kind == "console"
        for line in block.splitlines()
        if line[:2] == "$ "
    ]
    assert len(commands) == 3
    for command in commands:
        words = shlex.split(command)
        assert words[:2] == ["penstock", "report"]
        parser.parse_intermixed_args(words[2:])
    options = {row[0].strip("`") for row in rows_below("| option")} | {"--since"}
    for option in options:
        assert option in parser.format_help()


def test_the_numbers_of_the_text() -> None:
    text = " ".join(PAGE.split())
    assert f"Up to {ACCURACY // 2:,} values ({BUCKET_ACCURACY // 2:,} within a bucket) they are exact" in text
    assert f"1 in {ACCURACY:,} (1 in {BUCKET_ACCURACY:,}), rounded up" in text
    assert f"at most {BUCKETS_MAX}" in text


def test_the_example_reads_the_tables(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    result = Result(None, of_nothing([]))
    rows = [
        {
            "queue": queue,
            "messages": 1,
            "p50_seconds": 0.0,
            "p90_seconds": 0.0,
            "p99_seconds": seconds,
            "max_seconds": 9.0,
        }
        for queue, seconds in (("calm", 0.5), ("slow", 7.5))
    ]
    result.tables["waiting"] = pa.Table.from_pylist(rows, schema_of("waiting"))
    write_tables(result.tables, Path("report-tables"))
    (example,) = [block for kind, block in BLOCKS if kind == "python"]
    exec(compile(example, "reports.md", "exec"), {})
    assert capsys.readouterr().out == "slow 7.5\n"
