"""Queues over HTTP: what is shown of them, and pause, resume and purge, against a real broker."""

import time
from pathlib import Path
from typing import Any
from urllib.parse import quote

import jsonschema_rs
import pytest

from penstock.client import PhpmqClient
from tests.http.api import Api
from tests.http.conftest import StartBroker
from tests.server.harness import BrokerProcess, until

FIELDS = {
    "name",
    "ready",
    "delayed",
    "held",
    "dead",
    "offset_start",
    "offset_end",
    "event_start",
    "event_end",
    "bytes",
    "consumers",
    "rate_in",
    "rate_out",
    "oldest_seconds",
    "paused",
    "identity",
}


def phpmq(broker: BrokerProcess) -> PhpmqClient:
    return PhpmqClient(f"phpmq://127.0.0.1:{broker.ports['phpmq']}")


def path_of(queue: str, *more: str) -> str:
    return "/".join(["/v1/queues", quote(queue, safe=""), *more])


def promised(api: Api, path: str, method: str = "get") -> dict[str, Any]:
    """The schema of an answer, from the document that the broker serves. `path` is the route's."""
    document = api.get("/openapi.json")
    (content,) = document["paths"][path][method]["responses"]["200"]["content"].values()
    return {**content["schema"], "components": document["components"]}


def listed(api: Api, **query: object) -> list[str]:
    return [queue["name"] for queue in api.get("/v1/queues", **query)["queues"]]


# --- Looking ---


def test_a_queue_is_shown_as_it_is(broker: BrokerProcess, api: Api) -> None:
    api.send("shown", b"one", b"three", b"seven")
    shown = api.get(path_of("shown"))
    assert set(shown) == FIELDS | {"dead_reasons", "policy"}
    assert shown["name"] == "shown"
    assert (shown["ready"], shown["held"], shown["dead"]) == (3, 0, 0)
    assert (shown["offset_start"], shown["offset_end"]) == (0, 3)
    assert (shown["event_start"], shown["event_end"]) == (0, 3)
    assert shown["bytes"] == 13
    assert shown["consumers"] == 0
    assert 0 <= shown["oldest_seconds"] < 20
    assert shown["paused"] is False
    assert shown["dead_reasons"] == {}
    (in_list,) = api.get("/v1/queues", match="shown")["queues"]
    assert set(in_list) == FIELDS
    for field in FIELDS - {"rate_in", "oldest_seconds"}:
        assert in_list[field] == shown[field], field
    schema = promised(api, "/v1/queues/{queue}")
    jsonschema_rs.validate(schema, shown)
    jsonschema_rs.validate(promised(api, "/v1/queues"), api.get("/v1/queues"))


def test_an_answer_shows_what_was_confirmed_before_the_question(broker: BrokerProcess, api: Api) -> None:
    for count in range(1, 30):
        api.send("at-once", b"x")
        (queue,) = api.get("/v1/queues", match="at-once")["queues"]
        assert queue["ready"] == count
        api.send("at-once-2", b"x")
        assert api.get(path_of("at-once-2"))["ready"] == count


def test_held_dead_and_consumers_are_counted(broker: BrokerProcess, api: Api) -> None:
    api.send("counted", *[b"%d" % number for number in range(10)])
    with phpmq(broker) as mq:
        messages = list(mq.consume("counted", prefetch=4, count=4))
        messages[0].ack()
        messages[1].reject()
        mq.flush()
        until(lambda: api.get(path_of("counted"))["dead"] == 1, "the reject to be seen")
        shown = api.get(path_of("counted"))
        assert (shown["ready"], shown["held"], shown["dead"]) == (6, 2, 1)
        assert shown["dead_reasons"] == {"rejected": 1}
        assert shown["event_end"] == 12
        assert api.get("/v1/queues", match="counted")["queues"][0]["held"] == 2
    until(lambda: api.get(path_of("counted"))["held"] == 0, "what was held to come back")
    assert api.get(path_of("counted"))["ready"] == 8


def test_consumers_come_and_go_in_the_list_too(broker: BrokerProcess, api: Api) -> None:
    def consumers() -> int:
        return int(api.get("/v1/queues", match="visited")["queues"][0]["consumers"])

    api.send("visited", b"x")
    assert consumers() == 0
    with phpmq(broker) as one, phpmq(broker) as two:
        (first,) = one.consume("visited", count=1)
        next(iter(two.consume("visited", timeout=0.1)), None)
        until(lambda: consumers() >= 1, "a consumer to be shown")
        first.ack()
    until(lambda: consumers() == 0, "the consumers to be gone")


def test_nothing_unsettled_has_no_age(broker: BrokerProcess, api: Api) -> None:
    api.send("ageless", b"x")
    with phpmq(broker) as mq:
        for message in mq.consume("ageless", count=1):
            message.ack()
    until(lambda: api.get(path_of("ageless"))["held"] == 0, "the acknowledgement")
    shown = api.get(path_of("ageless"))
    assert shown["oldest_seconds"] is None
    assert shown["bytes"] == 0
    assert shown["rate_out"] > 0
    jsonschema_rs.validate(promised(api, "/v1/queues/{queue}"), shown)


@pytest.mark.long
def test_rates_rise_and_fall(broker: BrokerProcess, api: Api) -> None:
    def rate() -> float:
        return float(api.get("/v1/queues", match="busy")["queues"][0]["rate_in"])

    api.send("busy", b"x")
    began = time.monotonic()
    sent = 0
    while time.monotonic() < began + 3:
        api.send("busy", *[b"x"] * 20)
        sent += 20
    seconds = time.monotonic() - began
    # Over the last seconds, the pause before included.
    assert 0.3 * sent / 5 < rate() < 1.5 * sent / seconds
    until(lambda: rate() == 0, "the rate to fall to 0")


def test_the_policy_is_shown(start_broker: StartBroker, tmp_path: Path) -> None:
    config = tmp_path / "penstock.toml"
    config.write_text(
        '[queue."orders.*"]\nmax-deliveries = 5\nretention-seconds = 60\nretention-bytes = 7\n'
        'max-bytes = 1000\non-expiry = "drop"\ndurability = "interval"\ndead-letters = "off"\n'
        "expire-seconds = 30\nretry-delays = [1, 2.5]\ndeliver-after = 'sync'\n"
    )
    broker = start_broker("--config", str(config))
    with Api(broker.ports["http"]) as api:
        api.send("orders.new", b"x")
        api.send("plain", b"x")
        assert api.get(path_of("orders.new"))["policy"] == {
            "durability": "interval",
            "retention_seconds": 60,
            "retention_bytes": 7,
            "max_deliveries": 5,
            "max_bytes": 1000,
            "on_expiry": "drop",
            "dead_letters": False,
            "expire_seconds": 30,
            "retry_delays": [1, 2.5],
            "deliver_after": "sync",
        }
        assert api.get(path_of("plain"))["policy"] == {
            "durability": "commit",
            "retention_seconds": 86_400,
            "retention_bytes": 0,
            "max_deliveries": 20,
            "max_bytes": 0,
            "on_expiry": "dead",
            "dead_letters": True,
            "expire_seconds": 0,
            "retry_delays": [],
            "deliver_after": "accept",
        }


# --- Lists ---


NAMES = ["list.a", "list.b", "list.b1", "list.c", "list.ä", "list.[x]", "list/d", "list d?"]


@pytest.fixture(scope="module")
def names(broker: BrokerProcess) -> list[str]:
    """Some queues, in the order in which they are listed."""
    with Api(broker.ports["http"]) as api:
        for name in NAMES:
            api.send(name, b"x")
    return sorted(NAMES)


def test_pages_follow_each_other(names: list[str], api: Api) -> None:
    found: list[str] = []
    after = None
    while True:
        page = api.get("/v1/queues", match="list*", limit=3, after=after)
        found += [queue["name"] for queue in page["queues"]]
        after = page["next"]
        if after is None:
            break
        assert len(page["queues"]) == 3
        assert after == found[-1]
    assert found == names


def test_the_last_page_says_so(names: list[str], api: Api) -> None:
    page = api.get("/v1/queues", match="list*", limit=len(names))
    assert page["next"] is None
    assert len(page["queues"]) == len(names)
    page = api.get("/v1/queues", match="list*", after=names[-1])
    assert page == {"queues": [], "next": None}


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("list.a", ["list.a"]),
        ("list.?", ["list.a", "list.b", "list.c", "list.ä"]),
        ("list.b*", ["list.b", "list.b1"]),
        ("*.b1", ["list.b1"]),
        ("list.[x]", ["list.[x]"]),
        ("list.[a-c]", []),
        ("list/*", ["list/d"]),
        ("LIST.a", []),
        ("list d?", ["list d?"]),
        ("nobody", []),
    ],
)
def test_a_pattern_fits_whole_names(names: list[str], api: Api, pattern: str, expected: list[str]) -> None:
    assert listed(api, match=pattern) == sorted(expected)


@pytest.mark.parametrize("name", NAMES)
def test_every_name_has_an_address(names: list[str], api: Api, name: str) -> None:
    assert api.get(path_of(name))["name"] == name


@pytest.mark.parametrize(
    ("query", "what"),
    [
        ({"limit": 0}, "limit"),
        ({"limit": 10_001}, "limit"),
        ({"limit": "many"}, "limit"),
        ({"match": ""}, "match"),
        ({"match": "a\nb"}, "match"),
        ({"after": ""}, "after"),
        ({"sort": "up"}, "sort"),
    ],
)
def test_a_wrong_parameter_is_named(api: Api, query: dict[str, Any], what: str) -> None:
    reply = api.ask("GET", "/v1/queues", **query)
    assert reply.status == 400
    assert reply.problem == "bad-request"
    assert what in reply.json["detail"]


def test_thousands_of_queues(start_broker: StartBroker) -> None:
    broker = start_broker()
    count = 3000
    with Api(broker.ports["http"]) as api:
        with phpmq(broker) as mq:
            for number in range(count):
                mq.send(f"q{number:04}", b"x")
        until(lambda: len(listed(api, limit=10_000)) == count, "all queues")
        assert len(listed(api)) == 1000
        assert listed(api, match="q29*", limit=10_000) == [f"q{number}" for number in range(2900, 3000)]
        # Many callers at a time cost the broker a look or two, not one each.
        api.send("q0000", b"y")
        assert api.get("/v1/queues", limit=1)["queues"][0]["ready"] == 2


# --- No ---


ACTIONS = [
    ("GET", ()),
    ("DELETE", ()),
    ("POST", ("pause",)),
    ("POST", ("resume",)),
    ("POST", ("purge",)),
]


@pytest.mark.parametrize(("method", "more"), ACTIONS)
def test_a_queue_that_is_not_there(api: Api, method: str, more: tuple[str, ...]) -> None:
    reply = api.ask(method, path_of("nobody", *more))
    assert (reply.status, reply.problem) == (404, "queue-not-found")
    assert "nobody" in reply.json["detail"]
    assert "nobody" not in listed(api)


@pytest.mark.parametrize(("method", "more"), ACTIONS)
def test_a_door_is_no_queue(api: Api, method: str, more: tuple[str, ...]) -> None:
    api.send("with door/s", b"x")
    reply = api.ask(method, path_of("with door/s.dead", *more))
    assert (reply.status, reply.problem) == (400, "bad-request")
    detail = reply.json["detail"]
    assert "/v1/queues/with%20door%2Fs/messages?state=dead" in detail
    assert "'with door/s'" in detail


@pytest.mark.parametrize(("role", "allowed"), [("read", 0), ("operate", 2), ("admin", 4)])
def test_roles(start_broker: StartBroker, tmp_path: Path, role: str, allowed: int) -> None:
    config = tmp_path / "penstock.toml"
    config.write_text(
        "".join(
            f'[[http.tokens]]\nname = "{it}"\nrole = "{it}"\ntoken = "{it}-0123456789abcdef"\n'
            for it in ("read", "operate", "admin")
        )
    )
    broker = start_broker("--config", str(config))
    with Api(broker.ports["http"], "operate-0123456789abcdef") as operator:
        operator.send("guarded", b"x")
    with Api(broker.ports["http"]) as nobody:
        assert nobody.ask("GET", "/v1/queues").status == 401
    with Api(broker.ports["http"], f"{role}-0123456789abcdef") as api:
        assert listed(api) == ["guarded"]
        statuses = [
            api.ask("POST", path_of("guarded", action)).status for action in ("pause", "resume", "purge")
        ]
        statuses.append(api.ask("DELETE", path_of("guarded")).status)
        assert statuses == [200] * allowed + [403] * (4 - allowed)


# --- What operators do ---


def test_a_paused_queue_hands_out_nothing_until_it_is_resumed(broker: BrokerProcess, api: Api) -> None:
    api.send("paused", b"one")
    assert api.post(path_of("paused", "pause")) == {"paused": True}
    assert api.post(path_of("paused", "pause")) == {"paused": True}
    assert api.get(path_of("paused"))["paused"] is True
    assert api.get("/v1/queues", match="paused")["queues"][0]["paused"] is True
    with phpmq(broker) as mq:
        assert list(mq.consume("paused", timeout=0.3)) == []
        api.send("paused", b"two")
        assert list(mq.consume("paused", timeout=0.3)) == []
        assert api.post(path_of("paused", "resume")) == {"paused": False}
        # A consumer that waits gets them without asking again.
        bodies = []
        for message in mq.consume("paused", count=2, timeout=10):
            bodies.append(message.body)
            message.ack()
        assert bodies == [b"one", b"two"]
    assert api.get(path_of("paused"))["paused"] is False


def test_a_pause_outlives_the_broker(start_broker: StartBroker) -> None:
    broker = start_broker()
    with Api(broker.ports["http"]) as api:
        api.send("kept", b"x")
        api.post(path_of("kept", "pause"))
    broker.stop()
    broker.start()
    with Api(broker.ports["http"]) as api:
        shown = api.get(path_of("kept"))
        assert shown["paused"] is True
        assert shown["ready"] == 1


def test_purge_takes_what_waits_and_leaves_what_is_held(broker: BrokerProcess, api: Api) -> None:
    api.send("purged", *[b"%d" % number for number in range(20)])
    with phpmq(broker) as mq:
        held = list(mq.consume("purged", prefetch=3, count=3))
        held[0].reject()
        mq.flush()
        until(lambda: api.get(path_of("purged"))["dead"] == 1, "the reject")
        assert api.post(path_of("purged", "purge")) == {"purged": 17}
        shown = api.get(path_of("purged"))
        assert (shown["ready"], shown["held"], shown["dead"]) == (0, 2, 1)
        assert api.post(path_of("purged", "purge"), dead=True) == {"purged": 1}
        assert api.post(path_of("purged", "purge"), dead=True) == {"purged": 0}
        shown = api.get(path_of("purged"))
        assert (shown["ready"], shown["held"], shown["dead"]) == (0, 2, 0)
        assert mq.ack_many(held[1:]) == 2
    until(lambda: api.get(path_of("purged"))["held"] == 0, "the acknowledgements")
    assert api.get(path_of("purged"))["ready"] == 0


def test_what_was_purged_stays_purged(start_broker: StartBroker) -> None:
    broker = start_broker()
    with Api(broker.ports["http"]) as api:
        api.send("purged", b"x", b"y")
        assert api.post(path_of("purged", "purge")) == {"purged": 2}
    broker.stop()
    broker.start()
    with Api(broker.ports["http"]) as api:
        assert api.get(path_of("purged"))["ready"] == 0


@pytest.mark.parametrize("value", ["yes", "", "1"])
def test_purge_wants_true_or_false(api: Api, value: str) -> None:
    queue = f"asked {value}"
    api.send(queue, b"x")
    reply = api.ask("POST", path_of(queue, "purge"), dead=value)
    assert (reply.status, reply.problem) == (400, "bad-request")
    assert "'dead'" in reply.json["detail"]
    assert api.get(path_of(queue))["ready"] == 1
