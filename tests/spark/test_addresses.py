"""Several addresses: whoever answers is asked, to plan, to read and to write; nobody is waited for long."""

import json
import pickle
import socket
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import ClassVar

import pyarrow as pa
import pytest
from pyspark.sql import SparkSession
from pyspark.sql.streaming.datasource import ReadAllAvailable

from penstock.spark import api
from penstock.spark.api import Broker, Refused, Unreachable
from penstock.spark.leaders import Leaders
from penstock.spark.offsets import IDENTITIES, DataLost
from penstock.spark.options import BATCH, STREAM, read_options
from penstock.spark.reading import BatchReader, Piece
from penstock.spark.source import schema_of
from penstock.spark.splits import Range
from penstock.spark.streaming import StreamReader
from penstock.spark.writing_transaction import Transaction
from tests.cluster.processes import site
from tests.http.api import Api
from tests.server.harness import BrokerProcess, until
from tests.spark.rig import PATIENCE_SECONDS, Cutter, Gathering, Queues, send, values


@pytest.fixture(autouse=True)
def nothing_is_known() -> Iterator[None]:
    api._failed_at.clear()
    yield
    api._failed_at.clear()


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        return port


def urls(*ports: int) -> str:
    return ",".join(f"http://127.0.0.1:{port}" for port in ports)


def test_one_that_is_not_there_is_passed_over(broker: BrokerProcess) -> None:
    send(broker, "addresses.one", values(3))
    dead, alive = free_port(), broker.ports["http"]
    for url in (urls(dead, alive), urls(alive, dead), f"http://127.0.0.1:{dead},127.0.0.1:{alive}"):
        asking = Broker(url, retry_seconds=0)
        there = pickle.loads(pickle.dumps(asking))
        for one in (asking, there, asking.in_haste()):
            assert one.get("offsets", queues="addresses.one")["queues"][0]["offset_end"] == 3
            one.close()
    asking = Broker(urls(dead, alive))
    with pytest.raises(Refused, match=f"^http://127.0.0.1:{alive}: there is no queue 'nowhere'"):
        asking.get("queues", "nowhere")
    asking.close()


def test_one_that_says_nothing_is_passed_over(broker: BrokerProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(api, "PASS_SECONDS", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        asking = Broker(urls(port, broker.ports["http"]), retry_seconds=0)
        assert asking.get("offsets", queues="nowhere") == {"queues": [], "next": None}
        asking.close()
        # Who comes next asks the other one first.
        taken, _ = silent.accept()
        taken.close()
        silent.settimeout(0)
        another = Broker(asking.url, retry_seconds=0)
        assert another.get("offsets", queues="nowhere") == {"queues": [], "next": None}
        another.close()
        with pytest.raises(BlockingIOError):
            silent.accept()
        alone = Broker(urls(port, free_port()), retry_seconds=0)
        with pytest.raises(Unreachable, match=r"nothing came for 0.2 s"):
            alone.get("offsets")


def test_all_down_is_one_error_that_names_them() -> None:
    first, second = free_port(), free_port()
    with pytest.raises(Unreachable) as ending:
        Broker(urls(first, second), retry_seconds=0.1).get("offsets")
    assert str(ending.value) == (
        f"no broker answers: http://127.0.0.1:{first} (Connection refused), "
        f"http://127.0.0.1:{second} (Connection refused); tried for 0.1 s. "
        "Is the broker running, and is the option url right?"
    )


class Unable(BaseHTTPRequestHandler):
    """A front-end that is there, and cannot do it now."""

    protocol_version = "HTTP/1.1"
    asked: ClassVar[list[str]] = []

    def do_GET(self) -> None:
        self.asked.append(self.path)
        body = b'{"detail": "this front-end has no leader"}'
        self.send_response(200 if self.path == "/healthz" else 503)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def served(kind: type[BaseHTTPRequestHandler]) -> Iterator[int]:
    """The port of one."""
    with ThreadingHTTPServer(("127.0.0.1", 0), kind) as server:
        server.daemon_threads = True
        serving = threading.Thread(target=server.serve_forever)
        serving.start()
        try:
            yield server.server_port
        finally:
            server.shutdown()
            serving.join()


def test_one_that_says_that_it_cannot_is_passed_over(broker: BrokerProcess) -> None:
    with served(Unable) as port:
        asking = Broker(urls(port, broker.ports["http"]), retry_seconds=20)
        assert asking.get("offsets", queues="nowhere") == {"queues": [], "next": None}
        assert Unable.asked == ["/healthz", "/v1/offsets?queues=nowhere"]
        asking.close()


class Alone(Unable):
    """A front-end that reaches no other one: for so many answers there is nothing of their logs."""

    left: int

    def do_GET(self) -> None:
        body = b'{"status": "ok"}'
        if self.path != "/healthz":
            type(self).left -= 1
            body = b'{"queues": [], "next": null, "missing": ["b-1a2b"]}'
            if type(self).left < 0:
                body = b'{"queues": [{"name": "q"}], "next": null}'
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


def test_what_one_cannot_tell_whole_is_asked_of_all_in_turns() -> None:
    """A queue that is not told is not gone. Whoever was asked first stays alone; the other one finds company,
    which takes longer than somebody who has mistyped an address should wait."""
    first, second = type("First", (Alone,), {"left": 1000}), type("Second", (Alone,), {"left": 1})
    with served(first) as here, served(second) as there:
        asking = Broker(urls(here, there), retry_seconds=5, contact_seconds=0.1)
        assert asking.get("offsets", queues="q")["queues"] == [{"name": "q"}]
        asking.close()


class Late(Unable):
    """A front-end that led the log, and does not know that another one does: what it has of it ends."""

    identity: str
    end = 2

    def do_GET(self) -> None:
        body, headers = b'{"status": "ok"}', {}
        if self.path.startswith("/v1/offsets"):
            row = {"name": "addresses.late", "identity": self.identity}
            ends = {"offset_start": 0, "offset_end": self.end, "event_start": 0, "event_end": self.end}
            body = json.dumps({"queues": [{**row, **ends}], "next": None}).encode()
        elif "/log" in self.path:
            sink = pa.BufferOutputStream()
            pa.ipc.new_stream(sink, pa.schema([])).close()
            body = sink.getvalue().to_pybytes()
            headers = {"Penstock-Start": str(self.end), "Penstock-End": str(self.end)}
        self.send_response(200)
        for name, value in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)


@contextmanager
def late(broker: BrokerProcess) -> Iterator[int]:
    """Beside a broker whose queue has five messages, three of them behind its end."""
    with Api(broker.ports["http"]) as there:
        if not there.get("/v1/offsets", queues="addresses.late")["queues"]:
            send(broker, "addresses.late", values(5))
        (row,) = there.get("/v1/offsets", queues="addresses.late")["queues"]
    with served(type("Now", (Late,), {"identity": row["identity"]})) as port:
        yield port


@pytest.mark.parametrize("fails", [True, False])
def test_a_task_is_not_content_with_less_than_was_planned(broker: BrokerProcess, fails: bool) -> None:
    """Its rows would be passed over, with a warning, where a query may go on without what is lost."""
    with late(broker) as port:
        url = urls(broker.ports["http"], port)
        said = {"url": url, "subscribe": "addresses.late", "engine": "http", "failOnDataLoss": str(fails)}
        reading = BatchReader(
            read_options({**said, "startingOffsets": '{"addresses.late": 2}'}, BATCH), schema_of("messages")
        )
        (piece,) = reading.partitions()
        piece = replace(piece, leaders=Leaders((f"127.0.0.1:{port}",)))
        assert read(reading, [piece]) == values(5)[2:]


def test_a_stream_does_not_go_back_for_one_that_is_behind(broker: BrokerProcess) -> None:
    """Its query would end, or read all of the queue once more."""
    with late(broker) as port:
        said = {"url": urls(port, broker.ports["http"]), "subscribe": "addresses.late"}
        for fails in (True, False):
            options = read_options({**said, "failOnDataLoss": str(fails)}, STREAM)
            reading = StreamReader(options, schema_of("messages"))
            with Api(broker.ports["http"]) as there:
                (row,) = there.get("/v1/offsets", queues="addresses.late")["queues"]
            start = {IDENTITIES: {"addresses.late": row["identity"]}, "addresses.late": 5}
            api._failed_at.clear()
            assert reading.latestOffset(start, ReadAllAvailable()) == start
            reading.stop()


def test_what_nobody_has_is_lost(broker: BrokerProcess) -> None:
    with late(broker) as one, late(broker) as other:
        said = {"url": urls(one, other), "subscribe": "addresses.late", "retrySeconds": "0.3"}
        reading = StreamReader(read_options(said, STREAM), schema_of("messages"))
        with pytest.raises(DataLost, match="ends at 2, but was read up to 5"):
            reading.latestOffset({"addresses.late": 5}, ReadAllAvailable())
        reading.stop()
        batch = BatchReader(read_options({**said, "engine": "http"}, BATCH), schema_of("messages"))
        with pytest.raises(DataLost, match="2 to 4 were there when the query was planned, and are not now"):
            read(batch, [Piece((Range("addresses.late", 2, 5),))])


def test_one_that_goes_while_it_is_read_from_is_replaced(broker: BrokerProcess) -> None:
    sent = [b"%06d" % n + b"x" * 94 for n in range(20_000)]
    for at in range(0, len(sent), 1000):
        send(broker, "addresses.read", sent[at : at + 1000])
    with Cutter(broker.ports["http"], [900_000]) as first, Cutter(broker.ports["http"], []) as second:
        said = {"url": urls(first.port, second.port), "subscribe": "addresses.read", "engine": "http"}
        reading = BatchReader(read_options(said, BATCH), schema_of("messages"))
        (piece,) = reading.partitions()
        assert len(first.asked("/offsets")) == 1
        offsets = [offset for batch in reading.read(piece) for offset in batch.column("offset").to_pylist()]
        assert first.cut == 1
        assert len(second.asked("/log")) == 1
    assert offsets == list(range(20_000))


@pytest.mark.long
def test_front_ends_of_a_cluster_replace_each_other(tmp_path: Path) -> None:
    with site(tmp_path) as brokers:
        follower = brokers.follower()
        (leader,) = (front for front in brokers.fronts if front is not follower)
        send(leader, "addresses.cluster", values(500))
        url = urls(leader.ports["http"], follower.ports["http"])
        asking = Broker(url)
        transaction = Transaction(asking, "addresses/1")
        stage = transaction.stage(memoryview(arrow(values(10, 500))), "addresses.cluster")
        reading, pieces = planned(url)
        leader.kill()
        # What was planned there is read here, and what was staged there is committed here.
        assert read(reading, pieces) == values(500)
        transaction.commit([stage], "do it again, and they are")
        assert read(*planned(url)) == values(510)
        asking.close()


def arrow(payloads: list[bytes]) -> bytes:
    batch = pa.record_batch({"value": pa.array(payloads, pa.binary())})
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema) as stream:
        stream.write_batch(batch)
    return bytes(sink.getvalue().to_pybytes())


def planned(url: str) -> tuple[BatchReader, Sequence[Piece]]:
    reading = BatchReader(
        read_options({"url": url, "subscribe": "addresses.cluster"}, BATCH), schema_of("messages")
    )
    return reading, reading.partitions()


def read(reading: BatchReader, pieces: Sequence[Piece]) -> list[bytes]:
    return [row for piece in pieces for it in reading.read(piece) for row in it.column("value").to_pylist()]


# --- with Spark ------------------------------------------------------------------------------------


def test_spark_reads_and_writes_with_a_list(
    spark: SparkSession, broker: BrokerProcess, tmp_path: Path
) -> None:
    queues = Queues(spark, broker)
    queues.send("addresses.spark", values(100))
    with Cutter(broker.ports["http"], []) as second:
        with Cutter(broker.ports["http"], []) as first:
            queues.url = urls(free_port(), first.port, second.port)
            assert queues.values("addresses.spark") == Counter(values(100))
            rows = spark.createDataFrame([(value,) for value in values(20)], "value binary")
            writing = rows.write.format("penstock").option("url", queues.url)
            writing.option("queue", "addresses.written").mode("append").save()
            query = (
                queues.stream("addresses.spark", startingOffsets="earliest", reader="addresses")
                .select("value")
                .writeStream.format("penstock")
                .options(url=queues.url, queue="addresses.copied", checkpointLocation=str(tmp_path / "copy"))
                .start()
            )
            gathering = Gathering(
                queues.stream("addresses.spark", startingOffsets="earliest"), "list", tmp_path / "list"
            )
            gathering.wait(100)
            until(lambda: copied(broker) == 100, "the first copies", PATIENCE_SECONDS)
            assert not second.asked("/offsets")
        # The one that was asked is gone: reading, planning, committing and holding go on with the other one.
        queues.send("addresses.spark", values(100, 100))
        try:
            gathering.wait(200)
            assert gathering.of("addresses.spark") == Counter(values(200))
            until(lambda: copied(broker) == 200, "the copies", PATIENCE_SECONDS)
            assert second.asked("/offsets")
        finally:
            gathering.query.stop()
            query.stop()
    queues.url = f"http://127.0.0.1:{broker.ports['http']}"
    assert queues.values("addresses.written") == Counter(values(20))
    assert queues.values("addresses.copied") == Counter(values(200))


def copied(broker: BrokerProcess) -> int:
    with Api(broker.ports["http"]) as api:
        rows = api.get("/v1/offsets", queues="addresses.copied")["queues"]
    return int(rows[0]["offset_end"]) if rows else 0
