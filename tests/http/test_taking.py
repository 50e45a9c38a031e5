"""Taking and settling over HTTP, on a real broker: every rule of a worker's contract."""

import base64
import io
import json
import signal
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from tests.http.api import ARROW, NDJSON, Api, Reply
from tests.http.conftest import StartBroker
from tests.http.morgue import path_of, phpmq
from tests.server.harness import WAIT_SECONDS, BrokerProcess, Wire, until

Message = dict[str, Any]


def take(api: Api, queue: str, **query: Any) -> list[Message]:
    messages: list[Message] = api.post(path_of(queue, "take"), **query)["messages"]
    return messages


def settle(api: Api, queue: str, **lists: Any) -> dict[str, Any]:
    settled: dict[str, Any] = api.post(path_of(queue, "settle"), lists)
    return settled


def done(gone: list[str] | None = None, **counts: int) -> dict[str, Any]:
    return {"ack": 0, "requeue": 0, "reject": 0, "extend": 0, **counts, "gone": gone or []}


def counts(api: Api, queue: str) -> tuple[int, int, int]:
    """Ready, held and dead."""
    row = api.get(path_of(queue))
    return row["ready"], row["held"], row["dead"]


def values(messages: list[Message]) -> list[str]:
    return [message["value"] for message in messages]


def ids(messages: list[Message]) -> list[str]:
    return [message["id"] for message in messages]


def attempts(messages: list[Message]) -> list[int]:
    return [message["attempts"] for message in messages]


def history(api: Api, queue: str, offset: int) -> list[tuple[str, str | None]]:
    events = api.get(path_of(queue, f"messages/{offset}"))["history"]
    return [(event["event"], event["reason"]) for event in events]


def takers(api: Api, queue: str) -> list[dict[str, Any]]:
    """Who waits at a queue, or holds something, over HTTP."""
    return [
        it
        for it in api.get("/v1/connections")["connections"]
        if it["protocol"] == "http" and {"queue": queue, "dead": False} in it["consumes"]
    ]


@contextmanager
def waiting(broker: BrokerProcess, queue: str, **query: Any) -> Iterator[tuple[Future[Reply], Api]]:
    """Somebody else who waits at a queue, when this begins."""
    with ThreadPoolExecutor(1) as pool, Api(broker.ports["http"]) as other, Api(broker.ports["http"]) as api:
        before = len(takers(api, queue))
        asked = pool.submit(other.ask, "POST", path_of(queue, "take"), wait=WAIT_SECONDS, **query)
        until(lambda: len(takers(api, queue)) > before, "somebody to wait")
        yield asked, other


# --- taking ------------------------------------------------------------------------------------------


def test_a_message_is_taken_and_acknowledged(api: Api) -> None:
    before = datetime.now(UTC)
    receipt = api.post(path_of("one", "messages"), b"hello")
    (message,) = take(api, "one")
    times = {name: datetime.fromisoformat(message.pop(name)) for name in ("timestamp", "lease_ends")}
    assert message == {
        "offset": receipt["offset"],
        "id": receipt["id"],
        "value": "hello",
        "attempts": 1,
        "headers": {},
        "expires": None,
        "retries": None,
    }
    assert before - timedelta(seconds=1) < times["timestamp"] < times["lease_ends"]
    assert (
        timedelta(seconds=59)
        < times["lease_ends"] - times["timestamp"]
        < timedelta(seconds=60 + WAIT_SECONDS)
    )
    assert counts(api, "one") == (0, 1, 0)
    assert take(api, "one") == []
    assert settle(api, "one", ack=[message["id"]]) == done(ack=1)
    assert counts(api, "one") == (0, 0, 0)
    assert history(api, "one", 0) == [("accepted", None), ("acked", None)]
    assert settle(api, "one", ack=[message["id"]]) == done([message["id"]])


def test_what_a_message_brings_along(api: Api) -> None:
    headers = {
        "Penstock-Header-Traceparent": "00-abc",
        "Penstock-Header-X": "größe".encode().decode("latin-1"),
    }
    body = bytes(range(256))
    assert api.ask("POST", path_of("terms", "messages"), body, headers, ttl=600, retries=3).status == 200
    (message,) = take(api, "terms", lease=1.5)
    assert base64.b64decode(message["value_base64"]) == body
    assert "value" not in message
    assert message["headers"] == {"traceparent": "00-abc", "x": "größe"}
    assert message["retries"] == 3
    accepted, expires, lease_ends = (
        datetime.fromisoformat(message[name]) for name in ("timestamp", "expires", "lease_ends")
    )
    assert expires - accepted == timedelta(seconds=600)
    assert lease_ends < datetime.now(UTC) + timedelta(seconds=1.5)
    settle(api, "terms", ack=[message["id"]])


def test_so_many_as_are_there_and_asked_for(api: Api) -> None:
    api.send("many", *(b"%d" % number for number in range(5)))
    assert values(take(api, "many", max=2)) == ["0", "1"]
    assert values(take(api, "many", max=1000, wait=30)) == ["2", "3", "4"]
    assert take(api, "many", max=1000) == []


def test_all_forms_say_the_same(api: Api) -> None:
    api.send("forms", b"text", "größe".encode(), b"\xff\xfe", retries=7)
    (plain, large, bytes_) = taken = take(api, "forms", max=10)
    assert plain["value"], large["value"] == ("text", "größe")
    assert base64.b64decode(bytes_["value_base64"]) == b"\xff\xfe"
    assert settle(api, "forms", requeue=[{"id": it, "delay": 0} for it in ids(taken)]) == done(requeue=3)
    reply = api.ask("POST", path_of("forms", "take"), None, {"Accept": NDJSON}, max=10)
    assert reply.headers["content-type"] == NDJSON
    lines = [json.loads(line) for line in reply.body.splitlines()]
    moving = {"attempts": 2, "lease_ends": lines[0]["lease_ends"]}
    assert lines == [{**message, **moving} for message in taken]
    settle(api, "forms", requeue=[{"id": it, "delay": 0} for it in ids(taken)])
    reply = api.ask("POST", path_of("forms", "take"), None, {"Accept": f"{ARROW}, {NDJSON}"}, max=10)
    assert reply.headers["content-type"] == ARROW
    rows = pa.ipc.open_stream(io.BytesIO(reply.body)).read_all().to_pylist()
    assert [row["value"] for row in rows] == [b"text", "größe".encode(), b"\xff\xfe"]
    assert [(row["id"], row["attempts"], row["retries"]) for row in rows] == [(it, 3, 7) for it in ids(taken)]
    assert [row["timestamp"] for row in rows] == [datetime.fromisoformat(it["timestamp"]) for it in taken]
    nothing = api.ask("POST", path_of("forms", "take"), None, {"Accept": ARROW})
    assert pa.ipc.open_stream(io.BytesIO(nothing.body)).read_all().num_rows == 0
    assert api.ask("POST", path_of("forms", "take"), None, {"Accept": NDJSON}).body == b""


def test_names_with_anything_in_them(api: Api) -> None:
    for queue in ("a/b", "a b?c=d&e", "%2F", "é€"):
        api.send(queue, b"x")
        (message,) = take(api, queue)
        assert settle(api, queue, ack=[message["id"]]) == done(ack=1)


def test_large_messages_come_in_parts(api: Api) -> None:
    """What is more than an answer should have comes with the next; one that is larger comes alone."""
    large = b"x" * 6_000_000
    api.send("large", b"a" * 3_000_000, large, *[b"y" * 1_500_000] * 4)
    sizes = []
    while messages := take(api, "large", max=1000):
        sizes.append([len(message["value"]) for message in messages])
        settle(api, "large", ack=ids(messages))
    assert [size for part in sizes for size in part] == [3_000_000, 6_000_000, *[1_500_000] * 4]
    assert all(sum(part) < 8_000_000 for part in sizes)
    assert len(sizes) > 2


# --- waiting -----------------------------------------------------------------------------------------


def test_a_taker_waits_for_a_queue_that_is_not_there_yet(broker: BrokerProcess, api: Api) -> None:
    with waiting(broker, "later", max=10) as (asked, _):
        (taker,) = takers(api, "later")
        assert taker["name"].startswith("http:127.0.0.1:")
        assert (taker["held"], taker["peer"]) == (0, taker["name"].removeprefix("http:"))
        api.send("later", b"now")
        assert values(asked.result(WAIT_SECONDS).json["messages"]) == ["now"]
    assert takers(api, "later") == []


def test_a_wait_that_is_over(api: Api) -> None:
    began = time.monotonic()
    assert take(api, "never", wait=0.3) == []
    assert 0.3 <= time.monotonic() - began < WAIT_SECONDS


def test_who_waited_first_is_served_first(broker: BrokerProcess, api: Api) -> None:
    api.send("turns", b"0")
    settle(api, "turns", ack=ids(take(api, "turns")))
    with waiting(broker, "turns") as (first, _), waiting(broker, "turns") as (second, _):
        assert api.get(path_of("turns"))["consumers"] == 2
        api.send("turns", b"1")
        assert values(first.result(WAIT_SECONDS).json["messages"]) == ["1"]
        api.send("turns", b"2")
        assert values(second.result(WAIT_SECONDS).json["messages"]) == ["2"]


def test_a_paused_queue_gives_nothing(broker: BrokerProcess, api: Api) -> None:
    api.send("paused", b"x")
    api.post(path_of("paused", "pause"))
    assert take(api, "paused") == []
    with waiting(broker, "paused") as (asked, _):
        api.post(path_of("paused", "resume"))
        assert values(asked.result(WAIT_SECONDS).json["messages"]) == ["x"]


def test_a_caller_that_leaves_while_it_waits_takes_nothing(broker: BrokerProcess, api: Api) -> None:
    with waiting(broker, "left") as (asked, other):
        assert other._connection.sock is not None
        other._connection.sock.shutdown(socket.SHUT_RDWR)
        with pytest.raises(ConnectionError):
            asked.result(WAIT_SECONDS)
        until(lambda: takers(api, "left") == [], "the caller to be gone")
    api.send("left", b"x")
    assert counts(api, "left") == (1, 0, 0)
    (message,) = take(api, "left")
    assert message["attempts"] == 1


def test_a_caller_that_does_not_read_its_answer_gives_it_back(broker: BrokerProcess, api: Api) -> None:
    """The answer is larger than all buffers on its way: the caller is gone before it is written."""
    api.send("unread", *[b"x" * 6_000_000])
    with socket.create_connection(("127.0.0.1", broker.ports["http"]), WAIT_SECONDS) as wire:
        wire.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        wire.sendall(b"POST /v1/queues/unread/take HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert wire.recv(12) == b"HTTP/1.1 200"
        assert counts(api, "unread") == (0, 1, 0)
    until(lambda: counts(api, "unread") == (1, 0, 0), "the message to be back")
    (message,) = take(api, "unread")
    assert message["attempts"] == 1, "no delivery is counted"


def test_many_who_come_and_go_lose_nothing(broker: BrokerProcess, api: Api) -> None:
    """Takers that leave at any moment, and one that stays: every message is acknowledged once."""
    over = threading.Event()

    def come_and_go(pause: float) -> None:
        while not over.is_set():
            with socket.create_connection(("127.0.0.1", broker.ports["http"]), WAIT_SECONDS) as wire:
                wire.sendall(b"POST /v1/queues/fickle/take?max=3&wait=5 HTTP/1.1\r\nHost: localhost\r\n\r\n")
                over.wait(pause)

    total = 100
    with ThreadPoolExecutor(4) as pool:
        running = [pool.submit(come_and_go, pause) for pause in (0, 0.001, 0.003, 0.01)]
        seen: list[str] = []
        try:
            for number in range(total):
                api.send("fickle", b"%d" % number)
                for message in take(api, "fickle", max=10):
                    seen.append(message["value"])
                    settle(api, "fickle", ack=[message["id"]])
        finally:
            over.set()
        for it in running:
            it.result()
    # What somebody was sent and did not read, the system had already: that comes again when the lease ends.
    ready, held, dead = counts(api, "fickle")
    assert len(seen) == len(set(seen)) == total - ready - held
    assert dead == 0


def test_who_ends_its_half_and_reads_on_knows_what_it_has(broker: BrokerProcess, api: Api) -> None:
    """It does so at about the moment in which there is something: it is sent that, or nobody holds it."""
    request = b"POST /v1/queues/half/take?wait=5 HTTP/1.1\r\nHost: localhost\r\n\r\n"
    with ThreadPoolExecutor(1) as pool, Api(broker.ports["http"]) as other:
        for number in range(45):
            with Wire(("127.0.0.1", broker.ports["http"])) as wire:
                wire.say(request)
                until(lambda: takers(api, "half") != [], "somebody to wait")
                sending = pool.submit(other.send, "half", b"x")
                threading.Event().wait(number % 15 / 3000)  # sooner and later than the answer
                wire.socket.shutdown(socket.SHUT_WR)
                answer = b"".join(iter(wire.some, b""))
                sending.result()
            if b'"offset"' in answer:
                messages = json.loads(answer.partition(b"\r\n\r\n")[2])["messages"]
            else:
                messages = take(api, "half", wait=WAIT_SECONDS)
            assert settle(api, "half", ack=ids(messages)) == done(ack=1), number


def test_callers_through_a_socket_of_the_machine(start_broker: StartBroker, tmp_path: Path) -> None:
    """They have no address, and yet each is one."""
    start_broker("--http", f"unix:{tmp_path / 'http'}")
    wires = [Wire(str(tmp_path / "http")) for _ in range(3)]
    for wire in wires[:2]:
        wire.say(b"POST /v1/queues/q/take?wait=20 HTTP/1.1\r\nHost: localhost\r\n\r\n")
    body = b'{"value": "x"}\n' * 2
    wires[2].say(
        b"POST /v1/queues/q/batch HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/x-ndjson\r\n"
        b"Content-Length: %d\r\n\r\n%b" % (len(body), body)
    )
    for wire in wires:
        assert wire.hear(15) == b"HTTP/1.1 200 OK"
        wire.socket.close()


def test_a_broker_that_stops_keeps_nobody_waiting(start_broker: StartBroker) -> None:
    broker = start_broker("--drain-seconds", "60")
    with waiting(broker, "stops") as (asked, _):
        broker.signal(signal.SIGTERM)
        reply = asked.result(WAIT_SECONDS)
        assert (reply.status, reply.body) == (200, b'{"messages":[]}')
    assert broker.wait() == 0


def test_a_worker_may_settle_while_the_broker_stops(start_broker: StartBroker) -> None:
    broker = start_broker("--drain-seconds", str(WAIT_SECONDS))
    with Api(broker.ports["http"]) as api, Api(broker.ports["http"]) as other:
        api.send("q", b"x")
        (message,) = take(api, "q")
        broker.signal(signal.SIGTERM)
        until(lambda: other.ask("POST", path_of("q", "take")).status == 503, "the broker to drain")
        assert settle(api, "q", ack=[message["id"]]) == done(ack=1)
    assert broker.wait() == 0
    assert "not stopped" not in broker.log()
    broker.start()
    with Api(broker.ports["http"]) as api:
        assert counts(api, "q") == (0, 0, 0)


def test_who_does_not_read_its_answer_is_closed_and_counts_until_then(start_broker: StartBroker) -> None:
    room = str(16 << 20)
    broker = start_broker(
        "--limits-frame-seconds", "4", "--http-bodies-bytes-max", room, "--http-body-bytes-max", room
    )
    with Api(broker.ports["http"]) as api, socket.socket() as deaf:
        api.send("q", b"x" * 9_000_000)
        api.send("q", b"y" * 9_000_000)
        deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        deaf.connect(("127.0.0.1", broker.ports["http"]))
        deaf.sendall(b"POST /v1/queues/q/take HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 0\r\n\r\n")
        until(lambda: counts(api, "q") == (1, 1, 0), "it to have one")
        assert api.ask("POST", path_of("q", "take")).problem == "unavailable"
        until(lambda: counts(api, "q") == (2, 0, 0), "it to be closed")
        assert "took nothing of its messages for 4 s: closed" in broker.log()
        assert attempts(take(api, "q")) == [1]


def test_a_broker_stops_at_once_where_takers_have_left(start_broker: StartBroker) -> None:
    broker = start_broker("--drain-seconds", "60")
    with Api(broker.ports["http"]) as api, waiting(broker, "left") as (asked, other):
        assert other._connection.sock is not None
        other._connection.sock.shutdown(socket.SHUT_RDWR)
        with pytest.raises(ConnectionError):
            asked.result(WAIT_SECONDS)
        until(lambda: takers(api, "left") == [], "the caller to be gone")
    assert broker.stop() == 0


# --- settling ----------------------------------------------------------------------------------------


def test_many_verdicts_in_one_call(api: Api) -> None:
    api.send("verdicts", *(b"%d" % number for number in range(8)))
    taken = take(api, "verdicts", max=8)
    one, two, three, four, five, six, seven, eight = ids(taken)
    other = f"{one[:17]}{'0' if one[17] != '0' else '1'}{one[18:]}"
    assert settle(
        api,
        "verdicts",
        ack=[one, {"id": two}, {"id": three, "attempts": 1}],
        requeue=[four, {"id": five, "delay": 0}],
        reject=[six, {"id": seven, "reason": "no such order"}],
        extend=[{"id": eight, "lease": 600}, {"id": other, "lease": 1}],
    ) == done([other], ack=3, requeue=2, reject=2, extend=1)
    assert counts(api, "verdicts") == (2, 1, 2)
    again = take(api, "verdicts", max=10)
    assert (ids(again), attempts(again)) == ([four, five], [2, 2])
    letters = take(api, "verdicts", max=10, dead=True)
    assert ids(letters) == [six, seven]
    assert [(it["reason"], it["why"]) for it in letters] == [
        ("rejected", None),
        ("rejected", "no such order"),
    ]
    assert settle(api, "verdicts", ack=[eight, *ids(again), *ids(letters)]) == done(ack=5)
    assert counts(api, "verdicts") == (0, 0, 0)


def test_verdicts_come_along_with_the_next_take(broker: BrokerProcess, api: Api) -> None:
    for value in (b"1", b"2", b"3"):
        api.send("along", value)
    (first,) = take(api, "along")
    answer = api.post(path_of("along", "take"), {"requeue": [first["id"]]})
    assert (values(answer["messages"]), answer["settled"]) == (["2"], done(requeue=1))
    answer = api.post(path_of("along", "take"), {"ack": ids(answer["messages"])}, max=10)
    assert (values(answer["messages"]), answer["settled"]) == (["3", "1"], done(ack=1))
    answer = api.post(path_of("along", "take"), {"ack": [first["id"]], "reject": ids(answer["messages"][:1])})
    assert answer == {"messages": [], "settled": done(ack=1, reject=1)}
    assert api.post(path_of("along", "take"), {}) == {"messages": []}
    assert counts(api, "along") == (0, 0, 1)


def test_verdicts_that_come_along_are_carried_out_though_nobody_waits_any_more(
    broker: BrokerProcess, api: Api
) -> None:
    api.send("waits", b"1")
    (message,) = take(api, "waits")
    with Wire(("127.0.0.1", broker.ports["http"])) as wire:
        body = json.dumps({"ack": [message["id"]]}).encode()
        head = f"POST {path_of('waits', 'take')}?wait=30 HTTP/1.1\r\nHost: localhost\r\n"
        wire.say(head.encode() + b"Content-Length: %d\r\n\r\n%b" % (len(body), body))
        until(lambda: counts(api, "waits") == (0, 0, 0), "the verdict, while its sender waits for more")
        until(lambda: takers(api, "waits") != [], "it to wait")
    until(lambda: takers(api, "waits") == [], "it to be gone")
    assert settle(api, "waits", ack=[message["id"]]) == done([message["id"]])


def test_verdicts_that_come_along_are_told_of_while_the_broker_stops(start_broker: StartBroker) -> None:
    broker = start_broker("--drain-seconds", str(WAIT_SECONDS))
    with Api(broker.ports["http"]) as api, Api(broker.ports["http"]) as other:
        api.send("q", b"x")
        api.send("q", b"y")
        (message,) = take(api, "q")
        broker.signal(signal.SIGTERM)
        # Of another queue: a call that comes before the signal must not get what nobody settles.
        until(lambda: other.ask("POST", path_of("other", "take")).status == 503, "the broker to drain")
        answer = api.post(path_of("q", "take"), {"ack": [message["id"]]})
        assert answer == {"messages": [], "settled": done(ack=1)}
    assert broker.wait() == 0


def test_verdicts_are_told_of_where_the_answer_has_no_room(start_broker: StartBroker) -> None:
    broker = start_broker("--http-body-bytes-max", "1024", "--http-bodies-bytes-max", "1024")
    with Api(broker.ports["http"]) as api:
        for _ in range(4):
            api.send("work", b"x" * 500)
        (first,) = api.post("/v1/queues/work/take")["messages"]
        done = api.post("/v1/queues/work/take", {"ack": [first["id"]]}, max=3)
        assert (done["messages"], done["settled"]["ack"]) == ([], 1)
        assert api.ask("POST", "/v1/queues/work/take", max=3).problem == "unavailable"
        (second,) = api.post("/v1/queues/work/take")["messages"]
        assert (second["offset"], second["attempts"]) == (1, 1)


def test_where_verdicts_are_wrong_nothing_is_taken(api: Api) -> None:
    api.send("wrong", b"1")
    api.send("wrong", b"2")
    (message,) = take(api, "wrong")
    reply = api.ask("POST", path_of("wrong", "take"), {"ack": [message["id"], "4711"]})
    assert (reply.status, reply.problem) == (400, "bad-request")
    reply = api.ask("POST", path_of("wrong", "take"), {"ack": [message["id"]]}, headers={"Accept": NDJSON})
    assert (reply.status, reply.problem) == (400, "bad-request")
    assert "settle before you take" in reply.json["detail"]
    assert counts(api, "wrong") == (1, 1, 0)


def test_somebody_else_settles(broker: BrokerProcess, api: Api) -> None:
    """Whoever knows the id: a lease is no connection."""
    api.send("else", b"x")
    with Api(broker.ports["http"]) as other:
        (message,) = take(other, "else")
    assert counts(api, "else") == (0, 1, 0)
    assert settle(api, "else", ack=[message["id"]]) == done(ack=1)


def test_the_delivery_that_is_meant(api: Api) -> None:
    api.send("meant", b"x")
    (first,) = take(api, "meant")
    settle(api, "meant", requeue=[{"id": first["id"], "attempts": 1, "delay": 0}])
    (second,) = take(api, "meant")
    assert (second["id"], second["attempts"]) == (first["id"], 2)
    for outcome, more in (("ack", {}), ("requeue", {}), ("reject", {}), ("extend", {"lease": 5})):
        late = [{"id": first["id"], "attempts": first["attempts"], **more}]
        assert settle(api, "meant", **{outcome: late}) == done([first["id"]])
    assert counts(api, "meant") == (0, 1, 0)
    assert settle(api, "meant", ack=[{"id": second["id"], "attempts": 2}]) == done(ack=1)


def test_what_nobody_holds_is_gone(api: Api) -> None:
    api.send("gone", b"x", b"y")
    api.send("elsewhere", b"z")
    (held,) = take(api, "gone")
    (foreign,) = take(api, "elsewhere")
    waiting_id = held["id"][:-1] + "1"
    made_up = "0" * 32
    assert settle(api, "gone", ack=[waiting_id, foreign["id"], made_up]) == done(
        [waiting_id, foreign["id"], made_up]
    )
    assert settle(api, "nowhere", reject=[held["id"]]) == done([held["id"]])
    assert counts(api, "gone") == (1, 1, 0)
    assert counts(api, "elsewhere") == (0, 1, 0)
    assert settle(api, "gone") == done()


def test_what_another_door_holds_is_not_settled_here(broker: BrokerProcess, api: Api) -> None:
    api.send("doors", b"x")
    with phpmq(broker) as mq:
        (message,) = mq.consume("doors", count=1, timeout=WAIT_SECONDS)
        assert settle(api, "doors", ack=[message.id], reject=[]) == done([message.id])
        message.ack()
    until(lambda: counts(api, "doors") == (0, 0, 0), "the message to be acknowledged")


def test_a_lease_ends(api: Api) -> None:
    api.send("lease", b"x")
    (first,) = take(api, "lease", lease=1)
    (second,) = take(api, "lease", wait=WAIT_SECONDS)
    ended = datetime.fromisoformat(first["lease_ends"])
    assert datetime.now(UTC) >= ended
    assert (second["id"], second["attempts"]) == (first["id"], 2)
    assert settle(api, "lease", ack=[{"id": first["id"], "attempts": 1}]) == done([first["id"]])
    assert settle(api, "lease", ack=[second["id"]]) == done(ack=1)
    assert history(api, "lease", 0) == [("accepted", None), ("returned", "lease-ended"), ("acked", None)]


def test_a_lease_is_extended(api: Api) -> None:
    api.send("longer", b"x", b"y")
    first, second = take(api, "longer", max=2, lease=1)
    assert settle(api, "longer", extend=[{"id": first["id"], "lease": 600, "attempts": 1}]) == done(extend=1)
    (again,) = take(api, "longer", max=2, wait=WAIT_SECONDS)
    assert (again["id"], again["attempts"]) == (second["id"], 2)
    assert settle(api, "longer", ack=[first["id"]]) == done(ack=1)


def test_a_requeue_with_a_delay(api: Api) -> None:
    api.send("backoff", b"x", b"y")
    first, second = take(api, "backoff", max=2)
    settle(
        api,
        "backoff",
        requeue=[{"id": first["id"], "delay": 0.3}, {"id": second["id"], "delay": 315_576_000}],
    )
    row = api.get(path_of("backoff"))
    assert (row["ready"], row["held"]) == (0, 0)
    (again,) = take(api, "backoff", wait=WAIT_SECONDS)
    assert (again["id"], again["attempts"]) == (first["id"], 2)
    assert history(api, "backoff", 0)[1:] == [("delayed", None)]


def test_the_delays_of_the_queue(start_broker: StartBroker) -> None:
    config = '[queue."slow"]\nretry-delays = [0.2, 600]\nmax-deliveries = 5\n'
    broker = start_broker(config=config)
    with Api(broker.ports["http"]) as api:
        api.send("slow", b"x")
        (message,) = take(api, "slow")
        assert settle(api, "slow", requeue=[message["id"]]) == done(requeue=1)
        assert counts(api, "slow") == (0, 0, 0)
        (message,) = take(api, "slow", wait=WAIT_SECONDS)
        settle(api, "slow", requeue=[{"id": message["id"], "delay": 0}])
        (message,) = take(api, "slow")
        assert message["attempts"] == 3
        settle(api, "slow", requeue=[{"id": message["id"], "delay": None}])
        assert take(api, "slow", wait=0.5) == []


def test_too_many_deliveries(start_broker: StartBroker) -> None:
    broker = start_broker(config='[queue."thrice"]\nmax-deliveries = 3\n')
    with Api(broker.ports["http"]) as api:
        api.send("thrice", b"x")
        for number in (1, 2, 3):
            (message,) = take(api, "thrice")
            assert message["attempts"] == number
            settle(api, "thrice", requeue=[{"id": message["id"], "delay": 0}])
        (letter,) = take(api, "thrice.dead")
        assert (letter["id"], letter["reason"], letter["why"]) == (message["id"], "too-many-deliveries", None)


def test_a_restart_gives_back_what_was_held(start_broker: StartBroker) -> None:
    broker = start_broker()
    with Api(broker.ports["http"]) as api:
        api.send("restart", b"a", b"b", b"c")
        first, second, third = take(api, "restart", max=3)
        settle(api, "restart", ack=[first["id"]], reject=[{"id": second["id"], "reason": "größer"}])
    broker.kill()
    broker.start()
    with Api(broker.ports["http"]) as api:
        assert settle(api, "restart", ack=[first["id"], third["id"]]) == done([first["id"], third["id"]])
        (again,) = take(api, "restart", max=10)
        assert (again["id"], again["attempts"]) == (third["id"], 1)
        (letter,) = take(api, "restart.dead", max=10)
        assert (letter["id"], letter["why"]) == (second["id"], "größer")


# --- dead letters ------------------------------------------------------------------------------------


def test_dead_letters(api: Api) -> None:
    api.send("morgue", b"a", b"b", b"c")
    first, second, third = ids(take(api, "morgue", max=3))
    settle(api, "morgue", reject=[first, second, {"id": third, "reason": "bad"}])
    assert take(api, "morgue") == []
    (letter,) = take(api, "morgue", dead=True)
    assert (letter["id"], letter["reason"], letter["attempts"]) == (first, "rejected", 2)
    others = take(api, "morgue.dead", max=10)
    assert ids(others) == [second, third]
    assert settle(api, "morgue.dead", ack=[first], requeue=[{"id": second, "delay": 0}]) == done(
        ack=1, requeue=1
    )
    assert settle(api, "morgue", reject=[{"id": third, "reason": "worse"}]) == done(reject=1)
    found = take(api, "morgue.dead", max=10, dead=True)
    assert {it["id"]: it["why"] for it in found} == {second: None, third: "worse"}


def test_a_letter_has_what_its_message_had(api: Api) -> None:
    headers = {"Penstock-Header-Kind": "order"}
    api.ask("POST", path_of("kept", "messages"), b"x", headers)
    (message,) = take(api, "kept")
    settle(api, "kept", reject=[message["id"]])
    (letter,) = take(api, "kept", dead=True)
    assert (letter["headers"], letter["timestamp"]) == ({"kind": "order"}, message["timestamp"])


# --- what is wrong -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("query", "detail"),
    [
        ({"max": 0}, "query parameter 'max': use a whole number from 1 to 1000"),
        ({"max": 1001}, "query parameter 'max': use a whole number from 1 to 1000"),
        ({"max": "1.5"}, "query parameter 'max': use a whole number"),
        ({"wait": -0.1}, "query parameter 'wait': use a number of seconds from 0 to 30"),
        ({"wait": 30.1}, "query parameter 'wait': use a number of seconds from 0 to 30"),
        ({"wait": "nan"}, "query parameter 'wait': use a number of seconds from 0 to 30"),
        ({"wait": "1e999"}, "query parameter 'wait': use a number of seconds from 0 to 30"),
        ({"wait": ""}, "query parameter 'wait': use a number of seconds from 0 to 30"),
        ({"lease": 0.5}, "query parameter 'lease': use a number of seconds from 1 to 3600"),
        ({"lease": 3601}, "query parameter 'lease': use a number of seconds from 1 to 3600"),
        ({"dead": "yes"}, "query parameter 'dead': use true or false"),
        ({"leese": 5}, "there is no parameter 'leese' here; did you mean 'lease'?"),
    ],
)
def test_wrong_parameters_are_named(api: Api, query: dict[str, Any], detail: str) -> None:
    reply = api.ask("POST", path_of("refused", "take"), **query)
    assert (reply.status, reply.problem) == (400, "bad-request")
    assert reply.json["detail"].startswith(detail)


@pytest.mark.parametrize("queue", [".dead", "a.dead.dead", "a\n", "x" * 256])
def test_wrong_names_are_refused(api: Api, queue: str) -> None:
    for what in ("take", "settle"):
        assert api.ask("POST", path_of(queue, what), {}).problem == "bad-request"


def test_the_longest_lease_is_a_setting(start_broker: StartBroker) -> None:
    broker = start_broker("--http-lease-seconds-max", "20")
    with Api(broker.ports["http"]) as api:
        api.send("q", b"x")
        assert "from 1 to 20" in api.ask("POST", path_of("q", "take"), lease=21).json["detail"]
        (message,) = take(api, "q")
        until_end = datetime.fromisoformat(message["lease_ends"]) - datetime.now(UTC)
        assert until_end <= timedelta(seconds=20)
        wrong = api.ask("POST", path_of("q", "settle"), {"extend": [{"id": message["id"], "lease": 21}]})
        assert (wrong.status, wrong.json["detail"]) == (
            400,
            "'extend', entry 0: 'lease': use a number of seconds from 1 to 20",
        )


def test_nothing_is_settled_where_something_is_wrong(api: Api) -> None:
    """Every kind of mistake is in test_verdicts.py."""
    api.send("all-or-none", b"x", b"y")
    first, second = ids(take(api, "all-or-none", max=2))
    for body in (
        {"ack": [first], "reject": [second[:-1]]},
        {"ack": [first, first]},
        {"ack": [first], "requeue": [{"id": second, "delay": -1}]},
        {"ack": [first], "extend": [second]},
        {"ack": [first], "acks": []},
        {"ack": [first], "reject": [{"id": second, "reason": "x" * 1001}]},
        {"ack": [first, *(f"{number:032x}" for number in range(10_000))]},
    ):
        reply = api.ask("POST", path_of("all-or-none", "settle"), body)
        assert (reply.status, reply.problem) == (400, "bad-request")
    for raw, media, status in ((b"", None, 400), (b"{", None, 400), (b"{}", "text/plain", 415)):
        headers = {"Content-Type": media} if media else {}
        assert api.ask("POST", path_of("all-or-none", "settle"), raw, headers).status == status
    assert counts(api, "all-or-none") == (0, 2, 0)
    assert settle(api, "all-or-none", ack=[first, second]) == done(ack=2)
