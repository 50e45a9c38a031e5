"""The HTTP client and somebody who does not answer as a broker does: what is repeated, what is in doubt.

The other side is played by a `Stage`: a real socket, and a script of what is said on it.
"""

import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest

from penstock.client import ConnectionLost, HttpClient, Refused, TimedOut
from tests.client.both import Connect, both
from tests.server.harness import WAIT_SECONDS


def answered(status: bytes, media: bytes, body: bytes) -> bytes:
    return b"HTTP/1.1 %b\r\nContent-Type: %b\r\nContent-Length: %d\r\n\r\n%b" % (
        status,
        media,
        len(body),
        body,
    )


ANSWER = answered(b"200 OK", b"application/json", b'{"offset":7,"id":"0123","repeated":false}')

Script = list[bytes | None]


def hear(guest: socket.socket, pause: float = 0) -> bytes:
    """A request; `pause`: behind each MiB of its first two thirds, so that this is a slow line. What is on
    its way when the last byte was sent is heard at once."""
    heard = b""
    while b"\r\n\r\n" not in heard:
        data = guest.recv(1 << 16)
        if not data:
            return b""
        heard += data
    head, _, begun = heard.partition(b"\r\n\r\n")
    wanted = int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0] or 0)
    body = bytearray(begun)
    while len(body) < wanted and (data := guest.recv(min(1 << 20, wanted - len(body)), socket.MSG_WAITALL)):
        body += data
        if 3 * len(body) < 2 * wanted:
            time.sleep(pause)
    return head + b"\r\n\r\n" + body


class Stage:
    """Somebody at a port who follows a script: for each request an answer, or None: silence, then the end."""

    def __init__(self, script: Script, *, closes: bool) -> None:
        self._script = script
        self._closes = closes
        self.requests: list[bytes] = []
        self._ended = threading.Semaphore(0)  # connections
        self._socket = socket.create_server(("127.0.0.1", 0))
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._play)
        self._thread.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._socket.getsockname()[1]}"

    def _play(self) -> None:
        while self._script:
            try:
                guest, _ = self._socket.accept()
            except OSError:  # the end
                return
            with guest:
                guest.settimeout(WAIT_SECONDS)
                while self._script and (request := hear(guest)):
                    self.requests.append(request)
                    answer = self._script.pop(0)
                    if answer is None:
                        if not self._closes:
                            self._over.wait(WAIT_SECONDS)
                        break
                    guest.sendall(answer)
                    if b"\r\nConnection: close\r\n" in answer or self._closes:
                        break
            self._ended.release()

    def wait_for_end(self, count: int = 1) -> None:
        """Until so many more connections have been closed; the other side's socket knows it by then."""
        for _ in range(count):
            assert self._ended.acquire(timeout=WAIT_SECONDS)

    def end(self) -> None:
        self._over.set()
        self._socket.shutdown(socket.SHUT_RDWR)
        self._thread.join(WAIT_SECONDS)
        self._socket.close()


@contextmanager
def stage(*script: bytes | None, closes: bool = True) -> Iterator[Stage]:
    played = Stage(list(script), closes=closes)
    try:
        yield played
    finally:
        played.end()


QUICK = {"backoff_seconds_min": 0.01, "operation_seconds": 10}


@both
async def test_a_connection_closed_while_nobody_used_it(kind: Connect) -> None:
    with stage(ANSWER, ANSWER, ANSWER) as broker:
        async with kind(broker.url, **QUICK) as api:
            for _ in range(3):
                assert (await api.send("q", b"x")).offset == 7
                broker.wait_for_end()
        assert len(broker.requests) == 3


@pytest.mark.parametrize("answer", [None, b"HTTP/1.1 200 OK\r\n", ANSWER.partition(b"-Length")[0]])
@both
async def test_a_send_without_a_key_is_in_doubt_and_not_repeated(kind: Connect, answer: bytes | None) -> None:
    """Wherever the answer is cut off: its head may look like a whole one."""
    with stage(answer, ANSWER) as broker:
        async with kind(broker.url, **QUICK) as api:
            with pytest.raises(ConnectionLost) as raised:
                await api.send("q", b"x")
            assert (raised.value.in_doubt, raised.value.positions) == (1, (0,))
            assert str(raised.value).endswith(
                ": the connection was lost (the broker has closed it; is this the right port?); it is not "
                "known whether the message was stored, and sending again may store twice; a key makes that "
                "safe"
            )
            assert len(broker.requests) == 1
            assert (await api.send("q", b"x")).offset == 7


@both
async def test_what_is_safe_is_repeated_once(kind: Connect) -> None:
    pages = answered(b"200 OK", b"application/json", b'{"queues":[],"next":null}')
    with stage(None, ANSWER, None, pages, None, None) as broker:
        async with kind(broker.url, **QUICK) as api:
            assert (await api.send("q", b"x", key="k")).offset == 7
            assert broker.requests[0] == broker.requests[1]
            assert b"Idempotency-Key: k" in broker.requests[1]
            broker.wait_for_end(2)  # else the next call might find it out only when it has asked
            assert await api.queues() == []
            broker.wait_for_end(2)
            with pytest.raises(
                ConnectionLost, match="the same call again, with the same key, is safe"
            ) as raised:
                await api.send("q", b"x", key="k")
            assert raised.value.in_doubt == 1
        assert len(broker.requests) == 6


@both
async def test_batches_in_doubt_are_named(kind: Connect) -> None:
    receipt = b'{"count":10000,"offset_start":0,"offset_end":10000,"id_first":"0","repeated":false}'
    answer = answered(b"200 OK", b"application/json", receipt)
    with stage(answer, None) as broker:
        async with kind(broker.url, **QUICK) as api:
            with pytest.raises(ConnectionLost) as raised:
                await api.send_many("q", [b"x"] * 10_003)
    assert (raised.value.in_doubt, raised.value.positions) == (3, (10_000, 10_001, 10_002))
    assert raised.value.sent == 10_003
    assert "the first 10000 messages of this call are stored; it is not known whether 3 mess" in str(
        raised.value
    )


@both
async def test_silence(kind: Connect) -> None:
    with stage(None, closes=False) as broker:
        async with kind(broker.url, operation_seconds=0.2, backoff_seconds_min=0.01) as api:
            with pytest.raises(TimedOut, match=r"no answer within 0.2 s; it is not known whether") as raised:
                await api.send("q", b"x", key="k")
            assert raised.value.in_doubt == 1
            assert len(broker.requests) == 1  # waited for once: who is silent now is silent again


@contextmanager
def once(answer: bytes = b"", pause: float = 0) -> Iterator[str]:
    """The URL of somebody who reads one request, perhaps answers it, and is never seen again."""
    with socket.create_server(("127.0.0.1", 0)) as listener, ThreadPoolExecutor(1) as pool:

        def play() -> None:
            guest, _ = listener.accept()
            with guest:
                guest.settimeout(WAIT_SECONDS)
                hear(guest, pause)
                listener.close()
                guest.sendall(answer)

        playing = pool.submit(play)
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        playing.result(WAIT_SECONDS)


@both
async def test_nobody_is_there_to_repeat_it_to(kind: Connect) -> None:
    """It was sent once, and may be stored."""
    with once() as url:
        async with kind(url, **QUICK, reconnect_seconds=0) as api:
            with pytest.raises(ConnectionLost, match="it is not known whether the message was") as raised:
                await api.send("q", b"x", key="k")
    assert (raised.value.in_doubt, raised.value.positions) == (1, (0,))


@both
async def test_nobody_is_there_for_the_rest(kind: Connect) -> None:
    receipt = b'{"count":10000,"offset_start":0,"offset_end":10000,"id_first":"0","repeated":false}'
    with once(answered(b"200 OK\r\nConnection: close", b"application/json", receipt)) as url:
        async with kind(url, **QUICK, reconnect_seconds=0) as api:
            with pytest.raises(ConnectionLost) as raised:
                await api.send_many("q", [b"x"] * 10_003)
    assert (raised.value.in_doubt, raised.value.sent) == (0, 10_000)
    assert str(raised.value).endswith(
        "; the first 10000 messages of this call are stored, the others were not sent"
    )


@both
async def test_a_slow_line_is_no_broker_that_takes_nothing(kind: Connect) -> None:
    """The bound is for the time without a byte, however long a large message takes."""
    with once(ANSWER, pause=0.1) as url:
        async with kind(url, operation_seconds=1) as api:
            assert (await api.send("q", bytes(20 << 20))).offset == 7


@pytest.mark.parametrize(
    ("answer", "complaint"),
    [
        (
            answered(b"502 Bad Gateway", b"text/html", b"<h1>no</h1>"),
            "status 502 and text/html: this is no answer",
        ),
        (answered(b"200 OK", b"text/html", b"<h1>hello</h1>"), "status 200 and text/html: this is no answer"),
        (
            answered(b"200 OK", b"application/json", b"{"),
            "status 200 and application/json: this is no answer",
        ),
        (
            answered(b"200 OK", b"application/json", b"[]"),
            "status 200 and application/json: this is no answer",
        ),
    ],
)
def test_somebody_else_answers(answer: bytes, complaint: str) -> None:
    with stage(answer) as other, HttpClient(other.url) as api:
        with pytest.raises(Refused, match=complaint) as raised:
            api.send("q", b"x")
        assert raised.value.name == ""


def test_somebody_who_does_not_speak_http() -> None:
    lost = pytest.raises(ConnectionLost, match=r"the connection was lost \(\+OK hello")
    with stage(b"+OK hello\r\n") as other, HttpClient(other.url) as api, lost:
        api.send("q", b"x")
