"""NDJSON bodies: what they mean, what is refused and in which words, and that both ways of parsing agree."""

import base64
import json
from array import array
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.http.bodies import ndjson
from penstock.http.bodies.ndjson import read_ndjson
from penstock.http.problems import Problem
from penstock.model.headers import decode_headers

LIMIT = 1000


def read(body: bytes, **options: Any) -> Any:
    return read_ndjson(body, **{"payload_bytes_max": LIMIT, **options})


def lines(*rows: object) -> bytes:
    return b"".join(json.dumps(row).encode() + b"\n" for row in rows)


def only(body: bytes) -> Any:
    """The one batch of a body without queues."""
    ((queue, batch),) = read(body)
    assert queue is None
    return batch


# --- what is taken -----------------------------------------------------------------------------------


def test_values_are_texts_or_base64() -> None:
    batch = only(lines({"value": "a"}, {"value": ""}, {"value": "é\n€"}, {"value_base64": "AP8="}))
    assert batch.messages() == [b"a", b"", "é\n€".encode(), b"\x00\xff"]
    assert (batch.ttl_seconds, batch.retries, batch.reply, batch.protocol) == (None, None, None, "http")
    assert batch.bounds.typecode == "i"


def test_columns_are_there_where_a_message_has_them() -> None:
    batch = only(
        lines(
            {"value": "a"},
            {"value": "b", "ttl": 60, "retries": None},
            {"value": "c", "retries": 0},
            {"value": "d", "ttl": None, "retries": 255},
        )
    )
    assert batch.ttl_seconds == array("q", [0, 60, 0, 0])
    assert batch.retries == array("h", [-1, -1, 0, 255])
    assert (batch.delay_us, batch.headers) == (None, None)


def test_delays_and_headers() -> None:
    batch = only(
        lines(
            {"value": "a", "delay": 1, "headers": {}},
            {"value": "b", "delay": 0.0000014, "headers": {"traceparent": "00-é", "x": "}\n{"}},
            {"value": "c", "delay": None, "headers": None},
            {"value": "d", "delay": 315_576_000},
        )
    )
    assert batch.delay_us == array("q", [1_000_000, 1, 0, 315_576_000_000_000])
    assert [decode_headers(text) for text in batch.headers] == [
        {}, {"traceparent": "00-é", "x": "}\n{"}, {}, {}
    ]  # fmt: skip
    assert batch.headers[0] == b""
    nothing = only(lines({"value": "a", "delay": 0, "headers": {}}))
    assert (nothing.delay_us, nothing.headers) == (None, None)


@pytest.mark.parametrize(
    "body",
    [
        b'{"value":"a"}\n{"value":"b"}\n',
        b'{"value":"a"}\n{"value":"b"}',
        b'{"value":"a"}\r\n{"value":"b"}\r\n',
        b'\n\n{"value":"a"}\n \t\n{"value":"b"}\n\n',
        b'  { "value" : "a" }  \n\t{"value":"b"}',
        b'{"value":"\\u0061"}\n{"value_base64":"Yg=="}\n',
        b'{"value":"a"}\n{"value":"b","ttl":null}\n',
    ],
)
def test_the_same_in_other_forms(body: bytes) -> None:
    assert only(body).messages() == [b"a", b"b"]


def test_a_column_that_begins_late_is_filled_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ndjson, "CHUNK_BYTES", 1)  # every line is a chunk of its own
    late = {"value": "b", "ttl": 5, "delay": 0.5, "headers": {"k": "v"}}
    batch = only(lines({"value": "a"}, late, {"value": "c"}))
    assert batch.messages() == [b"a", b"b", b"c"]
    assert batch.ttl_seconds == array("q", [0, 5, 0])
    assert batch.delay_us == array("q", [0, 500_000, 0])
    assert batch.headers == [b"", b'{"k":"v"}', b""]


def test_a_body_of_many_chunks() -> None:
    values = [f"{number:08d}" + "x" * (number % 200) for number in range(20_000)]
    batch = only(lines(*({"value": value} for value in values)))
    assert batch.messages() == [value.encode() for value in values]


def test_queues_in_order_of_first_appearance() -> None:
    body = lines(
        {"queue": "b", "value": "1"},
        {"queue": "a", "value": "2", "ttl": 7, "headers": {"k": "v"}, "delay": 1},
        {"value": "3", "queue": "b"},
        {"queue": "a", "value_base64": "NA=="},
    )
    parts = read(body, queues=True, protocol="spark")
    assert [(queue, batch.messages()) for queue, batch in parts] == [("b", [b"1", b"3"]), ("a", [b"2", b"4"])]
    assert parts[0][1].ttl_seconds is None
    assert parts[1][1].ttl_seconds == array("q", [7, 0])
    assert (parts[0][1].headers, parts[0][1].delay_us) == (None, None)
    assert parts[1][1].headers == [b'{"k":"v"}', b""]
    assert parts[1][1].delay_us == array("q", [1_000_000, 0])
    assert {batch.protocol for _, batch in parts} == {"spark"}


# --- what is refused ---------------------------------------------------------------------------------

GOOD = b'{"value":"good"}\n'

WRONG = [
    (b"", "the body has no message; send at least one"),
    (b"\n \n", "the body has no message; send at least one"),
    (GOOD + b'{"value":}', "line 2: this is no JSON: Expecting value at character 9; send an object a line"),
    (GOOD + b"\n" + b'{"value":"a"', "line 3: this is no JSON: Expecting ',' delimiter at character 12"),
    (b'{"value":"a"},{"value":"b"}\n', "line 1: this is no JSON: Extra data at character 13"),
    (
        GOOD * 3 + b'{"value":"a\xff"}',
        "line 4: this is no UTF-8; bytes that are no text go into value_base64",
    ),
    (GOOD + b"[1]", 'line 2: this is a list; send an object, {"value": "…"}'),
    (GOOD + b"null", "line 2: this is null; send an object"),
    (b'"a"', "line 1: this is a text; send an object"),
    (b"17", "line 1: this is a number; send an object"),
    (b"{}", "line 1: use one of the fields value and value_base64, as in"),
    (GOOD + b'{"ttl":5}', "line 2: use one of the fields value and value_base64"),
    (b'{"value":"a","value_base64":"YQ=="}', "line 1: use one of the fields value and value_base64"),
    (b'{"value":5}', "line 1: field 'value' is a number; use a text"),
    (b'{"value":null}', "line 1: field 'value' is null; use a text"),
    (b'{"value":{"a":1}}', "line 1: field 'value' is an object; use a text"),
    (b'{"value":["a"]}', "line 1: field 'value' is a list; use a text"),
    (
        GOOD + b'{"value":"a\\ud800"}',
        "line 2: field 'value' has half a character ('\\ud800') at 1; what is no",
    ),
    (b'{"value_base64":"a"}', "line 1: field 'value_base64' is no base64 ("),
    (b'{"value_base64":"YQ==YQ=="}', "line 1: field 'value_base64' is no base64 ("),
    (b'{"value_base64":"Y Q=="}', "line 1: field 'value_base64' is no base64 ("),
    (b'{"value_base64":"\\u00e9"}', "line 1: field 'value_base64' is no base64 ("),
    (b'{"value_base64":false}', "line 1: field 'value_base64' is a Boolean; use a text"),
    (GOOD + b'{"value":"a","ttl":0}', "line 2: field 'ttl' is 0; use a whole number of seconds from 1 to"),
    (b'{"value":"a","ttl":1.5}', "line 1: field 'ttl' is 1.5; use"),
    (b'{"value":"a","ttl":true}', "line 1: field 'ttl' is a Boolean; use"),
    (b'{"value":"a","ttl":"5"}', "line 1: field 'ttl' is a text; use"),
    (b'{"value":"a","ttl":NaN}', "line 1: field 'ttl' is nan; use"),
    (b'{"value":"a","ttl":1000000000001}', "line 1: field 'ttl' is 1000000000001; use"),
    (b'{"value":"a","ttl":' + b"9" * 5000 + b"}", "line 1: this is no JSON: Exceeds the limit"),
    (b'{"value":"a","delay":-1}', "line 1: field 'delay' is -1; use a number of seconds from 0 to 315576000"),
    (b'{"value":"a","delay":315576000.1}', "line 1: field 'delay' is 315576000.1; use"),
    (b'{"value":"a","delay":NaN}', "line 1: field 'delay' is nan; use"),
    (b'{"value":"a","delay":1e999}', "line 1: field 'delay' is inf; use"),
    (b'{"value":"a","delay":true}', "line 1: field 'delay' is a Boolean; use"),
    (b'{"value":"a","delay":"5"}', "line 1: field 'delay' is a text; use"),
    (GOOD + b'{"value":"a","headers":[]}', "line 2: field 'headers' is a list; use an object of texts"),
    (b'{"value":"a","headers":"a: b"}', "line 1: field 'headers' is a text; use an object of texts"),
    (b'{"value":"a","headers":{"a":1}}', "line 1: field 'headers': header 'a': names and values are texts"),
    (b'{"value":"a","headers":{"a":null}}', "line 1: field 'headers': header 'a': names and values are"),
    (b'{"value":"a","headers":{"a":["b"]}}', "line 1: field 'headers': header 'a': names and values are"),
    (b'{"value":"a","headers":{"":"b"}}', "line 1: field 'headers': header '': a name has 1 to 255 bytes"),
    (b'{"value":"a","headers":{"a":"\\ud800"}}', "line 1: field 'headers': header 'a': it has half of"),
    (
        lines({"value": "a", "headers": {f"{n}": "" for n in range(65)}}),
        "line 1: field 'headers': 65 headers;",
    ),
    (
        lines({"value": "a", "headers": {"a": "x" * 16384}}),
        "line 1: field 'headers': headers of 16385 bytes;",
    ),
    (b'{"value":"a","headers":{"a":"b"}', "line 1: this is no JSON: Expecting ',' delimiter"),
    (b'{"value":"a","headers":{"a":"b"}\n{"c":"d"}}', "line 1: this is no JSON"),
    (b'{"value":"a","retries":256}', "line 1: field 'retries' is 256; use a whole number from 0 to 255"),
    (b'{"value":"a","retries":-1}', "line 1: field 'retries' is -1; use"),
    (b'{"value":"a","retries":[[1]]}', "line 1: field 'retries' is a list; use"),
    (
        GOOD + b'{"value":"a","tll":5}',
        "line 2: there is no field 'tll'; there are delay, headers, retries, ttl, value, value_base64",
    ),
    (
        b'{"value":"a","queue":"q"}',
        "line 1: there is no field 'queue' here; the queue is the one of the addr",
    ),
    (b'{"value":"a","":1}', "line 1: there is no field ''"),
    (b"[" * 100_000, "line 1: this is no JSON: "),
    (b'\xef\xbb\xbf{"value":"a"}', "line 1: this is no JSON: "),
]


@pytest.mark.parametrize(("body", "detail"), WRONG, ids=[detail[:60] for _, detail in WRONG])
def test_what_is_wrong_is_named(body: bytes, detail: str) -> None:
    with pytest.raises(Problem) as raised:
        read(body)
    assert raised.value.status == 400
    assert raised.value.detail.startswith(detail)
    assert len(raised.value.detail) < 300


@pytest.mark.parametrize(
    ("row", "detail"),
    [
        ({"value": "a"}, "line 2: the field 'queue' is missing; name the queue in every line"),
        ({"value": "a", "queue": 5}, "line 2: field 'queue' is a number; use the name of a queue"),
        ({"value": "a", "queue": ""}, "line 2: field 'queue': a queue name cannot be empty"),
        ({"value": "a", "queue": "q.dead"}, "line 2: field 'queue': queue 'q.dead' cannot be sent to"),
        ({"value": "a", "queue": "a\n"}, "line 2: field 'queue': queue 'a\\n': character 1"),
        (
            {"value": "a", "queues": "a"},
            "line 2: there is no field 'queues'; there are delay, headers, queue",
        ),
    ],
)
def test_wrong_queues_are_named(row: object, detail: str) -> None:
    with pytest.raises(Problem) as raised:
        read(lines({"value": "a", "queue": "good"}, row), queues=True)
    assert raised.value.detail.startswith(detail)


@pytest.mark.parametrize(
    "row",
    [{"value": "x" * 1001}, {"value": "é" * 501}, {"value_base64": base64.b64encode(bytes(1001)).decode()}],
)
def test_a_message_that_is_too_large_is_named(row: object) -> None:
    with pytest.raises(Problem) as raised:
        read(lines({"value": "x" * 1000}, {"value": "é" * 500}, row))
    assert (raised.value.name, raised.value.status) == ("body-too-large", 413)
    assert raised.value.detail.startswith("line 3: the message has 100")
    assert "[limits] payload-bytes-max is 1000" in raised.value.detail


@pytest.mark.parametrize(
    ("row", "count", "detail"),
    [
        (b'{"value":"","queue":"q"}\n', 1_000_001, "messages or more, and 1000000 are taken at a time"),
        (b'{"value":"","queue":"q%d"}\n', 10_001, "for more than 10000 queues"),
    ],
    ids=["rows", "queues"],
)
def test_rows_and_queues_are_bounded_by_what_they_cost(row: bytes, count: int, detail: str) -> None:
    """Within body-bytes-max are a million empty messages, or half a million queues: 1 KB and more each."""
    body = b"".join(row % at for at in range(count)) if b"%" in row else row * count
    with pytest.raises(Problem) as refused:
        read_ndjson(body, payload_bytes_max=10, queues=True)
    assert refused.value.name == "body-too-large"
    assert detail in refused.value.detail


def test_plain_lines_are_bounded_too() -> None:
    assert len(read_ndjson(b'{"value":""}\n' * 1_000_000, payload_bytes_max=10)[0][1]) == 1_000_000
    with pytest.raises(Problem, match="1000000 are taken at a time"):
        read_ndjson(b'{"value":""}\n' * 1_000_001, payload_bytes_max=10)


def test_line_numbers_count_over_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ndjson, "CHUNK_BYTES", 40)
    for bad in (b'{"value":1}', b"\xff", b"{", b'{"value":"a","ttl":0}'):
        with pytest.raises(Problem, match=r"^line 41: "):
            read(GOOD * 40 + bad + b"\n" + GOOD * 40)


# --- lines that only together look right -------------------------------------------------------------


@pytest.mark.parametrize(
    "body",
    [
        # A text that goes on in the next line, and a line with two objects to make up for it.
        b'{"value":"a}\n{","ttl":1}\n{"value":"b"},{"value":"c"}\n',
        # An object inside of one that begins in one line and ends in another.
        b'{"value":[{}\n{}]}\n{"value":"b"},{"value":"c"}\n',
        b'{"value":"a"},{"value":"b"}\n{"value":[{}\n{}]}\n',
        # One object over two lines, and two in one line.
        b'{"value":"a"\n"ttl":1}\n{"value":"b"},{"value":"c"}\n',
        b'{"value":"a"},\n{"value":"b"}\n',
        b'{"value":"a"}],[{"value":"b"}\n',
        b'{"value":"a"},5\n{"value":"b"}\n',
    ],
)
def test_each_line_is_an_object_by_itself(body: bytes) -> None:
    with pytest.raises(Problem, match=r"^line [123]: "):
        read(body)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-2, 300) | st.floats(allow_nan=False) | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=4,
)
ROW = st.dictionaries(
    st.sampled_from(["value", "value", "value_base64", "ttl", "retries", "x"]), JSON, max_size=3
)
GOOD_ROW = st.fixed_dictionaries(
    {"value": st.text(max_size=5)},
    optional={"ttl": st.none() | st.integers(1, 9), "retries": st.none() | st.integers(0, 255)},
)


@settings(max_examples=300, deadline=None)
@given(
    st.lists(
        (GOOD_ROW | GOOD_ROW | GOOD_ROW | ROW).map(lambda row: json.dumps(row, ensure_ascii=False)),
        max_size=5,
    )
    | st.lists(st.text('{}",:[]\n\\ av1', max_size=12), max_size=4),
    st.sampled_from(["\n", "\r\n", "\n\n"]),
    st.integers(1, 60),
)
def test_all_at_once_or_line_by_line(rows: list[str], ending: str, chunk_bytes: int) -> None:
    """Whatever the lines are, parsing many at a time says what parsing each by itself says."""
    body = ending.join(rows).encode("utf-8", "surrogatepass")
    outcomes = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ndjson, "CHUNK_BYTES", chunk_bytes)
        for by_line in (False, True):
            if by_line:
                patch.setattr(ndjson, "_all_at_once", lambda text: None)
            try:
                outcomes.append(repr(read(body)))
            except Problem as problem:
                outcomes.append(problem.detail)
    assert outcomes[0] == outcomes[1]
