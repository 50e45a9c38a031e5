"""Stages over HTTP: what is staged is in the log before it is confirmed, and nobody sees it there."""

import json

import pytest

from penstock.cli.main import main
from penstock.log.reader import LogReader
from tests.http.api import ARROW, NDJSON, Api, Reply
from tests.http.conftest import StartBroker
from tests.server.harness import BrokerProcess, until


def lines(*messages: dict[str, object]) -> bytes:
    return b"".join(json.dumps(message).encode() + b"\n" for message in messages)


def stage(api: Api, key: str, body: bytes, media: str = NDJSON, **query: object) -> Reply:
    return api.ask("POST", "/v1/stages", body, {"Content-Type": media}, transaction=key, **query)


def test_nobody_sees_what_is_staged(api: Api, broker: BrokerProcess) -> None:
    reply = stage(api, "unseen", lines({"value": "é"}, {"value_base64": "AAE="}), queue="unseen")
    assert reply.status == 200, reply
    assert {**reply.json, "stage": ""} == {"stage": "", "count": 2, "bytes": 4}
    assert api.ask("GET", "/v1/queues/unseen").problem == "queue-not-found"
    assert api.get("/v1/transactions/unseen") == {
        "transaction": "unseen",
        "state": "open",
        "committing": False,
        "stages": [reply.json],
        "stored": [],
    }
    # It is in the log before the answer is, and whoever reads that does not see it either.
    with LogReader(str(broker.folder / "data")) as reader:
        assert "unseen" not in reader.queues()
    assert not any("unseen" in it["name"] for it in api.get("/v1/queues")["queues"])


def test_messages_name_their_queues_where_the_address_does_not(api: Api) -> None:
    body = lines(
        {"value": "1", "queue": "stage-a"},
        {"value": "2", "queue": "stage-b/c", "ttl": 100, "retries": 3},
        {"value": "3", "queue": "stage-a"},
    )
    first = stage(api, "queues", body).json["stage"]
    stored = api.post("/v1/transactions", {"transaction": "queues", "stages": [first]})["stored"]
    assert stored == [
        {"queue": "stage-a", "offset_start": 0, "offset_end": 2},
        {"queue": "stage-b/c", "offset_start": 0, "offset_end": 1},
    ]
    (message,) = api.get("/v1/queues/stage-b%2Fc/messages")["messages"]
    assert (message["ttl"], message["retries"], message["protocol"]) == (100, 3, "http")


def test_arrow_is_staged_too(api: Api) -> None:
    pa = pytest.importorskip("pyarrow")
    table = pa.table({"value": [b"one", b"two"], "queue": ["arrow-a", "arrow-b"], "ttl": [None, 9]})
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    reply = stage(api, "arrow", sink.getvalue().to_pybytes(), ARROW)
    assert reply.json["count"] == 2
    api.post("/v1/transactions", {"transaction": "arrow", "stages": [reply.json["stage"]]})
    (message,) = api.get("/v1/queues/arrow-b/messages")["messages"]
    assert (message["value_base64"], message["ttl"]) == ("dHdv", 9)


@pytest.mark.parametrize(
    ("body", "query", "words"),
    [
        (b"", {"queue": "q"}, "no message"),
        (lines({"value": "x"}), {}, "queue"),
        (lines({"value": "x", "queue": "q"}), {"queue": "q"}, "line 1"),
        (lines({"value": "x", "queue": "q.dead"}), {}, "dead letters"),
        (lines({"value": "x"}), {"queue": "q.dead"}, "dead letters"),
        (lines({"value": "x"}), {"queue": "q" * 256}, "bytes"),
        (lines({"value": "x"}), {"queue": "q", "transaction": ""}, "printable"),
        (lines({"value": "x"}), {"queue": "q", "transaction": "k" * 201}, "printable"),
        (lines({"value": "x"}), {"queue": "q", "transaction": "ü"}, "printable"),
        (lines({"value": "x"}), {"queue": "q", "transaction": None}, "missing"),
    ],
)
def test_what_cannot_be_staged(api: Api, body: bytes, query: dict[str, object], words: str) -> None:
    words_sent = {"transaction": "wrong", **query}
    reply = api.ask("POST", "/v1/stages", body, {"Content-Type": NDJSON}, **words_sent)
    assert reply.problem == "bad-request"
    assert words in reply.json["detail"]
    assert api.ask("GET", "/v1/transactions/wrong").problem == "transaction-not-found"


def test_a_body_of_another_kind_is_refused(api: Api) -> None:
    assert stage(api, "kind", b"x", "text/plain", queue="q").problem == "unsupported-media-type"


def test_bounds_of_a_body_and_of_all_stages(start_broker: StartBroker) -> None:
    broker = start_broker("--http-stages-bytes-max", "4000", "--http-body-bytes-max", "3000")
    with Api(broker.ports["http"]) as api:
        first = stage(api, "a", lines({"value": "x" * 2000}), queue="q")
        assert first.status == 200
        full = stage(api, "b", lines({"value": "x" * 2000}), queue="q")
        assert full.problem == "disk-full"
        assert "stages-bytes-max" in full.json["detail"]
        # A commit and an abort make room again.
        api.post("/v1/transactions", {"transaction": "a", "stages": [first.json["stage"]]})
        assert stage(api, "b", lines({"value": "x" * 2000}), queue="q").status == 200
        assert api.ask("DELETE", "/v1/transactions/b").json["state"] == "aborted"
        assert stage(api, "c", lines({"value": "x" * 2000}), queue="q").status == 200
    with Api(broker.ports["http"]) as api:
        assert stage(api, "d", lines({"value": "x" * 3000}), queue="q").problem == "body-too-large"


def test_queues_that_there_may_not_be_are_refused_at_once(start_broker: StartBroker) -> None:
    broker = start_broker("--limits-queues-max", "1")
    with Api(broker.ports["http"]) as api:
        api.send("there", b"x")
        assert stage(api, "a", lines({"value": "x"}), queue="there").status == 200
        refused = stage(api, "a", lines({"value": "x"}), queue="one-too-many")
        assert (refused.problem, "queues-max" in refused.json["detail"]) == ("conflict", True)
        told = api.get("/openapi.json")["paths"]["/v1/stages"]["post"]["responses"]
        assert "(conflict)" in told[str(refused.status)]["description"]


def test_the_bound_counts_what_was_there_before_a_restart(start_broker: StartBroker) -> None:
    broker = start_broker("--http-stages-bytes-max", "4000")
    with Api(broker.ports["http"]) as api:
        assert stage(api, "a", lines({"value": "x" * 2000}), queue="q").status == 200
    broker.kill()
    broker.start()
    with Api(broker.ports["http"]) as api:
        assert stage(api, "b", lines({"value": "x" * 2000}), queue="q").problem == "disk-full"


def test_orphans_expire(start_broker: StartBroker) -> None:
    broker = start_broker("--http-stage-seconds", "1")
    with Api(broker.ports["http"]) as api:
        orphan = stage(api, "orphan", lines({"value": "x"}), queue="q").json["stage"]
        assert api.get("/v1/engine")["stages"]["count"] == 1
        until(lambda: api.ask("GET", "/v1/transactions/orphan").status == 404, "the orphan to be removed")
        assert api.get("/v1/engine")["stages"] == {"count": 0, "bytes": 0, "oldest_seconds": None}
        gone = api.ask("POST", "/v1/transactions", {"transaction": "orphan", "stages": [orphan]})
        assert gone.problem == "stage-not-found"
    assert "transaction 'orphan' was not committed for" in broker.log()
    assert "its 1 stages are removed" in broker.log()


def test_what_is_too_old_at_the_start_goes_and_what_is_young_enough_stays(start_broker: StartBroker) -> None:
    broker = start_broker()
    with Api(broker.ports["http"]) as api:
        stage(api, "key", lines({"value": "x"}), queue="q")
    broker.kill()
    broker.start()
    with Api(broker.ports["http"]) as api:
        assert len(api.get("/v1/transactions/key")["stages"]) == 1
    broker.kill()
    broker.flags = (*broker.flags, "--http-stage-seconds", "1")
    broker.start()
    with Api(broker.ports["http"]) as api:
        until(lambda: api.ask("GET", "/v1/transactions/key").status == 404, "the stage to be removed")
    assert "transaction 'key' was not committed for" in broker.log()


def test_how_much_is_staged_is_shown(api: Api) -> None:
    before = api.get("/v1/engine")["stages"]
    stage(api, "shown", lines({"value": "x" * 5000}), queue="q")
    shown = api.get("/v1/engine")["stages"]
    assert shown["count"] == before["count"] + 1
    assert 5000 < shown["bytes"] - before["bytes"] < 6000
    assert 0 <= shown["oldest_seconds"] < 3600
    metrics = dict(
        line.rpartition(" ")[::2] for line in api.ask("GET", "/metrics").body.decode().splitlines()
    )
    assert float(metrics["penstock_stages"]) == shown["count"]
    assert float(metrics["penstock_stages_bytes"]) == shown["bytes"]
    assert float(metrics["penstock_stages_oldest_seconds"]) >= shown["oldest_seconds"]
    api.ask("DELETE", "/v1/transactions/shown")
    assert api.get("/v1/engine")["stages"]["count"] == before["count"]


def test_readers_and_tools_do_not_mind_what_is_staged(
    start_broker: StartBroker, capsys: pytest.CaptureFixture[str]
) -> None:
    broker = start_broker()
    with Api(broker.ports["http"]) as api:
        api.send("orders", b"one", b"two")
        stage(api, "open", lines({"value": "x"}), queue="orders")
        assert [m["offset"] for m in api.get("/v1/queues/orders/messages")["messages"]] == [0, 1]
        assert api.get("/v1/engine")["damage"] == []
    data = broker.folder / "data"
    for stopped in (False, True):
        if stopped:
            assert broker.stop() == 0
            (data / "watermark").unlink()  # a reader has to look at all files now
        assert main(["verify", str(data)]) == 0
        with LogReader(str(data)) as reader:
            assert reader.queues()["orders"].offset_end == 2
    assert main(["dump", str(data)]) == 0
    assert not (data / "stages").exists()
    broker.start()
    with Api(broker.ports["http"]) as api:
        assert len(api.get("/v1/transactions/open")["stages"]) == 1
