"""POST /v1/queues/{queue}/redrive: every filter, every bound, and several callers at once."""

import json
import threading
from collections import Counter
from typing import Any

import pytest

from penstock.client import PhpmqClient
from tests.http.api import NDJSON, Api
from tests.http.conftest import StartBroker
from tests.http.morgue import (
    bodies_left,
    exhaust,
    expire,
    ids,
    path_of,
    phpmq,
    reasons,
    reject,
    send,
    take,
)
from tests.server.harness import WAIT_SECONDS, BrokerProcess, until

ORDERS = [
    b'{"region": "north", "amount": 5}',
    b'{"region": "south", "amount": 50}',
    b'{"region": "north", "amount": 500}',
    b"no JSON at all",
]


def redrive(api: Api, queue: str, **fields: object) -> dict[str, Any]:
    answer = api.post(path_of(queue, "redrive"), dict(fields))
    assert isinstance(answer, dict)
    return answer


def counts(answer: dict[str, Any]) -> tuple[int, int, int]:
    return answer["looked_at"], answer["matched"], answer["redriven"]


# --- all of them ---------------------------------------------------------------------------------------


def test_all_of_them(broker: BrokerProcess, api: Api) -> None:
    reject(broker, api, "all", ORDERS)
    before = ids(api, "all", "dead")
    assert redrive(api, "all") == {
        "looked_at": 4,
        "matched": 4,
        "redriven": 4,
        "dry_run": False,
        "next": None,
    }
    assert ids(api, "all", "dead") == Counter()
    assert ids(api, "all", "ready") == before  # the same messages, with the ids that they had
    assert bodies_left(broker, "all", 4) == ORDERS
    assert counts(redrive(api, "all")) == (0, 0, 0)


def test_a_call_without_a_body(broker: BrokerProcess, api: Api) -> None:
    reject(broker, api, "no-body", ORDERS)
    assert counts(api.post(path_of("no-body", "redrive"))) == (4, 4, 4)


def test_behind_the_tail_and_with_a_new_life(broker: BrokerProcess, api: Api) -> None:
    exhaust(broker, api, "tail", [b"old"])
    api.send("tail", b"new")
    redrive(api, "tail")
    message, *_ = api.get(path_of("tail", "messages"), state="ready")["messages"]
    assert (message["offset"], message["attempts"], message["retries"]) == (0, 0, 0)
    assert bodies_left(broker, "tail", 2) == [b"new", b"old"]


def test_an_expired_letter_does_not_expire_again(broker: BrokerProcess, api: Api) -> None:
    expire(api, "again", [b"late"])
    redrive(api, "again")
    message, *_ = api.get(path_of("again", "messages"), state="ready")["messages"]
    assert (message["ttl"], message["expires"]) == (None, None)
    assert bodies_left(broker, "again", 1) == [b"late"]


def test_consumers_that_wait_get_what_is_redriven(broker: BrokerProcess, api: Api) -> None:
    reject(broker, api, "waiting", ORDERS)
    with phpmq(broker) as mq:
        messages = mq.consume("waiting", prefetch=10, count=4, timeout=WAIT_SECONDS)
        got: list[bytes] = []

        def consume() -> None:
            for message in messages:
                got.append(message.body)
                message.ack()

        thread = threading.Thread(target=consume)
        thread.start()
        assert counts(redrive(api, "waiting", where="value_bytes > 0")) == (4, 4, 4)
        thread.join(WAIT_SECONDS)
    assert sorted(got) == sorted(ORDERS)


# --- filters -------------------------------------------------------------------------------------------


def test_by_reason(broker: BrokerProcess, api: Api) -> None:
    reject(broker, api, "reasons", [b"r1", b"r2"])
    exhaust(broker, api, "reasons", [b"x1"])
    expire(api, "reasons", [b"e1", b"e2", b"e3"])
    assert counts(redrive(api, "reasons", reason="retries-exhausted")) == (1, 1, 1)
    assert reasons(api, "reasons") == {"rejected": 2, "expired": 3}
    assert counts(redrive(api, "reasons", reason="expired", where="offset >= 4")) == (3, 2, 2)
    assert reasons(api, "reasons") == {"rejected": 2, "expired": 1}
    assert counts(redrive(api, "reasons", reason="bad-record")) == (0, 0, 0)
    assert sorted(bodies_left(broker, "reasons", 3)) == [b"e2", b"e3", b"x1"]


def bury(api: Api, queue: str, *records: str) -> None:
    """Bad records, as a pipeline sends them."""
    body = b"".join(json.dumps({"value": record}).encode() + b"\n" for record in records)
    reply = api.ask(
        "POST",
        "/v1/stages",
        body,
        {"Content-Type": NDJSON},
        transaction=f"bury/{queue}",
        queue=queue,
        dead="bad-record",
    )
    assert reply.status == 200, reply
    api.post("/v1/transactions", {"transaction": f"bury/{queue}", "stages": [reply.json["stage"]]})


def test_bad_records_stay_unless_somebody_asks_for_them(broker: BrokerProcess, api: Api) -> None:
    reject(broker, api, "bad", [b"r1"])
    bury(api, "bad", "b1", "b2", "b3")
    assert reasons(api, "bad") == {"rejected": 1, "bad-record": 3}
    letter = api.get(path_of("bad", "messages"), state="dead")["messages"][1]
    assert (letter["reason"], letter["protocol"], letter["attempts"]) == ("bad-record", "pipeline", 0)
    assert counts(redrive(api, "bad", dry_run=True)) == (1, 1, 0)
    assert counts(redrive(api, "bad", where="offset >= 0")) == (1, 1, 1)
    take(broker, "bad", 1, lambda message: message.reject())
    assert counts(redrive(api, "bad")) == (1, 1, 1)
    assert reasons(api, "bad") == {"bad-record": 3}
    assert counts(redrive(api, "bad")) == (0, 0, 0)
    assert counts(redrive(api, "bad", where="reason = 'bad-record' and value = 'b2'")) == (3, 1, 1)
    assert counts(redrive(api, "bad", reason="bad-record", limit=1)) == (1, 1, 1)
    assert bodies_left(broker, "bad", 3) == [b"r1", b"b2", b"b1"]


@pytest.mark.parametrize(
    ("where", "fit"),
    [
        ("value.region = 'north'", [0, 2]),
        ("value.amount between 10 and 100", [1]),
        ("value.amount is null", [3]),
        ("value like '%JSON%'", [3]),
        ("value_bytes > 33", [2]),
        ("offset in (1, 3)", [1, 3]),
        ("queue like 'conditions%'", [0, 1, 2, 3]),
        ("reason = 'rejected' and attempts = 1", [0, 1, 2, 3]),
        ("attempts > 1", []),
        ("reason != 'rejected'", []),
        ("protocol = 'http'", [0, 1, 2, 3]),
        ("timestamp > '-1h' and died > '-1h' and died >= timestamp", [0, 1, 2, 3]),
        ("died < '-1h'", []),
        ("expires is null and retries is null", [0, 1, 2, 3]),
        ("not value.region = 'north'", [1]),
        ("value.region = 'south'\n or offset = 0", [0, 1]),
    ],
)
def test_conditions(broker: BrokerProcess, api: Api, where: str, fit: list[int]) -> None:
    queue = f"conditions: {hash(where)}"
    reject(broker, api, queue, ORDERS)
    dry = redrive(api, queue, where=where, dry_run=True)
    assert dry == {"looked_at": 4, "matched": len(fit), "redriven": 0, "dry_run": True, "next": None}
    assert api.get(path_of(queue))["dead"] == 4
    assert counts(redrive(api, queue, where=where)) == (4, len(fit), len(fit))
    ready = api.get(path_of(queue, "messages"), state="ready")["messages"]
    assert [message["offset"] for message in ready] == fit


def test_by_id_and_by_what_the_message_came_with(broker: BrokerProcess, api: Api) -> None:
    api.send("came-with", b"a", retries=0)
    api.send("came-with", b"b", retries=3, ttl=1000)
    api.send("came-with", b"c")
    take(broker, "came-with", 3, lambda message: message.reject())
    messages = api.get(path_of("came-with", "messages"), state="dead")["messages"]
    one = messages[2]["id"]

    def fitting(where: str) -> int:
        return counts(redrive(api, "came-with", where=where, dry_run=True))[1]

    assert fitting(f"id = '{one}'") == 1
    assert fitting(f"id != '{one}'") == 2
    assert fitting("retries = 3") == 1
    assert fitting("retries is null") == 1
    assert fitting("expires > '+15m'") == 1
    assert fitting("expires is null") == 2


def test_by_the_consumer_that_had_it(broker: BrokerProcess, api: Api) -> None:
    """A condition that takes a walk through the events: each letter has had several consumers."""
    send(api, "culprits", [b"a", b"b", b"c", b"d"])
    for _ in range(2):
        take(broker, "culprits", 4, lambda message: message.requeue())
    take(broker, "culprits", 3, lambda message: message.reject())
    take(broker, "culprits", 1, lambda message: message.reject())
    found: list[dict[str, Any]] = []

    def all_told() -> bool:
        found[:] = api.get(path_of("culprits", "messages"), state="dead", history=True)["messages"]
        return [message["history"][-1]["event"] for message in found] == ["dead"] * 4

    until(all_told, "the deaths to be synced, which the history waits for")
    culprits = [message["history"][-1]["consumer"] for message in found]
    assert len(set(culprits)) == 2
    last = culprits[-1]
    assert counts(redrive(api, "culprits", where=f"consumer = '{last}'")) == (4, 1, 1)
    assert bodies_left(broker, "culprits", 1) == [b"d"]
    assert counts(redrive(api, "culprits", where=f"consumer != '{last}'", dry_run=True)) == (3, 3, 0)


def test_letters_that_expired_had_no_consumer(api: Api) -> None:
    expire(api, "alone", [b"a"])
    assert counts(redrive(api, "alone", where="consumer is null")) == (1, 1, 1)


def test_letters_in_many_small_runs_and_one_large_one(broker: BrokerProcess, api: Api) -> None:
    """Every second message is rejected, which makes a run of each; then many in a row."""
    queue, count = "runs", 5000
    send(api, queue, [b"%d" % number for number in range(count)])

    def verdict(message: Any) -> None:
        number = int(message.body)
        message.reject() if number % 2 or number > 3000 else message.ack()

    take(broker, queue, count, verdict)
    dead = sum(1 for number in range(count) if number % 2 or number > 3000)
    assert counts(redrive(api, queue, where="consumer is not null", dry_run=True)) == (dead, dead, 0)
    expected = [n for n in range(count) if (n % 2 or n > 3000) and str(n) >= "2"]
    assert counts(redrive(api, queue, where="value >= '2'")) == (dead, len(expected), len(expected))
    assert sorted(map(int, bodies_left(broker, queue, len(expected)))) == expected
    assert counts(redrive(api, queue, where="attempts = 1")) == (dead - len(expected),) * 3


def test_messages_that_came_a_moment_ago(broker: BrokerProcess, api: Api) -> None:
    """PHPMQ gives no receipt: the letters may be dead before they are synced, and are waited for."""
    for turn in range(5):
        with phpmq(broker) as mq:
            mq.send_many("quick", [b"%d" % number for number in range(100)])
        take(broker, "quick", 100, lambda message: message.reject())
        assert counts(redrive(api, "quick", where="value >= '0'")) == (100, 100, 100), turn
        take(broker, "quick", 100, lambda message: message.ack())


def test_conditions_survive_a_restart(start_broker: StartBroker) -> None:
    broker = start_broker()
    with Api(broker.ports["http"]) as api:
        reject(broker, api, "kept", ORDERS)
        api.send("fence", b"")  # whose receipt says that what came before it is on the disk as well
    broker.kill()
    broker.start()
    with Api(broker.ports["http"]) as api:
        assert counts(redrive(api, "kept", where="value.region = 'north' and attempts = 1")) == (4, 2, 2)
        assert reasons(api, "kept") == {"rejected": 2}


# --- bounds --------------------------------------------------------------------------------------------


def test_limit(broker: BrokerProcess, api: Api) -> None:
    reject(broker, api, "limited", [b"%d" % number for number in range(10)])
    assert counts(redrive(api, "limited", limit=3)) == (3, 3, 3)
    assert bodies_left(broker, "limited", 3) == [b"0", b"1", b"2"]
    assert counts(redrive(api, "limited", limit=2, where="value != '3'")) == (7, 2, 2)
    assert bodies_left(broker, "limited", 2) == [b"4", b"5"]
    assert redrive(api, "limited", limit=2, dry_run=True)["matched"] == 2
    assert counts(redrive(api, "limited", limit=100)) == (5, 5, 5)


def test_those_that_died_first_come_first(broker: BrokerProcess, api: Api) -> None:
    send(api, "order", [b"0", b"1", b"2"])
    with phpmq(broker) as mq:
        taken = list(mq.consume("order", prefetch=3, count=3, timeout=WAIT_SECONDS))
        for message in reversed(taken):
            message.reject()
    assert redrive(api, "order", limit=1)["redriven"] == 1
    assert bodies_left(broker, "order", 1) == [b"2"]
    # With a condition, by offset.
    assert redrive(api, "order", limit=1, where="value_bytes = 1")["redriven"] == 1
    assert bodies_left(broker, "order", 1) == [b"0"]


def test_from(broker: BrokerProcess, api: Api) -> None:
    reject(broker, api, "from", [b"%d" % number for number in range(6)])
    assert counts(redrive(api, "from", **{"from": 4})) == (2, 2, 2)
    assert bodies_left(broker, "from", 2) == [b"4", b"5"]
    assert counts(redrive(api, "from", where="value_bytes = 1", **{"from": 2})) == (2, 2, 2)
    assert counts(redrive(api, "from", **{"from": 1000})) == (0, 0, 0)


@pytest.mark.parametrize("where", [None, "value like '%'", "attempts = 1"])
def test_scan_limit_goes_on_where_it_ended(broker: BrokerProcess, api: Api, where: str | None) -> None:
    queue = f"scanned {where}"
    reject(broker, api, queue, [b"%d" % number for number in range(10)])
    filters = {} if where is None else {"where": where}
    looked_at, start, parts = 0, 0, 0
    while True:
        answer = redrive(api, queue, scan_limit=4, **{"from": start}, **filters)
        looked_at += answer["looked_at"]
        parts += 1
        assert answer["looked_at"] == answer["redriven"] <= 4
        if answer["next"] is None:
            break
        assert answer["looked_at"] == 4
        start = answer["next"]
    assert (looked_at, parts, start) == (10, 3, 8)
    assert api.get(path_of(queue))["dead"] == 0


def test_dry_run_counts_and_changes_nothing(broker: BrokerProcess, api: Api) -> None:
    reject(broker, api, "dry", ORDERS)
    before = api.get(path_of("dry"))
    assert counts(redrive(api, "dry", dry_run=True)) == (4, 4, 0)
    assert counts(redrive(api, "dry", dry_run=True, reason="expired")) == (0, 0, 0)
    assert counts(redrive(api, "dry", dry_run=True, where="value.region is null")) == (4, 1, 0)
    after = api.get(path_of("dry"))
    assert [after[key] for key in ("ready", "dead", "event_end")] == [
        before[key] for key in ("ready", "dead", "event_end")
    ]


def test_a_dry_run_names_what_fits(broker: BrokerProcess, api: Api) -> None:
    reject(broker, api, "named", ORDERS)
    where = "value.region = 'north' or value.region is null"

    def named(**fields: object) -> object:
        return redrive(api, "named", dry_run=True, **fields)["ranges"]

    assert named(list_limit=100) == [[0, 4]]
    assert named(list_limit=3) == [[0, 3]]
    assert named(list_limit=100, where=where) == [[0, 1], [2, 4]]
    assert named(list_limit=2, where=where) == [[0, 1], [2, 3]]
    assert named(list_limit=1, where=where, limit=2) == [[0, 1]]
    assert named(list_limit=5, reason="expired") == []
    # They can be redriven as they were named; only a dry run names them.
    answer = redrive(api, "named", ranges=[[0, 1], [2, 4]], list_limit=5)
    assert "ranges" not in answer
    assert answer["redriven"] == 3


def test_what_somebody_holds_is_left_alone(broker: BrokerProcess, api: Api) -> None:
    reject(broker, api, "hands", [b"0", b"1", b"2"])
    with PhpmqClient(f"phpmq://127.0.0.1:{broker.ports['phpmq']}") as mq:
        (held,) = mq.consume("hands.dead", prefetch=1, count=1, timeout=WAIT_SECONDS)
        assert held.body == b"0"
        assert api.get(path_of("hands"))["dead"] == 3
        assert counts(redrive(api, "hands", dry_run=True)) == (2, 2, 0)
        assert counts(redrive(api, "hands", where="value like '%'", limit=1)) == (2, 1, 1)
        assert counts(redrive(api, "hands")) == (1, 1, 1)
        assert counts(redrive(api, "hands")) == (0, 0, 0)
        held.ack()
    assert api.get(path_of("hands"))["dead"] == 0
    assert sorted(bodies_left(broker, "hands", 2)) == [b"1", b"2"]


# --- several at once -----------------------------------------------------------------------------------


def test_four_callers_and_a_purge(broker: BrokerProcess, api: Api) -> None:
    """Whoever moves a letter counts it: the counts add up to what there was; nothing is lost or doubled."""
    queue, count = "contended", 4000
    reject(broker, api, queue, [b'{"n": %d}' % number for number in range(count)])
    before = ids(api, queue, "dead")
    assert sum(before.values()) == count
    filters: list[dict[str, object]] = [
        {"where": "value.n >= 0"},
        {"where": "value_bytes > 0", "scan_limit": 500},
        {"where": "attempts >= 1"},
        {"limit": 1500},
    ]
    moved: list[int] = [0] * len(filters)
    purged: list[int] = []
    barrier = threading.Barrier(len(filters) + 1)

    def redriver(number: int) -> None:
        with Api(broker.ports["http"]) as own:
            barrier.wait(WAIT_SECONDS)
            start: int | None = 0
            while start is not None:
                answer = redrive(own, queue, **filters[number], **{"from": start})
                moved[number] += answer["redriven"]
                start = answer["next"]

    def purger() -> None:
        with Api(broker.ports["http"]) as own:
            barrier.wait(WAIT_SECONDS)
            purged.append(own.post(path_of(queue, "purge"), dead=True)["purged"])

    threads = [threading.Thread(target=redriver, args=[number]) for number in range(len(filters))]
    threads.append(threading.Thread(target=purger))
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(3 * WAIT_SECONDS)
        assert not thread.is_alive()
    ready, dead = ids(api, queue, "ready"), ids(api, queue, "dead")
    gone = ids(api, queue, "gone")
    assert sum(moved) == sum(ready.values())
    assert purged == [sum(gone.values())]
    assert dead == Counter()
    assert ready + gone == before


def test_letters_that_die_again_are_left_for_the_next_call(broker: BrokerProcess, api: Api) -> None:
    """A consumer that rejects everything cannot keep a redrive busy for ever."""
    queue = "poison"
    reject(broker, api, queue, [b"%d" % number for number in range(3000)])
    with phpmq(broker) as mq:
        stop = threading.Event()

        def rejecting() -> None:
            while not stop.is_set():
                for message in mq.consume(queue, prefetch=1000, timeout=0.05):
                    message.reject()

        thread = threading.Thread(target=rejecting)
        thread.start()
        try:
            for filters in ({}, {"where": "value >= '0'"}):
                looked_at, _, redriven = counts(redrive(api, queue, **filters))
                assert redriven <= looked_at <= 3000
        finally:
            stop.set()
            thread.join(WAIT_SECONDS)


# --- what is refused -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        (
            {"reason": "boredom"},
            "field 'reason': use one of bad-record, expired, rejected, retries-exhausted",
        ),
        ({"reason": "purged"}, "field 'reason': use one of"),
        ({"limit": 0}, "field 'limit'"),
        ({"limit": "all"}, "field 'limit'"),
        ({"scan_limit": 0}, "field 'scan_limit'"),
        ({"from": -1}, "field 'from'"),
        ({"dry_run": 1}, "field 'dry_run': use true or false"),
        ({"where": 5}, "field 'where'"),
        ({"wehre": "x"}, "there is no field 'wehre'; did you mean 'where'?"),
    ],
)
def test_wrong_fields(api: Api, fields: dict[str, object], said: str) -> None:
    api.send("refusing", b"")
    reply = api.ask("POST", path_of("refusing", "redrive"), fields)
    assert (reply.status, reply.problem) == (400, "bad-request")
    assert said in reply.json["detail"]


def test_a_wrong_condition_says_where(api: Api) -> None:
    api.send("refusing", b"")
    reply = api.ask("POST", path_of("refusing", "redrive"), {"where": "value.a = 1 and nonsense > 2"})
    assert (reply.status, reply.problem) == (400, "bad-request")
    assert reply.json["position"] == 17
    assert "character 17" in reply.json["detail"]


@pytest.mark.parametrize("where", ["\ud800 = 1", "value = '\ud800", "\x00", "(" * 5000, "-" * 10_000])
def test_conditions_that_are_no_text_to_speak_of(api: Api, where: str) -> None:
    api.send("refusing", b"")
    reply = api.ask("POST", path_of("refusing", "redrive"), {"where": where})
    assert (reply.status, reply.problem) == (400, "bad-request")
    assert reply.json["position"] >= 1


def test_a_body_that_is_no_json_object(api: Api) -> None:
    api.send("refusing", b"")
    for body in (b"{", b"[]", b"7"):
        reply = api.ask("POST", path_of("refusing", "redrive"), body, {"Content-Type": "application/json"})
        assert (reply.status, reply.problem) == (400, "bad-request")
    reply = api.ask("POST", path_of("refusing", "redrive"), b"{}", {"Content-Type": "text/plain"})
    assert (reply.status, reply.problem) == (415, "unsupported-media-type")


@pytest.mark.parametrize("fields", [{}, {"where": "offset = 0"}, {"dry_run": True}])
def test_a_queue_that_is_not_there(api: Api, fields: dict[str, object]) -> None:
    reply = api.ask("POST", path_of("nowhere", "redrive"), fields)
    assert (reply.status, reply.problem) == (404, "queue-not-found")
    assert "nowhere" in reply.json["detail"]


def test_the_role_that_it_takes(start_broker: StartBroker, tmp_path_factory: pytest.TempPathFactory) -> None:
    config = tmp_path_factory.mktemp("settings") / "penstock.toml"
    tokens = {"looker": "read", "worker": "operate"}
    config.write_text(
        "".join(
            f'[[http.tokens]]\nname = "{name}"\nrole = "{role}"\ntoken = "{name}-0123456789abcdef"\n'
            for name, role in tokens.items()
        )
    )
    broker = start_broker("--config", str(config))
    port = broker.ports["http"]
    with Api(port, "worker-0123456789abcdef") as worker, Api(port, "looker-0123456789abcdef") as looker:
        reject(broker, worker, "guarded", ORDERS)
        reply = looker.ask("POST", path_of("guarded", "redrive"), {"dry_run": True})
        assert (reply.status, reply.problem) == (403, "forbidden")
        assert counts(redrive(worker, "guarded")) == (4, 4, 4)


def test_the_document_says_it(api: Api) -> None:
    operation = json.loads(api.ask("GET", "/openapi.json").body)["paths"]["/v1/queues/{queue}/redrive"][
        "post"
    ]
    fields = operation["requestBody"]["content"]["application/json"]["schema"]["properties"]
    assert set(fields) == {
        "identity",
        "reason",
        "where",
        "limit",
        "dry_run",
        "from",
        "ranges",
        "scan_limit",
        "list_limit",
    }
    assert not operation["requestBody"]["required"]
