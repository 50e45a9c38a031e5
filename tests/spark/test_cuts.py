"""Ranges by their bytes: what a task and a trigger read, as the broker weighs it."""

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import pairwise

import pytest

from penstock.spark.api import Broker
from penstock.spark.cuts import cut, within_bytes
from penstock.spark.splits import Range
from tests.server.harness import BrokerProcess
from tests.spark.rig import send, url_of

KIB = 1024


@pytest.fixture
def asking(broker: BrokerProcess) -> Iterator[Broker]:
    asking = Broker(url_of(broker))
    yield asking
    asking.close()


def spread(pieces: list[Range]) -> list[tuple[str, int, int, int]]:
    return [(piece.queue, piece.start, piece.end, piece.bytes) for piece in pieces]


def test_pieces_have_so_many_bytes(broker: BrokerProcess, asking: Broker) -> None:
    for _ in range(8):
        send(broker, "cuts.large", [b"x" * KIB] * 8)
    send(broker, "cuts.small", [b"x"] * 5)
    send(broker, "cuts.huge", [b"x" * (256 * KIB)] * 3)
    ranges = [
        Range("cuts.large", 0, 64, "large"),
        Range("cuts.none", 0, 5),
        Range("cuts.small", 1, 5),
        Range("cuts.huge", 0, 3),
        Range("cuts.small", 3, 3),
    ]
    pieces = cut(asking, ranges, 24 * KIB)
    assert spread(pieces) == [
        ("cuts.large", 0, 24, 24 * KIB),
        ("cuts.large", 24, 48, 24 * KIB),
        ("cuts.large", 48, 64, 16 * KIB),
        ("cuts.none", 0, 5, 0),
        ("cuts.small", 1, 5, 4),
        *(("cuts.huge", at, at + 1, 256 * KIB) for at in range(3)),
    ]
    assert {piece.identity for piece in pieces[:3]} == {"large"}
    assert cut(asking, [], 1) == []


def test_more_pieces_than_one_answer_has(broker: BrokerProcess, asking: Broker) -> None:
    send(broker, "cuts.many", [b"xx"] * 2500)
    pieces = cut(asking, [Range("cuts.many", 0, 2500), Range("cuts.gone", 0, 9)], 2)
    assert len(pieces) == 2501
    assert all(before.end == after.start for before, after in pairwise(pieces[:-1]))
    assert pieces[-1] == Range("cuts.gone", 0, 9)


def test_more_ranges_than_one_request_has(broker: BrokerProcess, asking: Broker) -> None:
    send(broker, "cuts.ranges", [b"x" * 10] * 2500)
    ranges = [Range("cuts.ranges", at, at + 1) for at in range(2500)]
    assert cut(asking, ranges, 100) == [whole._replace(bytes=10) for whole in ranges]


def test_a_limit_is_shared_by_bytes(broker: BrokerProcess, asking: Broker) -> None:
    for _ in range(10):
        send(broker, "cuts.heavy", [b"x" * 1000] * 9)
        send(broker, "cuts.light", [b"x" * 10] * 100)
    ranges = [Range("cuts.heavy", 0, 90), Range("cuts.light", 0, 1000)]
    assert within_bytes(asking, ranges, 100_000) == {"cuts.heavy": 90, "cuts.light": 1000}
    assert within_bytes(asking, ranges, 10_000) == {"cuts.heavy": 9, "cuts.light": 100}
    # Everybody gets on, however small the limit is.
    assert within_bytes(asking, ranges, 1) == {"cuts.heavy": 1, "cuts.light": 1}
    assert within_bytes(asking, [Range("cuts.gone", 0, 9)], 1) == {"cuts.gone": 9}


class Earlier(BaseHTTPRequestHandler):
    """A broker that does not know the call."""

    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        body = json.dumps({"type": "urn:penstock:not-found", "detail": "there is nothing here"}).encode()
        self.send_response(404)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args: object) -> None:
        pass


def test_a_broker_of_an_earlier_version_weighs_nothing() -> None:
    with ThreadingHTTPServer(("127.0.0.1", 0), Earlier) as server:
        serving = threading.Thread(target=server.serve_forever)
        serving.start()
        asking = Broker(f"http://127.0.0.1:{server.server_port}")
        try:
            ranges = [Range("a", 0, 5), Range("b", 7, 9)]
            assert cut(asking, ranges, 1) == ranges
            assert within_bytes(asking, ranges, 1) == {"a": 5, "b": 2}
        finally:
            asking.close()
            server.shutdown()
            serving.join()
