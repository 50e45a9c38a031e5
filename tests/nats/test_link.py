"""The link against real servers: moving on when one dies, TLS, credentials, and how it says what is wrong.

On uvloop, as brokers run; the other tests of NATS use the loop that comes with Python.
"""

import asyncio
import base64
import binascii
import contextlib
import json
import random
import socket
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import nats
import pytest
from nacl.signing import SigningKey
from nats.aio.msg import Msg

from penstock.log.jetstream.cluster import Cluster, Node
from penstock.log.jetstream.credentials import Credentials, CredentialsError, read_credentials
from penstock.log.jetstream.errors import JetStreamError, LinkError, LinkLost, NoAnswer, NotAllowed
from penstock.log.jetstream.link import Link, cancel
from penstock.log.jetstream.servers import Server, ServerListError, Servers, parse_server, parse_servers
from tests.certificates import make_authority, make_certificate
from tests.nats.cluster import WAIT_SECONDS, linked, on_uvloop, until
from tests.nats.conftest import Start

# --- questions ---

Reply = Callable[[Msg], Awaitable[None]]


@asynccontextmanager
async def answering(url: str, subject: str, reply: Reply) -> AsyncIterator[None]:
    """Somebody else at the server, who answers."""
    client = await nats.connect(url)
    try:
        await client.subscribe(subject, cb=reply)
        await client.flush()
        yield
    finally:
        await client.close()


async def silent(message: Msg) -> None:
    """Says nothing."""


async def echo(message: Msg) -> None:
    await message.respond(message.data)


def test_questions_of_any_size_are_answered(node: Cluster) -> None:
    async def run() -> None:
        url = node.nodes[0].url
        async with answering(url, "echo", echo), linked(url) as link:
            sizes = [0, 1, 100, 70_000, 1_000_000, 8_000_000, 0]
            payloads = [random.Random(size).randbytes(size) for size in sizes]
            assert [await link.ask("echo", payload) for payload in payloads] == payloads
            together = await asyncio.gather(*(link.ask("echo", b"%d" % n) for n in range(2000)))
            assert together == [b"%d" % n for n in range(2000)]

    on_uvloop(run())


def test_questions_are_answered_or_fail_in_time(node: Cluster) -> None:
    async def run() -> None:
        url = node.nodes[0].url
        async with answering(url, "silent", silent), linked(url) as link:
            with pytest.raises(NoAnswer, match=r"silent: no answer within 0\.2 s; ask again"):
                await link.ask("silent", seconds=0.2)
            with pytest.raises(JetStreamError, match="nobody: JetStream says 'nobody listens'") as caught:
                await link.ask("nobody")
            assert caught.value.again
            with pytest.raises(LinkLost, match=r"silent: not sent to NATS \(.*maximum payload exceeded"):
                await link.ask("silent", bytes(link.message_bytes_max + 1))

    on_uvloop(run())


# --- losing servers ---


def is_connected_elsewhere(link: Link, node: Node) -> bool:
    return link.server is not None and link.server.port != node.ports.client


def test_a_link_moves_on_when_its_server_is_killed(start: Start) -> None:
    cluster = start(3)

    async def run() -> None:
        first = cluster.nodes[0]
        # Only one server is named: the others are learned.
        async with answering(cluster.nodes[1].url, "silent", silent), linked(first.url) as link:
            asked = asyncio.create_task(link.ask("silent"))
            await asyncio.sleep(0)
            first.kill()
            with pytest.raises(LinkLost, match=r"silent: NATS server nats://127.0.0.1:\d+: .* ask again"):
                await asked
            await until("there is a connection again", lambda: is_connected_elsewhere(link, first))
            async with answering(cluster.nodes[1].url, "echo", echo), asyncio.timeout(WAIT_SECONDS):
                while True:
                    try:
                        assert await link.ask("echo", b"here") == b"here"
                        break
                    except JetStreamError:  # the server may not know yet who listens at another one
                        await asyncio.sleep(0.005)

    on_uvloop(run())


def test_a_link_waits_for_a_server_that_is_started_again(
    start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    cluster = start(1)

    async def run() -> None:
        async with linked(cluster.nodes[0].url) as link:
            cluster.nodes[0].kill()
            await until("the loss is noticed", lambda: link.server is None)
            with pytest.raises(LinkLost, match="any: no connection to NATS; ask again when there is one"):
                await link.ask("any")
            await until("it is told", lambda: "cannot be reached (Connection refused)" in caplog.text)
            cluster.nodes[0].start()
            await until("there is a connection again", lambda: link.server is not None)

    on_uvloop(run())


def test_what_was_asked_of_a_lost_server_never_reaches_another(start: Start) -> None:
    """What was written and not read is gone; nothing is kept for later."""
    cluster = start(2)
    first, second = cluster.nodes
    heard: list[bytes] = []

    async def hear(message: Msg) -> None:
        heard.append(message.data)

    async def run() -> None:
        async with (
            answering(second.url, "mark", hear),
            linked(first.url, ping_seconds=0.3, connect_seconds=0.5) as link,
        ):
            first.pause()
            # More than fits into the sockets: most of it waits in this process when the server is given up.
            lost = await asyncio.gather(
                *(link.ask("mark", b"%d" % n + bytes(500_000)) for n in range(40)), return_exceptions=True
            )
            assert {type(error) for error in lost} == {LinkLost}
            await until("there is a connection again", lambda: is_connected_elsewhere(link, first))
            with pytest.raises(NoAnswer):
                await link.ask("mark", b"last", seconds=0.5)
            assert heard == [b"last"]

    on_uvloop(run())


def test_a_server_that_throws_us_out_is_connected_to_again(node: Cluster) -> None:
    async def run() -> None:
        async with linked(node.nodes[0].url) as link:
            # It counts headers, too, and ends the connection where it is too much.
            with pytest.raises(LinkLost, match="having said 'maximum payload violation' before it answered"):
                await link.ask("any", bytes(link.message_bytes_max), headers={"A": "b"})
            await until("there is a connection again", lambda: link.server is not None)
            with pytest.raises(JetStreamError, match="nobody listens"):
                await link.ask("nobody")

    on_uvloop(run())


def test_a_server_that_falls_silent_is_left(start: Start, caplog: pytest.LogCaptureFixture) -> None:
    cluster = start(3)

    async def run() -> None:
        first = cluster.nodes[0]
        async with linked(first.url, ping_seconds=0.3, connect_seconds=0.5) as link:
            first.pause()
            await until("there is a connection again", lambda: is_connected_elsewhere(link, first))
            assert "has said nothing for 0.6 s" in caplog.text

    on_uvloop(run())


def test_a_server_that_is_about_to_stop_is_left(start: Start, caplog: pytest.LogCaptureFixture) -> None:
    cluster = start(3)

    async def run() -> None:
        first = cluster.nodes[0]
        async with linked(first.url) as link:
            first.drain()
            await until("there is a connection again", lambda: is_connected_elsewhere(link, first))
            assert "is about to stop; moving to another one" in caplog.text
            first.kill()  # it would take its time

    on_uvloop(run())


# --- what a link says when it cannot ---


def closed_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


def test_servers_that_are_not_there_are_named() -> None:
    async def run() -> None:
        ports = closed_port(), closed_port()
        with pytest.raises(LinkError) as caught:
            async with linked(*(f"nats://127.0.0.1:{port}" for port in ports)):
                pass
        for port in ports:
            assert f"NATS server nats://127.0.0.1:{port}: cannot be reached (Connection refused)" in str(
                caught.value
            )
        assert not caught.value.refused

    on_uvloop(run())


def test_what_is_no_nats_server_is_said() -> None:
    async def run() -> None:
        async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.write(words.pop())
            await reader.read()
            writer.close()
            await writer.wait_closed()
            left.append(True)

        left: list[bool] = []
        words = [b"", b"220 mail.example ESMTP\r\n"]
        server = await asyncio.start_server(answer, "127.0.0.1", 0)
        async with server:
            url = f"nats://127.0.0.1:{server.sockets[0].getsockname()[1]}"
            with pytest.raises(LinkError, match=r"is none, it says b.220 mail\.example ESMTP"):
                async with linked(url):
                    pass
            with pytest.raises(LinkError, match=r"did not welcome us within 0\.2 s"):
                async with linked(url, connect_seconds=0.2):
                    pass
            await until("both connections are closed", lambda: len(left) == 2)

    on_uvloop(run())


@pytest.mark.parametrize(
    "greeting",
    [
        b'INFO {"server_id":"x","max_payload":1048576,"tls_required":true}\r\n',
        b'INFO {"server_id":"x","max_payload":1048576,"connect_urls":["[::1"]}\r\n',
    ],
    ids=["tls", "addresses"],
)
def test_a_server_that_greets_and_goes_is_tried_again(node: Cluster, greeting: bytes) -> None:
    """As one that is stopped at that moment, or has too many clients: whatever nats-py makes of it."""

    async def pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while data := await reader.read(1 << 16):
                writer.write(data)
        finally:
            writer.close()

    async def run() -> None:
        async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            came.append(writer)
            if len(came) == 2:
                writer.write(greeting)
                writer.close()
                return
            there = await asyncio.open_connection("127.0.0.1", node.nodes[0].ports.client)
            both = pass_on(reader, there[1]), pass_on(there[0], writer)
            await asyncio.gather(*both, return_exceptions=True)
            left.append(True)

        left: list[bool] = []
        came: list[asyncio.StreamWriter] = []
        server = await asyncio.start_server(answer, "127.0.0.1", 0)
        async with (
            server,
            linked(f"nats://127.0.0.1:{server.sockets[0].getsockname()[1]}") as link,
            answering(node.nodes[0].url, "echo", echo),
        ):
            came[0].close()
            await until("somebody else came", lambda: len(came) == 3)
            await until("the link is up", lambda: link.server is not None)
            assert await link.ask("echo", b"again") == b"again"
            await link.close()
            await until("both ways through are closed", lambda: len(left) == 2)

    on_uvloop(run())


# --- TLS ---


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("certificates")
    for authority in ("ours", "theirs"):
        make_authority(folder, authority)
    make_certificate(folder, "broker", "ours", "DNS:localhost")
    make_certificate(folder, "client", "ours")
    return folder


def tls_settings(folder: Path, more: str = "") -> str:
    files = f'cert_file: "{folder}/broker.pem", key_file: "{folder}/broker.key"'
    return f"tls {{ {files}{more} }}\n"


def trusting(folder: Path, authority: str = "ours") -> ssl.SSLContext:
    return ssl.create_default_context(cafile=str(folder / f"{authority}.pem"))


async def ask_over(url: str, tls: ssl.SSLContext | None, node: Node) -> None:
    async with linked(url, tls=tls) as link:
        with pytest.raises(JetStreamError, match="nobody listens"):
            await link.ask("nobody", bytes(300_000))
        said = await asyncio.to_thread(node.monitor, "connz")
        assert "tls_version" in next(one for one in said["connections"] if one["name"] == "penstock")


@pytest.mark.parametrize("more", ["", "allow_non_tls: true\n"])
def test_tls(start: Start, certificates: Path, more: str) -> None:
    """Also where the server would do without."""
    node = start(1, settings=tls_settings(certificates) + more).nodes[0]
    for scheme in ("tls", "nats"):
        url = f"{scheme}://localhost:{node.ports.client}"
        on_uvloop(ask_over(url, trusting(certificates), node))


def test_tls_that_cannot_be_trusted_is_said(start: Start, certificates: Path) -> None:
    cluster = start(1, settings=tls_settings(certificates))
    port = cluster.nodes[0].ports.client
    with pytest.raises(
        LinkError, match=r"no TLS with it \(.*certificate verify failed.*check its certificate"
    ):
        on_uvloop(ask_over(f"tls://localhost:{port}", trusting(certificates, "theirs"), cluster.nodes[0]))
    with pytest.raises(LinkError, match=r"no TLS with it \(.*IP address mismatch"):
        on_uvloop(ask_over(f"tls://127.0.0.1:{port}", trusting(certificates), cluster.nodes[0]))


def test_tls_that_is_not_offered_is_said(node: Cluster) -> None:
    with pytest.raises(LinkError, match="does not offer TLS, which is asked for"):
        on_uvloop(ask_over(node.nodes[0].url.replace("nats://", "tls://"), None, node.nodes[0]))


def test_a_client_s_certificate(start: Start, certificates: Path) -> None:
    more = f', ca_file: "{certificates}/ours.pem", verify: true'
    cluster = start(1, settings=tls_settings(certificates, more))
    url = f"tls://localhost:{cluster.nodes[0].ports.client}"
    known = trusting(certificates)
    known.load_cert_chain(certificates / "client.pem", certificates / "client.key")
    on_uvloop(ask_over(url, known, cluster.nodes[0]))
    with pytest.raises(LinkError, match="NATS server tls://localhost"):
        on_uvloop(ask_over(url, trusting(certificates), cluster.nodes[0]))


# --- credentials ---

SEED_BYTES = bytes(range(32))


def seed_of(key: bytes) -> str:
    """The seed of a user's nkey, as NATS writes it."""
    body = bytes((0x90 | 0xA0 >> 5, (0xA0 & 31) << 3)) + key
    return base64.b32encode(body + binascii.crc_hqx(body, 0).to_bytes(2, "little")).rstrip(b"=").decode()


async def visit(url: str, credentials: Credentials | None = None) -> None:
    async with linked(url, credentials=credentials):
        pass


def refusal(url: str, credentials: Credentials | None = None) -> str:
    with pytest.raises(LinkError, match="check user, password, token or credentials") as caught:
        on_uvloop(visit(url, credentials))
    assert caught.value.refused
    assert "secret" not in str(caught.value)
    return str(caught.value)


def test_user_and_password(start: Start) -> None:
    cluster = start(1, settings='authorization { user: "ann", password: "secret word" }\n')
    url = cluster.nodes[0].url
    on_uvloop(visit(url.replace("//", "//ann:secret%20word@")))
    text = refusal(url.replace("//", "//ann:secret%20wort@"))
    assert "says 'Authorization Violation'" in text
    refusal(url)


def test_a_token(start: Start) -> None:
    cluster = start(1, settings='authorization { token: "secret-token" }\n')
    on_uvloop(visit(cluster.nodes[0].url.replace("//", "//secret-token@")))
    refusal(cluster.nodes[0].url.replace("//", "//other@"))


def test_an_nkey(start: Start, tmp_path: Path) -> None:
    (tmp_path / "ann.nk").write_text(seed_of(SEED_BYTES) + "\n")
    credentials = read_credentials(tmp_path / "ann.nk")
    public = public_of(20, SigningKey(SEED_BYTES))
    cluster = start(1, settings=f"authorization {{ users: [ {{ nkey: {public} }} ] }}\n")
    on_uvloop(visit(cluster.nodes[0].url, credentials))
    refusal(cluster.nodes[0].url, Credentials(seed_of(bytes(32))))
    assert repr(credentials) == "Credentials()"


CREDS = """-----BEGIN NATS USER JWT-----
{jwt}
------END NATS USER JWT------

************************* IMPORTANT *************************
-----BEGIN USER NKEY SEED-----
{seed}
------END USER NKEY SEED------
"""


def signed(claims: dict[str, object], key: SigningKey, issuer: str) -> str:
    """A JWT as NATS wants it."""
    parts = [{"typ": "JWT", "alg": "ed25519-nkey"}, {"jti": "x", "iat": 1, "iss": issuer, **claims}]
    text = ".".join(
        base64.urlsafe_b64encode(json.dumps(part).encode()).decode().rstrip("=") for part in parts
    )
    return f"{text}.{base64.urlsafe_b64encode(key.sign(text.encode()).signature).decode().rstrip('=')}"


def public_of(kind: int, key: SigningKey) -> str:
    body = bytes((kind << 3,)) + bytes(key.verify_key)
    return base64.b32encode(body + binascii.crc_hqx(body, 0).to_bytes(2, "little")).decode().rstrip("=")


def test_a_credentials_file_of_an_operator_s_account(start: Start, tmp_path: Path) -> None:
    keys = [SigningKey(bytes([n]) * 32) for n in range(4)]
    names = [public_of(kind, key) for kind, key in zip((14, 0, 0, 20), keys, strict=True)]
    operator, account, system, user = names
    limits = dict.fromkeys(("subs", "data", "payload", "imports", "exports", "conn", "leaf"), -1)
    about: dict[str, object] = {"type": "operator", "version": 2, "system_account": system}
    settings = f"operator: {signed({'sub': operator, 'name': 'O', 'nats': about}, keys[0], operator)}\n"
    settings += f"system_account: {system}\nresolver: MEMORY\nresolver_preload: {{\n"
    for name in (account, system):
        about = {"type": "account", "version": 2, "limits": {**limits, "wildcards": True}}
        settings += f"  {name}: {signed({'sub': name, 'name': name[:4], 'nats': about}, keys[0], operator)}\n"
    about = {"type": "user", "version": 2, "subs": -1, "data": -1, "payload": -1}
    jwt = signed({"sub": user, "name": "ann", "nats": about}, keys[1], account)
    path = tmp_path / "ann.creds"
    path.write_text(CREDS.format(jwt=jwt, seed=seed_of(bytes([3]) * 32)))
    cluster = start(1, settings=settings + "}\n")
    on_uvloop(visit(cluster.nodes[0].url, read_credentials(path)))
    path.write_text(CREDS.format(jwt=jwt, seed=seed_of(SEED_BYTES)))  # the key of somebody else
    refusal(cluster.nodes[0].url, read_credentials(path))


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ("", "hold no user's JWT and seed"),
        ("not a seed", "the seed is damaged, or is not that of a user"),
        ("ä", "the seed is damaged"),
        (seed_of(SEED_BYTES)[:-1] + "A", "the seed is damaged"),
        (CREDS.format(jwt="x", seed="")[:40], "the seed is damaged"),
    ],
)
def test_credentials_that_cannot_be_used(tmp_path: Path, content: str, problem: str) -> None:
    (tmp_path / "bad.creds").write_text(content)
    with pytest.raises(CredentialsError, match=problem) as caught:
        read_credentials(tmp_path / "bad.creds")
    assert "bad.creds" in str(caught.value)
    with pytest.raises(CredentialsError, match="cannot be read"):
        read_credentials(tmp_path / "none.creds")


def test_what_is_not_permitted_is_told(start: Start, caplog: pytest.LogCaptureFixture) -> None:
    permissions = '{ user: ann, password: secret, permissions: { publish: "mine.>", subscribe: ">" } }'
    cluster = start(1, settings=f"authorization {{ users: [ {permissions} ] }}\n")

    async def run() -> None:
        url = cluster.nodes[0].url.replace("//", "//ann:secret@")
        async with linked(url) as link:
            with pytest.raises(NotAllowed, match="yours: this user of NATS may not publish to it"):
                await link.ask("yours", seconds=WAIT_SECONDS)
            assert "permissions violation for publish to" in caplog.text
            assert link.server is not None

    on_uvloop(run())


# --- the list of servers ---


def test_servers_are_read() -> None:
    assert parse_server("nats://ann:p%40ss@a.example:4333") == Server(
        "a.example", 4333, user="ann", password="p@ss"
    )
    assert parse_server("tls://[::1]") == Server("::1", 4222, tls=True)
    assert str(parse_server("[::1]:1")) == "nats://[::1]:1"
    assert [str(server) for server in parse_servers("tls://ann:x@a,b:1,c")] == [
        "tls://a:4222",
        "tls://b:1",
        "tls://c:4222",
    ]
    assert {server.user for server in parse_servers("nats://ann:x@a,b,c")} == {"ann"}


@pytest.mark.parametrize("text", ["", "http://a", "nats://", "nats://a:x", "nats://a/b", "nats://a,,b"])
def test_what_names_no_server_is_said(text: str) -> None:
    with pytest.raises(ServerListError, match="write nats://HOST:PORT"):
        parse_servers(text)


def test_no_password_is_shown() -> None:
    with pytest.raises(ServerListError) as caught:
        parse_server("http://ann:secret@a")
    assert "secret" not in str(caught.value)


def test_whose_turn_it_is() -> None:
    a, b = Server("a", tls=True), Server("b")
    servers = Servers([a, b], in_order=True)
    assert servers.round() == [a, b]
    servers.used(a)
    assert servers.round() == [b, a]
    servers.told(a, ["10.0.0.1:4222", "10.0.0.2:4222"])
    told = [server for server in servers.known() if server.host.startswith("10.")]
    # They are reached as the one that told about them, by the name that its certificate has.
    assert [(server.host, server.tls, server.tls_name) for server in told] == [
        ("10.0.0.1", True, "a"),
        ("10.0.0.2", True, "a"),
    ]
    servers.leaving(b)
    assert servers.round()[-1] == b
    servers.told(a, [])
    assert set(servers.known()) == {a, b}


def test_who_takes_a_cancellation_for_its_own_is_told_again() -> None:
    """As a wait with a time limit does before Python 3.12: the end of a link waited for it for ever."""

    async def test() -> None:
        began = asyncio.Event()

        async def goes_on() -> None:
            with contextlib.suppress(asyncio.CancelledError):
                began.set()
                await asyncio.Event().wait()
            await asyncio.Event().wait()

        task = asyncio.create_task(goes_on())
        await began.wait()
        async with asyncio.timeout(20):
            await cancel([task])
        assert task.cancelled()

    asyncio.run(test())
