"""HTTP at a follower: the leader's answers, byte by byte; or a problem that says that nobody leads."""

import asyncio
import hashlib
import http.client
import json
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from penstock.cluster.pipe import RECEIVE_BYTES, End, HttpPipe
from penstock.cluster.trust import Leader as Place
from penstock.cluster.trust import Trust
from penstock.common.address import TcpAddress
from tests.cluster.fronts import TRUST, Leader, LoopThread
from tests.server.harness import WAIT_SECONDS, Wire

Found = Place | None
LARGE = bytes(range(256)) * 80_000  # 20 MB: more than all buffers on the way


class HttpServer:
    """A small HTTP server: it tells the digest of what it was sent, and sends as much as it was asked for."""

    def __init__(self, thread: LoopThread) -> None:
        self.thread = thread
        self.read_bytes = 0
        self.may_read = asyncio.Event()
        self.may_read.set()
        self.callers: list[str] = []
        self._tasks: set[asyncio.Task[None]] = set()

    def enter(self, caller: str) -> socket.socket:
        self.callers.append(caller)
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        task = self.thread.loop.create_task(self._serve(theirs))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return ours

    async def _serve(self, peer: socket.socket) -> None:
        reader, writer = await asyncio.open_unix_connection(sock=peer)
        while line := await reader.readline():
            length = 0
            while (header := await reader.readline()).strip():
                name, _, value = header.decode().partition(":")
                if name.lower() == "content-length":
                    length = int(value)
            digest = hashlib.sha256()
            while length:
                await self.may_read.wait()
                data = await reader.read(min(length, 65_536))
                if not data:
                    break
                self.read_bytes += len(data)
                length -= len(data)
                digest.update(data)
            path = line.split()[1]
            body = LARGE if path == b"/large" else path + b" " + digest.hexdigest().encode()
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
            await writer.drain()
        writer.close()

    def close(self) -> None:
        self.thread.until(lambda: not self._tasks, "all connections to end")


class Pipe:
    """A follower's HTTP door."""

    def __init__(
        self, thread: LoopThread, leader: Callable[[], Found], door: socket.socket | None = None
    ) -> None:
        self.thread = thread
        door = door or socket.create_server(("127.0.0.1", 0))
        self.port: int = door.getsockname()[1]
        self.pipe = thread.call(HttpPipe, door, "follower", leader)

    def connection(self) -> http.client.HTTPConnection:
        return http.client.HTTPConnection("127.0.0.1", self.port, timeout=WAIT_SECONDS)

    def close(self) -> None:
        self.thread.call(self.pipe.close)
        self.thread.until(lambda: not self.pipe._ends, "all connections to end")


@pytest.fixture
def server(thread: LoopThread) -> Iterator[HttpServer]:
    server = HttpServer(thread)
    yield server
    server.close()


@pytest.fixture
def leader(thread: LoopThread, tmp_path: Path, server: HttpServer) -> Iterator[Leader]:
    leader = Leader(thread, tmp_path / "log", http=server.enter)
    yield leader
    leader.stop()


@pytest.fixture
def pipe(thread: LoopThread, leader: Leader) -> Iterator[Pipe]:
    pipe = Pipe(thread, lambda: leader.place)
    yield pipe
    pipe.close()


def answer(connection: http.client.HTTPConnection, path: str, body: bytes | None = None) -> bytes:
    connection.request("POST" if body else "GET", path, body)
    response = connection.getresponse()
    assert response.status == 200
    return response.read()


def test_the_leader_answers(pipe: Pipe) -> None:
    connection = pipe.connection()
    nothing = hashlib.sha256().hexdigest().encode()
    for path in ("/one", "/two"):  # over the same connection
        assert answer(connection, path) == path.encode() + b" " + nothing
    connection.close()


def test_the_leader_hears_who_calls(thread: LoopThread, server: HttpServer, leader: Leader) -> None:
    for host, shown in (("127.0.0.1", "127.0.0.1:{}"), ("::1", "[::1]:{}")):
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        pipe = Pipe(thread, lambda: leader.place, socket.create_server((host, 0), family=family))
        connection = http.client.HTTPConnection(host, pipe.port, timeout=WAIT_SECONDS)
        answer(connection, "/small")
        assert server.callers.pop() == shown.format(connection.sock.getsockname()[1])
        connection.close()
        pipe.close()


def test_callers_without_an_address_are_those_of_their_front_end(
    thread: LoopThread, server: HttpServer, leader: Leader, tmp_path: Path
) -> None:
    door = socket.socket(socket.AF_UNIX)
    door.bind(str(tmp_path / "http.sock"))
    door.listen()
    pipe = thread.call(HttpPipe, door, "follower", lambda: leader.place)
    with socket.socket(socket.AF_UNIX) as client:
        client.settimeout(WAIT_SECONDS)
        client.connect(str(tmp_path / "http.sock"))
        client.sendall(b"GET /small HTTP/1.1\r\n\r\n")
        assert client.recv(100).startswith(b"HTTP/1.1 200 OK")
    thread.call(pipe.close)
    thread.until(lambda: not pipe._ends, "all connections to end")
    assert server.callers == ["follower"]


def test_a_process_that_takes_nobody_is_told_as_an_outage(thread: LoopThread, tmp_path: Path) -> None:
    def enter(caller: str) -> socket.socket:
        raise BlockingIOError(11, "Resource temporarily unavailable")

    leader = Leader(thread, tmp_path, http=enter)
    pipe = Pipe(thread, lambda: leader.place)
    expect_no_leader(pipe)
    pipe.close()
    leader.stop()


def test_large_bodies_pass_both_ways(pipe: Pipe) -> None:
    connection = pipe.connection()
    assert answer(connection, "/up", LARGE) == b"/up " + hashlib.sha256(LARGE).hexdigest().encode()
    assert answer(connection, "/large") == LARGE
    connection.close()


def test_what_is_not_read_is_not_sent(pipe: Pipe, server: HttpServer) -> None:
    pipe.thread.call(server.may_read.clear)
    body = LARGE * 3
    done: list[bytes] = []
    connection = pipe.connection()
    sender = threading.Thread(target=lambda: done.append(answer(connection, "/slow", body)), daemon=True)
    sender.start()
    sender.join(0.5)
    assert sender.is_alive()
    pipe.thread.call(server.may_read.set)
    sender.join(WAIT_SECONDS)
    assert done == [b"/slow " + hashlib.sha256(body).hexdigest().encode()]
    connection.close()


def test_what_came_before_there_was_a_peer_counts_as_well(thread: LoopThread) -> None:
    """What a leader does not read stays with the client, from the first chunk on."""
    client, front = socket.socketpair()
    link, leader = socket.socketpair()
    link.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    client.setblocking(False)

    async def ends() -> tuple[End, End]:
        _, one = await thread.loop.create_connection(End, sock=front)
        _, other = await thread.loop.create_connection(End, sock=link)
        return one, other

    def sent() -> int:
        try:
            return client.send(bytes(RECEIVE_BYTES))
        except BlockingIOError:
            return 0

    one, other = thread.run(ends())
    count = 0
    while not one._early:  # more than the link takes at once
        count += sent()
    thread.call(one.tie, other)
    stuck = 0
    while stuck < 20 and count < len(LARGE):
        passed = sent()
        count, stuck = count + passed, 0 if passed else stuck + 1
        thread.run(asyncio.sleep(0.005))
    thread.call(one.abort)
    client.close()
    leader.close()
    thread.until(lambda: one.transport is None and other.transport is None, "both ends to be gone")
    assert count < len(LARGE) // 2, "the pipe took what the leader did not"


def test_a_client_that_has_closed_its_side_is_answered(pipe: Pipe) -> None:
    wire = Wire(("127.0.0.1", pipe.port))
    wire.say(b"GET /half HTTP/1.1\r\n\r\n")
    wire.socket.shutdown(socket.SHUT_WR)
    assert wire.hear(15) == b"HTTP/1.1 200 OK"
    while wire.some():
        pass
    wire.close()


def test_a_connection_ends_with_the_leader(pipe: Pipe, leader: Leader) -> None:
    wire = Wire(("127.0.0.1", pipe.port))
    wire.say(b"GET /one HTTP/1.1\r\n\r\n")
    wire.hear(20)
    leader.thread.call(leader.door.end_pipes)
    while wire.some():
        pass
    wire.close()


def test_who_is_tied_to_a_former_leader_is_let_go(thread: LoopThread, leader: Leader) -> None:
    told: list[Found] = [leader.place]
    pipe = Pipe(thread, lambda: told[-1])
    connection = pipe.connection()
    for path in ("/one", "/two"):
        assert answer(connection, path).startswith(path.encode())
        thread.call(pipe.pipe.leader_changed)  # It has not.
    connection.close()
    wire = Wire(("127.0.0.1", pipe.port))
    wire.say(b"GET /one HTTP/1.1\r\n\r\n")
    wire.hear(20)
    told.append(Place(TcpAddress("127.0.0.1", 1), "gone", 2, TRUST))
    thread.call(pipe.pipe.leader_changed)
    while wire.some():
        pass  # until it is closed
    wire.close()
    pipe.close()


def test_a_pipe_that_closes_leaves_no_link_behind(thread: LoopThread) -> None:
    """Not to a leader either that has not answered yet."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        silent.settimeout(WAIT_SECONDS)
        pipe = Pipe(thread, lambda: Place(TcpAddress(*silent.getsockname()), "gone", 1, TRUST))
        client = Wire(("127.0.0.1", pipe.port))
        link, _ = silent.accept()
        link.settimeout(2.0)
        assert link.recv(4096), "its hello"
        pipe.close()
        with link, client:
            assert link.recv(4096) == b""


def test_an_outage_is_one_line_in_the_log(thread: LoopThread) -> None:
    with socket.create_server(("127.0.0.1", 0)) as door:
        port = door.getsockname()[1]
    pipe = Pipe(thread, lambda: Place(TcpAddress("127.0.0.1", port), "gone", 1, TRUST))
    for _ in range(3):
        expect_no_leader(pipe)
    assert sum("no way to the leader" in line for line in thread.lines.lines) == 1
    pipe.close()


# --- nobody leads ------------------------------------------------------------------------------------


def expect_no_leader(pipe: Pipe) -> None:
    for body in (None, bytes(1000)):
        connection = pipe.connection()
        connection.request("POST" if body else "GET", "/v1/queues", body)
        response = connection.getresponse()
        assert response.status == 503
        assert response.headers["Content-Type"] == "application/problem+json"
        assert response.headers["Retry-After"] == "1"
        problem = json.loads(response.read())
        assert (problem["type"], problem["status"]) == ("urn:penstock:no-leader", 503)
        connection.close()


def test_nobody_leads(thread: LoopThread) -> None:
    pipe = Pipe(thread, lambda: None)
    expect_no_leader(pipe)
    pipe.close()


def test_the_leader_is_not_there(thread: LoopThread) -> None:
    with socket.create_server(("127.0.0.1", 0)) as door:
        port = door.getsockname()[1]
    pipe = Pipe(thread, lambda: Place(TcpAddress("127.0.0.1", port), "gone", 1, TRUST))
    expect_no_leader(pipe)
    pipe.close()


@pytest.mark.parametrize(
    "other",
    [{"trust": Trust(bytes(32))}, {"id": "another"}, {"term": 2}, {}],
    ids=["key", "id", "term", "none"],
)
def test_the_leader_refuses(thread: LoopThread, tmp_path: Path, other: dict[str, Any]) -> None:
    """It is another one, or, in the last row, one without HTTP."""
    leader = Leader(thread, tmp_path)
    pipe = Pipe(thread, lambda: leader.place._replace(**other))
    expect_no_leader(pipe)
    pipe.close()
    leader.stop()
