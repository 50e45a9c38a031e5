"""What is done to a selection: copied, moved, withdrawn; and dead letters of many queues redriven at once."""

import json
import random
from typing import Any

from penstock.http.api import selection
from penstock.http.api.search import SEARCHES_MAX_USER
from tests.http.api import NDJSON, Api
from tests.http.conftest import StartBroker
from tests.http.morgue import ids, path_of, phpmq, reject, send
from tests.http.test_rights import SETTINGS, as_user
from tests.http.test_search import begun, searched
from tests.http.zoo import HELD, LOOKED_INTO, zoo
from tests.http.zoo import STATES as ZOO
from tests.server.harness import WAIT_SECONDS, BrokerProcess, until


def act(api: Api, queue: str, what: str, **fields: Any) -> dict[str, Any]:
    found: dict[str, Any] = api.post(path_of(queue, what), fields)
    return found


def refused(api: Api, queue: str, what: str, **fields: Any) -> tuple[int, str]:
    reply = api.ask("POST", path_of(queue, what), fields)
    return reply.status, reply.problem


def values(api: Api, queue: str, **query: Any) -> list[str]:
    return [row["value"] for row in searched(api, queue, **query)[0]]


def living(api: Api, queue: str) -> dict[int, str]:
    return {row["offset"]: row["state"] for row in searched(api, queue, state="ready,delayed,held,dead")[0]}


# --- withdraw --------------------------------------------------------------------------------------


def test_what_nobody_holds_is_withdrawn(broker: BrokerProcess, api: Api) -> None:
    with zoo(broker, api, "w"):
        dry = act(api, "w", "withdraw", ranges=[[0, 100]], dry_run=True)
        assert (dry["selected"], dry["withdrawn"], dry["held"]) == (8, 0, 2)
        assert len(living(api, "w")) == 8
        done = act(api, "w", "withdraw", ranges=[[0, 100]])
        assert done == {
            "selected": 8, "withdrawn": 6, "held": 2, "held_ranges": [[LOOKED_INTO, HELD + 1]], "missing": 0,
            "dry_run": False, "next": None,
        }  # fmt: skip
        assert living(api, "w") == {LOOKED_INTO: "dead", HELD: "held"}
        gone = next(offset for offset, state in ZOO.items() if state == "dead" and offset != LOOKED_INTO)
        history = api.get(path_of("w", f"messages/{gone}"))["history"]
        assert (history[-1]["event"], history[-1]["reason"]) == ("withdrawn", "operator")
        assert act(api, "w", "withdraw", ranges=[[0, 100]])["withdrawn"] == 0
    # What was held goes back where its consumer left it, and can be withdrawn then.
    until(lambda: act(api, "w", "withdraw", offsets=[HELD, LOOKED_INTO])["selected"] == 0, "all to be gone")
    assert living(api, "w") == {}


def test_withdrawals_by_condition_state_and_in_parts(api: Api) -> None:
    send(api, "parts", [b'{"n": %d}' % number for number in range(3000)])
    api.send("parts", b"late", delay=600)
    assert act(api, "parts", "withdraw", state=["delayed"])["withdrawn"] == 1
    done = act(api, "parts", "withdraw", where="value.n < 100", limit=30)
    assert (done["withdrawn"], done["next"]) == (30, 30)
    done = act(api, "parts", "withdraw", where="value.n < 100", **{"from": done["next"]})
    assert (done["withdrawn"], done["next"]) == (70, None)
    # One by one, and each twice: more runs than the first process takes in a step.
    odd = [offset for offset in range(100, 3000) if offset % 2] * 2
    assert act(api, "parts", "withdraw", offsets=odd)["withdrawn"] == 1450
    assert sorted(living(api, "parts")) == [*range(100, 3000, 2)]
    facts = api.get(path_of("parts"))
    assert (facts["ready"], facts["delayed"]) == (1450, 0)


def test_what_cannot_be_done(api: Api) -> None:
    api.send("no", b"x")
    bad = (400, "bad-request")
    assert refused(api, "no", "withdraw") == bad
    assert refused(api, "no", "withdraw", where="foo = 1") == bad
    assert refused(api, "no", "withdraw", state=["gone"]) == bad
    assert refused(api, "no", "withdraw", offsets=[]) == bad
    assert refused(api, "no", "withdraw", offsets=[-1]) == bad
    assert refused(api, "no", "withdraw", offsets=[0] * 10_001) == bad
    assert refused(api, "no", "withdraw", offsets=[0], identity="0" * 12) == (409, "queue-deleted")
    assert refused(api, "nowhere", "withdraw", offsets=[0]) == (404, "queue-not-found")
    assert refused(api, "no", "move", offsets=[0]) == bad
    assert refused(api, "no", "move", offsets=[0], to="no") == bad
    assert refused(api, "no", "move", offsets=[0], to="no.dead") == bad
    assert refused(api, "no", "copy", to="other") == bad
    assert refused(api, "nowhere", "copy", offsets=[0], to="other") == (404, "queue-not-found")
    assert values(api, "no") == ["x"]


# --- copy ------------------------------------------------------------------------------------------


def test_a_copy_has_payload_headers_and_what_is_left(broker: BrokerProcess, api: Api) -> None:
    lines = [
        {"value": "plain", "headers": {"k": "v"}},
        {"value": "late", "delay": 500},
        {"value": "short", "ttl": 500, "retries": 3},
        {"value_base64": "//4="},
    ]
    body = b"".join(json.dumps(line).encode() + b"\n" for line in lines)
    assert api.ask("POST", path_of("from", "batch"), body, {"Content-Type": NDJSON}).status == 200
    done = act(api, "from", "copy", to="to", ranges=[[0, 9]])
    assert done == {
        "selected": 4, "copied": 4, "held": 0, "held_ranges": [], "missing": 0, "dry_run": False,
        "next": None, "to": "to", "ranges": [[0, 4]], "repeated": 0,
    }  # fmt: skip
    there, here = searched(api, "to")[0], searched(api, "from")[0]
    for copy, original in zip(there, here, strict=True):
        for name in ("state", "headers", "value_bytes", "retries"):
            assert copy[name] == original[name]
        assert copy.get("value") == original.get("value")
        assert copy["id"] != original["id"]
        for name in ("expires", "due"):
            assert (copy[name] is None) == (original[name] is None)
    assert (there[1]["state"], there[2]["retries"], there[0]["headers"]) == ("delayed", 3, {"k": "v"})
    # Of the dead and the gone: payload and headers.
    reject(broker, api, "dying", [b"dead"])
    assert act(api, "dying", "copy", to="to", where="reason = 'rejected'")["copied"] == 1
    act(api, "dying", "withdraw", offsets=[0])
    assert act(api, "dying", "copy", to="to", state=["dead", "ready"])["copied"] == 0
    assert act(api, "dying", "copy", to="to", offsets=[0])["copied"] == 1  # by name also what is gone
    assert [(row["value"], row["state"]) for row in searched(api, "to", from_=4)[0]] == [
        ("dead", "ready")
    ] * 2


def test_a_copy_that_is_repeated_with_its_key_copies_nothing_twice(start_broker: StartBroker) -> None:
    broker = start_broker(config="[queue.twice]\nmax-bytes = 100000\n")
    with Api(broker.ports["http"]) as api:
        send(api, "once", [b"%0100d" % number for number in range(2500)])
        key = {"Idempotency-Key": "k1"}
        path, fields = path_of("once", "copy"), {"to": "twice", "ranges": [[0, 2500]]}
        assert api.ask("POST", path, fields, key).problem == "queue-full"  # It ends in the middle.
        assert len(values(api, "twice")) == 1000
        api.post(path_of("twice", "purge"))
        # What is done is known, in stretches of offsets.
        assert api.ask("POST", path, fields, key).problem == "queue-full"
        assert len(values(api, "twice", state="ready")) == 1000
        api.post(path_of("twice", "purge"))
        again = api.ask("POST", path, fields, key).json
        assert (again["copied"], again["repeated"]) == (2500, 2000)
        other = api.ask("POST", path, {**fields, "ranges": [[0, 10]]}, {"Idempotency-Key": "k2"}).json
        assert (other["copied"], other["repeated"]) == (10, 0)


def test_another_selection_under_the_same_key_is_copied_too(api: Api) -> None:
    send(api, "many", [b'{"n": %d}' % number for number in range(10)])
    path, key = path_of("many", "copy"), {"Idempotency-Key": "k"}
    first = api.ask("POST", path, {"to": "some", "where": "value.n < 9", "limit": 4}, key).json
    rest = {"to": "some", "where": "value.n < 9", "from": first["next"]}
    for _ in range(2):
        api.ask("POST", path, rest, key)
    assert api.ask("POST", path, {"to": "some", "where": "value.n = 9"}, key).json["repeated"] == 0
    assert values(api, "some") == [json.dumps({"n": number}) for number in range(10)]


# --- move ------------------------------------------------------------------------------------------


def test_a_move_takes_what_nobody_holds(broker: BrokerProcess, api: Api) -> None:
    with zoo(broker, api, "m"):
        before = {row["offset"]: row for row in searched(api, "m", state="ready,delayed,dead")[0]}
        done = act(api, "m", "move", to="moved", ranges=[[0, 100]])
        assert (done["selected"], done["moved"], done["held"]) == (8, 6, 2)
        assert done["held_ranges"] == [[LOOKED_INTO, HELD + 1]]
        assert done["ranges"] == [[0, 6]]
        assert living(api, "m") == {LOOKED_INTO: "dead", HELD: "held"}
        there = searched(api, "moved")[0]
        free = [row["value_base64"] for offset, row in before.items() if offset != LOOKED_INTO]
        assert [row["value_base64"] for row in there] == free
        assert {row["state"] for row in there} == {"ready"}
        history = api.get(path_of("m", "messages/1"))["history"]
        assert (history[-1]["event"], history[-1]["reason"]) == ("withdrawn", "operator")
        assert (
            act(api, "m", "move", to="moved", ranges=[[0, 100]])["moved"] == 0
        )  # Again: nothing is doubled.
    assert len(searched(api, "moved")[0]) == 6


def test_a_repaired_payload_moves_with_its_letter(broker: BrokerProcess, api: Api) -> None:
    reject(broker, api, "mended", [b"broken"])
    line = json.dumps({"queue": "mended", "offset": 0, "value": "whole"}).encode()
    headers = {"Content-Type": NDJSON}
    stage = api.ask("POST", "/v1/stages", line, headers, transaction="t1", redrive=True).json["stage"]
    assert api.post("/v1/transactions", {"transaction": "t1", "stages": [stage]})
    assert act(api, "mended", "move", to="mended.to", offsets=[0])["moved"] == 1
    assert values(api, "mended.to") == ["whole"]


def test_moved_messages_are_in_one_queue_whatever_crashes(start_broker: StartBroker) -> None:
    """A broker that is killed while it moves: each message is in one of the two, once."""
    broker = start_broker()
    count = 20_000
    with Api(broker.ports["http"]) as api:
        lines = b"".join(b'{"value": "%d"}\n' % number for number in range(count))
        assert api.ask("POST", path_of("a", "batch"), lines, {"Content-Type": NDJSON}).status == 200
    rng = random.Random(7)
    for turn in range(3):
        with Api(broker.ports["http"]) as api:
            api._connection.request(
                "POST",
                path_of("a", "move"),
                json.dumps({"to": "b", "state": ["ready"]}),
                {"Content-Type": "application/json"},
            )
            wanted = (turn + 1) * rng.randint(1000, 4000)
            with Api(broker.ports["http"]) as looking:

                def moved(looking: Api = looking, wanted: int = wanted) -> bool:
                    rows = {row["name"]: row for row in looking.get("/v1/queues")["queues"]}
                    return "b" in rows and rows["b"]["ready"] >= wanted

                until(moved, "some to be moved")
            broker.kill()
        broker.start()
    with Api(broker.ports["http"]) as api:
        here, there = (values(api, queue, state="ready") for queue in ("a", "b"))
        assert sorted(map(int, [*here, *there])) == [*range(count)]
        act(api, "a", "move", to="b", state=["ready"])
        assert sorted(map(int, values(api, "b"))) == [*range(count)]
        assert living(api, "a") == {}


def test_a_move_while_consumers_work_loses_and_doubles_nothing(broker: BrokerProcess, api: Api) -> None:
    send(api, "busy", [b"%d" % number for number in range(2000)])
    with phpmq(broker) as mq:
        taken = list(mq.consume("busy", prefetch=500, count=500, timeout=WAIT_SECONDS))
        mq.ack_many(taken[::2])
        until(lambda: api.get(path_of("busy"))["held"] == 250, "acknowledgements to arrive")
        done = act(api, "busy", "move", to="busy.to", where="value like '%'")
        assert (done["moved"], done["held"]) == (1500, 250)
        assert len(done["held_ranges"]) == 250
        mq.ack_many(taken[1::2])
    until(lambda: living(api, "busy") == {}, "the rest to be settled")
    assert sorted(map(int, values(api, "busy.to"))) == [*range(500, 2000)]


# --- who may, and what is written down ---------------------------------------------------------------


def test_both_queues_need_their_rights_and_the_audit_has_counts(start_broker: StartBroker) -> None:
    broker = start_broker(config=SETTINGS)
    with as_user(broker, "root") as root:
        root.send("orders.a", b"1", b"2", b"3")
        root.send("payroll", b"x")
    with as_user(broker, "read") as api:  # reads orders.*, and sends nowhere
        assert refused(api, "orders.a", "copy", offsets=[0], to="orders.b") == (403, "forbidden")
    with as_user(broker, "operate") as api:  # may not read them
        assert refused(api, "orders.a", "move", offsets=[0], to="orders.b") == (403, "forbidden")
        assert refused(api, "orders.a", "withdraw", where="value = '1'") == (403, "forbidden")
        assert act(api, "orders.a", "withdraw", offsets=[0])["withdrawn"] == 1
    with as_user(broker, "other") as api:
        assert refused(api, "payroll", "move", offsets=[0], to="orders.b") == (403, "forbidden")
        assert refused(api, "payroll", "copy", offsets=[0], to="orders.b") == (403, "forbidden")
    with as_user(broker, "all") as api:
        assert act(api, "orders.a", "move", offsets=[1], to="orders.b")["moved"] == 1
        assert act(api, "orders.a", "copy", state=["ready"], to="orders.b")["copied"] == 1
    with as_user(broker, "root") as root:
        lines = [line for line in root.get("/v1/audit")["lines"] if line.get("result") == "done"]
    told = [(line["who"], line["act"], line["queue"], line.get("to"), line["count"]) for line in lines]
    assert told == [
        ("operate", "withdraw", "orders.a", None, 1),
        ("all", "move", "orders.a", "orders.b", 1),
        ("all", "copy", "orders.a", "orders.b", 1),
    ]


def test_they_count_among_searches(broker: BrokerProcess, api: Api) -> None:
    for _ in range(20):
        api.send("large", b"x" * 1_000_000)
    clients = [begun(broker.ports["http"], "large", values="full") for _ in range(SEARCHES_MAX_USER)]
    assert refused(api, "large", "withdraw", offsets=[0]) == (429, "too-many-searches")
    for client in clients:
        client.close()
    until(lambda: api.ask("POST", path_of("large", "withdraw"), {"offsets": [0]}).status == 200, "a turn")


def test_more_than_a_slice(api: Api) -> None:
    for _ in range(12):
        api.send("heavy", b"x" * 1_000_000)
    done = act(api, "heavy", "move", to="heavy.to", state=["ready"])
    assert done["moved"] == 12
    assert 2 * selection.SLICE_BYTES < 12 * 1_000_000
    assert sum(row["value_bytes"] for row in searched(api, "heavy.to", values="none")[0]) == 12_000_000


# --- dead letters of many queues ---------------------------------------------------------------------


def test_letters_of_many_queues_are_redriven_at_once(broker: BrokerProcess, api: Api) -> None:
    for queue, count in (("r.a", 3), ("r.b", 2), ("r.c", 1)):
        reject(broker, api, queue, [b'{"n": %d}' % number for number in range(count)])
    api.send("r.d", b"alive")
    dry = api.post("/v1/redrive", {"queues": "r.*", "dry_run": True})
    counts = {"looked_at": 3, "matched": 3, "redriven": 0}
    assert dry["queues"][0] == {"queue": "r.a", **counts}
    assert [row["queue"] for row in dry["queues"]] == ["r.a", "r.b", "r.c"]
    assert (dry["matched"], dry["redriven"], dry["dry_run"]) == (6, 0, True)
    some = api.post("/v1/redrive", {"queues": "r.*", "where": "value.n = 0", "max": 2})
    assert [(row["queue"], row["redriven"]) for row in some["queues"]] == [("r.a", 1), ("r.b", 1)]
    named = api.post("/v1/redrive", {"queues": ["r.a", "r.d"], "reason": "rejected"})
    assert [(row["queue"], row["redriven"]) for row in named["queues"]] == [("r.a", 2), ("r.d", 0)]
    rest = api.post("/v1/redrive", {"queues": "r.*"})
    assert rest["redriven"] == 2
    assert not any(ids(api, queue, "dead") for queue in ("r.a", "r.b", "r.c"))
    wrongs: tuple[dict[str, Any], ...] = ({}, {"queues": []}, {"queues": "r.*", "where": "x"})
    for wrong in (*wrongs, {"queues": ["r.a.dead"]}):
        assert api.ask("POST", "/v1/redrive", wrong).problem == "bad-request"
    assert api.ask("POST", "/v1/redrive", {"queues": ["nowhere"]}).problem == "queue-not-found"


def test_a_redrive_of_many_goes_by_rights(start_broker: StartBroker) -> None:
    broker = start_broker(config=SETTINGS)
    with as_user(broker, "root") as root:
        for queue in ("orders.a", "payroll"):
            root.send(queue, b"x")
            taken = root.post(path_of(queue, "take"))["messages"][0]["id"]
            root.post(path_of(queue, "settle"), {"reject": [{"id": taken, "reason": "no"}]})
    with as_user(broker, "operate") as api:
        assert api.ask("POST", "/v1/redrive", {"queues": ["payroll"]}).status == 403
        assert (
            api.post("/v1/redrive", {"queues": "*", "where": "value = 'x'"})["queues"] == []
        )  # may not read
        done = api.post("/v1/redrive", {"queues": "*"})
        assert [(row["queue"], row["redriven"]) for row in done["queues"]] == [("orders.a", 1)]
    with as_user(broker, "root") as root:
        assert root.get(path_of("payroll"))["dead"] == 1
        acts = [
            it for it in root.get("/v1/audit")["lines"] if it["act"] == "redrive" and it["result"] == "done"
        ]
        assert [(it["who"], it["queue"], it["count"]) for it in acts] == [("operate", "orders.a", 1)]
