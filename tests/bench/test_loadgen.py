"""The load generator against a server that does wrong: what is lost, doubled or damaged never gives a figure.

The server speaks SSPQ: frames are kept in order and given out one at a time. What it does wrong, or late, is
said by a function that sees every frame that it gives out.
"""

import shutil
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from bench.loadgen import LoadError, drive

pytestmark = pytest.mark.skipif(shutil.which("cc") is None, reason="the load generator needs a C compiler")

HEAD = struct.Struct(">HBBI")
SEND, RECEIVE = 0x5E, 0xEC
MESSAGES = 150

Fault = Callable[[int, bytes], list[bytes]]
"""From a frame and its place among those given out: what is given out instead."""


class Relay:
    """Takes frames from whoever sends, and gives them to whoever asks."""

    def __init__(self, fault: Fault) -> None:
        self._fault = fault
        self._frames: deque[bytes] = deque()
        self._given = 0
        self._is_over = False
        self._changed = threading.Condition()
        self._connections: list[socket.socket] = []
        self._threads: list[threading.Thread] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._start(self._accept)

    def _start(self, what: Callable[..., None], *args: object) -> None:
        self._threads.append(threading.Thread(target=what, args=args, daemon=True))
        self._threads[-1].start()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return  # the end
            self._connections.append(connection)
            self._start(self._serve, connection)

    def _serve(self, connection: socket.socket) -> None:
        with connection, connection.makefile("rb") as stream:
            try:
                while len(head := stream.read(HEAD.size)) == HEAD.size:
                    _, kind, _, length = HEAD.unpack(head)
                    if kind == SEND:
                        self._take(head + stream.read(length))
                    elif kind == RECEIVE and not self._give(connection):
                        return
            except OSError:
                return  # the generator has seen enough

    def _take(self, frame: bytes) -> None:
        with self._changed:
            self._frames += self._fault(self._given, frame)
            self._given += 1
            self._changed.notify_all()

    def _give(self, connection: socket.socket) -> bool:
        with self._changed:
            self._changed.wait_for(lambda: self._frames or self._is_over, timeout=5)
            if not self._frames:
                return False
            frame = self._frames.popleft()
        connection.sendall(frame)
        return True

    def close(self) -> None:
        with self._changed:
            self._is_over = True
            self._changed.notify_all()
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for connection in self._connections:
            connection.close()
        for thread in self._threads:
            thread.join(10)


@contextmanager
def relay(fault: Fault) -> Iterator[int]:
    server = Relay(fault)
    try:
        yield server.port
    finally:
        server.close()


def honest(_: int, frame: bytes) -> list[bytes]:
    return [frame]


def losing(place: int, frame: bytes) -> list[bytes]:
    return [] if place == 70 else [frame]


def doubling(place: int, frame: bytes) -> list[bytes]:
    return [frame, frame] if place == 70 else [frame]


def damaging(place: int, frame: bytes) -> list[bytes]:
    return [frame[:-1] + bytes([frame[-1] ^ 1])] if place == 70 else [frame]


def stalling(place: int, frame: bytes) -> list[bytes]:
    if place == 50:
        time.sleep(0.1)
    return [frame]


def test_all_messages_are_counted() -> None:
    with relay(honest) as port:
        load = drive("sspq", "end-to-end", port, queue="default", messages=MESSAGES, run=1, seconds_max=20)
    assert load.messages == MESSAGES
    assert load.per_second == pytest.approx(MESSAGES / load.seconds, rel=0.01)


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        (losing, "not done after 3 s: 150 messages, 150 sent, 0 confirmed, 149 arrived"),
        (doubling, "message 70 arrived twice"),
        (damaging, "message 70 arrived damaged"),
    ],
)
def test_a_fault_of_the_server_gives_no_figure(fault: Fault, said: str) -> None:
    with relay(fault) as port, pytest.raises(LoadError, match=said):
        drive("sspq", "end-to-end", port, queue="default", messages=MESSAGES, run=1, seconds_max=3)


def test_messages_that_became_due_while_the_server_stood_still_are_late_too() -> None:
    with relay(stalling) as port:
        load = drive(
            "sspq",
            "paced",
            port,
            queue="default",
            messages=MESSAGES,
            run=1,
            rate_per_second=1000,
            seconds_max=20,
        )
    assert load.latency is not None
    # 100 ms of silence, and 100 messages that were due meanwhile: the one in the middle of all is 25 ms late.
    assert load.latency.p50 > 15_000
    assert 90_000 < load.latency.p99 <= load.latency.p999 <= load.latency.most
