"""The option `engine` without NATS: tasks read the broker's files where they have them, and ask it otherwise.

What Spark does is shown with Spark; what happens between a plan and reading it is shown with the source
alone, which Spark asks the same way. A broker that was killed after the plan, and a range that is read all
the same, show that it came from the files.
"""

import logging
import re
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest
from pyspark.sql import DataFrame, Row

from penstock import connect
from penstock.common.tokens import hash_token, new_token
from penstock.log.disk import mark_of
from penstock.log.reader import LogReader
from penstock.spark import files, reading
from penstock.spark.api import Refused, Unreachable
from penstock.spark.offsets import DataLost
from penstock.spark.options import BATCH, read_options
from penstock.spark.reading import BatchReader, Piece
from penstock.spark.source import schema_of
from tests.http.api import Api
from tests.http.morgue import path_of
from tests.http.test_repairs import repair
from tests.http.zoo import STATES, zoo
from tests.server.harness import BrokerProcess, until
from tests.spark.conftest import StartBroker
from tests.spark.gate import Gate
from tests.spark.rig import PATIENCE_SECONDS, Gathering, Queues, restart, send, url_of, values
from tests.spark.test_read_stream import KEEP_NOTHING, offset_start

SMALL = ("--log-segment-bytes", "65536")


@pytest.fixture(autouse=True)
def forgetful() -> Iterator[None]:
    """No test begins with what another one knows of a log."""
    yield
    for reader in files._kept.values():
        reader.close()
    files._kept.clear()


class Query:
    """A batch as Spark runs it: first the plan, then the tasks."""

    def __init__(self, url: str, queue: str, **options: str) -> None:
        said = {"url": url, "subscribe": queue, "retrySeconds": "0", **options}
        self.options = read_options(said, BATCH)
        self._reader = BatchReader(self.options, schema_of(self.options.view))
        pieces = self._reader.partitions()
        assert all(isinstance(piece, Piece) for piece in pieces)
        self.pieces = list(pieces)

    def batches(self) -> Generator[list[bytes]]:
        """The payloads, as they come."""
        for piece in self.pieces:
            for batch in self._reader.read(piece):
                yield batch.column("value").to_pylist()

    def values(self) -> list[bytes]:
        return [one for batch in self.batches() for one in batch]


def folder_of(broker: BrokerProcess) -> Path:
    return broker.folder / "data"


def mapped(folder: Path) -> list[str]:
    """The files of a log that this process keeps from going."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    return [line for line in lines if str(folder) in line and ".seg" in line]


# --- the same rows, by Spark -----------------------------------------------------------------------


def in_order(frame: DataFrame) -> list[Row]:
    return frame.orderBy([name for name in frame.columns if name != "headers"]).collect()


def test_every_engine_has_the_same_rows(queues: Queues, broker: BrokerProcess, api: Api) -> None:
    sent = {"files.a": values(6000), "files.b": values(2000, 50), "files.c": values(1)}
    for first in range(0, 6000, 1000):
        queues.send("files.a", sent["files.a"][first : first + 1000])
        some = sent["files.b"][first // 3 : (first + 1000) // 3]
        retries = [number % 3 or None for number in range(len(some))]
        headers = [{"number": str(number), "é": "ü"} if number % 3 else None for number in range(len(some))]
        queues.send("files.b", some, ttl=[600] * len(some), retries=retries, headers=headers)
    queues.send("files.c", sent["files.c"])
    with zoo(broker, api, "files.zoo"):
        repair(api, "files.zoo", "files/1", o1="another payload")
        for view, options in (
            ("messages", {}),
            ("messages", {"minPartitions": 7, "includeHeaders": True}),
            (
                "messages",
                {"startingOffsets": '{"files.a": 999, "files.b": 7, "files.c": -2, "files.zoo": -2}'},
            ),
            ("events", {}),
            ("state", {}),
        ):
            over_http, *others = (
                in_order(
                    queues.batch("files.a,files.b,files.c,files.zoo", view=view, engine=engine, **options)
                )
                for engine in ("http", "auto", f"file:{folder_of(broker)}", "file:/nowhere")
            )
            assert all(rows == over_http for rows in others)
            assert len(over_http) >= 7000
    rows = in_order(queues.batch("files.a,files.b,files.c", engine="auto", includeHeaders=True))
    assert [row.headers for row in rows if row.queue == "files.b"][:2] == [None, {"number": "1", "é": "ü"}]
    for queue, payloads in sent.items():
        assert [bytes(row.value) for row in rows if row.queue == queue] == payloads
    assert len(in_order(queues.batch("files.zoo", "offset bigint", view="messages"))) == len(STATES)


def test_a_stream_reads_files_through_a_restart(
    queues: Queues, start_broker: StartBroker, tmp_path: Path
) -> None:
    broker = start_broker(*SMALL)
    own = Queues(queues.spark, broker)
    own.send("q", values(1000))
    with Gate(broker) as gate:
        own.url = gate.url
        frame = own.stream("q", startingOffsets="earliest", maxOffsetsPerTrigger=300)
        with Gathering(frame, "files", tmp_path) as gathering:
            gathering.wait(1000)
            broker.kill()
            restart(broker)
            own.send("q", values(500, 1000))
            gathering.wait(1500)
            assert gathering.of("q") == Counter(values(1500))
    assert "GET /v1/queues/q/log" not in gate.seen


def test_a_task_says_which_it_did(queues: Queues, broker: BrokerProcess) -> None:
    """Where Spark is asked to keep what its Python workers log, anybody can ask for it."""
    queues.send("files.told", values(10))
    spark, setting = queues.spark, "spark.sql.pyspark.worker.logging.enabled"
    spark.conf.set(setting, "true")
    try:
        for engine in ("auto", "file:/nowhere", "http"):
            assert queues.batch("files.told", engine=engine).count() == 10

        def told() -> list[tuple[str, str]]:
            rows = spark.sql("select level, msg from python_worker_logs() where logger = 'penstock.spark'")
            return sorted((row.level, row.msg) for row in rows.collect() if "files.told" in row.msg)

        until(lambda: len(told()) == 2, "what the workers have said", PATIENCE_SECONDS)
        what = "queue 'files.told', offsets 0 to 9"
        assert told() == [
            ("INFO", f"{what}: 10 from the files in {str(folder_of(broker))!r}"),
            ("WARNING", f"{what}: 0 from the files in '/nowhere'; 0 to 9 over HTTP: there is no log"),
        ]
    finally:
        spark.conf.unset(setting)


# --- which folder ----------------------------------------------------------------------------------


@pytest.mark.parametrize(("main", "is_worker"), [("pyspark.daemon", True), ("pytest", False)])
def test_a_worker_sets_its_modules_aside(main: str, is_worker: bool) -> None:
    """Spark has it look for garbage after every task, in all that it has ever imported. Nobody else does."""
    script = (
        "import gc, sys, types; from penstock.spark.workers import settle_in; "
        f"sys.modules['__main__'].__spec__ = types.SimpleNamespace(name={main!r}); settle_in(); "
        "first = gc.get_freeze_count(); kept = [[] for _ in range(100)]; settle_in(); "
        "print(first > 1000, gc.get_freeze_count() == first)"
    )
    said = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert said.stdout.split() == [str(is_worker), "True"], said


def test_a_task_settles_in_when_it_ends(
    queues: Queues, broker: BrokerProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    queues.send("settled", values(10))
    ends: list[int] = []
    monkeypatch.setattr(reading, "settle_in", lambda: ends.append(len(seen)))
    seen: list[bytes] = []
    for batch in Query(url_of(broker), "settled").batches():
        seen += batch
    assert ends == [10]


def test_no_broker_is_needed_to_read(start_broker: StartBroker) -> None:
    broker = start_broker(*SMALL)
    sent = values(20_000)
    for first in range(0, 20_000, 1000):
        send(broker, "q", sent[first : first + 1000])
    queries = [
        Query(url_of(broker), "q", minPartitions="3", engine=it)
        for it in ("auto", f"file:{folder_of(broker)}")
    ]
    events = Query(url_of(broker), "q", view="events")
    over_http = Query(url_of(broker), "q", engine="http")
    broker.kill()
    for query in queries:
        assert query.values() == sent
    assert sum(batch.num_rows for piece in events.pieces for batch in events._reader.read(piece)) == 20_000
    with pytest.raises(Unreachable):
        over_http.values()


def test_who_may_not_read_every_queue_does_not_get_the_files(start_broker: StartBroker) -> None:
    token = new_token("team")
    rights = '[{queues = "mine.*", may = ["send", "read"]}]'
    broker = start_broker(
        config=f'[[user]]\nname = "team"\ntoken-hash = "{hash_token(token)}"\nrights = {rights}\n'
    )
    with Api(broker.ports["http"], token) as api:
        api.send("mine.a", b"x")
    with connect(f"phpmq://127.0.0.1:{broker.ports['phpmq']}") as other:
        other.send("theirs", b"y")
        other.flush()
    query = Query(url_of(broker), "mine.a", token=token)
    assert [piece.folder for piece in query.pieces] == [None]
    assert query.values() == [b"x"]
    with pytest.raises(Refused, match="needs the right read with every queue"):
        Query(url_of(broker), "mine.a", token=token, engine=f"file:{folder_of(broker)}")
    pattern = read_options({"subscribePattern": ".*", "token": token, "url": url_of(broker)}, BATCH)
    assert len(BatchReader(pattern, schema_of(pattern.view)).partitions()) == 1


def test_how_messages_stand_is_asked_of_the_broker(start_broker: StartBroker) -> None:
    broker = start_broker()
    send(broker, "q", values(10))
    assert [piece.folder for piece in Query(url_of(broker), "q", view="state").pieces] == [None]


def test_another_log_of_that_name_is_not_read(
    start_broker: StartBroker, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Neither a stranger's nor a copy of this one that has gone its own way."""
    broker = start_broker()
    send(broker, "q", values(10))
    broker.stop()
    copy, stranger = (
        BrokerProcess(tmp_path / name, "--http", "127.0.0.1:0") for name in ("copy", "stranger")
    )
    shutil.copytree(folder_of(broker), folder_of(copy))
    stranger.folder.mkdir()
    old = tmp_path / "old"
    shutil.copytree(folder_of(broker), old)
    try:
        for number, it in enumerate((broker, copy, stranger)):
            it.start()
            send(it, "q", values(10, 1000 * number))
        assert mark_of(str(old)) != mark_of(str(folder_of(broker))) != mark_of(str(folder_of(copy)))
        for folder in (folder_of(copy), folder_of(stranger), old):
            caplog.clear()
            query = Query(url_of(broker), "q", engine=f"file:{folder}")
            assert query.values() == values(10) + values(10)
            assert "over HTTP: the log there is not the one of this broker" in caplog.text
            assert caplog.records[-1].levelno == logging.WARNING
    finally:
        for it in (copy, stranger):
            if it.running:
                it.kill()


def test_a_copy_taken_while_the_broker_ran_is_read_as_far_as_it_goes(
    start_broker: StartBroker, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    broker = start_broker()
    send(broker, "q", values(10))
    shutil.copytree(folder_of(broker), tmp_path / "copy")
    send(broker, "q", values(10, 10))
    query = Query(url_of(broker), "q", engine=f"file:{tmp_path / 'copy'}")
    assert query.values() == values(20)
    assert "0 to 19 over HTTP: queue 'q': offsets 10 to 19 are not in the log" in caplog.text
    query = Query(url_of(broker), "q", engine=f"file:{tmp_path / 'copy'}", endingOffsets='{"q": 10}')
    broker.kill()
    assert query.values() == values(10)


def test_a_queue_that_was_deleted_is_not_read_from_the_next_one(start_broker: StartBroker) -> None:
    broker = start_broker()
    send(broker, "q", values(20))
    query = Query(url_of(broker), "q")
    assert query.values() == values(20)
    with Api(broker.ports["http"]) as api:
        assert api.ask("DELETE", path_of("q")).status == 200
        with pytest.raises(DataLost, match="queue 'q': offsets 0 to 19 cannot be read"):
            query.values()
        send(broker, "q", values(50, 1000))
        with pytest.raises(DataLost, match="was deleted, and another of that name stands now"):
            query.values()


def test_a_broker_that_tells_no_folder_is_asked_for_everything(start_broker: StartBroker) -> None:
    broker = start_broker()
    send(broker, "q", values(10))
    (folder_of(broker) / "lock").write_text("17\n")  # as an earlier version leaves it
    query = Query(url_of(broker), "q")
    assert [piece.folder for piece in query.pieces] == [None]
    assert query.values() == values(10)


# --- while the broker is at work -------------------------------------------------------------------


@pytest.mark.long
def test_what_retention_takes_between_plan_and_reading(start_broker: StartBroker) -> None:
    broker = start_broker(*SMALL, config=KEEP_NOTHING)
    for first in range(0, 2000, 200):
        send(broker, "q", [value + b"x" * 300 for value in values(200, first)])
    url = url_of(broker)
    strict, over_http = Query(url, "q"), Query(url, "q", engine="http")
    lenient = Query(url, "q", failOnDataLoss="false")
    half = Query(url, "q", endingOffsets='{"q": 20}', failOnDataLoss="false")
    with Api(broker.ports["http"]) as api:
        api.post("/v1/queues/q/purge")
        until(lambda: offset_start(api, "q") > 20, "retention takes something", PATIENCE_SECONDS)
        said = []
        for query in (strict, over_http):
            with pytest.raises(
                DataLost, match=r"queue 'q': offsets 0 to \d+ were removed by retention"
            ) as it:
                query.values()
            said.append(re.sub(r"0 to \d+", "0 to N", str(it.value)))  # it goes on meanwhile
        assert said[0] == said[1]
        assert half.values() == []
        left = [int(value[:8]) for value in lenient.values()]
        assert left == list(range(2000 - len(left), 2000))
        assert len(left) < 1980


def test_what_goes_and_is_compacted_while_it_is_read(start_broker: StartBroker) -> None:
    """What nobody has settled stays; everything around it goes, and it is moved to other files meanwhile."""
    broker = start_broker(*SMALL, config=KEEP_NOTHING)
    sent = [value + b"x" * 300 for value in values(6000)]
    for first in range(0, 6000, 100):
        send(broker, "q", sent[first : first + 100])
        send(broker, "other", [b"y" * 600] * 200)
    query = Query(url_of(broker), "q")
    rows: list[bytes] = []
    with Api(broker.ports["http"]) as api:
        before = sorted(path.name for path in folder_of(broker).glob("*.seg"))
        for number, batch in enumerate(query.batches()):
            rows += batch
            if number == 0:
                assert len(rows) < 6000
                api.post("/v1/queues/other/purge")
                until(
                    lambda: offset_start(api, "other") > 1000, "retention takes something", PATIENCE_SECONDS
                )
    assert rows == sent
    assert sorted(path.name for path in folder_of(broker).glob("*.seg")) != before


def test_between_tasks_no_file_is_kept_from_going(start_broker: StartBroker) -> None:
    broker = start_broker(*SMALL)
    for first in range(0, 2000, 200):
        send(broker, "q", [value + b"x" * 300 for value in values(200, first)])
    query = Query(url_of(broker), "q", minPartitions="3")
    going = query.batches()
    next(going)
    assert mapped(folder_of(broker))
    rows = sum(map(len, going))
    assert 0 < rows < 2000
    assert not mapped(folder_of(broker))
    (reader,) = files._kept.values()
    send(broker, "q", values(5, 2000))
    assert len(Query(url_of(broker), "q").values()) == 2005
    assert list(files._kept.values()) == [reader]
    # One that ends before its rows do, as with a limit, leaves nothing behind either.
    limited = query.batches()
    next(limited)
    limited.close()
    del limited
    assert not mapped(folder_of(broker))


def test_damage_is_told_as_over_http(start_broker: StartBroker) -> None:
    broker = start_broker()
    for first in range(0, 30, 10):
        send(broker, "q", [b"%d" % n + b"x" * 100 for n in range(first, first + 10)])
    with LogReader(str(folder_of(broker))) as reader:
        position = next(reader.messages("q", 10)).header.position
    (segment,) = (path for path in folder_of(broker).glob("*.seg") if path.stat().st_size)
    with segment.open("r+b") as file:
        file.seek(position + 200)
        file.write(b"\xff")
    said = []
    for engine in ("auto", "http"):
        with pytest.raises(Refused, match="does not have its checksum: queue 'q', offsets 10 to 19") as it:
            Query(url_of(broker), "q", engine=engine).values()
        said.append(str(it.value))
    assert said[0] == said[1]
    for engine in ("auto", "http"):
        numbers = [
            int(value.rstrip(b"x"))
            for value in Query(url_of(broker), "q", engine=engine, failOnDataLoss="false").values()
        ]
        assert numbers == [*range(10), *range(20, 30)]


def test_rows_of_many_small_blocks_come_in_few_batches(start_broker: StartBroker) -> None:
    broker = start_broker()
    sent = values(2000)
    for first in range(0, 2000, 10):
        send(broker, "q", sent[first : first + 10])
    batches = list(Query(url_of(broker), "q").batches())
    assert [one for batch in batches for one in batch] == sent
    assert len(batches) <= 3
