"""Arrow bodies: every type that is taken, what is refused, and streams that lie about themselves."""

import io
import random
from array import array
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from penstock.http.bodies.arrow import read_arrow
from penstock.http.problems import Problem

LIMIT = 1000
BYTES_MAX = 100_000


def stream(*tables: pa.Table | pa.RecordBatch, **options: Any) -> bytes:
    sink = io.BytesIO()
    written = pa.ipc.IpcWriteOptions(**options)
    with pa.ipc.new_stream(sink, tables[0].schema, options=written) as writer:
        for table in tables:
            writer.write(table)
    return sink.getvalue()


def read(body: bytes, **options: Any) -> Any:
    return read_arrow(body, **{"payload_bytes_max": LIMIT, "bytes_max": BYTES_MAX, **options})


def only(*tables: pa.Table) -> Any:
    ((queue, batch),) = read(stream(*tables))
    assert queue is None
    return batch


def problem_of(body: bytes, **options: Any) -> Problem:
    with pytest.raises(Problem) as raised:
        read(body, **options)
    return raised.value


# --- what is taken -----------------------------------------------------------------------------------

TYPES = [pa.binary(), pa.string(), pa.large_binary(), pa.large_string()]


@pytest.mark.parametrize("type_", TYPES, ids=str)
@pytest.mark.parametrize("as_dictionary", [False, True])
def test_values(type_: pa.DataType, as_dictionary: bool) -> None:
    texts = ["one", "", "three €", "one", ""]
    values = pa.array([text.encode() for text in texts], pa.binary()).cast(type_)
    column = values.dictionary_encode() if as_dictionary else values
    batch = only(pa.table({"value": column}))
    assert batch.messages() == [text.encode() for text in texts]
    assert batch.bounds.typecode == "i"
    assert (batch.ttl_seconds, batch.retries, batch.protocol) == (None, None, "http")


@pytest.mark.parametrize("type_", TYPES, ids=str)
def test_slices_and_many_batches(type_: pa.DataType) -> None:
    table = pa.table(
        {"value": pa.array([f"{n:04d}" for n in range(1000)]).cast(type_), "ttl": range(1, 1001)}
    )
    pieces = [table.slice(3, 100), table.slice(0, 0), table.slice(500, 7), table.slice(999, 1)]
    batch = only(*pieces)
    numbers = [*range(3, 103), *range(500, 507), 999]
    assert batch.messages() == [b"%04d" % number for number in numbers]
    assert batch.ttl_seconds == array("q", [number + 1 for number in numbers])


def test_a_chunked_table_in_small_batches() -> None:
    column = pa.chunked_array([[b"a", b"b"], [b""], [b"c"]])
    assert only(pa.table({"value": column})).messages() == [b"a", b"b", b"", b"c"]


def test_only_empty_messages() -> None:
    assert only(pa.table({"value": pa.array([b"", b""])})).messages() == [b"", b""]


@pytest.mark.parametrize("bits", [8, 16, 32, 64])
@pytest.mark.parametrize("sign", ["int", "uint"])
def test_numbers_of_any_type(bits: int, sign: str) -> None:
    type_ = getattr(pa, f"{sign}{bits}")()
    batch = only(
        pa.table(
            {
                "retries": pa.array([None, 0, 100], type_),
                "value": [b"a", b"b", b"c"],
                "ttl": pa.array([1, None, 127], type_),
            }
        )
    )
    assert batch.ttl_seconds == array("q", [1, 0, 127])
    assert batch.retries == array("h", [-1, 0, 100])


def test_columns_of_nulls_are_none() -> None:
    batch = only(pa.table({"value": [b"a"], "ttl": pa.nulls(1), "retries": pa.nulls(1, pa.int8())}))
    assert (batch.ttl_seconds, batch.retries) == (None, None)


@pytest.mark.parametrize(
    "type_", [pa.int8(), pa.uint64(), pa.float16(), pa.float32(), pa.float64(), pa.decimal128(22, 2)], ids=str
)
def test_delays_of_any_type(type_: pa.DataType) -> None:
    batch = only(pa.table({"value": [b"a", b"b", b"c"], "delay": pa.array([None, 0, 100]).cast(type_)}))
    assert batch.delay_us == array("q", [0, 0, 100_000_000])
    none = only(pa.table({"value": [b"a", b"b"], "delay": pa.array([None, 0]).cast(type_)}))
    assert none.delay_us is None


@pytest.mark.parametrize("text", [pa.string(), pa.large_string()], ids=str)
def test_headers(text: pa.DataType) -> None:
    pairs = [None, [], [("traceparent", "00-é"), ("x", "")], [("y", "1")]]
    table = pa.table({"value": [b"a", b"b", b"c", b"d"], "headers": pa.array(pairs, pa.map_(text, text))})
    assert only(table).headers == [b"", b"", '{"traceparent":"00-é","x":""}'.encode(), b'{"y":"1"}']
    assert only(table.slice(2, 1)).headers == ['{"traceparent":"00-é","x":""}'.encode()]
    assert only(table.slice(0, 2)).headers is None
    ordered = table.append_column("queue", pa.array(["p", "q", "p", "q"]))
    parts = read(stream(ordered), queues=True)
    assert [(name, batch.headers) for name, batch in parts] == [
        ("p", [b"", '{"traceparent":"00-é","x":""}'.encode()]),
        ("q", [b"", b'{"y":"1"}']),
    ]


def test_headers_count_as_bytes() -> None:
    """What is one byte of a column may be six of a text."""
    headers = pa.array([[("a", "\x01" * 10_000)]] * 2, pa.map_(pa.string(), pa.string()))
    problem = problem_of(stream(pa.table({"value": [b"", b""], "headers": headers})))
    assert problem.detail.startswith(
        "the messages up to row 1 have 120016 bytes, and the limit of [http] body"
    )


def test_a_column_that_begins_late_is_filled_up() -> None:
    schema = pa.schema({"value": pa.binary(), "ttl": pa.int32(), "delay": pa.float32(), "headers": MAP})
    batch = only(
        pa.table({"value": [b"a"], "ttl": [None], "delay": [None], "headers": [None]}, schema=schema),
        pa.table({"value": [b"b"], "ttl": [9], "delay": [0.5], "headers": [{"k": "v"}]}, schema=schema),
    )
    assert batch.ttl_seconds == array("q", [0, 9])
    assert batch.delay_us == array("q", [0, 500_000])
    assert batch.headers == [b"", b'{"k":"v"}']


@pytest.mark.parametrize(
    "type_", [pa.string(), pa.large_string(), pa.dictionary(pa.int8(), pa.string())], ids=str
)
@pytest.mark.parametrize("value_type", [pa.binary(), pa.dictionary(pa.int16(), pa.binary())], ids=str)
def test_queues_in_order_of_first_appearance(type_: pa.DataType, value_type: pa.DataType) -> None:
    def table(queues: list[str], values: list[bytes], ttls: list[int | None]) -> pa.Table:
        return pa.table(
            {
                "value": pa.array(values).cast(value_type),
                "queue": pa.array(queues).cast(type_),
                "ttl": pa.array(ttls, pa.int32()),
            }
        )

    body = stream(
        table(["b", "a", "b", "c"], [b"1", b"2", b"3", b""], [1, None, 3, None]),
        table(["d", "a"], [b"5", b"6"], [None, 6]),
    )
    parts = read(body, queues=True, protocol="spark")
    assert [(queue, batch.messages(), batch.ttl_seconds) for queue, batch in parts] == [
        ("b", [b"1", b"3"], array("q", [1, 3])),
        ("a", [b"2", b"6"], array("q", [0, 6])),
        ("c", [b""], array("q", [0])),
        ("d", [b"5"], array("q", [0])),
    ]
    assert {batch.protocol for _, batch in parts} == {"spark"}


def test_a_dictionary_of_queues_may_have_a_name_twice() -> None:
    queue = pa.DictionaryArray.from_arrays([0, 2, 0, 1, 2], ["a", "b", "a"])
    body = stream(pa.table({"value": [b"1", b"2", b"3", b"4", b"5"], "queue": queue}))
    parts = read(body, queues=True)
    assert [(name, batch.messages()) for name, batch in parts] == [
        ("a", [b"1", b"2", b"3", b"5"]),
        ("b", [b"4"]),
    ]


def test_many_rows_and_queues_against_the_obvious_way() -> None:
    chance = random.Random(5)
    rows = [(f"q{chance.randrange(50)}", chance.randbytes(chance.randrange(9)), chance.choice([None, 1, 255]))
            for _ in range(5000)]  # fmt: skip
    tables = []
    for lo in range(0, 5000, 1700):
        queues, values, retries = zip(*rows[lo : lo + 1700], strict=True)
        tables.append(pa.table({"queue": queues, "value": values, "retries": pa.array(retries, pa.int64())}))
    expected: dict[str, list[tuple[bytes, int]]] = {}
    for queue, value, retry in rows:
        expected.setdefault(queue, []).append((value, -1 if retry is None else retry))
    found = {
        queue: list(zip(batch.messages(), batch.retries, strict=True))
        for queue, batch in read(stream(*tables), queues=True)
    }
    assert found == expected
    assert list(found) == list(expected)


# --- what is refused ---------------------------------------------------------------------------------


def table_with(**columns: Any) -> pa.Table:
    return pa.table({"value": [b"a", b"b", b"c"], **columns})


MAP = pa.map_(pa.string(), pa.string())


def with_headers(pairs: list[tuple[str, str | None]]) -> pa.Table:
    return table_with(headers=pa.array([None, pairs, []], MAP))


WRONG = [
    (pa.table({"ttl": [1]}), "the column 'value' is missing"),
    (table_with(key=[1, 2, 3]), "there is no column 'key' here; there are value, ttl, retries"),
    (
        table_with(queue=["a", "b", "c"]),
        "there is no column 'queue' here; there are value, ttl, retries, delay, headers; the queue is the",
    ),
    (pa.table([[b"a"], [b"b"]], names=["value", "value"]), "there are 2 columns 'value'; send one"),
    (pa.table({"value": [1]}), "column 'value' is of type int64; use binary, string, large_binary or large_"),
    (pa.table({"value": [[b"a"]]}), "column 'value' is of type list<"),
    (pa.table({"value": pa.array([b"abc"], pa.binary(3))}), "column 'value' is of type fixed_size_binary[3]"),
    (pa.table({"value": pa.array([1]).dictionary_encode()}), "column 'value' is of type dictionary<"),
    (table_with(ttl=["1", "2", "3"]), "column 'ttl' is of type string; use any type of integers"),
    (table_with(ttl=[1.0, 2.0, 3.0]), "column 'ttl' is of type double; use any type of integers"),
    (table_with(retries=[True, True, True]), "column 'retries' is of type bool; use any type of integers"),
    (table_with(ttl=[5, None, 0]), "row 2, column 'ttl': it is 0; use a whole number of seconds from 1 to"),
    (table_with(ttl=[5, 10**12 + 1, 1]), "row 1, column 'ttl': it is 1000000000001; use"),
    (
        table_with(ttl=pa.array([None, 2**64 - 1, 1], pa.uint64())),
        "row 1, column 'ttl': it is 18446744073709551615; use",
    ),
    (table_with(retries=[0, 256, 1]), "row 1, column 'retries': it is 256; use a whole number from 0 to 255"),
    (table_with(retries=[0, None, -1]), "row 2, column 'retries': it is -1; use"),
    (table_with(delay=["1", "2", "3"]), "column 'delay' is of type string; use any type of numbers"),
    (table_with(delay=[0, None, -1]), "row 2, column 'delay': it is -1; use a number of seconds from 0 to"),
    (table_with(delay=[0.5, float("nan"), 1]), "row 1, column 'delay': it is nan; use"),
    (table_with(delay=[1, 2, 315_576_001]), "row 2, column 'delay': it is 315576001; use"),
    (table_with(headers=["a", "b", "c"]), "column 'headers' is of type string; use map<string, string>"),
    (
        table_with(headers=pa.array([None, [("a", 1)], None], pa.map_(pa.string(), pa.int8()))),
        "column 'headers' is of type map<string, int8",
    ),
    (with_headers([("a", None)]), "row 1, column 'headers': header 'a': names and values are texts"),
    (with_headers([("a", "1"), ("a", "2")]), "row 1, column 'headers': a name is there twice"),
    (with_headers([("", "1")]), "row 1, column 'headers': header '': a name has 1 to 255 bytes"),
    (
        with_headers([(f"{n}", "") for n in range(65)]),
        "row 1, column 'headers': 65 headers; a message has at",
    ),
    (
        with_headers([("a", "x" * 16384)]),
        "row 1, column 'headers': headers of 16385 bytes; those of a message",
    ),
    (pa.table({"value": [b"a", None]}), "row 1, column 'value': it is null; every row is a message"),
    (
        pa.table({"value": pa.array([b"a", None]).dictionary_encode()}),
        "row 1, column 'value': it is null; every row is a message",
    ),
    (
        pa.table({"value": pa.DictionaryArray.from_arrays([1, 0], pa.array([None, b"a"]))}),
        "row 1, column 'value': it is null; every row is a message",
    ),
    (pa.table({"value": pa.array([], pa.binary())}), "the body has no message; send at least one"),
]


@pytest.mark.parametrize(("table", "detail"), WRONG, ids=[detail[:50] for _, detail in WRONG])
def test_what_is_wrong_is_named(table: pa.Table, detail: str) -> None:
    problem = problem_of(stream(table))
    assert problem.status == 400
    assert problem.detail.startswith(detail)


def test_rows_count_over_batches() -> None:
    schema = pa.schema({"value": pa.binary(), "ttl": pa.int64()})
    good = pa.table({"value": [b"a"] * 10, "ttl": [1] * 10}, schema=schema)
    bad = pa.table({"value": [b"a"] * 3, "ttl": [1, 1, -1]}, schema=schema)
    assert problem_of(stream(good, good, bad)).detail.startswith("row 22, column 'ttl': it is -1")


@pytest.mark.parametrize(
    ("queues", "detail"),
    [
        (["a", None], "row 1, column 'queue': it is null; name the queue in every row"),
        (["a", "b.dead"], "row 1, column 'queue': queue 'b.dead' cannot be sent to"),
        (["a", ""], "row 1, column 'queue': a queue name cannot be empty"),
        ([1, 2], "column 'queue' is of type int64; use string or large_string"),
    ],
)
def test_wrong_queues_are_named(queues: list[Any], detail: str) -> None:
    problem = problem_of(stream(pa.table({"value": [b"a", b"b"], "queue": queues})), queues=True)
    assert problem.detail.startswith(detail)


def test_a_queue_column_is_needed_where_it_is_allowed() -> None:
    assert problem_of(stream(table_with()), queues=True).detail == "the column 'queue' is missing"


@pytest.mark.parametrize("as_dictionary", [False, True])
def test_a_message_that_is_too_large_is_named(as_dictionary: bool) -> None:
    values = pa.array([b"x" * 1000, b"a", b"x" * 1001])
    table = pa.table({"value": values.dictionary_encode() if as_dictionary else values})
    problem = problem_of(stream(table))
    assert (problem.status, problem.name) == (413, "body-too-large")
    assert problem.detail.startswith(
        "row 2: the message has 1001 bytes, and the limit of [limits] payload-byt"
    )


# --- streams that are larger than they look ----------------------------------------------------------


def test_a_dictionary_is_measured_before_it_is_unfolded() -> None:
    """A million rows of one value of 1000 bytes: 1 GB out of 1 MB."""
    indices = pa.array(np.zeros(1_000_000, np.int8))
    table = pa.table({"value": pa.DictionaryArray.from_arrays(indices, pa.array([b"x" * 1000]))})
    problem = problem_of(stream(table))
    assert problem.status == 413
    assert problem.detail == (
        "the messages up to row 999999 have 1000000000 bytes, and the limit of [http] body-bytes-max is "
        "100000; send less at a time"
    )


def test_many_small_dictionaries_are_measured_together() -> None:
    column = pa.DictionaryArray.from_arrays(pa.array([0] * 60, pa.int8()), pa.array([b"x" * 1000]))
    table = pa.table({"value": column})
    assert len(read(stream(table))[0][1]) == 60
    assert problem_of(stream(table, table)).status == 413


@pytest.mark.parametrize("codec", ["lz4", "zstd"])
@pytest.mark.parametrize("as_dictionary", [False, True])
def test_compressed_buffers_are_refused_unseen(codec: str, as_dictionary: bool) -> None:
    values = pa.array([bytes(900)] * 100)
    table = pa.table({"value": values.dictionary_encode() if as_dictionary else values})
    problem = problem_of(stream(table, compression=codec))
    assert problem.detail == "the buffers of the Arrow stream are compressed; write it without compression"


# --- streams that are none ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"x",
        b'{"value":"a"}\n',
        bytes(100),
        b"\xff" * 100,
        b"\xff\xff\xff\xff\xff\xff\xff\x7f" + bytes(64),
        stream(table_with())[:-50],
        stream(table_with())[:100],
    ],
)
def test_what_is_no_stream(body: bytes) -> None:
    problem = problem_of(body)
    assert problem.status == 400
    assert problem.detail.startswith("the body is no Arrow IPC stream that can be read: ")
    assert "\n" not in problem.detail


def test_nothing_may_follow_the_stream() -> None:
    """A second stream behind the first would be lost in silence."""
    body = stream(table_with())
    assert problem_of(body + body).detail == (
        f"{len(body)} bytes follow the end of the Arrow IPC stream; send one stream at a time"
    )


def test_text_that_is_none() -> None:
    broken = pa.Array.from_buffers(
        pa.string(), 1, [None, pa.py_buffer(array("i", [0, 2])), pa.py_buffer(b"\xff\xfe")]
    )
    assert "Invalid UTF8" in problem_of(stream(pa.table({"value": broken}))).detail


@pytest.mark.parametrize("bounds", [[0, 2, 1], [0, 1, 1 << 30], [-1, 0, 1], [0, -5, 3]])
def test_bounds_that_lie(bounds: list[int]) -> None:
    buffers = [None, pa.py_buffer(array("i", [0, 1, 2])), pa.py_buffer(b"ab")]
    batch = pa.record_batch({"value": pa.Array.from_buffers(pa.binary(), 2, buffers)})
    good = stream(batch)
    place = good.index(array("i", [0, 1, 2]).tobytes())
    body = good[:place] + array("i", bounds).tobytes() + good[place + 12 :]
    assert problem_of(body).status == 400


def test_indices_that_lie() -> None:
    column = pa.DictionaryArray.from_arrays(pa.array([0, 1, 0, 1, 0, 1, 0, 1], pa.int64()), [b"a", b"b"])
    good = stream(pa.table({"value": column}))
    place = good.index(array("q", [0, 1, 0, 1]).tobytes())
    for number in (2, -1, 1 << 60):
        body = good[:place] + array("q", [number]).tobytes() + good[place + 8 :]
        assert problem_of(body).status == 400


SEEDS = [
    stream(table_with(ttl=pa.array([1, None, 3], pa.int32()), retries=pa.array([None, 2, 3], pa.uint64()))),
    stream(pa.table({"value": pa.array(["é", "b", "b"], pa.large_string()).dictionary_encode()})),
    stream(
        pa.table({"value": pa.array([b"a", b"b"]).dictionary_encode(), "queue": ["q", "r"]}),
        pa.table({"value": pa.array([b"a", b"b", b"c"]).dictionary_encode(), "queue": ["q", "r", "r"]}),
        emit_dictionary_deltas=True,
    ),
]


@pytest.mark.parametrize("number", range(len(SEEDS)))
def test_damaged_streams(number: int) -> None:
    """Whatever a few wrong bytes make of a stream: sound batches, or a problem that is the caller's."""
    chance = random.Random(number)
    seed = SEEDS[number]
    for _ in range(700):
        body = bytearray(seed)
        for _ in range(chance.choice([1, 1, 2, 4])):
            place = chance.randrange(len(body)) & ~3
            wrong = chance.choice([0, 1, -1, 8, 1 << 20, 2**31 - 1, -(2**31), chance.randrange(1 << 31)])
            body[place : place + 4] = wrong.to_bytes(4, "little", signed=True)
        try:
            parts = read(bytes(body), queues=number == 2)
        except Problem:  # of the caller's; anything else fails the test
            continue
        for _, batch in parts:
            assert batch.bounds[0] == 0
            assert batch.bounds[-1] == len(batch.payload) == sum(map(len, batch.messages()))


def test_rows_are_bounded_however_little_is_in_them() -> None:
    empty = pa.record_batch(
        {"value": pa.array([b""], pa.binary()).take(pa.array(np.zeros(600_000, np.int32)))}
    )
    ((_, batch),) = read(stream(empty))
    assert len(batch) == 600_000
    problem = problem_of(stream(empty, empty))
    assert problem.name == "body-too-large"
    assert "the body has 1200000 messages or more, and 1000000 are taken at a time" in problem.detail
