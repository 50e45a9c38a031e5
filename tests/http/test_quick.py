"""The short way of a message over HTTP: it answers as the usual one does, whatever comes together."""

import asyncio
import json
import os
import re
import signal
import socket
from base64 import b64decode
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from penstock.http import quick
from penstock.http.api.sending import SEND_PATH
from penstock.http.auth import Guard
from penstock.http.link import CallRefused
from penstock.http.quick import Quick
from tests.http.api import Api
from tests.http.conftest import StartBroker
from tests.server.harness import WAIT_SECONDS, BrokerProcess, until


class Raw:
    """A connection on which requests are written as they are."""

    def __init__(self, port: int) -> None:
        self._socket = socket.create_connection(("127.0.0.1", port), WAIT_SECONDS)
        self._heard = b""

    def say(self, *requests: bytes) -> None:
        self._socket.sendall(b"".join(requests))

    def answer(self) -> tuple[bytes, Any]:
        """The next one: its head, and what its body says."""
        head = self.interim()
        found = re.search(rb"content-length: (\d+)", head)
        assert found is not None, head
        while len(self._heard) < (length := int(found[1])):
            self._hear()
        body, self._heard = self._heard[:length], self._heard[length:]
        return head, json.loads(body)

    def interim(self) -> bytes:
        """An answer without a body, before the one that counts."""
        while b"\r\n\r\n" not in self._heard:
            self._hear()
        head, _, self._heard = self._heard.partition(b"\r\n\r\n")
        return head

    def all(self) -> bytes:
        """Everything until the broker closes it."""
        heard = b""
        while more := self._socket.recv(65_536):
            heard += more
        return heard

    def ends(self) -> bool:
        return self._socket.recv(1) == b""

    def _hear(self) -> None:
        more = self._socket.recv(65_536)
        assert more, "the broker has closed it"
        self._heard += more

    def close(self) -> None:
        self._socket.close()


def send(queue: str, body: bytes, *headers: str, version: str = "1.1") -> bytes:
    lines = [f"POST /v1/queues/{queue}/messages HTTP/{version}", "Host: localhost", *headers]
    return "\r\n".join([*lines, f"Content-Length: {len(body)}", "", ""]).encode() + body


@pytest.fixture
def raw(broker: BrokerProcess) -> Iterator[Raw]:
    raw = Raw(broker.ports["http"])
    yield raw
    raw.close()


def payloads(api: Api, queue: str) -> list[str]:
    return [
        b64decode(it["value_base64"]).decode()
        for it in api.get(f"/v1/queues/{queue}/messages", limit=1000)["messages"]
    ]


def test_its_answer_is_that_of_the_usual_way(raw: Raw) -> None:
    raw.say(send("same", b"short"), send("same", b"long", "Penstock-Header-Way: usual"))
    (head, receipt), (head_then, receipt_then) = raw.answer(), raw.answer()
    assert (receipt["offset"], receipt_then["offset"]) == (0, 1)
    assert int(receipt["id"], 16) + 1 == int(receipt_then["id"], 16)
    assert list(receipt.items())[2:] == list(receipt_then.items())[2:] == [("repeated", False)]
    assert re.sub(rb"date: [^\r]*", b"", head) == re.sub(rb"date: [^\r]*", b"", head_then)


LINES = {
    "plain": ("Host: localhost", "Content-Length: 3", "", "abc"),
    "empty": ("Host: localhost", "Content-Length: 0", "", ""),
    "no length": ("Host: localhost", "", ""),
    "largest": ("Host: localhost", "Content-Length: 900", "", "x" * 900),
    "too large": ("Host: localhost", "Content-Length: 901", "", "x" * 901),
    "chunks": ("Host: localhost", "Transfer-Encoding: chunked", "", "1", "a", "2", "bc", "0", "", ""),
    "trailer": (
        "Host: localhost",
        "Transfer-Encoding: chunked",
        "",
        "1",
        "a",
        "0",
        "Host: elsewhere",
        "",
        "",
    ),
    "too many chunks": (
        "Host: localhost",
        "Transfer-Encoding: chunked",
        "",
        *("65", "x" * 101) * 9,
        "0",
        "",
        "",
    ),
    "bye": ("Host: localhost", "Connection: close", "Content-Length: 1", "", "a"),
    "stay": ("Host: localhost", "Connection: keep-alive", "Content-Length: 1", "", "a"),
    "upgrade": ("Host: localhost", "Connection: upgrade, close", "Upgrade: h2c", "Content-Length: 0", "", ""),
    "expects": ("Host: localhost", "Expect: 100-continue", "Content-Length: 1", "", "a"),
    "no host": ("Content-Length: 1", "", "a"),
    "strange host": ("Host: elsewhere", "Content-Length: 1", "", "a"),
    "two hosts": ("Host: elsewhere", "Host: localhost", "Content-Length: 1", "", "a"),
    "own page": ("Host: localhost", "Origin: http://localhost", "Content-Length: 1", "", "a"),
    "strange page": ("Host: localhost", "Origin: http://elsewhere", "Content-Length: 1", "", "a"),
    "proxy": ("Host: localhost", "X-Forwarded-For: 192.0.2.1", "Content-Length: 1", "", "a"),
    "token": ("Host: localhost", "Authorization: Bearer nobody", "Content-Length: 1", "", "a"),
    "packed": ("Host: localhost", "Content-Encoding: gzip", "Content-Length: 1", "", "a"),
    "json": ("Host: localhost", "Content-Type: application/json", "Content-Length: 1", "", "{"),
    "header": ("Host: localhost", "Penstock-Header-A: b", "Content-Length: 1", "", "a"),
    "key": ("Host: localhost", "Idempotency-Key: k", "Content-Length: 1", "", "a"),
    "two lengths": ("Host: localhost", "Content-Length: 1", "Content-Length: 2", "", "a"),
    "damaged chunk": ("Host: localhost", "Transfer-Encoding: chunked", "", "zz", "a", ""),
}
PATHS = {
    "query": "{}/messages?",
    "ttl": "{}/messages?ttl=5&retries=2&delay=1",
    "wrong": "{}/messages?ttl=0",
    "fragment": "{}/messages#there",
    "slash": "{}/messages/",
    "dead": "{}.dead/messages",
    "none": "{}/nothing",
    "no name": "{}/../messages",
    "odd name": "{}$/messages",
    "long name": "{}" + "n" * 240 + "/messages",
    "too long": "{}" + "n" * 250 + "/messages",
}
BYE = b"GET /healthz HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
KEPT = ("offset", "ttl", "retries", "headers", "protocol", "state", "value_base64")
ASKED = {
    **{what: ("HTTP/1.1", "{}/messages", lines) for what, lines in LINES.items()},
    **{what: ("HTTP/1.1", path, LINES["plain"]) for what, path in PATHS.items()},
    "version 1.0": ("HTTP/1.0", "{}/messages", LINES["plain"]),
    "version 1.0, stays": ("HTTP/1.0", "{}/messages", LINES["stay"]),
}


def test_it_and_the_usual_way_do_the_same(start_broker: StartBroker) -> None:
    """A path with a percent goes the usual way, whatever is asked."""
    broker = start_broker(config="[limits]\npayload-bytes-max = 900\n")
    asked = []
    for number, (version, path, lines) in enumerate(ASKED.values()):
        for start, queue in (("/v1", f"a{number}-"), ("/%761", f"b{number}-")):
            line = f"POST {start}/queues/{path.format(queue)} {version}"
            asked.append((queue, "\r\n".join((line, *lines)).encode() + BYE))
    heard: list[list[Any]] = [[] for _ in asked]
    for _ in range(2):  # What has a key is stored once.
        raws = [Raw(broker.ports["http"]) for _ in asked]
        for raw, (_, request) in zip(raws, asked, strict=True):
            raw.say(request)
        for raw, (queue, _), did in zip(raws, asked, heard, strict=True):
            did.append(alike(raw.all(), queue))
            raw.close()
    with Api(broker.ports["http"]) as api:
        for (queue, _), did in zip(asked, heard, strict=True):
            messages = api.ask("GET", f"/v1/queues/{queue}/messages").json.get("messages", [])
            did.append([[it[key] for key in KEPT] for it in messages])
    for what, short, usual in zip(ASKED, heard[::2], heard[1::2], strict=True):
        assert short == usual, what
    assert sum(len(did[-1]) for did in heard[::2]) > len(ASKED)


def test_long_paths_of_nobody_are_not_remembered() -> None:
    before = quick._short_path.cache_info().currsize
    assert quick._queue_in(b"/v1/queues/%b/messages" % (b"x" * 60_000)) is None
    assert quick._short_path.cache_info().currsize == before


def alike(said: bytes, queue: str) -> list[list[bytes]]:
    """Lines of heads and bodies, without what is another one each time: the date, ids, the name."""
    said = said.removeprefix(b"HTTP/1.1 100 Continue\r\n\r\n")  # needless where the body is there
    said = re.sub(rb'date: [^\r]*|"id":"[0-9a-f]+"', b"", said).replace(queue.encode(), b"QUEUE")
    return [sorted(part.split(b"\r\n")) for part in said.split(b"\r\n\r\n")]


def test_who_waits_for_a_word_before_the_body_gets_it(raw: Raw) -> None:
    whole = send("polite", b"x", "Expect: 100-continue")
    raw.say(whole[:-1])
    assert raw.interim() == b"HTTP/1.1 100 Continue"
    raw.say(whole[-1:])
    assert raw.answer()[1]["offset"] == 0


def test_requests_that_come_at_once_are_answered_in_their_order(raw: Raw, api: Api) -> None:
    raw.say(
        send("line", b"0"), b"GET /v1/queues/line HTTP/1.1\r\nHost: localhost\r\n\r\n", send("line", b"1")
    )
    assert raw.answer()[1]["offset"] == 0
    assert raw.answer()[1]["name"] == "line"
    assert raw.answer()[1]["offset"] == 1
    assert payloads(api, "line") == ["0", "1"]


def test_hundreds_that_come_at_once_are_stored_in_their_order(raw: Raw, api: Api) -> None:
    """More than are looked at before some are answered; and the last one comes in two parts."""
    count = 300
    *most, last = (send("hundreds", b"%d" % number) for number in range(count))
    raw.say(*most, last[:30])
    for number in range(count - 1):
        assert raw.answer()[1]["offset"] == number
    raw.say(last[30:])
    assert raw.answer()[1]["offset"] == count - 1
    assert payloads(api, "hundreds") == [str(number) for number in range(count)]


def test_a_body_that_comes_in_pieces_is_one_message(raw: Raw, api: Api) -> None:
    whole = send("pieces", b"first, last")
    raw.say(whole[:-6])
    until(lambda: api.ask("GET", "/healthz") is not None, "another call to be answered meanwhile")
    raw.say(whole[-6:])
    assert raw.answer()[1]["offset"] == 0
    assert payloads(api, "pieces") == ["first, last"]


def test_who_wants_to_leave_is_let_go(broker: BrokerProcess) -> None:
    for request in (send("bye", b"x", "Connection: close"), send("bye", b"x", version="1.0")):
        raw = Raw(broker.ports["http"])
        raw.say(request)
        head, receipt = raw.answer()
        assert b"connection: close" in head
        assert receipt["repeated"] is False
        assert raw.ends()
        raw.close()


def test_many_who_send_at_a_time_get_receipts_of_their_own(broker: BrokerProcess, api: Api) -> None:
    def one(number: int) -> dict[int, str]:
        raw, offsets = Raw(broker.ports["http"]), {}
        for i in range(20):
            text = f"{number}.{i}"
            raw.say(send("many", text.encode()))
            receipt = raw.answer()[1]
            assert int(receipt["id"][-14:], 16) == receipt["offset"]
            offsets[receipt["offset"]] = text
        raw.close()
        return offsets

    with ThreadPoolExecutor(16) as pool:
        told = {offset: text for offsets in pool.map(one, range(16)) for offset, text in offsets.items()}
    assert [told[offset] for offset in range(320)] == payloads(api, "many")


def test_who_says_nonsense_behind_a_message_takes_no_receipt_from_others(broker: BrokerProcess) -> None:
    """It is sent away before its first answer is there, and only its second request knows."""
    raws = [Raw(broker.ports["http"]) for _ in range(8)]
    for raw in raws:
        raw.say(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert raw.answer()[1] == {"status": "ok"}
    second = int(Path(f"/proc/{broker.pid}/task/{broker.pid}/children").read_text())
    os.kill(second, signal.SIGSTOP)  # so that it reads them all in one turn
    for number, raw in enumerate(raws):
        message = send("nonsense", b"x")
        raw.say(message, *(message, b"nonsense\r\n\r\n") * (number % 2 == 0))
    os.kill(second, signal.SIGCONT)
    for raw in raws[1::2]:
        assert raw.answer()[1]["repeated"] is False
    for raw in raws:
        raw.close()
    assert "Traceback" not in broker.log()


def test_where_there_is_room_for_some_these_are_stored(start_broker: StartBroker) -> None:
    broker = start_broker(config="[queue.full]\nmax-bytes = 2000\n")
    raws = [Raw(broker.ports["http"]) for _ in range(8)]
    for raw in raws:
        raw.say(send("full", b"x" * 400))
    answers = [raw.answer() for raw in raws]
    stored = [answer for head, answer in answers if b" 200 " in head]
    refused = [answer for head, answer in answers if b" 200 " not in head]
    assert 0 < len(stored) < 8
    assert {answer["type"].rpartition(":")[2] for answer in refused} == {"queue-full"}
    with Api(broker.ports["http"]) as api:
        assert len(payloads(api, "full")) == len(stored)
    for raw in raws:
        raw.close()


TOKENS = "".join(
    f'[[http.tokens]]\nname = "{name}"\ntoken = "{name}-0123456789abcdef0123"\nrole = "{name}"\n'
    for name in ("operate", "read")
)


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        (("Authorization: Bearer operate-0123456789abcdef0123",), 200),
        (("Authorization: Bearer read-0123456789abcdef0123",), 403),
        (("Authorization: Bearer nobody-0123456789abcdef0123",), 401),
        ((), 401),
    ],
)
def test_who_may_send_is_looked_at(start_broker: StartBroker, headers: tuple[str, ...], status: int) -> None:
    raw = Raw(start_broker(config=TOKENS).ports["http"])
    for _ in range(2):  # The first time a token is compared, then it is known.
        raw.say(send("mine", b"x", *headers))
        assert raw.answer()[0].startswith(b"HTTP/1.1 %d " % status)
    raw.close()


def test_a_page_of_another_site_sends_nothing(raw: Raw, api: Api) -> None:
    raw.say(send("page", b"x", "Origin: http://elsewhere"))
    assert b" 403 " in raw.answer()[0]
    assert api.ask("GET", "/v1/queues/page/messages").status == 404


@pytest.mark.parametrize(("kind", "status"), [("unavailable", 503), ("failed", 503), ("queue-full", None)])
def test_what_may_have_been_stored_is_not_sent_again(kind: str, status: int | None) -> None:
    """And what was refused goes the usual way, for which there is no app here."""
    went: list[tuple[object, Any]] = []

    async def refuse(*_: object) -> None:
        raise CallRefused(kind, "no answer")

    async def story() -> None:
        site: Any = SimpleNamespace(
            hello={"block_bytes": 1 << 20},
            payload_bytes_max=1000,
            body_bytes_max=1000,
            guard=Guard(()),
            link=SimpleNamespace(call=refuse),
            requests=Counter(),
            held=SimpleNamespace(hold_body=lambda count: True, let_body_go=lambda count: None),
        )
        scope = {"method": "POST", "query_string": b"", "raw_path": b"/v1/queues/q/messages", "client": None}
        connection: Any = SimpleNamespace(
            flow=SimpleNamespace(write_paused=False), go_on=lambda cycle, app: went.append((cycle, app))
        )
        way = Quick(site)
        cycles: list[Any] = [SimpleNamespace(scope={**scope, "headers": []}, body=b"x") for _ in range(2)]
        assert all(way.take(connection, cycle) for cycle in cycles)
        while len(went) < 2:
            await asyncio.sleep(0)
        assert [cycle for cycle, _ in went] == cycles
        assert [app and app.status_code for _, app in went] == [status] * 2
        assert site.requests == ({("POST", SEND_PATH, "5xx"): 2} if status else {})

    asyncio.run(story())
