"""Servers to import from, one of each for all tests of a module, and ways to fill them.

What is imported from by our own protocols is the broker of the tests itself, by another of its queues.
"""

import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from bench import peers
from bench.server import Server
from penstock.cli.main import main
from penstock.client import HttpClient
from tests.http.conftest import broker as broker
from tests.http.conftest import start_broker as start_broker
from tests.server.harness import BrokerProcess

Command = Callable[..., tuple[int, str, str]]


class Peer:
    """A server that comes back at the same port, with what it has on its disk."""

    def __init__(self, folder: Path, start: Callable[[Path, int], Server]) -> None:
        self._folder = folder
        self._start = start
        self._server = start(folder, 0)
        self.port = next(iter(self._server.ports.values()))

    def restart(self) -> None:
        """kill -9, and again."""
        self.kill()
        self._server = self._start(self._folder, self.port)

    def kill(self) -> None:
        self._server.kill()


@pytest.fixture(scope="module")
def redis_peer(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Peer]:
    peer = Peer(tmp_path_factory.mktemp("redis"), lambda folder, port: peers.redis(folder, "always", port))
    yield peer
    peer.kill()


@pytest.fixture(scope="module")
def redis(redis_peer: Peer) -> Iterator[Any]:
    import redis

    with redis.Redis(port=redis_peer.port) as client:
        yield client


@pytest.fixture(scope="module")
def beanstalkd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Peer]:
    peer = Peer(
        tmp_path_factory.mktemp("beanstalkd"), lambda folder, port: peers.beanstalkd(folder, True, port)
    )
    yield peer
    peer.kill()


@pytest.fixture(scope="session")
def rabbitmq(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    """Its port. It takes long to start: one for all tests."""
    with peers.rabbitmq(tmp_path_factory.mktemp("rabbitmq")) as server:
        yield server.ports["amqp"]


@pytest.fixture
def command(
    broker: BrokerProcess, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Command:
    """Runs `penstock import` in this process: its exit code, and what it says."""
    monkeypatch.setenv("PENSTOCK_URL", f"http://127.0.0.1:{broker.ports['http']}")
    monkeypatch.delenv("PENSTOCK_TOKEN", raising=False)

    def run(*arguments: str) -> tuple[int, str, str]:
        # First, so that a test can say something else.
        usual = ["--journal", str(tmp_path / "journal"), "--timeout", "0.1"]
        code = main(["import", *usual, *arguments])
        out, err = capsys.readouterr()
        return code, out, err

    return run


@pytest.fixture
def stored(broker: BrokerProcess) -> Callable[[str], list[bytes]]:
    """The payloads of a queue, in order."""

    def look(queue: str) -> list[bytes]:
        with HttpClient(f"http://127.0.0.1:{broker.ports['http']}") as mq:
            return [message.value for message in mq.peek(queue, limit=10_000)]

    return look


class Stalk:
    """A client of beanstalkd."""

    def __init__(self, port: int, tube: str) -> None:
        self._socket = socket.create_connection(("127.0.0.1", port))
        self._file = self._socket.makefile("rb")
        self.ask(f"use {tube}")
        self.ask(f"watch {tube}")

    def ask(self, command: str) -> str:
        self._socket.sendall(command.encode() + b"\r\n")
        return self._file.readline().decode().strip()

    def put(self, bodies: Sequence[bytes], delay: int = 0, priority: int = 10) -> None:
        for body in bodies:
            assert self.ask(f"put {priority} {delay} 60 {len(body)}\r\n{body.decode()}").startswith(
                "INSERTED"
            )

    def bury(self) -> None:
        words = self.ask("reserve-with-timeout 0").split()
        self._file.readline()
        assert self.ask(f"bury {words[1]} 0") == "BURIED"

    def close(self) -> None:
        self._file.close()
        self._socket.close()


@pytest.fixture
def stalk(beanstalkd: Peer) -> Iterator[Callable[[str], Stalk]]:
    with ExitStack() as stack:

        def connect(tube: str) -> Stalk:
            client = Stalk(beanstalkd.port, tube)
            stack.callback(client.close)
            return client

        yield connect
