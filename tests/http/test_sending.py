"""Sending over HTTP, on a real broker: what is stored and answered, and that a batch is all or nothing."""

import base64
import io
import json
import socket
import struct
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pyarrow as pa
import pytest

from penstock.client import PhpmqClient, SspqClient
from penstock.http.api import sending as api_sending
from penstock.http.link import CallRefused
from penstock.http.problems import Problem
from penstock.log.block import FLAG_PART
from penstock.log.reader import LogReader
from tests.http.api import ARROW, NDJSON, Api
from tests.http.conftest import StartBroker
from tests.server.harness import BrokerProcess, until


def lines(*rows: object) -> bytes:
    return b"".join(json.dumps(row).encode() + b"\n" for row in rows)


def arrow(**columns: Any) -> bytes:
    table = pa.table(columns)
    sink = io.BytesIO()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write(table)
    return sink.getvalue()


def batch(api: Api, queue: str, body: bytes, media: str = NDJSON, **headers: str) -> Any:
    return api.ask(
        "POST", f"/v1/queues/{quote(queue, safe='')}/batch", body, {"Content-Type": media, **headers}
    )


def stored(api: Api, queue: str) -> list[Any]:
    """Every message of a queue, as it can be looked at."""
    messages: list[Any] = []
    start = 0
    while True:
        page = api.get(f"/v1/queues/{quote(queue, safe='')}/messages", from_=start, limit=1000)
        messages += page["messages"]
        if page["next"] is None:
            return messages
        start = page["next"]


def lifetime(message: Any) -> float | None:
    """The TTL that a message came with, in seconds."""
    if message["expires"] is None:
        return None
    accepted, expires = (datetime.fromisoformat(message[name]) for name in ("time", "expires"))
    return (expires - accepted).total_seconds()


def values(api: Api, queue: str) -> list[bytes]:
    return [base64.b64decode(message["value_base64"]) for message in stored(api, queue)]


# --- one message -------------------------------------------------------------------------------------


def test_a_message_is_there_when_it_is_answered(api: Api, broker: BrokerProcess) -> None:
    body = bytes(range(256))
    first = api.post("/v1/queues/one/messages", body)
    second = api.post("/v1/queues/one/messages", b"")
    assert (first["offset"], second["offset"]) == (0, 1)
    assert (first["repeated"], second["repeated"]) == (False, False)
    assert first["id"][:18] == second["id"][:18]
    assert [message["id"] for message in stored(api, "one")] == [first["id"], second["id"]]
    assert values(api, "one") == [body, b""]
    assert {message["protocol"] for message in stored(api, "one")} == {"http"}
    with PhpmqClient(f"phpmq://127.0.0.1:{broker.ports['phpmq']}") as mq:
        received = [(message.id, message.body) for message in mq.consume("one", count=2, timeout=10)]
    assert received == [(first["id"], body), (second["id"], b"")]


@pytest.mark.parametrize(
    "media", ["text/plain", "application/json; charset=utf-8", "image/png", "nonsense", ""]
)
def test_any_media_type_is_a_message(api: Api, media: str) -> None:
    queue = f"media {media}"
    reply = api.ask("POST", f"/v1/queues/{quote(queue, safe='')}/messages", b"x", {"Content-Type": media})
    assert reply.status == 200
    assert values(api, queue) == [b"x"]


def test_ttl_and_retries(api: Api, broker: BrokerProcess) -> None:
    api.post("/v1/queues/terms/messages", b"x", ttl=3600, retries=7)
    api.post("/v1/queues/terms/messages", b"y", retries=255)
    api.post("/v1/queues/terms/messages", b"z")
    terms = [(lifetime(message), message["retries"]) for message in stored(api, "terms")]
    assert terms == [(3600, 7), (None, 255), (None, None)]
    api.post("/v1/queues/default/messages", b"for sspq", retries=3)
    with SspqClient(f"sspq://127.0.0.1:{broker.ports['sspq']}") as mq:
        message = mq.receive(timeout=10)
        assert (message.body, message.retries) == (b"for sspq", 3)
        message.ack()


def test_names_with_anything_in_them(api: Api) -> None:
    for queue in ("a/b", "a b?c=d&e", "%2F", "é€", "..", "a#b"):
        assert api.send(queue, b"x") == [0]
        assert values(api, queue) == [b"x"]


@pytest.mark.parametrize(
    ("query", "detail"),
    [
        ({"ttl": 0}, "query parameter 'ttl': use a whole number from 1 to 1000000000000"),
        ({"ttl": "1.5"}, "query parameter 'ttl': use a whole number"),
        ({"retries": 256}, "query parameter 'retries': use a whole number from 0 to 255"),
        ({"tll": 5}, "there is no parameter 'tll' here; did you mean 'ttl'?"),
        ({"delay": -1}, "query parameter 'delay': use a number of seconds from 0 to 315576000"),
        ({"delay": 315_576_001}, "query parameter 'delay': use a number of seconds from 0 to 315576000"),
        ({"delay": "soon"}, "query parameter 'delay': use a number of seconds from 0 to 315576000"),
    ],
)
def test_wrong_parameters_are_named(api: Api, query: dict[str, Any], detail: str) -> None:
    reply = api.ask("POST", "/v1/queues/refused/messages", b"x", **query)
    assert (reply.status, reply.problem) == (400, "bad-request")
    assert reply.json["detail"].startswith(detail)
    assert api.ask("GET", "/v1/queues/refused").problem == "queue-not-found"


# --- delays and headers ------------------------------------------------------------------------------


def delay_of(message: Any) -> float | None:
    """How long a message is delayed, from its arrival on, in seconds."""
    if message["due"] is None:
        return None
    accepted, due = (datetime.fromisoformat(message[name]) for name in ("time", "due"))
    return (due - accepted).total_seconds()


def test_a_message_with_a_delay_and_headers(api: Api) -> None:
    headers = {"Penstock-Header-TraceParent": "00-abc", "penstock-header-empty": "", "X-Other": "no"}
    api.ask("POST", "/v1/queues/later/messages", b"x", headers, delay=600.5, ttl=3600)
    api.ask("POST", "/v1/queues/later/messages", b"y", delay="1e-7")
    later, now = stored(api, "later")
    assert (later["state"], delay_of(later), lifetime(later)) == ("delayed", 600.5, 3600)
    assert later["headers"] == {"traceparent": "00-abc", "empty": ""}
    assert (now["state"], now["due"], now["headers"]) == ("ready", None, {})
    row = api.get("/v1/queues/later")
    assert (row["ready"], row["delayed"], row["held"]) == (1, 1, 0)


@pytest.mark.parametrize("media", [NDJSON, ARROW])
def test_a_batch_with_delays_and_headers(api: Api, media: str) -> None:
    rows: list[dict[str, Any]] = [
        {"value": "a", "delay": 600, "headers": {"k": "größe"}},
        {"value": "b"},
        {"value": "c", "headers": {"a": "1", "b": "2"}},
        {"value": "d", "delay": 0.25},
    ]
    body = lines(*rows)
    if media == ARROW:
        columns = {name: [row.get(name) for row in rows] for name in ("value", "delay")}
        maps = pa.array([row.get("headers") for row in rows], pa.map_(pa.string(), pa.string()))
        body = arrow(**columns, headers=maps)
    queue = f"attributes {media}"
    assert batch(api, queue, body, media).status == 200
    messages = stored(api, queue)
    assert [message["headers"] for message in messages] == [{"k": "größe"}, {}, {"a": "1", "b": "2"}, {}]
    assert delay_of(messages[0]) == 600
    until(lambda: api.get(f"/v1/queues/{quote(queue, safe='')}")["ready"] == 3, "the last one to be due")
    assert [message["state"] for message in stored(api, queue)] == ["delayed", "ready", "ready", "ready"]


@pytest.mark.parametrize(
    ("headers", "detail"),
    [
        ({f"Penstock-Header-{n}": "" for n in range(65)}, "65 headers; a message has at most 64"),
        ({"Penstock-Header-A": "x" * 16384}, "headers of 16385 bytes; those of a message have at most 16384"),
        ({"Penstock-Header-": "x"}, "header '': a name has 1 to 255 bytes"),
        ({"Penstock-Header-" + "n" * 256: "x"}, "header 'nnn"),
        ({"Penstock-Header-A": "größe"}, "header 'penstock-header-a' is not UTF-8"),  # sent as Latin-1
        ({"Penstock-Header-A": "1", "penstock-header-a": "2"}, "header 'penstock-header-a' is there twice"),
    ],
)
def test_wrong_headers_are_named(api: Api, headers: dict[str, str], detail: str) -> None:
    reply = api.ask("POST", "/v1/queues/refused/messages", b"x", headers)
    assert (reply.status, reply.problem) == (400, "bad-request")
    assert reply.json["detail"].startswith(detail)
    assert api.ask("GET", "/v1/queues/refused").problem == "queue-not-found"


def test_so_many_headers_and_no_more(api: Api) -> None:
    headers = {f"Penstock-Header-{n:02d}": "v" * 254 for n in range(64)}  # 64 times 256 bytes
    assert api.ask("POST", "/v1/queues/headers/messages", b"x", headers).status == 200
    (message,) = stored(api, "headers")
    assert message["headers"] == {f"{n:02d}": "v" * 254 for n in range(64)}


def test_stages_carry_delays_and_headers(api: Api) -> None:
    body = lines({"value": "a", "delay": 600, "headers": {"k": "v"}, "ttl": 3600}, {"value": "b"})
    where = {"transaction": "attributes", "queue": "staged"}
    stage = api.ask("POST", "/v1/stages", body, {"Content-Type": NDJSON}, **where).json["stage"]
    api.post("/v1/transactions", {"transaction": "attributes", "stages": [stage]})
    until(lambda: api.get("/v1/queues/staged")["ready"] == 1, "the other one to be ready")
    first, second = stored(api, "staged")
    assert (first["state"], first["headers"]) == ("delayed", {"k": "v"})
    assert (delay_of(first), lifetime(first)) == (600, 3600), "both count from the commit"
    assert (second["state"], second["headers"]) == ("ready", {})
    dead = {**where, "dead": "bad-record"}
    reply = api.ask("POST", "/v1/stages", body, {"Content-Type": NDJSON}, **dead)
    assert (reply.status, reply.problem) == (400, "bad-request")


def test_dead_letters_are_not_sent(api: Api) -> None:
    reply = api.ask("POST", "/v1/queues/orders.dead/messages", b"x")
    assert (reply.status, reply.problem) == (400, "bad-request")
    assert "dead letters" in reply.json["detail"]


# --- many --------------------------------------------------------------------------------------------


def test_a_batch_of_lines(api: Api) -> None:
    rows = [{"value": "a"}, {"value": "é", "ttl": 60}, {"value_base64": "/w==", "retries": 0}]
    reply = batch(api, "lines", lines(*rows))
    assert reply.status == 200
    ident = reply.json.pop("id_first")
    assert reply.json | {"id_first": ident} == {
        "count": 3,
        "offset_start": 0,
        "offset_end": 3,
        "id_first": ident,
        "repeated": False,
    }
    messages = stored(api, "lines")
    assert messages[0]["id"] == ident
    assert values(api, "lines") == [b"a", "é".encode(), b"\xff"]
    assert [(lifetime(message), message["retries"]) for message in messages] == [
        (None, None),
        (60, None),
        (None, 0),
    ]
    assert batch(api, "lines", lines({"value": "b"})).json["offset_start"] == 3


def test_a_batch_of_arrow(api: Api) -> None:
    body = arrow(value=[b"a", b"b"], ttl=pa.array([None, 60], pa.int16()))
    reply = batch(api, "arrow", body, ARROW)
    assert (reply.status, reply.json["count"]) == (200, 2)
    assert values(api, "arrow") == [b"a", b"b"]
    assert [lifetime(message) for message in stored(api, "arrow")] == [None, 60]


@pytest.mark.parametrize("media", [NDJSON, ARROW])
def test_a_batch_larger_than_a_block(api: Api, media: str) -> None:
    """Several blocks of the log, and one transaction."""
    messages = [b"%05d" % number + b"x" * 20_000 for number in range(300)]
    queue = f"large {media}"
    body = arrow(value=messages) if media == ARROW else lines(*({"value": it.decode()} for it in messages))
    reply = batch(api, queue, body, media)
    assert reply.status == 200, reply
    assert reply.json["offset_end"] == 300
    assert values(api, queue) == messages
    assert api.send(queue, b"next") == [300]


def test_a_batch_of_very_many_small_messages_is_one_write(api: Api, broker: BrokerProcess) -> None:
    """What the log keeps of each counts too: their payloads alone would fit into one block."""
    reply = batch(api, "tiny", arrow(value=[b"", b"x"] * 300_000), ARROW)
    assert (reply.status, reply.json["offset_end"]) == (200, 600_000)
    with LogReader(str(broker.folder / "data")) as reader:
        flags = [block.header.flags for block in reader.messages("tiny", 0)]
    assert len(flags) > 1
    assert all(it & FLAG_PART for it in flags), "without the end of their transaction they are void"


@pytest.mark.parametrize(
    ("body", "media", "status", "detail"),
    [
        (b"", NDJSON, 400, "the body has no message; send at least one"),
        (lines({"value": "a"}, {"value": 5}), NDJSON, 400, "line 2: field 'value' is a number; use a text"),
        (lines({"value": "a"}) * 5000 + b"{", NDJSON, 400, "line 5001: this is no JSON"),
        (lines({"value": "a", "queue": "b"}), NDJSON, 400, "line 1: there is no field 'queue' here"),
        (b"", ARROW, 400, "the body is no Arrow IPC stream that can be read"),
        (arrow(value=[b"a", None]), ARROW, 400, "row 1, column 'value': it is null"),
        (arrow(value=[b"a"], queue=["b"]), ARROW, 400, "there is no column 'queue' here"),
        (
            lines({"value": "a"}),
            "application/json",
            415,
            "the body is 'application/json'; send application/x-n",
        ),
        (lines({"value": "a"}), "", 415, "the request has no Content-Type; send application/x-ndjson or"),
    ],
)
def test_nothing_is_stored_of_a_batch_that_is_wrong(
    api: Api, body: bytes, media: str, status: int, detail: str
) -> None:
    reply = batch(api, "all-or-nothing", body, media)
    assert reply.status == status
    assert reply.problem in ("bad-request", "unsupported-media-type")
    assert reply.json["detail"].startswith(detail)
    assert api.ask("GET", "/v1/queues/all-or-nothing").problem == "queue-not-found"


def test_a_media_type_may_have_parameters(api: Api) -> None:
    assert (
        batch(api, "parameters", lines({"value": "a"}), "Application/X-NDJSON; charset=utf-8").status == 200
    )


def test_many_senders_at_once(broker: BrokerProcess) -> None:
    """Every receipt names one message, and together they name all."""

    def send(number: int) -> list[int]:
        with Api(broker.ports["http"]) as api:
            offsets = []
            for turn in range(20):
                if turn % 2:
                    offsets += api.send("busy", b"%d-%d" % (number, turn))
                else:
                    receipt = batch(
                        api, "busy", lines(*[{"value": f"{number}-{turn}-{n}"} for n in range(5)])
                    ).json
                    offsets += range(receipt["offset_start"], receipt["offset_end"])
            return offsets

    with ThreadPoolExecutor(8) as pool:
        offsets = [offset for some in pool.map(send, range(8)) for offset in some]
    assert sorted(offsets) == list(range(8 * 60))
    with Api(broker.ports["http"]) as api:
        found = values(api, "busy")
    assert len(set(found)) == 480
    for at in [at for at, value in enumerate(found) if value.endswith(b"-0") and value.count(b"-") == 2]:
        prefix = found[at].rsplit(b"-", 1)[0]
        assert found[at : at + 5] == [prefix + b"-%d" % n for n in range(5)]  # a batch is together, in order


# --- limits ------------------------------------------------------------------------------------------


@pytest.fixture
def small(start_broker: StartBroker, tmp_path: Path) -> Iterator[Api]:
    """A broker with small limits."""
    config = tmp_path / "small.toml"
    config.write_text(
        "[limits]\npayload-bytes-max = 2000\n[http]\nbody-bytes-max = 10000\n"
        '[queue."bounded"]\nmax-bytes = 1000\n[log]\nblock-bytes = 4096\n'
    )
    broker = start_broker("--config", str(config))
    with Api(broker.ports["http"]) as api:
        yield api


def test_limits(small: Api) -> None:
    reply = small.ask("POST", "/v1/queues/q/messages", bytes(2001))
    assert (reply.status, reply.problem) == (413, "body-too-large")
    assert "2001 bytes, and the limit of [limits] payload-bytes-max is 2000" in reply.json["detail"]
    reply = batch(small, "q", lines({"value": "a"}, {"value": "x" * 2001}))
    assert (reply.status, reply.json["detail"][:36]) == (413, "line 2: the message has 2001 bytes, ")
    reply = batch(small, "q", arrow(value=[b"a", b"b", bytes(2001)]), ARROW)
    assert (reply.status, reply.json["detail"][:35]) == (413, "row 2: the message has 2001 bytes, ")
    reply = small.ask("POST", "/v1/queues/q/messages", bytes(10_001))
    assert (reply.status, reply.problem) == (413, "body-too-large")
    assert "[http] body-bytes-max" in reply.json["detail"]
    assert reply.headers["connection"] == "close"
    assert small.send("q", bytes(2000)) == [0]


def test_a_full_queue(small: Api) -> None:
    assert small.send("bounded", bytes(900)) == [0]
    for reply in (
        small.ask("POST", "/v1/queues/bounded/messages", bytes(200)),
        batch(small, "bounded", lines({"value": "x" * 50}, {"value": "y" * 60})),
        small.ask("POST", "/v1/queues/bounded/messages", bytes(200), {"Idempotency-Key": "k"}),
    ):
        assert (reply.status, reply.problem) == (429, "queue-full")
        assert reply.headers["retry-after"] == "1"
    assert small.send("bounded", bytes(100)) == [1]
    assert len(values(small, "bounded")) == 2


# --- a broker that stops -----------------------------------------------------------------------------


def test_a_batch_survives_as_a_whole_or_not_at_all(start_broker: StartBroker) -> None:
    """kill -9 in the middle of large batches: whole ones are there, and every one that was answered."""
    broker = start_broker()
    messages = [{"value": f"{number:04d}" + "x" * 15_000} for number in range(200)]
    body = lines(*messages)  # about three blocks

    def send(_: int) -> int:
        try:
            with Api(broker.ports["http"]) as api:
                return int(batch(api, "survivors", body).status == 200)
        except OSError:
            return 0

    with ThreadPoolExecutor(4) as pool:
        some = [pool.submit(send, number) for number in range(40)]
        some[3].result()
        broker.kill()
        answered = sum(one.result() for one in some)
    assert answered >= 1
    again = BrokerProcess(broker.folder, "--http", "127.0.0.1:0").start()
    try:
        with Api(again.ports["http"]) as api:
            found = values(api, "survivors")
    finally:
        again.kill()
    assert len(found) % 200 == 0
    assert len(found) >= 200 * answered
    assert [value[:4] for value in found] == [b"%04d" % (number % 200) for number in range(len(found))]


@pytest.mark.parametrize(
    ("kind", "key", "doubt"),
    [
        ("unavailable", "", "sent again it may be stored twice; an Idempotency-Key makes that safe"),
        ("unavailable", "k", "send it again with the same Idempotency-Key, which is safe"),
        ("failed", "k", "send it again with the same Idempotency-Key, which is safe"),
    ],
)
def test_without_an_answer_it_is_said_that_nobody_knows(kind: str, key: str, doubt: str) -> None:
    with pytest.raises(Problem) as raised:
        api_sending._raise(CallRefused(kind, "the broker has not answered 'append' for 30 s"), "q", key)
    assert (raised.value.status, raised.value.headers) == (503, {"Retry-After": "1"})
    assert raised.value.detail == (
        "queue 'q': the broker has not answered 'append' for 30 s. It is not known whether this was stored: "
        + doubt
    )


def test_a_no_leaves_no_doubt() -> None:
    refusal = CallRefused("draining", "the broker is stopping")
    with pytest.raises(CallRefused) as raised:
        api_sending._raise(refusal, "q", "")
    assert raised.value is refusal


# --- without pyarrow ---------------------------------------------------------------------------------

WITHOUT_PYARROW = """
import asyncio, sys
sys.modules["pyarrow"] = None
from penstock.http.bodies.media import _read_arrow
from penstock.http.problems import Problem
from penstock.log.block import FLAG_PART
from penstock.log.reader import LogReader
try:
    _read_arrow(b"", payload_bytes_max=1, bytes_max=1, queues=False, repairs=False, protocol="http")
except Problem as problem:
    print(problem.status, problem.name, problem.detail)
"""


def test_without_pyarrow() -> None:
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_PYARROW], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.startswith(
        "501 not-installed the broker has no pyarrow to read Arrow with: pip install"
    )
    assert "penstock[arrow]" in done.stdout


def test_a_chunked_body_is_bounded_too(small: Api) -> None:
    """No Content-Length says how much there is; the limit holds all the same."""
    host, port = small._connection.host, small._connection.port
    with socket.create_connection((host, port), 10) as wire:
        wire.sendall(
            b"POST /v1/queues/q/messages HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"
        )
        wire.sendall(b"1000\r\n" + bytes(0x1000) + b"\r\n")
        wire.sendall(b"1800\r\n" + bytes(0x1800) + b"\r\n0\r\n\r\n")
        assert wire.recv(12) == b"HTTP/1.1 413"
        wire.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
