"""Who may do what: tokens and roles, a broker without tokens, TLS; and what is no proper request."""

import http.client
import json
import socket
import ssl
from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.http.connection import HEAD_BYTES_MAX
from tests.certificates import make_authority
from tests.http.api import Api
from tests.http.conftest import StartBroker
from tests.server.harness import WAIT_SECONDS, BrokerProcess, until

TOKENS = {role: f"{role}-" + "0123456789abcdef" for role in ("read", "operate", "admin")}
SETTINGS = "\n".join(
    f'[[http.tokens]]\nname = "{role}-token"\nrole = "{role}"\ntoken = "{token}"'
    for role, token in TOKENS.items()
)

NEEDS = {
    "read": [
        ("GET", "/v1/queues"),
        ("GET", "/v1/queues/q"),
        ("GET", "/v1/queues/q/messages"),
        ("GET", "/v1/queues/q/messages/0"),
        ("GET", "/v1/queues/q/log"),
        ("GET", "/v1/queues/q/records"),
        ("GET", "/v1/queues/q/samples"),
        ("GET", "/v1/queues/q/search"),
        ("POST", "/v1/queues/q/copy"),
        ("GET", "/v1/search"),
        ("GET", "/v1/health"),
        ("GET", "/v1/samples"),
        ("GET", "/v1/marks"),
        ("GET", "/v1/queues/q/offset?time=2026-01-01"),
        ("GET", "/v1/offsets?queues=q"),
        ("POST", "/v1/cuts"),
        ("GET", "/v1/folder"),
        ("GET", "/v1/readers"),
        ("GET", "/v1/readers/r"),
        ("GET", "/v1/connections"),
        ("GET", "/v1/connections/1"),
        ("GET", "/v1/archive"),
        ("GET", "/v1/engine"),
        ("GET", "/v1/events"),
        ("GET", "/v1/transactions/t"),
        ("GET", "/metrics"),
    ],
    "operate": [
        ("POST", "/v1/queues/q/messages"),
        ("POST", "/v1/queues/q/batch"),
        ("POST", "/v1/queues/q/take"),
        ("POST", "/v1/queues/q/settle"),
        ("POST", "/v1/queues/q/pause"),
        ("POST", "/v1/queues/q/resume"),
        ("POST", "/v1/queues/q/redrive"),
        ("POST", "/v1/queues/q/move"),
        ("POST", "/v1/queues/q/withdraw"),
        ("POST", "/v1/redrive"),
        ("POST", "/v1/marks"),
        ("PUT", "/v1/readers/r"),
        ("DELETE", "/v1/readers/r"),
        ("POST", "/v1/readers/r/pause"),
        ("DELETE", "/v1/connections/1"),
        ("POST", "/v1/stages?transaction=t&queue=q"),
        ("POST", "/v1/transactions"),
        ("DELETE", "/v1/transactions/t"),
    ],
    "admin": [
        ("POST", "/v1/queues/q/purge"),
        ("DELETE", "/v1/queues/q"),
        ("GET", "/v1/audit"),
        ("GET", "/v1/backup"),
        ("GET", "/v1/backup/00000000000000000000.seg?bytes=0"),
    ],
}
RANK = ["read", "operate", "admin"]


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BrokerProcess]:
    folder = tmp_path_factory.mktemp("guarded")
    (folder / "penstock.toml").write_text(SETTINGS)
    broker = BrokerProcess(folder, "--http", "127.0.0.1:0", "--config", str(folder / "penstock.toml")).start()
    yield broker
    broker.kill()


def status_of(port: int, method: str, path: str, headers: dict[str, str]) -> tuple[int, str]:
    """Status and, where it is a problem, its name. The body of an answer without an end is not read."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=WAIT_SECONDS)
    try:
        connection.request(method, path, b"{}" if method in ("POST", "PUT") else None, headers)
        response = connection.getresponse()
        if response.headers["content-type"] != "application/problem+json":
            return response.status, ""
        return response.status, json.loads(response.read())["type"].removeprefix("urn:penstock:")
    finally:
        connection.close()


def test_the_table_has_every_route(guarded: BrokerProcess) -> None:
    with Api(guarded.ports["http"]) as api:
        document = api.get("/openapi.json")
    closed = {
        (method.upper(), path)
        for path, operations in document["paths"].items()
        for method, operation in operations.items()
        if "401" in operation["responses"] and method != "head"
    }
    here = [(method, path.partition("?")[0].split("/")) for rows in NEEDS.values() for method, path in rows]
    for method, path in closed:
        segments = path.split("/")
        assert any(
            method == other_method
            and len(segments) == len(other)
            and all(one.startswith("{") or one == two for one, two in zip(segments, other, strict=True))
            for other_method, other in here
        ), (method, path)


@pytest.mark.parametrize(
    ("needed", "method", "path"), [(role, *row) for role, rows in NEEDS.items() for row in rows]
)
def test_a_call_needs_its_role(guarded: BrokerProcess, needed: str, method: str, path: str) -> None:
    port = guarded.ports["http"]
    assert status_of(port, method, path, {}) == (401, "unauthorized")
    for wrong in ("Bearer wrong", "Bearer ", "Basic " + TOKENS["admin"], TOKENS["admin"], "Bearer é" * 3):
        headers = {"Authorization": wrong.encode("latin-1", "replace").decode("latin-1")}
        assert status_of(port, method, path, headers) in ((401, "unauthorized"), (429, "too-many-guesses"))
    for role in RANK:
        status, problem = status_of(port, method, path, {"Authorization": f"Bearer {TOKENS[role]}"})
        if RANK.index(role) < RANK.index(needed):
            assert (status, problem) == (403, "forbidden")
        else:
            assert status not in (401, 403), (status, problem)


@pytest.mark.parametrize("path", ["/healthz", "/readyz", "/openapi.json", "/"])
def test_what_anyone_may_ask(guarded: BrokerProcess, path: str) -> None:
    assert status_of(guarded.ports["http"], "GET", path, {})[0] == 200


def test_a_token_never_comes_back(guarded: BrokerProcess) -> None:
    for token in TOKENS.values():
        with Api(guarded.ports["http"], token) as api:
            for path in ("/v1/engine", "/v1/connections", "/metrics", "/openapi.json"):
                assert token.encode() not in api.ask("GET", path).body
        assert token not in guarded.log()


def test_another_host_name_is_fine_with_tokens(guarded: BrokerProcess) -> None:
    headers = {"Host": "broker.example", "Authorization": f"Bearer {TOKENS['read']}"}
    assert status_of(guarded.ports["http"], "GET", "/v1/queues", headers)[0] == 200


# --- without tokens ----------------------------------------------------------------------------


@pytest.mark.parametrize("host", ["localhost", "LOCALHOST:9180", "127.0.0.1", "127.1.2.3:80", "[::1]:9180"])
def test_names_of_this_machine(broker: BrokerProcess, host: str) -> None:
    assert status_of(broker.ports["http"], "GET", "/v1/queues", {"Host": host})[0] == 200


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:9180", "10.0.0.1", "localhost.evil.example", "[::2]"]
)
def test_a_name_that_somebody_points_here_is_refused(broker: BrokerProcess, host: str) -> None:
    for path in ("/v1/queues", "/healthz", "/nothing", "/"):
        assert status_of(broker.ports["http"], "GET", path, {"Host": host}) == (403, "forbidden")


@pytest.mark.parametrize("origin", ["http://evil.example", "null", "https://127.0.0.1.evil.example", ""])
def test_a_page_of_another_site_cannot_send(broker: BrokerProcess, origin: str) -> None:
    headers = {"Origin": origin, "Content-Type": "text/plain"}
    answer = status_of(broker.ports["http"], "POST", "/v1/queues/from-a-page/messages", headers)
    assert answer == (403, "forbidden")
    assert status_of(broker.ports["http"], "GET", "/v1/queues/from-a-page", {})[0] == 404


def test_its_own_page_can(broker: BrokerProcess) -> None:
    port = broker.ports["http"]
    headers = {"Origin": f"http://127.0.0.1:{port}", "Host": f"127.0.0.1:{port}"}
    assert status_of(port, "GET", "/v1/queues", headers)[0] == 200


# --- TLS ----------------------------------------------------------------------------------------


def test_over_tls(tmp_path: Path, start_broker: StartBroker) -> None:
    make_authority(tmp_path, "api")
    (tmp_path / "penstock.toml").write_text(
        f'{SETTINGS}\n[http]\naddress = "127.0.0.1:0"\ntls-certificate = "{tmp_path}/api.pem"\n'
        f'tls-key = "{tmp_path}/api.key"\n'
    )
    broker = BrokerProcess(tmp_path, "--config", str(tmp_path / "penstock.toml"), "--http", "127.0.0.1:0")
    broker.start()
    try:
        trusting = ssl.create_default_context(cafile=str(tmp_path / "api.pem"))
        connection = http.client.HTTPSConnection(
            "localhost", broker.ports["http"], timeout=WAIT_SECONDS, context=trusting
        )
        connection.request("GET", "/v1/queues", headers={"Authorization": f"Bearer {TOKENS['read']}"})
        response = connection.getresponse()
        assert (response.status, json.loads(response.read())["queues"]) == (200, [])
        connection.close()
        with socket.create_connection(("127.0.0.1", broker.ports["http"])) as stranger:
            stranger.sendall(b"GET / HTTP/1.1\r\n\r\n")
            assert stranger.recv(1000) == b""
        audit = tmp_path / "data" / "audit.jsonl"
        wanted = {"who": "", "from": "127.0.0.1", "door": "http", "act": "connect", "result": "tls"}
        until(
            lambda: any(wanted.items() <= json.loads(it).items() for it in audit.read_text().splitlines()),
            "the failed handshake to be in the audit",
        )
    finally:
        assert broker.stop() == 0


# --- what is no proper request --------------------------------------------------------------------


def hear_all(wire: socket.socket) -> bytes:
    heard = b""
    while chunk := wire.recv(65536):
        heard += chunk
    return heard


def said(port: int, data: bytes) -> bytes:
    with socket.create_connection(("127.0.0.1", port), WAIT_SECONDS) as wire:
        wire.sendall(data)
        return hear_all(wire)


@pytest.mark.parametrize(
    "garbage", [b"\x00" * 100 + b"\r\n\r\n", b"HELLO\r\n\r\n", b"GET\r\n\r\n", b"\x16\x03\x01\x00\xa5"]
)
def test_what_is_no_http_gets_a_problem(broker: BrokerProcess, garbage: bytes) -> None:
    heard = said(broker.ports["http"], garbage)
    assert heard.startswith(b"HTTP/1.1 400 ")
    assert b"urn:penstock:bad-request" in heard


@pytest.mark.parametrize("head", [b"GET /%b HTTP/1.1\r\n", b"GET / HTTP/1.1\r\nX: %b\r\n"])
def test_a_head_without_an_end_is_cut_off(broker: BrokerProcess, head: bytes) -> None:
    start = head.split(b"%b")[0]
    with socket.create_connection(("127.0.0.1", broker.ports["http"]), WAIT_SECONDS) as wire:
        wire.sendall(start + b"a" * (HEAD_BYTES_MAX + 1))
        assert hear_all(wire).startswith(b"HTTP/1.1 431 ")


def test_a_body_that_comes_in_pieces_is_no_head(api: Api, broker: BrokerProcess) -> None:
    body = b"x" * (HEAD_BYTES_MAX * 3)
    with socket.create_connection(("127.0.0.1", broker.ports["http"]), WAIT_SECONDS) as wire:
        wire.sendall(
            b"POST /v1/queues/pieces/messages HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
            b"Content-Length: %d\r\n\r\n" % len(body)
        )
        for at in range(0, len(body), 10_000):
            wire.sendall(body[at : at + 10_000])
        assert hear_all(wire).startswith(b"HTTP/1.1 200 ")
    assert api.get("/v1/queues/pieces")["bytes"] == len(body)


@pytest.mark.parametrize("chunked", [False, True])
def test_a_huge_body_gets_an_answer_and_is_not_kept(broker: BrokerProcess, chunked: bool) -> None:
    size = 200 << 20
    piece = b"x" * (1 << 20)
    connection = http.client.HTTPConnection("127.0.0.1", broker.ports["http"], timeout=WAIT_SECONDS)
    headers = {} if chunked else {"Content-Length": str(size)}
    connection.request(
        "POST",
        "/v1/queues/huge/messages",
        (piece for _ in range(size >> 20)),
        headers,
        encode_chunked=chunked,
    )
    response = connection.getresponse()
    assert response.status == 413
    assert json.loads(response.read())["type"] == "urn:penstock:body-too-large"
    connection.close()
    (second,) = Path(f"/proc/{broker.pid}/task/{broker.pid}/children").read_text().split()
    pages = int(Path(f"/proc/{second}/statm").read_text().split()[1])
    assert pages * 4096 < 250 << 20
    assert status_of(broker.ports["http"], "GET", "/v1/queues/huge", {})[0] == 404


@pytest.mark.parametrize(
    ("path", "status"),
    [
        ("/v1/queues/..%2F..%2Fetc%2Fpasswd", 404),
        ("/v1/queues/../../etc/passwd", 404),
        ("/v1/queues/%00", 400),
        ("/v1/queues/%ff", 400),
        ("/v1/queues/" + "a" * 256, 400),
        ("/v1/queues/", 400),
        ("/v1/queues/q.dead", 400),
        ("/v1//queues", 404),
        ("/v2/queues", 404),
        ("/v1/queues?nonsense=1", 400),
        ("/v1/queues?limit=1&limit=2", 400),
        ("/v1/queues?limit=0x10", 400),
        ("/v1/queues?limit=%ff", 400),
        ("/v1/queues/q/messages/-1", 400),
    ],
)
def test_addresses_that_lead_nowhere(broker: BrokerProcess, path: str, status: int) -> None:
    assert status_of(broker.ports["http"], "GET", path, {})[0] == status


def test_a_method_that_is_not_offered(api: Api) -> None:
    reply = api.ask("PATCH", "/v1/queues")
    assert reply.problem == "method-not-allowed"
    assert reply.headers["allow"] == "GET, HEAD"


def test_head_is_get_without_a_body(api: Api) -> None:
    reply = api.ask("HEAD", "/v1/queues")
    assert (reply.status, reply.body) == (200, b"")


def test_a_body_of_the_wrong_kind(api: Api) -> None:
    path = "/v1/queues/kinds/redrive"
    assert api.ask("POST", path, b"<a/>", {"Content-Type": "text/xml"}).problem == "unsupported-media-type"
    for wrong in (b"{", b"[]", b"7", b'{"where": 3}', b'{"nonsense": 1}', b"[" * 100_000):
        reply = api.ask("POST", path, wrong, {"Content-Type": "application/json"})
        assert reply.problem == "bad-request"
