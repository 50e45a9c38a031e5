"""The link against real servers: moving on when one dies, TLS, credentials, and how it says what is wrong.

On uvloop, as brokers run; the other tests of NATS use the loop that comes with Python.
"""

import asyncio
import base64
import binascii
import json
import socket
import ssl
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from penstock.log.jetstream.cluster import Cluster
from penstock.log.jetstream.credentials import Credentials, CredentialsError, read_credentials
from penstock.log.jetstream.errors import JetStreamError, LinkError, LinkLost, NoAnswer
from penstock.log.jetstream.requests import Requests
from penstock.log.jetstream.servers import Server, ServerListError, Servers, parse_server, parse_servers
from penstock.protocols import nats_write
from penstock.protocols.nats_headers import header_block, read_headers
from tests.certificates import make_authority, make_certificate
from tests.nats.cluster import Hearing, linked, on_uvloop, until
from tests.nats.conftest import Start

# --- messages ---


def test_messages_of_any_size_and_headers_of_any_value(node: Cluster) -> None:
    odd = [
        (b"Colons", b"a:b: c"),
        (b"Empty", b""),
        (b"Umlaut", "ü".encode()),
        (b"Twice", b"1"),
        (b"Twice", b"2"),
    ]
    sizes = [0, 1, 100, 70_000, 1_000_000, 0]

    async def run() -> None:
        hearing = Hearing()
        async with linked(node.nodes[0].url) as link:
            link.subscribe(b"odd.>", hearing)
            for size in sizes:
                link.write(nats_write.publish(b"odd.a", bytes(size), headers=header_block(odd)))
            link.write(nats_write.publish(b"odd.b", bytes(1 << 20), reply=b"back"))
            await until("all came", lambda: len(hearing.payloads) == len(sizes) + 1)
        assert list(map(len, hearing.payloads)) == [*sizes, 1 << 20]
        headers = [block for batch in hearing.batches for block in batch.headers]
        assert [read_headers(block) for block in headers] == [odd] * len(sizes) + [[]]
        assert hearing.batches[-1].replies[-1] == b"back"

    on_uvloop(run())


def test_thousands_of_messages_come_in_few_batches(node: Cluster) -> None:
    async def run() -> None:
        hearing = Hearing()
        async with linked(node.nodes[0].url) as link:
            link.subscribe(b"many", hearing)
            link.write(b"".join(nats_write.publish(b"many", b"%d" % n) for n in range(20_000)))
            await until("all came", lambda: len(hearing.payloads) == 20_000)
        assert hearing.payloads == [b"%d" % n for n in range(20_000)]
        assert len(hearing.batches) < 2_000

    on_uvloop(run())


def test_a_queue_group_shares_and_an_unsubscribed_one_hears_nothing(node: Cluster) -> None:
    async def run() -> None:
        one, two, gone, end = Hearing(), Hearing(), Hearing(), Hearing()
        async with linked(node.nodes[0].url) as link:
            link.subscribe(b"shared", one, b"workers")
            link.subscribe(b"shared", two, b"workers")
            link.unsubscribe(link.subscribe(b"shared", gone))
            link.subscribe(b"end", end)
            link.write(nats_write.publish(b"shared", b"x") * 200 + nats_write.publish(b"end", b""))
            await until("the end came", lambda: bool(end.batches))
        assert len(one.payloads) + len(two.payloads) == 200
        assert one.payloads
        assert two.payloads
        assert gone.batches == []

    on_uvloop(run())


def test_questions_are_answered_or_fail_in_time(node: Cluster) -> None:
    async def run() -> None:
        hearing = Hearing()
        async with linked(node.nodes[0].url) as link:
            requests = Requests(link)
            link.subscribe(b"silent", hearing)
            with pytest.raises(NoAnswer, match=r"silent: no answer within 0\.2 s; ask again"):
                await requests.ask(b"silent", seconds=0.2)
            with pytest.raises(JetStreamError, match="nobody: JetStream says 'nobody listens'") as caught:
                await requests.ask(b"nobody")
            assert caught.value.again
            asked = asyncio.create_task(requests.ask(b"silent", b"?"))
            await until("it is heard", lambda: len(hearing.payloads) == 2)
            link.write(
                nats_write.publish(hearing.batches[-1].replies[0], b"!", headers=header_block([(b"A", b"b")]))
            )
            headers, payload = await asked
            assert (read_headers(headers), payload) == ([(b"A", b"b")], b"!")

    on_uvloop(run())


# --- losing servers ---


def test_a_link_moves_on_when_its_server_is_killed(start: Start) -> None:
    cluster = start(3)

    async def run() -> None:
        hearing = Hearing()
        # Only one server is named: the others are learned.
        async with linked(cluster.nodes[0].url, hearing=hearing) as link:
            requests = Requests(link)
            link.subscribe(b"after", hearing)
            link.subscribe(b"silent", Hearing())
            assert hearing.ups == 1
            asked = asyncio.create_task(requests.ask(b"silent"))
            await asyncio.sleep(0)
            cluster.nodes[0].kill()
            with pytest.raises(LinkLost, match=r"silent: NATS server nats://127.0.0.1:\d+: .* ask again"):
                await asked
            await until("there is a connection again", lambda: hearing.ups == 2)
            assert link.server is not None
            assert link.server.port in [node.ports.client for node in cluster.nodes[1:]]
            # The subscription was made again before anybody was told.
            link.write(nats_write.publish(b"after", b"here"))
            await until("it came", lambda: hearing.payloads == [b"here"])
            assert len(hearing.downs) == 1

    on_uvloop(run())


def test_a_link_waits_for_a_server_that_is_started_again(start: Start) -> None:
    cluster = start(1)

    async def run() -> None:
        hearing = Hearing()
        async with linked(cluster.nodes[0].url, hearing=hearing) as link:
            cluster.nodes[0].kill()
            await until("the loss is noticed", lambda: bool(hearing.downs))
            assert not link.is_up
            assert not link.write(nats_write.PING)
            with pytest.raises(LinkLost, match=r"no connection to NATS for 0\.2 s; tried nats://127"):
                await link.wait_up(0.2)
            cluster.nodes[0].start()
            await link.wait_up(20)
            assert any("cannot be reached (Connection refused)" in text for text in hearing.troubles)

    on_uvloop(run())


def test_a_server_that_falls_silent_is_left(start: Start) -> None:
    cluster = start(3)

    async def run() -> None:
        hearing = Hearing()
        async with linked(
            cluster.nodes[0].url, hearing=hearing, ping_seconds=0.3, connect_seconds=0.5
        ) as link:
            cluster.nodes[0].pause()
            await until("there is a connection again", lambda: hearing.ups == 2)
            assert "has said nothing for 0.6 s" in hearing.downs[0]
            assert link.server is not None
            assert link.server.port != cluster.nodes[0].ports.client

    on_uvloop(run())


def test_a_server_that_is_about_to_stop_is_left(start: Start) -> None:
    cluster = start(3)

    async def run() -> None:
        hearing = Hearing()
        async with linked(cluster.nodes[0].url, hearing=hearing) as link:
            cluster.nodes[0].drain()
            await until("there is a connection again", lambda: hearing.ups == 2)
            assert link.server is not None
            assert link.server.port != cluster.nodes[0].ports.client
            assert hearing.troubles[0].endswith("is about to stop; moving to another one")
            cluster.nodes[0].kill()  # it would take its time

    on_uvloop(run())


def test_a_full_socket_is_told_and_empties(start: Start) -> None:
    cluster = start(1)

    async def run() -> None:
        hearing = Hearing()
        async with linked(
            cluster.nodes[0].url, hearing=hearing, buffer_bytes=1 << 16, ping_seconds=60
        ) as link:
            cluster.nodes[0].pause()
            block = nats_write.publish(b"a", bytes(100_000))
            for _ in range(100):
                link.write(block)
            assert hearing.fulls == [True]
            assert link.waiting_bytes > 1 << 16
            cluster.nodes[0].resume()
            await until("it is empty", lambda: hearing.fulls == [True, False])

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
            with pytest.raises(
                LinkError, match="broke the protocol: nats: a line is nothing that a server says"
            ):
                async with linked(url):
                    pass
            with pytest.raises(LinkError, match=r"did not welcome us within 0\.2 s"):
                async with linked(url, connect_seconds=0.2):
                    pass
            await until("both connections are closed", lambda: len(left) == 2)

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


async def echo_over(url: str, tls: ssl.SSLContext | None, *, first: bool = False) -> None:
    hearing = Hearing()
    async with linked(url, tls=tls, tls_first=first) as link:
        link.subscribe(b"echo", hearing)
        link.write(nats_write.publish(b"echo", bytes(300_000)) + nats_write.publish(b"echo", b"end"))
        await until("it came back", lambda: len(hearing.payloads) == 2)


@pytest.mark.parametrize("first", [False, True])
def test_tls(start: Start, certificates: Path, first: bool) -> None:
    more = ", handshake_first: true" if first else ""
    cluster = start(1, settings=tls_settings(certificates, more))
    port = cluster.nodes[0].ports.client
    for url in (f"tls://localhost:{port}", f"nats://localhost:{port}"):
        on_uvloop(echo_over(url, trusting(certificates), first=first))


def test_tls_that_cannot_be_trusted_is_said(start: Start, certificates: Path) -> None:
    cluster = start(1, settings=tls_settings(certificates))
    port = cluster.nodes[0].ports.client
    with pytest.raises(
        LinkError, match=r"no TLS with it \(.*certificate verify failed.*check its certificate"
    ):
        on_uvloop(echo_over(f"tls://localhost:{port}", trusting(certificates, "theirs")))
    with pytest.raises(LinkError, match=r"no TLS with it \(.*IP address mismatch"):
        on_uvloop(echo_over(f"tls://127.0.0.1:{port}", trusting(certificates)))


def test_tls_that_is_not_offered_is_said(node: Cluster) -> None:
    with pytest.raises(LinkError, match="does not offer TLS, which is asked for"):
        on_uvloop(echo_over(node.nodes[0].url.replace("nats://", "tls://"), None))


def test_a_client_s_certificate(start: Start, certificates: Path) -> None:
    more = f', ca_file: "{certificates}/ours.pem", verify: true'
    cluster = start(1, settings=tls_settings(certificates, more))
    url = f"tls://localhost:{cluster.nodes[0].ports.client}"
    known = trusting(certificates)
    known.load_cert_chain(certificates / "client.pem", certificates / "client.key")
    on_uvloop(echo_over(url, known))
    with pytest.raises(LinkError, match="NATS server tls://localhost"):
        on_uvloop(echo_over(url, trusting(certificates)))


# --- credentials ---

SEED_BYTES = bytes(range(32))


def seed_of(key: bytes) -> str:
    """The seed of a user's nkey, as NATS writes it."""
    body = bytes((0x90 | 0xA0 >> 5, (0xA0 & 31) << 3)) + key
    return base64.b32encode(body + binascii.crc_hqx(body, 0).to_bytes(2, "little")).rstrip(b"=").decode()


async def visit(url: str, credentials: Credentials | None = None) -> None:
    async with linked(url, credentials=credentials or Credentials()):
        pass


def refusal(url: str, credentials: Credentials) -> str:
    with pytest.raises(LinkError, match="check user, password, token or credentials") as caught:
        on_uvloop(visit(url, credentials=credentials))
    assert caught.value.refused
    assert "secret" not in str(caught.value)
    return str(caught.value)


def test_user_and_password(start: Start) -> None:
    cluster = start(1, settings='authorization { user: "ann", password: "secret word" }\n')
    url = cluster.nodes[0].url
    on_uvloop(visit(url, credentials=Credentials(user="ann", password="secret word")))
    on_uvloop(visit(url.replace("//", "//ann:secret%20word@")))
    text = refusal(url, Credentials(user="ann", password="secret wort"))
    assert "says 'Authorization Violation'" in text
    refusal(url, Credentials())


def test_a_token(start: Start) -> None:
    cluster = start(1, settings='authorization { token: "secret-token" }\n')
    on_uvloop(visit(cluster.nodes[0].url, credentials=Credentials(token="secret-token")))
    refusal(cluster.nodes[0].url, Credentials(token="other"))


def test_an_nkey(start: Start, tmp_path: Path) -> None:
    (tmp_path / "ann.nk").write_text(seed_of(SEED_BYTES) + "\n")
    credentials = read_credentials(tmp_path / "ann.nk")
    public = credentials.answer("any")["nkey"]
    assert public.startswith("U")
    cluster = start(1, settings=f"authorization {{ users: [ {{ nkey: {public} }} ] }}\n")
    on_uvloop(visit(cluster.nodes[0].url, credentials=credentials))
    refusal(cluster.nodes[0].url, Credentials(seed=seed_of(bytes(32))))
    assert repr(credentials) == "Credentials(seed)"


CREDS = """-----BEGIN NATS USER JWT-----
{jwt}
------END NATS USER JWT------

************************* IMPORTANT *************************
-----BEGIN USER NKEY SEED-----
{seed}
------END USER NKEY SEED------
"""


def test_a_credentials_file(tmp_path: Path) -> None:
    seed = seed_of(SEED_BYTES)
    (tmp_path / "ann.creds").write_text(CREDS.format(jwt="eyJ0.eyJq.sig", seed=seed))
    answer = read_credentials(tmp_path / "ann.creds").answer("nonce")
    assert answer["jwt"] == "eyJ0.eyJq.sig"
    assert len(answer["sig"]) == 86
    assert "nkey" not in answer


def signed(claims: dict[str, object], key: Ed25519PrivateKey, issuer: str) -> str:
    """A JWT as NATS wants it."""
    parts = [{"typ": "JWT", "alg": "ed25519-nkey"}, {"jti": "x", "iat": 1, "iss": issuer, **claims}]
    text = ".".join(
        base64.urlsafe_b64encode(json.dumps(part).encode()).decode().rstrip("=") for part in parts
    )
    return f"{text}.{base64.urlsafe_b64encode(key.sign(text.encode())).decode().rstrip('=')}"


def public_of(kind: int, key: Ed25519PrivateKey) -> str:
    body = bytes((kind << 3,)) + key.public_key().public_bytes_raw()
    return base64.b32encode(body + binascii.crc_hqx(body, 0).to_bytes(2, "little")).decode().rstrip("=")


def test_a_credentials_file_of_an_operator_s_account(start: Start, tmp_path: Path) -> None:
    keys = [Ed25519PrivateKey.from_private_bytes(bytes([n]) * 32) for n in range(4)]
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
        ("not a seed", "is no base32 text"),
        (seed_of(SEED_BYTES)[:-1] + "A", "is damaged or is none"),
        (CREDS.format(jwt="x", seed="")[:40], "is no base32 text|hold no user's JWT"),
    ],
)
def test_credentials_that_cannot_be_used(tmp_path: Path, content: str, problem: str) -> None:
    (tmp_path / "bad.creds").write_text(content)
    with pytest.raises(CredentialsError, match=problem) as caught:
        read_credentials(tmp_path / "bad.creds")
    assert "bad.creds" in str(caught.value)
    with pytest.raises(CredentialsError, match="cannot be read"):
        read_credentials(tmp_path / "none.creds")


def test_what_is_not_permitted_is_told(start: Start) -> None:
    permissions = '{ user: ann, password: secret, permissions: { publish: "mine.>", subscribe: ">" } }'
    cluster = start(1, settings=f"authorization {{ users: [ {permissions} ] }}\n")

    async def run() -> None:
        hearing = Hearing()
        url = cluster.nodes[0].url.replace("//", "//ann:secret@")
        async with linked(url, hearing=hearing) as link:
            link.write(nats_write.publish(b"yours", b""))
            await until("it is told", lambda: bool(hearing.troubles))
            assert "Permissions Violation for Publish to" in hearing.troubles[0]
            assert link.is_up

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
