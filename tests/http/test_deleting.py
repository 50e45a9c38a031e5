"""DELETE /v1/queues/{queue}, against a real broker: what is gone, and what the next queue is spared."""

import io
import json
from typing import Any

import pyarrow as pa

from tests.http.api import Api, Reply
from tests.http.conftest import StartBroker
from tests.http.morgue import phpmq, reject
from tests.http.scrape import scrape
from tests.http.test_events import Listener
from tests.http.test_idempotency import send
from tests.http.test_queues import listed, path_of
from tests.http.test_repairs import commit, stage
from tests.server.harness import (
    CONFIRM,
    RECEIVE,
    SEND,
    BrokerProcess,
    expect_dispatch,
    rq,
    sspq,
    until,
)
from tests.server.harness import (
    phpmq as phpmq_bytes,
)


def delete(api: Api, queue: str, **query: Any) -> Reply:
    return api.ask("DELETE", path_of(queue), **query)


def deleted(api: Api, queue: str, **query: Any) -> dict[str, Any]:
    if not query:
        until(lambda: not api.get(path_of(queue))["consumers"], "those who were there to be gone")
    reply = delete(api, queue, **query)
    assert reply.status == 200, reply
    return reply.json  # type: ignore[no-any-return]


def values(reply: Reply) -> list[bytes]:
    assert reply.status == 200, reply
    return pa.ipc.open_stream(io.BytesIO(reply.body)).read_all()["value"].to_pylist()  # type: ignore[no-any-return]


# --- the call ------------------------------------------------------------------------------------------


def test_a_queue_is_gone_with_all_that_is_in_it(broker: BrokerProcess, api: Api) -> None:
    reject(broker, api, "gone", [b"dead"])
    api.send("gone", b"1", b"2")
    before = api.get(path_of("gone"))
    assert deleted(api, "gone") == {
        "name": "gone",
        "identity": before["identity"],
        "ready": 2,
        "delayed": 0,
        "held": 0,
        "dead": 1,
    }
    for path in ("", "messages", "messages/0", "log", "samples", "offset?time=2030-01-01T00:00:00Z"):
        reply = api.ask("GET", f"{path_of('gone')}/{path}".rstrip("/"))
        assert (reply.status, reply.problem) == (404, "queue-not-found"), path
    assert "gone" not in listed(api)
    assert [it["name"] for it in api.get("/v1/offsets")["queues"] if it["name"] == "gone"] == []
    reply = delete(api, "gone")
    assert (reply.status, reply.problem) == (404, "queue-not-found")


def test_the_next_one_begins_at_0_under_another_identity(api: Api) -> None:
    seen: set[str] = set()
    ids: set[str] = set()
    for _ in range(4):
        assert api.send("again", b"x", b"y") == [0, 1]
        row = api.get(path_of("again"))
        assert row == row | api.get("/v1/queues", match="again")["queues"][0] | {
            field: row[field] for field in ("rate_in", "rate_out", "oldest_seconds")
        }
        seen.add(row["identity"])
        messages = api.get(path_of("again", "messages"))["messages"]
        assert all(message["id"].startswith(row["identity"]) for message in messages)
        ids.update(message["id"] for message in messages)
        (offsets,) = api.get("/v1/offsets", queues="again")["queues"]
        assert (offsets["offset_end"], offsets["identity"]) == (2, row["identity"])
        deleted(api, "again")
    assert (len(seen), len(ids)) == (4, 8)


def test_a_queue_with_consumers_is_refused_unless_it_is_forced(broker: BrokerProcess, api: Api) -> None:
    api.send("used", b"x", b"y")
    with phpmq(broker) as mq:
        (held,) = mq.consume("used", prefetch=1, count=1)
        reply = delete(api, "used")
        assert (reply.status, reply.problem) == (409, "conflict")
        assert "'used' has" in reply.json["detail"]
        assert "with force" in reply.json["detail"]
        assert api.get(path_of("used"))["offset_end"] == 2
        gone = deleted(api, "used", force=True)
        assert (gone["ready"], gone["held"]) == (1, 1)
        api.send("used", b"new")
        held.ack()  # of a message that is no more
        assert [message.body for message in mq.consume("used", count=1)] == [b"new"]
    until(lambda: api.get(path_of("used"))["ready"] == 1, "the new one to be given back")


def test_it_stays_deleted(start_broker: StartBroker) -> None:
    broker = start_broker()
    with Api(broker.ports["http"]) as api:
        api.send("orders", b"old")
        old = api.get(path_of("orders"))["identity"]
        api.send("kept", b"x")
        deleted(api, "orders")
    for end in (broker.kill, broker.stop):
        end()
        broker.start()
        with Api(broker.ports["http"]) as api:
            assert listed(api) == ["kept"]
    with Api(broker.ports["http"]) as api:
        api.send("orders", b"new")
        assert api.get(path_of("orders"))["identity"] != old
        assert values(api.ask("GET", path_of("orders", "log"))) == [b"new"]


# --- who is there, through every door ---------------------------------------------------------------------


def test_workers_of_every_wire_go_on_with_the_next_one(start_broker: StartBroker) -> None:
    broker = start_broker("--sspq-queue", "jobs")
    with (
        Api(broker.ports["http"]) as api,
        broker.wire("sspq") as one,
        broker.wire("phpmq") as two,
        broker.wire("rq") as three,
    ):
        one.say(sspq(RECEIVE))
        until(lambda: api.ask("GET", path_of("jobs")).status == 404, "nothing to be there")
        api.send("jobs", b"old 0")
        one.expect(sspq(SEND, b"old 0", 255))
        two.say(phpmq_bytes(2, (1, b"jobs"), (4, b"1")))
        until(lambda: api.get(path_of("jobs"))["consumers"] == 2, "the second consumer")
        api.send("jobs", b"old 1")
        old_id = expect_dispatch(two, b"jobs", b"old 1", None)
        three.say(rq(1, (160, b"jobs"), (98, 1), (64, 20), 20))
        three.expect(rq(1, (96, 1), (160, b"jobs"), 24))
        api.send("jobs", b"old 2")
        three.expect(rq(1, (160, b"jobs"), (224, b"old 2"), 33, (128, 0), 10))
        assert deleted(api, "jobs", force=True)["held"] == 3
        # All of them have room again. What they say of the old ones is nothing to the new ones.
        for number in range(3):
            api.send("jobs", b"new %d" % number)
        until(lambda: api.get(path_of("jobs"))["held"] == 2, "two of them to have a new one")
        two.say(phpmq_bytes(4, (1, b"jobs"), (3, old_id)))
        three.say(rq(1, (128, 0), 13))
        one.say(sspq(CONFIRM), sspq(RECEIVE))
        until(lambda: api.get(path_of("jobs"))["held"] == 3, "all of them to have a new one")
        row = api.get(path_of("jobs"))
        assert (row["ready"], row["held"], row["offset_end"]) == (0, 3, 3)
        assert api.get(path_of("jobs", "messages"), state="gone")["messages"] == []


def test_a_requester_hears_that_there_is_no_answer(broker: BrokerProcess, api: Api) -> None:
    with broker.wire("rq") as asker:
        asker.say(rq(1, (128, 9), (160, b"asked"), (224, b"?"), 10))
        until(lambda: api.ask("GET", path_of("asked")).status == 200, "the request")
        deleted(api, "asked")
        assert asker.some()  # undelivered, in the words of the protocol
    assert "Traceback" not in broker.log()


# --- who has looked before --------------------------------------------------------------------------------


def test_a_read_that_means_the_old_one_is_told(api: Api) -> None:
    api.send("read", b"old 0", b"old 1")
    old = api.get(path_of("read"))["identity"]
    for identity in (old, None):
        assert values(api.ask("GET", path_of("read", "log"), identity=identity)) == [b"old 0", b"old 1"]
    deleted(api, "read")
    reply = api.ask("GET", path_of("read", "log"), identity=old, start=1)
    assert (reply.status, reply.problem) == (404, "queue-not-found")
    api.send("read", b"new 0", b"new 1", b"new 2")
    for view in ("messages", "events", "state"):
        reply = api.ask("GET", path_of("read", "log"), identity=old, start=1, view=view)
        assert (reply.status, reply.problem) == (409, "queue-deleted"), view
        assert "'read' was deleted, and another of that name stands now" in reply.json["detail"]
    new = api.get(path_of("read"))["identity"]
    assert values(api.ask("GET", path_of("read", "log"), identity=new, start=1)) == [b"new 1", b"new 2"]
    reply = api.ask("GET", path_of("read", "log"), identity="orders")
    assert (reply.status, reply.problem) == (400, "bad-request")


def test_letters_of_the_old_one_are_not_looked_for_in_the_new_one(broker: BrokerProcess, api: Api) -> None:
    reject(broker, api, "letters", [b"old"])
    old = api.get(path_of("letters"))["identity"]
    deleted(api, "letters")
    reject(broker, api, "letters", [b"new"])
    wish: dict[str, Any] = {"ranges": [[0, 1]], "identity": old}
    reply = api.ask("POST", path_of("letters", "redrive"), wish)
    assert (reply.status, reply.problem) == (409, "queue-deleted")
    assert api.get(path_of("letters"))["dead"] == 1
    wish["identity"] = api.get(path_of("letters"))["identity"]
    assert api.post(path_of("letters", "redrive"), {**wish, "where": "value = 'old'"})["redriven"] == 0
    assert api.post(path_of("letters", "redrive"), {**wish, "where": "value = 'new'"})["redriven"] == 1


def test_a_key_that_was_used_for_the_old_one_stores_nothing_in_the_new_one(api: Api) -> None:
    assert send(api, "keyed", b"x", "key").status == 200
    deleted(api, "keyed")
    for _ in range(2):
        reply = send(api, "keyed", b"x", "key")
        assert (reply.status, reply.problem) == (409, "queue-deleted")
        assert "use a new key" in reply.json["detail"]
        api.send("keyed", b"y")
    assert [it["value_base64"] for it in api.get(path_of("keyed", "messages"))["messages"]] == ["eQ=="] * 2
    assert send(api, "keyed", b"x", "another").json["offset"] == 2


def test_a_transaction_is_not_done_again_for_the_new_one(api: Api) -> None:
    def commit(key: str, *lines: dict[str, str]) -> dict[str, Any]:
        body = "".join(json.dumps(line) + "\n" for line in lines).encode()
        headers = {"Content-Type": "application/x-ndjson"}
        stage = api.ask("POST", "/v1/stages", body, headers, transaction=key).json["stage"]
        return api.post("/v1/transactions", {"transaction": key, "stages": [stage]})  # type: ignore[no-any-return]

    lines = ({"queue": "moved.a", "value": "1"}, {"queue": "moved.b", "value": "2"})
    for key in ("spark/query/1", "mine"):
        first = commit(key, *lines)
        assert first["repeated"] is False
        deleted(api, "moved.a")
        again = commit(key, *lines)
        assert again["repeated"] is True
        assert {it["queue"]: it["offset_end"] - it["offset_start"] for it in again["stored"]} == {
            "moved.a": 0,
            "moved.b": 1,
        }
        assert api.ask("GET", path_of("moved.a")).status == 404


def test_repairs_that_were_staged_for_the_old_one_repair_nothing(broker: BrokerProcess, api: Api) -> None:
    reject(broker, api, "repaired", [b"old"])
    one, two = (
        stage(api, key, [{"offset": 0, "value": "mended"}], queue="repaired") for key in ("one", "two")
    )
    deleted(api, "repaired")
    assert commit(api, "one", one)["repeated"] is False
    assert api.ask("GET", path_of("repaired")).status == 404
    reject(broker, api, "repaired", [b"new"])
    assert commit(api, "two", two)["repeated"] is False
    (message,) = api.get(path_of("repaired", "messages"))["messages"]
    assert (message["state"], message["repaired"]) == ("dead", False)


def test_readers_that_hold_it_hold_nothing_any_more(api: Api) -> None:
    api.send("held by", b"x", b"y")
    positions = {"positions": {"held by": 1}}
    assert api.ask("PUT", "/v1/readers/nightly", positions).status == 200
    deleted(api, "held by")
    assert api.ask("GET", "/v1/readers/nightly").status == 404
    assert api.ask("PUT", "/v1/readers/nightly", positions).problem == "queue-not-found"


# --- who shows queues --------------------------------------------------------------------------------------


def test_events_tell_it(broker: BrokerProcess, api: Api) -> None:
    api.send("told", b"x", b"y")
    with Listener(broker.ports["http"]) as listener:
        listener.until("told", offset_end=2)
        deleted(api, "told")
        until(
            lambda: "told" in json.loads(next(listener.blocks()).split("data: ")[1]).get("gone", ()),
            "its end",
        )
        api.send("told", b"z")
        assert listener.until("told")["offset_end"] == 1


def test_rates_and_metrics_of_the_next_one_are_its_own(broker: BrokerProcess, api: Api) -> None:
    api.send("counted", *[b"x"] * 20)
    assert scrape(api).of_queue("penstock_messages_accepted_total", "counted") == 20
    deleted(api, "counted")
    assert "counted" not in scrape(api).labelled("queue")
    api.send("counted", b"y")
    assert scrape(api).of_queue("penstock_messages_accepted_total", "counted") == 1
    assert api.get(path_of("counted"))["rate_in"] >= 0
    samples = api.get(path_of("counted", "samples"))["samples"]
    assert all(sample["accepted"] >= 0 for sample in samples)


# --- expire-seconds --------------------------------------------------------------------------------------


def test_a_queue_that_nobody_uses_is_deleted(start_broker: StartBroker) -> None:
    config = '[queue."reply.*"]\nexpire-seconds = 1\n'
    broker = start_broker(config=config)
    with Api(broker.ports["http"]) as api, phpmq(broker) as mq:
        for queue in ("reply.a", "reply.full", "kept"):
            api.send(queue, b"x")
        assert api.get(path_of("reply.a"))["policy"]["expire_seconds"] == 1
        assert api.get(path_of("kept"))["policy"]["expire_seconds"] == 0
        for queue in ("reply.a", "kept"):
            next(iter(mq.consume(queue, count=1))).ack()
        mq.close()
        until(lambda: listed(api) == ["kept", "reply.full"], "the empty one to be deleted")
        assert "reply.a" in broker.log()
        assert api.send("reply.a", b"y") == [0]
