"""What the tables are made of: many queues, small files, odd names, damage; and what a check finds."""

import json
from array import array
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from penstock.lake import archiver as archiver_module
from penstock.lake.archiver import QUEUES_MAX
from penstock.lake.check import Extent, check
from penstock.lake.table import LakeError, Table, gaps_of, told
from penstock.log.log import open_log
from penstock.log.reader import LogReader, ReaderQueue
from penstock.model.batch import Batch
from penstock.model.headers import encode_headers
from tests.lake.rig import DAY_US, archived, assert_complete, filled, now_us, put, rows_of

ODD = "a/b '\"%~=*[1]{}#?:;+& ²"
"""All that means something in a path or a URL."""


def extents(data: str, view: str = "messages") -> dict[str, Extent]:
    with LogReader(data) as reader:
        return {
            name: Extent(reader.identity(name), it.offset_start, it.offset_end)
            if view == "messages"
            else Extent(reader.identity(name), it.event_start, it.event_end)
            for name, it in reader.queues().items()
        }


def test_many_queues_make_few_files(tmp_path: Path) -> None:
    data, path = str(tmp_path / "data"), str(tmp_path / "lake")
    filled(data, {f"q{n}": 1 for n in range(QUEUES_MAX + 20)})
    archiver = archived(data, path, seconds=60)
    table = Table(path, "messages").open()
    assert len(table.spans()) == QUEUES_MAX
    archiver.turn(1059.0)  # It is not time yet.
    table.refresh()
    assert len(table.spans()) == QUEUES_MAX
    archiver.turn(1060.0)
    archiver.close()
    assert_complete(data, path)


def test_busy_queue_does_not_wait(tmp_path: Path) -> None:
    data, path = str(tmp_path / "data"), str(tmp_path / "lake")
    log = open_log(data, now_us())
    put(log, "busy", [b"0"])
    put(log, "calm", [b"0"])
    archiver = archived(data, path, seconds=3600, rows=50)
    put(log, "busy", [b"%d" % n for n in range(60)])
    put(log, "calm", [b"1"])
    archiver.turn(1001.0)
    archiver.close()
    assert len([row for row in rows_of(path) if row["queue"] == "busy"]) == 51
    assert len([row for row in rows_of(path) if row["queue"] == "calm"]) == 1
    log.close(now_us())


def test_small_files_become_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data, path, long = str(tmp_path / "data"), str(tmp_path / "lake"), "ä" * 100
    yesterday = now_us() - DAY_US
    log = open_log(data, yesterday)
    monkeypatch.setattr(archiver_module, "COMPACT_TURNS", 0)
    archiver = archived(data, path, turns=0)
    for turn in range(1, 5):
        for queue in (ODD, long):
            put(log, queue, [b"x"], yesterday + turn)
        archiver.turn(1000.0 * turn)
    table = Table(path, "messages").open()
    assert len(table.spans()) == 8
    monkeypatch.setattr(archiver_module, "COMPACT_TURNS", 4)
    put(log, "other", [b"y"])
    put(log, "n" * 255, [b"y"])
    archiver.turn(9000.0)
    table.refresh()
    assert [(it.queue, it.rows) for it in table.spans()] == [
        (ODD, 4),
        ("other", 1),
        *[(long, 1)] * 4,  # Its name is too long for the name of a folder, by percents.
    ]
    told: list[Any] = []
    archiver.close()
    # What was compacted is not taken for what is missing.
    archived(data, path, tell=lambda it: told.append(it.state["refused"])).close()
    assert set(told[-1]) == {"n" * 255}
    log.delete(["n" * 255], now_us())
    log.flush(now_us())
    log.wait()
    assert_complete(data, path)
    frame = pl.read_delta(f"{path}/messages")
    assert dict(frame.group_by("queue").len().rows()) == {ODD: 4, "other": 1, long: 4}
    log.close(now_us())


def test_headers_and_large_payloads(tmp_path: Path) -> None:
    data, path = str(tmp_path / "data"), str(tmp_path / "lake")
    log = open_log(data, now_us())
    large = b"x" * (40 << 20)
    bounds = array("i", [0, len(large), len(large)])
    log.append(
        "orders", Batch(large, bounds, protocol="http", headers=[b"", encode_headers({"a": "1"})]), now_us()
    )
    log.flush(now_us())
    log.wait()
    log.close(now_us())
    archived(data, path).close()
    first, second = sorted(rows_of(path), key=lambda it: it["offset"])
    assert first["value"] == large
    assert (first["headers"], second["value"], second["headers"]) == (None, b"", [("a", "1")])


def test_damage_is_a_gap_that_is_told(tmp_path: Path) -> None:
    data, path = tmp_path / "data", str(tmp_path / "lake")
    filled(str(data), {"orders": 30})
    segment = next(it for it in data.iterdir() if b"orders 12" in it.read_bytes())
    damaged = segment.read_bytes().replace(b"orders 12", b"orders X2")
    segment.write_bytes(damaged)
    told: list[Any] = []
    archived(str(data), path, tell=lambda it: told.append(it.state["gaps"])).close()
    assert [row["offset"] for row in sorted(rows_of(path), key=lambda it: it["offset"])] == [
        *range(10),
        *range(20, 30),
    ]
    assert any("offsets 10 to 19 are not in the log" in text for text in told[-1])
    table = Table(path, "messages").open()
    assert gaps_of(table.spans())
    (found,) = check(table, extents(str(data)))
    assert found.wrong == ("a gap: offsets 0 to 29 are not all there",)


def test_what_retention_took_of_a_queue_before_it_was_held_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It came, was done with and went while the archiver was busy: nothing of it is in any table."""
    data, path, told = str(tmp_path / "data"), str(tmp_path / "lake"), list[Any]()
    filled(data, {"orders": 10, "quick": 10})
    queues, old = LogReader.queues, ["orders"]

    def without_what_went(reader: LogReader) -> dict[str, ReaderQueue]:
        return {it: queue._replace(offset_start=7) for it, queue in queues(reader).items() if it in old}

    monkeypatch.setattr(LogReader, "queues", without_what_went)
    archiver = archived(data, path, turns=0, tell=lambda it: told.append(it.state["gaps"]))
    archiver.turn(1000.0)
    assert told[-1] == []  # It began to archive later than the log did.
    old.append("quick")
    archiver.turn(2000.0)
    gap = "queue 'quick': offsets 0 to 6 are not in the log, nor in the table"
    assert told[-1] == [gap]
    archiver.begin_again()  # As when its store does not answer.
    archiver.turn(3000.0)
    assert archiver._lanes["messages"].gaps == [gap]
    archiver.close()


def test_check_names_what_is_wrong(tmp_path: Path) -> None:
    data, path = str(tmp_path / "data"), str(tmp_path / "lake")
    filled(data, {"orders": 20})
    archived(data, path).close()
    table = Table(path, "messages").open()
    (good,) = check(table, extents(data))
    assert (good.rows, good.missing, good.wrong) == (20, 0, ())
    identity = good.identity
    (late,) = check(table, {"orders": Extent(identity, -5, 20)})
    assert late.wrong == ("a gap: offsets -5 to -1 are not there, and the log begins there",)
    (behind,) = check(table, {"orders": Extent(identity, 25, 30)})
    assert (behind.missing, behind.wrong) == (5, ("behind: offsets 20 to 24 are not in the log any more",))
    (ahead,) = check(table, {"orders": Extent(identity, 0, 10)})
    assert ahead.wrong == ("ahead: the log ends before 10; was it put back from a copy?",)
    other, new = check(table, {"orders": Extent("f" * 12, 0, 3)})
    assert "in another log" in other.note
    assert (new.rows, new.missing) == (0, 3)
    # The same rows once more, as somebody else could write them.
    row = table.spans()[0]
    again = pq.read_table(table.place(row)).to_batches()
    table.commit([table.write("orders", identity, row.day, again)], "0", 1)
    (doubled,) = check(table, extents(data))
    assert doubled.wrong == ("doubled: offsets 0 to 19",)


def test_file_without_statistics_is_refused(tmp_path: Path) -> None:
    data, path = str(tmp_path / "data"), str(tmp_path / "lake")
    filled(data, {"orders": 3})
    archived(data, path).close()
    log = tmp_path / "lake" / "messages" / "_delta_log" / f"{1:020d}.json"
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    for line in lines:
        if "add" in line:
            line["add"]["stats"] = None
    log.write_text("\n".join(map(json.dumps, lines)))
    with pytest.raises(LakeError, match="has no statistics"):
        archived(data, path)


def test_statistics_are_of_all_rows_where_a_clock_was_set_back(tmp_path: Path) -> None:
    """Whoever asks for a time leaves out the files that say they have none of it."""
    data, path = str(tmp_path / "data"), str(tmp_path / "lake")
    day = now_us() // DAY_US * DAY_US - DAY_US
    log = open_log(data, day)
    for at_us in (day + 20_000_000, day + 30_000_000, day + 10_000_000, day + 20_000_000):
        put(log, "orders", [b"x"], at_us)
    log.close(day + 30_000_001)
    archived(data, path).close()
    table = Table(path, "messages").open()
    late, early = (datetime.fromtimestamp(day // 1_000_000 + it, UTC) for it in (25, 15))
    rows = table.delta.to_pyarrow_table(filters=[("timestamp", ">", late)])
    assert rows["offset"].to_pylist() == [1]
    rows = table.delta.to_pyarrow_table(filters=[("timestamp", "<", early)])
    assert rows["offset"].to_pylist() == [2]
    (span,) = table.spans()
    assert span.last_us == day + 30_000_000


def test_types_are_those_of_the_view(tmp_path: Path) -> None:
    data, path = str(tmp_path / "data"), str(tmp_path / "lake")
    filled(data, {"orders": 1})
    archived(data, path).close()
    schema = Table(path, "messages").open().delta.to_pyarrow_table().schema
    assert schema.field("timestamp").type == pa.timestamp("us", "UTC")
    columns = "queue offset id value timestamp protocol expires retries headers day identity"
    assert schema.names == columns.split()
    assert Table(path, "messages").open().delta.metadata().partition_columns == ["queue", "day", "identity"]


def test_what_is_beneath_is_told_in_one_line() -> None:
    tree = "Generic S3 error\n  \x1b[31m↳\x1b[0m Error performing GET\n    \x1b[31m↳\x1b[0m HTTP error"
    with pytest.raises(LakeError) as error, told("s3://bucket/messages"):
        raise OSError(tree)
    assert str(error.value) == "s3://bucket/messages: Generic S3 error Error performing GET HTTP error"
