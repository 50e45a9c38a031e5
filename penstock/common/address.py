"""Addresses: where a listener listens, as people write it, compare it and see it in the ready line.

Two kinds: TCP (`127.0.0.1:8888`, `[::1]:8888`, `broker.example:0`) and Unix sockets (`unix:/run/mq.sock`).
To read one opens and looks up nothing: a name stays a name, a path stays a path.

Rules that always hold:
  * `parse_address(str(address)) == address`.
  * The text of an address holds no blanks, so that the ready line can be split at them.
  * An IPv4 or IPv6 address has one spelling: two that are equal compare equal.

How it fails: `AddressError`, whose `problem` says what is wrong and what would be right.
"""

import contextlib
import errno
import ipaddress
import os
import re
import socket
import stat
from dataclasses import dataclass
from typing import Final

from penstock.errors import PenstockError

FORMS: Final = "HOST:PORT, [IPV6]:PORT or unix:PATH"

_UNIX = "unix:"
_UNIX_PATH_BYTES_MAX = 107  # Linux's sockaddr_un has room for 108, the last of which is the end
_PORT_MAX = 65_535
_HOST_NAME_MAX = 253
_HOST_LABEL = re.compile(r"(?!-)[A-Za-z0-9_-]{1,63}(?<!-)")
_DIGITS_AND_DOTS = re.compile(r"[0-9.]+")
_BLANK_OR_CONTROL = re.compile(r"[\s\x00-\x1f\x7f-\x9f\ud800-\udfff]")


class AddressError(PenstockError, ValueError):
    """A text that is no address. `problem` is the sentence without the text."""

    def __init__(self, text: str, problem: str) -> None:
        self.problem = problem
        super().__init__(f"address {text!r}: {problem}")


@dataclass(frozen=True, slots=True)
class TcpAddress:
    """A host (a name, or an IP address without brackets) and a port; 0 is any free one."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


@dataclass(frozen=True, slots=True)
class UnixAddress:
    """A Unix socket's path, relative to where the broker was started if it is not absolute."""

    path: str

    def __str__(self) -> str:
        return _UNIX + self.path


Address = TcpAddress | UnixAddress


def parse_address(text: str) -> Address:
    """The address that `text` stands for; AddressError where it is none."""
    if _BLANK_OR_CONTROL.search(text):
        raise AddressError(text, "there can be no blanks and control characters in it; leave them out")
    if text.startswith(_UNIX):
        return UnixAddress(_path_of(text, text.removeprefix(_UNIX)))
    host, colon, port = text.rpartition(":")
    if not colon or text.endswith("]"):
        raise AddressError(text, f"there is no port; use {FORMS}")
    if not host:
        raise AddressError(
            text,
            f"there is no host; use 127.0.0.1:{port} for this machine only, 0.0.0.0:{port} for every network",
        )
    # isdecimal() alone would take the digits of other scripts too; int() is kept away from absurd lengths.
    if not re.fullmatch("[0-9]{1,5}", port) or int(port) > _PORT_MAX:
        raise AddressError(
            text, f"the port {port!r} is none; use a number from 0 (any free one) to {_PORT_MAX}"
        )
    return TcpAddress(_host_of(text, host), int(port))


def _path_of(text: str, path: str) -> str:
    if not path:
        raise AddressError(text, "there is no path; use unix:PATH")
    path_bytes = len(os.fsencode(path))
    if path_bytes > _UNIX_PATH_BYTES_MAX:
        raise AddressError(
            text,
            f"the path has {path_bytes} bytes; use one of at most {_UNIX_PATH_BYTES_MAX}",
        )
    return path


def _host_of(text: str, host: str) -> str:
    if host.startswith("[") and host.endswith("]"):
        try:
            return ipaddress.IPv6Address(host[1:-1]).compressed
        except ValueError:
            raise AddressError(text, f"{host[1:-1]!r} is no IPv6 address; use {FORMS}") from None
    if re.fullmatch("[0-9A-Fa-f:.]*:[0-9A-Fa-f:.]*", host):
        raise AddressError(text, "an IPv6 address needs brackets and a port; use the form [::1]:9100")
    if _DIGITS_AND_DOTS.fullmatch(host):
        # The system's resolver would read `127.1` and `010.0.0.1` in ways that surprise.
        try:
            return ipaddress.IPv4Address(host).compressed
        except ValueError:
            raise AddressError(
                text, f"{host!r} is no IPv4 address; use four numbers, as in 127.0.0.1"
            ) from None
    labels = host.removesuffix(".").split(".")
    if len(host) > _HOST_NAME_MAX or not all(map(_HOST_LABEL.fullmatch, labels)):
        raise AddressError(text, f"{host!r} can be no host's name; use {FORMS}")
    return host


def is_loopback(address: Address) -> bool:
    """Whether nobody but this machine can reach it. Of names only `localhost` counts: none is looked up."""
    if isinstance(address, UnixAddress):
        return True
    if _family_of(address.host):
        return address.host == "::1" or address.host.startswith("127.")
    return address.host.lower().removesuffix(".") == "localhost"


def addresses_clash(one: Address, other: Address) -> bool:
    """Whether two listeners could certainly not have these two addresses at the same time.

    Names are not looked up, so that two spellings of one machine pass here and fail when they are opened.
    """
    if isinstance(one, UnixAddress) or isinstance(other, UnixAddress):
        return (
            isinstance(one, UnixAddress)
            and isinstance(other, UnixAddress)
            and os.path.normpath(one.path) == os.path.normpath(other.path)
        )
    if one.port != other.port or one.port == 0:
        return False
    if one.host.lower() == other.host.lower():
        return True
    families = _family_of(one.host), _family_of(other.host)
    # An address for every network takes the port on each of its own family, and on that one only.
    return families[0] == families[1] != 0 and not {one.host, other.host}.isdisjoint(("0.0.0.0", "::"))


def _family_of(host: str) -> int:
    """4 or 6; 0 for a name."""
    if ":" in host:
        return 6
    return 4 if _DIGITS_AND_DOTS.fullmatch(host) else 0


def bind_unix(path: str, mode: int) -> socket.socket:
    """A socket with that path and mode. What a killed broker has left there goes, and nothing else does.

    As long as somebody listens on it the path is theirs; so whoever has it from here removes it before it
    closes the socket, not after.
    """
    ours = socket.socket(socket.AF_UNIX)
    try:
        with contextlib.suppress(FileNotFoundError):
            _remove_stale_socket(path)
        os.fchmod(ours.fileno(), mode)  # Linux makes the path with it, so that it is never open to more.
        ours.bind(path)
        if stat.S_IMODE(os.lstat(path).st_mode) != mode:
            os.chmod(path, mode)
    except BaseException:
        ours.close()
        raise
    return ours


def _remove_stale_socket(path: str) -> None:
    if not stat.S_ISSOCK(os.lstat(path).st_mode):
        what = "there is something at this path that is no socket; name another, or take it away"
        raise FileExistsError(errno.EEXIST, what)
    with socket.socket(socket.AF_UNIX) as probe:
        try:
            probe.connect(path)
        except ConnectionRefusedError:
            os.unlink(path)
        except OSError:
            return
