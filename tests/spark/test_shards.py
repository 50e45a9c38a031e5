"""A cluster with several logs: one read has queues of all of them, over HTTP and straight from NATS.

Real nodes, and two front-ends that lead two of four logs each. In NATS there are two users: that of the
front-ends, and that of Spark, who may read the logs and do nothing else.
"""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.datasource import ReadAllAvailable

from penstock.log.jetstream.credentials import read_credentials
from penstock.log.jetstream.errors import JetStreamTrouble
from penstock.log.jetstream.link_thread import LinkThread
from penstock.log.jetstream.names import LogNames
from penstock.log.jetstream.options import LinkOptions
from penstock.log.jetstream.rights import Rights, rights_of_front_end, rights_of_reader, user_block
from penstock.log.jetstream.servers import parse_servers
from penstock.spark.links import close_links, link_for
from penstock.spark.offsets import DataLost
from penstock.spark.options import STREAM, read_options
from penstock.spark.source import schema_of
from penstock.spark.streaming import StreamReader
from tests.cluster.processes import FrontEnd, Site, site
from tests.cluster.test_shards import SHARDS, queues_of_all
from tests.cluster.test_shards_http import is_there
from tests.http.api import Api
from tests.http.morgue import path_of
from tests.http.test_transactions import commit, stage
from tests.nats.streams import delete_message
from tests.server.harness import until
from tests.spark.rig import PATIENCE_SECONDS, Cutter, Gathering, Queues, send, url_of, values
from tests.spark.test_addresses import free_port, urls
from tests.spark.test_deleted import TOLD, delete
from tests.spark.test_direct import Query, in_order
from tests.spark.test_read_stream import KEEP_NOTHING, offset_start

LOGS = LogNames().of_shards(SHARDS)
USERS = {
    "front": rights_of_front_end(LogNames(), SHARDS),
    "spark": rights_of_reader(LogNames(), SHARDS),
    "admin": Rights({">": ""}, {">": ""}),
}
PASSWORD = "5d2f0c6b1a"


@contextmanager
def several(folder: Path, fronts: int, *flags: str) -> Iterator[Site]:
    """A cluster with several logs, where each front-end leads its share."""
    users = "".join(user_block(user, PASSWORD, rights) for user, rights in USERS.items())
    for user in USERS:
        (folder / f"{user}.user").write_text(f"{user}:{PASSWORD}\n")
    with site(
        folder,
        nodes=1,
        fronts=fronts,
        shards=SHARDS,
        flags=("--cluster-credentials", str(folder / "front.user"), *flags),
        settings=f"authorization {{\n  users: [\n{users}  ]\n}}\n",
    ) as running:
        try:
            running.balanced()
            yield running
        finally:
            close_links()


@pytest.fixture(scope="module")
def brokers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """The last test of this file leaves one front-end."""
    with several(tmp_path_factory.mktemp("several"), 2) as running:
        yield running


def file_of(running: Site, user: str) -> Path:
    return running.nodes.folder.parent / f"{user}.user"


def direct(running: Site) -> dict[str, str]:
    return {"engine": ",".join(running.nodes.urls), "credentials": str(file_of(running, "spark"))}


def fill(front: FrontEnd, queues: list[str], payloads: list[bytes]) -> None:
    """A log that has just moved is not there at once."""
    for queue in queues:
        until(partial(is_there, front, queue), f"somebody to answer for {queue}", PATIENCE_SECONDS)
        send(front, queue, payloads)


def is_stored(api: Api, queue: str, count: int) -> bool:
    """One log may have its part of a transaction a moment before another."""
    (row,) = api.get("/v1/offsets", queues=queue)["queues"]
    return bool(row["offset_end"] == count)


# --- batches ---------------------------------------------------------------------------------------


def test_a_batch_has_queues_of_all_logs(spark: SparkSession, brokers: Site) -> None:
    """In both ways, planned at another front-end each: also what was staged, in one transaction for all."""
    names = queues_of_all("batch")
    for number, front in enumerate(brokers.fronts):
        fill(front, names, values(500, 1000 * number))
        with Api(front.ports["http"]) as api:
            key = f"batch/{number}"
            staged = [str(n) for n in range(200)]
            parts = [stage(api, key, queue, *staged) for queue in names]
            assert commit(api, key, *parts).status == 200
            for queue in names:
                until(partial(is_stored, api, queue, 700 * (number + 1)), f"all of {queue} to be stored")
    sent = Counter([*values(500), *values(500, 1000), *2 * [b"%d" % n for n in range(200)]])
    here, there = (Queues(spark, front) for front in brokers.fronts)
    rows = in_order(here.batch(",".join(names), minPartitions=9))
    assert rows == in_order(there.batch(subscribePattern=r"batch\..*", minPartitions=9, **direct(brokers)))
    for queue in names:
        its = [row for row in rows if row.queue == queue]
        assert [row.offset for row in its] == list(range(1400))
        assert Counter(bytes(row.value) for row in its) == sent


def test_each_task_reads_the_stream_of_its_log(brokers: Site) -> None:
    names = queues_of_all("streams")
    fill(brokers.fronts[0], names, values(10))
    for front in brokers.fronts:
        query = Query(front, brokers.nodes, ",".join(names), minPartitions=str(SHARDS), **direct(brokers))
        told = {
            (part.queue, plan.source.stream)
            for piece in query.pieces
            for part, plan in zip(piece.ranges, piece.plans, strict=True)
            if plan.source is not None
        }
        assert told == {(queue, names_of.stream) for queue, names_of in zip(names, LOGS, strict=True)}
        assert Counter(query.values()) == Counter(values(10) * SHARDS)
    nats = link_for(query.options)
    for log in LOGS:
        with pytest.raises(JetStreamTrouble):
            nats.ask(nats.api.put(log.file("x"), b"not ours"))


def test_each_task_asks_the_leader_of_its_queue(brokers: Site) -> None:
    """Where `url` names it; one that is dead is passed over."""
    names = queues_of_all("leaders")
    fill(brokers.fronts[0], names, values(10))
    here, there = brokers.fronts
    with Cutter(here.ports["http"], []) as first, Cutter(there.ports["http"], []) as second:
        url = urls(free_port(), first.port, second.port)
        query = Query(here, brokers.nodes, ",".join(names), url=url, engine="http")
        assert Counter(query.values()) == Counter(values(10) * SHARDS)
        for queue, leader in zip(names, brokers.leaders(here), strict=True):
            asked = [len(way.asked(f"/{queue}/log")) for way in (first, second)]
            assert asked == ([1, 0] if leader == here.name else [0, 1])
        assert len(first.asked("/cuts")) == 1
    # Whoever is asked, everything is there: also where nobody else is named.
    alone = Query(there, brokers.nodes, ",".join(names), engine="http")
    assert Counter(alone.values()) == Counter(values(10) * SHARDS)


# --- what is gone ----------------------------------------------------------------------------------


@pytest.mark.long
def test_what_is_gone_is_told(tmp_path: Path) -> None:
    """As with one log: what retention takes, what somebody removes, and queues that are others now."""
    config = tmp_path / "penstock.toml"
    config.write_text(KEEP_NOTHING)
    with several(tmp_path, 1, "--config", str(config), "--log-segment-bytes", "65536") as running:
        (front,) = running.fronts
        trimmed, holed, again, whole = queues_of_all("gone")
        fill(front, [whole, again], values(100))
        for first in range(0, 2000, 200):
            send(front, trimmed, [value + b"x" * 300 for value in values(200, first)])
        for first in range(0, 300, 100):
            send(front, holed, values(100, first))  # each is a record of its own
        before = {
            queue: Query(front, running.nodes, queue, **direct(running), failOnDataLoss=strict)
            for queue, strict in ((trimmed, "true"), (holed, "true"), (whole, "true"))
        }
        lenient = Query(front, running.nodes, trimmed, **direct(running), failOnDataLoss="false")
        said = {**direct(running), "url": url_of(front), "subscribe": again, "startingOffsets": "earliest"}
        stream = StreamReader(read_options(said, STREAM), schema_of("messages"))
        begin = stream.initialOffset()
        end = stream.latestOffset(begin, ReadAllAvailable())

        credentials = read_credentials(file_of(running, "admin"))
        nats = LinkThread.open(parse_servers(running.nodes.urls[0]), LinkOptions(credentials=credentials))
        try:
            (part,) = before[holed].pieces[0].plans[0].parts
            second = nats.ask(nats.api.next_message(LOGS[1].stream, part.seq_first + 1, part.subject))
            assert second is not None
            delete_message(nats, LOGS[1].stream, second.seq)
            subject = before[trimmed].pieces[0].plans[0].parts[0].subject
            with Api(front.ports["http"]) as api:
                api.post(path_of(trimmed, "purge"))
                until(lambda: offset_start(api, trimmed) > 20, "retention takes something", PATIENCE_SECONDS)
                until(
                    lambda: not nats.ask(nats.api.subjects(LOGS[0].stream, subject)),
                    "it is gone from the stream",
                    PATIENCE_SECONDS,
                )
                delete(api, again)
        finally:
            nats.close()
        send(front, again, values(500, 1000))

        assert before[whole].values() == values(100)
        with pytest.raises(DataLost, match=rf"stream {LOGS[1].stream}, .*: bytes \d+ to \d+ are missing"):
            before[holed].values()
        with pytest.raises(DataLost, match=rf"'{trimmed}': offsets 0 to \d+ were removed by retention"):
            before[trimmed].values()
        left = [int(value[:8]) for value in lenient.values()]
        assert left == list(range(left[0], 2000))
        with pytest.raises(DataLost, match=TOLD):
            stream.latestOffset(end, ReadAllAvailable())
        with pytest.raises(DataLost, match=f"queue '{again}'"):
            stream.partitions(begin, end)
        stream.stop()


# --- streams ---------------------------------------------------------------------------------------


def test_streams_go_on_when_a_front_end_dies(spark: SparkSession, brokers: Site, tmp_path: Path) -> None:
    """And no queue is left out, or taken for gone, where nobody leads its log for a while."""
    here, there = brokers.fronts
    names = queues_of_all("flow")
    fill(here, names, values(3000))
    queues = Queues(spark, here)
    queues.url = urls(there.ports["http"], here.ports["http"])
    planned = Query(here, brokers.nodes, ",".join(names), url=queues.url, **direct(brokers))

    def flow(**options: object) -> DataFrame:
        rate: dict[str, object] = {"startingOffsets": "earliest", "maxOffsetsPerTrigger": 1500}
        return queues.stream(",".join(names), None, **rate, **options)

    with (
        Gathering(flow(**direct(brokers)), "from nats", tmp_path / "nats") as from_nats,
        Gathering(flow(reader="shards"), "over http", tmp_path / "http") as over_http,
    ):
        from_nats.wait(1500)
        over_http.wait(1500)
        there.kill()
        # What was planned needs no front-end; what is planned now waits for the next leaders.
        assert Counter(planned.values()) == Counter(values(3000) * SHARDS)
        again = Query(here, brokers.nodes, ",".join(names), url=queues.url, engine="http")
        assert Counter(again.values()) == Counter(values(3000) * SHARDS)
        fill(here, names, values(500, 3000))
        for gathering in (from_nats, over_http):
            gathering.all()
            for queue in names:
                assert gathering.of(queue) == Counter(values(3500))
    assert set(brokers.leaders(here)) == {here.name}
