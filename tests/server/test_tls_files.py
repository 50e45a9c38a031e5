"""TLS files that change under a running broker: who comes next gets the new ones, and nobody is cut off."""

import asyncio
import http.client
import logging
import os
import re
import shutil
import signal
import socket
import ssl
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest

from penstock.common.given import SettingsError
from penstock.common.tls_files import TlsFiles, read_certificate
from tests.certificates import make_authority, make_certificate
from tests.server.harness import WAIT_SECONDS, BrokerProcess, rq, until

PING, PONG = rq(5), rq(6)
DOORS = ("rq", "http")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("certificates")
    make_authority(folder, "ca")
    make_authority(folder, "other-ca")
    for name in ("first", "second", "client"):
        make_certificate(folder, name)
    make_certificate(folder, "late", days=30)
    make_certificate(folder, "over", days=0)
    make_certificate(folder, "other-client", "other-ca")
    return folder


def put(source: Path, target: Path) -> None:
    """As a careful program does: whoever looks sees the old one or the new one."""
    shutil.copy(source, f"{target}.new")
    os.replace(f"{target}.new", target)


class Doors:
    """A broker whose RQ listener and HTTP API have TLS, by files that a test changes."""

    def __init__(self, made: Path, folder: Path) -> None:
        self.made, self.folder = made, folder
        self.install("first")
        put(made / "ca.pem", folder / "clients.pem")
        files = f'tls-certificate = "{folder}/live.pem"\ntls-key = "{folder}/live.key"\n'
        (folder / "penstock.toml").write_text(
            f'[http]\naddress = "127.0.0.1:0"\n{files}'
            f'[[listener]]\nprotocol = "rq"\naddress = "127.0.0.1:0"\n{files}'
            f'[[listener]]\nprotocol = "sspq"\naddress = "127.0.0.1:0"\n{files}'
            f'tls-client-ca = "{folder}/clients.pem"\n'
        )
        flags = ("--config", str(folder / "penstock.toml"), "--rq", "off", "--sspq", "off")
        self.broker = BrokerProcess(folder, "--http", "127.0.0.1:0", *flags).start()
        assert self.shown("http") == "first"  # So the second process is there.

    def install(self, name: str) -> None:
        for ending in ("pem", "key"):
            put(self.made / f"{name}.{ending}", self.folder / f"live.{ending}")

    def connect(
        self, door: str, client: str | None = None, session: ssl.SSLSession | None = None
    ) -> ssl.SSLSocket:
        context = self.context(client) if session is None else self._resuming
        plain = socket.create_connection(("127.0.0.1", self.broker.ports[door]), WAIT_SECONDS)
        return context.wrap_socket(plain, server_hostname="localhost", session=session)

    def context(self, client: str | None = None) -> ssl.SSLContext:
        context = ssl.create_default_context(cafile=str(self.made / "ca.pem"))
        if client is not None:
            context.load_cert_chain(self.made / f"{client}.pem", self.made / f"{client}.key")
        self._resuming = context
        return context

    def shown(self, door: str) -> str:
        """Whose certificate a new connection gets to see."""
        with self.connect(door) as peer:
            return name_of(peer)

    def lines(self, text: str) -> list[str]:
        return [line for line in self.broker.log().splitlines() if text in line]


@pytest.fixture
def doors(made: Path, tmp_path: Path) -> Iterator[Doors]:
    doors = Doors(made, tmp_path)
    yield doors
    assert doors.broker.stop() == 0
    assert "Traceback" not in doors.broker.log(), doors.broker.log()


def name_of(peer: ssl.SSLSocket) -> str:
    certificate: Any = peer.getpeercert()  # Any: as deep as the ssl module has it
    return str(dict(pair for (pair,) in certificate["subject"])["commonName"])


def answers(peer: ssl.SSLSocket) -> bool:
    """Whether an RQ connection is served."""
    peer.sendall(PING)
    return peer.recv(1) == PONG


def is_ready(caller: http.client.HTTPSConnection) -> bool:
    caller.request("GET", "/readyz")
    response = caller.getresponse()
    response.read()
    return response.status == 200


def replaced(doors: Doors, replace: Callable[[], None]) -> None:
    """New connections get the new certificate, and those that were open go on."""
    caller = http.client.HTTPSConnection(
        "localhost", doors.broker.ports["http"], timeout=WAIT_SECONDS, context=doors.context()
    )
    with doors.connect("rq") as wire:
        assert name_of(wire) == "first"
        assert answers(wire)
        assert is_ready(caller)
        before = caller.sock
        replace()
        for door in DOORS:
            until(lambda door=door: doors.shown(door) == "second", f"{door} to have it")  # type: ignore[misc]
        assert answers(wire)
        assert is_ready(caller)
        assert caller.sock is before, "the connection was closed"
    caller.close()
    for owner in ("[http]", "[[listener]] 1", "[[listener]] 2"):
        line = doors.lines(f"{owner}: TLS files read again, for new connections  certificate=CN=second")[-1]
        assert read_certificate(str(doors.made / "second.pem")).until in line


def test_sighup_puts_new_files_in_force(doors: Doors) -> None:
    def replace() -> None:
        doors.install("second")
        doors.broker.signal(signal.SIGHUP)

    replaced(doors, replace)


@pytest.mark.long
def test_so_does_a_link_that_leads_elsewhere(doors: Doors) -> None:
    """As certbot does it; nobody sends a signal."""
    for ending in ("pem", "key"):
        live = doors.folder / f"live.{ending}"
        live.unlink()
        live.symlink_to(doors.made / f"first.{ending}")

    def replace() -> None:
        for ending in ("pem", "key"):
            (doors.folder / "link").symlink_to(doors.made / f"second.{ending}")
            os.replace(doors.folder / "link", doors.folder / f"live.{ending}")

    replaced(doors, replace)


def test_a_file_that_is_wrong_changes_nothing_and_is_told(doors: Doors) -> None:
    (doors.folder / "live.pem").write_text("nothing of use")
    doors.broker.signal(signal.SIGHUP)
    wrong = f"tls-certificate: '{doors.folder}/live.pem' holds no certificate that can be read"
    until(lambda: len(doors.lines(wrong)) == 3, "each door to say so")
    ending = "; the TLS files that were read before stay in force"
    assert all(line.endswith(ending) for line in doors.lines(wrong))
    for door in DOORS:
        assert doors.shown(door) == "first"
    with doors.connect("rq") as wire:
        assert answers(wire)
    doors.install("second")
    for door in DOORS:
        until(lambda door=door: doors.shown(door) == "second", f"{door} to have it")  # type: ignore[misc]
    assert len(doors.lines(wrong)) == 3


def test_a_second_process_that_starts_with_a_wrong_file_says_so_until_it_is_right(doors: Doors) -> None:
    (pid,) = re.findall(r"the HTTP API answers .*pid=(\d+)", doors.broker.log())
    (doors.folder / "live.pem").write_text("nothing of use")
    os.kill(int(pid), signal.SIGKILL)
    wrong = f"[http] tls-certificate: '{doors.folder}/live.pem' holds no certificate that can be read"
    until(lambda: any("critical" in line for line in doors.lines(wrong)), "it to say so")
    with doors.connect("rq") as wire:
        assert answers(wire), "the others go on"
    doors.install("second")
    assert doors.shown("http") == "second"


def test_wrong_settings_do_not_keep_new_files_out(doors: Doors) -> None:
    with (doors.folder / "penstock.toml").open("a") as config:
        config.write("nonsense = 1\n")
    doors.install("second")
    doors.broker.signal(signal.SIGHUP)
    for door in DOORS:
        until(lambda door=door: doors.shown(door) == "second", f"{door} to have it")  # type: ignore[misc]


def test_an_authority_that_is_replaced_lets_nobody_in_any_more(doors: Doors) -> None:
    def gets_in(client: str, session: ssl.SSLSession | None = None) -> bool:
        try:
            with doors.connect("sspq", client, session) as peer:
                peer.sendall(b"\x55\x99\x5c\0\0\0\0\0")  # what is stored?
                return peer.recv(1) != b""
        except (ssl.SSLError, ConnectionError):
            return False

    assert gets_in("client")
    assert not gets_in("other-client")
    with doors.connect("sspq", "client") as peer:
        peer.sendall(b"\x55\x99\x5c\0\0\0\0\0")
        assert peer.recv(8)
        ticket, trusted = peer.session, doors._resuming
        assert ticket is not None
        assert gets_in("client", ticket)
        put(doors.made / "other-ca.pem", doors.folder / "clients.pem")
        doors.broker.signal(signal.SIGHUP)
        until(lambda: gets_in("other-client"), "the new authority to count")
        assert not gets_in("client")
        doors._resuming = trusted
        assert not gets_in("client", ticket), "a session of before opened the door"
        peer.sendall(b"\x55\x99\x5c\0\0\0\0\0")
        assert peer.recv(8), "the open connection was cut off"


# --- the files alone ------------------------------------------------------------------------------


def run(test: Coroutine[Any, Any, None]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(WAIT_SECONDS):
            await test

    asyncio.run(bounded())


async def looked(files: TlsFiles, *, asked: bool = False) -> None:
    files.look(asked=asked)
    await asyncio.gather(*files._readings)


@pytest.fixture
def live(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], TlsFiles]:
    monkeypatch.setattr(logging.getLogger("penstock"), "propagate", True)  # A broker's own goes to its log.

    def install(certificate: str, key: str) -> TlsFiles:
        put(made / f"{certificate}.pem", tmp_path / "live.pem")
        put(made / f"{key}.key", tmp_path / "live.key")
        return TlsFiles("here", str(tmp_path / "live.pem"), str(tmp_path / "live.key"))

    return install


def test_half_of_a_pair_is_told_once_until_the_files_change(
    made: Path, tmp_path: Path, live: Callable[[str, str], TlsFiles], caplog: pytest.LogCaptureFixture
) -> None:
    files = live("late", "late")

    async def test() -> None:
        first = files.context
        for _ in range(3):
            await looked(files)
        assert files.context is first
        assert not caplog.records, "nothing has happened"
        put(made / "second.pem", tmp_path / "live.pem")
        for _ in range(3):
            await looked(files)
        assert files.context is first
        (line,) = [record.getMessage() for record in caplog.records]
        assert f"here tls-key: '{tmp_path}/live.key' is not the key of the certificate" in line
        await looked(files, asked=True)
        assert len(caplog.records) == 2, "somebody wants to know"
        put(made / "second.key", tmp_path / "live.key")
        await looked(files)
        assert files.context is not first

    run(test())


def test_a_certificate_that_has_ended_does_not_replace_one_that_has_not(
    made: Path, tmp_path: Path, live: Callable[[str, str], TlsFiles], caplog: pytest.LogCaptureFixture
) -> None:
    files = live("late", "late")
    first = files.context

    async def test() -> None:
        for ending in ("pem", "key"):
            put(made / f"over.{ending}", tmp_path / f"live.{ending}")
        await looked(files)
        assert files.context is first
        (record,) = caplog.records
        assert f"'{tmp_path}/live.pem' ended on {read_certificate(str(made / 'over.pem')).until}" in (
            record.getMessage()
        )

    run(test())


@pytest.mark.parametrize(
    ("name", "text"),
    [("first", "ends in less than 14 days"), ("over", "has ended: clients refuse it"), ("late", "")],
)
def test_there_is_a_warning_before_a_certificate_ends(
    name: str, text: str, live: Callable[[str, str], TlsFiles], caplog: pytest.LogCaptureFixture
) -> None:
    files = live(name, name)

    async def test() -> None:
        for _ in range(3):
            await looked(files)

    run(test())
    assert [record.levelname for record in caplog.records] == (["WARNING"] if text else []), "once a day"
    assert not text or f"here: the certificate in force {text}" in caplog.records[0].getMessage()


def test_what_cannot_be_read_at_the_start_is_an_error(live: Callable[[str, str], TlsFiles]) -> None:
    with pytest.raises(SettingsError, match="is not the key of the certificate"):
        live("first", "second")
