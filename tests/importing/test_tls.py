"""Sources behind TLS: Redis, and brokers by our own protocols, each of which asks for a certificate, too.

RabbitMQ is in `test_rabbitmq.py`, beside the server that takes long to start.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from bench.server import free_port, installed, listening
from penstock.client import HttpClient
from tests.certificates import make_authority, make_certificates
from tests.http.conftest import StartBroker
from tests.importing.conftest import Command

Fill = Callable[[str], str]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("certificates")
    make_certificates(folder)
    make_authority(folder, "other")
    return folder


@pytest.fixture(scope="module")
def redis_port(tmp_path_factory: pytest.TempPathFactory, files: Path) -> Iterator[int]:
    """Of one that takes nothing but TLS, and wants a certificate, as it does by default."""
    port = free_port()
    words = [installed("redis-server", "Debian's redis-server"), "--port", "0", "--tls-port", str(port)]
    words += [
        "--bind",
        "127.0.0.1",
        "127.0.0.2",
        "--dir",
        str(tmp_path_factory.mktemp("redis")),
        "--save",
        "",
    ]
    words += ["--tls-cert-file", f"{files}/server.pem", "--tls-key-file", f"{files}/server.key"]
    words += ["--tls-ca-cert-file", f"{files}/ca.pem", "--logfile", "redis.log"]
    server = listening("Redis, TLS", words, {"redis": port})
    yield port
    server.kill()


@pytest.fixture
def fill(start_broker: StartBroker, files: Path, redis_port: int) -> Fill:
    """Puts a message into the source of some kind; its URL, without what may follow the ?."""

    def fill(kind: str) -> str:
        if kind == "redis":
            import redis

            keys: dict[str, Any] = {"ssl_keyfile": f"{files}/client.key"}
            keys |= {"ssl_certfile": f"{files}/client.pem", "ssl_ca_certs": f"{files}/ca.pem"}
            with redis.Redis(port=redis_port, ssl=True, **keys) as client:
                client.delete("jobs")
                client.lpush("jobs", "one")
            return f"rediss://127.0.0.1:{redis_port}/0/jobs"
        config = (
            f'[[listener]]\nprotocol = "{kind}"\naddress = "127.0.0.1:0"\n'
            f'tls-certificate = "{files}/server.pem"\ntls-key = "{files}/server.key"\n'
            f'tls-client-ca = "{files}/ca.pem"\n'
        )
        there = start_broker(f"--{kind}", "off", config=config, folder=kind)
        with HttpClient(f"http://127.0.0.1:{there.ports['http']}") as mq:
            mq.send("default" if kind == "sspq" else "jobs", b"one")
        return f"{kind}s://127.0.0.1:{there.ports[kind]}" + "/jobs" * (kind != "sspq")

    return fill


@pytest.mark.parametrize("kind", ["redis", "sspq", "phpmq", "rq"])
def test_behind_tls(
    kind: str, fill: Fill, files: Path, command: Command, stored: Callable[[str], list[bytes]]
) -> None:
    url, queue = fill(kind), f"from-{kind}"
    trust = f"cafile={files}/ca.pem"
    for options, (exit_code, what) in {
        "": (1, "certificate verify failed"),
        f"?cafile={files}/other.pem": (1, "say who signs its certificate: ?cafile=FILE"),
        f"?cafile={files}/none.pem": (2, "cannot be used"),
        f"?{trust}&certfile={files}/client.key": (2, "cannot be used"),
    }.items():
        code, out, err = command(f"{url}{options}", queue)
        assert (code, out) == (exit_code, ""), err
        assert what in err.splitlines()[-1]
        assert "Traceback" not in err
    mine = f"{trust}&certfile={files}/client.pem&keyfile={files}/client.key"
    code, out, err = command(f"{url}?{mine}", queue)
    assert (code, err) == (0, ""), err
    assert stored(queue) == [b"one"]


def test_a_certificate_for_another_name_is_refused(fill: Fill, files: Path, command: Command) -> None:
    mine = f"cafile={files}/ca.pem&certfile={files}/client.pem&keyfile={files}/client.key"
    code, _, err = command(f"{fill('redis').replace('127.0.0.1', '127.0.0.2')}?{mine}")
    assert (code, "not valid for '127.0.0.2'" in err) == (1, True), err


def test_beanstalkd_has_no_tls(command: Command) -> None:
    code, _, err = command("beanstalks://127.0.0.1:1/jobs")
    assert (code, "use beanstalk://HOST:PORT/TUBE" in err) == (2, True), err
