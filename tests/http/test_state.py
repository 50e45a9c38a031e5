"""The broker as a whole over HTTP: alive, ready, engine, connections; with disks and processes that fail."""

import shutil
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema_rs
import pytest

from penstock import __version__
from penstock.client import PhpmqClient, RqClient, SspqClient
from tests.http.api import Api
from tests.http.conftest import StartBroker
from tests.http.disks import SmallDisk, broker_on_small_disk, damage
from tests.http.scrape import scrape
from tests.server.harness import BrokerProcess, phpmq, rq, until


def promised(api: Api, path: str) -> dict[str, Any]:
    """The schema of an answer, from the document that the broker serves."""
    document = api.get("/openapi.json")
    (content,) = document["paths"][path]["get"]["responses"]["200"]["content"].values()
    return {**content["schema"], "components": document["components"]}


# --- Alive and ready ---


def test_alive_and_ready(api: Api) -> None:
    assert api.get("/healthz") == {"status": "ok"}
    assert api.get("/readyz") == {"ready": True}


def test_the_first_page_says_where_to_look(api: Api) -> None:
    reply = api.ask("GET", "/")
    assert reply.status == 200
    assert reply.headers["content-type"] == "text/plain; charset=utf-8"
    (line,) = reply.body.decode().splitlines()
    assert __version__ in line
    assert "/openapi.json" in line


@pytest.mark.parametrize("path", ["/", "/healthz", "/readyz", "/metrics", "/v1/engine", "/v1/connections"])
def test_heads_have_no_body(api: Api, path: str) -> None:
    reply = api.ask("HEAD", path)
    assert reply.status == 200
    assert reply.body == b""


def test_nobody_needs_a_token_to_ask_for_health(start_broker: StartBroker, tmp_path: Path) -> None:
    config = tmp_path / "penstock.toml"
    config.write_text('[[http.tokens]]\nname = "p"\nrole = "read"\ntoken = "prometheus-0123456789"\n')
    broker = start_broker("--config", str(config))
    with Api(broker.ports["http"]) as anyone:
        for path in ("/", "/healthz", "/readyz", "/openapi.json"):
            assert anyone.ask("GET", path).status == 200
        for path in ("/metrics", "/v1/engine", "/v1/connections", "/v1/events"):
            reply = anyone.ask("GET", path)
            assert (reply.status, reply.problem) == (401, "unauthorized")
    with Api(broker.ports["http"], "prometheus-0123456789") as api:
        for path in ("/metrics", "/v1/engine", "/v1/connections"):
            assert api.ask("GET", path).status == 200


def test_a_broker_that_does_not_answer_is_alive_but_not_ready(start_broker: StartBroker) -> None:
    broker = start_broker()
    with Api(broker.ports["http"]) as api:
        assert api.get("/readyz") == {"ready": True}
        broker.signal(signal.SIGSTOP)
        try:
            began = time.monotonic()
            reply = api.ask("GET", "/readyz")
            took = time.monotonic() - began
            assert (reply.status, reply.problem) == (503, "unavailable")
            assert "not answered" in reply.json["detail"]
            assert reply.headers["retry-after"] == "1"
            assert 1.5 < took < 10
            assert api.get("/healthz") == {"status": "ok"}
        finally:
            broker.signal(signal.SIGCONT)
        until(lambda: api.ask("GET", "/readyz").status == 200, "the broker to be ready again")


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[SmallDisk]:
    with broker_on_small_disk(tmp_path) as broker:
        yield broker


def test_a_full_disk_is_not_ready_until_there_is_room(small_disk: SmallDisk) -> None:
    with (
        Api(small_disk.ports["http"]) as api,
        PhpmqClient(f"phpmq://127.0.0.1:{small_disk.ports['phpmq']}") as mq,
    ):
        api.send("orders", b"x")
        small_disk.fill()
        # More than the segment that is there holds, less than sockets take in while nobody reads.
        for _ in range(16):
            mq.send("orders", bytes(100_000))
        until(lambda: api.ask("GET", "/readyz").status == 503, "the disk to be full")
        reply = api.ask("GET", "/readyz")
        assert reply.problem == "unavailable"
        assert "disk" in reply.json["detail"]
        engine = api.get("/v1/engine")
        assert engine["full"] is True
        assert engine["failed"] is None
        mq.send("orders", b"waits")
        until(
            lambda: any(it["held_back"] for it in api.get("/v1/connections")["connections"]),
            "the sender to be held back",
        )
        assert api.get("/healthz") == {"status": "ok"}
        until(lambda: "the disk is full" in small_disk.log(), "a line in the log")
        assert "there is room" not in small_disk.log()
        small_disk.ballast.unlink()
        until(lambda: api.ask("GET", "/readyz").status == 200, "room to be found")
        until(lambda: api.get("/v1/queues/orders")["ready"] == 18, "what waited to be taken in")
    until(lambda: "there is room on the disk again" in small_disk.log(), "the line that it is over")
    assert small_disk.log().count("the disk is full") == 1


def test_a_disk_that_is_almost_full_is_ready_and_warns(small_disk: SmallDisk) -> None:
    with Api(small_disk.ports["http"]) as api:
        assert api.get("/readyz") == {"ready": True}
        engine = api.get("/v1/engine")
        assert engine["disk_bytes_reserve"] == engine["disk_bytes_total"] // 4
        assert scrape(api)["penstock_disk_low", {}] == 0
        # Room for more than two segments, and for less than the reserve.
        small_disk.ballast.write_bytes(bytes(engine["disk_bytes_free"] - (7 << 19)))
        assert api.get("/readyz") == {"ready": True, "warnings": ["disk"]}
        assert api.get("/v1/engine")["full"] is False
        assert scrape(api)["penstock_disk_low", {}] == 1
        until(lambda: "the disk is almost full" in small_disk.log(), "a line in the log")
        api.send("orders", b"x")
        small_disk.ballast.unlink()
        assert api.get("/readyz") == {"ready": True}
        until(lambda: "there is enough room on the disk again" in small_disk.log(), "the line that it ends")
    assert small_disk.log().count("the disk is almost full") == 1
    assert "the disk is full" not in small_disk.log()


def test_who_asks_over_rq_while_the_disk_is_full_is_told_when_its_time_is_over(small_disk: SmallDisk) -> None:
    with Api(small_disk.ports["http"]) as api, small_disk.wire("rq") as asking:
        assert api.get("/readyz") == {"ready": True}
        small_disk.fill()
        with small_disk.wire("phpmq") as sender:
            for _ in range(16):
                sender.say(phpmq(1, (1, b"orders"), (2, bytes(100_000))))
            until(lambda: api.ask("GET", "/readyz").status == 503, "the disk to be full")
            asking.say(rq(1, (128, 7), (160, b"orders"), (97, 1), (224, b"for a second"), 10))
            asking.expect(rq(1, (128, 7), 16))  # UNDELIVERED
            small_disk.ballast.unlink()
            asking.say(rq(1, (128, 8), (160, b"orders"), (224, b"stored"), 33, 10))
            asking.expect(rq(1, (128, 8), 13))  # DELIVERED
        assert api.get("/v1/queues/orders")["ready"] == 17
    assert "undelivered: there was no room on the disk for 1 s" in small_disk.log()


# --- The engine ---


def test_the_engine(broker: BrokerProcess, api: Api) -> None:
    before = api.get("/v1/engine")
    jsonschema_rs.validate(promised(api, "/v1/engine"), before)
    api.send("engine", b"x" * 10_000)
    after = api.get("/v1/engine")
    assert after["engine"] == "log"
    assert after["data"] == str(broker.folder / "data")
    assert after["opening"] == 1
    assert after["position"] > before["position"] + 10_000
    assert after["segments"] >= 1
    assert after["log_bytes"] > 0
    room = shutil.disk_usage(broker.folder)
    assert after["disk_bytes_total"] == pytest.approx(room.total, rel=0.1)
    assert after["disk_bytes_free"] == pytest.approx(room.free, rel=0.2)
    assert (after["full"], after["failed"], after["damage"]) == (False, None, [])
    assert after["sync"]["count"] > before["sync"]["count"]
    assert after["sync"]["seconds_sum"] > before["sync"]["seconds_sum"]
    assert 0 < after["sync"]["last_seconds"] < 10
    assert 0 < after["sync"]["p50_seconds"] <= after["sync"]["p99_seconds"] < 10
    buckets = after["sync"]["buckets"]
    assert sum(it["count"] for it in buckets) == after["sync"]["count"]
    bounds = [it["seconds_max"] for it in buckets]
    assert bounds[-1] is None
    assert bounds[:-1] == sorted(bounds[:-1])
    assert after["durability"] == "commit"
    assert after["readers"] == 0
    assert after["version"] == __version__
    assert after["uptime_seconds"] > before["uptime_seconds"] > 0


def test_damage_is_told(start_broker: StartBroker) -> None:
    broker = start_broker()
    segment = damage(broker, "hurt")
    with Api(broker.ports["http"]) as api:
        bytes_told, offsets_told = api.get("/v1/engine")["damage"]
        assert segment.name in bytes_told
        assert "'hurt'" in offsets_told
        assert api.get("/readyz") == {"ready": True}


# --- Connections ---


def test_connections(start_broker: StartBroker) -> None:
    broker = start_broker()
    hosts = {name: f"{name}://127.0.0.1:{broker.ports[name]}" for name in ("phpmq", "sspq", "rq")}
    with Api(broker.ports["http"]) as api:
        assert api.get("/v1/connections") == {"connections": []}
        api.send("work", *[b"x"] * 5)
        with (
            PhpmqClient(hosts["phpmq"]) as mq,
            SspqClient(hosts["sspq"]) as sspq,
            RqClient(hosts["rq"]) as rq,
        ):
            held = list(mq.consume("work", prefetch=3, count=3))
            for dead in mq.consume("work.dead", timeout=0.1):
                pytest.fail(f"nothing is dead: {dead}")
            sspq.send(b"x")
            sspq.flush()
            rq.serve("ask", lambda request: request.body).wait_turn(timeout=10)
            until(lambda: len(api.get("/v1/connections")["connections"]) == 3, "three connections")
            answer = api.get("/v1/connections")
            jsonschema_rs.validate(promised(api, "/v1/connections"), answer)
            found = {it["protocol"]: it for it in answer["connections"]}
            assert set(found) == {"phpmq", "sspq", "rq"}
            for protocol, it in found.items():
                assert it["name"].startswith(f"{protocol}:127.0.0.1:")
                assert it["peer"].startswith("127.0.0.1:")
                assert it["peer"] in it["name"]
                assert 0 <= it["connected_seconds"] < 20
                assert (it["blocked"], it["held_back"]) == (False, False)
            assert found["phpmq"]["held"] == 3
            assert {"queue": "work", "dead": True} in found["phpmq"]["consumes"]
            assert found["rq"]["consumes"] == [{"queue": "ask", "dead": False}]
            assert found["sspq"]["consumes"] == []
            mq.ack_many(held)
        until(lambda: api.get("/v1/connections") == {"connections": []}, "all of them to be gone")


def test_hundreds_of_connections_are_all_listed(start_broker: StartBroker) -> None:
    broker = start_broker()
    with Api(broker.ports["http"]) as api:
        wires = [broker.wire("phpmq") for _ in range(600)]
        try:
            until(lambda: len(api.get("/v1/connections")["connections"]) == 600, "all of them")
            names = {it["name"] for it in api.get("/v1/connections")["connections"]}
            assert len(names) == 600
        finally:
            for wire in wires:
                wire.close()


def test_who_does_not_read_is_blocked(start_broker: StartBroker) -> None:
    broker = start_broker()
    with Api(broker.ports["http"]) as api, broker.wire("phpmq") as wire:
        with PhpmqClient(f"phpmq://127.0.0.1:{broker.ports['phpmq']}") as mq:
            mq.send_many("big", [bytes(1_000_000)] * 40)
        wire.say(phpmq(2, (1, b"big"), (4, b"100")))  # It asks for a hundred, and reads nothing.
        until(
            lambda: any(it["blocked"] for it in api.get("/v1/connections")["connections"]),
            "the connection to be blocked",
        )
