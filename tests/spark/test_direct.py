"""Messages straight from NATS: the same rows as over HTTP, without a front-end in the way.

Real nodes, and real front-ends before them. What Spark does is shown with Spark; what happens between a plan
and reading it is shown with the source alone, which Spark asks the same way.
"""

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from pyspark.sql import DataFrame, Row, SparkSession

from penstock.log.jetstream import ranges
from penstock.log.jetstream.cluster import Cluster
from penstock.log.jetstream.errors import JetStreamTrouble
from penstock.log.jetstream.link_thread import LinkThread
from penstock.log.jetstream.names import LogNames
from penstock.log.jetstream.servers import parse_server
from penstock.spark.api import Refused, Unreachable
from penstock.spark.links import NotAdmitted, close_links, link_for
from penstock.spark.offsets import DataLost
from penstock.spark.options import BATCH, read_options
from penstock.spark.reading import BatchReader, Piece
from penstock.spark.source import schema_of
from tests.cluster.processes import ONE_LOG, STREAM, Site, site
from tests.http.api import Api
from tests.http.morgue import path_of
from tests.http.test_repairs import repair
from tests.http.test_transactions import commit, stage
from tests.http.zoo import STATES, value, zoo
from tests.nats.streams import delete_message
from tests.nats.test_link import SEED_BYTES, certificates, seed_of, tls_settings
from tests.server.harness import BrokerProcess, until
from tests.spark.rig import PATIENCE_SECONDS, Gathering, Queues, send, url_of, values
from tests.spark.test_read_stream import KEEP_NOTHING, offset_start
from tests.spark.test_spark_docs import PAGE

__all__ = ["certificates"]


@pytest.fixture(scope="module")
def brokers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """Two front-ends on three nodes, for tests that leave them as they were."""
    with site(tmp_path_factory.mktemp("site")) as running:
        yield running
        close_links()


@pytest.fixture
def lone(tmp_path: Path) -> Iterator[Site]:
    """A front-end on one node, which keeps nothing of what is settled."""
    config = tmp_path / "penstock.toml"
    config.write_text(KEEP_NOTHING)
    flags = ("--config", str(config), "--log-segment-bytes", "65536")
    with site(tmp_path, nodes=1, fronts=1, flags=flags) as running:
        yield running
        close_links()


class Both:
    """The same query in two ways, planned at a front-end that follows."""

    def __init__(self, spark: SparkSession, brokers: Site) -> None:
        self.front = brokers.follower()
        self.queues = Queues(spark, self.front)
        self.engine = ",".join(brokers.nodes.urls)

    def rows(self, subscribe: str, schema: str | None = None, **options: object) -> list[Row]:
        """The rows, which must be the same."""
        over_http = in_order(self.queues.batch(subscribe, schema, engine="http", **options))
        direct = in_order(self.queues.batch(subscribe, schema, engine=self.engine, **options))
        assert direct == over_http
        return direct


def in_order(frame: DataFrame) -> list[Row]:
    return frame.orderBy([name for name in frame.columns if name != "headers"]).collect()


@pytest.fixture
def both(spark: SparkSession, brokers: Site) -> Both:
    return Both(spark, brokers)


# --- the same rows ---------------------------------------------------------------------------------


@pytest.mark.long
def test_what_has_become_of_messages_changes_nothing(both: Both) -> None:
    with Api(both.front.ports["http"]) as api, zoo(both.front, api, "zoo"):
        repair(api, "zoo", "zoo/1", o1="another payload")
        rows = both.rows("zoo")
        assert [bytes(row.value) for row in rows] == [value(offset) for offset in STATES]
        assert [row.offset for row in rows] == list(STATES)
        assert len(set(both.rows("zoo", "id string"))) == len(STATES)


@pytest.mark.long
def test_several_queues_ranges_and_tasks(both: Both) -> None:
    sent = {"direct.a": values(6000), "direct.b": values(2000, 50), "direct.c": values(1)}
    for first in range(0, 6000, 1000):
        both.queues.send("direct.a", sent["direct.a"][first : first + 1000])
        both.queues.send(
            "direct.b",
            sent["direct.b"][first // 3 : (first + 1000) // 3],
            ttl=[600] * ((first + 1000) // 3 - first // 3),
            retries=[n % 3 or None for n in range(first // 3, (first + 1000) // 3)],
            headers=[{"number": str(n)} for n in range(first // 3, (first + 1000) // 3)],
        )
    both.queues.send("direct.c", sent["direct.c"])
    rows = both.rows("direct.a,direct.b,direct.c")
    for queue, payloads in sent.items():
        assert [bytes(row.value) for row in rows if row.queue == queue] == payloads
    assert both.rows("direct.a,direct.b", minPartitions=7) == [r for r in rows if r.queue != "direct.c"]
    some = both.rows(
        "direct.a,direct.c",
        startingOffsets='{"direct.a": 999, "direct.c": -2}',
        endingOffsets='{"direct.a": 4001, "direct.c": 0}',
        minPartitions=3,
    )
    assert [row.offset for row in some] == list(range(999, 4001))
    for schema in (
        "value binary",
        "expires timestamp, retries int",
        "offset bigint",
        "queue string, id string",
    ):
        assert len(both.rows("direct.b", schema)) == 2000
    titled = both.rows("direct.b", "offset bigint, headers map<string, string>")
    assert [row.headers for row in titled] == [{"number": str(row.offset)} for row in titled]


def test_messages_of_transactions(both: Both) -> None:
    """Their payloads are in the stream before the commit that made messages of them, in no order."""
    queues = ("direct.one", "direct.two")
    wanted: dict[str, list[str]] = {queue: [] for queue in queues}
    with Api(both.front.ports["http"]) as api:
        for turn in range(3):
            parts = {
                stage(api, f"direct/{turn}", queue, *staged): (queue, staged)
                for number in range(3)
                for queue in queues
                for staged in [[f"{turn}-{number}-{n}" for n in range(500)]]
            }
            for queue in queues:
                both.queues.send(queue, [b"between"])
                wanted[queue].append("between")
            order = sorted(parts, reverse=bool(turn % 2))
            assert commit(api, f"direct/{turn}", *order).status == 200
            for it in order:
                queue, staged = parts[it]
                wanted[queue] += staged
    rows = both.rows(",".join(queues))
    for queue in queues:
        assert [bytes(row.value).decode() for row in rows if row.queue == queue] == wanted[queue]
    some = both.rows(queues[0], startingOffsets='{"direct.one": 700}', minPartitions=4)
    assert [bytes(row.value).decode() for row in some] == wanted[queues[0]][700:]


def test_the_example_of_the_page(both: Both, capfd: pytest.CaptureFixture[str]) -> None:
    both.queues.send("orders", [b"three apples", b"a pear"])
    part = PAGE[PAGE.index("## Straight from NATS") : PAGE.index("## Writing a batch")]
    (text,) = re.findall(r"^```python\n(.*?)^```$", part, re.MULTILINE | re.DOTALL)
    text = text.replace("http://127.0.0.1:9180", both.queues.url)
    text = text.replace("nats://nats-a:4222,nats-b:4222,nats-c:4222", both.engine)
    names = {"spark": both.queues.spark}
    exec(compile(text, "docs/spark.md", "exec"), names)
    assert "three apples" in capfd.readouterr().out


def test_where_messages_are(both: Both) -> None:
    """As any front-end tells it; what is in the answer is shown by everything else here."""
    both.queues.send("direct.where", values(10))
    with Api(both.front.ports["http"]) as api:
        told = api.get(path_of("direct.where", "records"), start=2, end=7)
        assert (told["stream"], told["start"], told["end"]) == (STREAM, 2, 7)
        (part,) = told["parts"]
        assert (part["offset_start"], part["offset_end"]) == (2, 7)
        assert part["subject"].endswith(part["file"])
        assert api.get(path_of("direct.where", "records"), end=99)["end"] == 10
        for start, end in ((10, None), (99, None), (5, 5), (7, 3)):
            told = api.get(path_of("direct.where", "records"), start=start, end=end)
            assert (told["start"], told["end"], told["parts"]) == (start, start, [])
        assert api.ask("GET", path_of("no.such", "records")).problem == "queue-not-found"


def test_other_views_are_read_over_http(both: Both) -> None:
    both.queues.send("direct.views", values(10))
    assert len(both.rows("direct.views", view="events")) == 10
    assert len(both.rows("direct.views", view="state")) == 10


def test_a_batch_of_nothing(both: Both) -> None:
    both.queues.send("direct.nothing", values(3))
    said = '{"direct.nothing": 3}'
    assert both.rows("direct.nothing", startingOffsets=said) == []


# --- streams ---------------------------------------------------------------------------------------


@pytest.mark.long
def test_a_stream_goes_on_when_a_node_and_a_leader_die(both: Both, brokers: Site, tmp_path: Path) -> None:
    both.queues.send("direct.stream", values(1000))
    frame = both.queues.stream(
        "direct.stream", startingOffsets="earliest", engine=both.engine, maxOffsetsPerTrigger=300
    )
    with Gathering(frame, "direct", tmp_path) as gathering:
        assert gathering.all().of("direct.stream") == Counter(values(1000))
        node = brokers.stream_leader()
        node.kill()
        try:
            both.queues.send("direct.stream", values(500, 1000))
            assert gathering.all().of("direct.stream") == Counter(values(1500))
        finally:
            node.start()
            brokers.nodes.wait_ready()
        # Unless a slow machine has changed that meanwhile, it is the one that leads.
        (leader,) = (front for front in brokers.fronts if front is not both.front)
        leader.kill()
        try:
            both.front.ask("/v1/engine")
            both.queues.send("direct.stream", values(500, 1500))
            assert gathering.all().of("direct.stream") == Counter(values(2000))
        finally:
            leader.start()
    both.queues.send("direct.stream", values(10, 2000))
    with Gathering(frame, "direct", tmp_path) as gathering:
        assert gathering.all().of("direct.stream") == Counter(values(10, 2000))


# --- between the plan and reading ------------------------------------------------------------------


class Query:
    """A batch as Spark runs it: first the plan, then the tasks."""

    def __init__(self, front: BrokerProcess, nodes: Cluster, queue: str, **options: str) -> None:
        said = {"url": url_of(front), "engine": ",".join(nodes.urls), "subscribe": queue, **options}
        self.options = read_options(said, BATCH)
        self._reader = BatchReader(self.options, schema_of("messages"))
        self.pieces: Sequence[Piece] = self._reader.partitions()

    def batches(self) -> Iterator[list[bytes]]:
        """The payloads, as they come."""
        for piece in self.pieces:
            for batch in self._reader.read(piece):
                yield batch.column("value").to_pylist()

    def values(self) -> list[bytes]:
        return [one for batch in self.batches() for one in batch]


def test_no_front_end_is_needed_to_read(lone: Site) -> None:
    nodes, front = lone.nodes, lone.fronts[0]
    sent = values(20_000)
    for first in range(0, 20_000, 1000):
        send(front, "q", sent[first : first + 1000])
    query = Query(front, nodes, "q", minPartitions="3")
    files = {part.file for piece in query.pieces for plan in piece.plans for part in plan.parts}
    assert len(files) > 3
    front.kill()
    assert query.values() == sent


def test_the_copy_of_the_front_end_that_leads_is_read_like_any_log(lone: Site) -> None:
    """What is told as synced there is stored in the stream."""
    front = lone.fronts[0]
    sent = values(5000)
    for first in range(0, 5000, 1000):
        send(front, "q", sent[first : first + 1000])
    query = Query(front, lone.nodes, "q", engine="auto", retrySeconds="0")
    front.kill()
    assert query.values() == sent


def test_one_that_follows_tells_the_folder_of_the_one_that_leads(brokers: Site) -> None:
    follower = brokers.follower()
    (leader,) = (front for front in brokers.fronts if front is not follower)
    send(follower, "direct.folder", values(100))
    query = Query(follower, brokers.nodes, "direct.folder", engine="auto")
    (piece,) = query.pieces
    assert piece.folder is not None
    assert piece.folder.path.startswith(str(leader.folder))
    assert query.values() == values(100)


def test_one_node_is_enough_to_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranges, "READ_BYTES", 1)  # one record at a time, so that there is a middle
    sent = [value + b"x" * 250 for value in values(20_000)]  # of several batches
    with site(tmp_path, fronts=1) as brokers:
        front, nodes = brokers.fronts[0], brokers.nodes
        for first in range(0, 20_000, 1000):
            send(front, "q", sent[first : first + 1000])
        query = Query(front, nodes, "q")
        front.kill()
        link = link_for(query.options).link
        read: list[bytes] = []
        for number, some in enumerate(query.batches()):
            read += some
            if number in (0, 2):
                # First the one that we read from: the next record comes from another.
                assert link.server is not None
                port = link.server.port
                next(node for node in nodes.nodes if node.ports.client == port).kill()
        assert sum(node.running for node in nodes.nodes) == 1
        close_links()
    assert read == sent


@pytest.mark.long
def test_what_retention_takes_between_plan_and_reading(lone: Site) -> None:
    nodes, front = lone.nodes, lone.fronts[0]
    for first in range(0, 2000, 200):
        send(front, "q", [value + b"x" * 300 for value in values(200, first)])
    strict = Query(front, nodes, "q")
    lenient = Query(front, nodes, "q", failOnDataLoss="false")
    half = Query(front, nodes, "q", endingOffsets='{"q": 20}', failOnDataLoss="false")
    with Api(front.ports["http"]) as api:
        api.post("/v1/queues/q/purge")
        until(lambda: offset_start(api, "q") > 20, "retention takes something", PATIENCE_SECONDS)
        until(lambda: not_in_stream(nodes, strict), "it is gone from the stream", PATIENCE_SECONDS)
        with pytest.raises(DataLost, match=r"queue 'q': offsets 0 to \d+ were removed by retention before"):
            strict.values()
        assert half.values() == []
        # Retention goes on meanwhile.
        before = offset_start(api, "q")
        left = [int(value[:8]) for value in lenient.values()]
        assert before <= left[0] <= offset_start(api, "q")
        assert left == list(range(left[0], 2000))


def not_in_stream(nodes: Cluster, query: Query) -> bool:
    """Whether the first file of a plan has gone from the stream."""
    subject = query.pieces[0].plans[0].parts[0].subject
    nats = LinkThread.open([parse_server(nodes.urls[0])])
    try:
        return not nats.ask(nats.api.subjects(STREAM, subject))
    finally:
        nats.close()


def test_a_record_that_nobody_has_is_told(lone: Site) -> None:
    nodes, front = lone.nodes, lone.fronts[0]
    for first in range(0, 300, 100):
        send(front, "q", values(100, first))  # each is a record of its own: it is safe when this returns
    query = Query(front, nodes, "q")
    (part,) = query.pieces[0].plans[0].parts
    nats = LinkThread.open([parse_server(nodes.urls[0])])
    try:
        second = nats.ask(nats.api.next_message(STREAM, part.seq_first + 1, part.subject))
        assert second is not None
        delete_message(nats, STREAM, second.seq)
    finally:
        nats.close()
    said = rf"offsets \d+ to 299 cannot be read: stream {STREAM}, .*: bytes \d+ to \d+ are missing"
    with pytest.raises(DataLost, match=said):
        query.values()
    numbers = [int(value[:8]) for value in Query(front, nodes, "q", failOnDataLoss="false").values()]
    assert numbers == [*range(100), *range(200, 300)]


# --- what is said when it cannot be ----------------------------------------------------------------


def test_a_broker_without_a_cluster_says_so(broker: BrokerProcess, brokers: Site) -> None:
    send(broker, "direct.embedded", values(1))
    with pytest.raises(Refused, match="this broker keeps its log in files of its own, not in NATS"):
        Query(broker, brokers.nodes, "direct.embedded")


def test_servers_that_are_not_there(brokers: Site) -> None:
    front, nodes = brokers.follower(), brokers.nodes
    send(front, "direct.absent", values(1))
    query = Query(front, nodes, "direct.absent", engine="nats://127.0.0.1:9", retrySeconds="0")
    said = (
        r"NATS server nats://127.0.0.1:9: cannot be reached.*; tried for 0 s. "
        "Are the NATS servers running, and does the option engine name them"
    )
    with pytest.raises(Unreachable, match=said):
        query.values()


READ_ONLY = """
authorization {
  users: [
    {user: front, password: front-secret}
    {user: spark, password: spark-secret, permissions: {publish: [%s], subscribe: [%s]}}
  ]
}
"""


def test_a_user_who_may_only_read(tmp_path: Path) -> None:
    (allowed,) = re.findall(r"^```text\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    may_publish, may_subscribe = (line.partition(":")[2].strip() for line in allowed.splitlines())
    quoted = ", ".join(f'"{subject.strip()}"' for subject in may_publish.split(","))
    nodes = Cluster(tmp_path / "nats", 1, settings=READ_ONLY % (quoted, f'"{may_subscribe}"')).start()
    server = nodes.urls[0].removeprefix("nats://")
    monitor = f"http://127.0.0.1:{nodes.nodes[0].ports.monitor}"
    flags = ("--engine", f"nats://front:front-secret@{server}", "--cluster-monitor", monitor, *ONE_LOG)
    front = BrokerProcess(tmp_path, *flags, "--cluster-replicas", "1", "--http", "127.0.0.1:0")
    try:
        front.start()
        sent = values(100)
        send(front, "q", sent)
        query = Query(front, nodes, "q", engine=f"nats://spark:spark-secret@{server}")
        assert query.values() == sent
        nats = link_for(query.options)
        with pytest.raises(JetStreamTrouble):
            nats.ask(nats.api.put(LogNames().file("x"), b"not ours"))
        # Also what only a leader can answer is allowed.
        assert nats.ask(nats.api.next_message(STREAM, 1)) is not None
    finally:
        close_links()
        if front.running:
            front.kill()
        nodes.stop()


def test_who_we_are_and_whom_we_trust(tmp_path: Path, certificates: Path) -> None:
    # The public key of the seed that is in the file.
    seed = tmp_path / "ann.nk"
    seed.write_text(seed_of(SEED_BYTES))
    user = "authorization { users: [ { user: ann, password: secret } ] }\n"
    cluster = Cluster(tmp_path / "nats", 1, settings=user + tls_settings(certificates)).start()
    try:
        said = {"subscribe": "q", "tlsCa": str(certificates / "ours.pem")}
        server = f"localhost:{cluster.nodes[0].ports.client}"
        known = read_options({**said, "engine": f"tls://ann:secret@{server}"}, BATCH)
        nats = link_for(known)
        assert nats.ask(nats.api.account())["api"]["errors"] == 0
        assert link_for(known) is nats
        assert "secret" not in repr(known)
        with pytest.raises(NotAdmitted, match="the option credentials says who you are"):
            link_for(read_options({**said, "engine": f"tls://{server}", "credentials": str(seed)}, BATCH))
        missing = {"engine": f"tls://{server}", "credentials": str(tmp_path / "none.creds")}
        with pytest.raises(NotAdmitted, match=r"none\.creds"):
            link_for(read_options({**said, **missing}, BATCH))
    finally:
        close_links()
        cluster.stop()
