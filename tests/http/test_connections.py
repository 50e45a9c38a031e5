"""Connections over HTTP: what each sends, takes and holds, what passes in a second, and ending one."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jsonschema_rs
import pytest

from penstock.client import PhpmqClient
from penstock.http.watching import rates
from penstock.http.watching.rates import Rates
from tests.http.api import Api
from tests.http.test_rights import as_user, guarded
from tests.http.test_state import promised
from tests.server.harness import WAIT_SECONDS, BrokerProcess, Wire, phpmq, rq, sspq, until

__all__ = ["guarded"]

CONSUME, QUEUE, MAX, CLEAR, CLOSING = 20, 160, 98, 1, 22
RECEIVE, NO_RECEIVE = 0xEC, 0x0E

Row = dict[str, Any]


def rows(api: Api) -> list[Row]:
    found: list[Row] = api.get("/v1/connections")["connections"]
    return found


def row_of(api: Api, socket: Any) -> Row:
    """The row of a connection of this test, as soon as there is one."""
    host, port, *_ = socket.getsockname()
    found: list[Row] = []

    def is_there() -> bool:
        found[:] = [it for it in rows(api) if it["peer"] == f"{host}:{port}"]
        return len(found) == 1

    until(is_there, "the connection to be listed")
    return found[0]


def one(api: Api, number: int) -> Row:
    found: Row = api.get(f"/v1/connections/{number}")
    return found


def taken_of(it: Row, queue: str) -> Row:
    """What a connection takes of the messages of a queue."""
    taken: list[Row] = [it for it in it["takes"] if (it["queue"], it["dead"]) == (queue, False)]
    (found,) = taken
    return found


@pytest.fixture
def wire(broker: BrokerProcess) -> Iterator[Wire]:
    with Wire(("127.0.0.1", broker.ports["phpmq"])) as wire:
        yield wire


def test_a_sender_is_seen_with_its_queues(broker: BrokerProcess, api: Api, wire: Wire) -> None:
    for queue, count in ((b"seen.a", 3), (b"seen.b", 5)):
        for _ in range(count):
            wire.say(phpmq(1, (1, queue), (2, b"x" * 10)))
    until(lambda: row_of(api, wire.socket)["sent"] == 8, "all of it to be read")
    row = row_of(api, wire.socket)
    assert row["sends"] == [{"queue": "seen.b", "count": 5}, {"queue": "seen.a", "count": 3}]
    assert (row["said"], row["protocol"], row["delivered"], row["held"]) == ("publish", "phpmq", 0, 0)
    assert 0 <= row["said_seconds"] < WAIT_SECONDS
    assert row["client"] == row["peer"]
    found = one(api, row["number"])
    jsonschema_rs.validate(promised(api, "/v1/connections/{number}"), found)
    assert found["bytes_in"] > 80
    assert (found["bytes_out"], found["input_bytes"], found["output_bytes"]) == (0, 0, 0)
    assert found["listener"].startswith("127.0.0.1:")
    assert (found["blocked_seconds"], found["held_back_seconds"], found["pulse"]) == (None, None, None)
    assert found["takes"] == []


def test_an_unfinished_message_is_seen(api: Api, wire: Wire) -> None:
    wire.say(phpmq(1, (1, b"part"), (2, b"x" * 1000))[:500])
    until(lambda: one(api, row_of(api, wire.socket)["number"])["input_bytes"] > 0, "the first half")


def test_a_consumer_is_seen_with_what_it_holds(api: Api, wire: Wire) -> None:
    api.send("held", *[b"x"] * 5)
    wire.say(phpmq(2, (1, b"held"), (4, b"3")))
    until(lambda: row_of(api, wire.socket)["held"] == 3, "it to be full")
    found = one(api, row_of(api, wire.socket)["number"])
    taken = taken_of(found, "held")
    assert (taken["window"], taken["active"], taken["held"]) == (3, True, 3)
    assert (taken["delivered"], taken["settled"]) == (3, 0)
    assert sum(it["end"] - it["first"] for it in taken["messages"]) == 3
    assert taken["messages"][0]["first"] == 0
    assert 0 <= taken["held_seconds"] < WAIT_SECONDS
    assert found["bytes_out"] > 0


def test_rates_come_from_two_looks(api: Api, wire: Wire) -> None:
    wire.say(phpmq(1, (1, b"rated"), (2, b"x")))
    until(lambda: row_of(api, wire.socket)["sent"] == 1, "the first")
    number = row_of(api, wire.socket)["number"]
    until(lambda: one(api, number)["sent_rate"] == 0, "a second look")
    until(lambda: row_of(api, wire.socket)["sent_rate"] == 0, "a second look at the list")

    def grows() -> bool:
        wire.say(phpmq(1, (1, b"rated"), (2, b"x")))
        found = one(api, number)
        return bool(found["sent_rate"] and found["sends"][0]["rate"] == found["sent_rate"])

    until(grows, "what is sent in a second")
    until(lambda: bool(row_of(api, wire.socket)["sent_rate"]), "the same in the list")


def test_rates_are_bounded_and_forget(monkeypatch: pytest.MonkeyPatch) -> None:
    known = Rates()
    assert known.of("a", 10.0, {"n": 5}) is None
    assert known.of("a", 10.5, {"n": 50}) is None, "too close to say anything"
    assert known.of("a", 12.0, {"n": 9}) == {"n": 2.0}
    assert known.of("a", 12.5, {"n": 15}) == {"n": 4.0}, "still from the look before"
    assert known.of("a", 14.0, {"n": 9, "new": 4}) == {"n": 0.0, "new": 2.0}
    assert known.of("a", 14.0 + rates.OLD_SECONDS + 1, {"n": 9}) is None
    monkeypatch.setattr(rates, "LOOKS_MAX", 2)
    for key in ("b", "c"):
        known.of(key, 100.0, {"n": 0})
    assert known.of("a", 102.0, {"n": 0}) is None, "it made room"
    assert known.of("c", 102.0, {"n": 4}) == {"n": 2.0}


def test_many_queues_of_one_sender_are_counted_together(api: Api, wire: Wire) -> None:
    for at in range(150):
        wire.say(phpmq(1, (1, b"many.%d" % at), (2, b"x")))
    until(lambda: row_of(api, wire.socket)["sent"] == 150, "all of them")
    row = row_of(api, wire.socket)
    assert len(row["sends"]) == 5
    found = one(api, row["number"])
    assert len(found["sends"]) == 100
    assert found["sent"] == 150


# --- ending ---


def test_what_a_connection_held_goes_back_and_counts(api: Api, wire: Wire) -> None:
    api.send("back", b"x")
    wire.say(phpmq(2, (1, b"back"), (4, b"3")))
    until(lambda: row_of(api, wire.socket)["held"] == 1, "it to hold one")
    row = row_of(api, wire.socket)
    reply = api.ask("DELETE", f"/v1/connections/{row['number']}", name="somebody else")
    assert (reply.status, reply.problem) == (409, "conflict")
    reply = api.ask("DELETE", f"/v1/connections/{row['number']}", name=row["name"])
    assert (reply.status, reply.json) == (200, {"number": row["number"], "name": row["name"], "held": 1})
    while wire.some():
        pass
    for method in ("GET", "DELETE"):
        gone = api.ask(method, f"/v1/connections/{row['number']}")
        assert (gone.status, gone.problem) == (404, "connection-not-found")
    (message,) = api.post("/v1/queues/back/take", wait=WAIT_SECONDS)["messages"]
    assert message["attempts"] == 2
    events = api.get("/v1/queues/back/messages/0")["history"]
    assert [(it["event"], it["reason"]) for it in events][:2] == [
        ("accepted", None),
        ("returned", "consumer-lost"),
    ]


def test_a_number_is_never_used_again(broker: BrokerProcess, api: Api) -> None:
    seen = set()
    for _ in range(3):
        with Wire(("127.0.0.1", broker.ports["phpmq"])) as wire:
            number = row_of(api, wire.socket)["number"]
            assert number not in seen
            seen.add(number)
            assert api.ask("DELETE", f"/v1/connections/{number}").status == 200
            assert wire.is_closed()


def test_a_node_is_told(broker: BrokerProcess, api: Api) -> None:
    with Wire(("127.0.0.1", broker.ports["rq"])) as wire:
        wire.say(rq(CLEAR, (QUEUE, b"told"), (MAX, 5), CONSUME))
        until(lambda: bool(row_of(api, wire.socket)["consumes"]), "it to consume")
        wire.some()  # CONSUMING
        row = row_of(api, wire.socket)
        assert one(api, row["number"])["pulse"] == "awake"
        assert api.ask("DELETE", f"/v1/connections/{row['number']}").status == 200
        heard = b""
        while more := wire.some():
            heard += more
        assert heard == bytes((CLEAR, CLOSING))


def test_who_waits_over_sspq_is_told(broker: BrokerProcess, api: Api) -> None:
    with Wire(("127.0.0.1", broker.ports["sspq"])) as wire:
        wire.say(sspq(RECEIVE))
        until(lambda: bool(row_of(api, wire.socket)["consumes"]), "it to wait")
        assert api.ask("DELETE", f"/v1/connections/{row_of(api, wire.socket)['number']}").status == 200
        wire.expect(sspq(NO_RECEIVE))
        assert wire.is_closed()


def test_a_caller_over_http_loses_its_leases(broker: BrokerProcess, api: Api) -> None:
    api.send("leased", b"a", b"b")
    with Api(broker.ports["http"]) as worker:
        agent = {"User-Agent": "billing/3.1"}
        taken = worker.ask("POST", "/v1/queues/leased/take", headers=agent, max=2, lease=600).json["messages"]
        (row,) = [it for it in rows(api) if it["client"] == "billing/3.1"]
        assert (row["protocol"], row["held"]) == ("http", 2)
        found = one(api, row["number"])
        assert taken_of(found, "leased")["held"] == 2
        assert taken_of(found, "leased")["window"] is None
        reply = api.ask("DELETE", f"/v1/connections/{row['number']}")
        assert (reply.status, reply.json["held"]) == (200, 2)
        assert api.ask("GET", f"/v1/connections/{row['number']}").status == 404
        late = worker.post("/v1/queues/leased/settle", {"ack": [it["id"] for it in taken]})
        assert (late["ack"], sorted(late["gone"])) == (0, sorted(it["id"] for it in taken))
        again = worker.ask("POST", "/v1/queues/leased/take", headers=agent, max=2).json["messages"]
        assert [it["attempts"] for it in again] == [2, 2]
        (new,) = [it for it in rows(api) if it["client"] == "billing/3.1"]
        assert new["number"] > row["number"]


def test_a_caller_that_waits_is_answered_with_nothing(broker: BrokerProcess, api: Api) -> None:
    with Api(broker.ports["http"]) as worker, ThreadPoolExecutor(1) as aside:
        waiting = aside.submit(worker.post, "/v1/queues/nothing/take", wait=WAIT_SECONDS)

        def waits() -> list[Row]:
            return [it for it in rows(api) if {"queue": "nothing", "dead": False} in it["consumes"]]

        until(lambda: len(waits()) == 1, "it to wait")
        assert api.ask("DELETE", f"/v1/connections/{waits()[0]['number']}").status == 200
        assert waiting.result(WAIT_SECONDS)["messages"] == []


def test_hundreds_of_leases_end_in_turns(broker: BrokerProcess, api: Api) -> None:
    api.send("leases", *[b"x"] * 250)
    with Api(broker.ports["http"]) as worker:
        for _ in range(250):
            worker.post("/v1/queues/leases/take", lease=600)
        (row,) = [it for it in rows(api) if it["held"] == 250]
        assert api.ask("DELETE", f"/v1/connections/{row['number']}").json["held"] == 250
        until(lambda: api.get("/v1/queues/leases")["ready"] == 250, "all to be back")
        until(lambda: api.ask("GET", f"/v1/connections/{row['number']}").status == 404, "it to be gone")


def test_a_client_comes_again(broker: BrokerProcess, api: Api) -> None:
    """Who is ended is not shut out."""
    with PhpmqClient(f"phpmq://127.0.0.1:{broker.ports['phpmq']}") as mq:
        mq.send("again", b"1")
        mq.flush()
        (row,) = [it for it in rows(api) if it["sends"] == [{"queue": "again", "count": 1}]]
        assert api.ask("DELETE", f"/v1/connections/{row['number']}").status == 200
        api.send("again", b"2")
        assert [bytes(it.body) for it in mq.consume("again", count=2, timeout=WAIT_SECONDS)] == [b"1", b"2"]


# --- rights ---


def test_who_may_see_and_end_it(guarded: BrokerProcess) -> None:
    with (
        Wire(("127.0.0.1", guarded.ports["phpmq"])) as wire,
        as_user(guarded, "root") as root,
        as_user(guarded, "read") as reader,
        as_user(guarded, "operate") as operator,
        as_user(guarded, "other") as other,
        as_user(guarded, "all") as everywhere,
    ):
        wire.say(phpmq(1, (1, b"orders.a"), (2, b"x")))
        until(lambda: row_of(root, wire.socket)["sent"] == 1, "it to send")
        number = row_of(root, wire.socket)["number"]
        path = f"/v1/connections/{number}"
        assert row_of(reader, wire.socket)["sent"] == 1
        assert [it["number"] for it in rows(other)] == []
        assert (other.ask("GET", path).status, other.ask("DELETE", path).status) == (404, 404)
        assert reader.ask("DELETE", path).status == 403
        wire.say(phpmq(1, (1, b"payroll"), (2, b"x")))
        until(lambda: row_of(root, wire.socket)["sent"] == 2, "it to send elsewhere")
        seen = row_of(reader, wire.socket)
        assert (seen["sends"], seen["sent"]) == ([{"queue": "orders.a", "count": 1}], None)
        assert one(reader, number)["sends"] == [{"queue": "orders.a", "count": 1, "rate": None}]
        refused = operator.ask("DELETE", path)
        assert refused.status in (403, 404)
        assert b"payroll" not in refused.body
        assert everywhere.ask("DELETE", path).status == 200
        assert wire.is_closed()
        acts = root.ask("GET", "/v1/audit").body
        assert b"end connection" in acts


def test_who_operates_its_queues_may_end_it(guarded: BrokerProcess) -> None:
    with (
        Wire(("127.0.0.1", guarded.ports["phpmq"])) as wire,
        as_user(guarded, "root") as root,
        as_user(guarded, "other") as other,
    ):
        number = row_of(root, wire.socket)["number"]
        assert other.ask("DELETE", f"/v1/connections/{number}").status == 404, "it uses no queue"
        wire.say(phpmq(1, (1, b"payroll"), (2, b"x")))
        until(lambda: row_of(root, wire.socket)["sent"] == 1, "it to send")
        assert other.ask("DELETE", f"/v1/connections/{number}").status == 200
        assert wire.is_closed()
