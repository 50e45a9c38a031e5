"""URLs: which protocol, which addresses, with TLS or without.

    phpmq://127.0.0.1:9100             TCP; without a port, the protocol's own
    rq://a:13700,b:13700,c             several, in order of preference; each may have its scheme: rq://a,rq://b
    phpmqs://broker.example            TLS
    phpmq+unix:///run/penstock.sock    a Unix socket
    http://127.0.0.1:9180              the HTTP API, likewise; https:// with TLS

Nothing is opened or looked up here. How it fails: `NotSupported`, which says what would be right.
"""

from dataclasses import dataclass
from typing import Final
from urllib.parse import unquote

from penstock.client.errors import NotSupported
from penstock.common.address import Address, AddressError, TcpAddress, UnixAddress, parse_address

PORTS: Final = {"phpmq": 9100, "sspq": 8888, "rq": 13700, "http": 9180}

_FORMS: Final = ", ".join(f"{protocol}://HOST:PORT" for protocol in PORTS)


@dataclass(frozen=True, slots=True)
class Target:
    """Where a client connects to: at least one address, in the order in which to try them."""

    protocol: str
    addresses: tuple[Address, ...]
    tls: bool

    def __str__(self) -> str:
        return f"{self.protocol} {', '.join(map(str, self.addresses))}"


def parse_url(url: str, protocol: str) -> Target:
    """What a URL stands for, to a client of one protocol."""
    target = target_of(url)
    if target.protocol != protocol:
        raise NotSupported(f"{url!r} is no URL for a {protocol} client; use {protocol}://HOST:PORT")
    return target


def target_of(url: str) -> Target:
    """What a URL stands for."""
    scheme, mark, rest = url.partition("://")
    # What stands before the sign may be a password.
    shown = f"…@{url.rpartition('@')[2]}" if "@" in url else url
    if not mark:
        raise NotSupported(f"{shown!r} is no URL; use {_FORMS}")
    base = scheme.removesuffix("+unix")
    if base in PORTS and base != scheme:
        return Target(base, (_unix(url, rest),), tls=False)
    protocol, tls = (scheme, False) if scheme in PORTS else (scheme.removesuffix("s"), True)
    if protocol not in PORTS:
        raise NotSupported(f"{shown!r}: there is no scheme {scheme!r}; use {_FORMS}")
    if "@" in rest:
        raise NotSupported(f"{scheme} URLs have no user and no password; use {scheme}://HOST:PORT")
    hosts = [text.strip().removeprefix(f"{scheme}://").removesuffix("/") for text in rest.split(",")]
    if any("://" in text for text in hosts):
        raise NotSupported(f"{url!r}: several addresses have one scheme; use {scheme}://HOST:PORT for all")
    if any(sign in text for text in hosts for sign in "/?#"):
        raise NotSupported(f"{url!r}: nothing can follow the addresses; use {scheme}://HOST:PORT")
    addresses = (_tcp(url, text, PORTS[protocol]) for text in hosts)
    return Target(protocol, tuple(dict.fromkeys(addresses)), tls)


def _tcp(url: str, text: str, port_default: int) -> TcpAddress:
    if not text:
        raise NotSupported(f"{url!r}: a host is missing; use {_FORMS}")
    has_port = ":" in text.rpartition("]")[2]  # the brackets of an IPv6 address hold colons, too
    try:
        address = parse_address(text if has_port else f"{text}:{port_default}")
    except AddressError as error:
        raise NotSupported(f"{url!r}: {error.problem}") from None
    if isinstance(address, UnixAddress):
        raise NotSupported(f"{url!r}: a Unix socket is written as SCHEME+unix:///PATH")
    if not address.port:
        raise NotSupported(f"{url!r}: nobody can be reached at port 0; name the real one")
    return address


def _unix(url: str, rest: str) -> UnixAddress:
    if not rest.startswith("/"):
        raise NotSupported(
            f"{url!r}: a Unix socket needs an absolute path, as in phpmq+unix:///run/penstock.sock"
        )
    try:
        address = parse_address(f"unix:{unquote(rest)}")
    except AddressError as error:
        raise NotSupported(f"{url!r}: {error.problem}") from None
    assert isinstance(address, UnixAddress)
    return address
