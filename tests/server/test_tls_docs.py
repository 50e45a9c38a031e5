"""What docs/tls.md tells people to type, typed: a small CA, what it signs in use, and all of it replaced."""

import re
import shlex
import socket
import ssl
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.server.harness import ROOT, WAIT_SECONDS, BrokerProcess, phpmq, until

DOCS = (ROOT / "docs" / "tls.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```(\w+)\n(.*?)```", DOCS, re.DOTALL)


class Typed:
    """A folder in which blocks of the chapter are typed, and the broker that its settings start."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.blocks = [text for kind, text in BLOCKS if kind == "sh"]
        (settings,) = [text for kind, text in BLOCKS if kind == "toml"]
        for name in ("broker", "clients"):
            settings = settings.replace(f'"{name}.', f'"{folder}/{name}.')
        (folder / "penstock.toml").write_text(settings.replace("0.0.0.0:9100", "127.0.0.1:0"))
        flags = ("--config", str(folder / "penstock.toml"), "--phpmq", "off", "--http", "127.0.0.1:0")
        self.broker = BrokerProcess(folder, *flags)

    def type(self, *numbers: int) -> str:
        """The functions are known to every shell."""
        text = "\n".join(["set -e", self.blocks[1], *(self.blocks[number] for number in numbers)])
        text = text.replace("penstock ", f"{shlex.quote(sys.executable)} -m penstock ")
        for name, port in (("phpmq", 9100), ("http", 9180)):
            text = text.replace(f"localhost:{port}", f"localhost:{self.broker.ports.get(name)}")
        done = subprocess.run(
            ["bash", "-c", text],
            cwd=self.folder,
            env={"PATH": "/usr/bin:/bin", "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    def serial(self, trusted: str) -> str:
        """Of the certificate that a new connection to the API gets to see; empty where it is not trusted."""
        context = ssl.create_default_context(cafile=str(self.folder / trusted))
        try:
            with (
                socket.create_connection(("127.0.0.1", self.broker.ports["http"]), WAIT_SECONDS) as plain,
                context.wrap_socket(plain, server_hostname="localhost") as peer,
            ):
                return str((peer.getpeercert() or {})["serialNumber"])
        except ssl.SSLCertVerificationError:
            return ""

    def gets_in(self, client: str) -> bool:
        """Whether the listener lets the owner of this certificate in."""
        context = ssl.create_default_context(cafile=str(self.folder / "both.pem"))
        context.load_cert_chain(self.folder / f"{client}.pem", self.folder / f"{client}.key")
        try:
            with (
                socket.create_connection(("127.0.0.1", self.broker.ports["phpmq"]), WAIT_SECONDS) as plain,
                context.wrap_socket(plain, server_hostname="localhost") as peer,
            ):
                peer.sendall(phpmq(1, (1, b"door"), (2, b"hello")) + phpmq(2, (1, b"door"), (4, b"1")))
                return peer.recv(1) != b""
        except (ssl.SSLError, ConnectionError):
            return False


@pytest.fixture
def typed(tmp_path: Path) -> Iterator[Typed]:
    typed = Typed(tmp_path)
    yield typed
    if typed.broker.running:
        typed.broker.kill()


@pytest.mark.long
def test_a_small_ca(typed: Typed) -> None:
    typed.type(0, 2)
    assert [path.name for path in typed.folder.glob("*.key") if path.stat().st_mode & 0o077] == []
    typed.broker.start()
    first = typed.serial("ca.pem")
    assert re.search(r"^orders +1 ", typed.type(3), re.MULTILINE)
    typed.type(4)
    until(lambda: typed.serial("ca.pem") not in ("", first), "the new certificate")
    typed.type(5)
    assert typed.serial("both.pem")
    for ending in ("pem", "key"):
        (typed.folder / f"lost.{ending}").write_bytes((typed.folder / f"worker.{ending}").read_bytes())
    typed.type(6)
    assert typed.gets_in("lost")
    until(lambda: typed.serial("ca.pem") != "", "the certificate of the new authority")
    typed.type(7)
    until(lambda: not typed.gets_in("lost"), "the old authority to be gone")
    assert typed.gets_in("worker")
    assert re.search(r"^orders +2 ", typed.type(3), re.MULTILINE)
    assert typed.serial("old-ca.pem") == ""
    assert typed.broker.stop() == 0
