"""docs/where.md: every example is a condition, and what the page says of it is so."""

import json
import re
import shlex
from pathlib import Path

import pytest

from penstock.http.where import read as where_read
from penstock.http.where import tokens as where_tokens
from penstock.http.where.condition import JSON_BYTES_MAX, SECONDS_MAX, Row, WhereError, parse
from penstock.http.where.tree import COLUMNS, Kind

PAGE = (Path(__file__).parents[2] / "docs" / "where.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
PROSE = re.sub(r"^```.*?^```$", "", PAGE, flags=re.MULTILINE | re.DOTALL)


def lines(kind: str) -> list[str]:
    return [line for block_kind, block in BLOCKS if block_kind == kind for line in block.splitlines()]


def table(*head: str) -> list[list[str]]:
    """The rows of the table with this head."""
    start = PAGE.index("| " + " | ".join(head) + " |")
    rows = PAGE[start:].split("\n\n")[0].splitlines()[2:]
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]


INLINE = [
    span
    for span in re.findall(r"`([^`]+)`", PROSE)
    if re.match(r"(not )?[\w.]+ (=|!=|<>|<|<=|>|>=|in|not|like|between|is) ", span)
]
OUTCOMES = table("payload", "condition", "chosen")


def test_there_are_only_blocks_that_are_read() -> None:
    assert {kind for kind, _ in BLOCKS} == {"console", "json", "sql", "text", "ebnf"}
    assert PAGE.count("```") == 2 * len(BLOCKS)
    assert len(lines("sql")) > 30
    assert len(INLINE) > len(OUTCOMES) > 15


@pytest.mark.parametrize("condition", [*lines("sql"), *INLINE])
def test_a_condition(condition: str) -> None:
    assert parse(str(parse(condition))) == parse(condition)


@pytest.mark.parametrize("command", lines("console"))
def test_a_command(command: str) -> None:
    prompt, program, name, queue, where, condition, *others = shlex.split(command)
    assert [prompt, program, queue, where] == ["$", "penstock", "orders", "--where"]
    assert name in ("redrive", "search")
    assert others in ([], ["--dry-run"])
    assert parse(condition).columns


@pytest.mark.parametrize("body", lines("json"))
def test_a_body(body: str) -> None:
    assert parse(json.loads(body)["where"]).columns


@pytest.mark.parametrize(("payload", "condition", "chosen"), OUTCOMES)
def test_an_outcome(payload: str, condition: str, chosen: str) -> None:
    value = payload.strip("`").encode()
    row = Row("orders", 0, "0" * 32, 1, "rejected", None, "http", 0, 0, None, None, value, len(value))
    assert parse(condition.strip("`")).matches(row, 0) is {"yes": True, "no": False}[chosen]


REFUSALS = lines("text")


@pytest.mark.parametrize(("condition", "said"), list(zip(REFUSALS[::2], REFUSALS[1::2], strict=True)))
def test_a_refusal(condition: str, said: str) -> None:
    with pytest.raises(WhereError) as raised:
        parse(condition)
    assert str(raised.value) == said


def test_the_columns() -> None:
    kinds = {Kind.TEXT: "text", Kind.NUMBER: "number", Kind.TIME: "time"}
    said = {
        name.strip("`"): kind.removesuffix(" or null")
        for name, kind, _ in table("column", "is", "of a message")
    }
    assert said == {name: kinds[kind] for name, kind in COLUMNS.items()}


def test_the_bounds() -> None:
    said = [bound for _, bound in table("bound", "at most")]
    assert said == [
        f"{where_read.TEXT_CHARACTERS_MAX:,}",
        f"{where_read.NESTING_MAX} deep",
        f"{where_read.LIST_ITEMS_MAX:,}",
        f"{where_read.PATTERN_CHARACTERS_MAX:,}",
        f"{where_tokens.NUMBER_CHARACTERS_MAX}",
        f"{where_tokens.PATH_STEPS_MAX}",
        "9",
        f"{JSON_BYTES_MAX >> 20} MiB",
        f"{SECONDS_MAX:.0f} s",
    ]


def test_the_page_that_it_names_is_there() -> None:
    for page in re.findall(r"\]\(([\w-]+\.md)", PAGE):
        assert (Path(__file__).parents[2] / "docs" / page).is_file()
