"""The settings of a cluster: URLs, passwords that are never shown, what belongs together, what to know."""

from pathlib import Path

import pytest

from penstock.common.address import TcpAddress
from penstock.server.settings import ClusterSettings
from penstock.server.settings_cluster import warnings
from penstock.server.settings_read import reloadable_difference
from tests.server.settings_source import Source


@pytest.fixture
def read(tmp_path: Path) -> Source:
    return Source(tmp_path)


def test_without_nats_there_is_nothing_to_say(read: Source) -> None:
    settings = read()
    assert (settings.engine, settings.allow_unsafe_sync, settings.cluster) == (
        "log",
        False,
        ClusterSettings(),
    )
    assert warnings(settings) == []


@pytest.mark.parametrize(
    ("text", "urls"),
    [
        ("nats://a", ("nats://a",)),
        ("nats://a:4222, b:4223", ("nats://a:4222", "nats://b:4223")),
        ("tls://a,b", ("tls://a", "tls://b")),
        ("nats://me:secret@a,b", ("nats://me:secret@a", "nats://b")),
        ("nats://[::1]:4222", ("nats://[::1]:4222",)),
    ],
)
def test_an_engine_is_a_list_of_servers(read: Source, text: str, urls: tuple[str, ...]) -> None:
    assert read(file=f'engine = "{text}"').engine == urls
    assert read(PENSTOCK_ENGINE=text).engine == urls


def test_everything_that_can_be_said(read: Source) -> None:
    file = """
        engine = "tls://a:4222,b:4222,c:4222"
        allow-unsafe-sync = true
        [cluster]
        name = "eu-1"
        id = "front-1"
        listen = "0.0.0.0:7400"
        advertise = "10.0.0.1:7400"
        replicas = 5
        credentials = "a.creds"
        tls-ca = "ca.pem"
        tls-certificate = "c.pem"
        tls-key = "k.pem"
        relay-certificate = "r.pem"
        relay-key = "r.key"
        relay-ca = "rca.pem"
        monitor = "http://a:8222, https://b:8222/"
    """
    settings = read(file=file)
    assert settings.allow_unsafe_sync is True
    assert settings.cluster == ClusterSettings(
        name="eu-1",
        id="front-1",
        listen=TcpAddress("0.0.0.0", 7400),
        advertise=TcpAddress("10.0.0.1", 7400),
        replicas=5,
        credentials="a.creds",
        tls_ca="ca.pem",
        tls_certificate="c.pem",
        tls_key="k.pem",
        relay_certificate="r.pem",
        relay_key="r.key",
        relay_ca="rca.pem",
        monitor=("http://a:8222", "https://b:8222"),
    )


def test_a_switch_can_stand_alone(read: Source) -> None:
    assert read("--allow-unsafe-sync").allow_unsafe_sync is True
    assert read("--allow-unsafe-sync --data x").allow_unsafe_sync is True
    assert read("--allow-unsafe-sync false", PENSTOCK_ALLOW_UNSAFE_SYNC="true").allow_unsafe_sync is False


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (
            "--engine nats://",
            "--engine = 'nats://': NATS server 'nats://': is no address; write nats://HOST:PORT",
        ),
        (
            "--engine nats://a:b",
            "--engine = 'nats://a:b': NATS server 'nats://a:b': Port could not be cast to integer value"
            " as 'b'; write nats://HOST:PORT",
        ),
        (
            "--engine nats://a,http://b",
            "--engine = 'nats://a,http://b': NATS server 'http://b': is no address; write nats://HOST:PORT",
        ),
        (
            "--engine nats://a,",
            "--engine = 'nats://a,': NATS server '': is no address; write nats://HOST:PORT",
        ),
        (
            "--engine http://a:4222",
            "--engine = 'http://a:4222': use log, or nats://HOST:PORT,HOST:PORT,… (tls:// for TLS)",
        ),
        ("--allow-unsafe-sync yes", "--allow-unsafe-sync = 'yes': use true or false"),
        ("--cluster-replicas 0", "--cluster-replicas = 0: use a whole number from 1 to 5"),
        ("--cluster-replicas 6", "--cluster-replicas = 6: use a whole number from 1 to 5"),
        ("--cluster-name a.b", "--cluster-name = 'a.b': use 1 to 32 small letters, digits and hyphens"),
        ("--cluster-name A", "--cluster-name = 'A': use 1 to 32 small letters, digits and hyphens"),
        ("--cluster-id 'a b'", "--cluster-id = 'a b': use 1 to 64 letters, digits and any of _ -"),
        ("--cluster-listen unix:/a", "--cluster-listen = 'unix:/a': use HOST:PORT or [IPV6]:PORT"),
        (
            "--cluster-listen 7400",
            "--cluster-listen = '7400': there is no port; use HOST:PORT or [IPV6]:PORT",
        ),
        (
            "--cluster-advertise 0.0.0.0:7400",
            "--cluster-advertise = '0.0.0.0:7400': nobody can connect to that; use the HOST:PORT that other"
            " front-ends reach",
        ),
        (
            "--cluster-advertise a:0",
            "--cluster-advertise = 'a:0': nobody can connect to that; use the HOST:PORT that other"
            " front-ends reach",
        ),
        (
            "--cluster-monitor a:8222",
            "--cluster-monitor = 'a:8222': use http://HOST:PORT, of several with commas between them",
        ),
        (
            "--engine nats://a --cluster-listen 0.0.0.0:7400",
            "--cluster-listen: 0.0.0.0:7400 does not say where other front-ends reach this one;"
            " set advertise under [cluster] to a HOST:PORT that they can",
        ),
        (
            "--engine nats://a --cluster-listen 127.0.0.1:9100",
            "--cluster-listen: 127.0.0.1:9100 clashes with 127.0.0.1:9100 of phpmq (default);"
            " use another address, or turn phpmq off",
        ),
        (
            "--engine nats://a --cluster-tls-key k",
            "--cluster-tls-key: it needs tls-certificate beside it; add that",
        ),
        (
            "--engine nats://a --cluster-relay-key k.pem",
            "--cluster-relay-key: it needs relay-certificate and relay-ca beside it; add that",
        ),
    ],
)
def test_wrong_flags(read: Source, words: str, line: str) -> None:
    assert read.error(words) == f"command line: {line}"


def test_a_wrong_value_of_the_file_is_told_with_its_line(read: Source) -> None:
    assert read.error(file='[cluster]\nreplicas = "3"') == (
        "penstock.toml, line 2: [cluster] replicas = '3': use a whole number from 1 to 5, without quotes"
    )
    assert read.error(file='allow-unsafe-sync = "true"') == (
        "penstock.toml, line 1: allow-unsafe-sync = 'true': use true or false, without quotes"
    )
    assert read.error(file="[cluster]\nreplica = 1") == (
        "penstock.toml, line 2: [cluster] replica: there is no such setting; did you mean [cluster] replicas?"
    )


def test_a_password_is_shown_nowhere(read: Source) -> None:
    wrong = read.error("--engine nats://me:s3cret@a:port")
    assert wrong.startswith("command line: --engine: NATS server '…@a:port': ")
    settings = read("--engine nats://me:s3cret@a")
    assert "s3cret" not in wrong + repr(settings) + "".join(warnings(settings))


def test_what_should_be_known(read: Source) -> None:
    local = "--engine nats://127.0.0.1:1,nats://[::1]:2,nats://localhost:3"
    assert warnings(read(local)) == []
    (unsafe,) = warnings(read(f"{local} --allow-unsafe-sync"))
    assert unsafe.startswith("allow-unsafe-sync: nodes may not sync every write")
    (alone,) = warnings(read("--engine nats://a"))
    assert alone.startswith("[cluster] listen: 127.0.0.1:0 can be reached from this machine only")
    assert warnings(read("--engine nats://a --cluster-listen 10.0.0.1:0")) == []
    assert warnings(read("--engine nats://a --cluster-advertise broker.example:1")) == []


def test_a_cluster_needs_a_restart_to_change(read: Source) -> None:
    old = read("--engine nats://a")
    new = read("--engine nats://b --allow-unsafe-sync --cluster-name x --cluster-replicas 1")
    assert reloadable_difference(old, new).others == [
        "engine",
        "allow-unsafe-sync",
        "[cluster] name",
        "[cluster] replicas",
    ]
