"""What the client tests share: a broker for all of them, spare ones to kill, certificates.

The broker is a real process (`tests/server/harness.py`). Tests keep out of each other's way by queue names
of their own.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.certificates import make_certificates
from tests.server.harness import BrokerProcess

Spare = Callable[..., BrokerProcess]


@pytest.fixture(scope="session")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BrokerProcess]:
    """A broker with its four usual doors."""
    process = BrokerProcess(tmp_path_factory.mktemp("broker"), "--http", "127.0.0.1:0").start()
    yield process
    assert process.stop() == 0
    assert "Traceback" not in process.log()


@pytest.fixture
def queue(request: pytest.FixtureRequest) -> str:
    """A queue that no other test uses."""
    return str(request.node.name)


@pytest.fixture
def spare(tmp_path: Path) -> Iterator[Spare]:
    """Starts brokers that a test may kill; those that still run afterwards are stopped."""
    started: list[BrokerProcess] = []

    def start(*flags: str) -> BrokerProcess:
        folder = tmp_path / f"broker{len(started)}"
        folder.mkdir()
        process = BrokerProcess(folder, *flags).start()
        started.append(process)
        return process

    yield start
    for process in started:
        if process.running:
            process.kill()


@dataclass(frozen=True)
class Doors:
    """A broker with doors of other kinds."""

    process: BrokerProcess
    folder: Path  # of sockets and certificates

    def tls(self, protocol: str) -> str:
        return f"{protocol}s://localhost:{self.process.ports[protocol]}"

    def unix(self, protocol: str) -> str:
        return f"{protocol}+unix://{self.folder}/{protocol}.sock"

    def file(self, name: str) -> str:
        return str(self.folder / name)


@pytest.fixture(scope="session")
def doors(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Doors]:
    """Every protocol with TLS and over a Unix socket, and an SSPQ listener that only takes messages.

    PHPMQ and SSPQ ask for the client's certificate; RQ and HTTP do not. HTTP has TLS only.
    """
    folder = tmp_path_factory.mktemp("doors")
    make_certificates(folder)
    config = folder / "penstock.toml"
    config.write_text(
        "".join(
            f'[[listener]]\nprotocol = "{protocol}"\naddress = "localhost:0"\n'
            f'tls-certificate = "{folder}/server.pem"\ntls-key = "{folder}/server.key"\n'
            + (f'tls-client-ca = "{folder}/ca.pem"\n' if protocol != "rq" else "")
            + f'[[listener]]\nprotocol = "{protocol}"\naddress = "unix:{folder}/{protocol}.sock"\n'
            for protocol in ("phpmq", "sspq", "rq")
        )
        + f'[[listener]]\nprotocol = "sspq"\naddress = "unix:{folder}/send-only.sock"\nmode = "send-only"\n'
        + f'[http]\naddress = "localhost:0"\n'
        f'tls-certificate = "{folder}/server.pem"\ntls-key = "{folder}/server.key"\n'
    )
    off = [part for name in ("sspq", "phpmq", "rq") for part in (f"--{name}", "off")]
    process = BrokerProcess(folder, "--config", str(config), *off, "--http", "localhost:0").start()
    yield Doors(process, folder)
    assert process.stop() == 0
    assert "Traceback" not in process.log()
