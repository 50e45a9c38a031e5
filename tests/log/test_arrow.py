"""Arrow batches of both views: equal to what the engine reads, pruned, sliced, joined, and without copies."""

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.log import arrow
from penstock.log.arrow import (
    EVENTS_SCHEMA,
    MESSAGES_SCHEMA,
    events_batches,
    messages_batches,
    schema_of,
)
from penstock.log.block import KIND_MESSAGES, Header
from penstock.log.errors import LogDamaged, LogRefused
from penstock.log.log import Log, open_log
from penstock.log.read_block import Block
from penstock.log.reader import LogReader, OffsetsMissing
from penstock.log.segment import parse_segment_name
from penstock.log.state import LogSettings
from penstock.model.batch import Batch
from penstock.model.headers import decode_headers
from penstock.model.ids import OFFSET_MAX, id_of, origin_of
from penstock.model.life import Reason
from penstock.model.words import Outcome
from tests.log.contract_rig import count_of
from tests.log.folders import NOW_US, QUEUES, SECOND_US, Worker

Row = dict[str, Any]

WHOLE = schema_of("messages", [*MESSAGES_SCHEMA.names, "headers"])
"""All that there is of messages."""


def moment(us: int) -> datetime | None:
    return datetime(1970, 1, 1, tzinfo=UTC) + timedelta(microseconds=us) if us > 0 else None


def message_rows(engine: Log, queue: str, start: int, end: int) -> list[Row]:
    """The view `messages`, built one by one from what the engine reads."""
    return [
        {
            "queue": queue,
            "offset": piece.first_offset + i,
            "id": id_of(piece.origin, piece.first_offset + i).decode(),
            "value": bytes(piece.payload[piece.bounds[i] : piece.bounds[i + 1]]),
            "timestamp": moment(piece.time_us),
            "protocol": piece.protocol,
            "expires": moment(piece.expires_us[i]) if piece.expires_us is not None else None,
            "retries": piece.retries[i] if piece.retries is not None and piece.retries[i] >= 0 else None,
            "headers": [*decode_headers(piece.headers[i]).items()] or None
            if piece.headers is not None
            else None,
        }
        for piece in engine.read(queue, start, end)
        for i in range(piece.lo, piece.hi)
    ]


def event_rows(engine: Log, reader: LogReader, queue: str, start: int, end: int) -> list[Row]:
    """The view `events`, likewise."""
    openings = {o: opening for first, stop, opening in reader.openings(queue) for o in range(first, stop)}
    return [
        {
            "queue": queue,
            "event_offset": run.event_offset + i,
            "event": run.event.name.lower(),
            "offset": run.first + i,
            "id": id_of(reader.origin(queue, openings[run.first + i]), run.first + i).decode()
            if run.first + i in openings
            else None,
            "reason": run.reason.label or None,
            "consumer": run.consumer or None,
            "attempt": run.attempt,
            "dispatched": moment(run.dispatched_us),
            "timestamp": moment(run.time_us),
        }
        for run in engine.events(queue, start, end)
        for i in range(run.end - run.first)
    ]


def rows_of(batches: list[pa.RecordBatch], schema: pa.Schema) -> list[Row]:
    for batch in batches:
        batch.validate(full=True)
        assert batch.schema == schema
        assert batch.num_rows > 0
    rows: list[Row] = pa.Table.from_batches(batches, schema).to_pylist()
    return rows


@pytest.fixture(scope="module")
def busy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Worker]:
    """A log with every kind of message and event, over several openings; still open."""
    worker = Worker(tmp_path_factory.mktemp("busy"), 11)
    for part in range(4):
        for _ in range(60):
            worker.turn()
        worker.reopen(crash=part % 2 == 0)
    worker.settle_down()
    yield worker
    worker.engine.close(worker.now_us)


# --- equal to the engine ---------------------------------------------------------------------------


@pytest.mark.parametrize("rows_max", [1, 7, 100, 65_536])
@pytest.mark.parametrize("queue", QUEUES)
def test_messages_are_what_the_engine_reads(busy: Worker, queue: str, rows_max: int) -> None:
    reader = LogReader(str(busy.folder))
    known = reader.queues()[queue]
    for start, end in [
        (known.offset_start, known.offset_end),
        (known.offset_start + 3, known.offset_end - 3),
        (known.offset_end - 1, known.offset_end),
        (known.offset_start, known.offset_start),
    ]:
        batches = list(messages_batches(reader, queue, start, end, rows_max=rows_max, columns=WHOLE.names))
        assert rows_of(batches, WHOLE) == message_rows(busy.engine, queue, start, end)
        assert all(batch.num_rows <= rows_max for batch in batches)


@pytest.mark.parametrize("rows_max", [1, 7, 100, 65_536])
@pytest.mark.parametrize("queue", QUEUES)
def test_events_are_what_the_engine_reads(busy: Worker, queue: str, rows_max: int) -> None:
    reader = LogReader(str(busy.folder))
    known = reader.queues()[queue]
    for start, end in [
        (known.event_start, known.event_end),
        (known.event_start + 5, known.event_end - 5),
        (known.event_end - 1, known.event_end),
        (known.event_end, known.event_end),
    ]:
        batches = list(events_batches(reader, queue, start, end, rows_max=rows_max))
        assert rows_of(batches, EVENTS_SCHEMA) == event_rows(busy.engine, reader, queue, start, end)
        # All but the last are full: small blocks are joined.
        assert [batch.num_rows for batch in batches[:-1]] == [rows_max] * len(batches[:-1])


def test_the_log_has_all_that_should_be_tested(busy: Worker) -> None:
    reader = LogReader(str(busy.folder))
    tables = [
        pa.Table.from_batches(messages_batches(reader, queue, facts.offset_start, columns=WHOLE.names))
        for queue, facts in reader.queues().items()
    ]
    table = pa.concat_tables(tables)
    assert set(table["protocol"].to_pylist()) >= {"", "sspq", "phpmq", "rq", "http", "spark"}
    for column in ("expires", "retries", "headers"):
        assert 0 < table[column].null_count < len(table)
    events = pa.concat_tables(
        pa.Table.from_batches(events_batches(reader, queue, facts.event_start))
        for queue, facts in reader.queues().items()
    )
    assert set(events["event"].to_pylist()) >= {
        "accepted",
        "acked",
        "dead",
        "requeued",
        "returned",
        "redriven",
        "delayed",
    }
    assert set(events["reason"].to_pylist()) >= {None, "rejected", "consumer-lost", "lease-ended"}
    assert set(events["consumer"].to_pylist()) == {None, "ann", "bob"}
    assert events["id"].null_count < len(events)
    assert len({identifier[12:18] for identifier in events["id"].to_pylist() if identifier}) >= 3


# --- columns ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "columns", [["value", "offset"], ["id"], ["retries", "expires"], ["queue", "timestamp"], ["headers"]]
)
def test_only_the_columns_that_were_asked_for(busy: Worker, columns: list[str]) -> None:
    reader = LogReader(str(busy.folder))
    known = reader.queues()["kept"]
    batches = list(messages_batches(reader, "kept", known.offset_start, columns=columns))
    rows = message_rows(busy.engine, "kept", known.offset_start, known.offset_end)
    table = pa.Table.from_batches(batches)
    assert table.schema.names == columns
    assert table.to_pylist() == [{name: row[name] for name in columns} for row in rows]


@pytest.mark.parametrize("columns", [["event", "offset"], ["id"], ["consumer", "reason", "attempt"]])
def test_only_the_event_columns_that_were_asked_for(busy: Worker, columns: list[str]) -> None:
    reader = LogReader(str(busy.folder))
    known = reader.queues()["short"]
    table = pa.Table.from_batches(events_batches(reader, "short", known.event_start, columns=columns))
    rows = event_rows(busy.engine, reader, "short", known.event_start, known.event_end)
    assert table.to_pylist() == [{name: row[name] for name in columns} for row in rows]


def test_columns_and_rows_that_make_no_sense(busy: Worker) -> None:
    reader = LogReader(str(busy.folder))
    with pytest.raises(LogRefused, match="no column 'payload': one of queue, offset, id, value"):
        messages_batches(reader, "kept", 0, columns=["payload"])
    with pytest.raises(LogRefused, match="no column 'value': one of queue, event_offset"):
        events_batches(reader, "kept", 0, columns=["value"])
    with pytest.raises(LogRefused, match="at least one row"):
        messages_batches(reader, "kept", 0, rows_max=0)
    with pytest.raises(LogRefused, match="no queue 'nix'"):
        messages_batches(reader, "nix", 0)


def write(folder: Path, batches: list[Batch], *, settings: LogSettings | None = None) -> None:
    engine = open_log(str(folder), NOW_US, settings=settings)
    for at, batch in enumerate(batches):
        engine.append("q", batch, NOW_US + at)
        engine.flush(NOW_US + at)
    engine.close(NOW_US)


def test_columns_that_need_no_body_do_not_read_it(tmp_path: Path) -> None:
    write(tmp_path, [Batch.of([b"x" * 100] * 50)])
    (path,) = (path for path in tmp_path.iterdir() if parse_segment_name(path.name))
    data = bytearray(path.read_bytes())
    data[data.index(b"x" * 100)] ^= 1
    path.write_bytes(data)
    reader = LogReader(str(tmp_path))
    columns = ["queue", "offset", "id", "timestamp", "protocol"]
    assert pa.Table.from_batches(messages_batches(reader, "q", 0, columns=columns)).num_rows == 50
    for column in ("value", "headers"):
        with pytest.raises(LogDamaged, match="offsets 0 to 49"):
            list(messages_batches(reader, "q", 0, columns=[*columns, column]))


# --- no copies, and joining ------------------------------------------------------------------------


def test_the_values_of_a_large_block_are_the_mapped_file(tmp_path: Path) -> None:
    batch = Batch.of([b"%05d" % i * 40 for i in range(1000)])
    write(tmp_path, [batch])
    reader = LogReader(str(tmp_path))
    (block,) = reader.messages("q", 0)
    (record,) = messages_batches(reader, "q", 0)
    _, bounds, payload = record["value"].buffers()
    columns = block.columns()
    assert payload.address == np.frombuffer(columns.payload, np.uint8).ctypes.data
    assert bounds.address == np.frombuffer(columns.bounds, np.uint8).ctypes.data
    # A part of it shares the same memory, and so do batches that `rows_max` has cut.
    for part in messages_batches(reader, "q", 300, 700, rows_max=150):
        assert part["value"].buffers()[2].address == payload.address
    del block, columns, reader
    for path in tmp_path.iterdir():
        path.unlink()
    assert record["value"].to_pylist() == batch.messages()


def test_small_blocks_are_joined_and_large_ones_are_not(tmp_path: Path) -> None:
    small = [Batch.of([b"s%d" % i]) for i in range(300)]
    large = [Batch.of([b"L" * 1000] * 100) for _ in range(3)]
    write(tmp_path, [*small, *large, *small])
    reader = LogReader(str(tmp_path))
    batches = list(messages_batches(reader, "q", 0))
    assert [batch.num_rows for batch in batches] == [300, 100, 100, 100, 300]
    values = pa.Table.from_batches(batches)["value"].to_pylist()
    assert values == [m for batch in [*small, *large, *small] for m in batch.messages()]
    assert pa.Table.from_batches(batches)["offset"].to_pylist() == [*range(900)]


def test_what_expires_later_than_a_date_can_be(tmp_path: Path) -> None:
    """Any TTL is taken up to 31,688 years; datetime, and so Spark's `collect`, ends with the year 9999."""
    write(tmp_path, [Batch.of([b"a", b"b", b"c"], ttl_seconds=[10**12, 60, 0])])
    (batch,) = messages_batches(LogReader(str(tmp_path)), "q", 0)
    last, soon, never = batch["expires"].to_pylist()
    assert (last, never) == (datetime.max.replace(tzinfo=UTC), None)
    assert soon == batch["timestamp"][1].as_py() + timedelta(seconds=60)


def test_a_joined_batch_of_blocks_that_differ(tmp_path: Path) -> None:
    """Some with expiry, some with retries, different doors and times: each row has its own."""
    write(
        tmp_path,
        [
            Batch.of([b"a", b"b"], ttl_seconds=[0, 5], protocol="rq"),
            Batch.of([b"c"], retries=[3]),
            Batch.of([b"", b"d"], ttl_seconds=[7, 0], retries=[-1, 255], protocol="http"),
            Batch.of([b"e"]),
        ],
    )
    (record,) = messages_batches(LogReader(str(tmp_path)), "q", 0)
    record.validate(full=True)
    assert record["value"].to_pylist() == [b"a", b"b", b"c", b"", b"d", b"e"]
    assert record["protocol"].to_pylist() == ["rq", "rq", "", "http", "http", ""]
    assert record["retries"].to_pylist() == [None, None, 3, None, 255, None]
    expected = [None, NOW_US + 5 * SECOND_US, None, NOW_US + 2 + 7 * SECOND_US, None, None]
    assert record["expires"].cast(pa.int64()).to_pylist() == expected
    times = [NOW_US, NOW_US, NOW_US + 1, NOW_US + 2, NOW_US + 2, NOW_US + 3]
    assert record["timestamp"].cast(pa.int64()).to_pylist() == times


def test_batches_survive_the_journey_as_a_stream(busy: Worker) -> None:
    """Columns that are cut from larger ones are sent as what they show."""
    reader = LogReader(str(busy.folder))
    batches = list(messages_batches(reader, "kept", 3, 200, rows_max=50))
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, MESSAGES_SCHEMA) as stream:
        for batch in batches:
            stream.write_batch(batch)
    received = pa.ipc.open_stream(sink.getvalue()).read_all()
    assert received.to_pylist() == pa.Table.from_batches(batches).to_pylist()


# --- one settlement for very many ------------------------------------------------------------------


def test_a_run_of_many_events_is_not_unrolled_at_once(tmp_path: Path) -> None:
    """A purge is one row for all messages, over two openings: batches stay small, ids stay right."""
    settings = LogSettings(block_bytes=1 << 22)
    for _ in range(2):
        engine = open_log(str(tmp_path), NOW_US, settings=settings)
        engine.append("q", Batch.of([b""] * 150_000), NOW_US)
        engine.close(NOW_US)
    engine = open_log(str(tmp_path), NOW_US, settings=settings)
    assert count_of(engine.purge("q", NOW_US)) == 300_000
    engine.close(NOW_US)
    reader = LogReader(str(tmp_path))
    sizes, total = [], 300_000
    for batch in events_batches(reader, "q", 300_000, rows_max=70_000):
        sizes.append(batch.num_rows)
        assert set(batch["event"].to_pylist()) == {"withdrawn"}
        assert set(batch["reason"].to_pylist()) == {Reason.PURGED.label}
        offsets = batch["offset"].to_numpy()
        assert (np.diff(offsets) == 1).all()
        assert (batch["event_offset"].to_numpy() == np.arange(total, total + batch.num_rows)).all()
        for row in (0, batch.num_rows // 2, batch.num_rows - 1):
            offset = int(offsets[row])
            origin = reader.origin("q", 1 if offset < 150_000 else 2)
            assert batch["id"][row].as_py() == id_of(origin, offset).decode()
        total += batch.num_rows
    assert (total, sizes) == (600_000, [70_000] * 4 + [20_000])


def test_the_id_of_a_message_that_has_left_the_log_is_null(tmp_path: Path) -> None:
    worker = Worker(tmp_path, 3, queues=("brief", "lazy"))
    engine = worker.engine
    engine.append("brief", Batch.of([b"slow", b"quick"]), worker.now_us)
    (piece,) = engine.take("brief", "ann", 2, worker.now_us)
    engine.settle("brief", "ann", Outcome.ACK, [(1, 2)], worker.now_us)
    engine.settle("brief", "ann", Outcome.REJECT, [(0, 1)], worker.now_us)
    for _ in range(150):
        worker.now_us += SECOND_US
        engine.append("lazy", Batch.of([b"." * 500]), worker.now_us)
        engine.purge("lazy", worker.now_us)
        engine.flush(worker.now_us)
        engine.wait()
    engine.purge("brief", worker.now_us, dead=True)
    worker.settle_down()
    for _ in range(3):
        engine.trim(worker.now_us)
        worker.settle_down()
    reader = LogReader(str(tmp_path))
    known = reader.queues()["brief"]
    assert known.event_start > 0
    rows = rows_of(list(events_batches(reader, "brief", known.event_start)), EVENTS_SCHEMA)
    assert [(row["event"], row["offset"], row["id"]) for row in rows] == [("withdrawn", 0, None)]
    assert piece.offset_end == 2
    engine.close(worker.now_us)


# --- loss ------------------------------------------------------------------------------------------


def test_missing_offsets_are_an_error_or_left_out(tmp_path: Path) -> None:
    write(tmp_path, [Batch.of([b"m%d" % i]) for i in range(10)])
    reader = LogReader(str(tmp_path))
    with pytest.raises(OffsetsMissing, match="offsets 10 to 19"):
        messages_batches(reader, "q", 0, 20)
    (record,) = messages_batches(reader, "q", 0, 20, fail_on_loss=False)
    assert record.num_rows == 10
    with pytest.raises(OffsetsMissing, match="events 10 to 19"):
        events_batches(reader, "q", 0, 20)


# --- ids -------------------------------------------------------------------------------------------


def made_up_block(first: int, count: int, opening: int) -> Block:
    fields = [KIND_MESSAGES, 0, 1, 7, count, opening, 0, first, 0, count, 0, NOW_US, 0, 0, 0, 0]
    return Block(Header(*fields), memoryview(b""), origin_of(0xABCDEF, 7, opening), 0, count)


@settings(max_examples=60, deadline=None)
@given(
    first=st.one_of(
        st.integers(0, OFFSET_MAX - 5000),
        st.sampled_from([0, 0xFFFF, 0x10000, 0xFFFFFFFF - 2, (1 << 48) - 3, OFFSET_MAX - 4999]),
    ),
    count=st.integers(1, 300),
    opening=st.integers(1, 0xFFFFFF),
)
def test_ids_of_runs(first: int, count: int, opening: int) -> None:
    block = made_up_block(first, count, opening)
    schema = pa.schema([MESSAGES_SCHEMA.field("id")])
    (group,) = arrow.groups_of(iter((block,)), arrow.Constants("q"), 1 << 20)
    record = arrow.batch_of(group, schema)
    expected = [id_of(block.origin, offset).decode() for offset in range(first, first + count)]
    assert record["id"].to_pylist() == expected


@settings(max_examples=40, deadline=None)
@given(
    first=st.integers(0, 1 << 55),
    steps=st.lists(
        st.tuples(st.sampled_from([0, 0, 0, 1, 1 << 17, 1 << 50]), st.integers(1, 20), st.integers(1, 2)),
        min_size=2,
        max_size=30,
    ),
)
def test_ids_and_offsets_of_joined_blocks(first: int, steps: list[tuple[int, int, int]]) -> None:
    """Some of them follow each other, others have gaps between them, as compacting leaves them."""
    runs = []
    for gap, count, opening in steps:
        runs.append((first + gap, count, opening))
        first += gap + count
    blocks = [made_up_block(first, count, opening) for first, count, opening in runs]
    schema = pa.schema([MESSAGES_SCHEMA.field("id"), MESSAGES_SCHEMA.field("offset")])
    (group,) = arrow.groups_of(iter(blocks), arrow.Constants("q"), 1 << 20)
    record = arrow.batch_of(group, schema)
    expected = [
        (b.origin, first + i) for b, (first, count, _) in zip(blocks, runs, strict=True) for i in range(count)
    ]
    assert record["offset"].to_pylist() == [offset for _, offset in expected]
    assert record["id"].to_pylist() == [id_of(origin, offset).decode() for origin, offset in expected]


class OneOpening:
    """As much of a reader as ids of events need."""

    def openings(self, _queue: str) -> list[tuple[int, int, int]]:
        return []

    def origin(self, _queue: str, opening: int) -> bytes:
        return origin_of(0xABCDEF, 7, opening)


@settings(max_examples=60, deadline=None)
@given(
    firsts=st.lists(st.integers(0, OFFSET_MAX - 100), min_size=1, max_size=20),
    length=st.integers(1, 60),
    opening=st.integers(1, 0xFFFFFF),
)
def test_ids_of_events(firsts: list[int], length: int, opening: int) -> None:
    rows = np.zeros(len(firsts), arrow._ROW)
    rows["first"], rows["length"], rows["opening"] = firsts, length, opening
    window = arrow._Window(rows, OneOpening(), arrow.Constants("q"), {"": 0})  # type: ignore[arg-type]
    origin = origin_of(0xABCDEF, 7, opening)
    expected = [id_of(origin, first + i).decode() for first in firsts for i in range(length)]
    assert window.id().to_pylist() == expected
