"""Users and their rights over HTTP: every call, with the right and without it; and what is not shown."""

import http.client
import json
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from penstock.common.tokens import hash_token, new_token
from penstock.http.api.routes import all_routes
from penstock.http.guesses import FREE
from tests.http.api import Api
from tests.http.conftest import StartBroker
from tests.http.test_auth import status_of
from tests.server.harness import WAIT_SECONDS, BrokerProcess, until

RIGHTS = ("send", "receive", "read", "operate")
TOKENS = {name: new_token(name) for name in (*RIGHTS, "other", "old", "root", "all")}
HASHES = {name: hash_token(token) for name, token in TOKENS.items()}


def user(name: str, rights: str = "", more: str = "") -> str:
    return f'[[user]]\nname = "{name}"\ntoken-hash = "{HASHES[name]}"\n{rights}\n{more}\n'


def grants(*may: str, queues: str = "orders.*") -> str:
    return f'rights = [{{queues = "{queues}", may = {json.dumps(list(may))}}}]'


SETTINGS = "".join(
    [
        *(user(right, grants(right)) for right in RIGHTS),
        user("other", grants(*RIGHTS, queues="payroll")),
        user("all", grants(*RIGHTS, queues="*")),
        user("old", grants(*RIGHTS), "expires = 2020-01-31"),
        user("root", "admin = true"),
    ]
)

NEEDS = {
    "read": [
        ("GET", ""),
        ("GET", "messages"),
        ("GET", "messages/0"),
        ("GET", "log"),
        ("GET", "records"),
        ("GET", "samples"),
        ("GET", "search"),
        ("GET", "offset?time=2026-01-01T00:00:00Z"),
        ("POST", "copy"),
    ],
    "send": [("POST", "messages"), ("POST", "batch")],
    "receive": [("POST", "take"), ("POST", "settle")],
    "operate": [("POST", what) for what in ("pause", "resume", "redrive", "move", "withdraw")],
    "admin": [("POST", "purge"), ("DELETE", "")],
}
"""Calls about one queue, by the right that they need."""

ELSEWHERE = {
    ("GET", "/v1/queues"): "read",
    ("GET", "/v1/offsets"): "read",
    ("GET", "/v1/search"): "read",
    ("POST", "/v1/cuts"): "read",
    ("POST", "/v1/redrive"): "operate",
    ("GET", "/v1/folder"): "read everywhere",
    ("GET", "/v1/readers"): "read",
    ("GET", "/v1/readers/{name}"): "read",
    ("PUT", "/v1/readers/{name}"): "operate",
    ("DELETE", "/v1/readers/{name}"): "operate",
    ("POST", "/v1/readers/{name}/{wish}"): "operate",
    ("POST", "/v1/stages?transaction=t"): "send operate",
    ("POST", "/v1/transactions"): "send operate",
    ("GET", "/v1/transactions/{key}"): "send read operate",
    ("DELETE", "/v1/transactions/{key}"): "send operate",
    ("GET", "/metrics"): "read",
    ("GET", "/v1/engine"): "read",
    ("GET", "/v1/health"): "read",
    ("GET", "/v1/marks"): "read",
    ("POST", "/v1/marks"): "operate",
    ("GET", "/v1/samples"): "read everywhere",
    ("GET", "/v1/connections"): "read",
    ("GET", "/v1/connections/{number}"): "read",
    ("DELETE", "/v1/connections/{number}"): "operate",
    ("GET", "/v1/events"): "read",
    ("GET", "/v1/archive"): "read",
    ("GET", "/v1/audit"): "admin",
    ("GET", "/v1/backup"): "admin",
    ("GET", "/v1/backup/{file}"): "admin",
}
"""All other calls: one of these rights with some queue opens them, or with all."""

OPEN = {("GET", path) for path in ("/", "/healthz", "/readyz", "/openapi.json")}


def bearer(name: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {TOKENS[name]}"}


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BrokerProcess]:
    folder = tmp_path_factory.mktemp("rights")
    (folder / "penstock.toml").write_text(SETTINGS)
    broker = BrokerProcess(folder, "--http", "127.0.0.1:0", "--config", str(folder / "penstock.toml")).start()
    with as_user(broker, "root") as root:
        for queue in ("orders.a", "orders.b", "payroll"):
            root.send(queue, b"x")
    yield broker
    broker.kill()


def as_user(broker: BrokerProcess, name: str) -> Api:
    return Api(broker.ports["http"], TOKENS[name])


@pytest.mark.parametrize(
    ("needed", "method", "what"), [(right, *row) for right, rows in NEEDS.items() for row in rows]
)
def test_a_call_about_a_queue_needs_its_right(
    guarded: BrokerProcess, needed: str, method: str, what: str
) -> None:
    port = guarded.ports["http"]
    path = "/v1/queues/orders.a" + (f"/{what}" if what else "")
    for name in (*RIGHTS, "other", "all"):
        status, problem = status_of(port, method, path, bearer(name))
        if name == needed or (name == "all" and needed != "admin"):
            assert status not in (401, 403), (name, problem)
        else:
            assert (status, problem) == (403, "forbidden"), name
    assert status_of(port, method, path, bearer("old")) == (401, "unauthorized")
    # The letters of a queue are as open as the queue.
    if what == "take":
        dead = path.replace("orders.a", "orders.a.dead")
        assert status_of(port, method, dead, bearer("receive"))[0] == 200
        assert status_of(port, method, dead, bearer("send"))[0] == 403


@pytest.mark.parametrize(("method", "path"), ELSEWHERE)
def test_a_call_that_names_no_queue_needs_its_right_with_some(
    guarded: BrokerProcess, method: str, path: str
) -> None:
    port = guarded.ports["http"]
    needed = ELSEWHERE[method, path].split()
    path = path.format(
        name="nobody", key="none", number=999_999, wish="pause", file="00000000000000000000.seg"
    )
    for name in (*RIGHTS, "other", "all", "root"):
        has = {"other": RIGHTS, "all": (*RIGHTS, "everywhere"), "root": (*RIGHTS, "everywhere", "admin")}
        held = has.get(name, (name,))
        enough = "everywhere" in held if "everywhere" in needed else True
        status, problem = status_of(port, method, path, bearer(name))
        if enough and set(needed) & set(held):
            assert status not in (401, 403), (name, problem)
        else:
            assert (status, problem) == (403, "forbidden"), name
    for nobody in ({}, bearer("old"), {"Authorization": "Bearer read.guessed"}):
        assert status_of(port, method, path, nobody) == (401, "unauthorized")


def test_no_route_is_left_out() -> None:
    queues = {
        (method, f"/v1/queues/{{queue}}/{what.partition('?')[0]}".rstrip("/").replace("/0", "/{offset}"))
        for rows in NEEDS.values()
        for method, what in rows
    }
    elsewhere = {(method, path.partition("?")[0]) for method, path in ELSEWHERE}
    assert {(route.method, route.path) for route in all_routes(3600)} == queues | elsewhere | OPEN


def test_a_refusal_says_who_what_and_which_right(guarded: BrokerProcess) -> None:
    with as_user(guarded, "read") as api:
        reply = api.ask("POST", "/v1/queues/orders.a/messages", b"x")
    assert reply.json["detail"] == (
        "'read' may not do this: it needs the right send with queue 'orders.a'; see [[user]]"
    )
    assert reply.json["queue"] == "orders.a"


def test_what_one_may_not_read_is_in_no_list(guarded: BrokerProcess) -> None:
    with (
        as_user(guarded, "read") as api,
        as_user(guarded, "other") as other,
        as_user(guarded, "send") as s,
    ):
        assert names(api.get("/v1/queues")["queues"]) == ["orders.a", "orders.b"]
        assert names(api.get("/v1/queues", match="*a*")["queues"]) == ["orders.a"]
        assert names(api.get("/v1/queues", limit=1)["queues"]) == ["orders.a"]
        assert names(other.get("/v1/queues")["queues"]) == ["payroll"]
        assert s.ask("GET", "/v1/queues").status == 403
        until(lambda: names(api.get("/v1/offsets")["queues"]) == ["orders.a", "orders.b"], "it to be synced")
        assert names(api.get("/v1/offsets", queues="payroll,orders.b")["queues"]) == ["orders.b"]
        metrics = api.ask("GET", "/metrics").body.decode()
        assert 'queue="orders.a"' in metrics
        assert "payroll" not in metrics
        cut = {"queue": "payroll", "start": 0, "end": 1, "bytes": 1}
        assert api.ask("POST", "/v1/cuts", {"ranges": [cut]}).status == 403
        assert api.ask("GET", "/v1/folder").status == 403
    with as_user(guarded, "all") as api:
        assert api.ask("GET", "/v1/folder").status == 200


def names(rows: list[dict[str, Any]]) -> list[str]:
    return [row["name"] for row in rows]


def test_events_tell_of_what_one_may_read(guarded: BrokerProcess) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", guarded.ports["http"], timeout=30)
    connection.request("GET", "/v1/events", headers=bearer("other"))
    response = connection.getresponse()
    told = b""
    while b"\n\n" not in told:
        told += response.read1()
    connection.close()
    (row,) = json.loads(told.partition(b"data: ")[2].partition(b"\n")[0])["queues"]
    assert row["name"] == "payroll"


def test_connections_are_those_at_queues_that_one_may_read(guarded: BrokerProcess) -> None:
    with (
        as_user(guarded, "root") as root,
        as_user(guarded, "all") as worker,
        as_user(guarded, "read") as api,
        as_user(guarded, "other") as other,
        ThreadPoolExecutor(1) as pool,
    ):
        waiting = pool.submit(worker.post, "/v1/queues/orders.new/take", wait=WAIT_SECONDS)

        def seen(by: Api) -> list[str]:
            return [it["user"] for it in by.get("/v1/connections")["connections"] if it["consumes"]]

        until(lambda: seen(api) == ["all"], "somebody to wait")
        assert seen(root) == ["all"]
        assert other.get("/v1/connections")["connections"] == []
        root.send("orders.new", b"x")
        assert len(waiting.result()["messages"]) == 1


def test_readers_belong_to_who_operates_all_their_queues(guarded: BrokerProcess) -> None:
    with (
        as_user(guarded, "all") as everywhere,
        as_user(guarded, "operate") as api,
        as_user(guarded, "read") as r,
    ):
        both = {"positions": {"orders.a": 0, "payroll": 0}}
        assert api.ask("PUT", "/v1/readers/mine", both).status == 403
        assert api.ask("PUT", "/v1/readers/mine", {"positions": {"orders.a": 0}}).status == 200
        assert everywhere.ask("PUT", "/v1/readers/theirs", both).status == 200
        assert api.ask("PUT", "/v1/readers/theirs", {"positions": {"orders.a": 0}}).status == 403
        about = {"about": {"state": "running", "wish": 0}}
        assert everywhere.ask("PUT", "/v1/readers/theirs", about).status == 200
        assert api.ask("POST", "/v1/readers/theirs/pause").status == 403
        assert everywhere.ask("POST", "/v1/readers/theirs/pause").status == 200
        assert api.ask("DELETE", "/v1/readers/theirs").status == 403
        seen = {it["name"]: [at["queue"] for at in it["queues"]] for it in r.get("/v1/readers")["readers"]}
        assert seen == {"mine": ["orders.a"], "theirs": ["orders.a"]}
        assert api.ask("DELETE", "/v1/readers/mine").status == 204
        assert everywhere.ask("DELETE", "/v1/readers/theirs").status == 204


def test_transactions_need_the_right_with_every_queue_and_have_keys_of_their_own(
    guarded: BrokerProcess,
) -> None:
    lines = b'{"queue": "orders.a", "value": "1"}\n{"queue": "payroll", "value": "2"}\n'
    kind = {"Content-Type": "application/x-ndjson"}
    stages = "/v1/stages"
    with (
        as_user(guarded, "send") as api,
        as_user(guarded, "all") as everywhere,
        as_user(guarded, "other") as o,
    ):
        reply = api.ask("POST", stages, lines, kind, transaction="t")
        assert (reply.status, reply.json["queue"]) == (403, "payroll")
        (line, _) = lines.split(b"\n", 1)
        stage = api.ask("POST", stages, line, kind, transaction="t").json["stage"]
        # The same key of others is another one: they can neither see, nor commit, nor abort it.
        assert everywhere.ask("GET", "/v1/transactions/t").problem == "transaction-not-found"
        assert o.ask("DELETE", "/v1/transactions/t").json["state"] == "aborted"
        fields = {"transaction": "t", "stages": [stage]}
        assert o.ask("POST", "/v1/transactions", fields).problem == "stage-not-found"
        assert api.get("/v1/transactions/t")["state"] == "open"
        assert api.post("/v1/transactions", fields)["transaction"] == "t"
        assert api.post("/v1/transactions", fields)["repeated"]
        assert api.get("/v1/transactions/t")["state"] == "committed"
        reply = api.ask("POST", "/v1/transactions", {"transaction": "t", "stages": [stage[::-1]]})
        assert "\x1f" not in reply.json["detail"]
        assert o.ask("GET", "/v1/transactions/t").problem == "transaction-not-found"
        where = {"transaction": "r", "queue": "orders.a", "redrive": True}
        assert api.ask("POST", stages, b'{"offset": 0, "value": "1"}', kind, **where).status == 403


def test_no_answer_says_whether_a_queue_of_others_is_there(guarded: BrokerProcess) -> None:
    kind = {"Content-Type": "application/x-ndjson"}
    with as_user(guarded, "operate") as api:
        for queue in ("payroll", "nowhere"):
            where = {"transaction": "r", "queue": queue, "redrive": True}
            reply = api.ask("POST", "/v1/stages", b'{"offset": 0, "value": "1"}', kind, **where)
            assert (reply.status, reply.json["queue"]) == (403, queue)
    with as_user(guarded, "read") as api, as_user(guarded, "root") as root:
        (seen,) = (it for it in root.get("/v1/engine")["listeners"] if it["protocol"] == "sspq")
        assert seen["queue"]
        assert not any(it["queue"] for it in api.get("/v1/engine")["listeners"])


def test_a_condition_needs_the_right_to_read(guarded: BrokerProcess) -> None:
    asked = {"where": "value.salary > 1000", "dry_run": True}
    with as_user(guarded, "operate") as api, as_user(guarded, "root") as root:
        assert root.post("/v1/queues/orders.a/redrive", asked)["matched"] == 0
        reply = api.ask("POST", "/v1/queues/orders.a/redrive", asked)
        assert (reply.status, reply.problem) == (403, "forbidden")
        assert "the right read with queue 'orders.a'" in reply.json["detail"]


def test_a_token_that_is_over_says_when(guarded: BrokerProcess) -> None:
    with as_user(guarded, "old") as api:
        reply = api.ask("GET", "/v1/queues")
    assert (reply.status, reply.json["detail"]) == (
        401,
        "the time of user 'old' was over on 2020-01-31 00:00 UTC",
    )


Reload = Callable[[str], None]


@pytest.fixture
def reload(tmp_path: Path, start_broker: StartBroker) -> tuple[BrokerProcess, Reload]:
    """A broker with the settings of this module, and how to give it others."""
    broker = start_broker(config=SETTINGS)

    def reload(text: str) -> None:
        before = broker.log().count("read again")
        (tmp_path / "broker" / "penstock.toml").write_text(text)
        broker.signal(signal.SIGHUP)
        until(lambda: broker.log().count("read again") > before, "the settings to be read again")

    return broker, reload


def test_tokens_rotate_and_are_revoked(reload: tuple[BrokerProcess, Reload]) -> None:
    broker, put = reload
    new = new_token("root")
    both = f'[[user]]\nname = "root"\nadmin = true\ntoken-hash = ["{HASHES["root"]}", "{hash_token(new)}"]\n'
    with Api(broker.ports["http"], TOKENS["root"]) as old, Api(broker.ports["http"], new) as api:
        assert old.ask("GET", "/v1/queues").status == 200
        assert api.ask("GET", "/v1/queues").status == 401
        put(both)
        until(lambda: api.ask("GET", "/v1/queues").status == 200, "the new one to be known")
        assert old.ask("GET", "/v1/queues").status == 200
        put(both.replace(f'"{HASHES["root"]}", ', ""))
        until(lambda: old.ask("GET", "/v1/queues").status == 401, "the old one to be revoked")
        assert api.ask("GET", "/v1/queues").status == 200


def ended(by: str, name: str) -> str:
    """Settings in which somebody has no rights any more, or soon will not have them."""
    if by == "reload":
        return SETTINGS.replace(user(name, grants(name)), user(name, grants(name, queues="none")))
    soon = datetime.now(UTC) + timedelta(seconds=1)
    expires = f"expires = {soon:%Y-%m-%dT%H:%M:%S.%fZ}"
    return SETTINGS.replace(user(name, grants(name)), user(name, grants(name), expires))


def refused(broker: BrokerProcess, name: str, method: str, what: str) -> None:
    """Wait until a right is gone."""
    with as_user(broker, name) as api:
        until(lambda: api.ask(method, f"/v1/queues/orders.a{what}").status in (401, 403), "it to be refused")


@pytest.mark.parametrize("by", ["reload", "time"])
def test_who_waits_for_messages_gets_none_when_the_right_is_gone(
    reload: tuple[BrokerProcess, Reload], by: str
) -> None:
    broker, put = reload
    with (
        as_user(broker, "receive") as worker,
        as_user(broker, "root") as root,
        ThreadPoolExecutor(1) as aside,
    ):
        taking = aside.submit(worker.ask, "POST", "/v1/queues/orders.a/take", wait=WAIT_SECONDS)
        until(lambda: bool(root.get("/v1/connections")["connections"]), "the worker to wait")
        put(ended(by, "receive"))
        refused(broker, "receive", "POST", "/settle")
        root.send("orders.a", b"secret")
        reply = taking.result(WAIT_SECONDS)
        assert (reply.status, reply.problem) == (403, "forbidden")
        assert b"secret" not in reply.body
        (message,) = root.post("/v1/queues/orders.a/take", wait=WAIT_SECONDS)["messages"]
        assert (message["value"], message["attempts"]) == ("secret", 1)


@pytest.mark.parametrize("by", ["reload", "time"])
def test_what_is_being_told_ends_when_the_right_is_gone(
    reload: tuple[BrokerProcess, Reload], by: str
) -> None:
    broker, put = reload
    with as_user(broker, "root") as root:
        for _ in range(40):
            root.send("orders.a", bytes(1 << 20))
    with ExitStack() as open_:
        events, log = (
            open_.enter_context(stream(broker, it)) for it in ("/v1/events", "/v1/queues/orders.a/log")
        )
        heard = b""
        while b'"name":"orders.a"' not in heard:
            more = events.read1()
            assert more, "it has ended"
            heard += more
        put(ended(by, "read"))
        refused(broker, "read", "GET", "")
        events.read()  # to its end
        with pytest.raises(http.client.IncompleteRead):
            log.read()


def test_what_was_staged_is_not_committed_when_the_right_is_gone(
    reload: tuple[BrokerProcess, Reload],
) -> None:
    broker, put = reload
    two = user("send", 'rights = [{queues = ["orders.*", "stock"], may = ["send"]}]')
    put(SETTINGS.replace(user("send", grants("send")), two))
    kind = {"Content-Type": "application/x-ndjson"}
    with as_user(broker, "send") as api, as_user(broker, "root") as root:

        def stage(key: str, queue: str) -> str:
            reply = api.ask("POST", "/v1/stages", b'{"value": "1"}', kind, transaction=key, queue=queue)
            return str(reply.json["stage"])

        until(lambda: api.ask("POST", "/v1/queues/stock/messages", b"x").status == 200, "the new rights")
        stages = {queue: stage(queue, queue) for queue in ("stock", "orders.a")}
        put(SETTINGS)
        until(lambda: api.ask("POST", "/v1/queues/stock/messages", b"x").status == 403, "the old rights")
        before = root.get("/v1/queues/stock")["offset_end"]
        reply = api.ask("POST", "/v1/transactions", {"transaction": "stock", "stages": [stages["stock"]]})
        assert (reply.status, reply.json["queue"]) == (403, "stock")
        assert root.get("/v1/queues/stock")["offset_end"] == before
        api.post("/v1/transactions", {"transaction": "orders.a", "stages": [stages["orders.a"]]})


@contextmanager
def stream(broker: BrokerProcess, path: str) -> Iterator[http.client.HTTPResponse]:
    connection = http.client.HTTPConnection("127.0.0.1", broker.ports["http"], timeout=WAIT_SECONDS)
    connection.request("GET", path, headers=bearer("read"))
    with closing(connection), connection.getresponse() as response:
        assert response.status == 200
        yield response


def test_guessing_is_slowed_down_and_locks_nobody_out_who_is_in(start_broker: StartBroker) -> None:
    broker = start_broker(config=SETTINGS)
    port = broker.ports["http"]
    with as_user(broker, "root") as root:
        assert root.ask("GET", "/v1/queues").status == 200
        for _ in range(3 * FREE):  # A program with an old token is no guess.
            assert status_of(port, "GET", "/v1/queues", {"Authorization": "Bearer read.old"})[0] == 401
        statuses = [
            status_of(port, "GET", "/v1/queues", {"Authorization": f"Bearer read.{number}"})
            for number in range(FREE + 5)
        ]
        assert statuses[:5] == [(401, "unauthorized")] * 5
        assert statuses[-1] == (429, "too-many-guesses")
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
        connection.request("GET", "/v1/queues", headers={"Authorization": "Bearer read.more"})
        response = connection.getresponse()
        assert 1 <= int(response.headers["Retry-After"]) <= 60
        connection.close()
        assert root.ask("GET", "/v1/queues").status == 200
        until(
            lambda: any(it.get("result") == "too-many-guesses" for it in root.get("/v1/audit")["lines"]),
            "the guesses to be in the audit",
        )
