"""URLs and options: what they mean, what is refused, and what is imported when."""

import subprocess
import sys
from typing import Any

import pytest

import penstock
from penstock import aconnect, client, connect
from penstock.client import NotSupported
from penstock.client.options import Options, tls_context
from penstock.client.url import Target, parse_url, target_of
from penstock.common.address import TcpAddress, UnixAddress


@pytest.mark.parametrize(
    ("url", "target"),
    [
        ("phpmq://127.0.0.1:9101", Target("phpmq", (TcpAddress("127.0.0.1", 9101),), tls=False)),
        ("phpmq://127.0.0.1:9101/", Target("phpmq", (TcpAddress("127.0.0.1", 9101),), tls=False)),
        ("phpmq://broker", Target("phpmq", (TcpAddress("broker", 9100),), tls=False)),
        ("sspq://broker", Target("sspq", (TcpAddress("broker", 8888),), tls=False)),
        ("rq://a,b:1", Target("rq", (TcpAddress("a", 13700), TcpAddress("b", 1)), tls=False)),
        ("rq://a, rq://b:1/", Target("rq", (TcpAddress("a", 13700), TcpAddress("b", 1)), tls=False)),
        (
            "https://a/,https://[::1]:2",
            Target("http", (TcpAddress("a", 9180), TcpAddress("::1", 2)), tls=True),
        ),
        ("rq://[::1]", Target("rq", (TcpAddress("::1", 13700),), tls=False)),
        ("rq://[::1]:2", Target("rq", (TcpAddress("::1", 2),), tls=False)),
        ("rq://a,a:13700", Target("rq", (TcpAddress("a", 13700),), tls=False)),
        ("rqs://a", Target("rq", (TcpAddress("a", 13700),), tls=True)),
        ("sspqs://a:1", Target("sspq", (TcpAddress("a", 1),), tls=True)),
        ("http://127.0.0.1", Target("http", (TcpAddress("127.0.0.1", 9180),), tls=False)),
        ("http://127.0.0.1:1/", Target("http", (TcpAddress("127.0.0.1", 1),), tls=False)),
        ("https://broker", Target("http", (TcpAddress("broker", 9180),), tls=True)),
        ("http+unix:///run/a.sock", Target("http", (UnixAddress("/run/a.sock"),), tls=False)),
        ("phpmq+unix:///run/a.sock", Target("phpmq", (UnixAddress("/run/a.sock"),), tls=False)),
        ("rq+unix:///run/%61.sock", Target("rq", (UnixAddress("/run/a.sock"),), tls=False)),
    ],
)
def test_what_a_url_means(url: str, target: Target) -> None:
    assert target_of(url) == target


def test_a_target_can_be_read() -> None:
    assert str(target_of("rq://a,b:1")) == "rq a:13700, b:1"


@pytest.mark.parametrize(
    ("url", "complaint"),
    [
        ("127.0.0.1:9100", "is no URL; use phpmq://HOST:PORT"),
        ("httpss://a", "there is no scheme 'httpss'"),
        ("http://a/v1", "nothing can follow the addresses; use http://HOST:PORT"),
        ("http://a,https://b", "several addresses have one scheme; use http://HOST:PORT for all"),
        ("http://a,http://b/v1", "nothing can follow the addresses"),
        ("http://user:pass@a", "http URLs have no user and no password"),
        ("amqp://a", "there is no scheme 'amqp'; use phpmq://"),
        ("phpmqs+unix:///a", "there is no scheme 'phpmqs[+]unix'"),
        ("phpmq://", "a host is missing"),
        ("rq://a,,b", "a host is missing"),
        ("phpmq://a:", "the port '' is none"),
        ("phpmq://a:0", "port 0"),
        ("phpmq://::1", "an IPv6 address needs brackets"),
        ("phpmq://::1:9100", "an IPv6 address needs brackets"),
        ("phpmq://a/queue", "nothing can follow the addresses"),
        ("phpmq://a?x=1", "nothing can follow the addresses"),
        ("phpmq://unix:/a", "nothing can follow the addresses"),
        ("phpmq+unix://run/x", "an absolute path"),
        ("phpmq+unix:///" + "x" * 200, "at most 107"),
    ],
)
def test_what_is_no_url(url: str, complaint: str) -> None:
    with pytest.raises(NotSupported, match=complaint):
        target_of(url)


@pytest.mark.parametrize(
    ("url", "complaint"),
    [
        ("phpmq://user:secret@a", "phpmq URLs have no user and no password"),
        ("penstock://:secret@a", "'…@a': there is no scheme 'penstock'"),  # Celery's
        ("secret@a", "'…@a' is no URL"),
    ],
)
def test_a_password_is_not_repeated(url: str, complaint: str) -> None:
    with pytest.raises(NotSupported, match=complaint) as raised:
        target_of(url)
    assert "secret" not in str(raised.value)


def test_a_client_takes_urls_of_its_own_protocol() -> None:
    with pytest.raises(NotSupported, match="is no URL for a phpmq client; use phpmq://HOST:PORT"):
        parse_url("rq://a", "phpmq")


@pytest.mark.parametrize("open_", [connect, aconnect])
def test_connecting_to_nothing_is_refused_before_anything_is_opened(open_: Any) -> None:
    with pytest.raises(NotSupported, match="there is no scheme 'amqp'"):
        open_("amqp://127.0.0.1:9180")
    with pytest.raises(NotSupported, match="there is no option timeout_seconds"):
        open_("phpmq://127.0.0.1:1", timeout_seconds=3)


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"connect_second": 1}, "there is no option connect_second; did you mean connect_seconds?"),
        ({"xyz": 1}, "there is no option xyz; there are connect_seconds, operation_seconds"),
        ({"connect_seconds": 0}, "connect_seconds is 0: use a number of seconds over 0$"),
        ({"operation_seconds": float("nan")}, "operation_seconds is nan"),
        ({"reconnect_seconds": -1}, "reconnect_seconds is -1: use a number of seconds over 0 or 0"),
        ({"backoff_seconds_min": 6}, "backoff_seconds_max is 5.0: use at least backoff_seconds_min, 6"),
        ({"payload_bytes_max": 0}, "payload_bytes_max is 0: use 1 to 2147483647"),
        (
            {"token": "a b"},
            "token has a character that no token has, or none: use printable ASCII without spaces$",
        ),
        ({"token": ""}, "token has a character that no token has"),
        ({"keyfile": "x"}, "keyfile needs certfile"),
        ({"ssl_context": object(), "verify": False}, "ssl_context has its own certificates"),
    ],
)
def test_options_that_cannot_be(options: dict[str, Any], complaint: str) -> None:
    with pytest.raises(NotSupported, match=complaint):
        Options.of(**options)


def test_options_have_defaults() -> None:
    assert Options.of() == Options()
    assert Options.of(connect_seconds=2, reconnect_seconds=0).connect_seconds == 2


def test_a_token_is_not_shown() -> None:
    assert "secret" not in repr(Options.of(token="secret"))
    with pytest.raises(NotSupported) as raised:
        Options.of(token="secret\n")
    assert "secret" not in str(raised.value)


def test_no_tls_without_an_s() -> None:
    assert tls_context(target_of("phpmq://a"), Options.of(cafile="/no/such/file")) is None


def test_what_is_exported_is_there() -> None:
    assert [name for name in client.__all__ if not hasattr(client, name)] == []
    assert penstock.connect is client.connect
    with pytest.raises(AttributeError, match="no attribute 'Pigeon'"):
        _ = client.Pigeon
    with pytest.raises(AttributeError, match="no attribute 'Pigeon'"):
        _ = penstock.Pigeon


@pytest.mark.parametrize(
    ("statement", "absent"),
    [
        ("import penstock", {"asyncio", "ssl", "socket", "penstock.client", "penstock.protocols"}),
        ("import penstock.client.phpmq, penstock.client.sspq", {"asyncio", "http.client"}),
        ("import penstock.client.http", {"asyncio"}),
    ],
)
def test_nothing_is_imported_that_is_not_needed(statement: str, absent: set[str]) -> None:
    program = f"import sys; {statement}; print(*sorted(sys.modules.keys() & {absent!r}))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "\n"
