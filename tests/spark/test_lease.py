"""What a stream holds at the broker, and which queues it remembers: the source itself, without Spark."""

import threading
from collections.abc import Iterator
from typing import Any

import pytest
from pyspark.sql.streaming.datasource import ReadAllAvailable
from pyspark.sql.types import BinaryType, StructType

from penstock.spark import lease
from penstock.spark.api import Broker
from penstock.spark.offsets import DataLost, positions_of
from penstock.spark.options import STREAM, read_options
from penstock.spark.streaming import StreamReader
from tests.http.api import Api
from tests.http.morgue import phpmq
from tests.server.harness import WAIT_SECONDS, BrokerProcess, until
from tests.spark.conftest import StartBroker
from tests.spark.rig import send, url_of, values


def test_a_stream_of_more_queues_than_one_reader_takes_holds_them_all(start_broker: StartBroker) -> None:
    broker = start_broker()
    names = [f"q{number:04}" for number in range(1002)]
    with phpmq(broker) as mq, Api(broker.ports["http"]) as api:
        for name in names:
            mq.send(name, b"x")
        until(lambda: len(api.get("/v1/offsets", limit=2000)["queues"]) == 1002, "all queues are there")
        for reader in a_stream(broker, subscribePattern="q.*", reader="many", startingOffsets="earliest"):
            reader.initialOffset()
            readers = {it["name"]: it for it in api.get("/v1/readers")["readers"]}
            assert sorted(readers) == ["many", "many (2)"]
            assert sorted(row["queue"] for it in readers.values() for row in it["queues"]) == names
            # A new one comes to the last of them, and whoever moves is moved.
            send(broker, "q9", values(1))
            reader.latestOffset(dict.fromkeys(names, 0), ReadAllAvailable())
            reader.commit({names[0]: 1, names[-1]: 1})
            until(
                lambda: (
                    (rows := held(api, "many (2)")).keys() == {"q1000", "q1001", "q9"} and rows["q1001"] == 1
                ),
                "the reader moves",
            )
            assert held(api, "many")["q0000"] == 1


def test_a_stream_that_has_read_everything_is_not_behind(broker: BrokerProcess, api: Api) -> None:
    """Spark says that a batch is done when it has planned the next; nothing comes, and it does not."""
    send(broker, "lease-all", values(3))
    for reader in a_stream(broker, subscribe="lease-all", reader="lease-all", startingOffsets="earliest"):
        start = reader.initialOffset()
        end = reader.latestOffset(start, ReadAllAvailable())
        reader.partitions(start, end)
        assert held(api, "lease-all") == {"lease-all": 0}  # it may be run again
        assert reader.latestOffset(end, ReadAllAvailable()) == end
        until(lambda: held(api, "lease-all") == {"lease-all": 3}, "the reader moves")


def held(api: Api, name: str) -> dict[str, int]:
    return {
        row["queue"]: row["position"] for row in api.get(f"/v1/readers/{name.replace(' ', '%20')}")["queues"]
    }


def a_stream(broker: BrokerProcess, **said: str) -> Iterator[StreamReader]:
    """A stream's reader, as Spark makes it, stopped in the end."""
    reader = StreamReader(
        read_options({"url": url_of(broker), **said}, STREAM), StructType().add("value", BinaryType())
    )
    try:
        yield reader
    finally:
        reader.stop()


def test_a_queue_that_is_not_subscribed_to_any_more_is_forgotten(broker: BrokerProcess, api: Api) -> None:
    for queue in ("lease-a", "lease-b"):
        send(broker, queue, values(3))
    for reader in a_stream(broker, subscribe="lease-a", reader="lease-test"):
        end = reader.latestOffset({"lease-a": 1, "lease-b": 2}, ReadAllAvailable())
        assert positions_of(end) == {"lease-a": 3}
        # The last batch, which was not done, has it still; and is read as it was planned.
        before = {"lease-a": 0, "lease-b": 0}
        pieces = reader.partitions(before, {"lease-a": 1, "lease-b": 2})
        ranges = sorted((part.queue, part.start, part.end) for piece in pieces for part in piece.ranges)
        assert ranges == [("lease-a", 0, 1), ("lease-b", 0, 2)]
        reader.commit({"lease-a": 1, "lease-b": 2})
        until(lambda: held(api, "lease-test") == {"lease-a": 1}, "the reader moves, and holds no other queue")
    for reader in a_stream(broker, subscribe="lease-a,lease-b"):
        # It comes back as a new one.
        end = reader.latestOffset({"lease-a": 3}, ReadAllAvailable())
        assert positions_of(end) == {"lease-a": 3, "lease-b": 3}
    for reader in a_stream(broker, subscribe="lease-a,lease-nix"):
        with pytest.raises(DataLost, match="queue 'lease-nix' is gone, but was read up to 2"):
            reader.latestOffset({"lease-a": 1, "lease-nix": 2}, ReadAllAvailable())


def test_a_stream_says_what_it_is_and_why_it_has_ended(broker: BrokerProcess, api: Api) -> None:
    send(broker, "lease-says", values(3))
    said: dict[str, Any] = {}

    def about() -> dict[str, Any]:
        said.update(error=None)
        said.update(api.get("/v1/readers/saying")["about"] or {})
        return said

    both = "lease-says,lease-lost"
    for reader in a_stream(broker, subscribe=both, reader="saying", startingOffsets="earliest"):
        reader.initialOffset()
        assert (about()["kind"], about()["error"]) == ("spark", None)
        # Whoever says more than that is not contradicted.
        assert api.ask("PUT", "/v1/readers/saying", {"about": {"kind": "pipeline"}}).status == 200
        reader.commit({"lease-says": 2})
        until(lambda: api.get("/v1/readers/saying")["moved"] == 2, "it to move")
        assert about()["kind"] == "pipeline"
        with pytest.raises(DataLost):
            reader.latestOffset({"lease-says": 1, "lease-lost": 2}, ReadAllAvailable())
    until(lambda: "'lease-lost' is gone" in (about()["error"] or ""), "what ended it to be told")
    for reader in a_stream(broker, subscribe="lease-says", reader="saying", startingOffsets="earliest"):
        reader.initialOffset()
        reader.commit({"lease-says": 3})
        until(lambda: api.get("/v1/readers/saying")["moved"] == 3, "it to go on")
        assert about()["error"] is None


def test_where_a_queue_is_deleted_the_others_are_held_on(broker: BrokerProcess, api: Api) -> None:
    """Between two looks of the stream, which may be far apart: its trigger says how far."""
    names = ("lease-gone", "lease-stays")
    for queue in names:
        send(broker, queue, values(3))
    for reader in a_stream(broker, subscribe=",".join(names), reader="left", startingOffsets="earliest"):
        reader.initialOffset()
        assert held(api, "left") == dict.fromkeys(names, 0)
        assert api.ask("DELETE", "/v1/queues/lease-gone").status == 200
        reader.commit({"lease-gone": 1, "lease-stays": 2})
        until(lambda: held(api, "left") == {"lease-stays": 2}, "the reader goes on with what is there")


def test_of_a_queue_that_was_made_anew_everything_is_held(broker: BrokerProcess, api: Api) -> None:
    send(broker, "lease-anew", values(9))
    said = {"subscribe": "lease-anew", "failOnDataLoss": "false", "startingOffsets": "earliest"}
    for reader in a_stream(broker, **said, reader="anew"):
        end = reader.latestOffset(reader.initialOffset(), ReadAllAvailable())
        reader.commit(end)
        until(lambda: held(api, "anew") == {"lease-anew": 9}, "the reader moves")
        assert api.ask("DELETE", "/v1/queues/lease-anew").status == 200
        send(broker, "lease-anew", values(20, 1000))
        further = reader.latestOffset(end, ReadAllAvailable())
        reader.commit(end)  # as Spark does it, when the next batch is planned
        pieces = reader.partitions(end, further)
        # With the old one the reader was gone.
        until(lambda: api.ask("GET", "/v1/readers/anew").status == 200, "the reader comes back")
        until(lambda: held(api, "anew") == {"lease-anew": 0}, "it is at the beginning of the new one")
        assert sum(batch.num_rows for piece in pieces for batch in reader.read(piece)) == 20


def test_a_broker_that_tells_no_identities_is_taken_at_its_word(broker: BrokerProcess) -> None:
    """One of an earlier version, behind a query that has been told them by another."""
    send(broker, "lease-untold", values(9))
    for reader in a_stream(broker, subscribe="lease-untold"):
        (piece,) = reader.partitions(
            {"": {"lease-untold": "3f9a1c000002"}, "lease-untold": 5}, {"lease-untold": 9}
        )
        assert [(part.start, part.end) for part in piece.ranges] == [(5, 9)]


def test_a_stream_that_begins_at_the_end_is_asked_twice_where_that_is(broker: BrokerProcess) -> None:
    """Spark asks once to plan the first batch, and once more to run it; meanwhile messages come."""
    send(broker, "begins", values(50))
    for reader in a_stream(broker, subscribe="begins"):
        start = reader.initialOffset()
        send(broker, "begins", values(5, 50))
        end = reader.latestOffset(start, ReadAllAvailable())
        send(broker, "begins", values(5, 55))
        assert reader.initialOffset() == start == end
        assert positions_of(end) == {"begins": 50}
        assert not reader.partitions(start, end)
        assert rows(reader, end, reader.latestOffset(end, ReadAllAvailable())) == values(10, 50)
    # The driver died in its first batch: the next one begins where that ends, with nothing of the past.
    for reader in a_stream(broker, subscribe="begins"):
        assert not reader.partitions(reader.initialOffset(), end)
        assert rows(reader, end, reader.latestOffset(end, ReadAllAvailable())) == values(10, 50)


def rows(reader: StreamReader, start: dict[str, int], end: dict[str, int]) -> list[bytes]:
    """The payloads of a batch."""
    return [
        value
        for piece in reader.partitions(start, end)
        for batch in reader.read(piece)
        for value in batch.column("value").to_pylist()
    ]


def test_a_lease_is_renewed_again_whatever_has_gone_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    """Somebody in between answers something else, once."""
    monkeypatch.setattr(lease, "MOVE_SECONDS", 0.0)
    answers = iter([{"lease_seconds_left": 0.03, "queues": []}, {}])
    renewed = threading.Event()

    class Odd(Broker):
        def put(self, *segments: str, fields: dict[str, Any]) -> Any:
            answer = next(answers, None)
            if answer is None:
                renewed.set()
                return {"lease_seconds_left": 60.0, "queues": []}
            return answer

    held = lease.Lease(Odd("http://127.0.0.1:1"), "odd", "messages")
    held.hold({"orders": 3})
    assert renewed.wait(WAIT_SECONDS)
    held.end()
