"""Conditions of a redrive: what they say of rows, what they read of them, and how they are refused."""

import ast
import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from penstock.errors import PenstockError
from penstock.http.reading import letters
from penstock.http.where import condition as where
from penstock.http.where import like as where_like
from penstock.http.where.condition import Row, TooLong, WhereError, parse
from penstock.http.where.tree import COLUMNS
from penstock.log.log import open_log
from penstock.log.reader import LogReader
from penstock.model.batch import Batch
from penstock.model.life import Reason
from penstock.model.words import Outcome
from tests.http.where_reference import HOUR_US, NOW_US, Tree, judged, like, rows, spelt, trees, us

ROOT = Path(__file__).parents[2]
ORDER = {
    "customer": {"id": 4711, "name": "Ada", "vip": True},
    "items": [{"sku": "A-1", "n": 2}, {"sku": "B-22", "n": 1}],
    "amount": 19.99,
    "paid": False,
    "note": None,
    "due": "2026-11-14T08:00:00Z",
    "odd name": 1,
    'quo"te': 2,
    "größe": 3,
    "in": 4,
    "": 5,
    "0": 6,
    "Amount": 7,
}
LETTER = Row(
    queue="orders",
    offset=42,
    id="0a1b2c" + "0" * 26,
    attempts=3,
    reason="rejected",
    consumer=None,
    protocol="phpmq",
    timestamp=us("2026-11-14T10:00:00+00:00"),
    died=us("2026-11-15T11:30:00+00:00"),
    expires=None,
    retries=None,
    value=json.dumps(ORDER).encode(),
    value_bytes=len(json.dumps(ORDER)),
)


def letter(value: bytes | memoryview = LETTER.value, **columns: Any) -> Row:
    """A dead letter with something of its own."""
    return LETTER._replace(value=value, value_bytes=len(value), **columns)


def holds(condition: str, row: Row = LETTER) -> bool:
    return parse(condition).matches(row, NOW_US)


# --- What conditions say -------------------------------------------------------------------

TRUE_OF_THE_LETTER = [
    # columns
    "queue = 'orders'",
    "offset = 42",
    "offset >= 42 and offset <= 42",
    "id = '0a1b2c00000000000000000000000000'",
    "attempts > 2",
    "attempts <> 2",
    "attempts != 2.5",
    "attempts = 3.0",
    "reason in ('expired', 'rejected')",
    "reason not in ('expired')",
    "protocol like 'php%'",
    "consumer is null",
    "expires is null and retries is null",
    "value is not null",
    "value like '{%\"amount\": 19.99%}'",
    "value_bytes between 200 and 300",
    "REASON = 'rejected' AND Attempts BETWEEN 1 AND 3",
    "5 > attempts",
    "offset > attempts",
    "offset not between 1 and attempts",
    "3 between attempts and offset",
    # times
    "timestamp = '2026-11-14T10:00:00Z'",
    "timestamp = '2026-11-14T11:00:00+01:00'",
    "timestamp = '2026-11-14 10:00'",
    "timestamp = '2026-11-14T10:00:00.000000000+00'",
    "timestamp != '2026-11-14T10:00:00.000001Z'",
    "timestamp >= '2026-11-14' and timestamp < '2026-11-15'",
    "timestamp between '2026-11-14' and '2026-11-15'",
    "'2026-11-14' < timestamp",
    "'2026-11-14T12:00:00-0100' between timestamp and died",
    "'2026-11-15' between '2026-11-14' and died",
    "died > '-31m' and died < '-29m'",
    "died = '-30m'",
    "died > timestamp",
    "died < '+0s'",
    "died > '-1w' and died > '-1d' and died > '-1h' and died < '-60s'",
    "died in ('2020-01-01', '-30m')",
    "died not in ('2020-01-01', '-31m')",
    # fields of the payload
    "value.customer.id = 4711",
    "value.customer.id in (1, 4711)",
    "value.customer.vip = true",
    "value.customer.vip > false",
    "value.paid = FALSE",
    "value.amount = 19.99",
    "value.amount < 20",
    "value.items[0].sku = 'A-1'",
    "value.items[1].sku like 'B-__'",
    "value.items[1].n < value.items[0].n",
    "value.note is null",
    "value.customer is not null",
    "value.items is not null",
    "value.customer.id.deeper is null",
    "value.customer[0] is null",
    "value.items.sku is null",
    "value.items[2] is null",
    "value.customer.name[0] is null",
    "value.nothing.here[7] is null",
    'value."odd name" = 1',
    'value."quo""te" = 2',
    "value.größe = 3",
    "value.in = 4",
    'value."" = 5',
    'value."0" = 6',
    "value.Amount = 7",
    'VALUE."customer".id = 4711',
    "value.due < timestamp",
    "timestamp > value.due",
    "value.due between '2026-11-13' and '2026-11-15'",
    "value.items[0].n between 1 and attempts",
    # patterns
    "reason like 'rejected'",
    "reason like '%'",
    "reason like '%%'",
    "reason like 'r%d'",
    "reason like '_e%t__'",
    "reason like '%j_c%'",
    "reason not like 'reject'",
    "reason not like '%x%'",
    "'50%' like '50\\%'",
    "'500' not like '50\\%'",
    "'a_b' like 'a\\_b' and 'axb' not like 'a\\_b'",
    "'a\\b' like 'a\\\\b'",
    "'it''s' like 'it''_'",
    "'a\nb' like 'a_b'",
    "'abab' like '%ab'",
    "'aab' like 'a%ab'",
    "'.*' like '.*' and 'aa' not like '.*'",
    "'' like '%' and '' like '' and '' not like '_'",
    # logic
    "not reason = 'expired'",
    "not not reason = 'rejected'",
    "not (reason = 'expired' or attempts = 1)",
    "not (reason = 'rejected' and attempts = 1)",
    "reason = 'expired' and attempts = 1 or offset = 42",
    "offset = 42 or reason = 'expired' and attempts = 1",
    "(reason = 'expired' or offset = 42) and attempts = 3",
    "consumer = 'x' or offset = 42",
    "not (consumer = 'x' and offset = 41)",
    "true = true",
    "null is null",
]

FALSE_OR_UNKNOWN_OF_THE_LETTER = [
    "offset = 41",
    "timestamp = '2026-11-14'",
    "value.amount > 20",
    "value.amount = 7",
    "reason like 'rejecte'",
    "reason like 'REJECTED'",
    "'ab' like 'ab%b'",
    "'aXb' like 'a\\_b'",
    # null is unknown, and so is its opposite
    "consumer = 'x'",
    "consumer != 'x'",
    "not consumer = 'x'",
    "consumer in ('x')",
    "consumer not in ('x')",
    "consumer like '%'",
    "consumer not like '%'",
    "retries < 5",
    "retries not between 1 and 5",
    "expires > '-1d'",
    "expires not in ('2020-01-01')",
    "value.note = null",
    "value.note != null",
    "null = null",
    "null in (null)",
    "offset not in (1, null)",
    "not (consumer = 'x' and offset = 42)",
    "not (consumer = 'x' or offset = 41)",
    # kinds that differ are unknown
    "value.amount = '19.99'",
    "value.amount != '19.99'",
    "value.customer.vip = 1",
    "value.customer.vip != 1",
    "value.customer.vip in (1, 2)",
    "value.customer.id not in (1, 'x')",
    "value.customer.name > 5",
    "value.customer.name < value.amount",
    "value.customer = value.customer",
    "value.customer in (1)",
    "value.customer not in (1)",
    "value.items not like '%'",
    "value.amount not like '%'",
    "value.amount < timestamp",
    "value.customer.name < timestamp",
    "not value.customer.name < timestamp",
    "value.customer.name != offset",
]


@pytest.mark.parametrize("condition", TRUE_OF_THE_LETTER)
def test_true_and_its_opposite_is_not(condition: str) -> None:
    assert holds(condition)
    assert not holds(f"not ({condition})")


@pytest.mark.parametrize("condition", FALSE_OR_UNKNOWN_OF_THE_LETTER)
def test_not_true(condition: str) -> None:
    assert not holds(condition)


@pytest.mark.parametrize(
    ("condition", "columns", "expected"),
    [
        ("consumer = 'x-1'", {"consumer": "x-1"}, True),
        ("retries = 255", {"retries": 255}, True),
        ("retries in (0, 1)", {"retries": 0}, True),
        ("expires > '+10m'", {"expires": NOW_US + HOUR_US}, True),
        ("expires > '+10m'", {"expires": NOW_US}, False),
        ("expires < '-0s'", {"expires": NOW_US - 1}, True),
        ("reason is null", {"reason": None}, True),
        ("offset = 100000000000000000000000000000", {"offset": 10**29}, True),
    ],
)
def test_other_letters(condition: str, columns: dict[str, Any], expected: bool) -> None:
    assert holds(condition, letter(**columns)) is expected


@pytest.mark.parametrize(
    ("payload", "condition", "expected"),
    [
        (b"", "value = ''", True),
        (b"", "value.a is null", True),
        (b"plain text", "value = 'plain text'", True),
        (b"plain text", "value.a is null", True),
        (b"plain text", "value.a = 1", False),
        (b"\xff\xfe{", "value is null", True),
        (b"\xff\xfe{", "value.a is null", True),
        (b"\xff", "value like '%'", False),
        (b"\xff", "value_bytes = 1", True),
        ("ö".encode(), "value = 'ö' and value_bytes = 2", True),
        (b'{"a": "\\ud800"}', "value.a like '_'", True),
        (b' \r\n\t{"a": 1}\n ', "value.a = 1", True),
        (b'{"a": 1} {"a": 1}', "value.a is null", True),
        (b'{"a": 1', "value.a is null", True),
        (b"{'a': 1}", "value.a is null", True),
        (b"[1, 2, [3]]", "value[2][0] = 3", True),
        (b"[1, 2, [3]]", "value.a is null", True),
        (b"17", "value = '17'", True),
        (b'{"a": 1, "a": 2}', "value.a = 2", True),
        (b'{"a": 1e400}', "value.a > 1.7e308", True),
        (b'{"a": -1e400}', "value.a < 0", True),
        (b'{"a": NaN, "b": 1}', "value.a is null and value.b = 1", True),
        (b'{"a": NaN}', "value.a != 1", False),
        (b'{"a": [Infinity, -Infinity]}', "value.a[0] is null and value.a[1] is null", True),
        (b'{"a": 9007199254740993}', "value.a = 9007199254740993", True),
        (b'{"a": 9007199254740993}', "value.a = 9007199254740992", False),
        (b'{"a": %s}' % (b"9" * 4000), "value.a > 1e308", True),
        (b'{"a": %s, "b": 1}' % (b"9" * 1_000_000), "value.a is null and value.b = 1", True),
        (b'{"a": -%s, "b": 1}' % (b"9" * 5000), "value.a is null and value.b = 1", True),
        (b'{"a": %s, "b": 1' % (b"9" * 5000), "value.b is null", True),
        (b'{"a": 0.%s}' % (b"1" * 1_000_000), "value.a between 0.11 and 0.12", True),
        (b'{"a": %s.5}' % (b"1" * 1_000_000), "value.a > 1", True),
        (b"[" * 1_000_000, "value[0] is null", True),
        (b'{"a":' * 100_000 + b"1" + b"}" * 100_000, "value.a is null", True),
        (b"[%s,%s]" % (b"9" * 5000, b"[" * 100_000), "value[0] is null", True),
    ],
    ids=lambda part: repr(part)[:60],
)
@pytest.mark.parametrize("view", [bytes, memoryview])
def test_payloads(payload: bytes, condition: str, expected: bool, view: Callable[[bytes], Any]) -> None:
    assert holds(condition, letter(view(payload))) is expected


def test_a_huge_payload_is_not_parsed() -> None:
    fits = b'{"a": 1}'.ljust(where.JSON_BYTES_MAX)
    assert holds("value.a = 1", letter(fits))
    assert holds("value.a is null", letter(fits + b" "))
    assert holds("value like '{_a%'", letter(fits + b" "))


@pytest.mark.parametrize(
    "pattern",
    ["%a" * 400 + "%b", "%" + "a_" * 400 + "b%", "_%" * 400 + "b", "%" * 999 + "b"],
    ids=["many-stars", "many-ones", "pairs", "only-stars"],
)
def test_no_pattern_makes_a_text_be_searched_again_and_again(pattern: str) -> None:
    # A matcher that goes back to try another place does not come to an end here.
    assert not holds(f"value like '{pattern}'", letter(b"a" * 20_000))
    assert holds(f"value like '{pattern}'", letter(b"a" * 20_000 + b"b"))


def test_others_have_their_turns_while_a_long_text_is_searched() -> None:
    """A regular expression would take half a minute for this, and nothing else runs meanwhile."""
    condition = parse("value like '%" + "a_" * 400 + "b%'")
    row = letter(b"a" * (1 << 20))
    judging = threading.Thread(target=condition.matches, args=(row, NOW_US))
    turns = 0
    judging.start()
    while judging.is_alive():
        judging.join(0.001)
        turns += 1
    assert turns > 10


def test_a_condition_has_a_time_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    row = letter(b"a" * 20_000)
    monkeypatch.setattr(where, "SECONDS_MAX", -1.0)
    for condition in ("value like '%a%'", "value like '%a_b%'", "offset = 42 and not value like '%b%c'"):
        with pytest.raises(TooLong):
            holds(condition, row)
    assert holds("value like 'a%' or value like '%b%'", row)  # the second is not looked at
    assert not holds("value_bytes < 1000 and value like '%b%'", row)


def test_the_time_is_looked_at_while_a_long_text_is_searched(monkeypatch: pytest.MonkeyPatch) -> None:
    looked: list[float] = []

    def clock() -> float:
        looked.append(0.0)
        return float(len(looked))

    monkeypatch.setattr("penstock.http.where.like.time.monotonic", clock)
    monkeypatch.setattr(where, "SECONDS_MAX", 9.0)
    with pytest.raises(TooLong):
        holds("value like '%" + "a_" * 400 + "b%'", letter(b"a" * (1 << 20)))
    assert len(looked) == 11  # when it began, and in every chunk


def test_a_letter_that_takes_too_long_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = open_log(str(tmp_path), NOW_US)
    log.append("orders", Batch.of([b"short", b"long" * 100]), NOW_US)
    log.take("orders", "w", 2, NOW_US)
    log.settle("orders", "w", Outcome.REJECT, [(0, 2)], NOW_US)
    log.flush(NOW_US)
    log.wait()
    monkeypatch.setattr(where, "SECONDS_MAX", -1.0)
    reader = LogReader(str(tmp_path))
    runs = [letters.Run(0, 2, NOW_US, 0, 1, 0, Reason.REJECTED)]
    condition = parse("value_bytes > 10 and value like '%x%'")
    with pytest.raises(TooLong, match=r"'orders'.*offset 1, which has 400 bytes.*offset != 1"):
        list(letters.matching(reader, "orders", runs, condition, NOW_US, {}))
    reader.close()
    log.close(NOW_US)


# --- What is read of a row -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("condition", "columns"),
    [
        ("offset = 1", {"offset"}),
        ("value_bytes > 1", {"value_bytes"}),
        ("value like '%a%'", {"value"}),
        ("value.a = 1 and not (reason = 'x' or value.b in (1))", {"value", "reason"}),
        ("died between timestamp and expires", {"died", "timestamp", "expires"}),
        ("value is null or consumer is not null", {"value", "consumer"}),
        ("1 = 1", set()),
    ],
)
def test_columns(condition: str, columns: set[str]) -> None:
    found = parse(condition).columns
    assert found == columns
    # What is not among them is not looked at.
    unknown: dict[str, Any] = dict.fromkeys(set(COLUMNS) - columns)
    blind = LETTER._replace(**unknown)
    assert parse(condition).matches(blind, NOW_US) is holds(condition)


def test_the_columns_of_a_row_are_those_of_the_language() -> None:
    assert Row._fields == (*COLUMNS, "headers")


@pytest.fixture
def parsed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The texts that were parsed as JSON."""
    texts: list[str] = []
    decode = where._decode

    def noted(text: str) -> tuple[Any, int]:
        texts.append(text)
        return decode(text)

    monkeypatch.setattr(where, "_decode", noted)
    return texts


@pytest.mark.parametrize(
    ("condition", "times"),
    [
        ("reason = 'x' and value.a = 1", 0),
        ("value.a = 1 and reason = 'x'", 0),
        ("(value.a = 1 or value.b = 2) and not reason = 'rejected'", 0),
        ("reason = 'rejected' or value.a = 1", 0),
        ("value.a = 1 or reason = 'rejected'", 0),
        ("not (value.a = 1 or reason = 'rejected')", 0),
        ("consumer = 'x' and value.a = 1", 0),
        ("value like 'x%' and value.a = 1", 0),
        ("value.a = 1 and value like 'x%'", 0),
        ("value like '%a%'", 0),
        ("reason = 'rejected' and value.a = 1", 1),
        ("value.a = 1 or value.b = 2 or value.c[0] in (1, 2) or value.d between 1 and 2", 1),
        ("not (value.amount = 1) and value.items[0].n = value.items[1].n", 1),
    ],
)
def test_json_is_parsed_once_and_only_where_it_decides(condition: str, times: int, parsed: list[str]) -> None:
    holds(condition)
    assert len(parsed) == times


def test_what_is_no_json_is_tried_once(parsed: list[str]) -> None:
    assert not holds("value.a = 1 or value.b = 1 or value.c is not null", letter(b"nothing"))
    assert parsed == ["nothing"]


# --- The normal form -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "normal"),
    [
        ("  REASON<>'a''b'  ", "reason != 'a''b'"),
        ("((offset=1))", "offset = 1"),
        ("offset=1 and(attempts=2 and retries=3)", "offset = 1 and attempts = 2 and retries = 3"),
        ("offset=1 or (attempts=2 and retries=3)", "offset = 1 or attempts = 2 and retries = 3"),
        ("offset=1 and (attempts=2 or retries=3)", "offset = 1 and (attempts = 2 or retries = 3)"),
        ("not offset < 5", "offset >= 5"),
        ("not not offset < 5", "offset < 5"),
        ("not (offset=1 or offset=2)", "not (offset = 1 or offset = 2)"),
        ("not reason in ('a','b')", "reason not in ('a', 'b')"),
        ("not reason not like 'a%'", "reason like 'a%'"),
        ("not reason is null", "reason is not null"),
        ("not offset between 1 and 2 and offset=3", "offset not between 1 and 2 and offset = 3"),
        ("value.a.b[007].\"c d\".\"e\" = TRUE", 'value.a.b[7]."c d".e = true'),
        ("value.a = -0010", "value.a = -10"),
        ("value.a = 1E3", "value.a = 1000.0"),
        ("value.a = 1e-9", "value.a = 1e-09"),
        ("value.a = Null", "value.a = null"),
        ("died > '2026-11-15'", "died > '2026-11-15'"),
        ("died > '2026-11-15T02:00+02:00'", "died > '2026-11-15'"),
        ("died > '2026-11-15 10:00:00.5z'", "died > '2026-11-15T10:00:00.500000Z'"),
        ("died > '-120m' or died > '-90m' or died < '+14d'", "died > '-2h' or died > '-90m' or died < '+2w'"),
        ("died > '-0d' or died > '+0h'", "died > '-0s' or died > '-0s'"),
        ("value.due = '2026-11-15 10:00'", "value.due = '2026-11-15 10:00'"),
        ("died > '0001-01-01' and died < '9999-12-31T23:59:59.999999'",
         "died > '0001-01-01' and died < '9999-12-31T23:59:59.999999Z'"),
    ],
)  # fmt: skip
def test_normal_form(text: str, normal: str) -> None:
    condition = parse(text)
    assert str(condition) == normal
    assert parse(normal) == condition
    assert hash(parse(normal)) == hash(condition)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("value.a = 1", "value.a = true"),
        ("value.a = '1'", "value.a = 1"),
        ("value.a = 1", "value.A = 1"),
        ("value[0] = 1", 'value."0" = 1'),
        ("offset = 1 and offset = 2", "offset = 1 or offset = 2"),
        ("died > '-1h'", "died > '+1h'"),
        ("reason like 'a_'", "reason like 'a\\_'"),
        ("reason = 'a'", "reason = 'A'"),
    ],
)
def test_what_says_something_else_is_not_equal(one: str, other: str) -> None:
    assert parse(one) != parse(other)


# --- Refusals ------------------------------------------------------------------------------

REFUSED = [
    ("", 1, "the condition is empty: write one such as reason = 'rejected'"),
    (" \n ", 1, "the condition is empty"),
    ("reson = 'x'", 1, "there is no column 'reson': did you mean reason?"),
    ("offset = 1 and attempt > 2", 16, "did you mean attempts?"),
    ("sku = 'x'", 1, "a field of the payload is value.sku"),
    ("n = 5", 1, "a field of the payload is value.n"),
    ("nto reason = 'x'", 1, "did you mean not?"),
    ("customer.id = 5", 1, "did you mean value.customer.id?"),
    ("offset[0] = 5", 1, "did you mean value.offset[0]?"),
    ("where offset = 1", 1, "leave it out"),
    ("reason <> nul", 11, "did you mean null?"),
    ('reason = "x"', 10, "straight single quotes"),
    ("reason = ‘x’", 10, "straight single quotes"),
    ("reason == 'x'", 8, "did you mean =?"),
    ("offset => 1", 8, "did you mean >=?"),
    ("offset = 1 && attempts = 1", 12, "did you mean and?"),
    ("offset = 1 || attempts = 1", 12, "did you mean or?"),
    ("!(offset = 1)", 1, "did you mean not?"),
    ("reason = 'x", 10, "this text has no end"),
    ("reason = 'x''", 10, "this text has no end"),
    ("value.order-id = 5", 12, 'value."order-id"'),
    ("value.0 = 5", 6, "a path goes on with"),
    ("value['a'] = 5", 6, "a path goes on with"),
    ('value."a = 5', 6, "a path goes on with"),
    ("value.a[-1] = 5", 8, "a path goes on with"),
    ("value.a. b = 5", 8, "a path goes on with"),
    ("value" + ".a" * 101 + " = 5", 206, "at most 100 steps"),
    ("died > -15m", 8, "a time is text, as '-15m'"),
    ("offset > 1.", 10, "this is no number"),
    ("offset > .5", 10, "as 0.5"),
    ("offset > 1e999", 10, "too large"),
    ("offset > " + "1" * 101, 10, "at most 100 characters"),
    ("offset = 1;", 11, "leave out the semicolon"),
    ("offset = @x", 10, "'@' has no meaning here"),
    ("offset = 1\x00", 11, "'\\x00' has no meaning here"),
    ("value.paid", 11, "as in value.paid = true"),
    ("value.paid and offset = 1", 12, "as in value.paid = true"),
    ("reason lik 'x'", 8, "did you mean like?"),
    ("reason not lik 'x'", 12, "did you mean like?"),
    ("reason not = 'x'", 12, "use in, between or like"),
    ("reason is 'x'", 11, "behind is stands null"),
    ("reason is not", 14, "behind is stands null"),
    ("offset in 1", 11, "a list stands in parentheses"),
    ("offset in ()", 12, "belongs here"),
    ("offset in (1 2)", 14, "a comma between"),
    ("offset in (1,", 14, "belongs here"),
    ("offset in (attempts)", 12, "a list has only constants"),
    ("offset in (" + "1," * 1000 + "1)", 2012, "at most 1000 items"),
    ("offset between 1", 17, "two bounds"),
    ("offset between 1 or 2", 18, "two bounds"),
    ("offset like '5'", 1, "like looks at text, and offset is a number"),
    ("died like '2026%'", 1, "like looks at text, and died is a time"),
    ("reason like 5", 13, "a text in single quotes"),
    ("reason like protocol", 13, "a text in single quotes"),
    ("reason like 'a\\b'", 13, "double it"),
    ("reason like 'a\\'", 13, "double it"),
    ("reason like '" + "a" * 1001 + "'", 13, "at most 1000 characters"),
    ("(offset = 1", 12, "close the parenthesis"),
    ("offset = 1)", 11, "no parenthesis is open"),
    ("(offset) = 1", 8, "use one of ="),
    ("offset = 1 attempts = 2", 12, 'join two conditions with "and" or "or"'),
    ("offset = and", 10, "belongs here"),
    ("offset = 1 or", 14, "the condition ends here"),
    ("not", 4, "the condition ends here"),
    ("attempts = 'three'", 12, "attempts is a number and 'three' is text"),
    ("attempts in (1, 'x')", 17, "attempts is a number and 'x' is text"),
    ("reason = 5", 10, "reason is text and 5 is a number"),
    ("reason = true", 10, "reason is text and true is true or false"),
    ("died = 5", 8, "died is a time and 5 is a number"),
    ("timestamp = reason", 13, "timestamp is a time and reason is text"),
    ("value = 5", 9, "value is text and 5 is a number"),
    ("'a\nb' = 5", 9, "'a\\nb' is text"),
    ("died > 'yesterday'", 8, "'yesterday' is no time: write '2026-11-15'"),
    ("died > '-15x'", 8, "is no time"),
    ("died > '2026-02-30'", 8, "is no time"),
    ("died > '2026-11-15T25:00'", 8, "is no time"),
    ("died > '2026-11-15T10:00:00+25:00'", 8, "is no time"),
    ("died > '2026-11-15T10:00.5'", 8, "is no time"),
    ("died > '0001-01-01T00:00:00+01:00'", 8, "is no time"),
    ("died > '9999-12-31T23:59:59-01:00'", 8, "is no time"),
    ("died in ('2026-11-15', 'x')", 24, "is no time"),
    ("'x' < died", 1, "is no time"),
    ("'x' between '2026-11-15' and died", 1, "is no time"),
    ("(" * 101 + "offset = 1" + ")" * 101, 101, "at most 100 deep"),
    ("offset = 1 or " * 1000, 10_001, "at most 10000 characters, this one has 14000"),
]  # fmt: skip


def is_one_line(error: WhereError) -> bool:
    return str(error).isprintable() and len(str(error)) < 400


@pytest.mark.parametrize(("text", "position", "part"), REFUSED, ids=lambda part: repr(part)[:40])
def test_refused(text: str, position: int, part: str) -> None:
    with pytest.raises(WhereError) as raised:
        parse(text)
    assert part in str(raised.value)
    assert raised.value.position == position
    assert str(raised.value).startswith(f"where, character {position}: ")
    assert is_one_line(raised.value)
    assert isinstance(raised.value, PenstockError)


@pytest.mark.parametrize(
    "text",
    [
        "(" * 100 + "offset = 42" + ")" * 100,
        "not (" * 100 + "offset = 42" + " and offset = 42)" * 100,
        "not " * 2000 + "offset = 42",
        "offset in (" + "1," * 999 + "42)",
        "offset = 42 or " * 666 + "offset = 1",
        "value" + ".a" * 100 + " is null",
        "value.a = " + "1" * 100 + " or offset = 42",
        "reason like '%" + "_" * 8 + "%" * 991 + "'",
        ("offset = 42" + " " * 10_000)[:10_000],
    ],
    ids=lambda text: repr(text)[:30],
)
def test_as_large_as_may_be(text: str) -> None:
    assert holds(text)
    assert str(parse(text))


def test_nothing_is_run_and_nothing_is_read() -> None:
    """The modules of the language call nothing that runs text, and import nothing that does IO."""
    allowed = {
        "re",
        "math",
        "operator",
        "json",
        "time",
        "enum",
        "typing",
        "dataclasses",
        "datetime",
        "difflib",
        "reprlib",
    }
    paths = sorted((ROOT / "penstock" / "http" / "where").glob("*.py"))
    assert len(paths) == 6
    for path in paths:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                assert node.func.id not in {"eval", "exec", "compile", "open", "__import__", "getattr"}, path
            if isinstance(node, ast.ImportFrom):
                module = node.module or ""
                assert module.startswith("penstock.") or module.split(".")[0] in allowed | {"collections"}, (
                    path
                )
            if isinstance(node, ast.Import):
                assert {name.name for name in node.names} <= allowed, path


# --- Any text ------------------------------------------------------------------------------

WORDS = [
    *COLUMNS, "value.a", "value.a[0]", 'value."x y"', "value[", "value.", "and", "or", "not", "in", "between",
    "like", "is", "null", "true", "false", "=", "!=", "<>", "<", "<=", ">", ">=", "(", ")", "(", ")", ",",
    "'", "''", '"', "'a'", "'2026-11-15'", "'-15m'", "'%a_'", "'\\'", "0", "1", "-1", "1.5", "1e5", "1e400",
    "9" * 101, "-", ".", "[", "]", "==", "!", ";", "x", "reson", "é", "\ud800", "\x00", "\n", "where",
]  # fmt: skip


def parses_or_is_refused(text: str) -> None:
    try:
        condition = parse(text)
    except WhereError as error:
        refused = error
    else:
        assert parse(str(condition)) == condition
        assert condition.matches(LETTER, NOW_US) in (True, False)
        return
    assert is_one_line(refused)
    assert 1 <= refused.position <= len(text) + 1


@settings(max_examples=300, deadline=None)
@given(st.text(max_size=100))
def test_any_text_parses_or_is_refused(text: str) -> None:
    parses_or_is_refused(text)


@settings(max_examples=400, deadline=None)
@given(st.lists(st.sampled_from(WORDS), max_size=30), st.sampled_from(["", " "]))
def test_any_words_parse_or_are_refused(words: list[str], between: str) -> None:
    parses_or_is_refused(between.join(words))


@settings(max_examples=300, deadline=None)
@given(st.sampled_from([*TRUE_OF_THE_LETTER, *FALSE_OR_UNKNOWN_OF_THE_LETTER]), st.data())
def test_a_condition_with_a_typing_error_parses_or_is_refused(text: str, data: st.DataObject) -> None:
    start = data.draw(st.integers(0, len(text)))
    end = data.draw(st.integers(start, min(len(text), start + 3)))
    parses_or_is_refused(text[:start] + data.draw(st.text(max_size=3)) + text[end:])


@pytest.mark.parametrize("text", [*TRUE_OF_THE_LETTER, *FALSE_OR_UNKNOWN_OF_THE_LETTER])
def test_the_normal_form_says_the_same(text: str) -> None:
    parses_or_is_refused(text)


# --- Against the reference -----------------------------------------------------------------


@settings(max_examples=400, deadline=None)
@given(trees, st.lists(rows, min_size=1, max_size=4))
@example(
    ("not", ("in", ("path", ("a",)), [("number", 1), ("null",)])), [letter(b'{"a": 1}'), letter(b'{"a": 2}')]
)
@example(("compare", ("path", ("a",)), "<", ("column", "died")), [letter(b'{"a": "2026-11-15"}')])
def test_judges_like_the_reference(tree: Tree, some: list[Row]) -> None:
    condition = parse(spelt(tree))
    opposite = parse(f"not ({spelt(tree)})")
    again = parse(str(condition))
    assert again == condition
    assert str(again) == str(condition)
    for row in some:
        expected = judged(tree, row)
        assert condition.matches(row, NOW_US) is (expected is True)
        assert again.matches(row, NOW_US) is (expected is True)
        assert opposite.matches(row, NOW_US) is (expected is False)


# Few characters, so that many texts match many patterns; and all that mean something somewhere.
plain = st.tuples(st.text("ab%_", max_size=8), st.text("ab", max_size=8))
odd_parts = st.sampled_from(["a", ".", "[", "\n", "%", "_", "\\%", "\\_", "\\\\"])
odd = st.tuples(st.lists(odd_parts, max_size=6).map("".join), st.text("a.[\n%_\\", max_size=6))


@settings(max_examples=400, deadline=None)
@given(st.one_of(plain, odd))
@example(("ab%b", "ab"))
@example(("%ab%b", "xab"))
@example(("%a%a%", "xa"))
@example(("%._%", "xyz"))
def test_likes_what_the_reference_likes(drawn: tuple[str, str]) -> None:
    pattern, text = drawn
    condition = parse(f"value like '{pattern}'")
    for quick_max in (where_like.QUICK_MAX, 0):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(where_like, "QUICK_MAX", quick_max)
            assert condition.matches(letter(text.encode()), NOW_US) is like(text, pattern)


def test_the_reference_knows_all_three_values() -> None:
    assert judged(("compare", ("column", "offset"), "=", ("number", 42)), LETTER) is True
    assert judged(("compare", ("column", "offset"), "=", ("number", 41)), LETTER) is False
    assert judged(("compare", ("column", "consumer"), "=", ("text", "a")), LETTER) is None
