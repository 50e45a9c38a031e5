"""Requests that nobody needs: each gets its answer, and none leaves a traceback, with tokens and without."""

import socket
from collections.abc import Iterator

import pytest

from tests.server.harness import WAIT_SECONDS, BrokerProcess

TOKENS = '[[http.tokens]]\nname = "one"\nrole = "admin"\ntoken = "0123456789abcdef0123"\n'
WEBSOCKET = (
    "Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\n"
    "Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\n"
)
PAGE = "Accept: text/html\r\n"

UNKNOWN = [
    "GET /_penstock/nope",
    "HEAD /_penstock/nope",
    "POST /_penstock/nope",
    "OPTIONS /_penstock/nope",
    "GET /_penstock",
    "GET /_penstock/",
    "GET /_penstock/%00",
    "GET /_penstock/%ff",
    "GET /_penstock/" + "a" * 5000,
    "GET /_penstock/" + "a/" * 3000,
    "GET /_penstock/../door.py",
    "GET /_penstock/%2e%2e/door.py",
    "GET /_penstock/penstock.css/x",
    "GET /favicon.ico/x",
    "GET /nope",
    "HEAD /nope",
    "OPTIONS /nope",
    "PATCH /nope",
    "OPTIONS *",
    "GET *",
    "GET //",
    "GET /%",
    "GET /%zz",
    "GET /v1/nope",
    "GET /v1/" + "x" * 60_000,
    "GET /" + "/" * 5000,
]


@pytest.fixture(scope="module", params=["", TOKENS], ids=["open", "with tokens"])
def broker(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[BrokerProcess]:
    folder = tmp_path_factory.mktemp("broker")
    (folder / "penstock.toml").write_text(request.param)
    flags = ("--config", str(folder / "penstock.toml"), "--http", "127.0.0.1:0")
    broker = BrokerProcess(folder, *flags).start()
    yield broker
    assert broker.stop() == 0
    assert "Traceback" not in broker.log(), broker.log()


def asked(broker: BrokerProcess, line: str, headers: str = "Connection: close\r\n") -> int:
    """The status of the answer, when the broker has closed."""
    with socket.create_connection(("127.0.0.1", broker.ports["http"]), WAIT_SECONDS) as peer:
        peer.sendall(f"{line} HTTP/1.1\r\nHost: localhost\r\n{headers}\r\n".encode("latin-1"))
        heard = b""
        while more := peer.recv(65536):
            heard += more
    assert heard.startswith(b"HTTP/1.1 "), heard
    return int(heard.split()[1])


@pytest.mark.parametrize("line", UNKNOWN, ids=lambda line: line[:40])
def test_what_is_not_there_is_not_found(broker: BrokerProcess, line: str) -> None:
    assert asked(broker, line) == 404


@pytest.mark.parametrize("line", ["OPTIONS *", "GET *", "GET /_penstock/nope", "GET /v1/nope"])
def test_nor_by_a_browser(broker: BrokerProcess, line: str) -> None:
    assert asked(broker, line, PAGE + "Connection: close\r\n") == 404


@pytest.mark.parametrize(
    "line",
    [
        "GET /%ff%fe",
        "GET /v1/queues/%ff",
        "GET /v1/queues/a%00b",
        "GET /v1\xff",
        "FOO /",
        "GET nope",
        "GET ?",
    ],
)
def test_what_cannot_be_read_is_a_bad_request(broker: BrokerProcess, line: str) -> None:
    assert asked(broker, line) == 400


@pytest.mark.parametrize(
    ("line", "headers", "status"),
    [
        ("GET /nope", "", 403),
        ("GET *", "", 403),
        ("GET /_nicegui_ws/nope", "", 403),
        ("GET /v1/queues", "X: \xff\r\n", 403),
        ("GET /" + "x" * 10_000, "", 400),
        ("GET /nope", "X: y\r\n" * 300, 400),
        ("GET /nope", f"X: {'y' * 20_000}\r\n", 400),
        ("GET /nope", "Content-Length: 5\r\n", 400),
    ],
    ids=["nope", "star", "NiceGUI", "bytes", "long", "many headers", "long header", "body"],
)
def test_websockets_that_come_to_nothing_end(
    broker: BrokerProcess, line: str, headers: str, status: int
) -> None:
    assert asked(broker, line, WEBSOCKET + headers) == status


def test_a_websocket_needs_a_key(broker: BrokerProcess) -> None:
    assert asked(broker, "GET /nope", "Connection: Upgrade\r\nUpgrade: websocket\r\n") in (400, 426)
