"""Table and log as one DataFrame; and docs/lake.md, whose commands and examples run."""

import argparse
import os
import re
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.datasource import ReadAllAvailable

from penstock.common.given import SettingsError
from penstock.lake import archiver
from penstock.lake.table import Table
from penstock.log.log import open_log
from penstock.server.settings_read import load
from penstock.spark import archived, archived_end, history
from penstock.spark.archive import Archive, batches
from penstock.spark.offsets import DataLost
from penstock.spark.options import BATCH, STREAM, WrongOption, read_options
from penstock.spark.source import schema_of
from penstock.spark.splits import Range
from penstock.spark.streaming import StreamReader
from tests.http.api import Api
from tests.http.conftest import StartBroker
from tests.lake import rig
from tests.lake.conftest import store as store
from tests.lake.rig import WAIT_SECONDS, wait_done
from tests.server.harness import ROOT, BrokerProcess, until
from tests.spark.rig import Gathering, Queues, send, url_of
from tests.spark.rig import values as numbered
from tests.spark.test_read_stream import offset_start

PAGE = (ROOT / "docs" / "lake.md").read_text()
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)


@pytest.fixture(scope="module")
def archiving(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BrokerProcess]:
    """A broker that archives what is there at once, and what comes after that in an hour."""
    folder = tmp_path_factory.mktemp("lake")
    flags = ("--http", "127.0.0.1:0", "--archive-path", str(folder / "lake"), "--archive-seconds", "3600")
    broker = BrokerProcess(folder, *flags).start()
    send(broker, "orders", [b"%d" % n for n in range(100)], headers=[{"n": str(n)} for n in range(100)])
    with Api(broker.ports["http"]) as api:
        wait_done(api, "orders")
    send(broker, "orders", [b"%d" % n for n in range(100, 120)])
    yield broker
    if broker.running:
        broker.kill()


def table_of(broker: BrokerProcess) -> str:
    return str(broker.folder / "lake")


def values(frame: DataFrame) -> list[tuple[int, bytes]]:
    return sorted((row["offset"], bytes(row["value"])) for row in frame.select("offset", "value").collect())


def test_history_is_table_and_log(spark: SparkSession, archiving: BrokerProcess) -> None:
    url = url_of(archiving)
    frame = history(spark, url=url, queue="orders")
    assert " ".join(frame.columns) == "queue offset id value timestamp protocol expires retries"
    assert values(frame) == [(n, b"%d" % n) for n in range(120)]
    live = spark.read.format("penstock").option("url", url).option("subscribe", "orders").load()
    assert frame.schema == live.schema
    assert frame.exceptAll(live).count() == live.exceptAll(frame).count() == 0
    assert archived_end(url=url, queue="orders") == 100
    assert values(archived(spark, url=url, queue="orders", end=42)) == [(n, b"%d" % n) for n in range(42)]
    headers = history(spark, url=url, queue="orders", headers=True).where("offset in (7, 110)").sort("offset")
    assert [row["headers"] for row in headers.collect()] == [{"n": "7"}, None]
    with pytest.raises(DataLost, match="has not the offsets 100 to 104"):
        archived(spark, url=url, queue="orders", end=105)
    with pytest.raises(WrongOption, match="no queue 'nothing'"):
        history(spark, url=url, queue="nothing")


def test_history_of_a_queue_that_is_not_archived_yet(spark: SparkSession, archiving: BrokerProcess) -> None:
    send(archiving, "later", [b"x"])
    assert values(history(spark, url=url_of(archiving), queue="later")) == [(0, b"x")]


def test_names_of_queues_that_are_no_names_of_files(
    spark: SparkSession, start_broker: StartBroker, tmp_path: Path
) -> None:
    broker, name = (
        start_broker("--archive-path", str(tmp_path / "{a,b}[c]*" / "lake"), "--archive-seconds", "3600"),
        "a,b/c ä%=*",
    )
    send(broker, name, [b"x"])
    with Api(broker.ports["http"]) as api:
        wait_done(api, name)
    send(broker, name, [b"y"])
    frame = history(spark, url=url_of(broker), queue=name)
    assert [tuple(row) for row in frame.select("queue", "value").sort("offset").collect()] == [
        (name, b"x"),
        (name, b"y"),
    ]


def test_history_where_nothing_is_archived(spark: SparkSession, broker: BrokerProcess) -> None:
    with pytest.raises(WrongOption, match="archives nothing"):
        history(spark, url=url_of(broker), queue="orders")


@pytest.mark.long
def test_history_tells_of_a_gap_and_of_another_life(
    spark: SparkSession, start_broker: StartBroker, tmp_path: Path
) -> None:
    path = str(tmp_path / "lake")
    broker = start_broker("--archive-path", path, "--archive-seconds", "1")
    url = url_of(broker)
    send(broker, "orders", [b"old"] * 5)
    with Api(broker.ports["http"]) as api:
        wait_done(api, "orders")
        assert api.ask("DELETE", "/v1/queues/orders?force=true").status in (200, 204)
        for values_ in ([b"0", b"1"], [b"2", b"3"], [b"4"]):
            send(broker, "orders", values_)
            wait_done(api, "orders")
    assert values(history(spark, url=url, queue="orders")) == [(n, b"%d" % n) for n in range(5)]
    table = Table(path, "messages").open()
    files = [it for it in table.spans("orders") if it.rows != 5]
    table.delta.delete("offset in (2, 3) and identity = '" + files[0].identity + "'")
    with pytest.raises(DataLost, match="has not the offsets 2 to 3"):
        history(spark, url=url, queue="orders")
    table.delta.delete("offset = 0 and identity = '" + files[0].identity + "'")
    with pytest.raises(DataLost, match="has not the offsets 0 to 0"):  # As they are in the log, still.
        history(spark, url=url, queue="orders")
    assert len(values(history(spark, url=url, queue="orders", fail_on_data_loss=False))) == 2


KEEP_NOTHING = """
[log]
snapshot-blocks = 1
[queue."*"]
retention-seconds = 0
"""


def test_a_stream_begins_in_the_table_and_goes_on_in_the_log(
    spark: SparkSession, start_broker: StartBroker, tmp_path: Path
) -> None:
    """Through retention, a restart in the middle of the table, and what comes meanwhile: each row once."""
    lake = ("--archive-path", str(tmp_path / "lake"), "--archive-seconds", "1")
    broker = start_broker("--log-segment-bytes", "65536", *lake, config=KEEP_NOTHING)
    queues = Queues(spark, broker)
    for at in range(0, 1000, 100):
        queues.send("orders", [value + b"x" * 1000 for value in numbered(100, at)])
    with Api(broker.ports["http"]) as api:
        wait_done(api, "orders")
        api.post("/v1/queues/orders/purge")
        # The log moves on when something comes.
        until(lambda: _moved(broker, api) > 300, "retention takes something", WAIT_SECONDS)
        end = api.get("/v1/queues/orders")["offset_end"]
    said = {"startingOffsets": "earliest", "history": "true", "maxOffsetsPerTrigger": "250", "reader": "late"}
    with Gathering(queues.stream("orders", **said), "first", tmp_path / "point") as first:
        first.wait(250)
    queues.send("orders", numbered(10, 5000))
    with Gathering(queues.stream("orders", **said), "first", tmp_path / "point") as again:
        runs = first.of("orders"), again.all().of("orders")
    # A batch that was stopped before Spark wrote it down is done again, and is the same then.
    assert all(set(seen.values()) == {1} for seen in runs)
    seen = {*runs[0], *runs[1]}
    assert len(seen) == end + 10
    numbers = {int(value[:8]) for value in seen if not value.startswith(b"more")}
    assert numbers == {*range(1000), *range(5000, 5010)}
    assert len(runs[0].keys() & runs[1].keys()) <= 250
    with pytest.raises(PySparkException, match=r"offsets 0 to \d+ were removed by retention"):
        queues.batch("orders", startingOffsets='{"orders": 0}').count()


def _moved(broker: BrokerProcess, api: Api) -> int:
    send(broker, "orders", [b"more %s" % uuid.uuid4().hex.encode()])
    return offset_start(api, "orders")


def _retain(broker: BrokerProcess, api: Api, first: int) -> None:
    """Have retention take all before an offset."""
    api.post("/v1/queues/orders/purge")
    until(lambda: _moved(broker, api) >= first, "retention takes something", WAIT_SECONDS)


def _fill(broker: BrokerProcess) -> None:
    for at in range(0, 500, 100):
        send(broker, "orders", [value + b"x" * 1000 for value in numbered(100, at)])


@pytest.mark.long
def test_a_stream_finds_in_the_table_what_came_there_after_it_began(
    start_broker: StartBroker, tmp_path: Path
) -> None:
    """Whoever begins to archive has queues that begin later than at 0, and a table without them."""
    path = str(tmp_path / "lake")
    lake = ("--archive-path", path, "--archive-queues", "other")
    broker = start_broker("--log-segment-bytes", "65536", *lake, config=KEEP_NOTHING)
    said = {"url": url_of(broker), "subscribe": "orders", "startingOffsets": "earliest"}
    said |= {"history": "true", "maxOffsetsPerTrigger": "100"}
    reader = StreamReader(read_options(said, STREAM), schema_of("messages"))
    with Api(broker.ports["http"]) as api:
        _fill(broker)
        _retain(broker, api, 500)
        _fill(broker)
        start = reader.initialOffset()
        begins = start["orders"]
        assert begins >= 500
        rig.archived(str(broker.folder / "data"), path)
        _retain(broker, api, begins + 200)
    end = reader.latestOffset(start, reader.getDefaultReadLimit())
    rows = [batch for piece in reader.partitions(start, end) for batch in reader.read(piece)]
    offsets = [offset for batch in rows for offset in batch.column("offset").to_pylist()]
    assert offsets == [*range(begins, begins + 100)]
    reader.stop()


@pytest.mark.long
def test_what_is_archived_and_removed_after_it_was_planned_is_read_from_the_table(
    spark: SparkSession, start_broker: StartBroker, tmp_path: Path
) -> None:
    """Before a DataFrame is used at all, and between the plan of a batch and its reading."""
    path = str(tmp_path / "lake")
    lake = ("--archive-path", path, "--archive-queues", "other")
    broker = start_broker("--log-segment-bytes", "65536", *lake, config=KEEP_NOTHING)
    said = {"url": url_of(broker), "subscribe": "orders", "startingOffsets": "earliest", "history": "true"}
    stream = StreamReader(read_options(said, STREAM), schema_of("messages"))
    with Api(broker.ports["http"]) as api:
        _fill(broker)
        rig.archived(str(broker.folder / "data"), path)
        _fill(broker)
        frame = history(spark, url=url_of(broker), queue="orders")
        start = stream.initialOffset()
        end = stream.latestOffset(start, ReadAllAvailable())
        pieces = [*stream.partitions(start, end)]
        rig.archived(str(broker.folder / "data"), path)
        _retain(broker, api, 900)
    assert [offset for offset, _ in values(frame)] == [*range(1000)]
    rows = [batch for piece in pieces for batch in stream.read(piece)]
    assert [it for batch in rows for it in batch.column("offset").to_pylist()] == [*range(1000)]
    stream.stop()


def test_rows_come_in_order_whatever_is_compacted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files of different sizes, and days that took turns when a clock was set back."""
    data, path = str(tmp_path / "data"), str(tmp_path / "lake")
    monkeypatch.setattr(archiver, "COMPACT_TURNS", 0)
    midnight = rig.now_us() // rig.DAY_US * rig.DAY_US - rig.DAY_US
    log = open_log(data, midnight - 10)
    lake = rig.archived(data, path, turns=0)
    for turn, count in enumerate((1, 50, 5, 200, 3), 1):
        rig.put(log, "orders", [b"%d" % n for n in range(count)], midnight + (-1) ** turn * 1000)
        lake.turn(1000.0 * turn)
    log.close(midnight + 2000)
    lake.close()
    table = Table(path, "messages").open()
    identity = table.spans()[0].identity
    for day in {span.day for span in table.spans()}:
        table.compact("orders", day, identity)
    assert [(it.first, it.end, it.rows) for it in table.spans()] == [(0, 259, 9), (1, 256, 250)]

    class Said:
        def get(self, _: str) -> dict[str, str]:
            return {"path": path}

    whole = [Range("orders", 2, 258, identity)]
    archive = Archive("http://broker")
    parts, rest = archive.cut(cast(Any, Said()), whole, {"orders": 259}, 2)
    columns = ["queue", "value", "offset"]
    rows = [row for part in parts for it in batches(table, part, columns) for row in it.to_pylist()]
    assert (len(parts), rest) == (2, [])
    assert [row["offset"] for row in rows] == [*range(2, 258)]
    assert rows[0] == {"queue": "orders", "value": b"1", "offset": 2}


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({}, "say where: startingOffsets earliest"),
        ({"startingOffsets": "earliest", "view": "events"}, "is for view 'messages'"),
        ({"startingOffsets": "earliest", "maxBytesPerTrigger": "1m"}, "use maxOffsetsPerTrigger"),
        ({"startingOffsets": "earliest", "engine": "nats://127.0.0.1:4222"}, "goes through the broker"),
    ],
)
def test_history_that_cannot_be_meant(options: dict[str, str], why: str) -> None:
    with pytest.raises(WrongOption, match=re.escape(why)):
        read_options({"subscribe": "q", "history": "true", **options}, STREAM)
    said = {"subscribe": "q", "history": "true", "startingOffsets": "earliest"}
    assert read_options(said, BATCH).history
    with pytest.raises(WrongOption, match="use endingOffsets, or where timestamp"):
        read_options({**said, "endingTimestamp": "1700000000000"}, BATCH)


@pytest.mark.long
def test_a_stream_with_history_where_nothing_is_archived(
    spark: SparkSession, start_broker: StartBroker, tmp_path: Path
) -> None:
    broker = start_broker("--log-segment-bytes", "65536", config=KEEP_NOTHING)
    queues = Queues(spark, broker)
    queues.send("orders", [b"x" * 1000] * 200)
    with Api(broker.ports["http"]) as api:
        api.post("/v1/queues/orders/purge")
        until(lambda: _moved(broker, api) > 0, "retention takes something", WAIT_SECONDS)
    frame = queues.stream("orders", startingOffsets="earliest", history="true")
    with Gathering(frame, "none", tmp_path / "point") as none:
        assert "archives nothing; set path under [archive]" in none.failure()


@pytest.mark.long
def test_history_from_an_object_store(
    spark: SparkSession, start_broker: StartBroker, store: dict[str, str]
) -> None:
    broker = start_broker("--archive-path", "s3://bucket/spark", "--archive-seconds", "3600", env=store)
    send(broker, "orders", [b"%d" % n for n in range(50)])
    with Api(broker.ports["http"]) as api:
        wait_done(api, "orders")
    send(broker, "orders", [b"50"])
    frame = history(spark, url=url_of(broker), queue="orders", storage_options=store)
    assert values(frame) == [(n, b"%d" % n) for n in range(51)]


@pytest.mark.parametrize("block", [it for it in BLOCKS if it[0] == "python"], ids=lambda it: it[1].split()[1])
def test_examples_run(
    block: tuple[str, str],
    spark: SparkSession,
    archiving: BrokerProcess,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    text = (
        block[1]
        .replace("http://127.0.0.1:9180", url_of(archiving))
        .replace('"lake/', f'"{table_of(archiving)}/')
    )
    text = text.replace('"out/', f'"{tmp_path}/out/')
    monkeypatch.chdir(tmp_path)
    exec(compile(text, "docs/lake.md", "exec"), {"spark": spark})
    shown = capfd.readouterr().out
    if "duckdb" in text:
        assert re.search(r"orders\W+\d{4}-\d\d-\d\d\W+100\b", shown)
    elif "polars" in text:
        assert str(sum(len(str(n)) for n in range(100))) in shown
    elif "to_pandas" in text:
        assert "b'99'" in shown
    elif "import history" in text:
        assert re.search(r"120\|\s+0\|\s+119", shown)
    else:
        assert values(spark.read.parquet(f"{tmp_path}/out/orders")) == [(n, b"%d" % n) for n in range(120)]


def test_commands_run(archiving: BrokerProcess, tmp_path: Path) -> None:
    """But for `serve`, whose flags the broker of these tests has, with its own path and time."""
    blocks = [text for kind, text in BLOCKS if kind == "sh"]
    assert blocks[0].split()[:3] == ["penstock", "serve", "--archive-path"]
    port = str(archiving.ports["http"])
    environment = {**os.environ, "PENSTOCK_URL": f"http://127.0.0.1:{port}"}
    said = ""
    for text in (it for it in blocks[1:] if "penstock" in it):
        text = text.replace("penstock ", f"{sys.executable} -m penstock ").replace("orders", "documented")
        done = subprocess.run(
            ["bash", "-ec", text], cwd=ROOT, env=environment, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
        said += done.stdout
    assert re.search(r"^path +\S+/lake$", said, re.MULTILINE)
    assert "ARCHIVED UP TO" in said
    assert re.search(r"^orders +messages +[0-9a-f]{12} +0 +100 +100 +1 +20", said, re.MULTILINE)


def test_settings_of_the_page_are_right(tmp_path: Path) -> None:
    (text,) = (text for kind, text in BLOCKS if kind == "toml")
    (tmp_path / "penstock.toml").write_text(text)
    archive = load(argparse.Namespace(config=str(tmp_path / "penstock.toml")), {}).archive
    assert (archive.path, archive.queues) == ("s3://bucket/penstock", ("orders.*", "billing"))
    assert (archive.seconds, archive.rows) == (60, 1_000_000)
    assert load(argparse.Namespace(), {"PENSTOCK_ARCHIVE_QUEUES": "a*, b"}).archive.queues == ("a*", "b")
    with pytest.raises(SettingsError, match=r"PENSTOCK_ARCHIVE_PATH.*http is off"):
        load(argparse.Namespace(), {"PENSTOCK_ARCHIVE_PATH": "lake", "PENSTOCK_HTTP": "off"})
    for path in ("s3://key:s3cret@bucket/lake", "az://lake/a?sig=s3cret"):  # It is no secret where it is.
        with pytest.raises(SettingsError, match="leave them to the environment") as told:
            load(argparse.Namespace(), {"PENSTOCK_ARCHIVE_PATH": path})
        assert "s3cret" not in str(told.value)
    for path in ("abfss://lake@account.dfs.core.windows.net/a", "a:b@c?", "file:///x/y"):
        assert load(argparse.Namespace(), {"PENSTOCK_ARCHIVE_PATH": path}).archive.path == path


def test_without_the_extra_it_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    import penstock.spark

    for name in ("penstock.lake.table", "penstock.spark.lake"):
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.delattr(penstock.spark, "lake")
    monkeypatch.setitem(sys.modules, "deltalake", None)
    for name in ("history", "archived", "archived_end"):
        with pytest.raises(ImportError, match=re.escape("pip install 'penstock[lake]'")):
            getattr(penstock.spark, name)
    with pytest.raises(WrongOption, match=re.escape("pip install 'penstock[lake]'")):
        Archive("http://broker").firsts(cast(Any, None))
