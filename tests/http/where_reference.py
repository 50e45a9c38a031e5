"""A reference for the conditions of a redrive, written on its own: `penstock.http.where` must agree with it.

It works on small tuples, spells them out as a user would, and judges them by three-valued logic, node by
node; the language itself never has a third value at run time. `trees` and `rows` are strategies for both.
"""

import json
import re
from datetime import datetime
from typing import Any

from hypothesis import strategies as st

from penstock.http.where.condition import Row

HOUR_US = 3_600_000_000


def us(text: str) -> int:
    """Microseconds since 1970 of a whole second."""
    return round(datetime.fromisoformat(text).timestamp()) * 1_000_000


NOW_US = us("2026-11-15T12:00:00+00:00")

Tree = tuple[Any, ...]

TIMES = {
    "2026-11-15": us("2026-11-15T00:00:00+00:00"),
    "2026-11-15T13:00:00.5+02:00": us("2026-11-15T11:00:00+00:00") + 500_000,
    "2026-11-15 12:00": NOW_US,
}
RELATIVE = {"-1h": -HOUR_US, "+30m": HOUR_US // 2, "-0s": 0}
TEXTS = ["", "a", "b", "ab", "a%", "A", "it's", "2026-11-15", "2026-11-15 12:00"]
NUMBERS = [0, 1, 2, -1, 1.5, 1.0, 10**20]
PATTERNS = ["", "%", "_", "a%", "%b", "a_", "_%_", "a\\%", "%a%b%", "__%"]
PATHS: list[tuple[str | int, ...]] = [
    ("a",),
    ("b",),
    ("a", "b"),
    ("a", 0),
    (0,),
    ("odd name",),
    ("a", 1, "b"),
]
BY_KIND = {
    "number": ["offset", "attempts", "retries", "value_bytes"],
    "text": ["queue", "reason", "consumer", "protocol", "value"],
    "time": ["timestamp", "died", "expires"],
}

paths = st.sampled_from(PATHS).map(lambda steps: ("path", steps))
nulls = st.just(("null",))
CONSTANTS = {
    "number": st.sampled_from(NUMBERS).map(lambda number: ("number", number)),
    "text": st.sampled_from(TEXTS).map(lambda text: ("text", text)),
    "time": st.sampled_from([*TIMES, *RELATIVE]).map(lambda text: ("time", text)),
    "boolean": st.booleans().map(lambda value: ("boolean", value)),
}
constants = st.one_of(CONSTANTS["number"], CONSTANTS["text"], CONSTANTS["boolean"], nulls)


def columns(kind: str) -> st.SearchStrategy[Tree]:
    return st.sampled_from(BY_KIND[kind]).map(lambda name: ("column", name))


def sides(kind: str) -> st.SearchStrategy[tuple[Tree, Tree, Tree, list[Tree]]]:
    """An operand, two that it may meet, and a list that it may be in, all of one kind or of none."""
    if kind == "json":
        others = st.one_of(paths, constants)
        return st.tuples(paths, others, others, st.lists(constants, min_size=1, max_size=4))
    # What meets a text is a time only where the other is one: so the first is always a column here.
    others = st.one_of(columns(kind), CONSTANTS[kind], paths, nulls)
    return st.tuples(columns(kind), others, others, st.lists(CONSTANTS[kind] | nulls, min_size=1, max_size=4))


def tests_of(four: tuple[Tree, Tree, Tree, list[Tree]]) -> st.SearchStrategy[Tree]:
    first, second, third, items = four
    choices: list[Tree] = [
        ("compare", first, sign, second) for sign in ("=", "!=", "<", "<=", ">", ">=", "<>")
    ]
    choices += [("compare", second, sign, first) for sign in ("=", "<", ">=")]
    choices += [("between", first, second, third), ("in", first, items), ("is null", first)]
    if first[0] == "path" or first[1] in BY_KIND["text"]:
        choices += [("like", first, pattern) for pattern in PATTERNS]
    return st.tuples(st.sampled_from(choices), st.booleans()).map(
        lambda drawn: ("not-inside", drawn[0]) if drawn[1] and drawn[0][0] != "compare" else drawn[0]
    )


leaves = st.sampled_from(["number", "text", "time", "json", "json", "json"]).flatmap(sides).flatmap(tests_of)
trees: st.SearchStrategy[Tree] = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.tuples(st.just("not"), inner),
        st.tuples(st.sampled_from(["and", "or"]), st.lists(inner, min_size=2, max_size=4)),
    ),
    max_leaves=8,
)


def spelt(tree: Tree) -> str:
    """A tree as a user would write it, with more parentheses than needed."""
    match tree:
        case ("column", name):
            return str(name)
        case ("path", steps):
            return "value" + "".join(f"[{s}]" if isinstance(s, int) else f'."{s}"' for s in steps)
        case ("null",):
            return "null"
        case ("number", number):
            return str(number)
        case ("boolean", value):
            return str(value).upper()
        case ("text" | "time", text):
            return "'{}'".format(text.replace("'", "''"))
        case ("compare", left, sign, right):
            return f"{spelt(left)}{sign}{spelt(right)}"
        case ("not", part):
            return f"NOT ({spelt(part)})"
        case ("and" | "or" as word, parts):
            return f" {word} ".join(f"({spelt(part)})" for part in parts)
        case ("is null", operand):
            return f"{spelt(operand)} is null"
        case ("not-inside", ("is null", operand)):
            return f"{spelt(operand)} is not null"
        case ("not-inside", (word, operand, *rest)):
            return f"{spelt(operand)} not {spelt_tail(word, rest)}"
        case (word, operand, *rest):
            return f"{spelt(operand)} {spelt_tail(word, rest)}"
    raise AssertionError(tree)


def spelt_tail(word: str, rest: list[Any]) -> str:
    if word == "between":
        return f"between {spelt(rest[0])} and {spelt(rest[1])}"
    if word == "in":
        return f"in ({','.join(map(spelt, rest[0]))})"
    return "like " + spelt(("text", rest[0]))


def value_of(operand: Tree, row: Row) -> tuple[str, Any] | None:
    """Kind and value; None for null."""
    match operand:
        case ("column", "value"):
            try:
                return "text", bytes(row.value).decode()
            except UnicodeDecodeError:
                return None
        case ("column", name):
            found = getattr(row, name)
            kind = next(kind for kind, names in BY_KIND.items() if name in names)
            return None if found is None else (kind, found)
        case ("path", steps):
            return json_at(steps, row)
        case ("time", text):
            return "time", TIMES[text] if text in TIMES else NOW_US + RELATIVE[text]
        case ("null",):
            return None
        case (kind, value):
            return kind, value
    raise AssertionError(operand)


def json_at(steps: tuple[str | int, ...], row: Row) -> tuple[str, Any] | None:
    try:
        here = json.loads(bytes(row.value).decode(), parse_constant=lambda _: None)
    except ValueError:
        return None
    for step in steps:
        if isinstance(here, dict) and isinstance(step, str):
            here = here.get(step)
        elif isinstance(here, list) and isinstance(step, int):
            here = dict(enumerate(here)).get(step)
        else:
            return None
    if isinstance(here, bool):
        return "boolean", here
    if isinstance(here, int | float):
        return "number", here
    return None if here is None else ("text" if isinstance(here, str) else "container", here)


def compared(left: tuple[str, Any] | None, right: tuple[str, Any] | None, sign: str) -> bool | None:
    if left is None or right is None:
        return None
    pair = [left, right]
    if "time" in (left[0], right[0]):
        pair = [("time", TIMES[v]) if kind == "text" and v in TIMES else (kind, v) for kind, v in pair]
    (kind, one), (other_kind, other) = pair
    if kind != other_kind or kind == "container":
        return None
    # Every sign by two questions, asked otherwise than the language does.
    order = (one > other) - (one < other)
    return (
        order
        in {"=": [0], "!=": [-1, 1], "<>": [-1, 1], "<": [-1], "<=": [-1, 0], ">": [1], ">=": [0, 1]}[sign]
    )


def like(text: str, pattern: str) -> bool:
    """The set of places in the text that the pattern, so far, can have come to."""
    places = {0}
    for token in re.findall(r"\\.|.", pattern, re.DOTALL):
        if token == "%":
            places = {end for start in places for end in range(start, len(text) + 1)}
        elif token == "_":
            places = {place + 1 for place in places if place < len(text)}
        else:
            places = {place + 1 for place in places if text[place : place + 1] == token[-1]}
    return len(text) in places


def inverse(value: bool | None) -> bool | None:
    return None if value is None else not value


def all_of(values: list[bool | None]) -> bool | None:
    return False if False in values else None if None in values else True


def judged(tree: Tree, row: Row) -> bool | None:
    """True, false, or None for unknown."""
    match tree:
        case ("compare", left, sign, right):
            return compared(value_of(left, row), value_of(right, row), sign)
        case ("between", operand, low, high):
            found = value_of(operand, row)
            return all_of(
                [compared(found, value_of(low, row), ">="), compared(found, value_of(high, row), "<=")]
            )
        case ("in", operand, items):
            found = value_of(operand, row)
            return inverse(all_of([compared(found, value_of(item, row), "!=") for item in items]))
        case ("is null", operand):
            return value_of(operand, row) is None
        case ("like", operand, pattern):
            found = value_of(operand, row)
            return like(found[1], pattern) if found and found[0] == "text" else None
        case ("not" | "not-inside", part):
            return inverse(judged(part, row))
        case ("and", parts):
            return all_of([judged(part, row) for part in parts])
        case ("or", parts):
            return inverse(all_of([inverse(judged(part, row)) for part in parts]))
    raise AssertionError(tree)


scalars = st.one_of(
    st.none(), st.booleans(), st.sampled_from(NUMBERS), st.sampled_from(TEXTS), st.just(float("nan"))
)
documents = st.recursive(
    scalars,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(st.sampled_from(["a", "b", "odd name"]), inner, max_size=3),
    ),
    max_leaves=8,
)
fields = st.dictionaries(st.sampled_from(["a", "b", "odd name"]), scalars | documents, min_size=1)
payloads = st.one_of(
    fields.map(lambda document: json.dumps(document).encode()),
    documents.map(lambda document: json.dumps(document).encode()),
    st.sampled_from([b"", b"a", b"ab", b"\xff", b'{"a": 1', b'{"a": 1}x']),
)
some_times = st.sampled_from([*TIMES.values(), NOW_US - HOUR_US, NOW_US - 2 * HOUR_US])
rows = st.builds(
    Row,
    queue=st.sampled_from(TEXTS),
    offset=st.integers(0, 3),
    id=st.just("0" * 32),
    attempts=st.integers(0, 3),
    reason=st.sampled_from([None, *TEXTS]),
    consumer=st.sampled_from([None, *TEXTS]),
    protocol=st.sampled_from(TEXTS),
    timestamp=some_times,
    died=some_times,
    expires=st.none() | some_times,
    retries=st.none() | st.integers(0, 3),
    value=payloads,
    value_bytes=st.integers(0, 3),
)
