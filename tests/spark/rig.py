"""What the Spark tests share: messages into a broker, batches and streams out of it, a broken network."""

import contextlib
import re
import socket
import threading
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from urllib.parse import parse_qsl, quote, urlsplit

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.query import StreamingQuery

from tests.http.api import ARROW, Api
from tests.server.harness import ROOT, BrokerProcess, until

PATIENCE_SECONDS = 60.0
"""For what Spark does: on a machine that has much else to do, its first steps take a while."""


def examples(page: str, kind: str) -> list[str]:
    """The blocks of that kind on a page of docs/."""
    text = (ROOT / "docs" / page).read_text()
    return re.findall(rf"^```{kind}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


def url_of(broker: BrokerProcess) -> str:
    return f"http://127.0.0.1:{broker.ports['http']}"


def restart(broker: BrokerProcess) -> None:
    """On the same port, where its clients look for it."""
    broker.flags = tuple(
        f"127.0.0.1:{broker.ports['http']}" if before == "--http" else flag
        for before, flag in zip(("", *broker.flags), broker.flags, strict=False)
    )
    broker.start()


def send(
    broker: BrokerProcess,
    queue: str,
    values: Iterable[bytes],
    *,
    token: str | None = None,
    **columns: Sequence[object],
) -> None:
    """Messages in one batch; `columns` are whatever they may have beside their payloads."""
    arrays = {"value": pa.array(list(values), pa.binary())}
    types = {"headers": pa.map_(pa.string(), pa.string())}
    arrays |= {name: pa.array(column, types.get(name, pa.int64())) for name, column in columns.items()}
    batch = pa.record_batch(arrays)
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema) as stream:
        stream.write_batch(batch)
    with Api(broker.ports["http"], token) as api:
        reply = api.ask(
            "POST",
            f"/v1/queues/{quote(queue, safe='')}/batch",
            sink.getvalue().to_pybytes(),
            {"Content-Type": ARROW},
        )
    assert reply.status == 200, reply


def values(count: int, first: int = 0) -> list[bytes]:
    """Payloads that are all different, and of different lengths."""
    return [b"%08d" % number + b"." * (number % 23) for number in range(first, first + count)]


class Queues:
    """Queues of a broker as a Spark user sees them."""

    def __init__(self, spark: SparkSession, broker: BrokerProcess) -> None:
        self.spark = spark
        self.broker = broker
        self.url = url_of(broker)

    def send(self, queue: str, payloads: Iterable[bytes], **columns: Sequence[object]) -> None:
        send(self.broker, queue, payloads, token=None, **columns)

    def batch(self, subscribe: str | None = None, schema: str | None = None, **options: object) -> DataFrame:
        reading = self.spark.read.format("penstock").option("url", self.url)
        for name, value in self._options(subscribe, options).items():
            reading = reading.option(name, value)
        return (reading if schema is None else reading.schema(schema)).load()

    def stream(self, subscribe: str | None = None, schema: str | None = None, **options: object) -> DataFrame:
        reading = self.spark.readStream.format("penstock").option("url", self.url)
        for name, value in self._options(subscribe, options).items():
            reading = reading.option(name, value)
        return (reading if schema is None else reading.schema(schema)).load()

    @staticmethod
    def _options(subscribe: str | None, options: dict[str, object]) -> dict[str, str]:
        said = {} if subscribe is None else {"subscribe": subscribe}
        return said | {name: str(value) for name, value in options.items()}

    def values(self, subscribe: str | None = None, **options: object) -> Counter[bytes]:
        """The payloads of a batch, however often each is there."""
        rows = self.batch(subscribe, "value binary", **options).collect()
        return Counter(bytes(row.value) for row in rows)


class Gathering:
    """A query that gathers what it reads in memory, with a checkpoint that outlives it."""

    def __init__(self, frame: DataFrame, name: str, checkpoint: Path, *, available_now: bool = False) -> None:
        self.batches: list[int] = []  # rows of each that had some
        self.rows: Counter[tuple[str, bytes]] = Counter()
        self._lock = threading.Lock()
        writing = frame.select("queue", "value").writeStream.foreachBatch(self._take).queryName(name)
        if available_now:
            writing = writing.trigger(availableNow=True)
        self.query: StreamingQuery = writing.option("checkpointLocation", str(checkpoint)).start()

    def __enter__(self) -> "Gathering":
        return self

    def __exit__(self, *_: object) -> None:
        self.query.stop()

    def _take(self, frame: DataFrame, number: int) -> None:
        rows = frame.collect()
        with self._lock:
            self.rows.update((row.queue, bytes(row.value)) for row in rows)
            if rows:
                self.batches.append(len(rows))

    def of(self, queue: str) -> Counter[bytes]:
        with self._lock:
            return Counter({value: count for (name, value), count in self.rows.items() if name == queue})

    def wait(self, count: int) -> None:
        """Until so many rows have come, or the query has failed."""

        def there() -> bool:
            failure = self.query.exception()
            if failure is not None:
                raise failure
            return self.rows.total() >= count

        until(there, f"{count} rows", PATIENCE_SECONDS)

    def all(self) -> "Gathering":
        """All that is there by now."""
        self.query.processAllAvailable()
        return self

    def failure(self) -> str:
        """What the query died of."""
        until(lambda: self.query.exception() is not None, "the query fails", PATIENCE_SECONDS)
        return str(self.query.exception())


class Cutter:
    """A way to a broker that breaks: it cuts connections after so many bytes of what the broker says.

    And one that listens: it knows what was asked."""

    def __init__(self, port: int, cuts: Sequence[int]) -> None:
        self._port = port
        self._cuts = list(cuts)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._open: list[socket.socket] = []
        self._asked = bytearray()
        self.cut = 0
        self.port: int = self._listener.getsockname()[1]
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._threads[0].start()

    def __enter__(self) -> "Cutter":
        return self

    def __exit__(self, *_: object) -> None:
        # A listener that somebody waits on is not ended by closing it alone.
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for sock in self._open:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
        for thread in list(self._threads):
            thread.join(PATIENCE_SECONDS)
        for sock in self._open:
            sock.close()

    @property
    def connections(self) -> int:
        """How many were made so far."""
        return len(self._open) // 2

    def asked(self, path: str) -> list[dict[str, str]]:
        """The parameters of all requests so far to paths that end like that."""
        targets = re.findall(rb"(?:GET|PUT|POST|DELETE) (/\S*) HTTP/1.1\r\n", bytes(self._asked))
        parts = [urlsplit(target.decode()) for target in targets]
        return [dict(parse_qsl(part.query)) for part in parts if part.path.endswith(path)]

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                broker = socket.create_connection(("127.0.0.1", self._port))
                self._open += (client, broker)
                for thread in (
                    threading.Thread(target=self._pour, args=(client, broker, False), daemon=True),
                    threading.Thread(target=self._pour, args=(broker, client, True), daemon=True),
                ):
                    self._threads.append(thread)
                    thread.start()

    def _pour(self, source: socket.socket, sink: socket.socket, from_broker: bool) -> None:
        poured = 0
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                # Only bulk is cut: what plans a query is far shorter than any cut.
                if from_broker and self._cuts and poured + len(data) > self._cuts[0]:
                    sink.sendall(data[: self._cuts.pop(0) - poured])
                    self.cut += 1
                    break
                if not from_broker:
                    self._asked += data
                sink.sendall(data)
                poured += len(data)
        for sock in (source, sink):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
